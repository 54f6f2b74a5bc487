"""Finds layouts for a probed machine: the likeliest are rehearsed and timed by the clock.

The constants of the closed form are those of GPUs, so it only chooses which layouts are rehearsed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.layout.placement import rank_table
from weft.memory.heap import keep_heap
from weft.planner.acceptance import under_rules
from weft.planner.choose import (
    ChosenLayout,
    checked_under,
    choice_of,
    demands,
    recipe_under,
)
from weft.planner.cost import AWAY, BITS, Cost
from weft.planner.engine_constants import ENGINES
from weft.planner.finalists import Final, refine
from weft.planner.layout_search import Pin, SearchResult, search
from weft.planner.machine import Cluster
from weft.planner.memory import RankMemory
from weft.planner.planned_model import vocab_of
from weft.recipe import Recipe
from weft.rehearse.clock import Prediction, axes_along, predict_step
from weft.rehearse.curves import ProbedMachine
from weft.rehearse.journal import Event
from weft.rehearse.mapping import Traffic, place_axes
from weft.rehearse.rehearsed_step import Rehearsal, batches_of, every_rank, reference
from weft.rehearse.worker_links import WorkerLinks
from weft.shapes.shape import Shape, shape_of
from weft.train.setup import model_shape

#: Layouts that are rehearsed, over all numbers of ranks.
REHEARSED = 24
#: Layouts that differ in none of these are one kind; the best of each by closed form is rehearsed.
KIND = (
    "tp",
    "pp",
    "cp",
    "dp",
    "shard",
    "zero",
    "context",
    "schedule",
    "virtual",
    "secondary",
    *AWAY,
)


def shortlist(searched: SearchResult, most: int) -> list[int]:
    """Return the indices in ``searched`` of the layouts to rehearse, at most ``most``.

    The best layout for every combination of ``tp``, ``pp`` and ``cp`` comes first, then the best overall.
    """
    kinds: dict[tuple[float, ...], int] = {}
    for i in searched.order:
        kind = tuple(float(getattr(searched.plans, name)[i]) for name in KIND)
        if kind not in kinds and searched.takes(i):
            kinds[kind] = int(i)
    ways: dict[tuple[float, ...], int] = {}
    for kind, i in kinds.items():
        ways.setdefault(kind[:3], i)
    chosen = list(ways.values())
    chosen += [i for i in kinds.values() if i not in chosen]
    return chosen[:most]


def processor_shares(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ``(ranks, layouts)`` for each number of ranks in ``counts``: how many layouts to rehearse with it.

    About :data:`REHEARSED` layouts are shared out in proportion to the numbers of ranks, as more ranks have more
    possible layouts. Each number of ranks gets at least two.
    """
    whole = sum(counts)
    for n in counts:
        yield n, max(2, round(REHEARSED * n / whole))


def with_rehearsed_time(
    final: Final, layout: Layout, rehearsed: Sequence[Rehearsal], local: ProbedMachine
) -> Final:
    """Return a copy of ``final`` with the time and memory of a step that the rehearsal of its layout predicts.

    Where some links between ranks are much slower than others, the result also has the order of the layout's axes
    (``order``) with which communication takes least time. ``final``: the planner's estimate for a layout. ``layout``:
    this layout as the run takes it. ``rehearsed``: the rehearsed step of each rank. ``local``: the probed machine.
    """
    order, workers = place_ranks(layout, rehearsed, local.uneven(layout.world))
    prediction = predict_step(local, rehearsed, layout, workers)
    # a rehearsal waits for no disk
    parts = {**prediction.parts, "host": float(final.cost.host)}
    cost = Cost(**{part.name: parts.get(part.name, 0.0) for part in fields(Cost)})
    return replace(final, cost=cost, ranks=tuple(held(layout, rehearsed, prediction)), closed=float(cost.total),
                   order=order)  # fmt: skip


