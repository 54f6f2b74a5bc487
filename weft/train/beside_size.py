"""Sizes of what checkpoints of reinforcement learning hold beside the policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from weft.shapes.parameters import learns, parameters
from weft.train.own_critic import critic_optimizer, critic_shape

if TYPE_CHECKING:
    from weft.train.setup import Job


def beside_bytes(job: Job, alone: Callable[[Job], int]) -> int:
    """Return the estimated bytes of what a checkpoint holds beside the policy of ``job``: a critic with layers of its
    own, and a reference model that no processes of its own have. ``alone``: returns those of a job without ``[rl]``.
    """
    recipe, size = job.recipe, 0
    assert recipe.rl is not None
    loss, roles = recipe.rl.policy_loss, recipe.roles
    if loss.needs_reference and not (roles and roles.reference.elsewhere):
        wide, freeze = 8 if recipe.train.dtype == "float64" else 4, recipe.train.freeze
        rows = parameters(job.shape)
        size += sum(p.numel * wide for p in rows if learns(p.name, job.shape, freeze))
    if loss.needs_values and roles and roles.critic.is_apart:
        train = recipe.train.model_copy(update={"freeze": ()})
        own = {"rl": None, "train": train, "optimizer": critic_optimizer(recipe)}
        shape = critic_shape(job.shape, recipe)
        critic = replace(job, shape=shape, recipe=recipe.model_copy(update=own))
        size += alone(critic)
    return size
