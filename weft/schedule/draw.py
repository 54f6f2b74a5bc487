"""Pictures of a simulated schedule: an SVG for a talk, a page to explore, a trace for Perfetto."""

import zlib
from collections.abc import Iterator
from functools import partial
from itertools import chain
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
#: Colours of everything but actions; a page replaces them by its own (fills.css).
COLOURS = {
    "ink": "#16191f", "strong": "#46494f", "soft": "#667085", "line": "#e4e7ec", "lane": "#f4f5f8", "hatch": "#d5d9e1",
    "area": "#e3e8f2", "level": "#5b6b8c", "page": PAGE,
}  # fmt: skip
#: Top and height of an action in its lane, if some actions communicate beside the others.
STRIPS = {Clock.COMPUTE: (0.0, 0.7), Clock.COMMUNICATION: (0.72, 0.28)}
MEMORY = "activations held, in microbatches of a rank"


def colours(table: Table) -> dict[str, str]:
    """Return the colour, ``#rrggbb``, of every kind of action in ``table``, except for inserted transfers and gathers.

    A kind has the same colour in the pictures of other tables where possible.
    """
    chosen: dict[str, str] = {}
    present = {a.kind for a in table if not a.declared.inserted}
    for kind in [k for k in KINDS if k in present] + sorted(present - set(KINDS)):
        at = zlib.crc32(kind.encode()) % len(PALETTE)
        turned = PALETTE[at:] + PALETTE[:at]
        free = (colour for colour in turned if colour not in chosen.values())
        chosen[kind] = kind_of(kind).colour or next(free, PALETTE[0])
    return chosen


class Shades(NamedTuple):
    """The shade of each action's colour in a picture.

    ``by_action``: index of the shade by ``(rank, stage, microbatch)``; ``number``: number of shades; ``meaning``:
    words for the legend that say which property of an action its shade shows.
    """

    by_action: dict[tuple[int, int, int], int]
    number: int
    meaning: str


def shades_of(table: Table) -> Shades:
    """Choose a shade for each action of ``table``, by which a picture tells apart the stages of a rank.

    In DualPipe, shades tell apart the ends of the pipeline at which microbatches enter.
    """
    held = [table.held(rank) for rank in range(len(table.ranks))]
    places = {(a.rank, a.stage, a.microbatch) for a in table if not a.declared.inserted}
    if sum(map(len, held)) == len(set(chain(*held))):
        by_stage = {
            (rank, s, m): held[rank].index(s) if s in held[rank] else 0
            for rank, s, m in places
        }
        count = max(1, *map(len, held))
        return Shades(by_stage, count, "the rank's stages, strongest first")
    enters = {
        m: rank
        for rank, stage, m in places
        if 0 <= m < table.microbatches and stage == table.paths[m][0]
    }
    ends = sorted(set(enters.values()))
    by_end = {(rank, s, m): ends.index(enters.get(m, ends[0])) for rank, s, m in places}
    return Shades(by_end, len(ends), f"enters at rank {', '.join(map(str, ends))}")


def boxes(simulation: Simulation) -> list[Timed]:
    """Return the timed actions of ``simulation`` in the order in which a picture draws them.

    All actions of compute streams come first, rank by rank, then those of communication streams.
    """
    return [*chain(*simulation.timeline, *simulation.beside)]


def mix(a: str, b: str, share: float) -> str:
    """Return a mixture of two colours ``#rrggbb``; ``share``: the part of ``b`` in the result, from 0 to 1.

    ``a``, ``b``: the two colours.
    """
    pairs = zip(bytes.fromhex(a[1:]), bytes.fromhex(b[1:]), strict=True)
    return "#" + "".join(f"{round(x + (y - x) * share):02x}" for x, y in pairs)


def shaded(colour: str, shade: int, count: int, dark: bool = False) -> tuple[str, str]:
    """Return the fill colour and the text colour for shade number ``shade`` of ``count`` shades of ``colour``.

    ``dark``: whether the page has a dark background. Shades with higher numbers are paler on a light page, and darker
    on a dark page. The text colour contrasts with the fill.
    """
    share = shade / (count - 1) if count > 1 else 0.0
    fill = mix(colour, PAGE, 0.66 * share)
    if dark:
        fill = mix(mix(colour, PAGE, 0.25), DARK_PAGE, 0.55 * share)
    # relative luminance of sRGB
    red, green, blue = (
        (c / 255 / 12.92 if c < 11 else ((c / 255 + 0.055) / 1.055) ** 2.4)
        for c in bytes.fromhex(fill[1:])
    )
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    # the contrasts of white and ink cross at 0.19
    return fill, PAGE if luminance < 0.19 else "#0e1116"


