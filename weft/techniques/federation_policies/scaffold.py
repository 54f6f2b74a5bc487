"""SCAFFOLD: control variates against the drift of clients (Karimireddy et al. 2020)."""

from __future__ import annotations

from weft.federated.corrected_rounds import CorrectedRounds
from weft.federated.policy import ClientStep
from weft.registry import register


@register(
    "federation-policy",
    "scaffold",
    title="SCAFFOLD: control variates against drift",
    paper="Karimireddy et al. 2020",
    recipe="federated.toml --set federated.policy=scaffold",
    proof="tests/federated/test_degenerate.py",
    figure=(
        "loss 0.0814, with `3` of `10` clients 0.09, where FedAvg has 0.2196 and 0.404 (`bench/federated.py`)"
    ),
)
class Scaffold(CorrectedRounds):
    """Corrects the gradients of each client ``i`` by ``c - c_i``: the mean gradient of all clients minus its own
    (Karimireddy et al. 2020).

    ``c_i`` is the mean of the client's gradients in its last round, and ``c`` the mean of these over all clients,
    weighted by their shares. A client keeps its ``c_i`` between rounds.
    """

    client_step = ClientStep(control=True)
