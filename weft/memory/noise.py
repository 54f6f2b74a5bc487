"""Noise as a function of seed and logical position: every rank draws its part of the same tensor, on any device."""

import math

import torch

T = torch.Tensor


def random_bits(positions: T, seed: int) -> T:
    """Return 32 random bits for each element number in ``positions`` (int64), as int64 of the same shape.

    The bits are a function of position and ``seed`` alone. The generator is counter-based: two rounds of murmur3's
    mixer.
    """
    mask = 0xFFFFFFFF
    x = (positions ^ positions >> 32) & mask
    for constant in (seed & mask, (seed >> 32 ^ 0x9E3779B9) & mask):
        x.bitwise_xor_(constant)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x.bitwise_xor_(x >> shift).mul_(factor).bitwise_and_(mask)
        x.bitwise_xor_(x >> 16)
    return x


def normal(positions: T, seed: int, dtype: torch.dtype) -> T:
    """Return a random value from the standard normal distribution for each element number (Box and Muller 1958).

    ``positions``: the element numbers, int64. The values are a function of position and ``seed`` alone. They are
    computed in at least float32, and rounded to ``dtype``.
    """
    wide = torch.promote_types(dtype, torch.float32)
    radius, angle = (
        random_bits(positions * 2 + i, seed).to(wide).add_(0.5).div_(2**32)
        for i in (0, 1)
    )
    return radius.log_().mul_(-2).sqrt_().mul_(angle.mul_(2 * math.pi).cos_()).to(dtype)
