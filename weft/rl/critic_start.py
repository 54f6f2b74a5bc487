"""The first weights of a critic with layers of its own: those of the policy when rewards begin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.rl.weight_copies import copy_weights

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.parallel.state import State
    from weft.rl.weight_moves import WeightsMoved

#: The parameter of a critic that is never the policy's: the output of one number.
HEAD = "head"


def start_critic(policy: State, critic: State | None, mesh: Mesh) -> WeightsMoved:
    """Copy the present weights of a policy into a critic of the same sizes, all but its output layer. Collective.

    The optimizer of the critic starts anew. Pipelines may hold blocks of the critic on other ranks than those of the
    policy, and of a critic in other processes the first rank has a copy; what a rank lacks is sent to it. ``critic``:
    this rank's part; None: it has none. Returns the bytes and seconds of the move.
    """
    moved = copy_weights(policy, critic, mesh, lambda name: name != HEAD)
    if critic is not None:
        critic.make_slots()
    return moved
