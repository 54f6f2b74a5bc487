"""One self-contained page about a plan: the fastest layout, why it is fastest, its memory, and excluded layouts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from weft.layout.legend import layout_legend
from weft.pages import render, write
from weft.planner.attention_io import attention_traffic
from weft.planner.cost import Cost
from weft.planner.explain import (
    PARTS,
    Alternative,
    best_alternatives,
    changed_settings,
    differences,
    layout_verdict,
    title,
    why,
)
from weft.planner.finalists import Final, refine
from weft.planner.layout_search import USABLE, SearchResult, describe
from weft.planner.memory import RankMemory
from weft.schedule.draw import legend, svg
from weft.schedule.exchange import Beside

#: Boxes in the drawn timeline; longer ones are cut, for the eye as much as for the file.
BOXES = 8000
#: What memory is held for.
HELD = {f.name: f.name for f in fields(RankMemory)}


@dataclass(frozen=True)
class PlanQuestion:
    """The user's request to the planner, as the HTML page about the plan states it.

    Attributes:
        ``model``, ``cluster``: the model and the cluster as the user named them.
        ``batch``, ``seq``: sequences of a step, and tokens of a sequence.
        ``precision``: number format of matrix products, such as ``bf16``.
        ``engine``: the class of training program whose constants apply.
        ``calibration``: where these constants come from, in words.
        ``band``: error of predicted times in percent; None if no prediction was compared with a measurement.
        ``rehearsed``: whether the layouts' times come from rehearsals on a probed machine. The page then does not show
            the times that formulas predict.
        ``untrainable``: why ``weft train`` cannot train the model yet; empty if it can.
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


class BarSegment(NamedTuple):
    """Segment of a bar in the page.

    ``name``: what the segment stands for, which also chooses its colour. ``share``: its share of the bar's full length.
    ``tip``: its text on hover.
    """

    name: str
    share: float
    tip: str


def write_page(
    path: Path,
    asked: PlanQuestion,
    searched: SearchResult,
    finals: Sequence[Final],
    top: int,
) -> None:
    """Write the HTML page about a search to ``path``, with the ``top`` fastest of the simulated layouts ``finals``.

    ``asked``: the question that the page states. ``searched``: the result of the search. Raises :class:`WeftError` if
    the file cannot be written.
    """
    write(path, page(asked, searched, finals, top), "--html")


def page(
    asked: PlanQuestion, searched: SearchResult, finals: Sequence[Final], top: int
) -> str:
    first, limit = finals[0], gib(searched.machine.memory)
    others = (
        alternatives_among(finals)
        if asked.rehearsed
        else best_alternatives(searched, finals)
    )
    # exchanges are actions of their own
    apart = first.simulation and first.plan.ep > 1 and not first.barriers
    drawn = timeline(
        (apart and refine(searched, first.plan, first.closed, beside=Beside.NOTHING))
        or first
    )
    used = {
        name: words
        for name, words in PARTS.items()
        if any(page_part(final.cost, name) > 0 for final in finals)
    }
    return render(
        "planner/plan.html",
        title=f"{Path(asked.model).name.removesuffix('.toml')} on {asked.cluster}",
        subtitle=f"{short(float(searched.shape.parameters))} parameters · {asked.batch:,} sequences of {asked.seq:,} "
        f"tokens per step · {asked.precision} · {searched.count:,} layouts compared, {len(searched.order):,} fit",
        asked=asked, found=searched, finals=finals, first=first, shown=finals[:top], limit=limit, usable=USABLE,
        reasons=list(layout_reasons(first, finals, others)), parts=used, instead=alternatives(others), held=HELD,
        memory=sorted(((gib(page_part(first.memory, name)), name) for name in HELD), reverse=True),
        stages=list(stage_rows(first, limit)), timeline=drawn, kinds=drawn.get("kinds", []), name_of=title,
        traffic=attention_traffic(asked.seq, searched.shape.score_dim, searched.machine.fast),
        describe=describe, seconds=as_seconds, gib=gib, pieces=memory_pieces, remarks=remarks,
        differences=differences, why=why, axes=layout_legend(map(title, finals[:top])),
    )  # fmt: skip


def layout_reasons(
    first: Final, finals: Sequence[Final], others: Sequence[Alternative]
) -> Iterator[str]:
    """Yield sentences that say where the time of the layout ``first`` goes, and why the nearest others are slower.

    ``finals``: the simulated layouts, fastest first. ``others``: the fastest layouts with other values of a setting.
    """
    cost = {name: page_part(first.cost, name) / first.seconds for name in PARTS}
    lost = sorted(
        (
            (share, name)
            for name, share in cost.items()
            if name != "compute" and share >= 0.01
        ),
        reverse=True,
    )
    rest = ", ".join(f"{PARTS[name]} {share:.0%}" for share, name in lost[:4])
    yield f"{cost['compute']:.0%} of the step is the model's own compute{'; the rest is ' * bool(rest)}{rest}"
    if len(finals) > 1:
        yield f"Next best: {layout_verdict(first, finals[1])}"
    tp = next(
        (
            o.final
            for o in others
            if o.axis == "tp" and o.final and o.final.plan.tp > first.plan.tp
        ),
        None,
    )
    if tp is not None and all(tp.plan != final.plan for final in finals[1:2]):
        yield f"More tensor parallelism: {layout_verdict(first, tp)}"


def alternatives_among(finals: Sequence[Final]) -> list[Alternative]:
    """Return the fastest of ``finals`` for each value of a setting that the best layout, ``finals[0]``, does not have.

    ``finals``: layouts, fastest first.
    """
    first, alternatives = finals[0], dict[tuple[str, str], Alternative]()
    for final in finals[1:]:
        for key in changed_settings(first.plan, final.plan).items():
            alternatives.setdefault(key, Alternative(*key, final, final.gib))
    return list(alternatives.values())


