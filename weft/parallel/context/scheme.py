"""The interface of schemes for attention over a sequence that is cut along ``cp``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from weft.parallel.context.tables import TileTable


class AttentionScheme:
    """A scheme of attention over ``cp``: decides which rank computes each tile of the score matrix, and in which step.

    A tile is a block of queries against a block of keys. ``paired``: whether a rank owns two blocks of the sequence, an
    early and a late one, so that all ranks have equal work under the causal mask; otherwise a rank owns one block.
    """

    paired: ClassVar[bool] = False

    def table(self, ranks: int) -> TileTable:
        """Return the table that says which rank computes which tile of the score matrix in which step.

        ``ranks``: number of ranks along ``cp``. A tile is a block of queries against a block of keys.
        """
        raise NotImplementedError

    def operator(self) -> Callable[..., Any] | None:
        """Return an operator that computes this scheme in place of ``tile_attention``, or None if the scheme has none.

        The operator (such as a fused kernel) takes the arguments of
        :func:`weft.parallel.context.tile_attention.tile_attention` except ``scheme``, and its first result is the
        attention.
        """
        return None
