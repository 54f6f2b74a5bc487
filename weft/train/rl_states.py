"""States beside a policy in reinforcement learning: of a reference model, and of a critic with layers of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.layout.mesh import Mesh
from weft.train.critic_copy import CopiedState, CriticCopy
from weft.train.own_critic import CRITIC, build_critic

if TYPE_CHECKING:
    from weft.models.values import Values
    from weft.parallel.state import State
    from weft.recipe import ModelShape, Recipe


def add_rl_states(
    state: State, shape: ModelShape, mesh: Mesh, recipe: Recipe, values: Values | None
) -> None:
    """Add what reinforcement learning keeps beside the policy, as the recipe asks: the reference model's weights,
    unless it is in processes of its own, and a critic that has layers of its own. Collective.

    The reference model is a slot of every parameter, or a model under a layout of its own. ``state``, ``shape``: the
    policy's. ``values``: the initial values of the policy; None: seeded ones, or those of a checkpoint that is loaded
    later.
    """
    assert recipe.rl is not None
    loss, roles = recipe.rl.policy_loss, recipe.roles
    if loss.needs_reference and not (roles and roles.reference.elsewhere):
        _add_reference(state, shape, mesh, recipe, values)
    if not (loss.needs_values and roles and roles.critic.is_apart):
        return
    if not roles.critic.elsewhere:
        state.beside[CRITIC] = build_critic(shape, mesh, recipe, values)
        return
    leads = mesh.step_group is None or mesh.step_group.rank() == 0
    alone = Mesh.single()
    whole = build_critic(shape, alone, recipe, values).state if leads else None
    state.beside[CRITIC] = CriticCopy(CopiedState(whole))


def _add_reference(
    state: State, shape: ModelShape, mesh: Mesh, recipe: Recipe, values: Values | None
) -> None:
    role = recipe.roles and recipe.roles.reference
    # after a loss of ranks, those that are left may be too few for its layout
    if role and role.has_own_layout and role.layout.world == mesh.layout.world:
        from weft.train.reference_layout import BESIDE, build_reference

        state.beside[BESIDE] = build_reference(state, shape, mesh, recipe, values)
        return
    from weft.parallel.reference_weights import add_reference

    add_reference(state)
