"""Pictures of a simulated schedule: an SVG for a talk, a page to explore, a trace for Perfetto."""

import zlib
from collections.abc import Iterator
from math import floor, log10
from typing import Any, NamedTuple

from weft.pages import render
from weft.schedule.actions import Key, Table, Value
from weft.schedule.kinds import KINDS, Clock, kind_of
from weft.schedule.simulate import Simulation, Timed

#: Colours of kinds that declare none.
PALETTE = (
    "#9333ea",
    "#db2777",
    "#64748b",
    "#b91c1c",
    "#0891b2",
    "#7c5a3a",
    "#a3a31a",
    "#f472b6",
)
PAGE, DARK_PAGE = "#ffffff", "#171b22"
#: Of all else in a picture; a page replaces them by its own (fills.css).
COLOURS = {
    "ink": "#16191f", "strong": "#46494f", "soft": "#667085", "line": "#e4e7ec", "lane": "#f4f5f8", "hatch": "#d5d9e1",
    "area": "#e3e8f2", "level": "#5b6b8c", "page": PAGE,
}  # fmt: skip
#: Where in its lane an action stands, and how much of it it takes, if some communicate beside the others.
STRIPS = {Clock.COMPUTE: (0.0, 0.7), Clock.COMMUNICATION: (0.72, 0.28)}
MEMORY = "activations held, in microbatches of a rank"


def colours(table: Table) -> dict[str, str]:
    """The colour of every computing kind in the table; a kind keeps its colour from table to table where it can."""
    found: dict[str, str] = {}
    present = {a.kind for a in table if not a.declared.inserted}
    for kind in [k for k in KINDS if k in present] + sorted(present - set(KINDS)):
        at = zlib.crc32(kind.encode())
        free = [
            c
            for i in range(len(PALETTE))
            if (c := PALETTE[(at + i) % len(PALETTE)]) not in found.values()
        ]
        found[kind] = kind_of(kind).colour or (free or PALETTE)[0]
    return found


def shades_of(table: Table) -> tuple[dict[tuple[int, int, int], int], int, str]:
    """What shades an action, by ``(rank, stage, microbatch)``; how many shades; what they tell.

    The virtual stage of its rank, or, where ranks share stages (DualPipe), the end at which the microbatch enters.
    """
    held = [table.held(rank) for rank in range(len(table.ranks))]
    places = {(a.rank, a.stage, a.microbatch) for a in table if not a.declared.inserted}
    if sum(map(len, held)) == len({s for stages in held for s in stages}):
        shade = {
            (rank, s, m): held[rank].index(s) if s in held[rank] else 0
            for rank, s, m in places
        }
        return shade, max(1, *map(len, held)), "the rank's stages, strongest first"
    enters = {
        m: rank
        for rank, stage, m in places
        if 0 <= m < table.microbatches and stage == table.paths[m][0]
    }
    ends = sorted(set(enters.values()))
    meaning = f"enters at rank {', '.join(map(str, ends))}"
    return (
        {(rank, s, m): ends.index(enters.get(m, ends[0])) for rank, s, m in places},
        len(ends),
        meaning,
    )


def boxes(simulation: Simulation) -> list[Timed]:
    """What is drawn, in this order: the actions of all compute streams, then those of all communication streams."""
    return [t for lane in (*simulation.timeline, *simulation.beside) for t in lane]


def mix(a: str, b: str, share: float) -> str:
    pairs = zip(bytes.fromhex(a[1:]), bytes.fromhex(b[1:]), strict=True)
    return "#" + "".join(f"{round(x + (y - x) * share):02x}" for x, y in pairs)


def shaded(colour: str, shade: int, count: int, dark: bool = False) -> tuple[str, str]:
    """Fill and text colour. Later shades fade towards the page; the text is what contrasts most."""
    share = shade / (count - 1) if count > 1 else 0.0
    fill = (
        mix(mix(colour, PAGE, 0.25), DARK_PAGE, 0.55 * share)
        if dark
        else mix(colour, PAGE, 0.66 * share)
    )
    parts = [
        (c / 255 / 12.92 if c < 11 else ((c / 255 + 0.055) / 1.055) ** 2.4)
        for c in bytes.fromhex(fill[1:])
    ]
    luminance = 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]
    # the contrasts of white and ink cross at 0.19
    return fill, (PAGE if luminance < 0.19 else "#0e1116")


class Look(NamedTuple):
    """How actions of one kind and shade are drawn: class, colours of box and number, the same in the dark."""

    css: str
    fill: str
    ink: str
    dark_fill: str
    dark_ink: str


