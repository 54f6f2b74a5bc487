"""Frozen weights in four bits: NormalFloat with double quantisation (QLoRA, Dettmers et al. 2023).

64 neighbouring elements (a block) share a scale, the largest of their absolute values; 256 such scales are kept as
8-bit steps around their mean. Blocks are those of the whole weight, along the dimension that no mesh axis cuts. Each
rank therefore holds whole blocks, and computes the same values as one device.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from spmd_types import rules

from weft.layout.dims import Box, Logical
from weft.layout.mesh import Mesh
from weft.models.fused import times
from weft.models.module import Module
from weft.models.numbers import wide
from weft.shapes.parameters import BLOCK, SCALES, Table, is_turned

T = torch.Tensor

#: The values of the 16 codes: quantiles of the normal distribution, zero among them.
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class RowReader(NamedTuple):
    """Reader of rows of a weight that is to be quantised. For a weight that is quantised along its columns
    (:func:`is_turned`), the rows, their number and their width are those of its transpose.

    ``read``: function whose call ``read(lo, hi)`` returns the rows ``lo:hi``, ``[hi - lo, width]``. ``rows``: the
    number of rows. ``width``: elements of a row.
    """

    read: Callable[[int, int], T]
    rows: int
    width: int


@cache
def _pairs(dtype: torch.dtype, device: torch.device) -> T:
    """Return the two values of every byte, the high half first: ``[256, 2]``."""
    levels = torch.tensor(LEVELS, dtype=dtype, device=device)
    return torch.cartesian_prod(levels, levels)


def packed(codes: T) -> T:
    """Return codes of four bits, packed two to a byte, the first of each pair in the high half: ``[..., n] -> [..., n /
    2]``.
    """
    return codes[..., ::2] << 4 | codes[..., 1::2]


def quantized_rows(rows: T) -> tuple[T, T]:
    """Quantise the rows ``[rows, width]`` of a weight to NF4.

    Returns the codes ``[rows, width / 2]`` (uint8, two to a byte), and a scale for each 64 elements, ``[rows, width /
    64]``.
    """
    rows = rows.float().contiguous()
    # [rows, blocks, 64]
    padded = F.pad(rows, (0, -rows.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    scales = padded.abs().amax(-1)
    levels = torch.tensor(LEVELS)
    scaled = padded / scales.clamp(min=1e-38)[..., None]
    nearest = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2)
    codes = nearest.flatten(1)[:, : rows.shape[1]].to(torch.uint8)
    return packed(F.pad(codes, (0, rows.shape[1] % 2))), scales


def quantized_scales(scales: T) -> tuple[T, T]:
    """Quantise the ``n`` scales of a weight to 8 bits, in groups of 256.

    Returns the 8-bit values ``[n]``, and for each group 8 bytes ``[n / 256, 8]`` that hold the float32 mean and step
    size.
    """
    steps, about = [scales.new_empty(0, dtype=torch.uint8)], [scales.new_empty(0, 2)]
    whole = len(scales) // SCALES * SCALES
    groups = scales[:whole].view(-1, SCALES), scales[None, whole:]
    for blocks in filter(torch.numel, groups):
        mean = blocks.double().mean(1, keepdim=True).float()
        step = (blocks - mean).abs().amax(1, keepdim=True) / 127
        codes = ((blocks - mean) / step.clamp(min=1e-38)).round_().add_(128)
        steps.append(codes.to(torch.uint8).flatten())
        about.append(torch.cat((mean, step), dim=1))
    return torch.cat(steps), torch.cat(about).view(torch.uint8)


def dequantized(
    codes: T, scales: T, about: T, first: int, width: int, dtype: torch.dtype
) -> T:
    """Return consecutive rows of a quantised weight in the type ``dtype``: ``[rows, width]``.

    ``codes`` and ``scales``: the stored tensors of these rows; ``about``: mean and step size of the scales of the whole
    weight (:func:`quantized_scales`); ``first``: index in the weight of the first of these rows; ``width``: elements of
    a row.
    """
    precision = wide(dtype)
    mean, step = about.view(torch.float32).unbind(1)
    numbers = torch.arange(scales.numel(), device=scales.device)
    shared = numbers.add_(first * scales.shape[1]) // SCALES
    largest = mean[shared] + step[shared] * (scales.flatten().float() - 128)
    factors = largest.clamp_(min=0).view(scales.shape).to(precision)
    pairs = _pairs(precision, codes.device)
    values = F.embedding(codes.int(), pairs).flatten(1)[:, :width]
    return values.mul_(factors.repeat_interleave(BLOCK, dim=1)[:, :width]).to(dtype)


class Quantized(Module):
    """The quantised form of a frozen weight ``[out, in]``, as three stored tensors.

    ``codes``: four bits per element; ``scales``: eight bits for each 64 elements; ``about``: mean and step size of each
    256 scales (:func:`quantized_scales`). ``mesh``: ranks that share the model; ``table``: descriptions of the model's
    parameters; ``path``: name of this module in the model; ``whole``: whether every rank of ``tp`` holds all of the
    weight.
    """

    def __init__(self, mesh: Mesh, table: Table, path: str, whole: bool) -> None:
        super().__init__(mesh, table, path)
        out, into = table[f"{path}.codes"].weight
        self.turned = is_turned(out)
        self.width = (out if self.turned else into).size
        self.weight("codes", whole)
        self.weight("scales", whole)
        self.weight("about")
        self.first = self.logical["codes"].box[0][0]

    def dense(self, dtype: torch.dtype) -> T:
        """Return this rank's shard of the weight, dequantised to ``dtype``: ``[out, in]``."""
        return self._dense(dtype, self.first, self.codes, self.scales, self.about)

    def _dense(
        self, dtype: torch.dtype, first: int, codes: T, scales: T, about: T
    ) -> T:
        rows = dequantized(codes, scales, about, first, self.width, dtype)
        return rows.t() if self.turned else rows

    def project(self, x: T, own: Callable[[T], T], first: int) -> T:
        """Multiply ``x`` ``[batch, seq, in]`` with this rank's rows of the weight: ``[batch, seq, out]``.

        A rank may hold more rows of the weight than it computes. ``own``: function that takes a tensor with a row for
        each row held, and returns the part of the rows to compute. ``first``: index of the first row to compute among
        the rows held.
        """
        dense = partial(self._dense, x.dtype, self.first + first)
        stored = (own(self.codes), own(self.scales), self.about)
        return _QuantizedProject.apply(x, dense, *stored)


