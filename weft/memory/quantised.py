"""Numbers in few bits: codes of a map with one scale per block, and rounding to bfloat16 without bias.

Everything is a function of logical positions, so that numbers do not depend on how a tensor is cut.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

T = torch.Tensor


@cache
def dynamic_map(signed: bool, exponents: int, bits: int) -> T:
    """Return the values that codes of ``bits`` bits stand for, ascending: float32 ``[2**bits]``. They are denser near
    0, so that small numbers keep some precision (dynamic quantisation, Dettmers et al. 2021, "8-bit Optimizers via
    Block-wise Quantization").

    ``signed``: the values lie in [-1, 1]; otherwise in [0, 1]. ``exponents``: number of decades: the first is the range
    from 0.1 to 1, the second that from 0.01 to 0.1, and so on. Within a decade values are equally spaced. Each decade
    has twice as many values as the next smaller one.
    """
    values = [0.0, 1.0]
    fraction_bits = bits - 1 - exponents if signed else bits - exponents
    for decade in range(exponents):
        cells = 2 ** (decade + fraction_bits)
        edges = torch.linspace(0.1, 1, cells + 1, dtype=torch.float64)
        means = (
            (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade + 1 - exponents)
        ).tolist()
        values += means + [-x for x in means] * signed
    values += [0.0] * (2**bits - len(values))
    return torch.tensor(sorted(values), dtype=torch.float32)


@cache
def linear_map(bits: int) -> T:
    """Return the values that codes of ``bits`` bits stand for: float32 ``[2**bits]``, equally spaced from above 0 to 1.

    Zero is left out, because the codes are for a second moment, by which updates are divided (Li et al. 2023).
    """
    return torch.linspace(0, 1, 2**bits + 1)[1:]


@dataclass(frozen=True)
class Blocks:
    """Division of the last dimension of a logical tensor into quantisation blocks, which have one scale each.

    Blocks are counted from the beginning of the logical tensor, so that they do not depend on how it is cut over ranks.
    ``size``: elements of a block; ``length``: elements of the dimension; ``start``: index of the first element of the
    part that this rank holds.
    """

    size: int
    length: int
    start: int

    @property
    def count(self) -> int:
        """Number of blocks in the last dimension of the whole logical tensor."""
        return -(-self.length // self.size)

    def largest(self, x: T) -> T:
        """Return the largest value of each block within this rank's part ``x`` (``[..., n]``), as ``[..., count]``.

        It is 0 for blocks without a positive value in the part.
        """
        first = self.start // self.size
        before = self.start - first * self.size
        padded = F.pad(x.clamp(min=0), (before, -(before + x.size(-1)) % self.size))
        largest = (
            padded.unflatten(-1, (-1, self.size)).amax(-1)
            if padded.numel()
            else padded[..., :0]
        )
        return F.pad(largest, (first, self.count - first - largest.size(-1)))

    def spread(self, scale: T, n: int) -> T:
        """Return the scale of each of the ``n`` elements of this rank's part, as ``[..., n]``.

        ``scale``: the scale of each block, ``[..., count]``.
        """
        positions = torch.arange(self.start, self.start + n, device=scale.device)
        return scale[..., positions // self.size]


def encoded(x: T, scale: T, values: T) -> T:
    """Return, for each element of ``x``, the code (uint8) that stands for the value nearest to ``x / scale``.

    ``scale``: the scale of each element of ``x``; where the scale is 0, ``x`` must be 0, too. ``values``: for each
    code, the value that it stands for, ascending.
    """
    values = values.to(x.device, x.dtype)
    middles = (values[1:] + values[:-1]) / 2
    return torch.bucketize(x / torch.where(scale == 0, 1.0, scale), middles).to(
        torch.uint8
    )


def decoded(codes: T, scale: T, values: T) -> T:
    """Return the elements that quantisation codes stand for, as ``values[codes] * scale``.

    ``scale``: the scale of each element; ``values``: the map, the value that each code stands for.
    """
    return values.to(scale.device, scale.dtype)[codes.int()] * scale


def unpacked(pairs: T) -> T:
    """Split bytes into two codes of four bits each, the high bits first: ``[..., n / 2] -> [..., n]``.

    This is the inverse of :func:`weft.models.nf4.packed`. ``pairs``: bytes with two codes each, uint8.
    """
    return torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten(-2)


def rounded_bf16(x: T, bits: T) -> T:
    """Round ``x`` (float32) to bfloat16, randomly up or down so that the expected value is ``x``.

    ``bits``: random bits for each element of ``x``, int64.
    """
    raw = x.float().view(torch.int32).long()
    up = (raw + (bits & 0xFFFF)) & ~0xFFFF
    wrapped = torch.where(up >= 1 << 31, up - (1 << 32), up)
    rounded = wrapped.int().view(torch.float32)
    return torch.where(x.isfinite(), rounded, x.float()).to(torch.bfloat16)
