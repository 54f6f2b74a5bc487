"""A2CiD2: islands average with one neighbour at a time, when a clock says so, with a momentum of the averages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field

from weft.registry import register
from weft.sync.gossip_dynamics import GossipDynamics, links_of
from weft.sync.neighbour_moments import BEFORE, NEIGHBOUR_MOMENTS, GossipSettings
from weft.sync.sync_method import SyncMethod

if TYPE_CHECKING:
    import torch

    from weft.recipe import Sync
    from weft.sync.simulated_round import One, Round


class A2CiD2Settings(GossipSettings):
    """Recipe settings of A2CiD2: how often islands exchange, and what."""

    exchanges: float = Field(
        0.0,
        ge=0,
        description=(
            "Number of exchanges over all links together while an island takes 'every' steps. 0: half the number "
            "of islands, so that each island has one on average."
        ),
    )


@dataclass(frozen=True, kw_only=True)
class AveragingDynamics(GossipDynamics):
    """Dynamics of A2CiD2: rows of a state ``[2, n]`` are the parameters ``x`` and their accelerated copy ``x~``."""

    @property
    def needed(self) -> float:
        return (1 + max(max(link) for link in self.links)) / 2

    @property
    def strength(self) -> float:
        """Step of the accelerated copy in an exchange, as a multiple of the difference of two islands' parameters."""
        slowness, resistance = self.mixing
        return 0.5 * (slowness / resistance) ** 0.5

    @property
    def speed(self) -> float:
        """Rate, per unit of time, at which the parameters and their accelerated copy approach each other."""
        slowness, resistance = self.mixing
        return self.rate / (2 * (slowness * resistance) ** 0.5)

    def flow(self, time: float) -> torch.Tensor:
        import torch

        share = (1 - math.exp(-2 * self.speed * time)) / 2
        return torch.tensor(
            [[1 - share, share], [share, 1 - share]], dtype=torch.float64
        )

    def learn(self, state: torch.Tensor, gradient: torch.Tensor) -> None:
        state.sub_(gradient)

    def sent(self, state: torch.Tensor) -> torch.Tensor:
        return state[0]

    def pull(self, state: torch.Tensor, difference: torch.Tensor) -> None:
        state[0] -= 0.5 * difference
        state[1] -= self.strength * difference


@register(
    "sync",
    "a2cid2",
    settings=A2CiD2Settings,
    rules=(NEIGHBOUR_MOMENTS,),
    draws={"exchanges": (0.0, 1.5)},
    title="A2CiD2: gossip of parameters without rounds, accelerated",
    paper="Nabli, Belilovsky & Oyallon 2023",
    recipe="islands.toml --layout island=4 --set sync.compress=none --set sync.update=a2cid2",
    proof="tests/techniques/test_a2cid2.py",
    figure=(
        "equal to a simulation to 1e-10; four islands after 400 steps, with moments of neighbours: 1.0184 of the "
        "loss of islands that sum gradients (one seed, `bench/dadao.py`)"
    ),
)
class A2CiD2(SyncMethod):
    """Lets pairs of islands average their parameters, at random times, while each island follows its own optimizer.

    It is the successor of DADAO by the same authors, for deep networks: what the islands learn on average is exactly
    the mean of their optimizers' steps, without DADAO's own momentum. A second copy of the parameters, ``ahead``, takes
    the same steps, and is pulled more strongly towards other islands. Parameters and copy mix continuously. Islands
    with few links therefore agree sooner.

    The slot ``anchor`` is the parameters as the last event left them.
    """

    slots: tuple[str, ...] = ("anchor", "ahead")
    shared = ()
    following = ("anchor", "ahead")
    partners = ("all", "ring", "graph")
    in_pairs = True
    in_rounds = False

    def __init__(self, settings: Sync) -> None:
        super().__init__(settings)
        own = settings.own(A2CiD2Settings)
        self.exchanges = own.exchanges
        if own.moments == "neighbours":
            self.slots = (*self.slots, BEFORE)

    def initial(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(values.shape) if name == BEFORE else values.clone()

    def dynamics(self, islands: int) -> AveragingDynamics:
        """Return how the states of so many ``islands`` change."""
        links = links_of(self.settings, islands)
        return AveragingDynamics(links=links, exchanges=self.exchanges)

    def filler(self, context: Any) -> Any:
        from weft.train.unsynchronised import Unsynchronised

        dynamics = self.dynamics(context.mesh.islands)
        return Unsynchronised(context, self.settings, dynamics)

    def simulate(self, at: Round) -> None:
        if not at.is_due:
            return
        from weft.sync.simulated_round import average_heard_squares

        dynamics = self.dynamics(len(at.ones))
        slowness, resistance = (each / dynamics.rate for each in dynamics.mixing)

        def mix(replica: One, time: float) -> None:
            """The solution of the differential equation: the mean stays, and half the difference decays."""
            x, ahead = replica.kept["anchor"], replica.kept["ahead"]
            middle = (x + ahead) / 2
            left = (x - ahead) / 2 * math.exp(-time / (slowness * resistance) ** 0.5)
            x.copy_(middle + left)
            ahead.copy_(middle - left)

        for replica in at.ones.values():
            replica.kept["ahead"].add_(replica.now - replica.kept["anchor"])
            replica.kept["anchor"].copy_(replica.now)
        clocks = dict.fromkeys(at.ones, 0.0)
        for event in dynamics.clock(at.step // at.how.every):
            for i in event.islands:
                mix(at.ones[i], event.time - clocks[i])
                clocks[i] = event.time
            a, b = (at.ones[i].kept for i in event.islands)
            apart = a["anchor"] - b["anchor"]
            middle = (a["anchor"] + b["anchor"]) / 2
            for kept, sign in ((a, -1), (b, 1)):
                kept["anchor"].copy_(middle)
                kept["ahead"].add_(sign * (slowness / resistance) ** 0.5 / 2 * apart)
        for i, replica in at.ones.items():
            mix(replica, 1 - clocks[i])
            replica.now.copy_(replica.kept["anchor"])
        if BEFORE in self.slots:
            average_heard_squares(at, dynamics.clock(at.step // at.how.every))
