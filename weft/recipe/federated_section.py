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
            "Federation policy, which decides which clients train, for how many steps, and how their updates "
            "change the model. 'fedavg': rounds in which the server waits for all; 'fedavg-m', 'scaffold' and "
            "'scaffold-m': such rounds with corrections of the clients' steps; 'fedasync': each update changes "
            "the model at once; 'fedbuff': several updates change it together; 'fedcompass': slow clients get "
            "fewer steps, so that clients arrive together; 'fedfix': it changes at fixed times."
        ),
    )
    listen: str = Field(
        "",
        pattern=r"^$|^(\[[0-9A-Fa-f:.]+\]|[^/\s:\[\]]+):\d{1,5}$",
        description=(
            "Address HOST:PORT at which the server waits for clients, with an IPv6 address in brackets. Empty: no "
            "real clients; the run simulates them in one process, with simulated time (a virtual clock)."
        ),
    )
    clients: PositiveInt = Field(
        5,
        description=(
            "Number of clients that must have joined before training begins. If clients are simulated: the number "
            "of all clients."
        ),
    )
    rounds: PositiveInt = Field(
        100,
        description="Number of changes of the server's model after which the run ends.",
    )
    seconds: NonNegativeFloat = Field(
        0.0,
        description=(
            "Seconds after which the run ends; if clients are simulated, seconds of simulated time. 0: no such "
            "limit."
        ),
    )
    steps: PositiveInt = Field(
        20,
        description=(
            "Number of steps that a client trains on its own data before it sends an update. Each has train.batch "
            "samples."
        ),
    )
    per_round: NonNegativeInt = Field(
        0,
        description="Number of clients that take part in a round, drawn at random. 0: all.",
    )
    rate: PositiveFloat = Field(
        1.0,
        description=(
            "Learning rate of the server: the model changes by the weighted mean of the clients' updates times this "
            "number. An update is the client's parameters after its local steps minus those before."
        ),
    )
    weights: Literal["samples", "equal"] = Field(
        "samples",
        description=(
            "Weights of the clients in the mean of their updates. 'samples': in proportion to their numbers of "
            "samples; 'equal': all the same."
        ),
    )
    staleness: NonNegativeFloat = Field(
        0.5,
        description=(
            "For policies that do not wait for all clients: exponent a by which old updates lose weight. An update "
            "is multiplied by (1 + s)^-a if the model has changed s times since the client began. 0: old updates "
            "count in full."
        ),
    )
    aggregate: str = Field(
        "mean",
        description=(
            "How the server combines the updates of several clients. 'mean': their weighted mean; or a rule of "
            "resilience.aggregate that tolerates wrong updates, such as 'krum' or 'trimmed-mean'."
        ),
    )
    faulty: NonNegativeInt = Field(
        1,
        description=(
            "For 'aggregate' other than 'mean': number of wrong updates in each change of the model that do no "
            "harm."
        ),
    )
    fan_in: int = Field(
        0,
        ge=0,
        description=(
            "Number of updates that an aggregator adds up, in a tree of aggregators that pass their sums on to the "
            "server (hierarchical aggregation). 0: no tree; the server adds up all updates itself."
        ),
    )
    aggregator: Literal["here", "process"] = Field(
        "here",
        description=(
            "For fan_in above 0: where the aggregators of the tree run. 'here': in the server's process; 'process': "
            "in a separate process, which reads updates from shared memory and needs fan_in = 3 or more."
        ),
    )
    fresh: Literal["none", "inversion"] = Field(
        "none",
        description=(
            "What happens to updates of simulated clients that are old (see fresh_after). 'none': they are used as "
            "they are; 'inversion': the server constructs data that would give the same update, and trains the "
            "present model on them. This partly reveals the clients' data."
        ),
    )
    fresh_after: PositiveInt = Field(
        5,
        description=(
            "For fresh = 'inversion': a client's update is old if the server's model has changed at least this "
            "many times since the client began its local steps."
        ),
    )
    patience: PositiveFloat = Field(
        600.0,
        description=(
            "Seconds that the server waits for clients to join, and in each round for their updates. It then goes "
            "on with those that have come."
        ),
    )
    samples: str = Field(
        "sklearn:digits",
        description=(
            "Samples with labels for simulated clients: 'sklearn:digits', 'sklearn:wine' or "
            "'sklearn:breast_cancer', or an .npz file with the arrays 'features', 'labels' and, for partition = "
            "'natural', 'groups', the source of each sample."
        ),
    )
    held_out: float = Field(
        0.2,
        ge=0,
        lt=1,
        description="Share of 'samples' that is kept from all clients, to evaluate the model on it.",
    )
    partition: Literal["even", "dirichlet", "classes", "natural"] = Field(
        "classes",
        description=(
            "How samples are divided among simulated clients. 'even': at random; 'dirichlet': the shares of each "
            "class are drawn from a Dirichlet distribution (see 'alpha'); 'classes': each client has samples of a "
            "few classes (see 'classes'); 'natural': each client has whole groups of samples, such as those of one "
            "author."
        ),
    )
    alpha: PositiveFloat = Field(
        0.5,
        description=(
            "For partition = 'dirichlet': parameter of the distribution. The smaller it is, the more the clients' "
            "shares of the classes differ."
        ),
    )
    classes: PositiveInt = Field(
        2,
        description="For partition = 'classes': number of classes of which each client has samples.",
    )
    speeds: tuple[PositiveFloat, ...] = Field(
        (1.0,),
        min_length=1,
        description=(
            "Seconds of simulated time that each simulated client takes for a local step, such as [1.0, 4.0] for a "
            "fast and a slow one. A list that is shorter than the number of clients is repeated."
        ),
    )
    jitter: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "Largest random change of the time that a simulated client takes, as a share of this time. 0: no "
            "change."
        ),
    )
    drops: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "Probability that a simulated client is lost during its local steps. It comes back after 'away' "
            "seconds. 0: none is lost."
        ),
    )
    away: PositiveFloat = Field(
        60.0,
        description="Seconds of simulated time after which a lost client (see 'drops') comes back.",
    )
    seed: NonNegativeInt = Field(
        0,
        description=(
            "Seed of the random division of samples among clients, and of the random choice of clients for a round."
        ),
    )

    @property
    def simulates(self) -> bool:
        """Whether clients are simulated on a virtual clock."""
        return not (self.listen or getattr(self, "join", ""))
