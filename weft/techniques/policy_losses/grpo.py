"""GRPO: advantages within a group of answers to one question, without a critic (Shao et al. 2024, 2402.03300)."""

from typing import Any

from weft.registry import register


@register(
    "policy-loss",
    "grpo",
    title="GRPO: answers compared within their group, without a critic",
    paper="Shao et al. 2024 (2402.03300)",
    proof="tests/models/test_policy_loss.py",
    figure="TRL's losses and gradients on recorded batches to 1e-5",
)
def grpo() -> dict[str, Any]:
    """Return the settings of GRPO: a loss that weighs every answer equally, however long it is."""
    return {
        "normaliser": "sequence",
        "ratio": "token",
        "form": "clip",
        "advantage": "group",
    }
