"""Dr. GRPO: no division by lengths or by the spread of rewards (Liu et al. 2025, 2503.20783)."""

from typing import Any

from weft.registry import register


@register(
    "policy-loss",
    "dr-grpo",
    title="Dr. GRPO: no division by lengths or by the spread of rewards",
    paper="Liu et al. 2025 (2503.20783)",
    recipe="rl-sums.toml --set rl.method=dr-grpo",
    proof="tests/rl/test_trl_losses.py, tests/models/test_policy_loss.py, tests/rl/test_length_bias.py",
    figure=(
        "TRL 1.16's advantages, losses and gradients on recorded answers to 1e-5; every layout to 1e-10; the expected "
        "gradient leaves the mean length of wrong answers as it is, and that of `sequence` makes them longer"
    ),
)
def dr_grpo() -> dict[str, Any]:
    """Return the settings of the policy loss Dr. GRPO (Liu et al. 2025): an answer's sum over tokens is divided by a
    constant instead of its length, and advantages are not divided by their standard deviation.
    """
    return {"normaliser": "constant", "advantage": "none"}
