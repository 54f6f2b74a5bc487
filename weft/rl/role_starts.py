"""How the roles on the policy's ranks begin: with the weights that the policy has when rewards begin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.parallel.reference_weights import set_reference
from weft.rl.critic_start import start_critic
from weft.rl.weight_copies import copy_weights
from weft.train.own_critic import copied_critic, critic_of
from weft.train.reference_layout import reference_beside

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.parallel.state import State
    from weft.rl.rl_phases import RlPhases


def start_roles(job: RlPhases, policy: State, mesh: Mesh) -> int:
    """Let the reference model, and a critic with layers of its own, begin as the policy is now. Collective.

    ``policy``: the policy's state under ``mesh``. A named critic, and a reference model in other processes, have their
    own beginning. Returns the bytes that this rank has got for a reference model with a layout of its own.
    """
    received = 0
    if (own := reference_beside(policy)) is not None:
        moved = copy_weights(policy, own.built.state, mesh, lambda name: True)
        received = moved.received
    elif job.loss.needs_reference and not job.roles.reference.elsewhere:
        set_reference(policy)
    if job.roles.critic.model:
        return received
    if (critic := critic_of(policy)) is not None:
        start_critic(policy, critic.state, mesh)
    elif (copy := copied_critic(policy)) is not None:
        start_critic(policy, copy.whole, mesh)
    return received


def complete_reference(policy: State, mesh: Mesh) -> int:
    """Give a reference model with a layout of its own what does not learn, and so is in no checkpoint of it.

    Collective. ``policy``: the policy's state under ``mesh``. Returns the bytes that this rank has got.
    """
    own = reference_beside(policy)
    if own is None:
        return 0
    kept = own.state.kept
    moved = copy_weights(policy, own.built.state, mesh, lambda name: name not in kept)
    return moved.received
