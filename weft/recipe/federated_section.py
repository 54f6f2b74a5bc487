"""The section ``[federated]``: clients that own their data train one model, for a server that never sees these data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from weft.recipe.federated_travel import FederatedTravel


class Federated(FederatedTravel):
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
    aggregate: str = Field(
        "mean",
        description=(
            "Rule by which the updates of a change are combined, as in resilience.aggregate: 'mean', or a rule that "
            "some wrong updates cannot mislead."
        ),
    )
    faulty: NonNegativeInt = Field(
        1, description="Number of wrong updates in a change that such a rule tolerates."
    )
    fan_in: int = Field(
        0,
        ge=0,
        description=(
            "Number of updates, or of sums of them, that an aggregator adds up before it passes their sum on; 0: one "
            "flat sum."
        ),
    )
    aggregator: Literal["here", "process"] = Field(
        "here",
        description=(
            "Where aggregators add up: in the server's process, or in one of their own that finds updates in shared "
            "memory (fan_in of at least 3)."
        ),
    )
    fresh: Literal["none", "inversion"] = Field(
        "none",
        description=(
            "What becomes of stale updates of simulated clients. 'inversion': the server looks for data that would "
            "give the update, and trains on them from its present model; it thereby reconstructs clients' data in part."
        ),
    )
    fresh_after: PositiveInt = Field(
        5, description="Staleness from which on an update is treated so."
    )
    patience: PositiveFloat = Field(
        600.0,
        description=(
            "Seconds for which the server waits for missing clients, and in rounds for answers. It then goes on with "
            "those there are."
        ),
    )
    samples: str = Field(
        "sklearn:digits",
        description=(
            "Labelled samples of simulated clients: 'sklearn:digits', 'sklearn:wine', 'sklearn:breast_cancer', or an "
            ".npz file with the arrays 'features' and 'labels' and, if samples come from several sources, 'groups'."
        ),
    )
    held_out: float = Field(
        0.2,
        ge=0,
        lt=1,
        description="Share of these samples that no client has, and by which the model is judged.",
    )
    partition: Literal["even", "dirichlet", "classes", "natural"] = Field(
        "classes",
        description=(
            "How samples are divided among simulated clients. 'even': at random; 'dirichlet': of each class shares by "
            "a Dirichlet distribution; 'classes': a few classes for each client; 'natural': whole groups."
        ),
    )
    alpha: PositiveFloat = Field(
        0.5,
        description="Parameter of the Dirichlet distribution; the smaller, the more clients differ.",
    )
    classes: PositiveInt = Field(
        2, description="Classes of each client with partition = 'classes'."
    )
    speeds: tuple[PositiveFloat, ...] = Field(
        (1.0,),
        min_length=1,
        description=(
            "Seconds that simulated clients take for a local step, client by client; repeated if they are fewer."
        ),
    )
    jitter: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Largest relative deviation of the duration of a simulated work, at random.",
    )
    drops: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of simulated works that are lost, at random: the client goes away, and comes back.",
    )
    away: PositiveFloat = Field(
        60.0, description="Seconds after which such a client comes back."
    )
    seed: NonNegativeInt = Field(
        0, description="Seed of the partition, and of who takes part in a round."
    )

    @property
    def simulates(self) -> bool:
        """Whether clients are simulated on a virtual clock."""
        return not (self.listen or getattr(self, "join", ""))
