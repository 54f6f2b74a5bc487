"""Finds which rank makes the others wait: a slow computer, a slow sender or receiver, or a slow link.

The time of a rank's step is what it computes plus what it waits for others. A rank that computes longer than the ranks
that do the same work is a slow computer; durations alone tell that, so the ranks' clocks need not agree. If even the
rank that waits least spends much of its step in collectives, messages are slow: then every rank sends a probe to every
other one, and the times form a matrix. A high row of it is a slow sender, a high column a slow receiver, and a single
high cell a slow link (C4, Dong et al. 2024).
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
from weft.observe.rings import Trace
from weft.observe.trace import Ring

#: Steps that a judgement looks at, steps from one judgement to the next, and the fewest steps that it needs.
WINDOW, EVERY, FEWEST = 20, 10, 8
#: One in so many judgements is recorded, even if nothing is new.
RECORDED = 10
#: A rank is slow if it lengthens a step by such a share of it, does so in such a share of the steps, and takes so many
#: times as long as its like (the ranks that do the same work).
COST, OFTEN, SLOWER = 0.1, 0.7, 1.5
#: The last of these for a rank without its like, which is compared with all others and its own best time; and for one
#: that is slow because other programs have its processor: on a busy machine that hits now this rank and now that.
UNLIKE, TAKEN = 2.0, 2.5
#: Links are probed if a step spends such a share of its time on messages, and again when that changes by such a factor.
SUSPECT, CHANGED = 0.2, 1.5
#: Bytes of a probe, the most times that it is repeated, and the share of all time that probes may take.
PROBE, REPEATS, PROBING = 1 << 18, 8, 0.02
#: A pair of ranks is slow if its probe takes so many times as long as fast pairs' do. That is certain once it has been
#: repeated so many times, with a median of at most so many times the least.
FAR, CERTAIN, STEADY = 3.0, 5, 1.5
#: A repeated probe is enlarged, by at most such a factor, to take so many seconds: the milliseconds that a message may
#: wait for a processor are then little beside it.
LONG, LARGEST = 0.025, 16
SLOWLY = {
    "sender": "{} sends slowly to all others", "receiver": "{} receives slowly from all others",
    "network": "{} sends and receives slowly", "link": "the link from {} to {} is slow",
}  # fmt: skip


#: Sender and receiver.
Pair = tuple[int, int]


class StepTimes(NamedTuple):
    """Seconds of one step of a rank.

    ``total``: all of the step. ``waited``: time in which the rank waits for other ranks. ``taken``: time in which other
    programs had the rank's processor.
    """

    total: float
    waited: float
    taken: float


@dataclass(frozen=True)
class Digest:
    """Summary of a rank's last steps, by which ranks are compared.

    ``machine``: the machine that the rank runs on. ``steps``: times by step number. ``alike``: a text that is equal for
    ranks with the same work. ``sent``: mean bytes that collectives and messages of a step send.
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
    """A finding about slow or hanging ``ranks``, with a sentence ``text`` for the user.

    ``kind``: computer, sender, receiver, network (slow as sender and receiver), link, hang or mismatch. ``factor``: how
    many times as long as usual the ranks take; for a hang, its seconds.
    """

    kind: str
    ranks: tuple[int, ...]
    factor: float
    text: str

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        return self.kind, self.ranks


def digest_trace(trace: Trace, window: int = WINDOW) -> Digest:
    """Return a summary of the last ``window`` finished steps in ``trace``, the trace of one rank, for the comparison
    with other ranks.
    """
    steps = dict[int, StepTimes]()
    done = trace.steps[trace.steps["leave"] > 0][-window:]
    inside = trace.calls[np.isin(trace.calls["step"], done["sequence"])]
    waits = inside[(inside["begin"] > 0) & (inside["leave"] > 0)]
    for step in done:
        of_step = waits[
            (waits["step"] == step["sequence"]) & (waits["enter"] >= step["enter"])
        ]
        times = (
            step["leave"] - step["enter"],
            (of_step["leave"] - of_step["begin"]).sum(),
            step["size"],
        )
        steps[int(step["sequence"])] = StepTimes(*(float(ns) / 1e9 for ns in times))
    rank, messages = trace.about["rank"], inside[inside["peer"] >= 0]
    whither = Counter(
        zip(messages["kind"].tolist(), (messages["peer"] > rank).tolist(), strict=True)
    )
    shared = inside[inside["peer"] < 0]
    calls = Counter((int(r["kind"]), trace.groups[r["group"]].name) for r in shared)
    return Digest(
        rank, trace.about["machine"], steps, str(sorted(whither.items()) + sorted(calls.items())),
        float(inside["size"].sum()) / max(1, len(done)),
    )  # fmt: skip


