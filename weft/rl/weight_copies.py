"""Copies of the policy's present weights into another model of the run, whatever the layouts of both are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from weft.layout.dims import Tensor
from weft.layout.mesh import Mesh, from_all
from weft.layout.parts import NAMES
from weft.rl.weight_moves import WeightMover, WeightsMoved
from weft.rl.weight_plan import weight_plan

if TYPE_CHECKING:
    from weft.parallel.state import State


def copy_weights(
    policy: State, other: State | None, mesh: Mesh, wanted: Callable[[str], bool]
) -> WeightsMoved:
    """Copy the present weights of a policy into those parameters of another model that have the same names. Collective.

    A rank gets only those elements from other ranks that it does not have itself.

    ``policy``: state of the policy under ``mesh``. ``other``: this rank's part of the other model; None: it has none.
    ``wanted``: whether the parameter with a name is copied. Returns the bytes and seconds of the move.
    """
    policy.bring_home()
    policy.settle()
    parts = [] if other is None else [h for h in other.held if wanted(h.name)]
    if other is not None:
        other.expose()
    tensors = {h.name: Tensor(h.logical.shape, NAMES[h.local.dtype]) for h in parts}
    held = {h.name: [h.box] for h in policy.held if wanted(h.name)}
    needed = {h.name: [h.box] for h in parts}
    group = mesh.step_group
    everyones = from_all((tensors, held, needed), group)
    known = {
        name: tensor for of_rank, _, _ in everyones for name, tensor in of_rank.items()
    }
    rank = 0 if group is None else group.rank()
    plan = weight_plan(
        known,
        [of_rank for _, of_rank, _ in everyones],
        [of_rank for _, _, of_rank in everyones],
        rank,
    )
    sources = {h.name: {h.box: h.local} for h in policy.held}
    targets = {h.name: {h.box: h.local} for h in parts}
    moved = WeightMover(plan, known, group, mesh.device).move(sources, targets)
    if other is not None:
        other.release()  # what was gathered is of other values
    return moved
