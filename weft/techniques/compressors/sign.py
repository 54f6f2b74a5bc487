"""The sign of each element, and a magnitude for each block (Karimireddy et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from weft.registry import register
from weft.sync.compressor import BLOCK, Compressor

if TYPE_CHECKING:
    import torch

    from weft.sync.compressor import Payload, Spec

    T = torch.Tensor


@register(
    "compressor",
    "sign",
    title="Agreements by signs, errors fed back on both ways",
    paper="Karimireddy et al. 2019",
    recipe="islands.toml --set sync.compress=sign",
    proof="tests/sync/test_compress.py, tests/sync/test_streams.py",
    figure=(
        "equal to one process to rounding over 5 rounds, the same bits on all "
        "islands; bytes as the formula"
    ),
)
@dataclass(frozen=True)
class Sign(Compressor):
    """Sends the sign of each element, and the mean magnitude of each block of 128 elements (Karimireddy et al. 2019).

    ``unbiased`` is False: the mean of decoded tensors is not the tensor itself.
    """

    unbiased: bool = False
    linear = False

    def specs(self, shape: Sequence[int], dtype: torch.dtype) -> list[Spec]:
        import torch

        count = prod(shape)
        return [
            ((-(-count // 8),), torch.uint8),
            ((-(-count // BLOCK),), torch.bfloat16),
        ]

    def error(self, shape: Sequence[int]) -> float:
        # the worst is a block with one element that is not 0
        return 1 - (1 - 2**-16) / max(1, min(prod(shape), BLOCK))

    def encode(self, x: T, seed: int, warm: T | None = None) -> Payload:
        import torch

        from weft.sync.payloads import bits_packed, in_blocks

        count, blocks = x.numel(), in_blocks(x)
        sizes = torch.full((len(blocks),), BLOCK, dtype=x.dtype, device=x.device)
        sizes[-1:] -= len(blocks) * BLOCK - count
        return [bits_packed(x.flatten() >= 0), (blocks.abs().sum(1) / sizes).bfloat16()]

    def decode(self, payload: Payload, shape: Sequence[int], seed: int) -> T:
        from weft.sync.payloads import bits_unpacked, scale_blocks

        bits, scales = self._checked(payload, shape)
        return scale_blocks(
            bits_unpacked(bits, prod(shape)).float() * 2 - 1, scales
        ).view(*shape)
