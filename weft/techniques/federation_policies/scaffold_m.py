"""SCAFFOLD-M: momentum and control variates (Cheng et al. 2024)."""

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
    "scaffold-m",
    title="SCAFFOLD-M: momentum and control variates",
    paper="Cheng et al. 2024",
    recipe="federated.toml --set federated.policy=scaffold-m",
    proof="tests/federated/test_degenerate.py",
    figure=(
        "loss 0.0724, with `3` of `10` clients 0.0728, where FedAvg has 0.2196 and 0.404 (`bench/federated.py`)"
    ),
    settings=MomentumSettings,
    draws={"beta": (0.1, 1.0)},
)
class ScaffoldM(CorrectedRounds):
    """Corrects clients' gradients as SCAFFOLD does, and mixes them with the direction of the last round as FedAvg-M
    does (Cheng et al. 2024).
    """

    def __init__(self, settings: Federated) -> None:
        super().__init__(settings)
        beta = settings.own(MomentumSettings).beta
        self.client_step = ClientStep(beta, control=True)
