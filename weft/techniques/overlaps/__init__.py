"""Kinds of overlap, which let one part of a pass compute while another's tokens travel; ``layout.overlap`` names them.

Their interface is :class:`weft.models.token_parts.Overlap`.
"""
