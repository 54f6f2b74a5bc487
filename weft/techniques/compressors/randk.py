"""A random subset of the elements that a common seed chooses, so that no positions are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from weft.registry import register
from weft.sync.kept_share import KeptShare, kept_of

if TYPE_CHECKING:
    import torch

    from weft.sync.compressor import Average, Payload, Spec

    T = torch.Tensor


@register(
    "compressor",
    "randk",
    title="Agreements by elements that a seed chooses",
    paper="Karimireddy et al. 2019",
    recipe="islands.toml --set sync.compress=randk:0.1",
    proof="tests/sync/test_compress.py, tests/sync/test_streams.py",
    figure=(
        "equal to one process to rounding over 5 rounds, the same bits on all "
        "islands; bytes as the formula"
    ),
)
@dataclass(frozen=True)
class RandomK(KeptShare):
    """Sends a random subset of the elements (Karimireddy et al. 2019). It follows from the round's seed, and so is the
    same on all islands.

    With ``unbiased`` the elements are scaled so that the expected result is the tensor itself.
    """

    def specs(self, shape: Sequence[int], dtype: torch.dtype) -> list[Spec]:
        return [((kept_of(prod(shape), self.share),), dtype)]

    def error(self, shape: Sequence[int]) -> float:
        count, kept = prod(shape), kept_of(prod(shape), self.share)
        return (count / max(1, kept) - 1) if self.unbiased else 1 - kept / max(1, count)

    def agreed(
        self, x: T, seed: int, average: Average, warm: T | None = None
    ) -> tuple[Payload, Payload]:
        kept = x.flatten()[self._chosen(x.numel(), seed).to(x.device)]
        return [average(kept)], [kept]

    def decode(self, payload: Payload, shape: Sequence[int], seed: int) -> T:
        (values,) = self._checked(payload, shape)
        count = prod(shape)
        scale = count / max(1, values.numel()) if self.unbiased else 1.0
        chosen = self._chosen(count, seed).to(values.device)
        return (
            values.new_zeros(count).index_put_((chosen,), values * scale).view(*shape)
        )

    def _chosen(self, count: int, seed: int) -> T:
        from weft.sync.payloads import shared_permutation

        return shared_permutation(count, seed)[: kept_of(count, self.share)]
