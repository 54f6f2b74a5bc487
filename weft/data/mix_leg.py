"""A part of an order with one mixture of its sources, and the plan of fixed shares.

Shares that move are planned in :mod:`weft.data.mix_plan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.data.mix_interfaces import MixPlan, SourceMixture


@dataclass(frozen=True)
class FixedShares:
    """Plan whose sources have fixed shares, in proportion to ``weights``.

    The samples of the first ``n`` blocks are cut like an interval into a part for each source, in proportion to the
    weights. Every cut is rounded down to a whole sample.
    """

    weights: tuple[float, ...]

    @cached_property
    def _edges(self) -> list[Fraction]:  # exact running sum of the weights
        return [*accumulate(map(Fraction, self.weights))]

    @cached_property
    def block(self) -> int:
        """Number of samples of a block: at least 1,024, and so large that every block has samples of every source."""
        least = -(-self._edges[-1] // Fraction(min(self.weights)))
        return max(1024, 1 << (least - 1).bit_length())

    def drawn(self, blocks: int) -> list[int]:
        """Return how many samples each source has in the first ``blocks`` blocks together, in the sources' order."""
        ends = [blocks * self.block * edge // self._edges[-1] for edge in self._edges]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True)
class MixLeg:
    """Part of the order of samples with a single mixture: from sample ``start`` to the start of the next leg.

    Attributes:
        ``start``: number of the leg's first sample.
        ``given``: number of samples of each source before ``start``.
        ``plan``: how many samples of each source every block of the leg has.
        ``weighed``: mixture whose shares multiply the loss weights of labels instead of deciding which samples are
            drawn; None: all samples weigh the same.
        ``sizes``: share of each source in all tokens, by which the shares of ``weighed`` are divided.
    """

    start: int
    given: tuple[int, ...]
    plan: MixPlan
    weighed: SourceMixture | None = None
    sizes: tuple[float, ...] = ()
