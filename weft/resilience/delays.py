"""Find who makes the others wait: a slow computer, a slow sender or receiver, or a slow link.

A rank's step is what it computes and what it waits for others. Who computes longer than those that do the same is a
slow computer; durations alone tell that, so no two clocks need to agree. If even the rank that all wait for spends
much of its steps in collectives, messages do: then every rank sends every other one a message, and the times are a
matrix. A high row of it is a slow sender, a high column a slow receiver, a high cell a slow link (C4, Dong et al.
2024).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from weft.layout.mesh import from_all
from weft.resilience.rings import STEP, Trace
from weft.resilience.trace import Ring

#: Steps that a judgement is about, how often there is one, and the fewest steps that allow it.
WINDOW, EVERY, FEWEST = 20, 10, 8
#: One in so many judgements is recorded, even if nothing is new.
RECORDED = 10
#: A rank is slow if it makes a step so much longer, in most of them, and takes so many times as long as its like.
COST, OFTEN, SLOWER = 0.1, 0.7, 1.5
#: The same of one that nobody does the same as, against the others or its own best time; and of one that is slow just
#: because other work has its processor, which on a machine with too much to do is now this rank and now that.
UNLIKE, TAKEN = 2.0, 2.5
#: Messages are worth a look if a step spends such a share on them, and again when that time changes by such a factor.
SUSPECT, CHANGED = 0.2, 1.5
#: Bytes of a probe, the most times that it is repeated, and the share of all time that probes may take.
PROBE, REPEATS, PROBING = 1 << 18, 8, 0.02
#: A pair of ranks is slow if it takes so many times as long as fast ones do. It is certain from so many times on that
#: its usual time is at most so many times the least.
FAR, CERTAIN, STEADY = 3.0, 5, 1.5
#: Seconds that a repeated probe is to take, if that needs at most so many times the bytes: long enough that what a
#: message may wait for a processor, some milliseconds, is little beside it.
LONG, LARGEST = 0.025, 16
SLOWLY = {
    "sender": "{} sends slowly to all others", "receiver": "{} receives slowly from all others",
    "network": "{} sends and receives slowly", "link": "the link from {} to {} is slow",
}  # fmt: skip


#: Sender and receiver.
Pair = tuple[int, int]


class StepTimes(NamedTuple):
    """Seconds of a rank's step: in all, waited for others, and lost to other work on its processor."""

    total: float
    waited: float
    taken: float


@dataclass(frozen=True)
class Digest:
    """A rank's last steps, by number.

    ``alike`` is equal for ranks that do the same, ``sent`` the bytes of a step's collectives and messages.
    """

    rank: int
    machine: str
    steps: Mapping[int, StepTimes]
    alike: str
    sent: float

    @property
    def compute(self) -> float:
        return median(step.total - step.waited for step in self.steps.values())

    @property
    def waited(self) -> float:
        return median(step.waited for step in self.steps.values())


@dataclass(frozen=True)
class Verdict:
    """``kind``: computer, sender, receiver, network (both of these), link, hang or mismatch.

    ``factor``: how many times as long as usual it takes.
    """

    kind: str
    ranks: tuple[int, ...]
    factor: float
    text: str

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        return self.kind, self.ranks


def digest(found: Trace, window: int = WINDOW) -> Digest:
    """What a ring says of its rank's last steps that are over."""
    records, steps = found.records, dict[int, StepTimes]()
    done = records[(records["kind"] == STEP) & (records["leave"] > 0)][-window:]
    inside = records[np.isin(records["step"], done["sequence"]) & (records["kind"] != STEP)]
    waits = inside[(inside["begin"] > 0) & (inside["leave"] > 0)]
    for one in done:
        mine = waits[(waits["step"] == one["sequence"]) & (waits["enter"] >= one["enter"])]
        times = one["leave"] - one["enter"], (mine["leave"] - mine["begin"]).sum(), one["size"]
        steps[int(one["sequence"])] = StepTimes(*(float(ns) / 1e9 for ns in times))
    rank, messages = found.about["rank"], inside[inside["peer"] >= 0]
    whither = Counter(zip(messages["kind"].tolist(), (messages["peer"] > rank).tolist(), strict=True))
    shared = inside[inside["peer"] < 0]
    calls = Counter((int(r["kind"]), found.groups[r["group"]].name) for r in shared)
    return Digest(
        rank, found.about["machine"], steps, str(sorted(whither.items()) + sorted(calls.items())),
        float(inside["size"].sum()) / max(1, len(done)),
    )  # fmt: skip