def place_ranks(
    layout: Layout, rehearsed: Sequence[Rehearsal], links: WorkerLinks | None
) -> tuple[str, list[int]]:
    """Choose how to place the ranks of ``layout`` on a machine with fast and slow links.

    Returns ``(order, workers)``. ``order``: the order of the layout's axes with which communication takes least time.
    ``workers``: for each rank, the process of the probe on whose links it communicates. ``rehearsed``: the rehearsed
    step of each rank. ``links``: the measured links. If it is None, all links are alike, and both results are empty,
    which stands for the usual order.
    """
    if links is None:
        return "", []
    turned = place_axes(links, layout, traffic_of(rehearsed[0].events, 0, layout))
    workers = rank_table(turned).reshape(-1).tolist()
    return (turned.order if workers != list(range(layout.world)) else ""), workers


def traffic_of(
    events: Sequence[Event], rank: int, layout: Layout
) -> dict[str, Traffic]:
    """Return the traffic of ``rank`` by axis in a rehearsed step with these ``events``.

    Collectives over several axes, such as small sums over all ranks, are left out.
    """
    traffic: dict[str, Traffic] = {}
    for e in events:
        if e.kind == "send":
            axis, *others = axes_along(layout, (rank, e.ranks[0]))
            sent, times, whole = float(e.bytes), 1, True
        elif e.kind == "collective" and len(e.ranks) > 1:
            axis, *others = axes_along(layout, e.ranks)
            n, rounds = len(e.ranks), 2 if e.name == "reduce" else 1
            sent, times, whole = (
                rounds * (n - 1) / n * e.bytes,
                rounds * (n - 1),
                n == layout.size(axis),
            )
        else:
            continue
        if whole and not others:
            known = traffic.get(axis, Traffic(0.0, 0.0))
            traffic[axis] = Traffic(known.bytes + sent, known.messages + times)
    return traffic


def held(
    layout: Layout, rehearsed: Sequence[Rehearsal], prediction: Prediction
) -> Iterator[RankMemory]:
    """Yield, for every pipeline position, the memory of the rank that needs most, by purpose.

    The bytes that its process needs beside tensors count as ``constant``. The division between weights, gradients and
    optimizer state is an estimate.

    ``rehearsed``: the rehearsed step of each rank. ``prediction``: the prediction of time and memory from these.
    """
    each = layout.world // layout.pp
    for stage in range(layout.pp):
        ranks = range(stage * each, (stage + 1) * each)
        fullest = max(ranks, key=lambda r: prediction.memory[r])
        state, peak = float(rehearsed[fullest].state), float(rehearsed[fullest].peak)
        weights = state / 3  # beside two moments of as many numbers
        grads = min(weights, peak - state)
        beside = prediction.memory[fullest] - peak
        yield RankMemory(
            weights, grads, state - weights, peak - state - grads, 0.0, beside
        )


def at_hand(
    founds: Sequence[SearchResult], local: ProbedMachine, recipe_of: Callable[[Final], Any],
    rehearse: Callable[[Any], Sequence[Rehearsal]], say: Callable[[str], None] = lambda text: None,
) -> tuple[SearchResult, list[Final]]:  # fmt: skip
    """Rehearse the best layouts for several numbers of ranks, and compare them.

    Returns ``(searched, finals)``. ``finals``: the rehearsed layouts that fit in memory, fastest first; all rehearsed
    layouts if none fits. ``searched``: the search to which the fastest of them belongs.

    ``founds``: a search for each number of ranks. ``local``: the probed machine. ``recipe_of``: function that returns
    the recipe of a layout. ``rehearse``: function that returns the rehearsals of a recipe's step, one per rank.
    ``say``: called with lines about progress.
    """
    finals: list[tuple[Final, SearchResult]] = []
    chosen = [
        (searched, i)
        for searched, (_, most) in zip(
            founds,
            processor_shares([int(f.plan(0).world) for f in founds]),
            strict=True,
        )
        for i in shortlist(searched, most)
    ]
    for n, (searched, i) in enumerate(chosen, 1):
        final = refine(searched, searched.plan(i), searched.seconds(i))
        if final is None:
            continue
        recipe = recipe_of(final)
        say(f"rehearsing {recipe.layout} ({n} of {len(chosen)})")
        finals.append(
            (
                with_rehearsed_time(final, recipe.layout, rehearse(recipe), local),
                searched,
            )
        )
    fit = [(final, searched) for final, searched in finals if final.fits] or finals
    fit.sort(key=lambda pair: pair[0].seconds)
    return fit[0][1], [final for final, _ in fit]


