"""The choice of a dispatcher by measured time (after Tutel, Hwang et al. 2023).

Fewer bytes are not always less time: messages have a start-up cost, ranks of one machine share its memory, and an
option also decides which rank computes which experts. So options of
:mod:`weft.techniques.dispatch.adaptive.options` are timed in a run's own passes, for each size of pass, forward and
backward, and the fastest is used. A table in the cache folder keeps the times of this machine for later runs.
"""

import os
import time
from math import inf, isfinite
from typing import Any

import torch
import torch.distributed as dist

from weft.cache import cache_root
from weft.models.experts import Arriving, Dispatched
from weft.models.measured_attention import TimeTable
from weft.models.numbers import has_numbers
from weft.models.router import Choice
from weft.parallel.experts.expert_ranks import ExpertRanks
from weft.parallel.experts.rows import Awaited
from weft.techniques.dispatch.adaptive.options import Adaptive, part_of
from weft.techniques.dispatch.timed.evidence import NOISE
from weft.techniques.dispatch.timed.trials import OptionTimes

T = torch.Tensor


class DispatchClock:
    """Times one pass on this rank, from the dispatch of tokens to the combination of the experts' results, in forward
    and backward. ``times``: object that takes the measured seconds; ``number``: index of the dispatch option that the
    pass uses; ``x``: the tokens before dispatch. The backward pass ends when their gradient is computed.
    """

    def __init__(self, times: OptionTimes, number: int, x: T) -> None:
        self.times, self.number, self.agreements = times, number, times.agreements
        self.learns = torch.is_grad_enabled() and x.requires_grad
        self.forward, self.begun = 0.0, now(x)
        if self.learns:
            x.register_hook(self._backward_ends)

    def back(self, tokens: T) -> T:
        """Note that the forward pass ends, because the experts' results ``tokens`` have come back. Return ``tokens``;
        when their gradient is computed, the backward pass begins.
        """
        self.forward = now(tokens) - self.begun
        # the ranks may have agreed since the dispatch
        if self.agreements == self.times.agreements:
            self.times.note(self.number, self.forward, None)
        if self.learns and tokens.requires_grad:
            tokens.register_hook(self._backward_begins)
        return tokens

    def _backward_begins(self, grad: T) -> None:
        self.begun = now(grad)

    def _backward_ends(self, grad: T) -> None:
        # the ranks may have agreed before this backward
        if self.agreements == self.times.agreements:
            self.times.note(self.number, self.forward, now(grad) - self.begun)


