"""Drafters, which guess the next tokens of a text for speculative decoding, one file each."""
