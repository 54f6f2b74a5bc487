"""CocktailSGD: a random tenth of the elements, of this tenth the largest fifth, in four bits (Wang et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar

from weft.registry import register
from weft.sync.compressor import Compressor
from weft.sync.kept_share import kept_of
from weft.sync.rounded import Rounded

if TYPE_CHECKING:
    import torch

    from weft.sync.compressor import Payload, Spec

    T = torch.Tensor


#: Rounds until every element was in the mask once, and the share of the mask that is sent.
ROUNDS, SHARE = 10, 0.2


@register(
    "compressor",
    "cocktail",
    title=(
        "Agreements by a cocktail of random elements, the largest of them, and four "
        "bits, errors fed back on both ways"
    ),
    paper="Wang et al. 2023 (CocktailSGD)",
    recipe="islands.toml --set sync.compress=cocktail",
    proof="tests/sync/test_compress.py, tests/sync/test_streams.py",
    figure=(
        "equal to one process to rounding over 5 rounds, the same bits on all "
        "islands; bytes as the formula"
    ),
)
@dataclass(frozen=True)
class Cocktail(Compressor):
    """Sends the largest fifth of a random tenth of the elements, in 4 bits each (CocktailSGD, Wang et al. 2023).

    The tenths of ten successive rounds together contain every element. ``values``: the compressor of the elements that
    are sent. ``unbiased`` is False: the mean of decoded tensors is not the tensor itself.
    """

    unbiased: bool = False
    linear = False
    values: ClassVar[Rounded] = Rounded(bits=4)

    def _sizes(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the number of elements in the mask, and of elements that are sent."""
        masked = -(-prod(shape) // ROUNDS)
        return masked, kept_of(masked, SHARE)

    def specs(self, shape: Sequence[int], dtype: torch.dtype) -> list[Spec]:
        from weft.sync.payloads import positions_spec

        masked, kept = self._sizes(shape)
        return [*self.values.specs((kept,), dtype), positions_spec(kept, masked)]

    def error(self, shape: Sequence[int]) -> float:
        _, kept = self._sizes(shape)
        return 1 - (1 - self.values.error((kept,))) * kept / max(1, prod(shape))

    def encode(self, x: T, seed: int, warm: T | None = None) -> Payload:
        from weft.sync.payloads import largest, positions_sent

        within = x.flatten()[self._mask(x.numel(), seed).to(x.device)]
        kept = largest(within, self._sizes(x.shape)[1])
        return [
            *self.values.encode(within[kept], seed),
            positions_sent(kept, within.numel()),
        ]

    def decode(self, payload: Payload, shape: Sequence[int], seed: int) -> T:
        from weft.sync.payloads import positions_found

        codes, scales, sent = self._checked(payload, shape)
        masked, kept = self._sizes(shape)
        values = self.values.decode([codes, scales], (kept,), seed)
        at = self._mask(prod(shape), seed).to(values.device)[
            positions_found(sent, kept, masked)
        ]
        return values.new_zeros(prod(shape)).index_put_((at,), values).view(*shape)

    def _mask(self, count: int, seed: int) -> T:
        from weft.sync.payloads import shared_permutation

        turn, size = seed % ROUNDS, -(-count // ROUNDS)
        first = max(0, min(turn * size, count - size))
        return shared_permutation(count, seed // ROUNDS)[first : first + size]
