"""VESPO: a soft weight of whole answers, by the product of their ratios (Shen et al. 2026, 2602.10693)."""

from typing import Any

from weft.registry import register


@register(
    "policy-loss",
    "vespo",
    title="VESPO: a soft weight of whole answers",
    paper="Shen et al. 2026 (2602.10693)",
    recipe="rl-sums.toml --set rl.method=vespo",
    proof="tests/rl/test_trl_losses.py, tests/models/test_policy_loss.py",
    figure="TRL 1.16's advantages, losses and gradients on recorded answers to 1e-5; every layout to 1e-10",
)
def vespo() -> dict[str, Any]:
    """Return the settings of the policy loss VESPO (Shen et al. 2026): each answer is weighted by a function of the
    product of its probability ratios, through which no gradient flows.
    """
    return {"normaliser": "tokens", "form": "vespo", "advantage": "group"}
