"""Builds compressors from a recipe's words, and compresses tensors with error feedback."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Self

import torch

from weft.recipe.compressor_word import compressor_of
from weft.sync.compressor import Average, Compressor, Payload, Spec

T = torch.Tensor


@dataclass(frozen=True)
class PerTensor(Compressor):
    """Compressor of a flat tensor in which several tensors lie end to end, each with a compressor of its own.

    ``pieces``: the number of elements and the compressor of each of these tensors, in order.
    """

    unbiased: bool = False
    pieces: tuple[tuple[int, Compressor], ...] = ()
    linear = False

    def specs(self, shape: Sequence[int], dtype: torch.dtype) -> list[Spec]:
        assert prod(shape) == sum(size for size, _ in self.pieces)
        return [
            spec
            for size, compressor in self.pieces
            for spec in compressor.specs((size,), dtype)
        ]

    def error(self, shape: Sequence[int]) -> float:
        return max(
            (compressor.error((size,)) for size, compressor in self.pieces), default=0.0
        )

    def encode(self, x: T, seed: int, warm: T | None = None) -> Payload:
        parts = x.flatten().split([size for size, _ in self.pieces])
        payloads = [
            c.encode(part, seed)
            for part, (_, c) in zip(parts, self.pieces, strict=True)
        ]
        return [tensor for payload in payloads for tensor in payload]

    def decode(self, payload: Payload, shape: Sequence[int], seed: int) -> T:
        rest = iter(self._checked(payload, shape))
        parts = []
        for size, compressor in self.pieces:
            own = [next(rest) for _ in compressor.specs((size,), torch.float32)]
            parts.append(compressor.decode(own, (size,), seed))
        return torch.cat(parts).view(*shape) if parts else torch.zeros(*shape)

    @property
    def for_feedback(self) -> Self:
        return replace(
            self,
            unbiased=False,
            pieces=tuple((size, c.for_feedback) for size, c in self.pieces),
        )

    def cut(self, part: slice) -> Compressor:
        kept: list[tuple[int, Compressor]] = []
        start = 0
        for size, compressor in self.pieces:
            inside = min(start + size, part.stop) - max(start, part.start)
            if inside > 0:
                kept.append((inside, compressor))
            start += size
        return replace(self, pieces=tuple(kept))


def build_compressor(word: str) -> Compressor:
    """Return the compressor that ``word`` in a recipe names, with its argument after a colon, such as ``topk:0.01``."""
    return compressor_of(word) or Compressor()


def encode_with_feedback(
    compressor: Compressor,
    x: T,
    seed: int,
    residual: T | None = None,
    warm: T | None = None,
    average: Average | None = None,
) -> tuple[Payload, T | None]:
    """Compress ``x`` with error feedback; return the payload, and the residual to be added in the next round.

    ``residual``: what compression has lost in the last round, which is added to ``x`` first (Seide et al. 2014,
    Karimireddy et al. 2019). With None there is no feedback, and the result's residual is None. Feedback needs a
    contractive compressor: one whose error is smaller than what it compresses.

    ``seed``: the seed of the compressor's random choices. ``warm``: what :meth:`Compressor.warm` returned for the last
    round. ``average``: a function that returns the mean of a tensor over all islands, for linear compressors only. With
    it, the payload is that of the mean over islands, but the residual is this island's own. None: the payload is that
    of this island's ``x``.
    """
    if residual is None:
        payload = (
            compressor.agreed(x, seed, average, warm)[0]
            if average
            else compressor.encode(x, seed, warm)
        )
        return payload, None
    if compressor.error(x.shape) >= 1:
        raise ValueError(
            f"errors of {compressor} fed back would grow; take its for_feedback"
        )
    wanted = x + residual
    if average:
        payload, own = compressor.agreed(wanted, seed, average, warm)
    else:
        payload = own = compressor.encode(wanted, seed, warm)
    return payload, wanted - compressor.decode(own, x.shape, seed).to(wanted.dtype)
