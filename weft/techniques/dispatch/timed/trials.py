"""The choice of a dispatcher by measured time (after Tutel, Hwang et al. 2023).

Fewer bytes are not always less time: messages have a start-up cost, ranks of one machine share its memory, and an
option also decides which rank computes which experts. So every option of
:mod:`weft.techniques.dispatch.adaptive.options` is timed in a run's own first passes, for each size of pass, and the
fastest is kept. All options are timed again from time to time, and one replaces the present option if it is faster by a
margin.
"""

import time
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
import torch.distributed as dist

from weft.models.experts import Arriving, Dispatched
from weft.models.numbers import has_numbers
from weft.models.router import Choice
from weft.parallel.experts.expert_ranks import ExpertRanks
from weft.parallel.experts.rows import Awaited
from weft.techniques.dispatch.adaptive.options import Adaptive, part_of

T = torch.Tensor

#: Passes with each option, of which the fastest counts: the first ones of a process are slow.
TRIALS = 3
#: Passes with the chosen option until all are tried again.
KEPT = 500
#: What another option must be faster by, so that noise does not change the choice to and fro.
MARGIN = 0.05


@dataclass
class OptionTimes:
    """Measured times of each option in passes of one size on this rank, and the option that all ranks have chosen.

    An option is one way to bring tokens and experts together.

    A *round* of trials is :data:`TRIALS` passes with each option, in turn. ``options``: number of options. ``seconds``:
    the shortest time of each option in this round. ``passes``: number of passes since the round began. ``chosen``:
    index of the chosen option, -1 before the first choice.
    """

    options: int
    seconds: list[float] = field(default_factory=list)
    passes: int = 0
    chosen: int = -1

    def __post_init__(self) -> None:
        self.seconds = [inf] * self.options

    @property
    def round_length(self) -> int:
        return TRIALS * self.options

    def next(self) -> tuple[int, bool]:
        """Count a pass. Returns the index of the option for this pass, and whether to time it."""
        trial = self.passes < self.round_length
        option = self.passes % self.options if trial else self.chosen
        self.passes += 1
        return option, trial

    def decide(self, seconds: list[float]) -> None:
        """Choose the fastest option. The present one is kept unless another is faster by the share :data:`MARGIN`.

        ``seconds``: the time of each option on its slowest rank.
        """
        fastest = min(range(self.options), key=seconds.__getitem__)
        if self.chosen < 0 or seconds[fastest] < (1 - MARGIN) * seconds[self.chosen]:
            self.chosen = fastest

    def begin_again(self) -> None:
        """Begin another round of trials: forget all measured seconds, and keep the chosen option."""
        self.seconds, self.passes = [inf] * self.options, 0


class TimedDispatch(Adaptive):
    """Dispatcher that times each :class:`Option` in some passes, and takes the one that is fastest on its slowest rank.

    A forward pass is timed from the dispatch of its rows until their results are back, the experts' work included. Its
    backward pass is assumed to take as long. All ranks try the same option in the same pass. They agree on an option
    once per round of trials, so that other passes cost no message. The chosen option depends on the machine, so that
    two runs are equal only up to rounding.
    """

    def __init__(self, ranks: ExpertRanks) -> None:
        super().__init__(ranks)
        layout = ranks.mesh.layout
        self.uneven = bool(layout.balance or layout.lsh)
        #: By the size of a pass: the number of bits of its tokens.
        self.trials: dict[int, OptionTimes] = {}

    def dispatch(self, x: T, choice: Choice) -> Arriving:
        if not has_numbers(choice.ids):
            return self._by(0, x, choice, None)
        trials = self.trials.setdefault(self.size(x), OptionTimes(len(self.options)))
        if trials.passes == trials.round_length:
            self.agree(trials, x.device)
        elif trials.passes >= trials.round_length + KEPT:
            trials.begin_again()
        option, timed = trials.next()
        return self._by(option, x, choice, trials if timed else None)

    def size(self, x: T) -> int:
        """Return a size class for a pass, so that passes of similar size share their measured times.

        The class is the bit length of the largest number of tokens that a rank has in the pass. ``x``: this rank's
        tokens.
        """
        return (self.ranks.most(len(x)) if self.uneven else len(x)).bit_length()

    def agree(self, trials: OptionTimes, device: torch.device) -> None:
        """Choose the option that is fastest on its slowest rank, from all ranks' times in ``trials``. Collective."""
        slowest = torch.tensor(trials.seconds, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.ranks.group)
        trials.decide(slowest.tolist())

    def _by(
        self, number: int, x: T, choice: Choice, trials: OptionTimes | None
    ) -> Arriving:
        """Dispatch by an option; ``trials``: where the pass's seconds are noted, if it is timed."""
        option, begun = self.options[number], now(x) if trials else 0.0
        arriving = option.way.dispatch(x, part_of(choice, option.joined))

        def arrived() -> Dispatched:
            rows = arriving()
            return rows._replace(
                meta=(option.way, rows.meta, number, begun, trials),
                stacks=option.stacks,
            )

        return arrived

    def combine(self, rows: T, meta: Any) -> Awaited:
        way, inner, number, begun, trials = meta
        back = way.combine(rows, inner)
        if trials is None:
            return back

        def timed() -> T:
            tokens = back()
            trials.seconds[number] = min(trials.seconds[number], now(tokens) - begun)
            return tokens

        return timed


def now(x: T) -> float:
    """Wait for all work on the device of ``x``, and return the time in seconds."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()