class _QuantizedProject(torch.autograd.Function):
    """The product with a weight that exists only while it is computed, forward and backward."""

    @staticmethod
    def spmd_typecheck(*, x, dense, codes, scales, about):  # type: ignore[no-untyped-def]
        return rules.einsum("bsi,oi,ob,cd->bso", x, codes, scales, about)

    @staticmethod
    def forward(ctx, x, dense, codes, scales, about):  # type: ignore[no-untyped-def]
        ctx.dense = dense
        ctx.save_for_backward(codes, scales, about)
        weight = dense(codes, scales, about)
        return times(x.flatten(0, 1), weight).unflatten(0, x.shape[:2])

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        weight = ctx.dense(*ctx.saved_tensors)
        d_x = times(grad.flatten(0, 1), weight.t()).unflatten(0, grad.shape[:2])
        return d_x, None, None, None, None


def stored_values(part: str, weight: RowReader, box: Box) -> T:
    """Return one tensor of a weight's quantised form, for the rows in ``box``.

    ``part``: which tensor, ``codes``, ``scales`` or ``about``. ``weight``: reads rows of the weight before
    quantisation.
    """
    lo, hi = box[0]
    if part == "codes":
        return quantized_rows(weight.read(lo, hi))[0]
    blocks = -(-weight.width // BLOCK)  # scales of a row
    first, last = lo, hi
    if part == "scales":
        first, last = lo * blocks // SCALES, -(-hi * blocks // SCALES)
    # scales that share a mean are quantised together
    begin, end = first * SCALES, min(last * SCALES, weight.rows * blocks)
    near = quantized_rows(weight.read(begin // blocks, -(-end // blocks)))[1].flatten()
    at = begin // blocks * blocks
    steps, about = quantized_scales(near[begin - at : end - at])
    if part == "about":
        return about
    return steps[lo * blocks - begin : hi * blocks - begin].view(hi - lo, blocks)


def row_reader(
    values: Callable[[str, Logical, Box], T], name: str, logical: Logical
) -> RowReader:
    """Return a :class:`RowReader` of the weight ``name``.

    ``values``: a function from a name, the parameter's whole tensor (``logical``) and a box to the values in this box.
    """
    out, into = logical.shape
    if not is_turned(logical.dims[0]):
        return RowReader(
            lambda lo, hi: values(name, logical, ((lo, hi), (0, into))), out, into
        )
    return RowReader(
        lambda lo, hi: values(name, logical, ((0, out), (lo, hi))).t(), into, out
    )
