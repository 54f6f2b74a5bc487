"""Integers of few bits with a scale for each block: tensors in 2 to 8 bits per element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from weft.sync.compressor import BLOCK, Compressor

if TYPE_CHECKING:
    import torch

    from weft.sync.compressor import Payload, Spec

    T = torch.Tensor

#: With fewer bits than these, the largest elements of a block are clipped where that loses less.
CLIPPED = 4
#: Scales that are tried then, as shares of the one at which nothing is clipped.
SHARES = (1.0, 0.85, 0.7, 0.55, 0.4, 0.3)


@dataclass(frozen=True)
class Rounded(Compressor):
    """Compressor to integers of ``bits`` bits, 2 to 8, with a scale for each block of 128 elements.

    Scales are bfloat16, rounded up so that no element is clipped. If ``unbiased``, rounding is stochastic; otherwise it
    is to the nearest integer, which is contractive.
    """

    unbiased: bool = False
    bits: int = 8
    linear = False

    @property
    def bytes_per_element(self) -> float:
        return self.bits / 8 + 2 / BLOCK

    @property
    def levels(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def specs(self, shape: Sequence[int], dtype: torch.dtype) -> list[Spec]:
        import torch

        count = prod(shape)
        codes = (
            ((count,), torch.int8)
            if self.bits == 8
            else ((-(-count * self.bits // 8),), torch.uint8)
        )
        return [codes, ((-(-count // BLOCK),), torch.bfloat16)]

    def error(self, shape: Sequence[int]) -> float:
        # An error is half a step for the nearest, and has at most the variance of half a step at random.
        count = max(1, min(prod(shape), BLOCK))
        bound = count * ((1 + 2**-7) / (2 * self.levels)) ** 2
        # The nearest changes no element by more than its own size, and the largest of a block hardly.
        return bound if self.unbiased else min(bound, 1 - (1 - 2**-7) / count)

    def encode(self, x: T, seed: int, warm: T | None = None) -> Payload:
        import torch
        import torch.nn.functional as F

        from weft.models.nf4 import packed
        from weft.sync.payloads import codes_packed, divisor, in_blocks, rounded_up

        blocks = in_blocks(x)  # [blocks, 128]
        scales = rounded_up(blocks.abs().amax(1) / self.levels)
        if self.bits < CLIPPED and not self.unbiased:
            scales = self._fitted(blocks, scales)
        steps = blocks / divisor(scales, x.dtype)[:, None]
        if self.unbiased:
            noise = torch.rand(
                steps.shape,
                generator=torch.Generator().manual_seed(seed),
                dtype=x.dtype,
            )
            codes = (steps + noise.to(x.device)).floor()
        else:
            codes = steps.round()
        codes = (
            codes.clamp(-self.levels, self.levels)
            .nan_to_num()
            .to(torch.int8)
            .flatten()[: x.numel()]
        )
        if self.bits == 4:
            codes = packed(F.pad((codes + 8).to(torch.uint8), (0, codes.numel() % 2)))
        elif self.bits < 8:
            codes = codes_packed(codes + 2 ** (self.bits - 1), self.bits)
        return [codes, scales]

    def _fitted(self, blocks: T, scales: T) -> T:
        """Return the scale of each of ``blocks [blocks, 128]`` with which rounding to the nearest loses least.

        ``scales``: the scales at which nothing is clipped. A smaller one clips a few large elements, and is finer for
        all others; with three or seven levels that loses far less.
        """
        import torch

        from weft.sync.payloads import divisor

        candidates = torch.stack(
            [scales * share for share in SHARES]
        )  # [shares, blocks]
        steps = blocks / divisor(candidates, blocks.dtype)[..., None]
        codes = steps.round().clamp(-self.levels, self.levels)
        # [shares, blocks]
        lost = (
            (codes * candidates.to(blocks.dtype)[..., None] - blocks).square().sum(-1)
        )
        return candidates.gather(0, lost.argmin(0, keepdim=True))[0]

    def decode(self, payload: Payload, shape: Sequence[int], seed: int) -> T:
        import torch

        from weft.memory.quantised import unpacked
        from weft.sync.payloads import codes_unpacked, scale_blocks

        codes, scales = self._checked(payload, shape)
        whole = codes
        if self.bits == 4:
            whole = unpacked(codes).to(torch.int8) - 8
        elif self.bits < 8:
            whole = codes_unpacked(codes, self.bits, prod(shape)) - 2 ** (self.bits - 1)
        return scale_blocks(whole[: prod(shape)].float(), scales).view(*shape)
