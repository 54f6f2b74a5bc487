"""Plan of data for a budget: which pools, how often each, and what loss to expect."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from weft.curation.measured_runs import MeasuredRuns
from weft.curation.repetition_fit import HALF_LIVES, FittedLaw, PoolRun
from weft.curation.repetition_law import (
    PoolChoice,
    RepetitionLaw,
    best_pools,
    pool_choices,
)
from weft.errors import UsageError

#: Passes beyond the longest measured ones, and samples beyond the most measured ones, that a plan only notes.
FARTHER_EPOCHS, FARTHER_SAMPLES = 2.0, 20.0
#: Half-life in epochs from which on the runs have shown no wear at all.
NO_WEAR = 0.5 * HALF_LIVES[1]


class Interval(NamedTuple):
    """An estimated number with the ends of its 90 % interval."""

    value: float
    low: float
    high: float

    def text(self, form: str = ".3g") -> str:
        """Return the number and its interval, written by the format ``form``."""
        return f"{self.value:{form}} ({self.low:{form}} to {self.high:{form}})"


@dataclass(frozen=True)
class PlannedPools:
    """One choice of data pools that a plan compares with others.

    Attributes:
        ``pools``: names of the pools, the best first.
        ``epochs``: how often each of them is read.
        ``loss``: expected loss of a run.
        ``chance``: probability that this choice is the best one: its share of the laws fitted to bootstrap samples.
    """

    pools: tuple[str, ...]
    epochs: float
    loss: Interval
    chance: float


@dataclass(frozen=True)
class MeasuredUtility:
    """Utility of a pool of data for training, with its uncertainty. ``pool``: name of the pool. The other fields have
    the meanings of the fields of :class:`weft.curation.repetition_law.PoolUtility`.
    """

    pool: str
    size: float
    exponent: Interval
    half_life: Interval


@dataclass(frozen=True)
class DataPlan:
    """Plan of which data pools to train on, and how often, for a training budget.

    Attributes:
        ``samples``: number of samples or tokens to train on, repeated ones counted again.
        ``choices``: the choices of pools, the best one first.
        ``utilities``: utility of each pool, the best one first.
        ``floor``: loss that these pools approach with unlimited training.
        ``noise``: standard deviation of a run's relative error around the law.
        ``reason``: why the first choice is the best one.
        ``notes``: lines on the limits of the plan.
    """

    samples: float
    choices: tuple[PlannedPools, ...]
    utilities: tuple[MeasuredUtility, ...]
    floor: Interval
    noise: float
    reason: str
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain data. Intervals are objects with value, low and high."""
        plain = asdict(self)
        for row in plain["choices"]:
            row["loss"] = row["loss"]._asdict()
        for row in plain["utilities"]:
            row["exponent"] = row["exponent"]._asdict()
            row["half_life"] = row["half_life"]._asdict()
        plain["floor"] = plain["floor"]._asdict()
        return plain


def wear_text(half_life: Interval) -> str:
    """Return as text ``half_life``, the number of epochs after which a pool's utility has halved, with its interval.

    A half-life too long to be measured is called "none seen".
    """
    low, value, high = (
        "none seen" if number >= NO_WEAR else f"{number:.3g}"
        for number in (half_life.low, half_life.value, half_life.high)
    )
    return value if low == high else f"{value} ({low} to {high})"


def budget_samples(
    measured: MeasuredRuns,
    tokens: float | None,
    flops: float | None,
    steps: float | None,
    parameters: float | None,
    step_tokens: float | None,
) -> float:
    """Convert a training budget to a number of tokens. Exactly one of ``tokens``, ``flops`` and ``steps`` is not None.

    ``flops``: the budget in floating-point operations. ``steps``: the budget in optimizer steps. ``parameters``: number
    of the model's parameters; a token costs 6 operations per parameter. ``step_tokens``: number of tokens of a step. If
    one of the last two is missing, the ``measured`` runs give the cost of a token or the tokens of a step. Raises
    :class:`UsageError` if these runs do not have it either.
    """
    given = [number for number in (tokens, flops, steps) if number is not None]
    if len(given) != 1:
        raise UsageError(
            "give one budget: --tokens, --flops (with --parameters) or --steps (with --step-tokens)"
        )
    if tokens is not None:
        return tokens
    if flops is not None:
        each = 6 * parameters if parameters else measured.flops_per_token
        if not each:
            raise UsageError(
                "--flops needs --parameters, as the runs do not say what a token costs"
            )
        return flops / each
    size = step_tokens or measured.step_tokens
    if not size:
        raise UsageError(
            "--steps needs --step-tokens, as the runs do not say how many tokens a step has"
        )
    return given[0] * size


