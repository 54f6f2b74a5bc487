"""LUSPO: GSPO whose losses are summed over tokens, so that long answers are not weighed down (2602.05261)."""

from typing import Any

from weft.registry import register


@register(
    "policy-loss",
    "luspo",
    title="LUSPO: one ratio for each answer, whose tokens are summed",
    paper="LUSPO, 2602.05261",
    recipe="rl-sums.toml --set rl.method=luspo",
    proof="tests/rl/test_trl_losses.py, tests/models/test_policy_loss.py",
    figure="TRL 1.16's advantages, losses and gradients on recorded answers to 1e-5; every layout to 1e-10",
)
def luspo() -> dict[str, Any]:
    """Return the settings of the policy loss LUSPO (arXiv 2602.05261). The probability ratio is that of the whole
    answer, as in GSPO. Sums over tokens are divided by the number of answers.
    """
    return {
        "normaliser": "constant",
        "constant": 1.0,
        "ratio": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "advantage": "group",
    }
