"""Chooses the layout for the remaining ranks, given the layout in the recipe.

With as many ranks as the recipe's layout has, it is that layout, the *original*. Otherwise:

- ``dp`` and ``shard`` shrink first, and grow if there are more ranks than the original has.
- ``pp``, ``tp``, ``cp`` and ``ep`` are at most those of the original. Fewer pipeline ranks share the same layers, cut
  anew by dynamic programming over their times (:mod:`weft.schedule.partition`). ``tp`` must divide the heads, and
  ``ep`` the experts; ``ep`` folds over the data ranks.
- No rank holds more of the state than if the lost ranks' parts were spread evenly over the others, so that the state
  still fits into memory.
- Settings that the new axes do not allow (an order, a schedule for an even number of ranks) fall back to the default.

By the planner's estimates, only layouts are kept that use the ranks about as well as the original, or are about as fast
as the fastest. Of these the layout nearest to the original is chosen, for which the least data moves. Every rank
computes this independently and comes to the same layout.
"""

from collections.abc import Iterator, Sequence
from math import log2
from typing import Any

import numpy as np

from weft.errors import UsageError
from weft.layout.axes import AXES, BATCH_AXES, FOLDED, LIVE_AXES
from weft.layout.layout import Layout
from weft.layout.placement import expert_sizes
from weft.planner.cost import BITS, CONTEXT, RECOMPUTE, Plan, schedule_number, step_time
from weft.planner.engine_constants import ENGINES
from weft.planner.machine import Cluster, local_cluster
from weft.planner.planned_model import vocab_of
from weft.recipe import ModelShape, Optimizer, Recipe
from weft.recipe.conflicts import AskedRecipe, refuse_conflicts
from weft.shapes.shape import shape_of

#: A layout is about as fast as another if, by the estimate, it takes at most so many times as long.
NEAR = 1.25
#: The distance from the original of a layout with half as many ranks along an axis, roughly by what it moves.
WEIGHTS = {"dp": 1, "shard": 1, "pp": 2, "cp": 3, FOLDED: 3, "tp": 4}
#: Settings that may fall back to their default, in this order; none of them changes what is computed.
SETTINGS = {
    "layout": ("tp_shares", "stage_speeds", "order", "secondary", "ulysses", "virtual", "skip", "vocab_barriers",
               "parts", "overlap_least", "overlap", "lsh_residual", "lsh",
               "dispatch", "placement", "schedule", "context"),
    "optimizer": ("pairs", "post_validation"),
}  # fmt: skip


def recipe_for(
    recipe: Recipe, shape: ModelShape, ranks: int, cluster: Cluster | None = None
) -> Recipe:
    """Return ``recipe`` with a layout for ``ranks`` ranks in place of its own.

    If no layout of this model uses exactly ``ranks`` ranks, the layout uses as many as possible of them. ``shape``:
    shape of the model, with all its layers; ``cluster``: description of the machines, from which the time of a step is
    estimated for each layout. Raises :class:`UsageError` if there is no layout.
    """
    if ranks == recipe.layout.world:
        return recipe
    cluster = cluster or local_cluster("CPU", 64e9, ranks, ranks)
    for count in range(ranks, 0, -1):
        if fitting := [
            candidate
            for axes in _axes(recipe.layout, shape, count)
            if (candidate := _fitted(recipe, shape, axes))
        ]:
            break
    else:
        raise UsageError(
            f"this model and its settings have no layout for {ranks} ranks"
        )
    original = recipe.layout
    least = [
        pieces * min(1.0, count / original.world) for pieces in _pieces(original, shape)
    ]
    enough = [
        candidate
        for candidate in fitting
        if all(
            n >= m * (1 - 1e-9)
            for n, m in zip(_pieces(candidate.layout, shape), least, strict=True)
        )
    ]
    lean = enough or fitting
    *seconds, original_time = _seconds([*lean, recipe], shape, cluster)
    most = NEAR * max(min(seconds), original_time * original.world / count)
    near = [
        candidate for candidate, time in zip(lean, seconds, strict=True) if time <= most
    ]
    return min(
        near,
        key=lambda candidate: (
            _distance(original, candidate.layout),
            candidate.layout.model_dump_json(),
        ),
    )


