"""Checkpoints of other programs (:class:`weft.checkpoint.source_format.SourceFormat`), one file for each format."""
