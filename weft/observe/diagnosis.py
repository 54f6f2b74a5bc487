"""Diagnoses a run from the ring buffers of its ranks, live or afterwards: who is slow, and why the run stands still."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from weft.errors import WeftError
from weft.observe.rank_delays import Verdict, digest_trace, ranks_text, slow_computers
from weft.observe.rings import (
    KINDS,
    Trace,
    TracedGroup,
    collective_text,
    held_in,
    newest_traces,
    process_of,
    standing,
)
from weft.observe.run_metrics import FILE, read_metrics

#: A wait shows that a run hangs if it takes more than so many seconds, and more than so many times as long as a step.
STUCK_S, STUCK_STEPS = 5.0, 5.0


@dataclass(frozen=True)
class RankStatus:
    """State of one rank of a run, as its trace file and its process show it.

    Attributes:
        ``rank``, ``machine``, ``pid``: the rank, the machine that it runs on, and its process.
        ``process``: running, stopped or gone.
        ``step``: number of its present or last step, 0 before the first.
        ``compute``, ``wait``: median seconds of a step in which the rank computes, and waits for others; None before
            its first step.
        ``now``: what the rank is doing, in words; ``since``: seconds for which it has done so.
    """

    rank: int
    machine: str
    pid: int
    process: str
    step: int
    compute: float | None
    wait: float | None
    now: str
    since: float


@dataclass(frozen=True)
class Examination:
    """Result of ``weft doctor``: the state of a run's ranks, and the verdicts about them.

    ``rows``: state of each rank on this machine. ``record``: the last record of kind ``delays`` in the run's metrics.
    """

    rows: list[RankStatus]
    verdicts: list[Verdict]
    record: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        verdicts = [asdict(verdict) for verdict in self.verdicts]
        return {
            "ranks": [asdict(row) for row in self.rows],
            "verdicts": verdicts,
            "record": self.record,
        }


def examine(run: Path) -> Examination:
    """Diagnose the run in the folder ``run`` by the traces of its ranks on this machine and by its metrics.

    Raises :class:`WeftError` if there are neither.
    """
    traces, now, recorded = (
        newest_traces(run),
        time.monotonic_ns(),
        (run / FILE).is_file(),
    )
    if not traces and not recorded:
        raise WeftError(
            f"{run} has no {FILE}, and no rank of it runs here; give the folder of a run that was started"
        )
    records = read_metrics(run).get("delays", []) if recorded else []
    record = records[-1] if records else {}
    try:
        said = [
            Verdict(**item | {"ranks": tuple(item["ranks"])})
            for item in record.get("verdicts", ())
        ]
        tables(Examination([], said, record))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise WeftError(
            f"{run / FILE}: its last record of kind delays is damaged; remove that line"
        ) from None
    states = {rank: process_of(trace) for rank, trace in traces.items()}
    digests = [item for item in map(digest_trace, traces.values()) if item.steps]
    if digests and len(digests) == next(iter(traces.values())).about["world"]:
        said = slow_computers(digests, {}, {}) + [
            item for item in said if item.kind != "computer"
        ]
    rows = [
        status_of_rank(trace, states[rank], now)
        for rank, trace in sorted(traces.items())
    ]
    return Examination(rows, standstill(traces, states, now) or said, record)


def status_of_rank(trace: Trace, process: str, now: int) -> RankStatus:
    """Return the state of the rank that has written ``trace``.

    ``process``: running, stopped or gone; ``now``: present time in nanoseconds of the monotonic clock.
    """
    about, short, inside = trace.about, digest_trace(trace), held_in(trace)
    steps, last = trace.steps, trace.records[-1] if len(trace.records) else None
    what = (
        collective_text(trace, inside)
        if inside is not None
        else "computes"
        if process == "running"
        else "-"
    )
    since = (
        inside["begin"]
        if inside is not None
        else max(last["enter"], last["leave"])
        if last is not None
        else now
    )
    return RankStatus(
        about["rank"], about["machine"], about["pid"], process, int(steps["sequence"][-1]) if len(steps) else 0,
        short.compute if short.steps else None, short.waited if short.steps else None, what, (now - int(since)) / 1e9,
    )  # fmt: skip


def standstill(
    traces: Mapping[int, Trace], states: Mapping[int, str], now: int
) -> list[Verdict]:
    """Return a list with a verdict on each rank for which others wait too long; it is empty if the run does not hang.

    In a chain of ranks that each wait for the next, the verdict is about the last rank. ``traces``: trace of each rank.
    ``states``: running, stopped or gone, by rank. ``now``: present time in nanoseconds of the monotonic clock.
    """
    inside = {
        rank: record
        for rank, verdicts in traces.items()
        if (record := held_in(verdicts)) is not None
    }
    stuck = sorted(
        rank
        for rank, record in inside.items()
        if _is_stuck(traces[rank], states[rank], record, now)
    )
    if not stuck:
        return []
    if differing := _differing(traces, inside, stuck):
        return [differing]
    missing = {rank: _missing(traces, rank, record) for rank, record in inside.items()}
    awaited, todo = set[int](), list(stuck)
    while todo:
        todo += (new := set(missing.get(todo.pop(), ())) - awaited)
        awaited |= new
    roots = sorted(rank for rank in awaited if not missing.get(rank)) or sorted(awaited)
    verdicts = []
    for root in roots:
        waits = [rank for rank in sorted(inside) if root in missing[rank]]
        waits = [rank for rank in waits if _same(traces, inside, rank, waits[0])]
        how = {"gone": "is gone", "stopped": "is stopped (SIGSTOP or a debugger)"}.get(
            states[root], "hangs"
        )
        seconds = max(_seconds(inside[r], now) for r in waits)
        what = collective_text(traces[waits[0]], inside[waits[0]])
        verdicts.append(Verdict(
            "hang", (root,), seconds,
            f"rank {root} {how}: it has not come to {what}, in which {ranks_text(waits)} waited {seconds:.1f} s; "
            f"it {standing(traces[root], now)}",
        ))  # fmt: skip
    return verdicts or _everyone_inside(traces, states, inside, stuck[0], now)


def _everyone_inside(
    traces: Mapping[int, Trace],
    states: Mapping[int, str],
    inside: Mapping[int, Any],
    rank: int,
    now: int,
) -> list[Verdict]:
    """Return the verdict on a collective of ``rank`` that all known ranks have entered: a rank has ended or stopped in
    it.
    """
    record, seconds = inside[rank], _seconds(inside[rank], now)
    what, peer = collective_text(traces[rank], record), int(record["peer"])
    ranks = traces[rank].groups[record["group"]].ranks if peer < 0 else (rank, peer)
    halted = [
        r
        for r in ranks
        if r in inside and states[r] != "running" and not inside[r]["leave"]
    ]
    if unknown := [other for other in ranks if other not in traces]:
        text = f"rank {rank} is in {what} for {seconds:.1f} s; of {ranks_text(unknown)} the rings are on other machines"
    elif len(halted) == len(ranks):
        return []  # all of them were ended there
    elif halted:
        how = "stopped" if {states[r] for r in halted} == {"stopped"} else "ended"
        others = [r for r in ranks if r not in halted]
        text = f"{ranks_text(halted)} {how} in {what}, in which {ranks_text(others)} waited {seconds:.1f} s"
    else:
        text = f"{ranks_text(ranks)} are all in {what} for {seconds:.1f} s, and it does not end: "
        text += "a link between them is down"
    return [Verdict("hang", tuple(halted or ranks), seconds, text)]


def _seconds(record: Any, now: int) -> float:
    return float((int(record["leave"]) or now) - int(record["begin"])) / 1e9


def _is_stuck(trace: Trace, state: str, record: Any, now: int) -> bool:
    steps = digest_trace(trace).steps.values()
    usual = median(total for total, *_ in steps) if steps else 0.0
    return (
        state == "gone"
        or bool(record["failed"])
        or _seconds(record, now) > max(STUCK_S, STUCK_STEPS * usual)
    )


def _missing(traces: Mapping[int, Trace], rank: int, record: Any) -> list[int]:
    """Return the ranks traced on this machine that have not entered the collective or message that ``rank`` is in."""
    other_end = {"send": "recv", "recv": "send"}.get(KINDS[record["kind"]])
    group = traces[rank].groups[record["group"]]
    others = (
        [int(record["peer"])]
        if other_end
        else [other for other in group.ranks if other != rank]
    )
    return [
        r
        for r in others
        if r in traces and _come(traces[r], group, other_end, rank) < record["sequence"]
    ]


def _come(trace: Trace, group: TracedGroup, kind: str | None, peer: int) -> int:
    """Return how many collectives of a group a rank has begun, or with ``kind`` how many messages to or from
    ``peer``.
    """
    numbers = [
        number for number, known in enumerate(trace.groups) if known.id == group.id
    ]
    calls = trace.calls
    same = (
        calls["peer"] < 0
        if kind is None
        else (calls["kind"] == KINDS.index(kind)) & (calls["peer"] == peer)
    )
    return int(
        calls["sequence"][same & np.isin(calls["group"], numbers)].max(initial=0)
    )


def _same(
    traces: Mapping[int, Trace], inside: Mapping[int, Any], rank: int, other: int
) -> bool:
    """Return whether two ranks wait in the same collective, by its group and number there (its kind may differ)."""
    first, second = inside[rank], inside[other]
    group = (
        traces[rank].groups[first["group"]].id
        == traces[other].groups[second["group"]].id
    )
    return rank == other or bool(
        group
        and first["peer"] == second["peer"] == -1
        and first["sequence"] == second["sequence"]
    )


def _differing(
    traces: Mapping[int, Trace], inside: Mapping[int, Any], stuck: Sequence[int]
) -> Verdict | None:
    """Return the verdict on two ranks that called different collectives with the same number in their group, if any."""
    for rank, other in product(stuck, inside):
        first, second = inside[rank], inside[other]
        if first["kind"] != second["kind"] and _same(traces, inside, rank, other):
            here, there = (
                collective_text(traces[rank], first),
                collective_text(traces[other], second),
            )
            text = f"rank {rank} is in {here}, and rank {other} in {there}: they took different ways"
            return Verdict("mismatch", (rank, other), 0.0, text)
    return None


def tables(examination: Examination) -> list[tuple[list[str], list[list[str]]]]:
    """Return headings and rows of two tables: of ranks, and of probe times between them.

    The second table is left out if links were not probed. ``examination``: result of :func:`examine`.
    """
    shown_tables = []
    if examination.rows:
        shown = [
            [
                str(r.rank),
                r.process,
                str(r.step),
                _ms(r.compute),
                _ms(r.wait),
                r.now,
                f"{r.since:.1f} s",
            ]
            for r in examination.rows
        ]
        shown_tables.append(
            (
                [
                    "rank",
                    "process",
                    "step",
                    "computes ms",
                    "waits ms",
                    "is in",
                    "since",
                ],
                shown,
            )
        )
    elif rows := examination.record.get("ranks"):
        shown = [[str(r["rank"]), _ms(r["compute"]), _ms(r["wait"])] for r in rows]
        shown_tables.append((["rank", "computes ms", "waits ms"], shown))
    if matrix := examination.record.get("matrix"):
        columns = [
            f"ms of {examination.record['size'] >> 10} KiB",
            *(f"to {i}" for i in range(len(matrix))),
        ]
        shown_tables.append(
            (columns, [[f"from {i}", *map(_ms, row)] for i, row in enumerate(matrix)])
        )
    return shown_tables


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None or seconds != seconds else f"{seconds * 1e3:.3g}"
