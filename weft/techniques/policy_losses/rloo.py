"""RLOO: each answer compared with the mean of the others (Ahmadian et al. 2024, 2402.14740)."""

from typing import Any

from weft.registry import register


@register(
    "policy-loss",
    "rloo",
    title="RLOO: each answer compared with the mean of the others",
    paper="Ahmadian et al. 2024 (2402.14740)",
    recipe="rl-sums.toml --set rl.method=rloo",
    proof="tests/rl/test_trl_losses.py, tests/models/test_policy_loss.py",
    figure="TRL 1.16's advantages, losses and gradients on recorded answers to 1e-5; every layout to 1e-10",
)
def rloo() -> dict[str, Any]:
    """Return the settings of the policy loss RLOO (Ahmadian et al. 2024). The probability ratio is that of the whole
    answer, and the divergence "k1" from the reference model is subtracted from rewards.
    """
    return {
        "normaliser": "sequence",
        "ratio": "product",
        "advantage": "leave-one-out",
        "kl": "k1",
        "kl_weight": 0.05,
        "kl_in": "reward",
    }
