"""Compressors of what islands send (:class:`weft.sync.compressor.Compressor`); ``sync.compress`` names them."""
