"""Samples from diffusion models, on one device or over several ranks."""