def legend(table: Table) -> dict[str, Any]:
    """For the templates: every kind with its meaning and the looks of its shades; what else there is to tell."""
    _, shades, meaning = shades_of(table)
    kinds = [
        (kind, kind_of(kind).meaning, [
            Look(f"k{k}s{s}", *shaded(colour, s, shades), *shaded(colour, s, shades, dark=True)) for s in range(shades)
        ]) for k, (kind, colour) in enumerate(colours(table).items())
    ]  # fmt: skip
    return {
        "kinds": kinds,
        "remark": " · number: microbatch"
        + (f" · shade: {meaning}" if shades > 1 else ""),
    }


def short_number(value: float) -> str:
    return f"{value:.5g}" if abs(value) < 1e4 else f"{value:,.0f}"


def ticks(end: float) -> list[float]:
    """Round times from 0 to ``end``, about a dozen."""
    rough = end / 12
    power = 10.0 ** floor(log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    return [i * step for i in range(int(end / step + 1e-9) + 1)]


def summary_line(simulation: Simulation, unit: str = "") -> str:
    unit = unit and f" {unit}"
    ran = f" · first to last action {short_number(simulation.elapsed)}{unit}"
    size = f"P = {len(simulation.timeline)} ranks · M = {simulation.table.microbatches} microbatches"
    clock = f"bubble {simulation.bubble_rate:z.1%} · makespan {short_number(simulation.makespan)}{unit}"
    return f"{size} · {clock}{ran if simulation.elapsed > simulation.makespan * (1 + 1e-9) else ''}"


class Box(NamedTuple):
    """An action as it is drawn; ``down`` and ``tall``: where in its lane it begins and how much of it it takes."""

    start: float
    end: float
    down: float
    tall: float
    rank: int
    look: Look
    label: int
    tip: str


class Track(NamedTuple):
    """Memory of a rank: times with levels, as shares of the highest of all ranks; when and how high it peaks."""

    levels: list[tuple[float, float]]
    when: float
    share: float
    peak: str


def svg(
    simulation: Simulation,
    title: str = "",
    note: str = "",
    unit: str = "",
    memory: str = MEMORY,
    page: bool = False,
) -> str:
    """The picture: a lane of boxes per rank, and under it the memory of each.

    ``unit``: of time; ``memory``: what the levels are; ``note``: stands beside the title, or describes the picture of a
    ``page``, which has no title, legend and background of its own.
    """
    table = simulation.table
    spans = [
        t.end - t.start for lane in simulation.timeline for t in lane if t.end > t.start
    ]
    return render(
        "schedule/picture.svg", c=COLOURS, page=page, note=note, unit=unit, memory=memory, name=title or table.name,
        caption=(page and note) or summary_line(simulation, unit), elapsed=simulation.elapsed,
        makespan=simulation.makespan, shortest=min(spans, default=1.0), digits=len(str(table.microbatches - 1)),
        ticks=[(t, short_number(t)) for t in ticks(simulation.elapsed or 1.0)], lanes=_lanes(simulation),
        boxes=_boxes(simulation), tracks=_tracks(simulation), **legend(table),
    )  # fmt: skip


def _lanes(simulation: Simulation) -> list[tuple[float, tuple[int, ...]]]:
    """Of each rank when its makespan begins, from which on its lane is hatched, and the stages it holds."""
    ends = [
        max((t.end for t in (*a, *b)), default=0.0)
        for a, b in zip(simulation.timeline, simulation.beside, strict=True)
    ]
    return [
        (max(0.0, end - simulation.makespan), simulation.table.held(rank))
        for rank, end in enumerate(ends)
    ]


def _boxes(simulation: Simulation) -> Iterator[Box]:
    looks = {kind: shades for kind, _, shades in legend(simulation.table)["kinds"]}
    (shade, *_), beside = shades_of(simulation.table), any(simulation.beside)
    for t in boxes(simulation):
        a, (down, tall) = (
            t.action,
            STRIPS[t.action.declared.clock] if beside else (0.0, 1.0),
        )
        tip = f"{a.kind} stage {a.stage}, microbatch {a.microbatch}: {short_number(t.start)} to {short_number(t.end)}"
        look = looks[a.kind][shade[a.rank, a.stage, a.microbatch]]
        yield Box(t.start, t.end, down, tall, a.rank, look, a.microbatch, tip)


def _tracks(simulation: Simulation) -> Iterator[Track]:
    highest = max(simulation.peaks, default=0.0) or 1.0
    for track, peak in zip(simulation.memory, simulation.peaks, strict=True):
        when = next((t for t, level in track if level == peak), 0.0)
        yield Track(
            [(t, level / highest) for t, level in dict(track).items()],
            when,
            peak / highest,
            short_number(peak),
        )


def _reads(simulation: Simulation) -> dict[Key, list[str]]:
    """What each action reads, and where that came from if from another rank."""
    come = {
        (value, to): f"from rank {by} at {short_number(at)}"
        for value, by, to, _, at in simulation.moves
    }
    return {
        a.key: [f"{v} {come.get((v, a.rank), 'on this rank')}" for v in a.reads]
        for a in simulation.table
    }


def html(
    simulation: Simulation,
    title: str = "",
    note: str = "",
    unit: str = "",
    memory: str = MEMORY,
) -> str:
    """One page that works offline: the picture with zoom, values on hover, and the path of a microbatch."""
    table, reads, kinds = (
        simulation.table,
        _reads(simulation),
        list(colours(simulation.table)),
    )
    span, after = simulation.makespan, f" {unit}".rstrip()
    data = {
        "end": simulation.elapsed or 1.0, "makespan": span, "unit": after, "microbatches": table.microbatches,
        "kinds": [(kind, kind_of(kind).meaning) for kind in kinds],
        "actions": [(a.rank, kinds.index(a.kind), a.stage, a.microbatch, t.start, t.end, reads[a.key])
                    for t in boxes(simulation) for a in (t.action,)],
        "moves": [(value.microbatch, *ends) for value, *ends in simulation.moves],
    }  # fmt: skip
    rows = [
        (f"rank {rank}", ", ".join(map(str, table.held(rank))), f"{short_number(busy)}{after}",
         f"{short_number(span - busy)}{after}", f"{(span - busy) / span if span else 0:z.2%}", short_number(peak))
        for rank, (busy, peak) in enumerate(zip(simulation.busy, simulation.peaks, strict=True))
    ]  # fmt: skip
    return render(
        "schedule/timeline.html", title=title or table.name, subtitle=note or summary_line(simulation, unit),
        table=table, makespan=f"{short_number(span)}{after}", bubble=f"{simulation.bubble_rate:z.2%}",
        memory=memory, rows=rows, peak=short_number(max(simulation.peaks, default=0.0)), data=data, **legend(table),
        svg=svg(simulation, title, note, unit, memory, page=True),
    )  # fmt: skip


def perfetto(simulation: Simulation, microseconds: float = 1000.0) -> dict[str, Any]:
    """A Chrome trace (ui.perfetto.dev): per rank a track and a counter of memory, an arrow per move."""
    us, reads, name = microseconds, _reads(simulation), simulation.table.name
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": name}}
    ]
    # Where and when the arrow of a value begins on a rank, or ends: its track and time.
    leaves: dict[tuple[Value, int], dict[str, float]] = {}
    needed: dict[tuple[Value, int], dict[str, float]] = {}
    count = len(simulation.timeline)
    for track, lane in enumerate((*simulation.timeline, *simulation.beside)):
        rank, at = track % count, {"pid": 0, "tid": track}
        if track >= count and not lane:
            continue
        label = f"rank {rank}" + ", communication" * (track >= count)
        events.append({"ph": "M", **at, "name": "thread_name", "args": {"name": label}})
        events.append(
            {
                "ph": "M",
                **at,
                "name": "thread_sort_index",
                "args": {"sort_index": 2 * rank + track // count},
            }
        )
        for t in lane:
            a, span = t.action, {"ts": t.start * us, "dur": (t.end - t.start) * us}
            args = {"stage": a.stage, "microbatch": a.microbatch, "reads": reads[a.key]}
            events.append(
                {
                    "ph": "X",
                    **at,
                    "name": f"{a.kind} {a.microbatch}",
                    "cat": a.kind,
                    **span,
                    "args": args,
                }
            )
            # Inside the slice that sends: at its very end the next one would be taken for the sender.
            out = {"tid": track, "ts": (t.end - (t.end - t.start) / 100) * us}
            leaves |= dict.fromkeys(((value, rank) for value in a.writes), out)
            for value in a.reads:
                needed.setdefault((value, rank), {"tid": track, "ts": t.start * us})
    for rank, levels in enumerate(simulation.memory):
        for time, level in dict(levels).items():
            held = {"name": f"memory of rank {rank}", "args": {"level": level}}
            events.append({"ph": "C", "pid": 0, "ts": time * us, **held})
    for i, (value, source, target, start, end) in enumerate(simulation.moves):
        move = {"cat": "move", "name": str(value), "id": i, "pid": 0}
        events.append({"ph": "s", **move, **leaves[value, source]})
        events.append({"ph": "f", "bp": "e", **move, **needed[value, target]})
        for ph, when in (("b", start), ("e", end)) if end > start else ():
            events.append(
                {"ph": ph, **move, "cat": "link", "tid": source, "ts": when * us}
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
