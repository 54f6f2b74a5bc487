"""Plans islands on sites with slow links between them: the layout of one site, and how often sites agree.

A layout over all sites sends something over their links in every step. Islands (docs/explanations/islands.md) take
steps independently, each on its site's devices with its share of the samples, and agree every few steps, which divides
the cost of a slow link. :func:`islands_of` finds how rarely they must agree for the link to take little of the time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from weft.errors import UsageError
from weft.planner.engine_constants import EngineConstants
from weft.planner.explain import record, title
from weft.planner.finalists import Final, finalists
from weft.planner.layout_search import Pin, SearchResult, search
from weft.planner.machine import Cluster
from weft.recipe.compressor_word import NONE, compressor_of
from weft.registry import declared
from weft.shapes.shape import Shape

#: Share of the time that agreements may take, and how rarely islands can agree with little loss (Charles et al. 2025).
EXPOSED, EVERY = 0.05, (1, 5, 10, 20, 50, 100, 200, 500)


@dataclass(frozen=True)
class AgreementCost:
    """Cost of islands that average their parameters every ``every`` steps.

    ``compress``: compressor of the exchange, by its name in a recipe. ``nbytes``: bytes that a device sends per round
    (the steps between two exchanges). ``exchange``: seconds of a round's exchange. Nobody computes during that time,
    unless the recipe has ``sync.update = "streaming"``. ``seconds``: mean seconds of a step, with its share of the
    exchange.
    """

    compress: str
    every: int
    nbytes: float
    exchange: float
    seconds: float

    @property
    def exposed(self) -> float:
        """Share of a step's time, from 0 to 1, that is spent on exchanges between islands."""
        return self.exchange / self.every / self.seconds


@dataclass(frozen=True)
class Islands:
    """A plan of ``count`` islands: groups of ranks that train independently and average their parameters now and then.

    ``inside``: the layout of each island. ``ways``: costs of the exchange, one entry per compressor.
    """

    count: int
    inside: Final
    ways: tuple[AgreementCost, ...]

    def lines(self, together: float) -> list[str]:
        """Return lines of text that describe the islands, and compare them with one layout over all sites.

        ``together``: seconds of a step under that one layout.
        """
        lines = [
            f"{self.count} sites as islands of {title(self.inside)}; one layout over all: {together:.3g} s/step"
        ]
        for way in self.ways:
            words = f"every = {way.every}" + (
                f', compress = "{way.compress}"' if way.compress != "none" else ""
            )
            lines.append(
                f"{words}: {way.seconds:.3g} s/step, {way.exposed:.1%} of it exchange; {way.nbytes / 1e9:.3g} GB per "
                "device and round"
            )
        return lines

    def record(self) -> dict[str, Any]:
        """Return the plan of islands as JSON: the layout of an island, and the costs of exchange by compressor."""
        ways = [asdict(way) | {"exposed": way.exposed} for way in self.ways]
        return {"count": self.count, "inside": record(self.inside), "agreements": ways}


def islands_of(
    shape: Shape,
    cluster: Cluster,
    engine: EngineConstants,
    batch: int,
    seq: int,
    bits: int,
    pins: Sequence[Pin],
    ruled: Callable[[SearchResult], SearchResult] = lambda searched: searched,
) -> Islands | None:
    """Plan one island per site: the best layout inside a site, and the costs of exchanges between the sites.

    ``cluster``: the sites. ``engine``: constants of the training program. A step has ``batch`` sequences of ``seq``
    tokens, which the islands share equally. ``bits``: width of the operands of matrix products. ``pins``: the user's
    demands on the layout. ``ruled``: adds to a search which plans the user's recipe refuses. Returns None if the
    cluster has only one site, if its devices cannot be divided into whole sites, if the sites cannot share the batch
    equally, or if no layout fits a site.
    """
    site = cluster.site
    if (
        site is None
        or site >= cluster.count
        or cluster.count % site
        or batch % (cluster.count // site)
    ):
        return None
    count = cluster.count // site
    alone = cluster.model_copy(update={"count": site, "site": None, "between": None})
    try:
        inside = finalists(
            ruled(search(shape, alone, engine, batch // count, seq, bits, pins)), 3
        )[0]
    except UsageError:
        return None  # no layout of the model fits one site
    ways = [agreement(shape, cluster, inside, count, word) for word in words()]
    return Islands(count, inside, tuple(ways))


def words() -> list[str]:
    """Return the names of all compressors that plans try for the exchange between islands, as recipes write them."""
    techniques: list[Any] = [
        technique.implementation for technique in declared("compressor")
    ]
    return [NONE, *(word for technique in techniques for word in technique.planned)]


def sent(word: str) -> float:
    """Return the bytes that the compressor named ``word`` sends per parameter in one direction."""
    compressor = compressor_of(word)
    return float(compressor.bytes_per_element) if compressor else 4.0


def agreement(
    shape: Shape,
    cluster: Cluster,
    inside: Final,
    count: int,
    compress: str,
    every: int = 0,
) -> AgreementCost:
    """Return the cost of averaging for ``count`` islands that exchange parameters every ``every`` steps.

    ``cluster``: the cluster, with the bandwidth between its sites. ``inside``: the layout of each island. ``compress``:
    the compressor of the exchange, by its name in a recipe. With ``every = 0``, islands exchange as often as they can
    without spending more than 5 % of the time (:data:`EXPOSED`) on exchanges.
    """
    assert cluster.between is not None
    # each agrees on a part
    shared = math.ceil(float(np.asarray(shape.parameters)) / float(inside.plan.world))
    nbytes = 2 * (count - 1) / count * sent(compress) * shared
    # around a ring, or to all at once and back
    hops = 2 * (count - 1) if compress == "none" else 2
    exchange = nbytes / (cluster.between * 1e9) + hops * cluster.between_latency * 1e-6
    rare = [
        n for n in EVERY if exchange / n <= EXPOSED * (inside.seconds + exchange / n)
    ]
    every = every or (rare[0] if rare else EVERY[-1])
    return AgreementCost(
        compress, every, nbytes, exchange, inside.seconds + exchange / every
    )
