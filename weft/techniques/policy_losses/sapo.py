"""SAPO: a soft gate in place of clipping (Qwen team 2025, 2511.20347)."""

from typing import Any

from weft.registry import register


@register(
    "policy-loss",
    "sapo",
    title="SAPO: a soft gate in place of clipping",
    paper="Qwen team 2025 (2511.20347)",
    recipe="rl-sums.toml --set rl.method=sapo",
    proof="tests/rl/test_trl_losses.py, tests/models/test_policy_loss.py",
    figure="TRL 1.16's advantages, losses and gradients on recorded answers to 1e-5; every layout to 1e-10",
)
def sapo() -> dict[str, Any]:
    """Return the settings of the policy loss SAPO (Qwen team 2025): a sigmoid of the probability ratio takes the place
    of limits.
    """
    return {"normaliser": "sequence", "form": "sapo", "advantage": "group"}
