"""The section ``[federated]``: clients that own their data train one model, for a server that never sees these data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from weft.recipe.federated_travel import FederatedTravel


class Federated(FederatedTravel):
    """Section on federated training: the policy, what clients do, and the clients that a virtual clock simulates."""

    hosts: ClassVar[Mapping[str, str]] = {
        "policy": "federation-policy",
        "aggregate": "aggregator",
    }

    policy: str = Field(
        "fedavg",
        description=(
            "Federation policy: which clients train, for how many steps, and how their updates change the"
            " model."
        ),
    )
    listen: str = Field(
        "",
        pattern=r"^$|^(\[[0-9A-Fa-f:.]+\]|[^/\s:\[\]]+):\d{1,5}$",
        description=(
            "Address HOST:PORT at which the server waits for clients; an IPv6 address in brackets. If not set: the "
            "run simulates its clients on a virtual clock, in one process."
        ),
    )
    clients: PositiveInt = Field(
        5,
        description=(
            "Number of clients that must have joined before training begins; on a virtual clock the "
            "number of all clients."
        ),
    )
    rounds: PositiveInt = Field(
        100, description="Changes of the server's model after which the run ends."
    )
    seconds: NonNegativeFloat = Field(
        0.0,
        description=(
            "Seconds after which the run ends, on the virtual clock if clients are simulated; 0: no "
            "limit."
        ),
    )
    steps: PositiveInt = Field(
        20, description="Local steps of a client, each with train.batch samples."
    )
    per_round: NonNegativeInt = Field(
        0,
        description="Number of clients that take part in a round, drawn at random; 0: all.",
    )
    rate: PositiveFloat = Field(
        1.0,
        description=(
            "Learning rate of the server: the model changes by this number times the weighted mean of the "
            "clients' updates (their parameters after local steps minus those before)."
        ),
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
            "Exponent a by which late updates lose weight in asynchronous policies: an update whose local steps "
            "began s model changes ago is multiplied by (1 + s)^-a. 0: late updates count in full."
        ),
    )
    aggregate: str = Field(
        "mean",
        description=(
            "Rule by which the server combines clients' updates to a change of the model: 'mean', or a rule of "
            "resilience.aggregate, such as 'krum' or 'trimmed-mean', that tolerates some wrong updates."
        ),
    )
    faulty: NonNegativeInt = Field(
        1,
        description=(
            "Number of wrong updates in each change of the model that 'aggregate' is to tolerate. 'mean' does not "
            "use it."
        ),
    )
    fan_in: int = Field(
        0,
        ge=0,
        description=(
            "Hierarchical aggregation: number of updates, or of partial sums, that an aggregator adds up "
            "before it passes their sum on. 0: one flat sum."
        ),
    )
    aggregator: Literal["here", "process"] = Field(
        "here",
        description=(
            "Where the aggregators run, each of which adds up 'fan_in' updates: in the server's process ('here'), or "
            "in a separate process that "
            "reads updates from shared memory ('process'). 'process' needs fan_in = 3 or more."
        ),
    )
    fresh: Literal["none", "inversion"] = Field(
        "none",
        description=(
            "How stale updates of simulated clients are replaced. 'inversion': the server finds synthetic"
            " data that would give the update, and trains on them from its present model; this partly "
            "reconstructs clients' data."
        ),
    )
    fresh_after: PositiveInt = Field(
        5,
        description=(
            "Staleness from which on 'fresh' replaces an update: number of changes of the server's model since the "
            "client began its local steps."
        ),
    )
    patience: PositiveFloat = Field(
        600.0,
        description=(
            "Seconds for which the server waits for clients to join, and in each round for updates. It "
            "then goes on with those that have come."
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
        description="Share of 'samples' that is held out from all clients, to evaluate the model.",
    )
    partition: Literal["even", "dirichlet", "classes", "natural"] = Field(
        "classes",
        description=(
            "How samples are divided among simulated clients. 'even': at random; 'dirichlet': each class "
            "in shares that a Dirichlet distribution draws; 'classes': a few classes for each client; "
            "'natural': whole groups."
        ),
    )
    alpha: PositiveFloat = Field(
        0.5,
        description="Parameter of partition = 'dirichlet'; the smaller, the more the clients' data differ.",
    )
    classes: PositiveInt = Field(
        2, description="Number of classes of each client with partition = 'classes'."
    )
    speeds: tuple[PositiveFloat, ...] = Field(
        (1.0,),
        min_length=1,
        description=(
            "Seconds that each simulated client takes for a local step; a list shorter than the number of"
            " clients is repeated."
        ),
    )
    jitter: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Largest random deviation of a simulated duration, as a share of it.",
    )
    drops: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "Probability that a simulated client is lost during its local steps; it comes back after "
            "'away' seconds."
        ),
    )
    away: PositiveFloat = Field(
        60.0,
        description="Seconds after which a client that was lost ('drops') comes back.",
    )
    seed: NonNegativeInt = Field(
        0, description="Seed of the partition and of the choice of clients in a round."
    )

    @property
    def simulates(self) -> bool:
        """Whether clients are simulated on a virtual clock."""
        return not (self.listen or getattr(self, "join", ""))
