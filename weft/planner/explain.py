"""Explains in words why one layout beats another; writes a layout as plain data and as a recipe."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from weft.pages import render
from weft.planner.candidates import ADDED, CHOSEN, SET
from weft.planner.cost import Plan, Recompute, expert_cut
from weft.planner.finalists import Final, refine
from weft.planner.layout_search import NAMES, SearchResult, describe, pin_text
from weft.planner.planned_recipe import layout_tree
from weft.schedule.exchange import Beside
from weft.shapes.shape import Shape

#: Parts of a step in words.
PARTS = {
    "compute": "compute", "recompute": "recompute", "tp": "tensor parallelism", "cp": "context parallelism",
    "ep": "experts", "pp": "pipeline sends", "dp": "data parallelism", "bubble": "bubble", "optimizer": "optimizer",
    "host": "transfers to and from host and files", "other": "stragglers and fixed costs",
}  # fmt: skip
#: Pipelines of more ranks take long to simulate: they are looked at where they are what is asked about.
DEEP = 32


def title(final: Final) -> str:
    """Return one line that describes the layout of ``final``."""
    order = f' order="{final.order}"' if final.order else ""
    return (
        describe(final.plan) + (" vocabulary over pp" if final.barriers else "") + order
    )


def changed_settings(first: Plan, other: Plan) -> dict[str, str]:
    """Return the settings in which the plan ``other`` differs from ``first``: their values in ``other``, by name."""
    idle = {
        "schedule": other.pp == 1,
        "virtual": other.pp == 1,
        "context": other.cp == 1,
        "zero": other.shard == 1,
    }
    names = [
        name
        for name in SET
        if getattr(other, name) != getattr(first, name) and not idle.get(name)
    ]
    return {name: pin_text(name, getattr(other, name)) for name in names}


def differences(first: Final, other: Final) -> list[str]:
    """Return the settings in which ``other`` differs from ``first``, as texts ``name=value`` with values of ``other``.

    If no setting differs, the only text is the description of ``other``.
    """
    changes = [
        f"{name}={value}"
        for name, value in changed_settings(first.plan, other.plan).items()
    ]
    if first.barriers != other.barriers:
        changes.append(
            "vocabulary over pp" if other.barriers else "vocabulary at the ends"
        )
    return changes or [title(other)]


def why(first: Final, other: Final) -> str:
    """Return a text that says what makes the layout ``other`` slower or faster than ``first``.

    The largest change in the opposite direction is named as well, if it is not small.
    """
    slower = other.seconds / first.seconds - 1
    a, b = vars(first.cost), vars(other.cost)
    change = {name: float(b[name]) - float(a[name]) for name in a}
    sign = 1.0 if slower >= 0 else -1.0
    cause = max(change, key=lambda name: sign * change[name])
    gain = min(change, key=lambda name: sign * change[name])
    text = f"{_cause(cause, first, other, change[cause] > 0)} ({PARTS[cause]} {_s(change[cause])}"
    if sign * change[gain] < -0.1 * abs(change[cause]):
        text += f", {PARTS[gain]} {_s(change[gain])}"
    return text + ")"


def layout_verdict(first: Final, other: Final) -> str:
    """Return a text that says in which settings the layout ``other`` differs from ``first``, how much slower or faster
    it is, and why.
    """
    slower = other.seconds / first.seconds - 1
    lost = f"{' '.join(differences(first, other))} {'loses' if slower >= 0 else 'wins'}"
    return f"{lost}, {slower:+.1%} time: {why(first, other)}"


def _s(seconds: float) -> str:
    return f"{seconds:+.2f} s" if abs(seconds) >= 0.1 else f"{seconds * 1e3:+.2g} ms"


def _cause(name: str, first: Final, other: Final, more: bool) -> str:
    """Explain a longer (or shorter) part of the step by the sizes of the two layouts (``causes.txt``)."""
    if not more:
        return f"less time goes into {PARTS[name]}"
    text = render(
        "planner/causes.txt", part=name, a=first.plan, b=other.plan, machine=other.machine,
        domain=float(other.machine.domain), layers=float(first.shape.layers), full=Recompute.FULL, schedule=_schedule,
        most={key: max(map(final.layers, range(len(final.ranks)))) for key, final in {"a": first, "b": other}.items()},
        ends_cut={"a": first.barriers, "b": other.barriers},
    )  # fmt: skip
    return " ".join(text.split())


def _schedule(plan: Any) -> str:
    return pin_text("schedule", plan.schedule) + (
        f" v={plan.virtual:.0f}" if plan.virtual > 1 else ""
    )


@dataclass(frozen=True)
class Alternative:
    """The fastest layout in which one setting has another value than in the best layout.

    ``axis``: name of the setting. ``value``: its other value. ``final``: the layout; None if no layout with this value
    fits in memory. ``gib``: memory in GiB of the fullest rank of ``final``. If ``final`` is None, it is the least
    memory that a layout with this value needs.
    """

    axis: str
    value: str
    final: Final | None
    gib: float


def best_alternatives(
    searched: SearchResult, finals: Sequence[Final]
) -> list[Alternative]:
    """Return, for each setting, the fastest layouts with another value of that setting than the best layout,
    ``finals[0]``.

    There is one layout for each of up to three other values of a setting; each is simulated. ``searched``: the result
    of the search. ``finals``: the simulated layouts, fastest first.
    """
    searched = searched.for_purpose("other values of settings")
    first, limit = finals[0], searched.order
    # What the simulator said about a schedule's closed form holds for its other layouts too, by and large.
    total = np.array(searched.cost.total)
    for schedule in {final.plan.schedule for final in finals if final.simulation}:
        ratios = [
            final.seconds / final.closed
            for final in finals
            if final.plan.schedule == schedule
        ]
        total[searched.plans.schedule == schedule] *= max(1.0, min(ratios))
    memory = np.asarray(searched.memory.total) / 2**30
    tables: dict[Any, Any] = {}
    result = []
    for axis in ("tp", "pp", "cp", "zero", "ep", "micro_batch", "recompute", *ADDED):
        column = getattr(searched.plans, axis)
        own = getattr(first.plan, axis)
        values = sorted(
            set(column) - {own}, key=lambda v: (abs(np.log((v + 0.5) / (own + 0.5))), v)
        )[:3]
        for value in sorted(values):
            all_fit = fit = limit[column[limit] == value]
            if axis != "pp" and (quick := fit[searched.plans.pp[fit] <= DEEP]).size:
                fit = quick
            quickest = fit[total[fit].argsort(kind="stable")]
            best = searched.first_taken(quickest)
            if len(all_fit) and best is None:
                continue  # the recipe refuses this value
            if best is None:
                result.append(
                    Alternative(
                        axis,
                        pin_text(axis, value),
                        None,
                        float(memory[column == value].min()),
                    )
                )
                continue
            final = refine(
                searched, searched.plan(best), searched.seconds(best), 0, tables
            )
            # simulated, these may be quicker
            known = [
                final_of for final_of in finals if getattr(final_of.plan, axis) == value
            ]
            known += [final] if final is not None and final.fits else []
            if known:
                final = min(known, key=lambda final_of: final_of.seconds)
                result.append(
                    Alternative(axis, pin_text(axis, value), final, final.gib)
                )
    return result


def record(final: Final) -> dict[str, Any]:
    """Return the layout ``final`` as JSON: its settings, its seconds and its GiB, each split by cause, and its
    stages.
    """
    layout = {name: getattr(final.plan, name) for name in CHOSEN}
    return {
        "layout": {
            name: pin_text(name, value) if name in NAMES else int(value)
            for name, value in layout.items()
        },
        "text": title(final),
        "vocabulary_barriers": final.barriers,
        "seconds": final.seconds,
        "closed_form_seconds": final.closed,
        "simulated": final.simulation is not None,
        "tokens_per_s": final.tokens_per_s,
        "mfu": final.utilisation,
        "gib": final.gib,
        "time": {
            f.name: float(getattr(final.cost, f.name)) for f in fields(final.cost)
        },
        "memory": {
            f.name: float(getattr(final.memory, f.name)) / 2**30
            for f in fields(final.memory)
        },
        "stages": [
            {
                "layers": len(stage.layers),
                "embedding": stage.embedding,
                "head": stage.head,
            }
            for stage in final.stages
        ],
        "ranks_gib": [float(memory.total) / 2**30 for memory in final.ranks],
    }


def exchanges(searched: SearchResult, final: Final) -> dict[str, Any]:
    """Return figures about the expert exchanges of the layout ``final`` as JSON; empty if it has no ``ep``.

    ``searched``: the search that has found the layout. The keys are:

    ``sent``: for each dispatcher, the bytes that a rank sends in one layer for one microbatch in one direction. The
    dispatcher that sends least comes first.
    ``dispatch``: name of the dispatcher that the layout uses.
    ``load``: tokens of the busiest rank divided by the mean over ranks.
    ``beside``: what a rank could compute during an exchange, a value of :class:`weft.schedule.exchange.Beside`.
    ``save``: share of a step's time that the rank would save by computing this; None where it cannot be simulated.
    """
    plan = final.plan
    if plan.ep <= 1:
        return {}
    tokens = (
        plan.micro_batch
        * plan.seq
        / plan.cp
        * expert_cut(plan, searched.engine)
        / plan.tp
    )
    leaves = 2 * final.shape.embed * tokens * (plan.ep - 1) / plan.ep
    sent = sorted(
        (float(rows * leaves), way)
        for way, rows in final.shape.rows_sent(plan.ep).items()
    )
    plain, beside = (
        (None, Beside.OTHER_PASS) if plan.pp > 1 else (Beside.NOTHING, Beside.SAME_PASS)
    )
    alone, turns = (
        None if final.barriers else refine(searched, plan, final.closed, beside=b)
        for b in (plain, beside)
    )
    save = 1 - turns.seconds / alone.seconds if turns and alone else None
    load, dispatch = float(final.shape.busiest(plan.ep)), layout_tree(final)["dispatch"]
    return {"sent": {way: size for size, way in sent}, "dispatch": dispatch, "load": load, "beside": beside.value,
            "save": save}  # fmt: skip


def exchange_words(sent: dict[str, Any]) -> str:
    """Return words for the user about how tokens travel to experts on other ranks under a layout. ``sent``: result of
    :func:`exchanges` for this layout.
    """
    ways = ", ".join(
        f"{size / 2**20:,.3g} by {way}" for way, size in sent["sent"].items()
    )
    text = f"1 sends {ways} MiB each way of a microbatch and layer; dispatch = {sent['dispatch']}"
    text += f"; busiest rank {sent['load']:.2f}x the mean"
    if (sent["save"] or 0) > 0.005:
        how = (
            "overlap = 'passes'" if sent["beside"] == "other pass" else "not run so yet"
        )
        text += f"; beside the {sent['beside']} of another microbatch a step takes -{sent['save']:.0%} ({how})"
    return text


def sizes(shape: Shape) -> str:
    """Return a text with a model's number of parameters, and with the bytes per token of its generation cache."""
    active = (
        f", {float(shape.active_parameters) / 1e9:.3g} B active"
        if shape.experts
        else ""
    )
    cached = f"{float(shape.cache_bytes) / 1024:,.3g} KiB per token cached"
    return f"{float(shape.parameters) / 1e9:.3g} B parameters{active}, {cached}"