def slow_computers(digests: Sequence[Digest], best: Mapping[int, float], shares: Mapping[int, float]) -> list[Verdict]:
    """Who computes longer than its like, so that the others wait.

    ``best``: the shortest time that each rank had earlier. ``shares``: of the work, where not all have as much.
    """
    common = sorted(set.intersection(*(set(d.steps) for d in digests)))
    if len(common) < FEWEST or len(digests) < 2:
        return []
    steps = np.array([[d.steps[s] for s in common] for d in digests])  # [rank, step, 3]
    share = np.array([shares.get(d.rank, 1.0) for d in digests])[:, None]
    length, compute = np.median(steps[..., 0], 0), (steps[..., 0] - steps[..., 1]) / share
    own = np.maximum(compute - steps[..., 2] / share, 1e-9)
    found = []
    for i, one in enumerate(digests):
        like = [j for j, other in enumerate(digests) if j != i and other.alike == one.alike]
        others, best_own = like or [j for j in range(len(digests)) if j != i], best.get(one.rank, np.inf)
        for times, least in ((own, SLOWER), (compute, TAKEN)):
            usual = np.median(times[others], 0)
            usual = usual if like else np.minimum(usual, best_own)
            factor = float(np.median(times[i]) / max(np.median(usual), 1e-9))
            costs = (times[i] - usual) * share[i] > COST * length
            if factor >= (least if like else max(least, UNLIKE)) and costs.mean() >= OFTEN:
                whom = "its like" if like else "the others" if best_own == np.inf else "it did"
                taken = f"; for {np.median(steps[i, :, 2]) * 1e3:.0f} ms of it other work had its processor"
                found.append(Verdict(
                    "computer", (one.rank,), factor,
                    f"rank {one.rank} is a slow computer: it takes {factor:.1f} times as long as {whom}, "
                    f"{np.median(compute[i] * share[i]) * 1e3:.0f} ms of a step of {np.median(length) * 1e3:.0f} ms, "
                    f"and the others wait for it{taken if times is compute else ''}",
                ))  # fmt: skip
                break
    return found


def slow_links(matrix: np.ndarray[Any, Any], digests: Sequence[Digest], size: int = PROBE) -> list[Verdict]:
    """What stands out in a matrix of seconds from each rank (row) to each (column); those not measured are ``nan``.

    If there are several machines, ranks of one share its network and count as one. What does not cost a step much is
    left out, and so is a matrix whose slow cells make neither rows nor columns nor single links: that is a network with
    far parts.
    """
    machines = [d.machine for d in digests]
    keys: list[Any] = machines if len(set(machines)) > 1 else [d.rank for d in digests]
    units = [[i for i, key in enumerate(keys) if key == unit] for unit in dict.fromkeys(keys)]
    times = np.array([[_middle(matrix[np.ix_(a, b)]) if a is not b else np.nan for b in units] for a in units])
    if np.isnan(times).all():
        return []
    usual = float(np.nanquantile(times, 0.25, method="lower"))
    length, sent = median(d.compute + d.waited for d in digests), median(d.sent for d in digests)
    slow, known = (times > FAR * usual) & ((times - usual) * sent / size > COST * length), ~np.isnan(times)
    rows, columns = ((slow.sum(axis) == known.sum(axis)) & (known.sum(axis) > 1) for axis in (1, 0))
    named, left = np.flatnonzero(rows | columns), slow.copy()
    left[named], left[:, named] = False, False
    if left.sum() > len(units) or len(named) * 2 > len(units):
        return []

    def verdict(kind: str, what: str, seconds: float, *who: int) -> Verdict:
        ranks = [[digests[i].rank for i in units[unit]] for unit in who]
        text = what.format(*(f"rank{'s' * (len(r) > 1)} {ranks_text(r)}" for r in ranks))
        text += f": {size >> 10} KiB take {seconds * 1e3:.3g} ms, elsewhere {usual * 1e3:.3g} ms"
        return Verdict(kind, tuple(rank for some in ranks for rank in some), seconds / max(usual, 1e-9), text)

    found = []
    for i in map(int, named):
        kind = "network" if rows[i] and columns[i] else "sender" if rows[i] else "receiver"
        found.append(verdict(kind, SLOWLY[kind], float(np.nanmedian(times[i] if rows[i] else times[:, i])), i))
    cells = [(int(i), int(j)) for i, j in np.argwhere(left)]
    return found + [verdict("link", SLOWLY["link"], float(times[i, j]), i, j) for i, j in cells]


