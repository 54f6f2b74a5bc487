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
    """Median times of one rollout phase: ranks write answers, then train on them.

    ``write``: rank-seconds (seconds times the number of writing ranks) to write and score the answers. ``train``:
    rank-seconds to train on them, and to compute log-probabilities. ``weights``: seconds to move the weights to the
    ranks that write. ``answers``: number of answers. ``reference``: rank-seconds of a reference model, beside those of
    ``train``; 0 without one. ``old``: rank-seconds of ``train`` for log-probabilities before the updates, which are
    computed while processes of the reference model compute theirs.
    """

    write: float
    train: float
    weights: float
    answers: float
    reference: float = 0.0
    old: float = 0.0


class RolePlan(NamedTuple):
    """A division of the ranks of a reinforcement-learning run into ranks that write answers and ranks that train.

    ``writers``, ``trainers``: numbers of ranks with each role; with ``in_turn`` both are the number of ranks that write
    and train in turn. ``staleness``: value of the setting ``rl.staleness``. ``seconds``: predicted time of a rollout
    phase. ``idle``: share of the ranks' time in which they wait, from 0 to 1. ``references``: number of processes that
    only compute a reference model's log-probabilities; 0: the ranks that train do. ``in_turn``: whether the ranks that
    train also write answers, in turn.
    """

    writers: int
    trainers: int
    staleness: int
    seconds: float
    idle: float
    references: int = 0
    in_turn: bool = False

    @property
    def settings(self) -> str:
        """Text that names the recipe's settings for this plan, such as ``roles.rollout.ranks``."""
        words = [f"layout of {self.trainers}"]
        if not self.in_turn:
            words.append(
                f"roles.rollout.ranks={self.writers}, rl.staleness={self.staleness}"
            )
        if self.references:
            words.append(f"roles.reference.ranks={self.references}")
        return ", ".join(words)


def phase_times(
    phases: Sequence[Mapping[str, Any]],
    writers: int,
    trainers: int,
    staleness: int = 0,
    references: int = 0,
) -> PhaseTimes:
    """Return the median times of a run's rollout phases.

    The first phase is left out, because processes start in it. Raises :class:`WeftError` if fewer than two other phases
    were followed by training.

    ``phases``: the run's records of the kind ``rollout``. ``writers``, ``trainers``: how many ranks of that run wrote
    answers, and how many trained. ``staleness``: by how many phases the writers wrote ahead while the others trained.
    ``references``: how many processes computed a reference model; 0: the ranks that trained did, or there was none.

    If ``staleness`` is not 0, ``rollout_s`` of a record is only the time for which training waited for answers. The
    returned time to write is then the time of training plus the mean of these waits. If :func:`writers_waited` is true
    for the run, this sum is only an upper bound of the time to write, because the writers were idle at times.
    """
    known = [phase for phase in phases[1:] if "train_s" in phase]
    if len(known) < 2:
        raise WeftError(
            "this run has fewer than three rollout phases, of which the first does not count; let it run longer"
        )

    def middle(name: str) -> float:
        return median(float(phase.get(name, 0.0)) for phase in known)

    answers = median(sum(phase["lags"].values()) for phase in known)
    train = middle("train_s") + middle("prepare_s") - middle("reference_wait_s")
    reference = middle("reference_s") * (references or trainers)
    write = middle("rollout_s")
    if staleness:
        # waits are very uneven, as a phase may be written long before it is wanted: their mean is what counts
        ahead = train + middle("reference_wait_s")
        write = ahead + fmean(float(phase["rollout_s"]) for phase in known)
    return PhaseTimes(
        write * writers,
        train * trainers,
        middle("weights_s"),
        answers,
        reference,
        middle("old_s") * trainers,
    )


def writers_waited(times: PhaseTimes, writers: int, trainers: int) -> bool:
    """Return whether the writers of a run that wrote ahead were idle at times, because training took longer than
    writing.

    If so, ``times.write`` is only an upper bound of the time to write. ``times``: result of :func:`phase_times` for the
    run; ``writers``, ``trainers``: its numbers of ranks.
    """
    return times.write / writers < times.train / trainers * (1 + WAITED)


def role_plans(times: PhaseTimes, ranks: int) -> list[RolePlan]:
    """Return all divisions of ``ranks`` ranks into writers and trainers, with their predicted times, fastest first.

    Among them is the plan in which all ranks write and train in turn. ``times``: times of a rollout phase.
    """
    plans = []
    for references in range(ranks if times.reference else 1):
        left = ranks - references
        for writers in range(left):
            trainers = left - writers
            train = _training_time(times, trainers, references)
            write = times.write / (writers or trainers)
            in_turn = not writers
            ways = [(0, write + train)]
            if writers:
                ways.append((1, max(write, train)))
            for staleness, seconds in ways:
                seconds += times.weights
                plans.append(
                    RolePlan(
                        writers or trainers,
                        trainers,
                        staleness,
                        seconds,
                        0.0
                        if in_turn and not references
                        else _idle_share(times, ranks, seconds),
                        references,
                        in_turn,
                    )
                )
    return sorted(plans, key=lambda p: (p.seconds, p.staleness, p.references))


def _training_time(times: PhaseTimes, trainers: int, references: int) -> float:
    """Return the seconds between the last answer of a phase and the end of its updates, on ``trainers`` ranks, while
    ``references`` processes compute the reference model.
    """
    if not references:
        return (times.train + times.reference) / trainers
    both = max(times.old / trainers, times.reference / references)
    return (times.train - times.old) / trainers + both


def _idle_share(times: PhaseTimes, ranks: int, seconds: float) -> float:
    """Return the share of the time of ``ranks`` ranks in which they wait, in a phase of ``seconds``."""
    busy = times.write + times.train + times.reference
    return max(0.0, 1 - busy / (ranks * seconds))
