"""FedAsync: every update changes the model at once (Xie et al. 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from weft.federated.buffered_policy import BufferedPolicy
from weft.registry import register
from weft.section import Section

if TYPE_CHECKING:
    from weft.recipe.federated_section import Federated


class FedAsyncSettings(Section):
    """Settings of FedAsync, which a recipe gives in the section ``[federated]``: how updates of slow clients count."""

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
    "fedasync",
    title="FedAsync: every update at once",
    paper="Xie et al. 2019",
    recipe="federated.toml --set federated.policy=fedasync",
    proof="tests/federated/test_degenerate.py, tests/federated/test_shares.py",
    figure="one client is gradient descent, exactly",
    settings=FedAsyncSettings,
    draws={"unbiased": (True, False)},
)
class FedAsync(BufferedPolicy):
    """Adds each update to the model as soon as it arrives; a stale update has less weight (Xie et al. 2019).

    Unlike in the paper, the server adds the client's difference instead of mixing in the client's model. Mixing would
    undo the updates that other clients have sent in the meantime. ``federated.rate`` is the paper's mixing weight.
    """

    def __init__(self, settings: Federated) -> None:
        super().__init__(settings)
        self.unbiased = settings.own(FedAsyncSettings).unbiased
