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
    """Settings of FedAsync."""

    unbiased: bool = Field(
        False,
        description=(
            "Whether updates are weighted by how rarely their client sends some, so that clients count as 'weights' "
            "says and not by their speed."
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
    """Adds each update to the model as it comes, stale ones with less weight.

    Unlike in the paper the server adds the client's difference and does not mix in the client's model, which would take
    back what others have changed meanwhile. ``federated.rate`` is the paper's mixing weight.
    """

    def __init__(self, settings: Federated) -> None:
        super().__init__(settings)
        self.unbiased = settings.own(FedAsyncSettings).unbiased