def plan_data(fitted: FittedLaw, samples: float, runs: tuple[PoolRun, ...]) -> DataPlan:
    """Plan which pools to train on, and how often, for ``samples`` samples.

    ``runs``: the runs that the law was fitted to, so that notes can warn of choices far beyond them.
    """
    law = fitted.law
    wins = Counter(best_pools(each, samples).pools for each in fitted.resampled)
    choices = sorted(pool_choices(law, samples), key=lambda choice: choice.loss)
    planned = tuple(
        PlannedPools(
            choice.pools,
            choice.epochs,
            Interval(choice.loss, *fitted.loss_interval(choice.pools, samples)),
            wins[choice.pools] / max(1, len(fitted.resampled)),
        )
        for choice in choices
    )
    utilities = tuple(_utility(fitted, name) for name in law.ranked())
    return DataPlan(
        samples,
        planned,
        utilities,
        Interval(law.floor, *fitted.interval(lambda each: each.floor)),
        fitted.noise,
        _reason(law, choices[0], samples),
        tuple(_notes(planned, utilities, samples, runs)),
    )


def _utility(fitted: FittedLaw, name: str) -> MeasuredUtility:
    pool = fitted.law.pools[name]
    return MeasuredUtility(
        name,
        pool.size,
        Interval(pool.exponent, *fitted.interval(lambda law: law.pools[name].exponent)),
        Interval(
            pool.half_life, *fitted.interval(lambda law: law.pools[name].half_life)
        ),
    )


def _reason(law: RepetitionLaw, best: PoolChoice, samples: float) -> str:
    """Return a sentence for each side: why not fewer pools, and why not more."""
    by_count = {len(choice.pools): choice for choice in pool_choices(law, samples)}
    count, reasons = len(best.pools), []
    if count > 1:
        fewer = by_count[count - 1]
        reasons.append(
            f"without {best.pools[-1]} the other data would be read {fewer.epochs:.3g} times instead of "
            f"{best.epochs:.3g}, and {_fading(law, fewer.pools[0])} (loss {fewer.loss:.4g})"
        )
    if count < len(by_count):
        more = by_count[count + 1]
        worse, good = more.pools[-1], best.pools[0]
        reasons.append(
            f"{worse} teaches less per sample (exponent {law.pools[worse].exponent:.3g}, {good} "
            f"{law.pools[good].exponent:.3g}) than {best.epochs:.3g} epochs of the others lose by repetition "
            f"(loss with it {more.loss:.4g})"
        )
    return "; ".join(reasons)


def _fading(law: RepetitionLaw, name: str) -> str:
    half_life = law.pools[name].half_life
    if half_life >= NO_WEAR:
        return f"{name} shows no wear"
    return f"the utility of {name} halves every {half_life:.2g} epochs"


def _notes(
    planned: tuple[PlannedPools, ...],
    utilities: tuple[MeasuredUtility, ...],
    samples: float,
    runs: tuple[PoolRun, ...],
) -> list[str]:
    notes = []
    best = planned[0]
    longest = max(run.epochs for run in runs)
    if best.epochs > FARTHER_EPOCHS * longest:
        notes.append(
            f"{best.epochs:.3g} epochs are far beyond the {longest:.3g} of the longest run, and the law does not know "
            "when a model learns the data by heart; add longer runs"
        )
    most = max(run.samples for run in runs)
    if samples > FARTHER_SAMPLES * most:
        notes.append(
            f"{samples:.3g} samples are far beyond the {most:.3g} of the longest run"
        )
    for row in utilities:
        if row.half_life.high >= NO_WEAR:
            notes.append(
                f"the runs do not show at how many epochs {row.pool} wears out; add longer ones"
            )
    if best.chance < 0.9 and len(planned) > 1:
        notes.append(
            f"the runs leave it open: the first choice is best in {best.chance:.0%} of the laws that they allow"
        )
    return notes
