"""Which ranks should write answers and which should train, from the times of a run's rollout phases.

Work is assumed to spread evenly: twice the ranks take half the time to write, and to train. A run that writes and
trains in turn takes the sum of both, and one that writes ahead (``rl.staleness``) takes the longer of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from weft.errors import WeftError

#: Share of the time of training below which waiting for answers counts as none.
WAITED = 0.05
#: Ranks above which not all numbers of processes are tried.
MANY = 64


class PhaseTimes(NamedTuple):
    """Median times of one rollout phase: ranks write answers, then train on them.

    ``write``: rank-seconds (seconds times the number of writing ranks) to write and score the answers. ``train``:
    rank-seconds to train on them, and to compute log-probabilities. ``weights``: seconds to move the weights to the
    ranks that write. ``answers``: number of answers. ``reference``: rank-seconds of a reference model, beside those of
    ``train``; 0 without one. ``old``: rank-seconds of ``train`` for log-probabilities before the updates, which are
    computed while processes of other roles compute theirs. ``critic``: rank-seconds of a critic with layers of its own,
    beside those of ``train``; 0 without one. ``values``: those of them in which it values answers before the updates.
    """

    write: float
    train: float
    weights: float
    answers: float
    reference: float = 0.0
    old: float = 0.0
    critic: float = 0.0
    values: float = 0.0


class RolePlan(NamedTuple):
    """A division of the ranks of a reinforcement-learning run into ranks that write answers and ranks that train.

    ``writers``, ``trainers``: numbers of ranks with each role; with ``in_turn`` both are the number of ranks that write
    and train in turn. ``staleness``: value of the setting ``rl.staleness``. ``seconds``: predicted time of a rollout
    phase. ``idle``: share of the ranks' time in which they wait, from 0 to 1. ``references``: number of processes that
    only compute a reference model's log-probabilities; 0: the ranks that train do. ``critics``: number of processes
    that only train a critic; 0: the ranks that train the policy do. ``in_turn``: whether the ranks that train also
    write answers, in turn.
    """

    writers: int
    trainers: int
    staleness: int
    seconds: float
    idle: float
    references: int = 0
    critics: int = 0
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
        if self.critics:
            words.append(f"roles.critic.ranks={self.critics}")
        return ", ".join(words)


def phase_times(
    phases: Sequence[Mapping[str, Any]],
    writers: int,
    trainers: int,
    staleness: int = 0,
    references: int = 0,
    critics: int = 0,
) -> PhaseTimes:
    """Return the median times of a run's rollout phases.

    The first phase is left out, because processes start in it. Raises :class:`WeftError` if fewer than two other phases
    were followed by training.

    ``phases``: the run's records of the kind ``rollout``. ``writers``, ``trainers``: how many ranks of that run wrote
    answers, and how many trained. ``staleness``: by how many phases the writers wrote ahead while the others trained.
    ``references``: how many processes computed a reference model; 0: the ranks that trained did, or there was none.
    ``critics``: how many processes trained a critic with layers of its own; 0: those ranks did, or there was none.

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
    waits = middle("reference_wait_s") + middle("critic_wait_s")
    whole = middle("train_s") + middle("prepare_s")
    train, old = whole - waits, middle("old_s")
    if not critics:  # which then computes between what the policy does
        train, old = train - middle("critic_s"), old - middle("values_s")
    reference = middle("reference_s") * (references or trainers)
    write = middle("rollout_s")
    if staleness:
        # waits are very uneven, as a phase may be written long before it is wanted: their mean is what counts
        ahead = whole
        write = ahead + fmean(float(phase["rollout_s"]) for phase in known)
    return PhaseTimes(
        write * writers,
        train * trainers,
        middle("weights_s"),
        answers,
        reference,
        old * trainers,
        middle("critic_s") * (critics or trainers),
        middle("values_s") * (critics or trainers),
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
    ways = _processes(times, ranks)
    plans = [
        plan
        for references, critics in ways
        for writers in range(ranks - references - critics)
        for plan in _plans(times, ranks, writers, references, critics)
    ]
    return sorted(
        plans, key=lambda p: (p.seconds, p.staleness, p.references, p.critics)
    )


def _processes(times: PhaseTimes, ranks: int) -> list[tuple[int, int]]:
    """Return the numbers of processes of the reference model and of the critic that are tried, of ``ranks`` ranks."""
    # of many ranks, both roles in all numbers would be too many ways
    few = ranks <= MANY or not (times.reference and times.critic)
    counts = [n for n in range(ranks) if few or not n & (n - 1)]
    return [
        (references, critics)
        for references in (counts if times.reference else [0])
        for critics in (counts if times.critic else [0])
        if references + critics < ranks
    ]


def _plans(
    times: PhaseTimes, ranks: int, writers: int, references: int, critics: int
) -> Iterator[RolePlan]:
    """Yield the plans of ``ranks`` ranks with these numbers of processes: in turn and ahead, if there are writers."""
    trainers = ranks - references - critics - writers
    train = _training_time(times, trainers, references, critics)
    write = times.write / (writers or trainers)
    in_turn = not writers
    ways = [(0, write + train)]
    if writers:
        ways.append((1, max(write, train)))
    for staleness, seconds in ways:
        seconds += times.weights
        if critics:  # whose updates go on while others write
            seconds = max(seconds, times.critic / critics)
        idle = 0.0
        if writers or references or critics:
            idle = _idle_share(times, ranks, seconds)
        yield RolePlan(
            writers or trainers, trainers, staleness, seconds, idle, references, critics, in_turn
        )  # fmt: skip


def _training_time(
    times: PhaseTimes, trainers: int, references: int, critics: int
) -> float:
    """Return the seconds between the last answer of a phase and the end of the policy's updates, on ``trainers`` ranks,
    while ``references`` processes compute the reference model and ``critics`` processes the critic.
    """
    own, old = times.train, times.old
    others = []
    if references:
        others.append(times.reference / references)
    else:
        own += times.reference
    if critics:
        others.append(times.values / critics)
    else:
        own, old = own + times.critic, old + times.values
    if not others:
        return own / trainers
    return (own - old) / trainers + max(old / trainers, *others)


def _idle_share(times: PhaseTimes, ranks: int, seconds: float) -> float:
    """Return the share of the time of ``ranks`` ranks in which they wait, in a phase of ``seconds``."""
    busy = times.write + times.train + times.reference + times.critic
    return max(0.0, 1 - busy / (ranks * seconds))