class Look(NamedTuple):
    """The look of actions of one kind and shade.

    Attributes:
        ``css``: name of their CSS class.
        ``fill``, ``ink``: colours of the box and of its text, on a light page.
        ``dark_fill``, ``dark_ink``: the same on a dark page.
    """

    css: str
    fill: str
    ink: str
    dark_fill: str
    dark_ink: str


def legend(table: Table) -> dict[str, Any]:
    """Return the variables, by name, with which templates draw the legend of a picture of ``table``.

    ``kinds`` lists ``(name, meaning, looks)`` of each kind of action, with a :class:`Look` for every shade; ``remark``
    is a line that explains numbers and shades.
    """
    shades = shades_of(table)
    kinds = []
    for k, (kind, colour) in enumerate(colours(table).items()):
        looks = []
        for s in range(shades.number):
            light, dark = (shaded(colour, s, shades.number, on) for on in (False, True))
            looks.append(Look(f"k{k}s{s}", *light, *dark))
        kinds.append((kind, kind_of(kind).meaning, looks))
    told_apart = f" · shade: {shades.meaning}" if shades.number > 1 else ""
    return {"kinds": kinds, "remark": f" · number: microbatch{told_apart}"}


def short_number(value: float) -> str:
    """Format ``value`` with five significant digits, or as an integer with separators from ten thousand on."""
    return f"{value:.5g}" if abs(value) < 1e4 else f"{value:,.0f}"


