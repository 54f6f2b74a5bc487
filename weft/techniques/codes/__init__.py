"""Gradient codes (:class:`weft.sync.coded.Code`), which ``resilience.code`` names."""
