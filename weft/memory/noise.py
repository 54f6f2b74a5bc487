"""Noise as a function of seed and logical position: every rank draws its part of the same tensor, on any device."""

import math

import torch

T = torch.Tensor


def hashed(positions: T, seed: int) -> T:
    """32 random bits for every position and seed, int64: a counter-based generator of two rounds of murmur3's mixer."""
    mask = 0xFFFFFFFF
    x = (positions ^ positions >> 32) & mask
    for constant in (seed & mask, (seed >> 32 ^ 0x9E3779B9) & mask):
        x = x ^ constant
        x = (x ^ x >> 16) * 0x85EBCA6B & mask
        x = (x ^ x >> 13) * 0xC2B2AE35 & mask
        x = x ^ x >> 16
    return x


def normal(positions: T, seed: int, dtype: torch.dtype) -> T:
    """Numbers of the standard normal distribution, one for every position (Box and Muller 1958)."""
    radius, angle = ((hashed(positions * 2 + i, seed).double() + 0.5) / 2**32 for i in (0, 1))
    return ((-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()).to(dtype)
