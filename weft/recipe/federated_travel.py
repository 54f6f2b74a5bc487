"""Settings of ``[federated]`` about what travels between a real server and its clients, and what is believed."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from weft.errors import UsageError
from weft.recipe.compressor_word import compressor_of
from weft.recipe.host_section import HostSection


class FederatedTravel(HostSection):
    """Settings of federated training between real processes: the addresses of server and clients, and their
    messages.
    """

    join: str = Field(
        "",
        description=(
            "File with the invitation of the server that this run trains for as a client. The command 'weft client' "
            "sets it; do not set it yourself."
        ),
    )
    name: str = Field(
        "",
        max_length=64,
        description=(
            "Name under which this client is known to the server. The command 'weft client' sets it; do not set it "
            "yourself."
        ),
    )
    compress: str = Field(
        "none",
        description=(
            "Compression of the updates that clients send to the server: one of the values of sync.compress, such as "
            "'int8'. What compression loses is added to the client's next update (error feedback)."
        ),
    )
    compress_back: str = Field(
        "none",
        description=(
            "Compression of the changes of the model that the server sends to clients: one of the values of "
            "sync.compress, such as 'int8'. A client's first model is whole. What compression loses is added to a "
            "later change (error feedback)."
        ),
    )
    average: Literal["factors", "product"] = Field(
        "factors",
        description=(
            "For adapters: what the server averages over the clients. 'factors': each of an adapter's two matrices "
            "by itself; 'product': the products of the two matrices, which it then factorises again."
        ),
    )
    moments: Literal["new", "kept"] = Field(
        "new",
        description=(
            "Optimizer moments with which a client begins its local steps. 'new': zeros, so that the same work "
            "gives the same update again; 'kept': those at the end of its last local steps."
        ),
    )
    secure: bool = Field(
        False,
        description=(
            "Whether clients mask their updates so that the server learns only the sum of a round and no single "
            "update (secure aggregation). It needs a policy with rounds, such as 'fedavg', and at least 2 clients "
            "in each round."
        ),
    )
    clip: NonNegativeFloat = Field(
        0.0,
        description="Largest norm of a client's update. A larger update is scaled down to it. 0: no limit.",
    )
    noise: NonNegativeFloat = Field(
        0.0,
        description=(
            "Random noise that is added to each change of the model, so that it reveals little about any client "
            "(differential privacy): its standard deviation, as a multiple of 'clip' times the largest weight of a "
            "client. 0: no noise."
        ),
    )
    delta: float = Field(
        1e-5,
        gt=0,
        lt=1,
        description=(
            "For 'noise': the delta of (epsilon, delta) differential privacy, a small probability with which the "
            "reported epsilon may not hold."
        ),
    )
    largest: NonNegativeFloat = Field(
        100.0,
        description=(
            "Largest norm of an update per local step, as a multiple of the median of recent updates. The server "
            "refuses an update beyond it. 0: no limit."
        ),
    )
    grace: PositiveFloat = Field(
        30.0,
        description="Seconds in which a client whose connection broke may come back without losing its work.",
    )

    @property
    def asks(self) -> dict[str, str]:
        """Names of the techniques of a training step that these settings need, by the setting that needs them."""
        asked = {}
        if getattr(self, "listen", ""):
            asked["listen"] = "federated-server"
        if self.join:
            asked["join"] = "federated-client"
        if self.join and not self.client_step_is_plain:
            asked["policy"] = "corrected-gradients"
        return asked

    @property
    def client_step_is_plain(self) -> bool:
        """Whether clients train with unchanged gradients, because the federation policy has no term of its own for
        them.
        """
        from weft.registry import find

        implementation = find(
            "federation-policy", getattr(self, "policy", "fedavg")
        ).implementation
        return bool(implementation(self).client_step.is_plain)

    @model_validator(mode="after")
    def _travels(self) -> Self:
        for field in ("compress", "compress_back"):
            try:
                compressor_of(getattr(self, field))
            except UsageError as error:
                raise ValueError(f"federated.{field}: {error}") from None
        if self.noise and not self.clip:
            raise ValueError(
                "federated.noise protects nobody while a client's difference may have any size; set federated.clip"
            )
        if self.noise and not self.client_step_is_plain:
            raise ValueError(
                f"federated.noise: policy {getattr(self, 'policy', '')!r} sends clients what it has computed from "
                "differences without noise; use another policy, such as 'fedavg'"
            )
        if self.average == "product" and (
            self.secure or self.noise or not self.client_step_is_plain
        ):
            raise ValueError(
                "federated.average = 'product' needs each client's factors as they are; leave out federated.secure and "
                "federated.noise, and use a policy that leaves clients' gradients as they are, such as 'fedavg'"
            )
        if self.secure and self.compress != "none":
            raise ValueError(
                f"federated.secure sums masked integers, and federated.compress = {self.compress!r} makes no integers "
                "that add up; leave one of them out"
            )
        return self


#: Settings that a client's own recipe may not change, as server and clients must agree on them.
AGREED = (
    "policy", "rounds", "steps", "rate", "weights", "compress", "compress_back", "average", "secure", "clip", "noise",
    "delta",
)  # fmt: skip
