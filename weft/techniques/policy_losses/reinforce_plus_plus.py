"""REINFORCE++: returns of tokens, whitened over the step (Hu et al. 2025, 2501.03262)."""

from typing import Any

from weft.registry import register


@register(
    "policy-loss",
    "reinforce-plus-plus",
    title="REINFORCE++: returns of tokens, whitened over the step",
    paper="Hu et al. 2025 (2501.03262)",
    recipe="rl-sums.toml --set rl.method=reinforce-plus-plus",
    proof="tests/rl/test_verl_losses.py, tests/models/test_policy_loss.py",
    figure="verl 0.9's advantages and slopes of the loss on recorded numbers to 1e-6; every layout to 1e-10",
)
def reinforce_plus_plus() -> dict[str, Any]:
    """Return the settings of the policy loss REINFORCE++ (Hu et al. 2025). The advantage of a token is the sum of the
    rewards from this token on, whitened over all tokens of the step.
    """
    return {
        "normaliser": "tokens",
        "advantage": "returns",
        "whiten": True,
        "kl": "k1",
        "kl_weight": 0.01,
        "kl_in": "reward",
    }
