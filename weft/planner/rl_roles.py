"""Which ranks should write answers and which should train, from the times of a run's rollout phases.

Work is assumed to spread evenly: twice the ranks take half the time to write, and to train. A run that writes and
trains in turn takes the sum of both, and one that writes ahead (``rl.staleness``) takes the longer of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from weft.errors import WeftError

#: Share of the time of training below which waiting for answers counts as none.
WAITED = 0.05


class PhaseTimes(NamedTuple):
    """Seconds of a rollout phase.

    ``write``: seconds to write and score the answers, times the number of ranks that write. ``train``: seconds to learn
    from them, and to compute log-probabilities, times the number of ranks that train. ``weights``: seconds to move the
    weights. ``answers``: number of answers.
    """

    write: float
    train: float
    weights: float
    answers: float


class RolePlan(NamedTuple):
    """A way to share ranks between the roles.

    ``writers`` and ``trainers``: numbers of ranks; both are all ranks if these write and train in turn. ``staleness``:
    the setting ``rl.staleness``. ``seconds``: predicted time of a rollout phase. ``idle``: share of the ranks' time in
    which they wait.
    """

    writers: int
    trainers: int
    staleness: int
    seconds: float
    idle: float

    @property
    def in_turn(self) -> bool:
        """Whether all ranks write and train in turn."""
        return self.idle == 0.0 and self.writers == self.trainers and not self.staleness

    @property
    def settings(self) -> str:
        """The recipe's settings for this plan, as text."""
        if self.in_turn:
            return f"layout of {self.trainers}"
        return f"layout of {self.trainers}, roles.rollout.ranks={self.writers}, rl.staleness={self.staleness}"


def phase_times(
    phases: Sequence[Mapping[str, Any]], writers: int, trainers: int, staleness: int = 0
) -> PhaseTimes:
    """Return the median times of ``phases``, records of the kind ``rollout`` of a run.

    ``writers`` and ``trainers``: numbers of ranks of that run that wrote, and that trained. ``staleness``: by how many
    phases these writers wrote ahead. Such writers work while the others train, and ``rollout_s`` is only what the
    others wait for them: writing takes the time of training and the mean wait, or less where nobody waited
    (:func:`writers_waited`). The first phase, in which processes start, is left out. Raises :class:`WeftError` if fewer
    than two phases were followed by training.
    """
    known = [phase for phase in phases[1:] if "train_s" in phase]
    if len(known) < 2:
        raise WeftError(
            "this run has fewer than three rollout phases, of which the first does not count; let it run longer"
        )

    def middle(name: str) -> float:
        return median(float(phase[name]) for phase in known)

    answers = median(sum(phase["lags"].values()) for phase in known)
    train = middle("train_s") + middle("prepare_s")
    write = middle("rollout_s")
    if staleness:
        # waits are very uneven, as a phase may be written long before it is wanted: their mean is what counts
        write = train + fmean(float(phase["rollout_s"]) for phase in known)
    return PhaseTimes(write * writers, train * trainers, middle("weights_s"), answers)


def writers_waited(times: PhaseTimes, writers: int, trainers: int) -> bool:
    """Whether the writers of a run that wrote ahead were idle at times, because no rank waited for them.

    ``times``: result of :func:`phase_times` for the run with these numbers of ranks. If they were, ``times.write`` is
    only an upper bound of the time to write.
    """
    return times.write / writers < times.train / trainers * (1 + WAITED)


def role_plans(times: PhaseTimes, ranks: int) -> list[RolePlan]:
    """Return the ways to share ``ranks`` ranks between writing and training, the fastest first."""
    whole = (times.write + times.train) / ranks + times.weights
    plans = [RolePlan(ranks, ranks, 0, whole, 0.0)]
    for writers in range(1, ranks):
        trainers = ranks - writers
        write, train = times.write / writers, times.train / trainers
        busy = times.write + times.train
        for staleness, seconds in ((0, write + train), (1, max(write, train))):
            seconds += times.weights
            plans.append(
                RolePlan(
                    writers,
                    trainers,
                    staleness,
                    seconds,
                    max(0.0, 1 - busy / (ranks * seconds)),
                )
            )
    return sorted(plans, key=lambda plan: (plan.seconds, plan.staleness))
