"""Plans of a mixture: how many samples of each source every block of an order has.

A block is a number of successive samples. Whatever the shares of the sources are, and however these move, the number of
samples that a source has given up to the end of a block is the integral of the source's share, to within one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from weft.data.mix_interfaces import SourceMixture
from weft.data.mix_leg import FixedShares, MixLeg
from weft.errors import UsageError, nearest
from weft.registry import find

#: Units of a sample in which the integrals of moving shares are counted, so that they are exact on every machine.
UNITS = 2**40

#: Blocks that are looked ahead to see which source is due first.
AHEAD = 1024

#: Blocks between two states of a moving plan that are kept.
KEPT = 256


class MixFacts(NamedTuple):
    """What a mixture knows of the sources of a run. Tuples have an entry for each source, in the order of the recipe.

    Attributes:
        ``names``: name of each source.
        ``weights``: the setting ``weight`` of each source.
        ``tokens``: number of tokens of each source.
        ``rows``: number of rows of each source in an epoch.
        ``batch``: number of samples of a step.
        ``steps``: number of steps of the whole run; 0 if only the end of the data ends it.
        ``begun``: number of the step with which the mixture begins.
        ``position``: number of the first sample of this step.
    """

    names: Sequence[str]
    weights: Sequence[float]
    tokens: Sequence[int]
    rows: Sequence[int]
    batch: int = 1
    steps: int = 0
    begun: int = 0
    position: int = 0

    def sample(self, at: int | float) -> int:
        """Return the number of the sample with which a step of the run begins; at least 0.

        ``at``: the step, as its number (an integer) or as a fraction of the run's steps (a float from 0 to 1).
        """
        step = at if isinstance(at, int) else round(at * self.steps)
        return max(0, self.position + (step - self.begun) * self.batch)

    @property
    def block(self) -> int:
        """Number of samples of a block, for a mixture whose shares change from block to block.

        It is a power of 2 from 16 to 8,192, about 1/1024 of the samples of the run.
        """
        samples = self.steps * self.batch
        return min(max(16, 1 << max(0, samples // 1024).bit_length()), 8192)


class _Drawn(NamedTuple):
    """State of a moving plan at the end of a block: the integrals of the shares in units, and the samples drawn."""

    due: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class MovingShares:
    """Plan whose sources have the shares of a ``mixture``, which may change from block to block and be 0 for a while.

    In every block each source first gets the whole samples that are due to it. Each remaining sample of the block goes
    to the source that would otherwise be the first to fall a whole sample below its share (earliest deadline first,
    Tijdeman 1980). So the number of samples of a source never differs from its exact share by a whole sample.

    Attributes:
        ``mixture``: the mixture.
        ``block``: number of samples of a block.
        ``start``: number of the sample with which the first block begins.
        ``foreseen``: whether the shares of later blocks are known already.
    """

    mixture: SourceMixture
    block: int
    start: int = 0
    foreseen: bool = True
    _states: dict[int, _Drawn] = field(default_factory=dict, repr=False, compare=False)

    def drawn(self, blocks: int) -> list[int]:
        """Return how many samples each source has in the first ``blocks`` blocks together, in the sources' order."""
        if blocks == 0:
            count = len(self.mixture.shares(self.start, self.start + self.block))
            return [0] * count
        return [*self._at(blocks).counts]

    def _at(self, blocks: int) -> _Drawn:
        if (known := self._states.get(blocks)) is not None:
            return known
        nearest = max((b for b in self._states if b < blocks), default=0)
        none = (0,) * len(self.mixture.shares(self.start, self.start + self.block))
        state = self._states.get(nearest, _Drawn(none, none))
        for number in range(nearest, blocks):
            state = self._after(number, state)
            if (number + 1) % KEPT == 0:
                self._states[number + 1] = state
        # of the latest blocks, as samples are read in turn
        for late in [b for b in self._states if b % KEPT and b < blocks - 2]:
            del self._states[late]
        self._states[blocks] = state
        return state

    @cached_property
    def _increment(self) -> Any:
        return lru_cache(maxsize=2 * AHEAD)(self._units)

    def _units(self, number: int) -> tuple[int, ...]:
        """Return by how many units the integral of each source's share grows in block ``number``."""
        first = self.start + number * self.block
        shares = self.mixture.shares(first, first + self.block)
        units = [round(share * UNITS) * self.block for share in shares]
        largest = max(range(len(units)), key=units.__getitem__)
        units[largest] += self.block * UNITS - sum(units)
        return tuple(units)

    def _after(self, number: int, state: _Drawn) -> _Drawn:
        """Return the state after block ``number``, from the ``state`` before."""
        grown = self._increment(number)
        due = tuple(d + g for d, g in zip(state.due, grown, strict=True))
        counts = [max(c, d // UNITS) for c, d in zip(state.counts, due, strict=True)]
        left = (number + 1) * self.block - sum(counts)
        partly = [
            i for i, (c, d) in enumerate(zip(counts, due, strict=True)) if c * UNITS < d
        ]
        if 0 < left < len(partly):
            partly.sort(key=self._deadlines(number, due, partly).__getitem__)
        for i in partly[: max(0, left)]:
            counts[i] += 1
        short = (number + 1) * self.block - sum(counts)
        for _ in range(abs(short)):  # only if shares came that nobody foresaw
            self._correct(counts, state.counts, due, 1 if short > 0 else -1)
        return _Drawn(due, tuple(counts))

    def _deadlines(
        self, number: int, due: Sequence[int], partly: Sequence[int]
    ) -> dict[int, tuple[int, int, int]]:
        """Return a sorting key for each source in ``partly``, least for the source that must get its next sample first.

        ``number``: the block that ends; ``due``: the integrals at its end.
        """
        whole = {i: (due[i] // UNITS + 1) * UNITS for i in partly}
        reached, ahead = dict.fromkeys(partly, AHEAD), [*due]
        waiting = {*partly}
        for later in range(1, AHEAD if self.foreseen else 1):
            ahead = [
                d + g
                for d, g in zip(ahead, self._increment(number + later), strict=True)
            ]
            late = {i for i in waiting if ahead[i] >= whole[i]}
            reached |= dict.fromkeys(late, later)
            waiting -= late
            if not waiting:
                break
        return {i: (reached[i], whole[i] - due[i], i) for i in partly}

    @staticmethod
    def _correct(
        counts: list[int], before: Sequence[int], due: Sequence[int], by: int
    ) -> None:
        """Give the source furthest behind a sample more (``by`` 1), or take one from that furthest ahead (-1)."""
        able = [i for i in range(len(counts)) if by > 0 or counts[i] > before[i]]
        furthest = max(able, key=lambda i: (by * (due[i] - counts[i] * UNITS), -i))
        counts[furthest] += by


class _Static:
    """SourceMixture of fixed shares."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        total = sum(about["weights"])
        self._shares = [weight / total for weight in about["weights"]]

    def shares(self, first: int, last: int) -> Sequence[float]:
        return self._shares


def describe_mix(data: Any, facts: MixFacts) -> dict[str, Any]:
    """Return the description of the mixture that the section ``data`` asks for, as JSON values.

    ``facts``: what is known of the sources. Raises :class:`UsageError` if a setting names a source that does not exist,
    or otherwise does not fit the sources.
    """
    if data.mix == "static":
        about: dict[str, Any] = {"weights": [*facts.weights]}
    else:
        about = find("mixture", data.mix).implementation.describe(data, facts)
    about = {"kind": data.mix, **about}
    if data.mix_by == "weighting":
        tokens = sum(facts.tokens)
        about |= {
            "rows": [*facts.rows],
            "sizes": [count / tokens for count in facts.tokens],
        }
    return about


def mixture_of(
    about: Mapping[str, Any], decided: dict[str, Any] | None = None
) -> SourceMixture:
    """Build a mixture from its description ``about``, which :func:`describe_mix` returned.

    ``decided``: decisions of a mixture that follows measured losses. The mixture appends further decisions to it. None:
    it has decided nothing, or measures nothing.
    """
    if about["kind"] == "static":
        return _Static(about)  # type: ignore[return-value]  # which describes nothing
    mixture: Any = find("mixture", about["kind"]).implementation(about)
    bound: SourceMixture = mixture if decided is None else mixture.bound(decided)
    return bound


def leg_of(
    start: int,
    given: Sequence[int],
    about: Mapping[str, Any],
    decided: dict[str, Any] | None = None,
) -> MixLeg:
    """Build the leg of an order of samples that begins at sample ``start``.

    ``given``: number of samples of each source before ``start``. ``about``: description of the leg's mixture, from
    :func:`describe_mix`. ``decided``: decisions in this leg of a mixture that follows measured losses.
    """
    if "rows" in about:
        fixed = FixedShares(tuple(map(float, about["rows"])))
        weighed = mixture_of(about, decided)
        return MixLeg(start, tuple(given), fixed, weighed, tuple(about["sizes"]))
    if about["kind"] == "static":
        return MixLeg(start, tuple(given), FixedShares(tuple(about["weights"])))
    mixture = mixture_of(about, decided)
    if weighs := getattr(mixture, "sampled", None):
        return MixLeg(
            start, tuple(given), FixedShares(tuple(weighs)), mixture, tuple(weighs)
        )
    foreseen = getattr(mixture, "foreseen", True)
    return MixLeg(
        start, tuple(given), MovingShares(mixture, about["block"], start, foreseen)
    )


def weights_by_name(
    given: Sequence[float] | Mapping[str, float], facts: MixFacts, where: str
) -> list[float]:
    """Return the weight of each source, in the order of the sources, from a list or a table by name in a recipe.

    ``given``: the weights; a source that is not named has the weight 0. ``facts``: the sources of the run. ``where``:
    name of the setting, for errors. Raises :class:`UsageError` for names that no source has, for a wrong number of
    weights, and if no weight is above 0.
    """
    if isinstance(given, Mapping):
        for name in given:
            if name not in facts.names:
                raise UsageError(
                    f"{where}: no source is called {name!r}; {nearest(name, facts.names)}"
                )
        weights = [float(given.get(name, 0.0)) for name in facts.names]
    else:
        weights = [*map(float, given)]
    if len(weights) != len(facts.names):
        raise UsageError(
            f"{where}: there are {len(weights)} weights for {len(facts.names)} sources; give each source one"
        )
    if min(weights) < 0 or sum(weights) <= 0:
        raise UsageError(
            f"{where}: weights are {weights}; none may be below 0, and one must be above it"
        )
    return weights
