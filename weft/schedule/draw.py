"""Pictures of a simulated schedule: an SVG for a talk, a page to explore, a trace for Perfetto."""

import json
import re
import zlib
from html import escape
from importlib import resources
from math import floor, log10
from typing import Any

from weft.schedule.actions import Key, Table, Value
from weft.schedule.kinds import KINDS, Clock, kind_of
from weft.schedule.simulate import Simulation, Timed

#: Colours of kinds that declare none.
PALETTE = ("#9333ea", "#db2777", "#64748b", "#b91c1c", "#0891b2", "#7c5a3a", "#a3a31a", "#f472b6")
INK, SOFT, LINE, LANE, HATCH, PAGE = "#16191f", "#667085", "#e4e7ec", "#f4f5f8", "#d5d9e1", "#ffffff"
AREA, LEVEL, DARK_PAGE = "#e3e8f2", "#5b6b8c", "#171b22"
FONT = "Inter, system-ui, 'Helvetica Neue', Arial, sans-serif"
GUTTER = 84  # left: names of the ranks, right: their peaks
MEMORY = "activations held, in microbatches of a rank"


def colours(table: Table) -> dict[str, str]:
    """The colour of every computing kind in the table; a kind keeps its colour from table to table where it can."""
    found: dict[str, str] = {}
    present = {a.kind for a in table if not a.declared.inserted}
    for kind in [k for k in KINDS if k in present] + sorted(present - set(KINDS)):
        at = zlib.crc32(kind.encode())
        free = [c for i in range(len(PALETTE)) if (c := PALETTE[(at + i) % len(PALETTE)]) not in found.values()]
        found[kind] = kind_of(kind).colour or (free or PALETTE)[0]
    return found


def chunks(table: Table) -> tuple[dict[tuple[int, int, int], int], int, str]:
    """What shades an action, by ``(rank, stage, microbatch)``; how many shades; what they tell.

    The virtual stage of its rank, or, where ranks share stages (DualPipe), the end at which the microbatch enters.
    """
    held = [table.held(rank) for rank in range(len(table.ranks))]
    places = {(a.rank, a.stage, a.microbatch) for a in table if not a.declared.inserted}
    if sum(map(len, held)) == len({s for stages in held for s in stages}):
        shade = {p: held[p[0]].index(p[1]) if p[1] in held[p[0]] else 0 for p in places}
        return shade, max(1, *map(len, held)), "the rank's stages, strongest first"
    first = {m: rank for rank, stage, m in places if 0 <= m < table.microbatches and stage == table.paths[m][0]}
    ends = sorted(set(first.values()))
    told = f"enters at rank {', '.join(map(str, ends))}"
    return {p: ends.index(first.get(p[2], ends[0])) for p in places}, len(ends), told


def boxes(simulation: Simulation) -> list[Timed]:
    """What is drawn, in this order: the actions of all compute streams, then those of all communication streams."""
    return [t for lane in (*simulation.timeline, *simulation.beside) for t in lane]


def mix(a: str, b: str, share: float) -> str:
    pairs = zip(bytes.fromhex(a[1:]), bytes.fromhex(b[1:]), strict=True)
    return "#" + "".join(f"{round(x + (y - x) * share):02x}" for x, y in pairs)


def shaded(colour: str, shade: int, count: int, dark: bool = False) -> tuple[str, str]:
    """Fill and text colour. Later shades fade towards the page; the text is what contrasts most."""
    share = shade / (count - 1) if count > 1 else 0.0
    fill = mix(mix(colour, PAGE, 0.25), DARK_PAGE, 0.55 * share) if dark else mix(colour, PAGE, 0.66 * share)
    parts = [(c / 255 / 12.92 if c < 11 else ((c / 255 + 0.055) / 1.055) ** 2.4) for c in bytes.fromhex(fill[1:])]
    luminance = 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]
    return fill, (PAGE if luminance < 0.19 else "#0e1116")  # the contrasts of white and ink cross at 0.19


def number(value: float) -> str:
    return f"{value:.5g}" if abs(value) < 1e4 else f"{value:,.0f}"


