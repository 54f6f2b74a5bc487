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
        description="File with the invitation to the server of which this run is a client; weft client sets it.",
    )
    name: str = Field(
        "",
        max_length=64,
        description="Name of this client at the server; weft client sets it.",
    )
    compress: str = Field(
        "none",
        description=(
            "Compression of clients' updates, with the values of sync.compress. A client adds the compression error "
            "to its next update (error feedback)."
        ),
    )
    compress_back: str = Field(
        "none",
        description=(
            "Compression of the model's changes that the server sends to clients, with the values of sync.compress. "
            "Each client first gets the whole model without compression. The compression error is added to a later "
            "change (error feedback)."
        ),
    )
    average: Literal["factors", "product"] = Field(
        "factors",
        description=(
            "With adapters: what the server averages over clients. 'factors': each of an adapter's two factors by "
            "itself; 'product': the products of the factors, which the server then factorises again."
        ),
    )
    moments: Literal["new", "kept"] = Field(
        "new",
        description=(
            "Optimizer moments of a client at the beginning of its local steps. 'new': zeros, so that repeated work "
            "gives the same update; 'kept': the moments after its last local steps."
        ),
    )
    secure: bool = Field(
        False,
        description=(
            "Mask clients' updates in pairs, so that the server sees only the sum of a round, not single "
            "updates (secure aggregation). Needs a policy with rounds, and at least 2 clients in each."
        ),
    )
    clip: NonNegativeFloat = Field(
        0.0,
        description="Largest norm of a client's update; a larger update is scaled down to it. 0: no limit.",
    )
    noise: NonNegativeFloat = Field(
        0.0,
        description=(
            "Standard deviation of the noise that is added to the model's changes, as a multiple of 'clip' times the "
            "largest weight of a client (differential privacy of clients); 0: none."
        ),
    )
    delta: float = Field(
        1e-5,
        gt=0,
        lt=1,
        description="Delta of (epsilon, delta) differential privacy: probability that the bound epsilon does not hold.",
    )
    largest: NonNegativeFloat = Field(
        100.0,
        description=(
            "Largest norm per step of an update, as a multiple of the median of the last updates; an "
            "update beyond it is refused. 0: no limit."
        ),
    )
    grace: PositiveFloat = Field(
        30.0,
        description="Seconds in which a client may reconnect after a broken connection and keep its work.",
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
