"""Embedding vectors in the two forms that clients ask for: lists of numbers, or base64."""

import base64

import torch


def encoded_vector(vector: torch.Tensor, packed: bool) -> str | list[float]:
    """Return ``vector``, float32 of one dimension, as a list of numbers. With ``packed``, return it as base64 of
    little-endian float32 values instead.
    """
    return (
        base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
        if packed
        else vector.tolist()
    )
