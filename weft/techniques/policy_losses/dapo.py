"""DAPO: every token counts equally, and the ratio may rise further than fall (Yu et al. 2025, 2503.14476)."""

from typing import Any

from weft.registry import register


@register(
    "policy-loss",
    "dapo",
    title="DAPO: every token counts equally, and the ratio may rise further than fall",
    paper="Yu et al. 2025 (2503.14476)",
    recipe="rl-sums.toml --set rl.method=dapo",
    proof="tests/rl/test_trl_losses.py, tests/models/test_policy_loss.py",
    figure="TRL 1.16's advantages, losses and gradients on recorded answers to 1e-5; every layout to 1e-10",
)
def dapo() -> dict[str, Any]:
    """Return the settings of the policy loss DAPO (Yu et al. 2025): every token of the step counts equally, and the
    probability ratio is limited to at most 1.28.
    """
    return {"normaliser": "tokens", "clip_high": 0.28, "advantage": "group"}
