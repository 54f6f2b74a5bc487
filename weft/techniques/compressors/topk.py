"""The elements of largest magnitude, and their positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from weft.registry import register
from weft.sync.kept_share import KeptShare, kept_of

if TYPE_CHECKING:
    import torch

    from weft.sync.compressor import Payload, Spec

    T = torch.Tensor


@register(
    "compressor",
    "topk",
    title="Agreements by the largest elements, errors fed back on both ways",
    paper="Seide et al. 2014; Karimireddy et al. 2019",
    recipe="islands.toml --set sync.compress=topk:0.01",
    proof="tests/sync/test_compress.py, tests/sync/test_streams.py",
    figure=(
        "equal to one process to rounding over 5 rounds, the same bits on all "
        "islands; bytes as the formula"
    ),
)
@dataclass(frozen=True)
class TopK(KeptShare):
    """Sends the elements of largest magnitude and their positions (Seide et al. 2014; Karimireddy et al. 2019).

    Positions are indices, or one bit for each element of the tensor where that takes fewer bytes. ``unbiased`` is
    False: the mean of decoded tensors is not the tensor itself.
    """

    unbiased: bool = False
    example = "0.01"
    linear = False

    def specs(self, shape: Sequence[int], dtype: torch.dtype) -> list[Spec]:
        from weft.sync.payloads import positions_spec

        count, kept = prod(shape), kept_of(prod(shape), self.share)
        return [((kept,), dtype), positions_spec(kept, count)]

    def error(self, shape: Sequence[int]) -> float:
        return 1 - kept_of(prod(shape), self.share) / max(1, prod(shape))

    def encode(self, x: T, seed: int, warm: T | None = None) -> Payload:
        from weft.sync.payloads import largest, positions_sent

        flat = x.flatten()
        kept = largest(flat, kept_of(flat.numel(), self.share))
        return [flat[kept], positions_sent(kept, flat.numel())]

    def decode(self, payload: Payload, shape: Sequence[int], seed: int) -> T:
        from weft.sync.payloads import positions_found

        values, sent = self._checked(payload, shape)
        kept = positions_found(sent, values.numel(), prod(shape))
        return values.new_zeros(prod(shape)).index_put_((kept,), values).view(*shape)
