"""Measured times of dispatch options, and the option that they choose.

Not all options are tried equally often, because a slow one costs what the choice is to save. A *round* of trials has
several turns; in a turn each option that is left is taken in one pass, and options that are clearly slower than the
best are then left out. What was measured is kept for the next run on the same machine, so that it begins with the best
option and only tries options that are about as fast.

Trials must not cost what the choice saves: a later round may take only a small share of the time since the last one, so
that an option is tried again the more seldom, the slower it was. A pass is slow by chance as well. So an option is left
out of a round by its shortest time, which chance can only lengthen, and chosen by its median over several rounds; and
one odd look at the chosen option does not yet mean that the load has changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from statistics import median_low

#: How many times slower than the fastest an option may be after each turn of a round to be tried again. The first pass
#: with an option is slow, so that little follows from it. Options that are nearly as fast cost little to try, and take
#: more passes to tell apart.
LEFT_OUT = (3.0, 1.5, 1.3, 1.2, 1.15, 1.1, 1.05, 1.03)
#: Number of the turn with which a round begins whose options have been tried before.
AGAIN = 2
#: Share of the time since the last round that a round may take longer than passes with the chosen option alone.
SPENT = 0.01
#: Passes of an option whose median counts, the latest.
LATEST = 24
#: Passes with the chosen option until those that are about as fast are tried again: at first fewer, and twice as many
#: after each round, as the first times may be those of a moment.
KEPT = 800
#: Passes after which the chosen option's time is looked at, the last few of which are timed.
WATCHED, LOOKS = 50, 3
#: If the chosen option takes so many times longer or shorter than when it was chosen, at so many looks in a row, all
#: options are tried again. Where that changes no choice, twice as many looks are needed the next time.
DRIFT, PATIENCE = 1.25, 2
#: What another option must be faster by, so that noise does not change the choice to and fro.
MARGIN = 0.01


@dataclass
class OptionTimes:
    """Measured times of dispatch options in passes of one size, and the option that all ranks have chosen. A round
    tries some options, each in several turns.

    Attributes:
        ``known``: for each option, its usual time in seconds on the slowest rank; inf: never tried.
        ``chosen``: index of the chosen option, -1 before the first choice.
        ``left``: options that this round still tries, in order; empty between rounds.
        ``best``: for each option, the shortest time in this round.
        ``taken``: for each option, the seconds of its latest trials on the slowest rank since the load has changed.
        ``forward``,
        ``backward``: for each option, the shortest times on this rank since the ranks last agreed.
        ``usual``: the chosen option's forward time since it was chosen; inf: not measured yet.
        ``doubts``: number of the last looks, in a row, that found the chosen option much slower or faster than
            ``usual``; ``patience``: number of them after which all options are tried again.
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
    best: list[float] = field(default_factory=list)
    taken: list[list[float]] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    usual: float = inf
    doubts: int = 0
    patience: int = PATIENCE
    doubted: int = -1
    turn: int = 0
    passes: int = 0
    rounds: int = 0
    agreements: int = 0

    def __post_init__(self) -> None:
        self.taken = [[] for _ in self.known]
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
            return self.left[at], True
        return self.chosen, at % WATCHED >= WATCHED - LOOKS

    @property
    def due(self) -> bool:
        """Whether the ranks must agree on the times (:meth:`learn`) before the next pass."""
        if self.left:
            return self.passes == len(self.left)
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
        times = [a + b for a, b in zip(forward, backward, strict=True)]
        times = times if both else forward
        for option in self.left:
            self.taken[option] = [*self.taken[option], times[option]][-LATEST:]
        self.best = [*map(min, self.best, times)]
        fastest = min(self.best[option] for option in self.left)
        limit = LEFT_OUT[self.turn] * fastest
        left = [option for option in self.left if self.best[option] <= limit]
        self.turn, self.passes = self.turn + 1, 0
        for option, seconds in enumerate(self.taken):
            if seconds:
                self.known[option] = median_low(seconds)
        if self.turn < len(LEFT_OUT) and (len(left) > 1 or self.turn == 1):
            self.left = left
            return False
        self.left, self.usual, self.turn = [], inf, 0
        self.rounds += 1
        self.decide()
        if self.doubted >= 0:
            self.patience = (
                self.patience * 2 if self.doubted == self.chosen else PATIENCE
            )
            self.doubted = -1
        return True

    def decide(self) -> None:
        """Choose the fastest option. The present one is kept unless another is faster by at least the fraction
        :data:`MARGIN`.
        """
        known = self.known
        fastest = min(range(len(known)), key=known.__getitem__)
        if self.chosen < 0 or known[fastest] < (1 - MARGIN) * known[self.chosen]:
            self.chosen = fastest

    def _look(self, now: float) -> None:
        """Begin a round of trials if the chosen option has become slower or faster, or if it is time for one."""
        change = max(now / self.usual, self.usual / now)
        # nan and infinite while either is unknown
        odd = DRIFT < change < inf
        self.doubts = self.doubts + 1 if odd else 0
        if self.doubts == self.patience:
            self.taken = [[] for _ in self.known]
            self.doubted = self.chosen
            self.try_again(range(len(self.known)))
            return
        if not odd and self.passes >= min(KEPT, WATCHED << self.rounds):
            near = self.affordable()
            if len(near) > 1:
                self.try_again(near, AGAIN)
        if not isfinite(self.usual):
            self.usual = now

    def affordable(self) -> list[int]:
        """Return the options, in order, whose trials in a round together cost no more than the share :data:`SPENT` of
        the passes since the last round; those that are nearest to the chosen option first, and that option itself.
        """
        budget, near = SPENT * self.passes, [self.chosen]
        for option in sorted(range(len(self.known)), key=self.known.__getitem__):
            slower = self.known[option] / self.known[self.chosen]
            turns = 1 + sum(limit >= slower for limit in LEFT_OUT[AGAIN:])
            budget -= turns * max(0.0, slower - 1)
            if budget < 0:
                break
            if option != self.chosen:
                near.append(option)
        return sorted(near)
