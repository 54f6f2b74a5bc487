"""Curation: what documents to keep, which of them are alike, how good they are, and how often to read them."""
