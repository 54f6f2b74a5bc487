"""The first weights of a critic with layers of its own: those of the policy when rewards begin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.layout.dims import Tensor
from weft.layout.mesh import Mesh, from_all
from weft.layout.parts import NAMES
from weft.rl.weight_moves import WeightMover, WeightsMoved, weight_plan

if TYPE_CHECKING:
    from weft.parallel.state import State

#: The parameter of a critic that is never the policy's: the output of one number.
HEAD = "head"


def start_critic(policy: State, critic: State, mesh: Mesh) -> WeightsMoved:
    """Copy the present weights of a policy into a critic of the same sizes, all but its output layer. Collective.

    The optimizer of the critic starts anew. Both have the same layout, but pipelines may hold blocks of the critic on
    other ranks than those of the policy, from which they are then sent. Returns the bytes and seconds of the move.
    """
    policy.bring_home()
    policy.settle()
    critic.expose()
    group = mesh.step_group
    tensors = {
        h.name: Tensor(h.logical.shape, NAMES[h.local.dtype])
        for h in critic.held
        if h.name != HEAD
    }
    held = {h.name: [h.box] for h in policy.held if h.name != HEAD}
    needed = {h.name: [h.box] for h in critic.held if h.name != HEAD}
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
    targets = {h.name: {h.box: h.local} for h in critic.held}
    moved = WeightMover(plan, known, group, mesh.device).move(sources, targets)
    critic.release()
    critic.make_slots()
    return moved
