"""Sums over ranks of ``tp`` that generate, by the all-reduce that suits the links between them.

With plain tensor parallelism a layer's output is scattered over tokens and gathered again: two rounds of ``tp - 1``
messages one after the other. For the single token of a decode step the bytes cost nothing, and each message costs the
delay of a link. Here norms are computed on whole tokens by every rank, and one all-reduce takes the place of both
rounds. A leaf of :mod:`weft.techniques.sums` says who sends what to whom.

Every rank gets the same bits: a summand is added on one rank, or everywhere in the same order.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from weft.layout.all_reduce import AllReduce
from weft.net.rank_links import RankLinks
from weft.registry import find, names

T = torch.Tensor

#: Rounds in which each all-reduce is measured in turn, of which the median counts; at least the first number of them,
#: and no more than the second, nor than take so many seconds.
FEW, MANY, LONG_S = 3, 12, 4.0

#: Sums of a round; the first of them is not measured, as the links may have rested before it.
BURST = 3

#: An all-reduce that takes so many times as long as the fastest after :data:`FEW` rounds is not measured any more.
HOPELESS = 1.5

#: Last sums whose median time is watched, and the factor by which it must have grown to be measured again. Times are
#: those of this rank, with what it waits for others, so that they are compared with its own from after a measurement.
WATCHED, GROWN = 64, 2.0


class MeasuredSum(NamedTuple):
    """Measured seconds of an all-reduce of one message size, by each kind of all-reduce.

    ``tokens``: number of tokens whose vectors the message holds. ``size``: bytes of the message on each rank.
    ``seconds``: seconds of one sum, by the name of the kind of all-reduce.
    """

    tokens: int
    size: int
    seconds: dict[str, float]

    @property
    def fastest(self) -> str:
        return min(self.seconds, key=lambda name: self.seconds[name])


class TokenSums:
    """Sums activations over the ranks of ``group`` (those of ``tp``) during generation, by the fastest all-reduce.

    Create it on all ranks of the group at the same time. ``word``: value of ``layout.sum``: the name of an
    all-reduce, or ``auto`` for the fastest of those measured.

    Attributes:
        ``links``: connections between the ranks.
        ``measured``: for each size of a sum, the seconds that each all-reduce took. :meth:`measure` fills it if
            ``word`` is ``auto``.
    """

    def __init__(self, group: dist.ProcessGroup, word: str) -> None:
        self.group, self.word = group, word
        self.links = RankLinks(group)
        self.measured: list[MeasuredSum] = []
        self._recent: deque[float] = deque(maxlen=WATCHED)
        self._usual = 0.0
        # all-reduces by name
        self.ways: dict[str, Callable[[T], T]] = {}
        if word in ("auto", "gloo"):
            self.ways["gloo"] = self._by_gloo
        for name in names("sum") if word == "auto" else {word} - {"gloo"}:
            way: AllReduce = find("sum", name).implementation()
            if word != "auto" or way.fits(self.links):
                self.ways[name] = partial(way.add, links=self.links)

    def add(self, x: T) -> T:
        """Return the sum of ``x`` over the ranks, a tensor of the same shape, type and device on each of them."""
        flat, begun = x.detach().to("cpu").contiguous().view(-1), time.perf_counter()
        total = self.ways[self.chosen(flat.nbytes)](flat)
        if self.measured and flat.nbytes < 2 * self.measured[0].size:
            self._recent.append(time.perf_counter() - begun)
        return total.view(x.shape).to(x.device)

    @property
    def slowed(self) -> bool:
        """Whether the recent sums of few tokens take more than :data:`GROWN` times as long as those after the last
        measurement.

        The caller then measures again.
        """
        if len(self._recent) < WATCHED:
            return False
        usual = statistics.median(self._recent)
        self._usual = self._usual or usual
        return usual > GROWN * self._usual

    def chosen(self, size: int) -> str:
        """Return the name of the all-reduce for sums of ``size`` bytes: the fastest one at the nearest measured size.

        Without measurements it is the all-reduce that ``layout.sum`` names, or ``direct`` if that is "auto".
        """
        if not self.measured:
            return self.word if self.word in self.ways else "direct"

        def apart(each: MeasuredSum) -> float:
            return max(size, each.size) / max(1, min(size, each.size))

        return min(self.measured, key=apart).fastest

    def gather(self, part: T, sizes: Sequence[int]) -> T:
        """Join the parts of all ranks along the last dimension. Returns the whole on the first rank, and ``part``
        itself on all others.

        ``sizes``: size of each rank's part along the last dimension.
        """
        own = part.detach().to("cpu").contiguous()
        if not own.numel():
            return part.new_empty(*part.shape[:-1], sum(sizes))
        if self.links.rank:
            self.links.exchange({0: own}, {})
            return part
        rest = {
            rank: own.new_empty(*own.shape[:-1], sizes[rank])
            for rank in range(1, len(sizes))
        }
        self.links.exchange({}, rest)
        return torch.cat([own, *rest.values()], -1).to(part.device)

    def measure(self, tokens: Sequence[int], embed: int, dtype: torch.dtype) -> None:
        """Measure every all-reduce for several sizes of the sum, and use the fastest from now on. Collective.

        All ranks must pass the same arguments, and choose alike. ``tokens``: the numbers of tokens to measure,
        ascending; ``embed``: elements per token, of type ``dtype``.
        """
        measured = []
        for count in tokens:
            x = torch.zeros(count * embed, dtype=dtype)
            measured.append(MeasuredSum(count, x.nbytes, self._compared(x)))
        self.measured = measured
        self._recent.clear()
        self._usual = 0.0

    def _compared(self, x: T) -> dict[str, float]:
        """Return the seconds of a sum of ``x`` by each all-reduce, by its name: the same numbers on all ranks.

        All take turns, so that what else the links carry delays them alike, and those that may be the fastest have
        more turns than others.
        """
        times: dict[str, list[float]] = {name: [] for name in self.ways}
        left, spent = [*self.ways], 0.0
        for turn in range(MANY):
            for name in left:
                times[name].append(self._seconds(self.ways[name], x))
                spent += BURST * times[name][-1]
            if turn + 1 < FEW:
                continue
            medians = {name: statistics.median(times[name]) for name in left}
            least = min(medians.values())
            left = [name for name in left if medians[name] < HOPELESS * least]
            if len(left) == 1 or spent > LONG_S:
                break
        return {name: statistics.median(each) for name, each in times.items()}

    def _seconds(self, way: Callable[[T], T], x: T) -> float:
        """Return the seconds of a sum of ``x`` on the slowest rank, the same number on all ranks."""
        way(x)
        dist.barrier(self.group)
        begun = time.perf_counter()
        for _ in range(BURST - 1):
            way(x)
        each = (time.perf_counter() - begun) / (BURST - 1)
        spent = torch.tensor(each, dtype=torch.float64)
        dist.all_reduce(spent, dist.ReduceOp.MAX, group=self.group)
        return float(spent)

    def line(self) -> str:
        """Return a line for the user that names the chosen all-reduces and their times; "" if nothing was measured."""
        parts = []
        for each in self.measured:
            order = sorted(each.seconds.items(), key=lambda item: item[1])
            times = ", ".join(f"{name} {1e3 * took:.3g} ms" for name, took in order)
            parts.append(f"{each.tokens} token{'s' * (each.tokens > 1)}: {times}")
        if not parts:
            return ""
        return (
            f"sums over tp={self.links.ranks} take the fastest all-reduce; "
            + "; ".join(parts)
        )

    def _by_gloo(self, x: T) -> T:
        total = x.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def close(self) -> None:
        """Close the connections to the other ranks."""
        self.links.close()


def total_in_order(parts: Sequence[T]) -> T:
    """Return the sum of ``parts``, tensors of the same shape, added one after the other.

    Types of 16 bits are added in float32 and rounded once.
    """
    dtype = parts[0].dtype
    total = parts[0].to(torch.float32 if dtype.itemsize < 4 else dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)
