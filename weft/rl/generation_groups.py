"""Which of the ranks that train generate together, and which part of the model each of them gets.

Ranks are grouped at intervals, so that what a rank trains is as far as possible part of what it generates with, and
need not come from another rank (HybridFlow, Sheng et al. 2024, 2409.19256, section 5).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from weft.checkpoint.boxes import intersection, volume
from weft.layout.axis_groups import axis_groups
from weft.layout.dims import Box
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.layout.placement import Place, rank_table
from weft.models.transformer import Transformer
from weft.parallel.build import whole_model
from weft.parallel.held_stages import hold_stages
from weft.recipe import ModelShape
from weft.rl.weight_plan import Boxes


class GenerationGroups(NamedTuple):
    """Division of the training ranks into groups, each of which generates with a model of its own.

    ``layout``: layout of a group, with the order of axes by which its ranks are numbered. ``members``: for each group
    its ranks, ascending. ``kept``: number of elements, over all ranks, that a rank needs for generation and holds in
    training already, so that they need not be sent.
    """

    layout: Layout
    members: list[list[int]]
    kept: int


def computed_boxes(shape: ModelShape, layout: Layout, rank: int) -> dict[str, Box]:
    """Return the boxes of the parameters that ``rank`` of ``layout`` computes with, by name. ``shape``: shape of the
    model. It needs no process group.

    A box is the part of a whole tensor that a rank holds.
    """
    return {name: box for name, (box, _) in _boxes(shape, layout, rank).items()}


def trained_boxes(
    shape: ModelShape, layout: Layout, rank: int, seq_len: int = 1024
) -> dict[str, Box]:
    """Return the boxes of the parameters whose state ``rank`` of ``layout`` holds in training, by name.

    ``shape``: shape of the model. It needs no process group. ``seq_len``: tokens of a sequence, by which layers are
    assigned to pipeline stages.
    """
    return {
        name: box for name, (_, box) in _boxes(shape, layout, rank, seq_len).items()
    }


def _boxes(
    shape: ModelShape, layout: Layout, rank: int, seq_len: int = 1024
) -> dict[str, tuple[Box, Box]]:
    """The boxes that a rank computes with and whose state it holds."""
    mesh = Mesh(layout, torch.device("meta"), Place.of(layout, rank))
    if layout.pp == 1:
        model = whole_model(shape, mesh)
        return {
            name: (logical.box, mesh.place.hold(logical).box)
            for name, logical in model.logical_parameters()
        }
    stages = hold_stages(shape, mesh, seq_len)
    model = Transformer(shape, mesh, layers=stages.layers, ends=stages.ends)
    return {
        name: (logical.box, mesh.place.hold(logical, stages.copies(name)).box)
        for name, logical in model.logical_parameters()
    }


def generation_groups(
    layout: Layout, held: Sequence[Boxes], needed: Sequence[Mapping[str, Box]]
) -> GenerationGroups:
    """Divide the training ranks into groups that generate under ``layout``, so that few weights have to be sent.

    The divisions that are compared have equal intervals between the ranks along every axis of ``layout``, and the axes
    may be nested in any order. The division is chosen in which ranks already hold most of the elements that they need
    for generation. Among equals, it is the one whose groups span the smallest ranges of rank numbers.

    ``held``: for each training rank, the boxes that it holds, by name; the number of these ranks is a multiple of the
    ranks of ``layout``. ``needed``: for each rank of ``layout``, the box of each parameter that it computes with.
    """
    world, size = len(held), layout.world
    kept = common_elements(held, needed)
    best: tuple[int, int] | None = None
    chosen: GenerationGroups | None = None
    for order in _orders(layout):
        ordered = layout.model_copy(update={"order": order}) if order else layout
        # the rank of the given layout that has the coordinates of each rank of the ordered one
        same = rank_table(layout).flatten()[np.argsort(rank_table(ordered).flatten())]
        for members in _spread(ordered, world // size):
            count = int(kept[members, same[None]].sum())
            spread = int((members[:, -1] - members[:, 0]).sum())
            if best is None or (-count, spread) < best:
                best = -count, spread
                chosen = GenerationGroups(ordered, members.tolist(), count)
    assert chosen is not None
    return chosen


def mesh_of_members(
    layout: Layout, device: torch.device, members: Sequence[Sequence[int]]
) -> Mesh:
    """Return the mesh of ``layout`` over the group of ranks that this rank belongs to.

    All ranks of the default process group must call it. ``members``: for each group, ascending, the world ranks that
    are its ranks 0, 1 and so on. Each rank of the default process group is in exactly one group.
    """
    # [group, pp, dp, shard, cp, tp]
    table = np.asarray(members)[:, rank_table(layout)[0]]
    return Mesh(layout, device, *axis_groups(layout, device, table))


def common_elements(
    held: Sequence[Boxes], needed: Sequence[Mapping[str, Box]]
) -> np.ndarray:
    """Return how many elements a training rank holds that a rank of the generation layout (a place) needs, int
    ``[ranks, places]``.

    ``held``: for each rank, the boxes that it holds. ``needed``: for each place, the boxes that it needs.
    """
    common = np.zeros((len(held), len(needed)), dtype=np.int64)
    for name in {name for place in needed for name in place}:
        known: dict[tuple[Box, Box], int] = {}
        for rank, boxes in enumerate(held):
            for box in boxes.get(name, ()):
                for index, place in enumerate(needed):
                    if name not in place:
                        continue
                    pair = box, place[name]
                    if pair not in known:
                        both = intersection(*pair)
                        known[pair] = 0 if both is None else volume(both)
                    common[rank, index] += known[pair]
    return common


def _orders(layout: Layout) -> list[str]:
    """The orders of the axes that ``layout`` cuts, that of the layout first."""
    axes = [axis for axis in layout.axis_order if layout.size(axis) > 1]
    return [" ".join(order) for order in permutations(axes)] if len(axes) > 1 else [""]


def _spread(layout: Layout, groups: int) -> Iterator[np.ndarray]:
    """Yield tables of ranks ``[groups, ranks of layout]``, in which ranks lie at equal intervals along every axis."""
    sizes = [layout.size(axis) for axis in layout.axis_order if layout.size(axis) > 1]
    for factors in _factors(groups, len(sizes) + 1):
        shape = [
            factors[0],
            *(n for pair in zip(sizes, factors[1:], strict=True) for n in pair),
        ]
        ranks = np.arange(prod(shape)).reshape(shape)
        of_groups = range(0, len(shape), 2)
        ranks = ranks.transpose([*of_groups, *range(1, len(shape), 2)])
        yield ranks.reshape(groups, -1)


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write ``number`` as a product of ``count`` factors."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factors(number // first, count - 1):
                yield (first, *rest)