def to_try(finals: Sequence[Final], count: int) -> list[Final]:
    """Return ``count`` of the layouts ``finals``, which are sorted by time, to run as trials.

    The best for every number of ranks comes first, then the best overall.
    """
    firsts: dict[float, Final] = {}
    for final in finals:
        firsts.setdefault(float(final.plan.world), final)
    chosen = sorted(firsts.values(), key=lambda final: final.seconds)[:count]
    return (
        chosen
        + [final for final in finals if final not in chosen][: count - len(chosen)]
    )


def correct_by_measured(
    finals: Sequence[Final], measured: Sequence[tuple[Final, float]]
) -> list[Final]:
    """Return ``finals`` with times corrected by measurements, fastest first.

    ``measured``: layouts that ran as trials, with the measured seconds of a step. Such a layout gets its measured
    seconds. For every other layout, the predicted seconds are multiplied by a factor, because the speed of a shared
    machine changes after a probe. The factor is the geometric mean of measured over predicted seconds of trials. Only
    trials with the layout's number of ranks count, or all trials if there are none of these.
    """
    ran = {id(final): seconds for final, seconds in measured}
    off: dict[float, list[float]] = {}
    for final, seconds in measured:
        for world in (0.0, float(final.plan.world)):
            off.setdefault(world, []).append(float(np.log(seconds / final.seconds)))

    def moved(final: Final) -> Final:
        ratio = float(
            np.exp(np.mean(off.get(float(final.plan.world), off.get(0.0, [0.0]))))
        )
        if id(final) in ran:
            ratio = ran[id(final)] / final.seconds
        cost = Cost(
            **{
                part.name: ratio * float(getattr(final.cost, part.name))
                for part in fields(Cost)
            }
        )
        return replace(final, cost=cost, closed=ratio * final.closed)

    return sorted((moved(final) for final in finals), key=lambda final: final.seconds)


#: Parameters times ranks beyond which rehearsals, which allocate what they compute on, would take long.
LARGEST = 2e9


class RehearsedLayouts(NamedTuple):
    """Layouts that were rehearsed on this machine.

    ``finals``: the layouts, fastest first. ``searched``: the search to which the fastest layout belongs; each search is
    for one number of ranks. ``compared``: a text that says what was compared.
    """

    searched: SearchResult
    finals: list[Final]
    compared: str


