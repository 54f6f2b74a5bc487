"""Keys of whole cache blocks in two bits, by which a query finds nearly the keys that get most weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.models.numbers import wide

T = torch.Tensor

#: Bits of a code, codes of a byte, and the largest code.
CODE, PACKED, LARGEST = 2, 4, 3

#: Bits of an element's range in a block: its lowest value as bfloat16, and a step in 8 bits.
RANGE = 16 + 8

#: The smallest and the largest step that 8 bits hold.
STEPS = 2.0**-14, 2.0**15


def code_bits(size: int) -> float:
    """Return how many bits an element of a key takes in a block of ``size`` tokens, with its part of the range."""
    return (8 * -(-size // PACKED) + RANGE) / size


class KeyCodes:
    """Keys of whole cache blocks in codes of two bits. Each element has its own range in each block: an element's
    values lie close together in a block, and elsewhere for another element (KIVI, 2402.02750). Codes of one element
    follow each other, so that few elements of all keys can be read. ``size``: tokens of a block.

    The attributes have a row for each block: ``codes``, of four tokens in a byte, ``[blocks, kv_heads, width, bytes]``;
    ``lowest``, the value of code 0, and ``steps``, what a code adds, both ``[blocks, kv_heads, width]``.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.codes = torch.empty(0, dtype=torch.uint8)
        self.lowest = torch.empty(0, dtype=torch.bfloat16)
        self.steps = torch.empty(0, dtype=torch.float8_e5m2)

    def write(self, blocks: T, keys: T, rows: int) -> None:
        """Set the codes of ``blocks`` to those of ``keys``, ``[blocks, size, kv_heads, width]``. ``rows``: blocks for
        which there is to be room.
        """
        values = keys.permute(0, 2, 3, 1).to(wide(keys.dtype))
        least, most = values.aminmax(dim=-1)
        lowest = least.to(self.lowest.dtype)
        steps = (most - lowest.to(most.dtype)) / LARGEST
        steps = steps.clamp(*STEPS).to(self.steps.dtype)
        base, step = (x.to(values.dtype)[..., None] for x in (lowest, steps))
        codes = ((values - base) / step).round().clamp(0, LARGEST).to(torch.uint8)
        missing = -self.size % PACKED
        codes = torch.nn.functional.pad(codes, (0, missing)).unflatten(-1, (-1, PACKED))
        packed = (codes << self._shifts(codes)).sum(-1, dtype=torch.uint8)
        self._put(blocks, packed, lowest, steps, rows)

    def take(
        self, blocks: Sequence[int], other: KeyCodes, theirs: Sequence[int]
    ) -> None:
        """Set the codes of ``blocks`` to those that ``other``, on another device, has of its blocks ``theirs``."""
        at = torch.tensor(theirs, device=other.codes.device)
        parts = other.codes[at], other.lowest[at], _bytes(other.steps)[at]
        codes, lowest, steps = (x.to(self.codes.device) for x in parts)
        rows = max(blocks) + 1
        rows = max(rows, 2 * len(self.codes)) if rows > len(self.codes) else rows
        places = torch.tensor(blocks, device=self.codes.device)
        self._put(places, codes, lowest, steps.view(self.steps.dtype), rows)

    def scores(self, blocks: T, queries: T, elements: T) -> T:
        """Return nearly the products of queries and keys, by some elements alone: ``[kv_heads, group, tokens]``.

        ``blocks``: blocks of the keys; ``queries``: ``[kv_heads, group, width]``; ``elements``: numbers of the elements
        that count for each head, ``[kv_heads, elements]``.
        """
        heads = torch.arange(len(elements), device=blocks.device)[:, None]
        at = blocks[:, None, None], heads, elements
        packed = self.codes[at][..., None]
        # [blocks, kv_heads, elements, size]
        codes = ((packed >> self._shifts(packed)) & LARGEST).flatten(-2)[..., : self.size]  # fmt: skip
        # [blocks, kv_heads, 1, elements]
        lowest = self.lowest[at].to(queries.dtype)[:, :, None]
        steps = _bytes(self.steps)[at].view(self.steps.dtype).to(queries.dtype)[:, :, None]  # fmt: skip
        # [kv_heads, group, elements]
        part = queries.gather(2, elements[:, None].expand(-1, queries.shape[1], -1))
        scores = (part * steps) @ codes.to(queries.dtype)
        scores = scores + (part * lowest).sum(-1, keepdim=True)
        return scores.permute(1, 2, 0, 3).flatten(2)

    def _put(self, blocks: T, codes: T, lowest: T, steps: T, rows: int) -> None:
        if len(self.codes) < rows:
            self.codes = _grown(self.codes, rows, codes)
            self.lowest = _grown(self.lowest, rows, lowest)
            self.steps = _grown(_bytes(self.steps), rows, _bytes(steps)).view(self.steps.dtype)  # fmt: skip
        self.codes[blocks], self.lowest[blocks] = codes, lowest
        _bytes(self.steps)[blocks] = _bytes(steps)

    def _shifts(self, like: T) -> T:
        return torch.arange(0, 8, CODE, device=like.device, dtype=torch.uint8)


def _bytes(steps: T) -> T:
    """Return the same memory as bytes: PyTorch does not index numbers of 8 bits on every device."""
    return steps.view(torch.uint8)


def _grown(kept: T, count: int, like: T) -> T:
    """Return ``kept`` with ``count`` rows, on the device of ``like`` and with its shape of a row."""
    grown = like.new_zeros(count, *like.shape[1:])
    if len(kept):
        grown[: len(kept)] = kept
    return grown