def slow_computers(
    digests: Sequence[Digest], best: Mapping[int, float], shares: Mapping[int, float]
) -> list[Verdict]:
    """Return a verdict on each rank that computes longer than the ranks that do the same work, so that others wait.

    ``digests``: summary of every rank's last steps. ``best``: for each rank, the shortest computing time of a step, in
    seconds, among earlier judgements. ``shares``: for each rank, its amount of work relative to the mean; without an
    entry the share is 1. Ranks without work are not judged.
    """
    digests = [d for d in digests if shares.get(d.rank, 1)]
    common = sorted(set.intersection(*(set(d.steps) for d in digests)))
    if len(common) < FEWEST or len(digests) < 2:
        return []
    # [rank, step, time]
    steps = np.array([[d.steps[s] for s in common] for d in digests])
    share = np.array([shares.get(d.rank, 1.0) for d in digests])[:, None]
    total, waited, lost = np.moveaxis(steps, -1, 0)
    length, compute = np.median(total, 0), (total - waited) / share
    own = np.maximum(compute - lost / share, 1e-9)
    verdicts = []
    for i, own_digest in enumerate(digests):
        like = [
            j
            for j, other in enumerate(digests)
            if j != i and other.alike == own_digest.alike
        ]
        others, best_own = (
            like or [j for j in range(len(digests)) if j != i],
            best.get(own_digest.rank, np.inf),
        )
        for times, least in ((own, SLOWER), (compute, TAKEN)):
            usual = np.median(times[others], 0)
            usual = usual if like else np.minimum(usual, best_own)
            factor = float(np.median(times[i]) / max(np.median(usual), 1e-9))
            costs = (times[i] - usual) * share[i] > COST * length
            if (
                factor >= (least if like else max(least, UNLIKE))
                and costs.mean() >= OFTEN
            ):
                whom = (
                    "its like"
                    if like
                    else "the others"
                    if best_own == np.inf
                    else "it did"
                )
                taken = f"; for {np.median(lost[i]) * 1e3:.0f} ms of it other work had its processor"
                verdicts.append(Verdict(
                    "computer", (own_digest.rank,), factor,
                    f"rank {own_digest.rank} is a slow computer: it takes {factor:.1f} times as long as {whom}, "
                    f"{np.median(compute[i] * share[i]) * 1e3:.0f} ms of a step of {np.median(length) * 1e3:.0f} ms, "
                    f"and the others wait for it{taken if times is compute else ''}",
                ))  # fmt: skip
                break
    return verdicts


def slow_links(
    matrix: np.ndarray[Any, Any], digests: Sequence[Digest], size: int = PROBE
) -> list[Verdict]:
    """Return a verdict on each slow link between two ranks, or on a rank whose links are slow as sender or as
    receiver.

    ``matrix[a, b]``: seconds of a message of ``size`` bytes from rank a to rank b, ``nan`` if not measured.
    ``digests``: summary of every rank's last steps. If there are several machines, the ranks of a machine count as
    one, because they share its network. There is no verdict if the slow messages hardly lengthen a step. There is
    none either if slow links are many and not those of a few ranks, as in a network with distant parts.
    """
    machines = [d.machine for d in digests]
    keys: list[Any] = machines if len(set(machines)) > 1 else [d.rank for d in digests]
    units = [
        [i for i, key in enumerate(keys) if key == unit] for unit in dict.fromkeys(keys)
    ]
    times = np.array(
        [
            [_middle(matrix[np.ix_(a, b)]) if a is not b else np.nan for b in units]
            for a in units
        ]
    )
    if np.isnan(times).all():
        return []
    usual = float(np.nanquantile(times, 0.25, method="lower"))
    length, sent = (
        median(d.compute + d.waited for d in digests),
        median(d.sent for d in digests),
    )
    slow, known = (
        (times > FAR * usual) & ((times - usual) * sent / size > COST * length),
        ~np.isnan(times),
    )
    rows, columns = (
        (slow.sum(axis) == known.sum(axis)) & (known.sum(axis) > 1) for axis in (1, 0)
    )
    named, left = np.flatnonzero(rows | columns), slow.copy()
    left[named], left[:, named] = False, False
    if left.sum() > len(units) or len(named) * 2 > len(units):
        return []

    def verdict(kind: str, what: str, seconds: float, *who: int) -> Verdict:
        ranks = [[digests[i].rank for i in units[unit]] for unit in who]
        text = what.format(*map(ranks_text, ranks))
        text += f": {size >> 10} KiB take {seconds * 1e3:.3g} ms, elsewhere {usual * 1e3:.3g} ms"
        return Verdict(
            kind,
            tuple(rank for some in ranks for rank in some),
            seconds / max(usual, 1e-9),
            text,
        )

    verdicts = []
    for i in map(int, named):
        kind = (
            "network" if rows[i] and columns[i] else "sender" if rows[i] else "receiver"
        )
        verdicts.append(
            verdict(
                kind,
                SLOWLY[kind],
                float(np.nanmedian(times[i] if rows[i] else times[:, i])),
                i,
            )
        )
    cells = [(int(i), int(j)) for i, j in np.argwhere(left)]
    return verdicts + [
        verdict("link", SLOWLY["link"], float(times[i, j]), i, j) for i, j in cells
    ]


