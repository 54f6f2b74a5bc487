"""Samples that the model writes itself, rewarded by tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.refusal import Rule
from weft.registry import register

if TYPE_CHECKING:
    from weft.recipe import Recipe
    from weft.train.setup import Job

#: Why nothing may be drawn for each token: the numbers belong to samples of fixed data.
NOT_DRAWN = "draws by the samples of data, and [rl] learns from answers, for which nothing is drawn"


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
    ),
)  # fmt: skip
def written_answers(recipe: Recipe) -> Job:
    """Check ``recipe``, which has a section ``[rl]``, and return the job that trains on answers to its tasks."""
    from weft.rl.rl_setup import prepare_rl

    return prepare_rl(recipe)
