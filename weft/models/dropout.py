"""Dropout whose random numbers depend only on the sample, the position in it, the weight and the channel.

A mask is a function of these alone (Salmon et al. 2011, counters in place of a state). Every layout therefore draws the
same mask, whichever rank has a token or a range of its channels, and recomputation draws the first pass's mask again.
"""

import zlib

import torch

from weft.layout.boundary import own_tokens
from weft.layout.mesh import Mesh
from weft.models.drawing import current_draws

T = torch.Tensor

#: The finalizer of SplitMix64 (Steele et al. 2014) and its step, as int64; products wrap around.
STEP, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
#: Random numbers have this many bits, as many as a float32 has for a fraction.
BITS = 24


def token_draws(seed: int, sample: int, tokens: int) -> T:
    """Return pseudorandom bits from which the dropout of each token of a sample is derived: int64 ``[tokens]``.

    ``seed``: seed of all draws of the run; ``sample``: index of the sample in the data; ``tokens``: number of tokens of
    the sample.
    """
    high = sample << 32 & (1 << 64) - 1  # wrapped around, as the products are
    place = torch.arange(tokens) + (high - (1 << 64) if high >> 63 else high)
    return mixed_bits(mixed_bits(torch.tensor(seed) * STEP) + place * STEP)


def dropped(x: T, share: float, draws: T, name: str, first: int) -> T:
    """Apply dropout to ``x`` ``[batch, seq, channels]``: set a fraction ``share`` of its elements to zero, and scale up
    the rest. Which elements are zero does not depend on the layout.

    ``draws``: random bits of each token, ``[batch, seq]``; ``name``: name of the weight that is multiplied with ``x``;
    weights with different names get different zeros. ``x`` may be a part of the weight's input; ``first`` is then the
    index, in the whole input, of its first channel.
    """
    channels = (torch.arange(first, first + x.shape[-1], device=x.device) + 1) * STEP
    numbers = mixed_bits(
        draws[..., None] + channels ^ zlib.crc32(name.encode()) * STEP % (1 << 62)
    )
    gone = (numbers & ((1 << BITS) - 1)) < int(share * (1 << BITS))
    return x.masked_fill(gone, 0) * (1 / (1 - share))


def dropped_part(x: T, share: float, name: str, mesh: Mesh) -> T:
    """Apply dropout to what a part of the model adds to the residual stream, or to the embedding.

    A share of the elements is set to zero, and the rest is scaled up, while the tokens have random bits
    (:func:`weft.models.drawing.drawing`). Elsewhere ``x`` is returned unchanged.

    ``x``: ``[batch, seq, embed]``, or this rank's tokens of it, ``[batch, seq/tp, embed]``; ``share``: share of
    elements that become zero; ``name``: name of the part; parts with different names get different zeros.
    """
    draws = current_draws()
    if draws is None:
        return x
    if draws.shape[1] != x.shape[1]:
        draws = own_tokens(draws, mesh)  # [batch, seq/tp]
    return dropped(x, share, draws, name, 0)


def mixed_bits(x: T) -> T:
    """Return pseudorandom bits made from the bits of ``x``, int64, by the finalizer of SplitMix64."""
    for shift, factor in ((30, FIRST), (27, SECOND)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return x ^ (x >> 31 & (1 << 33) - 1)
