"""The section ``[federated]``: clients that own their data train one model, for a server that never sees these data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from weft.recipe.host_section import HostSection


class Federated(HostSection):
    """Section of federated training: the policy, what clients do, and the clients that a virtual clock simulates."""

    hosts: ClassVar[Mapping[str, str]] = {"policy": "federation-policy"}

    policy: str = Field(
        "fedavg",
        description="Who works for how long, and how updates become changes of the model.",
    )
    listen: str = Field(
        "",
        pattern=r"^$|^[^/\s]+:\d{1,5}$",
        description=(
            "Address HOST:PORT at which the server waits for clients. Left out: the run simulates its clients on a "
            "virtual clock, in one process."
        ),
    )
    clients: PositiveInt = Field(
        5,
        description="Number of clients with which work begins; on a virtual clock the number of all clients.",
    )
    rounds: PositiveInt = Field(
        100, description="Changes of the server's model after which the run ends."
    )
    seconds: NonNegativeFloat = Field(
        0.0,
        description="Seconds, of the virtual clock if there is one, after which the run ends; 0: no limit.",
    )
    steps: PositiveInt = Field(
        20, description="Local steps of a client, each with train.batch samples."
    )
    per_round: NonNegativeInt = Field(
        0,
        description="Number of clients that take part in a round, drawn at random; 0: all.",
    )
    rate: PositiveFloat = Field(
        1.0, description="Factor on the weighted mean of the clients' differences."
    )
    weights: Literal["samples", "equal"] = Field(
        "samples",
        description=(
            "Weights of the clients in the objective: proportional to their numbers of samples, or equal."
        ),
    )
    staleness: NonNegativeFloat = Field(
        0.5,
        description=(
            "Exponent by which stale updates lose weight in asynchronous policies: (1 + staleness)^-exponent."
        ),
    )
    patience: PositiveFloat = Field(
        600.0,
        description=(
            "Seconds for which the server waits for missing clients, and in rounds for answers. It then goes on with "
            "those there are."
        ),
    )
    seed: NonNegativeInt = Field(
        0, description="Seed of the partition, and of who takes part in a round."
    )
