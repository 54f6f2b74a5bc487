"""One self-contained page about a plan: what is fastest, why, what it holds where, and what was left out."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from weft.errors import WeftError
from weft.planner.cost import Cost
from weft.planner.explain import AXES, PARTS, Instead, differences, instead, title, verdict, why
from weft.planner.finalists import Final
from weft.planner.memory import Memory
from weft.planner.search import USABLE, Found, describe, tell
from weft.schedule.draw import chunks, colours, shaded, svg
from weft.schedule.kinds import kind_of
from weft.schedule.simulate import Simulation

#: Boxes in the drawn timeline; longer ones are cut, for the eye as much as for the file.
BOXES = 8000
#: Constants of a program as a reader knows them.
CONSTANTS = {
    "matmul": "share of the attainable product rate", "attention": "fused attention, share of the 16-bit peak",
    "link": "share of the fast links' bandwidth", "network": "share of the network's bandwidth",
    "latency": "factor on latencies", "exposed_tp": "tensor-parallel traffic that compute does not hide",
    "exposed_dp": "data-parallel traffic that compute does not hide",
    "exposed_pp": "sends between stages that compute does not hide", "kernels": "kernel launches of a layer's forward",
    "step": "seconds of everything else in a step", "gradient": "bytes of gradient per parameter",
    "master": "bytes of optimizer state per parameter", "constant": "GiB of context, buffers and fragmentation",
}  # fmt: skip


@dataclass(frozen=True)
class Question:
    """What was asked, as it is told; ``band``: error of the time in percent, None where nothing was compared.

    ``rehearsed``: the layouts were timed on a probed machine; closed forms, which were not, are not told beside them.
    ``untrainable``: why ``weft train`` cannot train this yet.
    """

    model: str
    cluster: str
    batch: int
    seq: int
    precision: str
    engine: str
    calibration: str
    band: int | None
    rehearsed: bool = False
    untrainable: str = ""


def write_page(path: Path, asked: Question, found: Found, finals: Sequence[Final], top: int) -> None:
    """Write the page. Raises :class:`WeftError` if the file cannot be written."""
    try:
        path.write_text(page(asked, found, finals, top), encoding="utf-8")
    except OSError as error:
        raise WeftError(f"cannot write --html {path}: {error.strerror}; name another file") from None


def page(asked: Question, found: Found, finals: Sequence[Final], top: int) -> str:
    first, machine = finals[0], found.machine
    others = among(finals) if asked.rehearsed else instead(found, finals)
    band = f"± {asked.band} %" if asked.band else "not compared"
    tokens = first.tokens_per_s
    size = float(found.shape.parameters)
    limit = float(machine.memory) / 2**30
    tiles = [
        ("Time per step", seconds(first.seconds), f"predicted, {band}"),
        ("Tokens per second", f"{tokens:,.0f}", f"{tokens / float(first.plan.world):,.0f} per device"),
        ("MFU", f"{first.utilisation:.1%}", f"of the {asked.precision} peak"),
        ("Memory", f"{first.gib:.1f} GiB", f"fullest rank, of {limit:.0f} GiB"),
    ]
    words = {
        "title": f"{escape(asked.model)} on {escape(asked.cluster)}",
        "subtitle": f"{short(size)} parameters · {asked.batch:,} sequences of {asked.seq:,} tokens per step · "
        f"{escape(asked.precision)} · {found.count:,} layouts compared, {len(found.order):,} fit",
        "tiles": "".join(f'<div class="card"><span>{a}</span><b>{b}</b><span>{c}</span></div>' for a, b, c in tiles),
        "pick": escape(title(first)),
        "verdict": choice(first, finals, others)
        + (f'<p class="bad">Not trainable yet: {escape(asked.untrainable)}.</p>' if asked.untrainable else ""),
        "ranked": ranked(finals, top, asked.rehearsed),
        "legend": legend({name: told for name, told in PARTS.items() if any(part(f.cost, name) > 0 for f in finals)}),
        "layouts": "".join(layout(i, final, first, finals[:top]) for i, final in enumerate(finals[:top], 1)),
        "instead": alternatives(first, others),
        "memory": memory_words(first, limit),
        "held": legend({f.name: f.name for f in fields(Memory)}),
        "stages": stages(first, limit),
        "timeline": "",
        "fills": "",
        "left": left_out(found),
        "out": rejected(found),
        "error": escape(asked.calibration),
        "machine": facts(machine_facts(found)),
        "engine": f"Class of program: {escape(asked.engine)}. What these mean: docs/planner.md.",
        "constants": facts((told, number(getattr(found.engine, name))) for name, told in CONSTANTS.items()),
    }
    if first.simulation is not None:
        words["timeline"], words["fills"] = timeline(first)
    template = resources.files("weft.planner").joinpath("plan.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: words[match[1]], template)


def choice(first: Final, finals: Sequence[Final], others: Sequence[Instead]) -> str:
    """Where the time goes and what the nearest rivals lose by."""
    cost = {name: part(first.cost, name) / first.seconds for name in PARTS}
    useful = cost["compute"]
    lost = sorted(((share, name) for name, share in cost.items() if name != "compute" and share >= 0.01), reverse=True)
    text = f"{useful:.0%} of the step is the model's own compute"
    if lost:
        text += "; the rest is " + ", ".join(f"{PARTS[name]} {share:.0%}" for share, name in lost[:4])
    lines = [text]
    if len(finals) > 1:
        lines.append(f"Next best: {verdict(first, finals[1])}")
    tp = next((o.final for o in others if o.axis == "tp" and o.final and o.final.plan.tp > first.plan.tp), None)
    if tp is not None and all(tp.plan != final.plan for final in finals[1:2]):
        lines.append(f"More tensor parallelism: {verdict(first, tp)}")
    return "".join(f"<p>{escape(line)}.</p>" for line in lines)


def among(finals: Sequence[Final]) -> list[Instead]:
    """For each thing that one can set: the best of ``finals`` with another value."""
    first, found = finals[0], dict[tuple[str, str], Instead]()
    for final in finals[1:]:
        for axis in AXES:
            value = getattr(final.plan, axis)
            if value != getattr(first.plan, axis) and not (axis in ("schedule", "virtual") and final.plan.pp == 1):
                key = axis, tell(axis, value)
                found.setdefault(key, Instead(*key, final, final.gib))
    return list(found.values())


def ranked(finals: Sequence[Final], top: int, rehearsed: bool) -> str:
    simulated = sum(final.simulation is not None for final in finals)
    text = (
        f"The best of each kind among all that fit. Bars are to scale: where the {finals[0].seconds:.3g} s and more go."
    )
    if rehearsed:
        text += (
            f" {len(finals)} layouts were rehearsed, on all ranks, and timed with what was measured on this machine."
        )
    elif simulated:
        text += f" {simulated} pipelines ran on the schedule simulator with the times of their own stages."
    return text


def layout(i: int, final: Final, first: Final, shown: Sequence[Final]) -> str:
    longest = max(other.seconds for other in shown)
    share = final.seconds / longest
    bar = "".join(
        piece(name, part(final.cost, name) / final.seconds, f"{PARTS[name]}: {seconds(part(final.cost, name))}")
        for name in PARTS
    )
    limit = float(final.machine.memory) / 2**30
    digits = 0 if final.gib >= 10 else 2
    slower = "" if final is first else f"<span>{final.seconds / first.seconds - 1:+.1%}</span>"
    text = escape(verdict(first, final)) if final is not first else ""
    if final.simulation is not None and abs(final.seconds / final.closed - 1) > 0.02:
        text += f"{'. ' if text else ''}Simulated {final.seconds / final.closed - 1:+.1%} against the closed form."
    return (
        f'<div class="row"><header><span class="n">{i}</span><b>{escape(title(final))}</b><span class="f">{slower}'
        f"<b>{seconds(final.seconds)}</b><span>{final.tokens_per_s:,.0f} tokens/s</span>"
        f"<span>MFU {final.utilisation:.1%}</span><span>{final.gib:.{digits}f} GiB, "
        f"{limit - final.gib:.0f} free</span></span>"
        f'</header><div class="bar" style="width: calc((100% - 30px) * {share:.4f})">{bar}</div><p>{text}</p></div>'
    )


def alternatives(first: Final, others: Sequence[Instead]) -> str:
    """Rows of the table; values that lead to the same layout share one."""
    rows: dict[Any, list[Instead]] = {}
    for other in others:
        rows.setdefault(other.final.plan if other.final else (other.axis, other.value), []).append(other)
    html = []
    for same in sorted(rows.values(), key=lambda r: r[0].final.seconds if r[0].final else float("inf")):
        final = same[0].final
        key = "<br>".join(escape(f"{other.axis}={other.value}") for other in same)
        if final is None:
            limit = float(first.machine.memory) * USABLE / 2**30
            html.append(f'<tr><td class="k">{key}</td><td class="bad">nothing fits</td><td></td>'
                        f"<td>the leanest needs {same[0].gib:.0f} of {limit:.0f} GiB per rank</td></tr>")  # fmt: skip
            continue
        changed = " ".join(differences(first, final))
        slower = final.seconds / first.seconds - 1
        html.append(
            f'<tr><td class="k">{key}</td><td>{escape(changed)}</td>'
            f'<td class="v">{slower:+.1%}</td><td>{escape(why(first, final))}</td></tr>'
        )
    return "".join(html)


def memory_words(first: Final, limit: float) -> str:
    split = {f.name: part(first.memory, f.name) for f in fields(Memory)}
    largest = max(split, key=lambda name: split[name])
    return (
        f"The fullest rank holds {first.gib:.1f} GiB, most of it {largest} ({split[largest] / 2**30:.1f} GiB). The red "
        f"line is what a plan may use: {USABLE:.0%} of the device's {limit:.1f} GiB."
    )


def stages(first: Final, limit: float) -> str:
    """A bar per pipeline rank, on the scale of the device's memory; alike neighbours share one."""
    run, html = first.simulation, []
    ranks = list(first.ranks)
    labels = [label(first, run, r) for r in range(len(ranks))]
    r = 0
    while r < len(ranks):
        end = r
        while end + 1 < len(ranks) and len(ranks) > 24 and labels[end + 1] == labels[r]:
            end += 1
        scale = max(limit, max(float(m.total) for m in ranks) / 2**30) * 2**30
        held = {f.name: part(ranks[r], f.name) for f in fields(Memory)}
        pieces = "".join(piece(name, x / scale, f"{name}: {x / 2**30:.1f} GiB") for name, x in held.items())
        span = f"rank {r}" if end == r else f"ranks {r} to {end}"
        name = f"{span} · {labels[r]}" if run is not None else "every rank"
        html.append(
            f'<span>{name}</span><div class="track"><div class="bar">{pieces}</div>'
            f'<u style="left: {100 * limit * USABLE * 2**30 / scale:.2f}%"></u></div>'
            f"<span>{float(ranks[r].total) / 2**30:.1f} GiB</span>"
        )
        r = end + 1
    return "".join(html)


