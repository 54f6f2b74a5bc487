"""Samples that the model writes itself, rewarded by tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.refusal import Rule
from weft.registry import register

if TYPE_CHECKING:
    from weft.recipe import Recipe
    from weft.recipe.conflicts import AskedRecipe
    from weft.train.setup import Job

#: Why nothing may be drawn for each token: the numbers belong to samples of fixed data.
NOT_DRAWN = "draws by the samples of data, and [rl] learns from answers, for which nothing is drawn"


def has_critic_apart(asked: AskedRecipe) -> bool:
    """Return whether the recipe ``asked`` has a critic with layers of its own."""
    return (
        asked.rl is not None and asked.roles is not None and asked.roles.critic.is_apart
    )


def has_critic_beside(asked: AskedRecipe) -> bool:
    """Return whether the recipe ``asked`` has a critic with layers of its own on the ranks of its policy."""
    return (
        has_critic_apart(asked)
        and asked.roles is not None
        and not asked.roles.critic.elsewhere
    )


@register(
    "samples",
    "rl",
    title="Reinforcement learning within the training run",
    paper="Shao et al. 2024 (GRPO); Sheng et al. 2024 (HybridFlow)",
    recipe="rl-sums.toml",
    proof="tests/rl/test_rl_loader.py",
    figure="loss, gradients and parameters of dp=2,cp=2 equal to 1e-10 in float64",
    rules=(
        Rule("rewards with dropout", "rl model", lambda a: a.rl is not None and a.model.dropout > 0,
             f"model.dropout = {{0.model.dropout}} {NOT_DRAWN}", "leave one of them out"),
        Rule("rewards with dropout of adapters", "rl adapter",
             lambda a: a.rl is not None and bool(a.adapter and a.adapter.dropout),
             f"adapter.dropout = {{0.adapter.dropout}} {NOT_DRAWN}", "leave one of them out"),
        Rule("rewards with drawn modules", "rl model", lambda a: a.rl is not None and a.model.small_ffn > 0,
             f"model.small_ffn = {{0.model.small_ffn}} {NOT_DRAWN}", "leave one of them out"),
        Rule("a critic of no method", "rl roles",
             lambda a: a.rl is not None and has_critic_apart(a) and not a.rl.policy_loss.needs_values,
             "roles.critic.trunk = 'own' is about a critic, and rl.method = {0.rl.method!r} has none",
             "leave it out, or use rl.method = 'ppo'"),
        Rule("settings of a critic that shares all", "rl roles",
             lambda a: a.rl is not None and a.roles is not None and not a.roles.critic.is_apart
             and a.roles.critic != type(a.roles.critic)(),
             "[roles.critic] is about a critic with layers of its own, and roles.critic.trunk = 'shared'",
             "set trunk = 'own', or leave its other settings out"),
        Rule("a critic apart beside an adapter", "rl roles adapter",
             lambda a: has_critic_apart(a) and a.adapter is not None,
             "roles.critic.trunk = 'own' trains all weights of a second model, and [adapter] is there to train few",
             "use trunk = 'shared', or leave [adapter] out"),
        Rule("a critic apart that is not on the device", "rl roles memory",
             lambda a: has_critic_beside(a) and bool(a.memory.away),
             "roles.critic.trunk = 'own' keeps the critic on the device, and [memory] keeps tensors elsewhere to save "
             "memory there", "set roles.critic.ranks, use trunk = 'shared', or leave [memory] out"),
        Rule("a critic apart under layouts that plan one model", "rl roles layout",
             lambda a: has_critic_beside(a) and (a.layout.placement == "moving" or a.layout.skip > 0),
             "roles.critic.trunk = 'own' trains two models in every step, and layout.skip and layout.placement = "
             "'moving' plan the passes of one", "set roles.critic.ranks, use trunk = 'shared', or leave these out"),
        Rule("a critic apart of a plugin's model", "rl roles model",
             lambda a: has_critic_apart(a) and bool(a.model.kind),
             "roles.critic.trunk = 'own' makes a critic of Weft's transformer, and model.kind = {0.model.kind!r} is "
             "another model", "use trunk = 'shared', or leave model.kind out"),
    ),
)  # fmt: skip
def written_answers(recipe: Recipe) -> Job:
    """Check ``recipe``, which has a section ``[rl]``, and return the job that trains on answers to its tasks."""
    from weft.rl.rl_setup import prepare_rl

    return prepare_rl(recipe)
