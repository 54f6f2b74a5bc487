"""Samplers: ways from noise to an image in few evaluations of a model."""