def label(first: Final, run: Simulation | None, rank: int) -> str:
    if run is None:
        return f"{float(first.shape.layers):.0f} layers"
    held = [first.stages[s] for s in run.table.held(rank)]
    parts = [f"{sum(len(s.layers) for s in held)} layers"]
    parts += ["embedding"] * any(s.embedding for s in held) + ["head"] * any(s.head for s in held)
    return " + ".join(parts)


def timeline(first: Final) -> tuple[str, str]:
    """The card with the drawn schedule, and the fills of its boxes as CSS for both colour schemes."""
    run = first.simulation
    assert run is not None
    m, size = int(first.plan.microbatches), run.table.microbatches
    note = f"{len(run.timeline)} ranks, rank 0 on top · {m} microbatches · "
    note += f"bubble {part(first.cost, 'bubble') / first.seconds:.0%} of the step's {seconds(first.seconds)}"
    if m > size:  # what is drawn has a bubble of its own, which is no figure of the step
        note += f" · drawn are the first {size} microbatches ({seconds(run.elapsed)}); the others go on in the same way"
    note += f" · activations of the fullest rank: {max(run.peaks) / 2**30:.3g} GiB"
    count = sum(map(len, run.timeline))
    if count > BOXES:
        card = "The table has too many actions to be drawn; weft schedule draws smaller ones of the same kind."
        return f'<section class="card"><h2>Timeline</h2><p>{escape(note)}. {card}</p></section>', ""
    kinds, (_, shades, _) = colours(run.table), chunks(run.table)
    light, dark = list[str](), list[str]()
    for k, colour in enumerate(kinds.values()):
        for s in range(shades):
            for rules, night in ((light, False), (dark, True)):
                fill, ink = shaded(colour, s, shades, dark=night)
                rules.append(f".k{k}s{s} rect {{ fill: {fill}; }} .k{k}s{s} text {{ fill: {ink}; }}")
    fills = " ".join(light) + " @media (prefers-color-scheme: dark) { " + " ".join(dark) + " }"
    seen = {t.action.kind for lane in run.timeline for t in lane if t.end > t.start}
    marks = "".join(f'<span><i style="background: {shaded(c, 0, 1)[0]}"></i>{kind} {kind_of(kind).meaning}</span>'
                    for kind, c in kinds.items() if kind in seen)  # fmt: skip
    marks += '<span><i class="bubble"></i>bubble</span>'
    levels = tuple(tuple((when, level / 2**30) for when, level in track) for track in run.memory)
    picture = svg(replace(run, memory=levels), note=note, unit="s", memory="activations held, GiB", page=True)
    return (
        f'<section class="card"><h2>Timeline of the choice</h2><p>{escape(note)}</p><div class="legend">{marks}</div>'
        f'<div class="scroll"><div class="timeline">{picture}</div></div></section>',
        fills,
    )


