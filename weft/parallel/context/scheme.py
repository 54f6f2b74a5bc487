"""The interface of schemes for attention over a sequence that is cut along ``cp``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from weft.parallel.context.tables import TileTable


class AttentionScheme:
    """A scheme of attention over ``cp``: decides which rank computes each tile of the score matrix, and in which step.

    If ``paired``, a rank owns an early and a late block of the sequence, so that causal work is even; else one block.
    """

    paired: ClassVar[bool] = False

    def table(self, ranks: int) -> TileTable:
        """Return the table of tiles for ``ranks`` ranks."""
        raise NotImplementedError

    def operator(self) -> Callable[..., Any] | None:
        """Return an operator that replaces :func:`weft.parallel.context.tile_attention.tile_attention`, or None.

        It takes the arguments of that function but ``scheme``, and its first result is the attention.
        """
        return None
