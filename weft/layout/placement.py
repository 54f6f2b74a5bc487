"""The one cutting rule: the position of every rank and its part of a parameter, as arithmetic on a layout.

Nothing here needs a process group. A parameter's :class:`Logical` and a rank's :class:`Place` determine everything that
other code asks: the part that the rank holds, the other holders, whether it counts in the norm, and who writes it.
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
    """The part of a parameter's state that a rank holds.

    ``box``: the range of elements that the rank holds, per dimension. Other ranks may hold the same elements:
    ``replicas`` is the number of ranks that do, and ``replica`` is this rank's index among them.
    """

    box: Box
    replica: int
    replicas: int

    @property
    def counted(self) -> bool:
        """Whether this rank adds its elements to the norm of the gradients.

        Of the ranks that hold the same elements, only the first counts them.
        """
        return self.replica == 0


@dataclass(frozen=True)
class Place:
    """One rank's coordinate along every axis of a layout, and its index in four groups of ranks.

    ``coordinates``: the rank's coordinate by name of the axis, and its index by name of the group. In each group ranks
    are numbered from 0 in the order of their world ranks. The groups are:

        ``state``: the ranks of ``shard`` and ``cp`` together, which divide the parameters' state among them.
        ``ep``: neighbouring data ranks, each with different experts.
        ``expert_state``: ranks with the same experts, each with a different part of the experts' state.
        ``expert_dp``: ranks with the same experts and the same part of their state.
    """

    layout: Layout
    coordinates: dict[str, int]

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Place:
        """Return the coordinates of world rank ``rank`` in ``layout``."""
        ranks = rank_table(layout)
        where = dict(zip(AXES, np.argwhere(ranks == rank)[0].tolist(), strict=True))
        sharing = [
            slice(None) if axis in ("shard", "cp") else where[axis] for axis in AXES
        ]
        where["state"] = int((ranks[tuple(sharing)] < rank).sum())
        # [expert_dp, expert_state, ep]
        table = expert_table(layout, ranks)[
            where["island"], where["pp"], ..., where["tp"]
        ]
        folded = np.argwhere(table == rank)[0].tolist()
        return cls(layout, where | ExpertSizes(*folded)._asdict())

    def rank(self, axis: str) -> int:
        """Return the coordinate along ``axis``, which may also be one of the four groups that :class:`Place` names."""
        return self.coordinates[axis]

    def along(self, *axes: str) -> int:
        """Return this rank's coordinates along ``axes`` combined to one index, in which the last of ``axes`` varies
        fastest.
        """
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
        """Return a description of the parameter with the dimensions ``dims``, and of the part that this rank computes
        with.

        ``std``: standard deviation of the initial values; None: all ones. ``whole``: no axis cuts the parameter for
        computing, although its dimensions allow it. An example is a router: every rank of ``ep`` computes with all of
        its weight. ``everywhere``: no axis cuts the parameter's state either. Every rank then keeps the state of the
        whole part that it computes with, where ZeRO would give each rank a range of rows.
        """
        cuts = cut_axes(dims, self.layout, whole)
        box = tuple(
            self._range(dim, axes) for dim, axes in zip(dims, cuts, strict=True)
        )
        if pieces := pieces_of_experts(dims, cuts, self.layout):
            box = self._in_pieces(dims, cuts, pieces)
        return Logical(tuple(dims), std, cuts, box, everywhere)

    def _range(self, dim: Dim, axes: Sequence[str]) -> tuple[int, int]:
        index = self.along(*axes)
        if dim.name == "expert":
            # evenly, as tokens are sent to them (weft.parallel.experts): shares of tp cut a layer's work, not experts
            lo, hi = part(dim.count, self.layout.size(*axes), index)
        else:
            lo, hi = cut_range(dim.count, self.layout, axes, index)
        return lo * dim.unit, hi * dim.unit

    def _in_pieces(
        self, dims: Sequence[Dim], cuts: Sequence[Sequence[str]], pieces: int
    ) -> Box:
        """Return the box of one piece of an expert, whose width is cut over ``pieces`` neighbours along ``ep``.

        Where ``tp`` cuts the width as well, pieces are cut from its parts.
        """
        expert, piece = divmod(self.along(*cuts[0]), pieces)
        width = 1 + _width(dims[1:])
        box = [self._range(dim, axes) for dim, axes in zip(dims, cuts, strict=True)]
        box[0] = expert * dims[0].unit, (expert + 1) * dims[0].unit
        axes = [axis for axis in cuts[width] if axis not in cuts[0]]
        parts, index = (
            self.layout.size(*axes) * pieces,
            self.along(*axes) * pieces + piece,
        )
        lo, hi = part(dims[width].count, parts, index)
        box[width] = lo * dims[width].unit, hi * dims[width].unit
        return tuple(box)

    def hold(self, logical: Logical, stages: Sequence[int] = (0,)) -> Placement:
        """Return the part of the parameter ``logical`` whose state this rank holds: some of the rows with which it
        computes.

        ``stages``: the coordinates along ``pp`` of all ranks that compute with these rows; at each of them there is
        a copy of the state. For most parameters there is one. There are two for an embedding that is also the output
        layer, as the first and the last stage compute with it.
        """
        layout = self.layout
        # ranks that cut the rows, and copies of these
        holders, replicas = layout.size("shard", "cp"), layout.dp
        index, replica = self.rank("state"), self.rank("dp")
        if logical.cut_by(FOLDED):  # neighbours hold other experts
            replicas, holders, _ = expert_sizes(layout)
            replica, index = self.rank("expert_dp"), self.rank("expert_state")
        if logical.everywhere:
            replica = replica * holders + index
            replicas *= holders
            holders, index = 1, 0
        box = logical.box
        if box:
            box = logical.rows(*ceil_part(logical.local_shape[0], holders, index))
        copy = list(stages).index(self.rank("pp")) if len(stages) > 1 else 0
        uncut = [axis for axis in MODEL_AXES if not logical.cut_by(axis)]
        replica = (copy * replicas + replica) * layout.size(*uncut) + self.along(*uncut)
        return Placement(box, replica, replicas * len(stages) * layout.size(*uncut))


def rank_table(layout: Layout) -> np.ndarray:
    """Return the world rank at every combination of coordinates: ints, with one dimension per axis of :data:`AXES`."""
    order = layout.axis_order
    ranks = np.arange(layout.world).reshape([layout.size(axis) for axis in order])
    return ranks.transpose([order.index(axis) for axis in AXES])


class ExpertSizes(NamedTuple):
    """Sizes of the three axes along which the data ranks are arranged for experts.

    ``expert_dp``: replicas of an expert's state. ``expert_state``: ranks that share the state of an expert. ``ep``:
    ranks that hold different experts.
    """

    expert_dp: int
    expert_state: int
    ep: int


def expert_sizes(layout: Layout) -> ExpertSizes:
    """Return how the data ranks of ``layout`` (those along dp, shard and cp) are arranged for experts.

    The result has the number of replicas of an expert's state, of ranks that share the state of an expert, and of ranks
    that hold different experts.
    """
    state = layout.size("shard", "cp")
    replicas = layout.dp // max(1, layout.fold // state)
    return ExpertSizes(replicas, max(1, state // layout.fold), layout.fold)


def expert_table(layout: Layout, ranks: np.ndarray) -> np.ndarray:
    """Rearrange ``ranks``, a :func:`rank_table`, so that ranks with the same or with different experts lie along axes.

    The result is ``[island, pp, expert_dp, expert_state, ep, tp]``; :class:`ExpertSizes` explains the three new axes.
    """
    # [island, pp, dp, state, tp]
    by_state = np.sort(ranks.reshape(*ranks.shape[:3], -1, layout.tp), axis=3)
    folded = by_state.reshape(*ranks.shape[:2], *expert_sizes(layout), layout.tp)
    return np.sort(folded, axis=4)


def cut_axes(
    dims: Sequence[Dim], layout: Layout, whole: bool = False
) -> tuple[tuple[str, ...], ...]:
    """Return, for each dimension in ``dims``, the mesh axes that cut it. Axes of size one are left out.

    The name of a dimension decides, by the table :data:`CUTS`. Two axes are added to the table's. With
    ``layout.vocab_barriers``, ``pp`` cuts the vocabulary. If experts are divided among the ranks of ``tp`` as well,
    ``tp`` cuts the number of experts.

    An axis cuts only the first dimension that it could cut. There is one exception: if ``ep`` has more ranks than there
    are experts, each expert is cut in pieces. Then the axes that cut the number of experts also cut the experts' width.

    ``whole``: whether all ranks of ``tp`` and ``ep`` compute with the whole parameter, so that these axes do not cut
    it.
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
    """Return the number of pieces into which each expert of a stacked parameter is cut; 0 if experts are whole.

    Experts are cut only if more ranks divide the stack than it has experts. ``dims``: dimensions of the parameter, of
    which the first is the number of experts; for other parameters the result is 0. ``cuts``: the axes that cut each
    dimension.
    """
    if not dims or dims[0].name != "expert" or _width(dims[1:]) < 0:
        return 0
    pieces, rest = divmod(layout.size(*cuts[0]), dims[0].count)
    return pieces if pieces > 1 and not rest else 0


def cut_range(
    count: int, layout: Layout, axes: Sequence[str], index: int
) -> tuple[int, int]:
    """Return the range ``(start, stop)`` of part ``index`` of ``count`` elements that ``axes`` of ``layout`` cut.

    If ``tp`` alone cuts the elements, the parts have the sizes that ``layout.tp_shares`` asks for. In all other cases
    the sizes of the parts differ by at most one.
    """
    if layout.tp_shares and tuple(axes) == ("tp",):
        from weft.layout.shares import uneven_part

        return uneven_part(count, layout.tp_shares, index)
    return part(count, layout.size(*axes), index)


def _width(dims: Sequence[Dim]) -> int:
    """Return the index of an expert's width among these dimensions; -1 if it is not there."""
    return next((i for i, dim in enumerate(dims) if dim.name == "ffn"), -1)