def _axes(original: Layout, shape: ModelShape, ranks: int) -> Iterator[dict[str, int]]:
    """Yield the sizes of the axes in every layout of exactly ``ranks`` ranks."""

    def even(ep: int) -> bool:
        return not any(count % ep for count in shape.mixtures.values())

    for tp in _divisors(ranks, original.tp):
        if tp < original.tp and (
            shape.heads % tp
            or max(tp, shape.kv_heads or 1) % min(tp, shape.kv_heads or 1)
        ):
            continue
        for pp in _divisors(ranks // tp, original.pp):
            for cp in _divisors(ranks // tp // pp, original.cp):
                data = ranks // tp // pp // cp
                for shard in _divisors(data, data):
                    for ep in (
                        n
                        for n in range(1, min(original.ep, ranks) + 1)
                        if n == original.ep or even(n)
                    ):
                        yield {
                            "tp": tp,
                            "pp": pp,
                            "cp": cp,
                            "shard": shard,
                            "dp": data // shard,
                            FOLDED: ep,
                        }


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def _fitted(recipe: Recipe, shape: ModelShape, axes: dict[str, int]) -> Recipe | None:
    """Return ``recipe`` with these axes and without settings that conflict with them; None if conflicts remain."""
    trees = {
        "layout": recipe.layout.model_dump() | axes,
        "optimizer": recipe.optimizer.model_dump(),
    }
    usual = {"layout": Layout().model_dump(), "optimizer": Optimizer().model_dump()}
    fitted = _tried(recipe, shape, trees)
    for section, names in SETTINGS.items():
        for name in names:
            if not isinstance(fitted, str):
                return fitted
            changed = trees | {section: trees[section] | {name: usual[section][name]}}
            without = _tried(recipe, shape, changed)
            if without != fitted:  # it fits, or what it breaks now is another rule
                fitted, trees = without, changed
    return None if isinstance(fitted, str) else fitted


def _tried(
    recipe: Recipe, shape: ModelShape, trees: dict[str, dict[str, Any]]
) -> Recipe | str:
    """Return ``recipe`` with these sections, or the rule that they break."""
    try:
        layout, optimizer = Layout(**trees["layout"]), Optimizer(**trees["optimizer"])
        tried = recipe.model_copy(update={"layout": layout, "optimizer": optimizer})
        asked = AskedRecipe(**dict(tried), shape=shape)
        refuse_conflicts(asked)
        return tried
    except ValueError as error:  # of the table, by itself or among pydantic's
        return getattr(error, "rule", str(error))


def _pieces(layout: Layout, shape: ModelShape) -> tuple[int, ...]:
    """Return the number of different parts into which the state is cut, and with experts that of the experts' state."""
    state = layout.size("pp", "shard", "cp", "tp")
    copies = expert_sizes(layout).expert_dp
    return (state, layout.world // copies) if shape.mixtures else (state,)


def _distance(original: Layout, layout: Layout) -> float:
    changed = sum(
        getattr(original, name) != getattr(layout, name)
        for name in Layout.model_fields
        if name not in AXES
    )
    moved = sum(
        weight * abs(log2(getattr(layout, axis) / getattr(original, axis)))
        for axis, weight in WEIGHTS.items()
    )
    return round(moved + changed, 6)


def _seconds(
    recipes: Sequence[Recipe], shape: ModelShape, cluster: Cluster
) -> list[float]:
    """Return the planner's estimate of a step's seconds under each recipe; zeros for a model that it does not know.

    Ranks with fewer rows wait for the others, so that the batch counts as if all had as many.
    """
    columns: dict[str, list[float]] = {}
    for recipe in recipes:
        layout, (rows, passes) = recipe.layout, recipe.rows_per_pass(recipe.layout)
        plan = {axis: getattr(layout, axis) for axis in (*LIVE_AXES, FOLDED, "zero", "secondary")} | {
            "context": CONTEXT.index(layout.context) if layout.context in CONTEXT else 0,
            "schedule": schedule_number(layout.schedule),
            "virtual": layout.virtual or 1, "micro_batch": rows, "batch": rows * passes * layout.size(*BATCH_AXES),
            "seq": recipe.data.seq_len, "recompute": RECOMPUTE.index(recipe.train.recompute),
            "bits": BITS[recipe.train.dtype],
        }  # fmt: skip
        for name, value in plan.items():
            columns.setdefault(name, []).append(float(value))
    try:
        known = shape_of(shape, vocab_of(recipes[0]))
    except UsageError:
        return [0.0] * len(recipes)
    plans = Plan(**{name: np.array(values) for name, values in columns.items()})
    machine = cluster.machine(BITS[recipes[0].train.dtype])
    # Rounded: ranks on unlike processors must not differ by a last bit.
    total = np.broadcast_to(
        step_time(known, machine, plans, ENGINES["weft"]).total, len(recipes)
    )
    return [float(f"{time:.6g}") for time in total]
