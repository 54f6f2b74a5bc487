"""AdamW whose moments are kept in 8 or 4 bits, or in bfloat16, between updates.

8-bit and 4-bit moments are codes with one scale for each block of a row (Dettmers et al. 2021; Li et al. 2023 for 4
bits). Blocks are counted from the beginning of the logical row. Ranks that share a block agree on its scale, so that
the update does not depend on the layout, and a run can resume under another layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pydantic import Field, PositiveInt

from weft.registry import find
from weft.section import Section
from weft.train.rules.update_rule import UpdateRule

if TYPE_CHECKING:
    from torch import Tensor as T

    from weft.layout.parts import Part
    from weft.parallel.state import Held
    from weft.recipe import Optimizer
    from weft.train.rules.rank_sums import RankSums

#: Matrices with fewer elements, and all vectors, keep full moments: they weigh little, and norms suffer most.
SMALL = 4096


class Encoding(Protocol):
    """Interface of a compact storage of a parameter's two AdamW moments between updates."""

    def slots(self, held: Held) -> dict[str, Part]: ...

    def load(self, held: Held) -> list[T]:
        """Return the two moments of the parameter ``held``, decoded to the precision of the state."""

    def store(self, held: Held, moments: Sequence[T]) -> None:
        """Encode and store ``moments``, the two moments of the parameter ``held``.

        ``held.updates``, the number of the parameter's updates, includes the update from which these moments come.
        """


class CompactAdamW(UpdateRule):
    """AdamW that stores moments in the compact form ``encoding``. An update decodes those of one parameter at a time.

    Vectors, and matrices with fewer than :data:`SMALL` elements, keep their moments in full precision.
    """

    def __init__(
        self, settings: Optimizer, ranks: RankSums, encoding: Encoding
    ) -> None:
        self.full: Any = find("optimizer", "adamw").implementation(settings, ranks)
        self.encoding = encoding

    def slots(self, held: Held) -> dict[str, Part]:
        return self.encoding.slots(held) if is_large(held) else self.full.slots(held)

    def update(
        self, held: Sequence[Held], grads: Sequence[T], lr: float, decay: float
    ) -> None:
        small = [(h, g) for h, g in zip(held, grads, strict=True) if not is_large(h)]
        self.full.update([h for h, _ in small], [g for _, g in small], lr, decay)
        for h, g in zip(held, grads, strict=True):
            if is_large(h):
                moments = self.encoding.load(h)
                if h.local.numel():
                    self.full.step([h], [g], [moments[0]], [moments[1]], lr, decay)
                else:
                    h.updates += 1
                self.encoding.store(h, moments)


class BlockSettings(Section):
    """Recipe settings of optimizers whose moments are stored in blocks with one scale each."""

    block: PositiveInt = Field(
        256,
        description=(
            "Number of neighbouring elements of a moment that share one scale. Smaller blocks are more exact and "
            "take slightly more memory."
        ),
    )


class BlockAdamW(CompactAdamW):
    """AdamW whose moments are codes of ``bits`` bits, with a scale for each block of neighbouring elements of a row."""

    bits: ClassVar[int]
    shaping = ("block",)

    def __init__(self, settings: Optimizer, ranks: RankSums) -> None:
        from weft.train.rules.block_moments import BlockMoments

        block = settings.own(BlockSettings).block
        super().__init__(settings, ranks, BlockMoments(self.bits, block, ranks))


def is_large(held: Held) -> bool:
    return held.logical.numel >= SMALL and len(held.logical.dims) > 1
