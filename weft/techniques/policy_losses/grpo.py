"""GRPO: answers compared within their group, without a critic (Shao et al. 2024, 2402.03300)."""

from typing import Any

from weft.registry import register


@register(
    "policy-loss",
    "grpo",
    title="GRPO: answers compared within their group, without a critic",
    paper="Shao et al. 2024 (2402.03300)",
    recipe="rl-sums.toml",
    proof="tests/rl/test_trl_losses.py, tests/models/test_policy_loss.py",
    figure="TRL 1.16's advantages, losses and gradients on recorded answers to 1e-5; every layout to 1e-10",
)
def grpo() -> dict[str, Any]:
    """Return the settings of the policy loss GRPO (Shao et al. 2024): every answer counts equally, however
    long it is.
    """
    return {"normaliser": "sequence", "advantage": "group"}