def _middle(cells: np.ndarray[Any, Any]) -> float:
    return float(np.nanmedian(cells)) if not np.isnan(cells).all() else np.nan


def ranks_text(ranks: Sequence[int]) -> str:
    """``0-2, 5``"""
    parts, ranks = list[list[int]](), sorted(ranks)
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ", ".join("-".join(map(str, part)) for part in parts)


def rounds_of(size: int) -> list[list[Pair]]:
    """Who sends to whom at the same time, so that each does so once: nobody has two messages at a time.

    Of many ranks a part of the pairs: those whose ranks are a power of two apart. Two that would send to each other do
    so one after the other: acknowledgements wait behind what is sent.
    """
    found = []
    for apart in (apart for apart in range(1, size) if size <= 16 or not apart & (apart - 1)):
        pairs = [(rank, (rank + apart) % size) for rank in range(size)]
        found += [pairs[:apart], pairs[apart:]] if 2 * apart == size else [pairs]
    return found


def probe(
    group: dist.ProcessGroup, device: torch.device, rounds: Sequence[Sequence[Pair]], parts: Mapping[Pair, int]
) -> np.ndarray[Any, Any]:
    """Seconds of :data:`PROBE` bytes from each rank (row) to each (column), ``nan`` where none are sent. Collective.

    A message is so many times as large as ``parts`` say, and its time divided by that.
    """
    ranks, me = dist.get_process_group_ranks(group), group.rank()
    row = [float("nan")] * len(ranks)

    def message(pair: Pair) -> torch.Tensor:
        return torch.zeros(parts.get(pair, 1) * PROBE, dtype=torch.uint8, device=device)

    for pairs in rounds:
        sends, receives = ([pair for pair in pairs if pair[end] == me] for end in (0, 1))
        ops = [dist.P2POp(dist.irecv, message(pair), ranks[pair[0]], group) for pair in receives]
        ops += [dist.P2POp(dist.isend, message(pair), ranks[pair[1]], group) for pair in sends]
        dist.barrier(group)
        begun = time.perf_counter()
        works = dist.batch_isend_irecv(ops) if ops else []
        for work in works[:1]:
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        for pair in receives:
            row[pair[0]] = (time.perf_counter() - begun) / parts.get(pair, 1)
        for work in works[1:]:
            work.wait()
    return np.array(from_all(row, group)).T  # [receiver, sender] -> [sender, receiver]


def steady_matrix(group: dist.ProcessGroup, device: torch.device) -> tuple[np.ndarray[Any, Any], int]:
    """The least seconds between ranks, and the number of probes. Collective.

    What is slow while all send is sent again by itself, as much as takes a slow wire :data:`LONG` seconds: a wire takes
    as long for every byte, and every time, where a process that is late to answer does not. Pairs of which it stays
    uncertain are ``nan``.
    """
    rounds, parts, again = rounds_of(group.size()), dict[Pair, int](), list[np.ndarray[Any, Any]]()
    least = probe(group, device, rounds, parts)
    while True:
        slow = least > FAR * np.nanquantile(least, 0.25, method="lower")
        steady = np.median(again, 0) < STEADY * least if len(again) >= CERTAIN else np.zeros_like(slow)
        if len(again) == REPEATS or not (slow & ~steady).any():
            return np.where(slow & ~steady, np.nan, least), 1 + len(again)
        pairs = [(int(i), int(j)) for i, j in np.argwhere(slow)]
        parts |= {pair: int(np.clip(LONG / least[pair], 1, LARGEST)) for pair in pairs if pair not in parts}
        # Many slow pairs are a network with far parts: one after the other, they would take long.
        few = len(pairs) <= 2 * len(least)
        chosen = [[pair] for pair in pairs] if few else [[pair for pair in some if slow[pair]] for some in rounds]
        again.append(np.nan_to_num(probe(group, device, chosen, parts), nan=np.inf))
        least = np.where(slow, np.min(again, 0), least)


