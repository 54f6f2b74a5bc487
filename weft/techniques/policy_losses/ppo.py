"""PPO: advantages by a critic (Schulman et al. 2017, 1707.06347)."""

from typing import Any

from weft.registry import register


@register(
    "policy-loss",
    "ppo",
    title="PPO: advantages by a critic that shares or owns its trunk",
    paper="Schulman et al. 2017 (1707.06347)",
    recipe="rl-sums.toml --set rl.method=ppo",
    proof="tests/rl/test_trl_ppo.py, tests/models/test_policy_loss.py, tests/train/test_own_critic.py",
    figure="TRL 1.12's losses and gradients of policy and critic to 1e-5; every layout to 1e-10",
)
def ppo() -> dict[str, Any]:
    """Return the settings of the policy loss PPO (Schulman et al. 2017). Advantages are generalised advantage
    estimates, whitened over all tokens of the step.
    """
    return {
        "normaliser": "tokens",
        "advantage": "gae",
        "whiten": True,
        "trace": 0.95,
        "kl": "k1",
        "kl_weight": 0.05,
        "kl_in": "reward",
        "value_weight": 0.1,
        "value_clip": 0.2,
    }