def ticks(end: float) -> list[float]:
    """Round times from 0 to ``end``, about a dozen."""
    rough = end / 12
    power = 10.0 ** floor(log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    return [i * step for i in range(int(end / step + 1e-9) + 1)]


def text(x: float, y: float, what: str, size: float, more: str = "") -> str:
    return f'<text x="{x:.6g}" y="{y:.6g}" font-size="{size:.3g}" {more}>{escape(what)}</text>'


def headline(simulation: Simulation, unit: str = "") -> str:
    unit = unit and f" {unit}"
    ran = f" · first to last action {number(simulation.elapsed)}{unit}"
    size = f"P = {len(simulation.timeline)} ranks · M = {simulation.table.microbatches} microbatches"
    clock = f"bubble {simulation.bubble_rate:z.1%} · makespan {number(simulation.makespan)}{unit}"
    return f"{size} · {clock}{ran if simulation.elapsed > simulation.makespan * (1 + 1e-9) else ''}"


def svg(
    simulation: Simulation, title: str = "", note: str = "", unit: str = "", memory: str = MEMORY, page: bool = False
) -> str:
    """The picture: a lane of boxes per rank, and under it the memory of each.

    ``unit``: of time; ``memory``: what the levels are; ``note``: stands beside the title; ``page``: for :func:`html`.
    """
    table, end, ranks = simulation.table, simulation.elapsed or 1.0, len(simulation.timeline)
    name, told = title or table.name, (page and note) or headline(simulation, unit)
    width, margin, top = (1200, 0, 8) if page else (1600, 28, 138)
    left, plot = margin + GUTTER, width - 2 * margin - 2 * GUTTER
    lane, strip, gap = max(14, min(50, 300 // ranks)), max(12, min(44, 220 // ranks)), 6 if ranks <= 16 else 3
    axis, below = (top + ranks * (lane + gap) + room for room in (4, 80))
    height, end_y = below + ranks * (strip + gap) + (4 if page else 24), below + ranks * (strip + gap) - gap
    kinds, (shade, shades, meaning), scale = colours(table), chunks(table), plot / end
    soft, right = f'fill="{SOFT}" class="soft"', f'fill="{SOFT}" class="soft right"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="{FONT}" role="img"><title>{escape(name)}: {escape(told)}</title>'
        '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<path d="M0 0V7" stroke="{HATCH}" stroke-width="2" class="hatch"/></pattern></defs>'
    ]
    if not page:
        out.append(f'<rect width="{width}" height="{height}" fill="{PAGE}"/>')
        out.append(text(margin, 50, name, 30, f'font-weight="700" letter-spacing="-.4" fill="{INK}"'))
        out.append(text(width - margin, 50, note, 16, f'text-anchor="end" fill="{SOFT}"'))
        out.append(text(margin, 80, headline(simulation, unit), 18, f'fill="{mix(SOFT, INK, 0.4)}"'))
        out += _legend(kinds, shades, meaning, margin, 104)
    out.append('<g class="grid">')
    for tick in ticks(end):
        x = left + tick * scale
        out.append(f'<path d="M{x:.2f} {top - 4}V{axis}M{x:.2f} {below}V{end_y}" stroke="{LINE}"/>')
        out.append(text(x, axis + 18, number(tick), 13, f'text-anchor="middle" {soft}'))
    out.append("</g>" + text(left + plot + 16, axis + 18, f"time{unit and f', {unit}'}", 13, right))
    for rank, timeline in enumerate(simulation.timeline):
        y, span = top + rank * (lane + gap), simulation.makespan
        ends = [t.end for t in (*timeline, *simulation.beside[rank])]
        begin = max(0.0, max(ends, default=0.0) - span)  # hatched: what the makespan counts, no more
        tall, hatch = f'y="{y}" height="{lane}"', f'x="{left + begin * scale:.2f}" width="{span * scale:.2f}"'
        out.append(f'<rect x="{left}" width="{plot}" {tall} fill="{LANE}" class="lane"/>')
        out.append(f'<rect {hatch} {tall} fill="url(#hatch)" class="bubble" data-t="{begin:.9g}"/>')
        out.append(_names(rank, margin, y, lane, table.held(rank)))
    # One size of numbers if the shortest box has room for it, else whatever each box has room for.
    digits, limit = len(str(table.microbatches - 1)), min(16.0, lane * 0.42)
    shortest = min((t.end - t.start for r in simulation.timeline for t in r if t.end > t.start), default=1.0) * scale
    common = min(limit, (shortest - 2.5) / digits / 0.6)
    out.append('<g class="boxes" text-anchor="middle" font-weight="500">')
    strip_of = {Clock.COMPUTE: (0.0, 0.7), Clock.COMMUNICATION: (0.72, 0.28)}  # where in its lane, and how tall
    for i, t in enumerate(boxes(simulation)):
        a, x, wide = t.action, left + t.start * scale, (t.end - t.start) * scale
        down, part = strip_of[a.declared.clock] if any(simulation.beside) else (0.0, 1.0)
        box_y, box_tall = top + a.rank * (lane + gap) + down * lane, part * lane
        level = shade[a.rank, a.stage, a.microbatch]
        fill, ink = shaded(kinds[a.kind], level, shades)
        slit = min(1.0, wide / 5) if wide > 2 else 0.0
        size = min(box_tall, common if common >= 8 else min(limit, 12, (wide - 2) / digits / 0.6))
        label = text(x + wide / 2, box_y + box_tall / 2 + size * 0.36, str(a.microbatch), size, f'fill="{ink}"')
        tip = f"{a.kind} stage {a.stage}, microbatch {a.microbatch}: {number(t.start)} to {number(t.end)}"
        out.append(
            f'<g class="a k{list(kinds).index(a.kind)}s{level}" data-i="{i}">'
            f'<rect x="{x + slit / 2:.2f}" y="{box_y:g}" width="{max(wide - slit, 0.3):.2f}" height="{box_tall:g}" '
            f'rx="{min(3, wide / 5):.2g}" fill="{fill}">{"" if page else f"<title>{escape(tip)}</title>"}</rect>'
            f"{label if size >= 8 else ''}</g>"
        )
    out.append("</g>" + text(left, below - 14, memory[:1].upper() + memory[1:], 13, soft))
    out.append(text(left + plot + 16, below - 14, "peak", 13, right))
    highest = max(simulation.peaks, default=0.0) or 1.0
    for rank, (track, peak) in enumerate(zip(simulation.memory, simulation.peaks, strict=True)):
        y = below + rank * (strip + gap)
        points = [(left + t * scale, y + strip * (1 - level / highest)) for t, level in dict(track).items()]
        path = f"M{left} {y + strip}" + "".join(f"H{x:.2f}V{v:.2f}" for x, v in points) + f"H{left + plot}"
        when, high = next((t for t, level in track if level == peak), 0.0), y + strip * (1 - peak / highest)
        x = left + when * scale
        out.append(
            f'<g class="curve"><path d="{path}V{y + strip}Z" fill="{AREA}" class="area"/>'
            f'<path d="{path}" fill="none" stroke="{LEVEL}" stroke-width="1.6" class="level"/><path class="peak" '
            f'd="M{x:.2f} {high:.2f}H{left + plot + 10}" stroke="{LEVEL}" stroke-dasharray="2 4"/></g>'
            f'<circle cx="{x:.2f}" cy="{high:.2f}" r="3.2" fill="{LEVEL}" class="dot" data-t="{when:.9g}"/>'
        )
        bold = f'font-weight="600" fill="{INK}" class="right"'
        out.append(_names(rank, margin, y, strip) + text(left + plot + 16, y + strip / 2 + 5, number(peak), 15, bold))
    return "\n".join([*out, "</svg>"])


def _names(rank: int, x: float, y: float, tall: float, held: tuple[int, ...] = ()) -> str:
    two = tall >= 30 and held
    name = text(x, y + tall / 2 + (-2 if two else 5), f"rank {rank}", min(15, tall), f'font-weight="600" fill="{INK}"')
    stages = f"{len(held)} stages" if len(held) > 2 else f"stage{'s' * (len(held) - 1)} {', '.join(map(str, held))}"
    return name + (text(x, y + tall / 2 + 14, stages, 12, f'fill="{SOFT}" class="soft"') if two else "")


def _legend(kinds: dict[str, str], shades: int, told: str, x: float, y: float) -> list[str]:
    entries = [(f"{k}  {kind_of(k).meaning}".strip(), [shaded(c, s, shades)[0] for s in range(shades)])
               for k, c in kinds.items()]  # fmt: skip
    notes = "bubble · number: microbatch" + (f" · shade: {told}" if shades > 1 else "")
    out = []
    for label, fills in [*entries, (notes, ["url(#hatch)"])]:
        out += [f'<rect x="{x + 16 * i}" y="{y}" width="16" height="16" fill="{c}"/>' for i, c in enumerate(fills)]
        x += 16 * len(fills) + 7
        out.append(text(x, y + 13, label, 14, f'fill="{INK if label != notes else SOFT}"'))
        x += 23 + 7.4 * len(label)
    return out


def _reads(simulation: Simulation) -> dict[Key, list[str]]:
    """What each action reads, and where that came from if from another rank."""
    come = {(value, to): f"from rank {by} at {number(at)}" for value, by, to, _, at in simulation.moves}
    return {a.key: [f"{v} {come.get((v, a.rank), 'on this rank')}" for v in a.reads] for a in simulation.table}


def html(simulation: Simulation, title: str = "", note: str = "", unit: str = "", memory: str = MEMORY) -> str:
    """One page that works offline: the picture with zoom, values on hover, and the path of a microbatch."""
    table, reads = simulation.table, _reads(simulation)
    kinds, (_, shades, told) = colours(table), chunks(table)
    data = {
        "end": simulation.elapsed or 1.0, "makespan": simulation.makespan, "bubble": simulation.bubble_rate,
        "unit": unit and f" {unit}", "memory": memory, "stages": table.stages, "microbatches": table.microbatches,
        "ranks": list(zip(map(table.held, range(len(table.ranks))), simulation.busy, simulation.peaks, strict=True)),
        "kinds": [(kind, kind_of(kind).meaning) for kind in kinds], "shades": shades, "told": told,
        "fills": [(f"k{k}s{s}", *shaded(colour, s, shades), *shaded(colour, s, shades, dark=True))
                  for k, colour in enumerate(kinds.values()) for s in range(shades)],
        "actions": [(a.rank, list(kinds).index(a.kind), a.stage, a.microbatch, t.start, t.end, reads[a.key])
                    for t in boxes(simulation) for a in (t.action,)],
        "moves": [(value.microbatch, *ends) for value, *ends in simulation.moves],
    }  # fmt: skip
    page = {
        "title": escape(title or table.name),
        "subtitle": escape(note or headline(simulation, unit)),
        "svg": svg(simulation, title, note, unit, memory, page=True),
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    template = resources.files("weft.schedule").joinpath("timeline.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: page[match[1]], template)


def perfetto(simulation: Simulation, microseconds: float = 1000.0) -> dict[str, Any]:
    """A Chrome trace (ui.perfetto.dev): per rank a track and a counter of memory, an arrow per move."""
    us, reads, name = microseconds, _reads(simulation), simulation.table.name
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": name}}]
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
        events.append({"ph": "M", **at, "name": "thread_sort_index", "args": {"sort_index": 2 * rank + track // count}})
        for t in lane:
            a, span = t.action, {"ts": t.start * us, "dur": (t.end - t.start) * us}
            args = {"stage": a.stage, "microbatch": a.microbatch, "reads": reads[a.key]}
            events.append({"ph": "X", **at, "name": f"{a.kind} {a.microbatch}", "cat": a.kind, **span, "args": args})
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
            events.append({"ph": ph, **move, "cat": "link", "tid": source, "ts": when * us})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