def _middle(cells: np.ndarray[Any, Any]) -> float:
    return float(np.nanmedian(cells)) if not np.isnan(cells).all() else np.nan


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks in words: ``rank 5``, or ``ranks 0-2, 5``."""
    parts, ranks = list[list[int]](), sorted(ranks)
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return f"rank{'s' * (len(ranks) > 1)} " + ", ".join(
        "-".join(map(str, part)) for part in parts
    )


def rounds_of(size: int) -> list[list[Pair]]:
    """Return rounds of ``(sender, receiver)`` pairs, for probes of the links among ``size`` ranks.

    The pairs of a round send at the same time. A rank sends at most once and receives at most once in a round. Up to 16
    ranks, every pair occurs once. With more ranks, only pairs whose distance is a power of two occur. Two ranks never
    send to each other in the same round, as acknowledgements would wait behind the data.
    """
    rounds = []
    for apart in (
        apart for apart in range(1, size) if size <= 16 or not apart & (apart - 1)
    ):
        pairs = [(rank, (rank + apart) % size) for rank in range(size)]
        rounds += [pairs[:apart], pairs[apart:]] if 2 * apart == size else [pairs]
    return rounds


def measure_links(
    group: dist.ProcessGroup,
    device: torch.device,
    rounds: Sequence[Sequence[Pair]],
    parts: Mapping[Pair, int],
) -> np.ndarray[Any, Any]:
    """Measure the seconds of a message of :data:`PROBE` bytes from each rank (row) to each rank (column). Collective.

    ``group``: the ranks. ``device``: the device whose memory holds the messages. ``rounds``: the pairs ``(sender,
    receiver)`` to measure; those of a round send at the same time. The cells of other pairs are ``nan``. ``parts``: for
    some pairs, a factor by which their messages are larger. The measured time of such a pair is divided by its factor.
    """
    ranks, me = dist.get_process_group_ranks(group), group.rank()
    row = [float("nan")] * len(ranks)

    def message(pair: Pair) -> torch.Tensor:
        return torch.zeros(parts.get(pair, 1) * PROBE, dtype=torch.uint8, device=device)

    for pairs in rounds:
        sends, receives = (
            [pair for pair in pairs if pair[end] == me] for end in (0, 1)
        )
        ops = [
            dist.P2POp(dist.irecv, message(pair), ranks[pair[0]], group)
            for pair in receives
        ]
        ops += [
            dist.P2POp(dist.isend, message(pair), ranks[pair[1]], group)
            for pair in sends
        ]
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


def steady_matrix(
    group: dist.ProcessGroup, device: torch.device
) -> tuple[np.ndarray[Any, Any], int]:
    """Measure the seconds of a message between each two ranks. Slow pairs are measured again, to find out whether the
    link or a late process is the cause. Collective.

    In the first measurement many pairs send at once. Pairs that are slow in it are measured again, with messages
    enlarged to take about :data:`LONG` seconds: one pair after another or, if they are many, several at once. A pair
    that is slow and takes about the same time each time has a slow link. A pair whose times vary is uncertain, as a
    late process may be the cause.

    ``group``: the ranks. ``device``: the device whose memory holds the messages. Returns the matrix ``[sender,
    receiver]`` and the number of measurements. A cell holds seconds for a message of :data:`PROBE` bytes, the time of a
    larger one divided by its enlargement. Cells of pairs that are still uncertain after the last repetition are
    ``nan``.
    """
    rounds, parts, again = (
        rounds_of(group.size()),
        dict[Pair, int](),
        list[np.ndarray[Any, Any]](),
    )
    least = measure_links(group, device, rounds, parts)
    while True:
        slow = least > FAR * np.nanquantile(least, 0.25, method="lower")
        steady = (
            np.median(again, 0) < STEADY * least
            if len(again) >= CERTAIN
            else np.zeros_like(slow)
        )
        if len(again) == REPEATS or not (slow & ~steady).any():
            return np.where(slow & ~steady, np.nan, least), 1 + len(again)
        pairs = [(int(i), int(j)) for i, j in np.argwhere(slow)]
        parts |= {
            pair: int(np.clip(LONG / least[pair], 1, LARGEST))
            for pair in pairs
            if pair not in parts
        }
        # Many slow pairs are a network with far parts: one after the other, they would take long.
        few = len(pairs) <= 2 * len(least)
        chosen = (
            [[pair] for pair in pairs]
            if few
            else [[pair for pair in some if slow[pair]] for some in rounds]
        )
        again.append(
            np.nan_to_num(measure_links(group, device, chosen, parts), nan=np.inf)
        )
        least = np.where(slow, np.min(again, 0), least)


@dataclass
class DelayWatch:
    """Finds slow ranks and links of a run while it trains. Every rank of ``group`` calls :meth:`look` after every step.

    Attributes:
        ``ring``: this rank's trace file, from which its times are read.
        ``device``: the device whose memory holds the messages of probes.
        ``verdicts``: the last judgement, equal on all ranks.
        ``news``: lines about verdicts that are new, or no longer hold, since the judgement before.
        ``digests``: summary of every rank's last steps.
        ``matrix``: seconds of probe messages between ranks, None before the first probe.
        ``shares``: for each rank, its amount of work relative to the mean; without an entry the share is 1.
        ``probes``, ``probe_s``: number of probes of the links so far, and their seconds.
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
        """Count a step. Every :data:`EVERY` steps, judge all ranks and links. Collective.

        Returns whether the caller is to record the judgement; False after a step without a judgement. A judgement is to
        be recorded if a verdict is new or no longer holds. If nothing has changed, one of every :data:`RECORDED`
        judgements is recorded.
        """
        self._seen += 1
        self.news = []
        if self._seen % EVERY:
            return False
        self.digests = from_all(digest_trace(self.ring.read()), self.group)
        computers = slow_computers(self.digests, self._best, self.shares)
        if not computers:
            for each in self.digests:
                seconds = each.compute / (self.shares.get(each.rank, 1) or np.nan)
                self._best[each.rank] = min(self._best.get(each.rank, np.inf), seconds)
        self._look_at_links()
        # it handles messages slowly, too
        slow = {rank for v in computers for rank in v.ranks}
        before, self.verdicts = (
            self.verdicts,
            computers + [v for v in self._links if not slow & set(v.ranks)],
        )
        known, now = ({v.key for v in verdicts} for verdicts in (before, self.verdicts))
        self.news = [v.text for v in self.verdicts if v.key not in known]
        self.news += [f"no longer so: {v.text}" for v in before if v.key not in now]
        return bool(self.news) or self._seen // EVERY % RECORDED == 1

    def _look_at_links(self) -> None:
        """Probe the links if messages take much time and that time has changed; all ranks decide alike."""
        length = median(d.compute + d.waited for d in self.digests)
        sending = min(d.waited for d in self.digests)
        suspect, before = sending > SUSPECT * length, self._sending
        changed = max(sending, before) > CHANGED * min(sending, before)
        if not changed or not (suspect or self._links):
            return
        spent, elapsed = from_all(
            (self.probe_s, time.perf_counter() - self._begun), self.group
        )[0]
        if self.probes and spent > PROBING * elapsed:
            return
        begun, self._sending = time.perf_counter(), sending
        self.matrix, times = steady_matrix(self.group, self.device)
        self._links = slow_links(self.matrix, self.digests)
        self.probes += times
        self.probe_s += time.perf_counter() - begun

    def record(self) -> dict[str, Any]:
        """Return the last judgement as JSON, for the run's metrics and its report.

        It has the verdicts, the seconds in which each rank computes and waits, and the seconds of probe messages
        between ranks.
        """
        rows = [
            {
                "rank": d.rank,
                "machine": d.machine,
                "compute": d.compute,
                "wait": d.waited,
            }
            for d in self.digests
        ]
        matrix = None if self.matrix is None else self.matrix.tolist()
        return {"verdicts": [asdict(v) for v in self.verdicts], "ranks": rows, "matrix": matrix, "size": PROBE,
                "probes": self.probes, "probe_s": self.probe_s}  # fmt: skip
