"""The planner's first choice for a recipe that names no layout."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.planner.acceptance import under_rules
from weft.planner.cost import AWAY, BITS, FILE, HOST, RECOMPUTE
from weft.planner.engine_constants import ENGINES, EngineConstants
from weft.planner.explain import layout_verdict, title
from weft.planner.finalists import Final, finalists
from weft.planner.layout_search import Pin, search
from weft.planner.machine import Cluster
from weft.planner.planned_model import vocab_of
from weft.planner.planned_recipe import layout_tree
from weft.recipe import ModelShape, Recipe
from weft.shapes.shape import shape_of


@dataclass(frozen=True)
class ChosenLayout:
    """A recipe with the layout that the planner has chosen for it.

    ``recipe``: the recipe with this layout. ``overrides``: the layout and changed settings as arguments of a command
    line. ``line``: a line of text that tells the user what was chosen.
    """

    recipe: Recipe
    overrides: tuple[str, ...]
    line: str


def demands(recipe: Recipe, cluster: Cluster) -> list[Pin]:
    """Return the settings of ``recipe`` that restrict its layout, as demands on fields of a plan (:class:`Pin`).

    Such settings are in ``[train]``, ``[memory]`` and ``[optimizer]``. ``cluster`` tells whether devices have memory of
    their own. If device and host share one memory, settings that keep state on the host are left out.
    """
    train = recipe.train
    pins = [Pin.parse(f"{name}={getattr(train, name)}") for name in ("micro_batch", "recompute")
            if name in train.model_fields_set and getattr(train, name) is not None]  # fmt: skip
    places = {kind: recipe.memory.distance(kind) for kind in AWAY}
    on_host = cluster.machine().host_memory > 0  # on a CPU, device and host are one
    pins += [
        Pin(kind, "=", place)
        for kind, place in places.items()
        if place == FILE or (place and on_host)
    ]
    pins += unusable(recipe)
    tiles, rows = recipe.memory.tiles, recipe.memory.embedding == "rows"
    if any(pin.field == "weights" for pin in pins):
        pins += [Pin("tiles", "=", tiles)] if tiles > 1 else []
        pins += [Pin("embedding", "=", 1)] if rows else []
    elif tiles > 1 or rows:
        # they rest in the memory that is the device's too; what their rules refuse stays out
        pins += [Pin("overlap", "=", 0), Pin("secondary", "=", 0)]
        given = any(pin.field == "recompute" for pin in pins)
        pins += [] if given else [Pin("recompute", "=", 0)]
    # for pipelines, with a copy of the state in memory
    if recipe.optimizer.post_validation:
        pins += [Pin("pp", ">=", 2), *(Pin(kind, "<=", HOST) for kind in AWAY)]
    return pins


def unusable(recipe: Recipe) -> list[Pin]:
    """Return demands that keep the planner from additions to the layout that the rules against conflicts refuse.

    An example is the overlap of transfers along ``tp`` with computation, which does not go together with
    ``train.compile``. ``recipe``: the recipe to plan for.
    """
    ladder = recipe.model.residual == "ladder"
    whole = recipe.train.compile or ladder or recipe.model.kind
    pins = [Pin("overlap", "=", 0)] if whole else []
    if recipe.resilience.combines:  # gradients of whole replicas
        pins += [Pin(axis, "=", 1) for axis in ("shard", "tp", "cp", "pp")]
    if not _updates_in_parts(recipe):
        pins += [Pin("tiles", "=", 0), Pin("embedding", "=", 0)]
    return pins


def _updates_in_parts(recipe: Recipe) -> bool:
    """Return whether the recipe can have weights in tiles and embeddings in rows, as the rules of both say."""
    optimizer, memory = recipe.optimizer, recipe.memory
    plain = optimizer.elementwise and optimizer.state == "float32"
    usual = optimizer.estimate != "zeroth-order" and not optimizer.in_backward
    early = memory.speculate != "none" or memory.alternate != 0
    other = recipe.adapter is not None or recipe.train.compile or recipe.model.kind
    return plain and usual and not (early or other or optimizer.post_validation)


def choose_layout(
    recipe: Recipe,
    model: ModelShape,
    cluster: Cluster,
    engine: EngineConstants = ENGINES["weft"],
) -> ChosenLayout:
    """Plan a layout for ``recipe`` on ``cluster``, and return the recipe with the layout.

    ``train.micro_batch``, ``train.recompute`` and the places in ``[memory]`` are chosen with the layout, unless the
    recipe sets them. ``model``: the shape of the recipe's model; ``engine``: constants of the training program. The
    choice is deterministic, so that every rank comes to the same layout. Raises :class:`UsageError` if no layout fits.
    """
    train = recipe.train
    shape = shape_of(model, vocab_of(recipe))
    try:
        searched = search(shape, cluster, engine, train.batch, recipe.data.seq_len, BITS[train.dtype],
                       demands(recipe, cluster))  # fmt: skip
    except UsageError as error:
        raise UsageError(
            f"no layout for {cluster.count} ranks: {error}; or name one: --layout dp=N"
        ) from None
    searched = under_rules(searched, checked_under(recipe), model)
    finals = finalists(searched, 5, vocabulary=not recipe.model.kind)
    return choice_of(
        recipe, finals, f"of {len(searched.order):,} that fit {cluster.count} ranks"
    )


def checked_under(recipe: Recipe) -> Callable[[Final], Recipe]:
    """Return a function that puts a layout into ``recipe``, and raises :class:`ValueError` if the recipe refuses it."""
    return lambda final: Recipe.model_validate(dict(recipe_under(recipe, final)[0]))


def recipe_under(recipe: Recipe, final: Final) -> tuple[Recipe, dict[str, Any]]:
    """Return ``recipe`` with the layout of ``final``, and the settings outside ``[layout]`` that this layout needs.

    The settings are a dictionary of values by name for each section, such as ``{"train": {"micro_batch": 2}}``.
    """
    plan = final.plan
    train: dict[str, Any] = {
        # a rank whose share of the batch is smaller takes its share
        "micro_batch": recipe.train.micro_batch or int(plan.micro_batch),
        "recompute": RECOMPUTE[int(plan.recompute)],
    }
    new = {"train": train, "memory": plan.memory}
    sections = {
        name: getattr(recipe, name).model_copy(update=change)
        for name, change in new.items()
    }
    return recipe.model_copy(
        update={"layout": Layout.model_validate(layout_tree(final)), **sections}
    ), new


def with_planned(recipe: Recipe, *settings: str) -> tuple[Recipe, tuple[str, ...]]:
    """Return ``recipe`` with a note that the planner has chosen ``settings``, and the note as arguments of a command
    line.
    """
    train = recipe.train.model_copy(update={"planned": settings})
    words = "--set", f"train.planned={json.dumps(settings)}"
    return recipe.model_copy(update={"train": train}), words


def choice_of(recipe: Recipe, finals: Sequence[Final], among: str) -> ChosenLayout:
    """Return ``recipe`` with the layout of ``finals[0]``, the fastest one.

    ``among``: words that say how many layouts were compared.
    """
    planned, new = recipe_under(recipe, finals[0])
    chosen = [
        f"{section}.{key}"
        for section, change in new.items()
        for key in change
        if key not in getattr(recipe, section).model_fields_set
    ]
    planned, noted = with_planned(planned, "layout", *chosen)
    text = (
        ",".join(
            f"{k}={v}" for k, v in planned.layout if v != Layout.model_fields[k].default
        )
        or "dp=1"
    )
    sets = [
        f"{section}.{k}={v}"
        for section, change in new.items()
        for k, v in change.items()
    ]
    overrides = (
        "--layout",
        text,
        *(word for override in sets for word in ("--set", override)),
        *noted,
    )
    line = f"layout  {title(finals[0])}: the planner's choice {among}"
    if len(finals) > 1:
        line += f" ({layout_verdict(finals[0], finals[1])})"
    return ChosenLayout(planned, overrides, f"{line}; to pin another: --layout {text}")