def search_here(
    recipe_of: Callable[[Final], Recipe], shape: Shape, cluster: Cluster, ranks: int | None, batch: int, seq: int,
    bits: int, pins: Sequence[Pin], say: Callable[[str], None], ruled: Callable[[SearchResult], SearchResult],
) -> RehearsedLayouts:  # fmt: skip
    """Find the best layouts on the probed machine for ``ranks`` ranks, by default for every probed number of ranks.

    ``recipe_of``: returns the recipe with which a layout is rehearsed. ``shape``: the model. ``cluster``: the cluster
    file of the probe. ``batch``: sequences of ``seq`` tokens per step. ``bits``: width of the operands of products.
    ``pins``: the user's demands on the layout. ``say``: called with lines about progress. ``ruled``: adds to a
    search which plans the user's recipe refuses. Raises :class:`UsageError` for a model that is too large to rehearse.
    """
    if float(shape.parameters) * (ranks or cluster.count) > LARGEST:
        raise UsageError(
            f"the model has {float(shape.parameters) / 1e9:.1f} B parameters: too many to rehearse on a CPU; plan for "
            "GPUs, e.g. --cluster h100 --gpus 8"
        )
    local = ProbedMachine.of(cluster.calibration)
    counts = [ranks] if ranks else [n for n in local.settings if n <= cluster.count]
    founds, refusal = [], None
    for n in counts:
        engine = replace(
            ENGINES["weft"], constant=local.setting(n).memory["plain"] / 2**30
        )
        memory = (cluster.memory or 16) * cluster.count / n
        share = {
            "memory": memory,
            "bf16": (cluster.bf16 or 0.05) / n,
            "hbm": (cluster.hbm or 20) / n,
        }
        machines = cluster.model_copy(
            update={"count": n, "per_node": min(n, cluster.per_node)} | share
        )
        try:
            founds.append(
                ruled(search(shape, machines, engine, batch, seq, bits, pins))
            )
        except UsageError as error:
            refusal = error
    if not founds:
        raise refusal or UsageError(
            "no number of ranks was probed; run weft probe again"
        )
    paces = dict[int, float]()
    searched, finals = at_hand(
        founds, local, recipe_of, lambda recipe: rehearsals(recipe, local, paces), say
    )
    return RehearsedLayouts(
        searched,
        finals,
        f"of {len(finals)} rehearsed layouts of {' or '.join(map(str, counts))} ranks",
    )


def choose_here(
    recipe: Recipe, cluster: Cluster, ranks: int | None, say: Callable[[str], None]
) -> ChosenLayout:
    """Choose the fastest layout for ``recipe`` on the probed machine, and return the recipe with the layout.

    ``train.micro_batch``, ``train.recompute`` and the places in ``[memory]`` are chosen with the layout, unless the
    recipe sets them. ``cluster``: the cluster file of the probe. ``ranks``: number of ranks; None: any probed number.
    ``say``: called with lines about progress.
    """
    train = recipe.train
    model = model_shape(recipe)
    shape = shape_of(model, vocab_of(recipe))
    rehearsed = search_here(
        lambda final: recipe_under(recipe, final)[0], shape, cluster, ranks, train.batch, recipe.data.seq_len,
        BITS[train.dtype], demands(recipe, cluster), say,
        lambda searched: under_rules(searched, checked_under(recipe), model),
    )  # fmt: skip
    return choice_of(recipe, rehearsed.finals, rehearsed.compared)


def rehearsals(
    recipe: Recipe, local: ProbedMachine, paces: dict[int, float] | None = None
) -> list[Rehearsal]:
    """Return a rehearsal of the recipe's step for every rank, with times scaled to the speed that the probe measured.

    The step runs on the recipe's first batch if its data is present, else on artificial rows. All rehearsed work is
    multiplied by a factor, which corrects for the load of the machine at this moment. The factor comes from the step of
    a small model: its time in the probe, divided by its mean time before and after this rehearsal.

    ``local``: the probed machine. ``paces``: the time of the small step, by number of threads, as measured after the
    previous rehearsal. It serves as the time before this one, and is replaced by the time after this one.
    """
    paces = {} if paces is None else paces
    shape, batches = batches_of(recipe)
    setting = local.setting(recipe.layout.world)
    keep_heap()  # as ranks that train do
    with threads_set(setting.threads):
        before = paces.pop(setting.threads, 0.0) or reference("dp=1", "large").seconds
        rehearsed = every_rank(recipe, shape, lambda mesh: batches(mesh, 0))
        paces.clear()  # those of other numbers of threads are of long ago
        paces[setting.threads] = after = reference("dp=1", "large").seconds
    return [seen.slower(setting.step / ((before + after) / 2)) for seen in rehearsed]


@contextmanager
def threads_set(count: int) -> Iterator[None]:
    """Return a context in which PyTorch computes with ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
