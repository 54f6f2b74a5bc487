"""Compressors (:class:`weft.sync.compressor.Compressor`), which ``sync.compress`` names."""
