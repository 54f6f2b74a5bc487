"""Trials of dispatch options in a run's passes, and the option that they choose.

In a *turn* of trials each of some options is taken in one pass; a *round* is a row of turns, the first of which tries
all options. A trial of a slower option costs time, and a wrong choice costs it in every pass. So an option is tried
again as long as the loss that is expected without it (:class:`OptionRatio`) is not negligible, and as *credit* pays for
it: a trial costs by how much longer it takes than the chosen option, and each pass earns a small share of its time. A
clearly slower option is left out after a turn, and one that is as fast costs no more than the ranks' agreement; between
them the noise decides.
The chosen option has part in every turn, and is another one as soon as turns say so. What they have shown is kept for
the next run on the same machine, with what it is worth: where a run could not tell options apart, the next one goes on.

Later rounds look whether anything has changed, by options whose trials are a small share of the time since the last
one. What older turns have shown then counts less. One odd look at the chosen option does not yet mean that the load has
changed. An option's first pass in a run, in which connections and buffers are made, is not timed. A run's passes become
faster at first, so every other turn has the options in reverse order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, exp, inf, isfinite, log
from statistics import median_low

from weft.techniques.dispatch.timed.evidence import LEAST, NOISE, Evidence, OptionRatio

#: Options are tried while a loss of such a share of the time is expected without them.
RISK = 0.0015
#: What trials of all options may cost after their first turn, in passes with the chosen option.
FIRST = 10.0
#: Share of the time since the last turn that the next one may take longer than passes with the chosen option alone.
SPENT = 0.01
#: Turns of a round that looks whether anything has changed, and turns of any round at most.
AGAIN, TURNS = 6, 24
#: As how many turns the times of an earlier run count at most, and those from before a change of the load.
TRUST, DOUBTED = 24.0, 0.1
#: Passes with the chosen option until those that are about as fast are tried again: at first fewer, then twice as many
#: each time, as the first times may be those of a moment.
KEPT = 800
#: Passes after which the chosen option's time is looked at, the last few of which are timed.
WATCHED, LOOKS = 50, 3
#: If the chosen option takes so many times longer or shorter than usual, at so many looks in a row, all options are
#: tried again. Where that changes no choice, twice as many looks are needed the next time.
DRIFT, PATIENCE = 1.25, 4
#: Looks whose median is usual, the latest that were not odd or were among the first.
USUAL = 9
#: What another option must be faster by, so that noise does not change the choice to and fro.
MARGIN = 0.01


@dataclass
class OptionTimes:
    """Measured times of dispatch options in passes of one size, and the option that all ranks have chosen.

    Attributes:
        ``known``: for each option, its usual time in seconds on the slowest rank; inf: never tried.
        ``weights``: for each option, the number of turns that its known time rests on, when it was given.
        ``noise``: the noise (:class:`Evidence`) of an earlier run.
        ``evidence``: what turns have shown.
        ``chosen``: index of the chosen option, -1 before the first choice.
        ``left``: options of the turn under way, in order; every other turn takes them in reverse order. Empty between
            turns that do not follow each other at once.
        ``warm``: options that this run has used; ``cold``: those that the next turn first uses in a pass that is not
            timed.
        ``least``: number of turns in which this round tries the options that are ``left`` at its begin.
        ``credit``: what trials may cost, in passes with the chosen option.
        ``rest``: passes since the last turn after which the next one begins.
        ``forward``,
        ``backward``: for each option, the shortest times on this rank since the ranks last agreed.
        ``looks``: the chosen option's forward times at the latest usual looks since it was chosen.
        ``doubts``: number of the last looks, in a row, that found the chosen option much slower or faster than
            usual; ``patience``: number of them after which all options are tried again.
        ``doubted``: the option that was chosen when such a round began; -1: the last round was another one.
        ``turn``: number of turns that this round has had; 0 between rounds.
        ``passes``: number of passes in this turn, or since the last one if none is under way.
        ``rounds``: number of rounds that have ended.
        ``agreements``: how often the ranks have agreed.
    """

    known: list[float]
    weights: list[float] = field(default_factory=list)
    noise: float = NOISE
    chosen: int = -1
    left: list[int] = field(default_factory=list)
    warm: set[int] = field(default_factory=set)
    cold: list[int] = field(default_factory=list)
    least: int = 1
    credit: float = FIRST
    rest: int = 0
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
        weights = self.weights or [1.0] * len(self.known)
        weights = [min(TRUST, weight) for weight in weights]
        self.evidence = Evidence([*self.known], weights, max(LEAST, self.noise))
        self._forget()
        if not all(map(isfinite, self.known)):
            self._begin(every)
            return
        self.chosen = min(every, key=self.known.__getitem__)
        self.credit, self.turn = 0.0, 1
        self._go_on()

    @classmethod
    def resumed(cls, kept: Sequence[float]) -> "OptionTimes":
        """Return times that go on where those of an earlier run have ended; ``kept`` is what :meth:`kept` gave."""
        count = len(kept) // 2
        return cls([*kept[:count]], [*kept[count:-1]], kept[-1])

    def kept(self) -> list[float]:
        """Return what a later run needs: the known time of each option, the number of turns that each rests on, and
        the noise.
        """
        old = self.evidence.faded(self.known, max(self.chosen, 0), TRUST)
        return [*old.before, *old.weights, old.noise]

    def _begin(self, options: Sequence[int]) -> None:
        """Begin a turn with ``options``, which are indices of dispatch options."""
        self.left, self.passes, self.rest = [*options], 0, 0
        self.cold = [option for option in options if option not in self.warm]
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
        self.credit += SPENT
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
        return self.passes > 0 and (
            self.passes % WATCHED == 0 or self.passes == self.rest
        )

    def learn(self, forward: list[float], backward: list[float]) -> bool:
        """Take the times on which all ranks have agreed, and choose an option. Return whether it is time to keep what
        is known for later runs. ``forward``, ``backward``: for each option, its seconds on the slowest rank since the
        last call; inf: not timed. Backward counts only if it was timed with all options of a turn. In a pipeline, which
        computes other passes between forward and backward, it is not timed.
        """
        self._forget()
        if not self.left:
            if self.passes % WATCHED == 0:
                self._look(forward[self.chosen])
            if not self.left and self.passes >= self.rest and not self.doubts:
                self._try_again()
            return False
        both = all(isfinite(backward[option]) for option in self.left)
        times = [
            (f + b if both else f) if option in self.left else inf
            for option, (f, b) in enumerate(zip(forward, backward, strict=True))
        ]
        self._conclude(times)
        self.turn, self.cold = self.turn + 1, []
        ended = self._go_on()
        # other turns change little, and a file takes its time
        return ended or self.turn.bit_count() == 1

    def _conclude(self, times: list[float]) -> None:
        """Add a turn with these ``times``, choose by all turns, and set what is known and what the turn has cost."""
        chosen = self.chosen
        self.evidence.turns.append(times)
        if chosen < 0:
            tried = [option for option in self.left if times[option] < inf]
            if not tried:
                return
            self.chosen = min(tried, key=times.__getitem__)
        self.decide()
        if self.chosen != chosen:
            self.looks = []
        self._estimate()
        if chosen >= 0 and (self.turn or self.doubted < 0):
            # by what is known now: an option may have been taken for a nearer one
            ratios = self.ratios()
            self.credit -= sum(self._cost(n, ratios[n]) for n in self.left)

    def ratios(self) -> list[OptionRatio]:
        """Compare each option with the chosen one; before the first choice with the first one."""
        return self.evidence.ratios(max(self.chosen, 0))

    def decide(self) -> None:
        """Choose the fastest option. The present one is kept unless another is faster by at least the fraction
        :data:`MARGIN`.
        """
        ratios = self.ratios()
        fastest = min(range(len(ratios)), key=lambda option: ratios[option].slower)
        if ratios[fastest].slower < log(1 - MARGIN):
            self.chosen = fastest

    def _estimate(self) -> None:
        """Set each option's known time to its ratio to the chosen one, times that one's usual time."""
        turns = self.evidence.turns
        times = [turn[self.chosen] for turn in turns if turn[self.chosen] < inf]
        if times:
            usual = median_low(times)
            self.known = [usual * exp(ratio.slower) for ratio in self.ratios()]

    def _cost(self, option: int, ratio: OptionRatio, turns: int = 1) -> float:
        """Return the passes with the chosen option that so many trials of this one cost, whose ``ratio`` is given. Its
        first pass in this run is one trial more.
        """
        if option == self.chosen or ratio.slower == inf:
            return 0.0
        first = option in self.cold or option not in self.warm
        return (turns + first) * max(0.0, exp(ratio.slower) - 1)

    def _go_on(self) -> bool:
        """Begin the next turn of this round, or rest until there is credit for it, or end the round. Return whether the
        round has ended.
        """
        if self.chosen < 0 or self.turn < self.least:
            self._begin(self.left)
            return False
        ratios = self.ratios()
        near = [
            option
            for option, ratio in enumerate(ratios)
            if option != self.chosen and ratio.loss > RISK
        ]
        if self.turn >= TURNS or not near:
            self._end_round()
            return True
        options = self.affordable(near)
        if len(options) > 1:
            self._begin(options)
            return False
        least = min(self._cost(option, ratios[option]) for option in near)
        self.left, self.passes = [], 0
        self.rest = max(1, ceil((least - self.credit) / SPENT))
        return False

    def _end_round(self) -> None:
        if self.doubted >= 0:
            changed = self.doubted != self.chosen
            self.patience = PATIENCE if changed else self.patience * 2
            self.doubted = -1
        self.left, self.turn, self.passes = [], 0, 0
        self.rest = min(KEPT, WATCHED << self.rounds)
        self.credit = min(self.credit, 0.0)
        self.rounds += 1

    def _try_again(self) -> None:
        """Go on with a round that has rested, or begin one of options that are about as fast as the chosen one."""
        if self.turn:
            self._go_on()
            return
        near = self.affordable(range(len(self.known)), AGAIN)
        if len(near) < 2:
            return
        self.least = AGAIN
        most = max(self.evidence.counts()) / 2
        self.evidence = self.evidence.faded(self.known, self.chosen, most)
        self._begin(near)

    def _look(self, now: float) -> None:
        """Begin a round of trials of all options if the chosen one has become slower or faster."""
        usual = median_low(self.looks or [now])
        # nan and infinite while either is unknown
        odd = DRIFT < max(now / usual, usual / now) < inf
        self.doubts = self.doubts + 1 if odd else 0
        if self.doubts >= self.patience:
            self.doubted, self.doubts, self.looks = self.chosen, 0, []
            self.turn, self.least, self.credit = 0, 1, FIRST
            self.evidence = self.evidence.faded(self.known, self.chosen, DOUBTED)
            self._begin(range(len(self.known)))
        elif isfinite(now) and (not odd or len(self.looks) < PATIENCE):
            self.looks = [*self.looks, now][-USUAL:]

    def affordable(self, options: Sequence[int], turns: int = 1) -> list[int]:
        """Return in order those of ``options`` that the credit pays ``turns`` turns for, those nearest to the chosen
        option first, and that option itself.
        """
        ratios, credit, near = self.ratios(), self.credit, [self.chosen]
        for option in sorted(options, key=lambda option: ratios[option].slower):
            credit -= self._cost(option, ratios[option], turns)
            if credit < 0:
                break
            if option != self.chosen:
                near.append(option)
        return sorted(near)
