"""Measured times of dispatch options, and the option that they choose.

Not all options are tried equally often, because a slow one costs what the choice is to save. A *round* of trials has
several turns; in a turn each option that is left is taken in one pass, and options that are clearly slower than the
best are then left out. What was measured is kept for the next run on the same machine, so that it begins with the best
option and only tries options that are about as fast.

Trials must not cost what the choice saves: a later round may take only a small share of the time since the last one, so
that an option is tried again the more seldom, the slower it was. A pass is slow by chance as well. So an option is left
out of a round by its shortest time, which chance can only lengthen, and one odd look at the chosen option does not yet
mean that the load has changed.

A machine is faster at one time than at another, and an option that was left out early would seem to be fast if the
machine has slowed down since. So two options are compared by their medians over those turns in which both were tried.
The chosen option has part in all turns of a round. An option's first pass in a run, in which connections and buffers
are made, is not timed. A run's passes become faster at first, so every other turn has the options in reverse order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from statistics import median_low

#: How many times slower than the fastest an option may be after each turn of a round to be tried again. Options that
#: are nearly as fast cost little to try, and take more passes to tell apart.
LEFT_OUT = (2.0, 1.5, 1.4, 1.3, 1.2, 1.15, 1.1, 1.05)
#: Number of the turn with which a round begins whose options have been tried before.
AGAIN = 2
#: Share of the time since the last round that a round may take longer than passes with the chosen option alone.
SPENT = 0.01
#: Turns that count, the latest.
LATEST = 24
#: Passes with the chosen option until those that are about as fast are tried again: at first fewer, and twice as many
#: after each round, as the first times may be those of a moment.
KEPT = 800
#: Passes after which the chosen option's time is looked at, the last few of which are timed.
WATCHED, LOOKS = 50, 3
#: If the chosen option takes so many times longer or shorter than usual, at so many looks in a row, all options are
#: tried again. Where that changes no choice, twice as many looks are needed the next time.
DRIFT, PATIENCE = 1.25, 4
#: Looks whose median is usual, the latest that were not odd or were among the first.
USUAL = 9
#: If in such a round another option is so many times as fast, turns from before the round no longer count.
CHANGED = 1.1
#: What another option must be faster by, so that noise does not change the choice to and fro.
MARGIN = 0.01


@dataclass
class OptionTimes:
    """Measured times of dispatch options in passes of one size, and the option that all ranks have chosen. A round
    tries some options, each in several turns.

    Attributes:
        ``known``: for each option, its usual time in seconds on the slowest rank; inf: never tried.
        ``chosen``: index of the chosen option, -1 before the first choice.
        ``left``: options that this round still tries, in order; every other turn takes them in reverse order. Empty
            between rounds.
        ``warm``: options that this run has used; ``cold``: those that the next turn first uses in a pass that is not
            timed.
        ``best``: for each option, the shortest time in this round.
        ``turns``: for each of the latest turns, the seconds of every option on the slowest rank; inf: not tried.
        ``forward``,
        ``backward``: for each option, the shortest times on this rank since the ranks last agreed.
        ``looks``: the chosen option's forward times at the latest usual looks since it was chosen.
        ``doubts``: number of the last looks, in a row, that found the chosen option much slower or faster than
            usual; ``patience``: number of them after which all options are tried again.
        ``doubted``: the option that was chosen when such a round began; -1: the last round was another one.
        ``turn``: number of the turn in this round. Given with the times of an earlier run, it says that this run had
            ended before its first round, which goes on with that turn.
        ``passes``: number of passes in this turn, or since the round if none is under way.
        ``rounds``: number of rounds that have ended.
        ``agreements``: how often the ranks have agreed.
    """

    known: list[float]
    chosen: int = -1
    left: list[int] = field(default_factory=list)
    warm: set[int] = field(default_factory=set)
    cold: list[int] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    turns: list[list[float]] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    looks: list[float] = field(default_factory=list)
    doubts: int = 0
    patience: int = PATIENCE
    doubted: int = -1
    turn: int = 0
    passes: int = 0
    rounds: int = 0
    agreements: int = 0

    def __post_init__(self) -> None:
        every = range(len(self.known))
        if not all(map(isfinite, self.known)):
            self.try_again(every)
            return
        self.chosen = min(every, key=self.known.__getitem__)
        self._forget()
        turn, self.turn = min(self.turn, len(LEFT_OUT) - 1), 0
        limit = LEFT_OUT[turn - 1] * self.known[self.chosen]
        near = [option for option in every if self.known[option] <= limit]
        if turn and len(near) > 1:
            self.try_again(near, turn)

    def try_again(self, options: Sequence[int], turn: int = 0) -> None:
        """Begin a round of trials of ``options``, which are indices of dispatch options, with the turn ``turn``."""
        self.left, self.turn, self.doubts = [*options], turn, 0
        self.cold = [option for option in options if option not in self.warm]
        self.best, self.passes = [inf] * len(self.known), 0
        self._forget()

    def _forget(self) -> None:
        self.agreements += 1
        self.forward, self.backward = ([inf] * len(self.known) for _ in range(2))

    def note(self, option: int, forward: float, backward: float | None) -> None:
        """Note the seconds that forward and backward of a pass with ``option`` took on this rank. ``backward`` None: it
        is not known.
        """
        self.forward[option] = min(self.forward[option], forward)
        if backward is not None:
            self.backward[option] = min(self.backward[option], backward)

    def next(self) -> tuple[int, bool]:
        """Count a pass. Return the index of the option that this pass uses, and whether the pass is to be timed."""
        at, self.passes = self.passes, self.passes + 1
        if self.left:
            left = self.left[:: -1 if self.turn % 2 else 1]
            option = [*self.cold, *left][at]
            self.warm.add(option)
            return option, at >= len(self.cold)
        self.warm.add(self.chosen)
        return self.chosen, at % WATCHED >= WATCHED - LOOKS

    @property
    def due(self) -> bool:
        """Whether the ranks must agree on the times (:meth:`learn`) before the next pass."""
        if self.left:
            return self.passes == len(self.cold) + len(self.left)
        return self.passes > 0 and self.passes % WATCHED == 0

    def learn(self, forward: list[float], backward: list[float]) -> bool:
        """Take the times on which all ranks have agreed, and choose an option. Return whether a round has ended.
        ``forward``, ``backward``: for each option, its seconds on the slowest rank since the last call; inf: not timed.
        Backward counts only if it was timed with all options of a turn. In a pipeline, which computes other passes
        between forward and backward, it is not timed.
        """
        self._forget()
        if not self.left:
            self._look(forward[self.chosen])
            return False
        both = all(isfinite(backward[option]) for option in self.left)
        times = [
            (f + b if both else f) if option in self.left else inf
            for option, (f, b) in enumerate(zip(forward, backward, strict=True))
        ]
        self.turns = [*self.turns, times][-LATEST:]
        self.best = [*map(min, self.best, times)]
        limit = LEFT_OUT[self.turn] * min(self.best)
        left = [
            option
            for option in self.left
            if option == self.chosen or not limit < self.best[option] < inf
        ]
        self.turn, self.passes, self.cold = self.turn + 1, 0, []
        if self.turn < len(LEFT_OUT) and len(left) > 1:
            self.left = left
            self._estimate()
            return False
        self._end_round()
        return True

    def _end_round(self) -> None:
        """Choose by the turns of this round and of the last ones."""
        chosen = self.chosen
        if self.doubted >= 0:
            of_round = self.turns[-self.turn :]
            ratios = self._ratios(of_round)
            changed = min(ratios[option] for option in self.left) * CHANGED < 1
            self.turns = of_round if changed else self.turns
            self.patience = PATIENCE if changed else self.patience * 2
            self.doubted = -1
        self.decide()
        self._estimate()
        self.left, self.turn = [], 0
        self.rounds += 1
        if chosen != self.chosen:
            self.looks = []

    def _ratios(self, turns: list[list[float]], to: int = -1) -> list[float]:
        """Return for each option how many times as long as the option ``to`` (-1: the chosen one) it takes, by the
        medians over those ``turns`` in which both were tried; inf: there are none.
        """
        to = self.chosen if to < 0 else to
        ratios = []
        for option in range(len(self.known)):
            both = [turn for turn in turns if max(turn[option], turn[to]) < inf]
            ratios.append(
                median_low(turn[option] for turn in both)
                / median_low(turn[to] for turn in both)
                if both
                else inf
            )
        return ratios

    def _estimate(self) -> None:
        """Set each option's known time to its ratio to one that was tried in all turns, times that one's time."""
        to = self._reference()
        times = [turn[to] for turn in self.turns if turn[to] < inf]
        # where passes overlap, their times may come only after the turn
        if not times:
            return
        usual = median_low(times)
        pace = usual / self.known[to] if isfinite(self.known[to]) else 1.0
        for option, ratio in enumerate(self._ratios(self.turns, to)):
            self.known[option] = (
                usual * ratio if isfinite(ratio) else pace * self.known[option]
            )

    def _reference(self) -> int:
        """Return the chosen option, or before the first choice the fastest of those that all turns have tried."""
        if self.chosen >= 0:
            return self.chosen
        return min(
            self.left,
            key=lambda option: median_low(turn[option] for turn in self.turns),
        )

    def decide(self) -> None:
        """Choose the fastest option. The present one is kept unless another is faster by at least the fraction
        :data:`MARGIN`.
        """
        if self.chosen < 0:
            self.chosen = self._reference()
            return
        ratios = self._ratios(self.turns)
        fastest = min(range(len(ratios)), key=ratios.__getitem__)
        if ratios[fastest] < 1 - MARGIN:
            self.chosen = fastest

    def _look(self, now: float) -> None:
        """Begin a round of trials if the chosen option has become slower or faster, or if it is time for one."""
        usual = median_low(self.looks or [now])
        # nan and infinite while either is unknown
        odd = DRIFT < max(now / usual, usual / now) < inf
        self.doubts = self.doubts + 1 if odd else 0
        if self.doubts >= self.patience:
            self.doubted = self.chosen
            self.try_again(range(len(self.known)))
            self.looks = []
            return
        if isfinite(now) and (not odd or len(self.looks) < PATIENCE):
            self.looks = [*self.looks, now][-USUAL:]
        if not odd and self.passes >= min(KEPT, WATCHED << self.rounds):
            near = self.affordable()
            if len(near) > 1:
                self.try_again(near, AGAIN)

    def affordable(self) -> list[int]:
        """Return the options, in order, whose trials in a round together cost no more than the share :data:`SPENT` of
        the passes since the last round; those that are nearest to the chosen option first, and that option itself.
        """
        budget, near = SPENT * self.passes, [self.chosen]
        for option in sorted(range(len(self.known)), key=self.known.__getitem__):
            slower = self.known[option] / self.known[self.chosen]
            turns = 1 + sum(limit >= slower for limit in LEFT_OUT[AGAIN:])
            turns += option not in self.warm
            budget -= turns * max(0.0, slower - 1)
            if budget < 0:
                break
            if option != self.chosen:
                near.append(option)
        return sorted(near)
