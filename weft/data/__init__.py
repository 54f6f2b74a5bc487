"""Corpora, tokenizers, packing and an order that is a pure function of seed and global sample index."""
