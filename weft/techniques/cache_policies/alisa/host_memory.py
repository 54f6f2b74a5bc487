"""Keys, values and sums of attention weights of blocks that have moved from the cache to the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from weft.models.paged import untouched_zeros

T = torch.Tensor

#: The largest number in 8 bits.
BYTE = 127

#: Blocks for which there is room at first.
ROOM = 64


class HostTokens(NamedTuple):
    """Tensors with a row for each block on the host. ``kept``: keys and values, ``[2, blocks, size, kv_heads, width]``.
    ``scales``: factors of rounded keys and values, ``[2, blocks, size, kv_heads, 1]``; None if they are not rounded.
    ``sums``: running sums of the attention weights that tokens have got, ``[2, blocks, size, kv_heads]``.
    """

    kept: T
    scales: T | None
    sums: T


def rounded(x: T) -> tuple[T, T]:
    """Round the vectors of ``x`` ``[..., width]`` to 8 bits. Return the rounded values, and the factor of each vector
    by which they are multiplied to get ``x`` back, ``[..., 1]``.
    """
    scales = x.abs().amax(-1, keepdim=True).float() / BYTE
    return (x.float() / scales.clamp(min=1e-30)).round().to(torch.int8), scales


class HostMemory:
    """Blocks of texts on the host. The block ``n`` there is the negative number ``-1 - n`` in its text's table, and
    so it is named here. ``in_bytes``: whether keys and values are kept in 8 bits.
    """

    def __init__(self, in_bytes: bool) -> None:
        self.in_bytes = in_bytes
        self.tokens: HostTokens | None = None

    def put(self, numbers: Sequence[int], moved: T, sums: T) -> None:
        """Keep blocks under their negative ``numbers``. ``moved``: keys and values, ``[2, blocks, size, kv_heads,
        width]``; ``sums``: their sums, ``[2, blocks, size, kv_heads]``.
        """
        at = [-1 - number for number in numbers]
        host = self._room(max(at) + 1, moved, sums)
        if host.scales is not None:
            values, scales = rounded(moved)
            host.kept[:, at], host.scales[:, at] = values.cpu(), scales.cpu()
        else:
            host.kept[:, at] = moved.cpu()
        host.sums[:, at] = sums.cpu()

    def sums(self, blocks: T) -> T:
        """Return the sums of whole ``blocks`` until the present block of queries: ``[blocks, size, kv_heads]``."""
        assert self.tokens is not None
        return self.tokens.sums[0, (-1 - blocks).cpu()]

    def read(self, parts: int, blocks: T, places: T, heads: T, like: T) -> T:
        """Return single tokens of single heads, on the device of ``like`` and of its type: ``[parts, tokens, width]``.

        ``parts``: 2 for keys and values, 1 for keys. ``blocks``, ``places``, ``heads``: block, place in it and head of
        each token.
        """
        assert self.tokens is not None
        at = (-1 - blocks).cpu(), places.cpu(), heads.cpu()
        kept = self.tokens.kept[:parts, *at].to(like.dtype)
        if self.tokens.scales is not None:
            kept = kept * self.tokens.scales[:parts, *at].to(like.dtype)
        return kept.to(like.device)

    def add(self, blocks: T, places: T, heads: T, weights: T) -> None:
        """Add attention weights of single tokens to the sums of the present block of queries."""
        assert self.tokens is not None
        sums = self.tokens.sums[1]
        at = (-1 - blocks).cpu(), places.cpu(), heads.cpu()
        sums.index_put_(at, weights.to(sums.dtype).cpu(), accumulate=True)

    def _room(self, blocks: int, store: T, sums: T) -> HostTokens:
        """Return the memory, enlarged if it has fewer than ``blocks`` blocks."""
        before = self.tokens
        if before is not None and before.kept.shape[1] >= blocks:
            return before
        count = max(blocks, 2 * before.kept.shape[1] if before else ROOM)
        like = torch.empty(0, dtype=torch.int8 if self.in_bytes else store.dtype)
        shape = 2, count, *store.shape[2:]
        scales = untouched_zeros(torch.empty(0), (*shape[:-1], 1)) if self.in_bytes else None  # fmt: skip
        summed = untouched_zeros(torch.empty(0, dtype=sums.dtype), shape[:-1])
        self.tokens = HostTokens(untouched_zeros(like, shape), scales, summed)
        for new, old in zip(self.tokens, before or (), strict=False):
            if new is not None and old is not None:
                new[:, : old.shape[1]] = old
        return self.tokens