class TimedDispatch(Adaptive):
    """Dispatcher that times each :class:`Option` in some passes, and takes the one that is fastest on its slowest rank.

    Forward is timed from the dispatch of rows until their results are back, the experts' work included. Backward is
    timed from the gradients of the results to the gradients of the tokens. All ranks try the same option in the same
    pass. They agree on times after each turn of trials, and after each 50 passes, so that other passes cost no message.
    The chosen option depends on the machine, so that two runs are equal only up to rounding.
    """

    def __init__(self, ranks: ExpertRanks) -> None:
        super().__init__(ranks)
        #: By the size of a pass.
        self.trials: dict[str, OptionTimes] = {}
        self._table: TimeTable | None = None

    def dispatch(self, x: T, choice: Choice) -> Arriving:
        if not has_numbers(choice.ids):
            return self._by(0, x, choice, None)
        size = self.size(x, choice)
        if size not in self.trials:
            self.trials[size] = OptionTimes.resumed(self.known(size, x.device))
            self.follow(self.trials[size], False, x.device)
        trials = self.trials[size]
        if trials.due and self.agree(trials, x.device):
            self.keep(size, trials)
            # the next pass is timed, on ranks that would wait for the first one's file
            dist.all_reduce(torch.zeros(1, device=x.device), group=self.ranks.group)
        option, timed = trials.next()
        return self._by(option, x, choice, trials if timed else None)

    def size(self, x: T, choice: Choice) -> str:
        """Return a name for the size of a pass; passes with equal names share their measured times. The name has all
        that the time depends on: number and sizes of ranks and experts, type of the tokens, and whether backward
        follows. Numbers of tokens of a rank count as equal between two powers of two. ``x``: this rank's tokens;
        ``choice``: their experts.
        """
        ranks = self.ranks
        tokens = (ranks.most(len(x)) if ranks.uneven else len(x)).bit_length()
        learns = torch.is_grad_enabled() and x.requires_grad
        experts, hidden, embed = ranks.stacks[0]
        near = os.environ.get("LOCAL_WORLD_SIZE", "1")
        return (
            f"{tokens} bits of tokens of {embed} x {x.dtype}, {choice.ids.shape[1]} experts each, {ranks.count} ranks "
            f"of {experts} x {hidden}, {near} on a host, {'both ways' if learns else 'forward'}"
        )

    @property
    def table(self) -> TimeTable:
        """Table of times measured on this machine, in the cache folder. The first rank reads and writes it for all."""
        if self._table is None:
            device = self.ranks.mesh.device
            self._table = TimeTable.at(cache_root(), device, kind="dispatch")
        return self._table

    def known(self, size: str, device: torch.device) -> list[float]:
        """Return what earlier runs have measured for a ``size``: the seconds of each option (inf: unknown), the numbers
        of turns of trials that these rest on, and their noise.

        All ranks must call this.
        """
        times = {} if self.ranks.rank else self.table.times.get(size, {})
        options = range(len(self.options))
        seconds = [times.get(str(i), inf) for i in options]
        # tables of earlier versions have no numbers of turns
        seconds += [times.get(f"{i} turns", 1.0) for i in options]
        seconds.append(times.get("noise", NOISE))
        shared = torch.tensor(seconds, dtype=torch.float64, device=device)
        dist.broadcast(shared, group=self.ranks.group, group_src=0)
        return shared.tolist()

    def keep(self, size: str, trials: OptionTimes) -> None:
        """Write the times in ``trials`` for passes of this ``size`` to the table, on the first rank; other ranks do
        nothing.
        """
        if self.ranks.rank == 0:
            *kept, noise = trials.kept()
            turns = kept[len(trials.known) :]
            known = {i: s for i, s in enumerate(trials.known) if isfinite(s)}
            times = {str(i): s for i, s in known.items()}
            times |= {f"{i} turns": turns[i] for i in known}
            self.table.keep(size, times | {"noise": noise})

    def agree(self, trials: OptionTimes, device: torch.device) -> bool:
        """Agree with all ranks on each option's time on its slowest rank, and give these times to ``trials``. All ranks
        must call it. Return whether it is time to keep what is known for later runs.
        """
        seconds = [trials.forward, trials.backward]
        slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.ranks.group)
        keeps = trials.learn(*slowest.tolist())
        return self.follow(trials, keeps, device)

    def follow(self, trials: OptionTimes, keeps: bool, device: torch.device) -> bool:
        """Take all that the first rank has decided into ``trials``, and return its ``keeps``. All ranks must call this.

        Logarithms may differ in their last bits between hosts. A rank that decided for itself could take another option
        than the others, and they would wait for each other.
        """
        decided: list[Any] = [vars(trials), keeps]
        dist.broadcast_object_list(
            decided, group=self.ranks.group, device=device, group_src=0
        )
        vars(trials).update(decided[0])
        return bool(decided[1])

    def _by(
        self, number: int, x: T, choice: Choice, trials: OptionTimes | None
    ) -> Arriving:
        """Dispatch by an option; ``trials``: where the pass's seconds are noted, if it is timed."""
        option = self.options[number]
        clock = DispatchClock(trials, number, x) if trials else None
        arriving = option.way.dispatch(x, part_of(choice, option.joined))

        def arrived() -> Dispatched:
            rows = arriving()
            return rows._replace(
                meta=(option.way, rows.meta, clock), stacks=option.stacks
            )

        return arrived

    def combine(self, rows: T, meta: Any) -> Awaited:
        way, inner, clock = meta
        back = way.combine(rows, inner)
        if clock is None:
            return back
        return lambda: clock.back(back())


def now(x: T) -> float:
    """Wait for all work on the device of ``x``, and return the time in seconds."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()
