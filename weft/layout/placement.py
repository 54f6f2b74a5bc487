"""The one cutting rule: where every rank stands and what it holds of a parameter, as arithmetic on a layout.

Nothing here needs a process group. From a parameter's :class:`Logical` and a rank's :class:`Place` follows everything
that other code wants to know: the part it holds, who else holds it, whether it counts in the norm, who writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from weft.layout.axes import AXES, CUTS, FOLDED, MODEL_AXES
from weft.layout.dims import Box, Dim, Logical, ceil_part, part

if TYPE_CHECKING:
    from weft.layout.layout import Layout


@dataclass(frozen=True)
class Placement:
    """What a rank holds of a parameter's state, and which of the ``replicas`` ranks it is that hold the same."""

    box: Box
    replica: int
    replicas: int

    @property
    def counted(self) -> bool:
        """Of all ranks that hold these elements, the first counts them in the norm of the gradients."""
        return self.replica == 0


@dataclass(frozen=True)
class Place:
    """One rank's coordinate along every axis of a layout.

    ``state`` numbers the ranks of ``shard`` and ``cp`` together, which share in holding the state, by their rank in the
    world: that is how PyTorch numbers the ranks of a group, whatever ``layout.order`` says. ``ep`` numbers, likewise,
    neighbours among the data ranks, ``dp`` slowest; ``expert_state`` and ``expert_dp`` number those that have the same
    experts: the ranks that share in holding their state, and the replicas of it.
    """

    layout: Layout
    coordinates: dict[str, int]

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Place:
        """The place of world rank ``rank``."""
        ranks = rank_table(layout)
        where = dict(
            zip(AXES, (int(i[0]) for i in np.nonzero(ranks == rank)), strict=True)
        )
        holders = ranks[
            tuple(
                slice(None) if axis in ("shard", "cp") else where[axis] for axis in AXES
            )
        ]
        where["state"] = int((holders < rank).sum())
        table = expert_table(layout, ranks)[
            where["island"], where["pp"], ..., where["tp"]
        ]
        folded = (int(i[0]) for i in np.nonzero(table == rank))
        return cls(layout, where | dict(zip(ExpertSizes._fields, folded, strict=True)))

    def rank(self, axis: str) -> int:
        return self.coordinates[axis]

    def along(self, *axes: str) -> int:
        """The coordinate along ``axes`` together, the last varying fastest."""
        index = 0
        for axis in axes:
            index = index * self.layout.size(axis) + self.rank(axis)
        return index

    def logical(
        self,
        dims: Sequence[Dim],
        std: float | None,
        whole: bool = False,
        everywhere: bool = False,
    ) -> Logical:
        """The parameter with these dimensions, and the part of it that this place computes with.

        ``whole=True`` keeps it whole over the axes that share the work, although its dimensions could be cut over them
        (fewer key/value heads than ranks, a router's row for each expert).
        """
        cuts = cut_axes(dims, self.layout, whole)
        box = tuple(
            self._range(dim, axes) for dim, axes in zip(dims, cuts, strict=True)
        )
        if pieces := pieces_of_experts(dims, cuts, self.layout):
            box = self._in_pieces(dims, cuts, pieces)
        return Logical(tuple(dims), std, cuts, box, everywhere)

    def _range(self, dim: Dim, axes: Sequence[str]) -> tuple[int, int]:
        lo, hi = part(dim.count, self.layout.size(*axes), self.along(*axes))
        return lo * dim.unit, hi * dim.unit

    def _in_pieces(
        self, dims: Sequence[Dim], cuts: Sequence[Sequence[str]], pieces: int
    ) -> Box:
        """The box where an expert's width is cut in so many ``pieces``, of which neighbours along ``ep`` have one each.

        Where ``tp`` cuts the width as well, they are pieces of its parts.
        """
        expert, piece = divmod(self.along(*cuts[0]), pieces)
        axes = [axis for axis in cuts[1 + _width(dims[1:])] if axis not in cuts[0]]
        bounds = [(expert * dims[0].unit, (expert + 1) * dims[0].unit)]
        for i, dim in enumerate(dims[1:]):
            if i == _width(dims[1:]):
                lo, hi = part(
                    dim.count,
                    self.layout.size(*axes) * pieces,
                    self.along(*axes) * pieces + piece,
                )
                bounds.append((lo * dim.unit, hi * dim.unit))
            else:
                bounds.append(self._range(dim, cuts[1 + i]))
        return tuple(bounds)

    def hold(self, logical: Logical, stages: Sequence[int] = (0,)) -> Placement:
        """What this rank holds as state: of its part, some rows of dimension 0.

        ``stages``: the coordinates along ``pp`` of all ranks that compute with the same part (a tied embedding, say).
        """
        layout = self.layout
        # ranks that cut the rows, and copies of these
        holders, replicas = layout.size("shard", "cp"), layout.dp
        index, replica = self.rank("state"), self.rank("dp")
        # its neighbours hold other experts: what remains of the data ranks
        if logical.cut_by("ep"):
            replicas, holders, _ = expert_sizes(layout)
            replica, index = self.rank("expert_dp"), self.rank("expert_state")
        if logical.everywhere:
            holders, index, replicas, replica = (
                1,
                0,
                holders * replicas,
                replica * holders + index,
            )
        box = (
            logical.rows(*ceil_part(logical.local_shape[0], holders, index))
            if logical.box
            else ()
        )
        copy = list(stages).index(self.rank("pp")) if len(stages) > 1 else 0
        uncut = [axis for axis in MODEL_AXES if not logical.cut_by(axis)]
        replica = (copy * replicas + replica) * layout.size(*uncut) + self.along(*uncut)
        return Placement(box, replica, replicas * len(stages) * layout.size(*uncut))


