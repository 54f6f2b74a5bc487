"""Data sets that are not texts, which ``data.kind`` names."""
