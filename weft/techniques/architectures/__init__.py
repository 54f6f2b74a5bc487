"""Models of Weft's own other than the decoder of tokens, which ``model.kind`` names."""
