"""FedAvg: rounds in which clients take local steps, and the server takes the mean (McMahan et al. 2017)."""

from __future__ import annotations

from weft.federated.round_policy import RoundPolicy
from weft.registry import register


@register(
    "federation-policy",
    "fedavg",
    title="FedAvg: the weighted mean of local steps",
    paper="McMahan et al. 2017",
    recipe="federated.toml --set federated.policy=fedavg",
    proof="tests/federated/test_degenerate.py",
    figure="one client is gradient descent, exactly",
)
class FedAvg(RoundPolicy):
    """Waits in each round for the slowest client, and moves the model by the weighted mean of all differences (McMahan
    et al. 2017).
    """