def remarks(final: Final, first: Final) -> str:
    """Return a text for the page that says in which settings the layout ``final`` differs from ``first``, the fastest
    layout.
    """
    lines = [] if final is first else [layout_verdict(first, final)]
    if final.simulation is not None and abs(final.seconds / final.closed - 1) > 0.02:
        lines.append(
            f"Simulated {final.seconds / final.closed - 1:+.1%} against the closed form."
        )
    return ". ".join(lines)


def alternatives(others: Sequence[Alternative]) -> list[list[Alternative]]:
    """Return ``others`` as rows of the page's table of alternatives, fastest first. Alternatives with equal layouts
    share a row.
    """
    rows: dict[Any, list[Alternative]] = {}
    for other in others:
        rows.setdefault(
            other.final.plan if other.final else (other.axis, other.value), []
        ).append(other)
    return sorted(
        rows.values(),
        key=lambda row: row[0].final.seconds if row[0].final else float("inf"),
    )


def stage_rows(first: Final, limit: float) -> Iterator[dict[str, Any]]:
    """Yield, for each pipeline rank of the layout ``first``, a bar of the page that shows the rank's memory.

    Neighbouring ranks that hold the same share a bar if there are more than 24. ``limit``: memory of the device in GiB,
    which sets the scale. Each bar has a ``name``, the rank's memory ``gib``, its segments ``pieces``, and ``limit``:
    where the usable memory ends, as a share of the bar's length. Without a pipeline there is one bar for all ranks.
    """
    ranks, run = list(first.ranks), first.simulation
    scale = max(limit, max(gib(m.total) for m in ranks))
    for (held, _), alike in groupby(
        range(len(ranks)), lambda r: (label(first, r), len(ranks) <= 24 and r)
    ):
        r, *others = alike
        span = f"ranks {r} to {others[-1]}" if others else f"rank {r}"
        yield {
            "name": f"{span} · {held}" if run is not None else "every rank", "gib": gib(ranks[r].total),
            "pieces": memory_pieces(ranks[r], HELD, scale * 2**30, lambda x: f"{gib(x):.1f} GiB"),
            "limit": limit * USABLE / scale,
        }  # fmt: skip


def label(first: Final, rank: int) -> str:
    held, parts = first.held(rank), [f"{first.layers(rank)} layers"]
    parts += ["embedding"] * any(s.embedding for s in held) + ["head"] * any(
        s.head for s in held
    )
    return " + ".join(parts)


def timeline(first: Final) -> dict[str, Any]:
    """Return the drawn schedule of the layout ``first`` with its caption and colour key; empty without a pipeline."""
    run = first.simulation
    if run is None:
        return {}
    m, size = int(first.plan.microbatches), run.table.microbatches
    note = f"{len(run.timeline)} ranks, rank 0 on top · {m} microbatches · "
    note += f"bubble {page_part(first.cost, 'bubble') / first.seconds:.1%} of the step's {as_seconds(first.seconds)}"
    # the stages are as even as they can be
    if (less := 1 - sum(run.busy) / len(run.busy) / max(run.busy)) >= 0.01:
        note += f", as the rank with most to do waits; the average rank has {less:.1%} less to do"
    # what is drawn has a bubble of its own, which is no figure of the step
    if m > size:
        note += f" · drawn are the first {size} microbatches ({as_seconds(run.elapsed)}); the others repeat them"
    note += f" · activations of the fullest rank: {gib(max(run.peaks)):.3g} GiB"
    if sum(map(len, run.timeline)) > BOXES:
        note += ". The table has too many actions to be drawn; weft schedule draws smaller ones of the kind"
        return {"note": f"{note}.", "picture": ""}
    levels = tuple(
        tuple((when, gib(level)) for when, level in track) for track in run.memory
    )
    picture = svg(
        replace(run, memory=levels),
        note=note,
        unit="s",
        memory="activations held, GiB",
        page=True,
    )
    seen = {
        t.action.kind
        for lane in (*run.timeline, *run.beside)
        for t in lane
        if t.end > t.start
    }
    drawn = legend(run.table)
    kinds = [kind for kind in drawn["kinds"] if kind[0] in seen]
    return {"note": note, "picture": picture, "kinds": kinds, "remark": drawn["remark"]}


def memory_pieces(
    split: Cost | RankMemory,
    names: dict[str, str],
    whole: float,
    show: Callable[[float], str],
) -> list[BarSegment]:
    """Return the segments of a bar, one for each field of ``split`` that is not zero.

    ``names``: the fields to show, with the text for each. ``whole``: the value to which the bar's full length
    corresponds. ``show``: function that returns the text for a value.
    """
    sizes = {name: page_part(split, name) for name in names}
    return [
        BarSegment(name, x / whole, f"{names[name]}: {show(x)}")
        for name, x in sizes.items()
        if x > 0
    ]


def page_part(split: Cost | RankMemory, name: str) -> float:
    return float(getattr(split, name))


def gib(value: Any) -> float:
    return float(value) / 2**30


def as_seconds(value: float) -> str:
    return (
        f"{value:.2f} s"
        if value >= 1
        else f"{value * 1e3:.0f} ms"
        if value >= 0.01
        else f"{value * 1e3:.2g} ms"
    )


def short(value: float) -> str:
    return (
        f"{value / 1e9:,.3g} billion" if value >= 1e9 else f"{value / 1e6:,.3g} million"
    )