def island_ranks(layout: Layout, rank: int) -> tuple[int, list[int]]:
    """Which island world rank ``rank`` is of, and all ranks of it, in the order that they have there."""
    table = rank_table(layout)
    island = int(np.nonzero(table == rank)[0][0])
    return island, sorted(table[island].flatten().tolist())


def rank_table(layout: Layout) -> np.ndarray:
    """The rank at every place, with one dimension per axis of :data:`AXES`."""
    order = layout.axis_order
    ranks = np.arange(layout.world).reshape([layout.size(axis) for axis in order])
    return ranks.transpose([order.index(axis) for axis in AXES])


class ExpertSizes(NamedTuple):
    """Numbers of data ranks for experts: replicas, ranks that share the state of an expert, and ranks of other experts.

    The names of the fields are those of axes.
    """

    expert_dp: int
    expert_state: int
    ep: int


def expert_sizes(layout: Layout) -> ExpertSizes:
    """Return how the data ranks of ``layout`` fall into axes for experts."""
    state = layout.size("shard", "cp")
    replicas = layout.dp // max(1, layout.fold // state)
    return ExpertSizes(replicas, max(1, state // layout.fold), layout.fold)


def expert_table(layout: Layout, ranks: np.ndarray) -> np.ndarray:
    """The ranks of :func:`rank_table` by the axes of experts: ``[island, pp, expert_dp, expert_state, ep, tp]``."""
    # [island, pp, dp, state, tp]
    by_state = np.sort(ranks.reshape(*ranks.shape[:3], -1, layout.tp), axis=3)
    folded = by_state.reshape(*ranks.shape[:2], *expert_sizes(layout), layout.tp)
    return np.sort(folded, axis=4)


def exchange_table(layout: Layout, ranks: np.ndarray) -> np.ndarray:
    """The ranks of :func:`rank_table`, in whose last dimension stand those that together have all experts of a layer.

    ``[island, pp, ..., ep]``.
    """
    folded = expert_table(layout, ranks)
    return np.sort(
        folded.reshape(*folded.shape[:4], -1)
        if layout.folds_tp
        else np.moveaxis(folded, 4, -1)
    )


def experts_per_node(layout: Layout) -> int:
    """How many of the ranks that have all experts together share a node; 0 if that is not the same everywhere."""
    nodes = exchange_table(layout, rank_table(layout)).reshape(-1, layout.ep) // (
        layout.node or layout.world
    )
    counts = {
        int(count) for row in nodes for count in np.unique(row, return_counts=True)[1]
    }
    return counts.pop() if len(counts) == 1 else 0


def expert_blocks(layout: Layout) -> list[int]:
    """Sizes of the blocks of neighbours that exchange rows or experts among themselves, besides all ranks together."""
    if layout.dispatch in ("two-level", "per-node"):
        return [experts_per_node(layout)]
    return (
        [n for n in range(2, layout.ep) if layout.ep % n == 0]
        if layout.dispatch in ("adaptive", "timed")
        else []
    )


def cut_axes(
    dims: Sequence[Dim], layout: Layout, whole: bool = False
) -> tuple[tuple[str, ...], ...]:
    """For each dimension the axes larger than one that cut it, by :data:`CUTS`; no axis cuts a parameter twice.

    With vocabulary passes the vocabulary is cut over the stages too. Experts may be cut over ``tp`` too, and where they
    are fewer than the ranks of ``ep``, ``ep`` also cuts their width.
    """
    cuts: list[tuple[str, ...]] = []
    taken: set[str] = {*MODEL_AXES, FOLDED} if whole else set()
    for dim in dims:
        axes = CUTS.get(dim.name, ())
        if dim.name == "vocab" and layout.vocab_barriers:
            axes = ("pp", *axes)
        if FOLDED in axes and layout.folds_tp:
            axes = (*axes, "tp")
        cuts.append(
            tuple(axis for axis in axes if layout.size(axis) > 1 and axis not in taken)
        )
        taken.update(cuts[-1])
    if pieces_of_experts(dims, cuts, layout):
        width = 1 + _width(dims[1:])
        cuts[width] = (*cuts[width], *cuts[0])
    return tuple(cuts)


def pieces_of_experts(
    dims: Sequence[Dim], cuts: Sequence[Sequence[str]], layout: Layout
) -> int:
    """In how many pieces each expert of a stack is cut, where ranks along ``ep`` outnumber the experts; else 0."""
    if not dims or dims[0].name != "expert" or _width(dims[1:]) < 0:
        return 0
    pieces, rest = divmod(layout.size(*cuts[0]), dims[0].count)
    return pieces if pieces > 1 and not rest else 0


def _width(dims: Sequence[Dim]) -> int:
    """The index of an expert's width among these dimensions; -1 if it is not there."""
    return next((i for i, dim in enumerate(dims) if dim.name == "ffn"), -1)
