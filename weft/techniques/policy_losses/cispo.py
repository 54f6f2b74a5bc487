"""CISPO: the clipped ratio is a weight, so that no token loses its gradient (MiniMax 2025, 2506.13585)."""

from typing import Any

from weft.registry import register


@register(
    "policy-loss",
    "cispo",
    title="CISPO: the clipped ratio is a weight, so that no token loses its gradient",
    paper="MiniMax 2025 (2506.13585)",
    recipe="rl-sums.toml --set rl.method=cispo",
    proof="tests/rl/test_trl_losses.py, tests/models/test_policy_loss.py",
    figure="TRL 1.16's advantages, losses and gradients on recorded answers to 1e-5; every layout to 1e-10",
)
def cispo() -> dict[str, Any]:
    """Return the settings of the policy loss CISPO (MiniMax 2025). The probability ratio, at most 5, is a weight of the
    log-probability, and has no gradient of its own.
    """
    return {
        "normaliser": "tokens",
        "form": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "advantage": "group",
    }
