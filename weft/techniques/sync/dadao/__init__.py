"""DADAO: islands that exchange with one neighbour at a time, when a clock says so, and never in rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, PositiveFloat

from weft.refusal import Rule
from weft.registry import register
from weft.sync.neighbour_moments import BEFORE, NEIGHBOUR_MOMENTS, GossipSettings
from weft.sync.sync_method import SyncMethod

if TYPE_CHECKING:
    import torch

    from weft.recipe import Sync
    from weft.sync.simulated_round import Round


class DADAOSettings(GossipSettings):
    """Settings of DADAO that a recipe gives: assumed condition number of the loss, step size, and number of
    exchanges.
    """

    condition: PositiveFloat = Field(
        0.12,
        description=(
            "Assumed condition number of the loss: its largest curvature divided by its smallest. DADAO's step "
            "sizes follow from it. The larger it is, the more steps its momentum averages over. The default makes "
            "this momentum shorter than a step, as the local optimizer has its own; the paper's are 1 and more."
        ),
    )
    pace: PositiveFloat = Field(
        6.0,
        description=(
            "Time of DADAO's differential equation that passes between two gradients of an island. 1: the paper's. "
            "With the default, an island has forgotten most of its last gradient when the next one comes, except for "
            "what other islands do not share, so that islands together follow the mean of their optimizers' steps."
        ),
    )
    stride: PositiveFloat = Field(
        1.0,
        description="DADAO's step size, as a multiple of the step that the local optimizer takes. 1: the same step.",
    )
    exchanges: float = Field(
        0.0,
        ge=0,
        description=(
            "Mean number of exchanges, counted over all pairs of islands, in the time in which an island takes "
            "sync.every steps. 0: as many as the theory of DADAO requires for the graph of islands, times pace. "
            "With clearly fewer islands drift apart; fewer than 0.8 times as many are refused."
        ),
    )


def _exchanges_too_seldom(asked: Any) -> bool:
    sync, islands = asked.sync, asked.layout.island
    if sync.update != "dadao" or not sync.own(DADAOSettings).exchanges or islands < 2:
        return False
    from weft.techniques.sync.dadao.dynamics import Dynamics

    dynamics = Dynamics.of(sync.own(DADAOSettings), sync, islands)
    return dynamics.rate < ENOUGH * dynamics.needed


#: Share of the theory's number of exchanges with which islands still stayed together, on rings and complete graphs.
ENOUGH = 0.8
TOO_SELDOM: Rule[Any] = Rule(
    "exchanges that DADAO requires",
    "layout sync",
    _exchanges_too_seldom,
    "sync.exchanges = {0.sync.exchanges} is too few for island={0.layout.island} with sync.pace = {0.sync.pace}: the "
    "islands' vectors grow without limit if there are clearly fewer exchanges than DADAO's theory requires",
    "leave sync.exchanges out, for as many as it requires, or lower sync.pace",
)


@register(
    "sync",
    "dadao",
    settings=DADAOSettings,
    rules=(NEIGHBOUR_MOMENTS, TOO_SELDOM),
    draws={"condition": (0.12, 2.0, 8.0), "pace": (1.0, 6.0), "exchanges": (0.0, 4.0)},
    title="DADAO: accelerated gossip without rounds, over random links at random times",
    paper="Nabli & Oyallon 2023",
    recipe="islands.toml --layout island=4 --set sync.compress=none --set sync.update=dadao",
    proof="tests/techniques/test_dadao.py",
    figure=(
        "equal to a simulation to 1e-10; four islands after 400 steps, with moments of neighbours: 1.0201, 1.0149 "
        "and 1.0247 of the loss of islands that sum gradients (three seeds), 1.0883 at the paper's pace with own "
        "moments; 1.0087 after 1,200 steps (one seed, `bench/dadao.py`)"
    ),
)
class DADAO(SyncMethod):
    """Synchronises islands in pairs, without common rounds: DADAO (Nabli and Oyallon 2023). Each island has a state of
    six vectors, which follows a linear differential equation.

    Two kinds of events interrupt the equation. Every ``sync.every`` steps, the change of the parameters over these
    steps is applied as a gradient. Between gradients, pairs of islands exchange one vector; a Poisson clock chooses the
    pairs, and all islands draw it from the same seed. Only the two islands of a pair wait for each other.

    The equation and its constants are the paper's, and so is the number of exchanges per unit of its time. How much of
    this time passes between two gradients, ``sync.pace``, is ours beyond 1, where the paper has its proof: it lets the
    dual vectors forget the mean of the last gradients before the next ones come. So are the local optimizer, and
    values of ``sync.condition`` below 1.

    The slots are the rows of the paper's state: ``anchor`` is its ``x``, ``ahead`` its ``x~``, ``dual`` and
    ``dual_ahead`` its ``y`` and ``y~``, ``pull`` and ``pull_ahead`` its ``z`` and ``z~``. The slots ``dual`` and
    ``dual_ahead`` begin as ``-nu x``, where ``nu`` is half the assumed smallest curvature of the loss.
    """

    slots: tuple[str, ...] = (
        "anchor",
        "ahead",
        "dual",
        "dual_ahead",
        "pull",
        "pull_ahead",
    )
    shared = ()
    following = ("anchor", "ahead")
    partners = ("all", "ring", "graph")
    in_pairs = True
    in_rounds = False

    def __init__(self, settings: Sync) -> None:
        super().__init__(settings)
        self.own = settings.own(DADAOSettings)
        if self.own.moments == "neighbours":
            self.slots = (*self.slots, BEFORE)

    def initial(self, name: str, values: torch.Tensor) -> torch.Tensor:
        if name in ("anchor", "ahead"):
            return values.clone()
        if name in ("dual", "dual_ahead"):
            return values * -(1 / (8 * self.own.condition * self.own.stride))
        return values.new_zeros(values.shape)

    def filler(self, context: Any) -> Any:
        from weft.techniques.sync.dadao.dynamics import Dynamics
        from weft.train.unsynchronised import Unsynchronised

        dynamics = Dynamics.of(self.own, self.settings, context.mesh.islands)
        return Unsynchronised(context, self.settings, dynamics)

    def simulate(self, at: Round) -> None:
        from weft.sync.simulated_round import average_heard_squares
        from weft.techniques.sync.dadao.simulated_interval import simulate_interval

        if at.is_due:
            dynamics = simulate_interval(at, self.own)
            if BEFORE in self.slots:
                clock = dynamics.clock(at.step // at.how.every)
                average_heard_squares(at, clock)