def left_out(found: Found) -> str:
    over = found.count - len(found.order)
    return f"{over:,} of {found.count:,} layouts need more memory than there is. Other cuts of the ranks break a rule."


def rejected(found: Found) -> str:
    html = []
    if lines := found.rejected(6):
        html.append('<table class="what"><tr><th>faster, but does not fit</th><th>needs</th><th>nearest that fits</th>'
                    "<th>its price</th></tr>")  # fmt: skip
        for line in lines:
            html.append(
                f"<tr><td>{escape(describe(line.plan))}</td><td>{line.gib:.0f} of {line.limit:.0f} GiB: {line.largest} "
                f"{line.held:.0f}</td><td>{escape(line.fix)}: {line.fixed_gib:.0f} GiB</td>"
                f'<td class="v">{line.slower:+.0%} time</td></tr>'
            )
        html.append("</table>")
    if found.refused:
        html.append('<table class="what"><tr><th>rule</th><th>cuts</th><th>for example</th><th>nearest</th></tr>')
        for rule in found.refused:
            cells = f'<td>{escape(rule.rule)}</td><td class="v">{rule.count:,}</td>'
            html.append(f"<tr>{cells}<td>{escape(rule.example)}</td><td>{escape(rule.fix)}</td></tr>")
        html.append("</table>")
    return "".join(html)


