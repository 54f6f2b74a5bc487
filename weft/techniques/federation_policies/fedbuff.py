"""FedBuff: a buffer of updates from whoever is ready (Nguyen et al. 2022)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, PositiveInt

from weft.federated.buffered_policy import BufferedPolicy
from weft.registry import register
from weft.section import Section

if TYPE_CHECKING:
    from weft.recipe.federated_section import Federated


class FedBuffSettings(Section):
    """Settings of FedBuff, which a recipe gives in the section ``[federated]``: size of the buffer, and how updates of
    slow clients count.
    """

    buffer: PositiveInt = Field(
        3,
        description="Number of clients' updates that the server combines into one change of the model.",
    )
    unbiased: bool = Field(
        False,
        description=(
            "Whether updates of slow clients get larger weights because they are rarer, so that in the long run "
            "each client counts as federated.weights says. If false, fast clients count more, because they send "
            "more updates."
        ),
    )


@register(
    "federation-policy",
    "fedbuff",
    title="FedBuff: a change for every few updates",
    paper="Nguyen et al. 2022",
    recipe="federated.toml --set federated.policy=fedbuff",
    proof="tests/federated/test_degenerate.py, tests/federated/test_shares.py",
    figure="a buffer of all clients at equal speeds is FedAvg, to the last bit",
    settings=FedBuffSettings,
    draws={"buffer": (1, 2), "unbiased": (True, False)},
)
class FedBuff(BufferedPolicy):
    """Changes the model whenever ``buffer`` updates have come, from any clients; no client waits for another (Nguyen et
    al. 2022).
    """

    def __init__(self, settings: Federated) -> None:
        super().__init__(settings)
        own = settings.own(FedBuffSettings)
        self.size = own.buffer
        self.unbiased = own.unbiased
