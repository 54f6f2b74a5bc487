"""Tiers of memory: where tensors rest while they are not in use."""
