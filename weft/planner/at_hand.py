"""Layouts on a machine that ``weft probe`` has measured: the likeliest are rehearsed, and the clock judges them.

The closed form's constants are those of GPUs; here it only says which layouts are worth a rehearsal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from weft.layout.layout import Layout
from weft.planner.clock import Prediction, predict
from weft.planner.cost import Cost
from weft.planner.finalists import Final, refine
from weft.planner.links import Links
from weft.planner.local import Local, Seen
from weft.planner.mapping import place_axes, ranks_of, traffic_of
from weft.planner.memory import Memory
from weft.planner.search import Found

#: Layouts that are rehearsed, over all numbers of ranks.
REHEARSED = 24
#: Layouts that differ in none of these are one kind; the best of each by closed form is rehearsed.
KIND = ("tp", "pp", "cp", "dp", "shard", "zero", "context", "schedule", "virtual", "offload", "secondary")

#: Every rank's step.
Rehearsed = Sequence[Seen]


def shortlist(found: Found, most: int) -> list[int]:
    """Candidates to rehearse: the best of every way to cut the model first, then the best kinds of all."""
    columns = {name: np.broadcast_to(getattr(found.plans, name), found.count) for name in KIND}
    kinds: dict[tuple[float, ...], int] = {}
    for i in found.order:
        kinds.setdefault(tuple(float(columns[name][i]) for name in KIND), int(i))
    ways: dict[tuple[float, ...], int] = {}
    for kind, i in kinds.items():
        ways.setdefault(kind[:3], i)
    chosen = list(ways.values())
    chosen += [i for i in kinds.values() if i not in chosen]
    return chosen[:most]


def shares(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """How many of :data:`REHEARSED` each number of ranks gets: there are more layouts of more."""
    whole = sum(counts)
    for n in counts:
        yield n, max(2, round(REHEARSED * n / whole))


def judge(final: Final, layout: Layout, rehearsed: Rehearsed, local: Local) -> Final:
    """``final`` with the time, the memory and (where links differ) the order of axes that the rehearsal gives."""
    order, workers = placed(layout, rehearsed, local.uneven(layout.world))
    prediction = predict(local, rehearsed, layout, workers)
    cost = Cost(**{part.name: prediction.parts.get(part.name, 0.0) for part in fields(Cost)})
    return replace(final, cost=cost, ranks=tuple(held(layout, rehearsed, prediction)), closed=prediction.seconds,
                   order=order)  # fmt: skip


def placed(layout: Layout, rehearsed: Rehearsed, links: Links | None) -> tuple[str, list[int]]:
    """The order of axes for these links, and the worker of every rank as it was rehearsed; usual if links are alike."""
    if links is None:
        return "", []
    place = place_axes(links, layout, traffic_of(rehearsed[0].events, 0, layout))
    turned = layout.model_copy(update={"order": place.order})
    workers = ranks_of(turned, turned.axis_order).reshape(-1).tolist()
    return (place.order if workers != list(range(layout.world)) else ""), workers


def held(layout: Layout, rehearsed: Rehearsed, prediction: Prediction) -> Iterator[Memory]:
    """Memory of the fullest rank of every pipeline position: tensors, and what the process takes beside them."""
    each = layout.world // layout.pp
    for stage in range(layout.pp):
        ranks = range(stage * each, (stage + 1) * each)
        fullest = max(ranks, key=lambda r: prediction.memory[r])
        state, peak = float(rehearsed[fullest].state), float(rehearsed[fullest].peak)
        weights = state / 3  # beside two moments of as many numbers
        grads = min(weights, peak - state)
        beside = prediction.memory[fullest] - peak
        yield Memory(weights, grads, state - weights, peak - state - grads, 0.0, beside)


def at_hand(
    founds: Sequence[Found], local: Local, recipe_of: Callable[[Final], Any], rehearse: Callable[[Any], Rehearsed],
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Found, list[Final]]:  # fmt: skip
    """The best layouts of all numbers of ranks (one of ``founds`` each), fastest first; and the winner's search.

    ``recipe_of``: the recipe of a layout; ``rehearse``: its step on every rank; ``say`` hears what is being done.
    """
    judged: list[tuple[Final, Found]] = []
    chosen = [
        (found, i)
        for found, (_, most) in zip(founds, shares([int(f.plan(0).world) for f in founds]), strict=True)
        for i in shortlist(found, most)
    ]
    for n, (found, i) in enumerate(chosen, 1):
        final = refine(found, found.plan(i), found.seconds(i))
        if final is None:
            continue
        recipe = recipe_of(final)
        say(f"rehearsing {recipe.layout} ({n} of {len(chosen)})")
        judged.append((judge(final, recipe.layout, rehearse(recipe), local), found))
    fit = [(final, found) for final, found in judged if final.fits] or judged
    fit.sort(key=lambda pair: pair[0].seconds)
    return fit[0][1], [final for final, _ in fit]


def to_try(finals: Sequence[Final], count: int) -> list[Final]:
    """What to run for ``count`` trials: the best of every number of ranks, then the best of all."""
    firsts: dict[float, Final] = {}
    for final in finals:
        firsts.setdefault(float(final.plan.world), final)
    chosen = sorted(firsts.values(), key=lambda final: final.seconds)[:count]
    return chosen + [final for final in finals if final not in chosen][: count - len(chosen)]


def anchored(finals: Sequence[Final], measured: Sequence[tuple[Final, float]]) -> list[Final]:
    """All of ``finals`` by time: those that ran with the seconds ``measured``, the others moved as those were.

    The speed of a machine that others use too wanders, and a probe knows it as it was: layouts of as many ranks are off
    by about as much. So each is moved by the ratio of those that ran (the mean of their logarithms), of all of them if
    none has as many ranks.
    """
    ran = {id(final): seconds for final, seconds in measured}
    off: dict[float, list[float]] = {}
    for final, seconds in measured:
        for world in (0.0, float(final.plan.world)):
            off.setdefault(world, []).append(float(np.log(seconds / final.seconds)))

    def moved(final: Final) -> Final:
        ratio = float(np.exp(np.mean(off.get(float(final.plan.world), off.get(0.0, [0.0])))))
        if id(final) in ran:
            ratio = ran[id(final)] / final.seconds
        cost = Cost(**{part.name: ratio * float(getattr(final.cost, part.name)) for part in fields(Cost)})
        return replace(final, cost=cost, closed=ratio * final.closed)

    return sorted((moved(final) for final in finals), key=lambda final: final.seconds)
