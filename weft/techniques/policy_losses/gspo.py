"""GSPO: one ratio for each answer (Zheng et al. 2025, 2507.18071)."""

from typing import Any

from weft.registry import register


@register(
    "policy-loss",
    "gspo",
    title="GSPO: one ratio for each answer",
    paper="Zheng et al. 2025 (2507.18071)",
    recipe="rl-sums.toml --set rl.method=gspo",
    proof="tests/rl/test_trl_losses.py, tests/models/test_policy_loss.py",
    figure="TRL 1.16's advantages, losses and gradients on recorded answers to 1e-5; every layout to 1e-10",
)
def gspo() -> dict[str, Any]:
    """Return the settings of the policy loss GSPO (Zheng et al. 2025): the probability ratio is the geometric mean over
    the tokens of an answer, with narrow limits.
    """
    return {
        "normaliser": "sequence",
        "ratio": "sequence",
        "clip_low": 0.0003,
        "clip_high": 0.0004,
        "advantage": "group",
    }
