"""Building blocks of compressors' payloads: scales of blocks, positions, and packed numbers of few bits."""

import torch
import torch.nn.functional as F

from weft.errors import WeftError
from weft.sync.compressor import BLOCK, Spec

T = torch.Tensor


def in_blocks(x: T) -> T:
    """Reshape ``x`` to ``[blocks, 128]``, with zeros after its last element."""
    return F.pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)


def scale_blocks(values: T, scales: T) -> T:
    """Multiply each of the ``values [n]`` by the scale of its block of 128 values.

    ``scales``: one per block, ``[blocks]``.
    """
    return values * scales.to(values.dtype).repeat_interleave(BLOCK)[: values.numel()]


def rounded_up(x: T) -> T:
    """Round the non-negative tensor ``x`` up to bfloat16, so that no element becomes smaller."""
    near = x.bfloat16()
    return torch.where(
        near.to(x.dtype) < x,
        torch.nextafter(near, torch.full_like(near, torch.inf)),
        near,
    )


def divisor(scales: T, dtype: torch.dtype) -> T:
    """Return the ``scales`` of blocks in type ``dtype``, with 0 replaced by 1, so that values can be divided by
    them.

    All values of a block with scale 0 are 0, and any divisor leaves them unchanged.
    """
    return torch.where(scales == 0, 1.0, scales.to(dtype))


def largest(flat: T, count: int) -> T:
    """Return the indices in ``flat`` of the ``count`` elements with the largest magnitudes, in ascending order."""
    return flat.abs().topk(count, sorted=False).indices.sort().values


def shared_permutation(count: int, seed: int) -> T:
    """Return a random permutation ``[count]`` that follows from ``seed`` alone, on every device and machine."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def positions_spec(kept: int, count: int) -> Spec:
    bitmap = -(-count // 8)
    return ((kept,), torch.int32) if kept * 4 < bitmap else ((bitmap,), torch.uint8)


def positions_sent(kept: T, count: int) -> T:
    """Encode ``kept``, ascending indices of elements among ``count``, for a payload.

    The result is a bitmap or a list of 32-bit integers, whichever is smaller (:func:`positions_spec`).
    """
    (_, dtype) = positions_spec(kept.numel(), count)
    if dtype == torch.int32:
        return kept.int()
    return bits_packed(
        torch.zeros(count, dtype=torch.bool, device=kept.device).index_fill_(
            0, kept, True
        )
    )


def positions_found(sent: T, kept: int, count: int) -> T:
    """Decode the message ``sent`` of :func:`positions_sent`, and return the indices of the elements, ascending.

    ``kept``: number of indices; ``count``: number of elements among which they are. Raises :class:`WeftError` if the
    message holds another number of indices, or an index that is not below ``count``.
    """
    indices = (
        sent.long()
        if sent.dtype == torch.int32
        else bits_unpacked(sent, count).nonzero().flatten()
    )
    if indices.numel() != kept or (
        kept and not bool(((indices >= 0) & (indices < count)).all())
    ):
        raise WeftError(
            f"a compressed tensor names positions that are not {kept} among {count}"
        )
    return indices


def codes_packed(codes: T, bits: int) -> T:
    """Pack the integers ``codes [n]``, of ``bits`` bits each (fewer than 8), into bytes without gaps."""
    eights = F.pad(codes.to(torch.int64), (0, -codes.numel() % 8)).view(-1, 8)
    # [n / 8], 8 x bits of 64 are used
    words = (eights << torch.arange(0, 8 * bits, bits, device=codes.device)).sum(1)
    return (
        words.view(torch.uint8)
        .view(-1, 8)[:, :bits]
        .flatten()[: -(-codes.numel() * bits // 8)]
        .contiguous()
    )


def codes_unpacked(sent: T, bits: int, count: int) -> T:
    """Unpack the first ``count`` integers of ``bits`` bits from the bytes of :func:`codes_packed`, as int8.

    ``sent``: these bytes, uint8.
    """
    groups = F.pad(sent, (0, -sent.numel() % bits)).view(-1, bits)
    words = F.pad(groups, (0, 8 - bits)).contiguous().view(torch.int64)  # [n / 8, 1]
    codes = words >> torch.arange(0, 8 * bits, bits, device=sent.device) & (2**bits - 1)
    return codes.flatten()[:count].to(torch.int8)


def bits_packed(bits: T) -> T:
    """Pack the booleans ``bits`` ``[n]`` into bytes, eight to a byte, the first in the lowest bit."""
    eights = F.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    return (eights << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(
        1, dtype=torch.uint8
    )


def bits_unpacked(sent: T, count: int) -> T:
    """Unpack the first ``count`` booleans from the bytes of :func:`bits_packed`.

    ``sent``: these bytes, uint8.
    """
    return (
        (sent[:, None] >> torch.arange(8, dtype=torch.uint8, device=sent.device) & 1)
        .flatten()[:count]
        .bool()
    )