@dataclass
class DelayWatch:
    """Watches the ranks of ``group``, on each of which it is asked to :meth:`look` after every step.

    ``verdicts`` are equal on all ranks. ``shares``: how much of the work each rank has, where not all have as much.
    ``probes`` and ``probe_s`` are what probing has cost.
    """

    ring: Ring
    group: dist.ProcessGroup
    device: torch.device
    verdicts: list[Verdict] = field(default_factory=list)
    news: list[str] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)
    matrix: np.ndarray[Any, Any] | None = None
    shares: dict[int, float] = field(default_factory=dict)
    probes: int = 0
    probe_s: float = 0.0

    def __post_init__(self) -> None:
        self._best, self._links = dict[int, float](), list[Verdict]()
        self._seen, self._begun, self._sending = 0, time.perf_counter(), 0.0

    def look(self) -> bool:
        """Judge every :data:`EVERY` steps; whether there is something to record. Collective.

        ``news`` is what is to be said now: of whom that was not slow, and of whom that is not any more.
        """
        self._seen += 1
        self.news = []
        if self._seen % EVERY:
            return False
        self.digests = from_all(digest(self.ring.read()), self.group)
        computers = slow_computers(self.digests, self._best, self.shares)
        if not computers:
            for one in self.digests:
                mine = one.compute / self.shares.get(one.rank, 1)
                self._best[one.rank] = min(mine, self._best.get(one.rank, np.inf))
        self._look_at_links()
        slow = {rank for v in computers for rank in v.ranks}  # it handles messages slowly, too
        before, self.verdicts = self.verdicts, computers + [v for v in self._links if not slow & set(v.ranks)]
        known, now = ({v.key for v in verdicts} for verdicts in (before, self.verdicts))
        self.news = [v.text for v in self.verdicts if v.key not in known]
        self.news += [f"no longer so: {v.text}" for v in before if v.key not in now]
        return bool(self.news) or self._seen // EVERY % RECORDED == 1

    def _look_at_links(self) -> None:
        """Probe if messages take much time and that has changed; it is the same decision on all ranks."""
        length = median(d.compute + d.waited for d in self.digests)
        sending = min(d.waited for d in self.digests)
        suspect, before = sending > SUSPECT * length, self._sending
        changed = max(sending, before) > CHANGED * min(sending, before)
        if not changed or not (suspect or self._links):
            return
        spent, elapsed = from_all((self.probe_s, time.perf_counter() - self._begun), self.group)[0]
        if self.probes and spent > PROBING * elapsed:
            return
        begun, self._sending = time.perf_counter(), sending
        self.matrix, times = steady_matrix(self.group, self.device)
        self._links = slow_links(self.matrix, self.digests)
        self.probes += times
        self.probe_s += time.perf_counter() - begun

    def slowness(self, rank: int) -> float:
        """How many times as long as its like a rank computes; 1 if it is not slow."""
        return next((v.factor for v in self.verdicts if v.kind == "computer" and rank in v.ranks), 1.0)

    def record(self) -> dict[str, Any]:
        """What a run keeps of it, and its page shows."""
        rows = [{"rank": d.rank, "machine": d.machine, "compute": d.compute, "wait": d.waited} for d in self.digests]
        matrix = None if self.matrix is None else self.matrix.tolist()
        return {"verdicts": [asdict(v) for v in self.verdicts], "ranks": rows, "matrix": matrix, "size": PROBE,
                "probes": self.probes, "probe_s": self.probe_s}  # fmt: skip
