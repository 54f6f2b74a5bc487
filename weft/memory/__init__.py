"""Where tensors wait while nobody computes with them."""
