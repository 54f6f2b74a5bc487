"""FedAvg-M: clients follow the last round's direction (Cheng et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.federated.corrected_rounds import CorrectedRounds
from weft.federated.momentum_settings import MomentumSettings
from weft.federated.policy import ClientStep
from weft.registry import register

if TYPE_CHECKING:
    from weft.recipe.federated_section import Federated


@register(
    "federation-policy",
    "fedavg-m",
    title="FedAvg-M: clients follow the last round's direction",
    paper="Cheng et al. 2024",
    recipe="federated.toml --set federated.policy=fedavg-m",
    proof="tests/federated/test_degenerate.py",
    figure=(
        "0.402 of the loss of FedAvg, 0.252 with `3` of `10` clients (`bench/federated.py`)"
    ),
    settings=MomentumSettings,
    draws={"beta": (0.1, 1.0)},
)
class FedAvgM(CorrectedRounds):
    """Mixes into every local step the direction of the last round: ``beta`` gradient, ``1 - beta`` direction (Cheng et
    al. 2024).

    The direction is the mean gradient of all clients in the last round, so that clients with different data drift apart
    less. It is sent along with the model. Clients should train with plain SGD.
    """

    def __init__(self, settings: Federated) -> None:
        super().__init__(settings)
        beta = settings.own(MomentumSettings).beta
        self.client_step = ClientStep(beta, control=False)
