"""Samples that the model writes itself, rewarded by tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.registry import register

if TYPE_CHECKING:
    from weft.recipe import Recipe
    from weft.train.setup import Job


@register(
    "samples",
    "rl",
    title="Reinforcement learning within the training run",
    paper="Shao et al. 2024 (GRPO); Sheng et al. 2024 (HybridFlow)",
    recipe="rl-sums.toml",
    proof="tests/rl/test_rl_loader.py",
    figure="loss, gradients and parameters of dp=2,cp=2 equal to 1e-10 in float64",
)
def written_answers(recipe: Recipe) -> Job:
    """Check ``recipe``, which has a section ``[rl]``, and return the job that trains on answers to its tasks."""
    from weft.rl.rl_setup import prepare_rl

    return prepare_rl(recipe)