def ticks(end: float) -> list[float]:
    """Return about a dozen round times from 0 to ``end``, for the time axis of a picture."""
    rough = end / 12
    power = 10.0 ** floor(log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    return [i * step for i in range(int(end / step + 1e-9) + 1)]


def summary_line(simulation: Simulation, unit: str = "") -> str:
    """Return one line with the ranks, microbatches, bubble and makespan of ``simulation``.

    ``unit``: name of the unit of time.
    """
    unit = unit and f" {unit}"
    parts = [
        f"P = {len(simulation.timeline)} ranks",
        f"M = {simulation.table.microbatches} microbatches",
        f"bubble {simulation.bubble_rate:z.1%}",
        f"makespan {short_number(simulation.makespan)}{unit}",
    ]
    if simulation.elapsed > simulation.makespan * (1 + 1e-9):
        parts.append(f"first to last action {short_number(simulation.elapsed)}{unit}")
    return " · ".join(parts)


class Box(NamedTuple):
    """The box that stands for an action in a picture.

    Attributes:
        ``start``, ``end``: times of the action, in the simulation's unit.
        ``down``, ``tall``: top and height of the box, as shares of the height of the rank's lane.
        ``rank``: rank that runs the action.
        ``look``: colours of the box.
        ``label``: microbatch, the number in the box.
        ``tip``: text that is shown when the mouse is over the box.
    """

    start: float
    end: float
    down: float
    tall: float
    rank: int
    look: Look
    label: int
    tip: str


class Track(NamedTuple):
    """The curve of a rank's memory in a picture.

    ``levels``: ``(time, level)`` after each change, with the level as a share of the highest level of all ranks;
    ``when`` and ``share``: time and level of the highest point of this rank's curve; ``peak``: the level there as text.
    """

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
    """Return a picture of ``simulation`` as SVG: for each rank a lane of boxes, one per action, and below it a curve of
    its memory.

    ``title``: title of the picture; "": the schedule's name. ``unit``: name of the unit of time. ``memory``: words for
    the unit in which memory is counted. ``note``: text beside the title. ``page``: whether the picture is to be put
    into a page that itself has a title, a legend and a background. The picture then has none of them, and ``note``, if
    given, takes the place of the line with makespan and bubble.
    """
    table = simulation.table
    spans = [t.end - t.start for t in chain(*simulation.timeline) if t.end > t.start]
    return render(
        "schedule/picture.svg", c=COLOURS, page=page, note=note, unit=unit, memory=memory, name=title or table.name,
        caption=(page and note) or summary_line(simulation, unit), elapsed=simulation.elapsed,
        makespan=simulation.makespan, shortest=min(spans, default=1.0), digits=len(str(table.microbatches - 1)),
        ticks=[(t, short_number(t)) for t in ticks(simulation.elapsed or 1.0)], lanes=_lanes(simulation),
        boxes=_boxes(simulation), tracks=_tracks(simulation), **legend(table),
    )  # fmt: skip


def _lanes(simulation: Simulation) -> list[tuple[float, tuple[int, ...]]]:
    """Return the begin of each rank's makespan, from where its lane is hatched, and the stages that it holds."""
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
    shade, beside = shades_of(simulation.table).by_action, any(simulation.beside)
    for t in boxes(simulation):
        a = t.action
        down, tall = STRIPS[a.declared.clock] if beside else (0.0, 1.0)
        tip = f"{a.kind} stage {a.stage}, microbatch {a.microbatch}: {short_number(t.start)} to {short_number(t.end)}"
        look = looks[a.kind][shade[a.rank, a.stage, a.microbatch]]
        yield Box(t.start, t.end, down, tall, a.rank, look, a.microbatch, tip)


def _tracks(simulation: Simulation) -> Iterator[Track]:
    highest = max(simulation.peaks, default=0.0) or 1.0
    for track, peak in zip(simulation.memory, simulation.peaks, strict=True):
        when = next((t for t, level in track if level == peak), 0.0)
        levels = [(t, level / highest) for t, level in dict(track).items()]
        yield Track(levels, when, peak / highest, short_number(peak))


def _reads(simulation: Simulation) -> dict[Key, list[str]]:
    """Describe the values that each action reads, with the rank that sent them."""
    sources = {
        (
            move.value,
            move.target,
        ): f"from rank {move.source} at {short_number(move.end)}"
        for move in simulation.moves
    }
    return {
        a.key: [f"{v} {sources.get((v, a.rank), 'on this rank')}" for v in a.reads]
        for a in simulation.table
    }


def html(
    simulation: Simulation,
    title: str = "",
    note: str = "",
    unit: str = "",
    memory: str = MEMORY,
) -> str:
    """Return an HTML page with a picture of ``simulation``; the page works offline.

    The page can zoom, shows an action's values when the mouse is over it, and marks the path of a microbatch.
    ``title``: title of the page; "": the schedule's name. ``note``: line under the title. ``unit``: name of the unit of
    time. ``memory``: words for the unit in which memory is counted.
    """
    table, reads = simulation.table, _reads(simulation)
    kinds = list(colours(table))
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
    """Return ``simulation`` as a Chrome trace (ui.perfetto.dev): a track and a memory counter for each rank, an arrow
    for each transfer.

    ``microseconds``: the length of the simulation's unit of time.
    """
    us, reads = microseconds, _reads(simulation)
    events: list[dict[str, Any]] = []

    def add(phase: str, name: str, **fields: Any) -> None:
        events.append({"ph": phase, "pid": 0, "name": name, **fields})

    add("M", "process_name", args={"name": simulation.table.name})
    # Where and when the arrow of a value begins on a rank, or ends: its track and time.
    leaves: dict[tuple[Value, int], dict[str, Any]] = {}
    needed: dict[tuple[Value, int], dict[str, Any]] = {}
    count = len(simulation.timeline)
    for track, lane in enumerate((*simulation.timeline, *simulation.beside)):
        beside, rank = divmod(track, count)
        if beside and not lane:
            continue
        label = f"rank {rank}" + ", communication" * beside
        add("M", "thread_name", tid=track, args={"name": label})
        order = {"sort_index": 2 * rank + beside}
        add("M", "thread_sort_index", tid=track, args=order)
        for t in lane:
            a, start, span = t.action, t.start * us, (t.end - t.start) * us
            args = {"stage": a.stage, "microbatch": a.microbatch, "reads": reads[a.key]}
            name = f"{a.kind} {a.microbatch}"
            add("X", name, tid=track, cat=a.kind, ts=start, dur=span, args=args)
            # Inside the slice that sends: at its very end the next one would be taken for the sender.
            out = {"tid": track, "ts": start + span * 0.99}
            leaves |= dict.fromkeys(((value, rank) for value in a.writes), out)
            for value in a.reads:
                needed.setdefault((value, rank), {"tid": track, "ts": start})
    for rank, levels in enumerate(simulation.memory):
        for time, level in dict(levels).items():
            add("C", f"memory of rank {rank}", ts=time * us, args={"level": level})
    for i, (value, source, target, start, end) in enumerate(simulation.moves):
        arrow = partial(add, name=str(value), id=i)
        arrow("s", cat="move", **leaves[value, source])
        arrow("f", cat="move", **needed[value, target], bp="e")
        for phase, when in (("b", start), ("e", end)) if end > start else ():
            arrow(phase, cat="link", tid=source, ts=when * us)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
