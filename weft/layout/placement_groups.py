"""Groups of ranks of a layout by what they share: an island, the experts of a layer, a machine."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from weft.layout.placement import expert_table, rank_table

if TYPE_CHECKING:
    from weft.layout.layout import Layout


def island_ranks(layout: Layout, rank: int) -> tuple[int, list[int]]:
    """Return the index of the island that world rank ``rank`` is in, and the world ranks of this island in order."""
    table = rank_table(layout)
    island = int(np.nonzero(table == rank)[0][0])
    return island, sorted(table[island].flatten().tolist())


def exchange_table(layout: Layout, ranks: np.ndarray) -> np.ndarray:
    """Rearrange the table ``ranks`` such that the ranks that exchange tokens for experts lie along its last axis.

    ``ranks``: a :func:`rank_table`, the world rank at each coordinate. The result has the same ranks as ``[island, pp,
    expert_dp, expert_state, tp, ep]``. Ranks along ``ep`` hold different experts, and together all experts of a layer.
    Ranks along ``expert_state`` share the state of the same experts; ranks along ``expert_dp`` hold copies of this
    state. If experts are divided among the ranks of ``tp`` as well, there is no axis ``tp``, and the last axis has
    these ranks, too.
    """
    folded = expert_table(layout, ranks)
    if layout.folds_tp:
        return np.sort(folded.reshape(*folded.shape[:4], -1))
    return np.sort(np.moveaxis(folded, 4, -1))


def experts_per_node(layout: Layout) -> int:
    """Return how many of the ranks that together hold all experts share a node.

    The result is 0 if this number differs between nodes.
    """
    ranks = exchange_table(layout, rank_table(layout)).reshape(-1, layout.ep)
    nodes = ranks // (layout.node or layout.world)
    counts = {count for row in nodes.tolist() for count in Counter(row).values()}
    return counts.pop() if len(counts) == 1 else 0


def expert_blocks(layout: Layout) -> list[int]:
    """Return the sizes of the blocks of neighbouring ranks that the layout's dispatcher uses.

    A dispatcher sends tokens to the ranks of their experts. Some dispatchers, such as ``two-level``, exchange tokens
    first within a block of ranks, for example a machine, and then between blocks. ``adaptive`` and ``timed`` choose a
    size while they run, so the list has all sizes that they may choose. It is empty for a dispatcher without blocks.
    """
    if layout.dispatch in ("two-level", "per-node"):
        return [experts_per_node(layout)]
    if layout.dispatch in ("adaptive", "timed"):
        return [n for n in range(2, layout.ep) if layout.ep % n == 0]
    return []