def machine_facts(found: Found) -> Iterable[tuple[str, str]]:
    machine, digits = found.machine, 0 if found.machine.peak > 1e13 else 2
    peak = f"{float(machine.peak) / 1e12:,.{digits}f} TFLOP/s"
    yield "peak of the products", f"{peak}, {float(machine.clock):.0%} of it attainable"
    yield "memory", f"{float(machine.memory) / 2**30:.0f} GiB at {float(machine.hbm) / 1e9:,.0f} GB/s"
    yield "fast links", f"{float(machine.link) / 1e9:,.0f} GB/s among {float(machine.domain):.0f} devices"
    yield "network", f"{float(machine.network) / 1e9:,.1f} GB/s per device"
    latency = f"{float(machine.link_latency) * 1e6:.0f} µs, {float(machine.network_latency) * 1e6:.0f} µs"
    yield "latency of links, network", latency
    if machine.site < 1e9:
        yield "between sites", f"{float(machine.between) / 1e9:,.2f} GB/s per device, sites of {machine.site:.0f}"


def facts(items: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<tr><td>{escape(key)}</td><td>{escape(value)}</td></tr>" for key, value in items)


def legend(names: dict[str, str]) -> str:
    marks = (f"<span><i {fill(name)}></i>{escape(told)}</span>" for name, told in names.items())
    return f'<div class="legend">{"".join(marks)}</div>'


def piece(name: str, share: float, tip: str) -> str:
    return f'<i {fill(name, f"width: {100 * share:.3f}%")} title="{escape(tip)}"></i>' if share > 0 else ""


def fill(name: str, more: str = "") -> str:
    if name == "bubble":
        return f'class="bubble" style="{more}"'
    return f'style="background: var(--{name}); {more}"'


def part(split: Cost | Memory, name: str) -> float:
    return float(getattr(split, name))


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms" if value >= 0.01 else f"{value * 1e3:.2g} ms"


def short(value: float) -> str:
    return f"{value / 1e9:,.3g} billion" if value >= 1e9 else f"{value / 1e6:,.3g} million"


def number(value: Any) -> str:
    return f"{float(value):.3g}"
