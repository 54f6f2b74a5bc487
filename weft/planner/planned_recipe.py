"""What ``weft plan`` writes: the recipe of a planned layout, with all else that its owner has set."""

from typing import Any

from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.layout.placement_groups import experts_per_node
from weft.planner.cost import BITS, CONTEXT, OVERLAP, RECOMPUTE, schedules
from weft.planner.finalists import Final
from weft.planner.planned_model import PlannedModel
from weft.recipe import Memory, Train, build_recipe

#: Settings that a plan chooses, by section. All others are kept wherever the plan's choice leaves them a meaning.
CHOSEN_SETTINGS = {
    "layout": (
        "pp", "dp", "shard", "cp", "tp", "zero", "context", "secondary", "schedule", "virtual", "vocab_barriers",
        "order", "overlap", "ep", "dispatch", "node",
    ),
    "train": ("micro_batch", "recompute"),
    "memory": ("weights", "gradients", "moments", "activations", "tiles", "embedding"),
}  # fmt: skip


def untrainable_line(model: PlannedModel, bits: int) -> str:
    """Return a line that says why ``weft train`` cannot yet train ``model`` with products of ``bits`` bits; empty if it
    can.
    """
    return model.untrainable or (
        "" if bits >= 16 else f"weft train has no products of {bits} bits yet"
    )


def recipe_tree(final: Final, model: PlannedModel) -> dict[str, Any]:
    """Return the sections of a recipe with which ``weft train`` trains ``model`` under the layout of ``final``.

    They are a nested dictionary. Settings that ``model`` brings are kept, except those that the plan chooses
    (:data:`CHOSEN_SETTINGS`) and those of ``[layout]`` and ``[memory]`` that the rules refuse beside its choice;
    :func:`changed_lines` says which these are. Raises :class:`UsageError` for models that Weft cannot train yet.
    """
    plan, tree = final.plan, dict(model.recipe)
    if reason := untrainable_line(model, int(plan.bits)):
        raise UsageError(f"no recipe can be written: {reason}; leave --recipe out")
    train: dict[str, Any] = {
        "batch": int(plan.batch),
        "micro_batch": int(plan.micro_batch),
    }
    train |= {"recompute": RECOMPUTE[int(plan.recompute)]}
    if BITS.get(tree.get("train", {}).get("dtype", "")) != plan.bits:
        train["dtype"] = "float32" if plan.bits == 32 else "bfloat16"
    tree["data"] = tree.get("data", {}) | {"seq_len": int(plan.seq)}
    tree["layout"] = layout_tree(final)
    tree["train"] = tree.get("train", {}) | train
    tree["memory"] = plan.memory
    own = {"layout": model.layout or {}, "memory": model.recipe.get("memory", {})}
    for section, settings in own.items():
        for name, value in settings.items():
            if name not in CHOSEN_SETTINGS[section]:
                tree = _with_setting(tree, section, name, value)
    return tree if tree["memory"] else {k: v for k, v in tree.items() if k != "memory"}


def _with_setting(
    tree: dict[str, Any], section: str, name: str, value: Any
) -> dict[str, Any]:
    """Return ``tree`` with a setting of its owner, or ``tree`` as it is where rules refuse the setting beside the plan.

    So it is with a setting that would change the number of ranks.
    """
    more = tree | {section: tree[section] | {name: value}}
    try:
        recipe = build_recipe(more)
    except UsageError:
        return tree
    planned = Layout.model_validate(tree["layout"])
    return more if recipe.layout.world == planned.world else tree


def changed_lines(model: PlannedModel, tree: dict[str, Any]) -> list[str]:
    """Return a line for each setting of the user's recipe (kept in ``model``) that ``tree``, the planned recipe, has
    changed or left out.

    Settings of ``[layout]`` that every plan chooses have no line.
    """
    own = {
        "layout": {name: value for name, value in (model.layout or {}).items()
                   if name not in CHOSEN_SETTINGS["layout"]},
        "train": {name: value for name, value in model.recipe.get("train", {}).items()
                  if name in CHOSEN_SETTINGS["train"]},
        "memory": model.recipe.get("memory", {}),
    }  # fmt: skip
    defaults = {"layout": Layout(), "train": Train(), "memory": Memory()}
    lines = []
    for section, settings in own.items():
        for name, value in settings.items():
            usual = getattr(defaults[section], name)
            planned = tree.get(section, {}).get(name, usual)
            if planned != value:
                lines.append(f"{section}.{name} = {value!r} is {planned!r} in the plan")
    return lines


def layout_tree(final: Final) -> dict[str, Any]:
    """Return the layout of ``final`` as the ``[layout]`` section of a recipe, a dictionary of settings."""
    plan = final.plan
    layout: dict[str, Any] = {
        axis: int(getattr(plan, axis)) for axis in ("pp", "dp", "shard", "cp", "tp")
    }
    layout |= {"zero": max(1, int(plan.zero)), "context": CONTEXT[int(plan.context)]}
    layout |= {"secondary": int(plan.secondary)} if plan.secondary else {}
    if plan.pp > 1:
        layout["schedule"] = schedules()[int(plan.schedule)]
        layout |= {"virtual": int(plan.virtual)} if plan.virtual > 1 else {}
        layout |= {"vocab_barriers": final.barriers} if final.barriers else {}
    order = final.order or ("dp pp shard cp tp" if plan.outer else "")
    layout |= (
        {"order": " ".join(axis for axis in order.split() if layout[axis] > 1)}
        if order
        else {}
    )
    if plan.overlap:
        layout["overlap"] = OVERLAP[int(plan.overlap)]
    if plan.ep > 1:
        rows = final.shape.rows_sent(plan.ep)
        layout |= {
            "ep": int(plan.ep),
            "dispatch": min(rows, key=lambda way: float(rows[way])),
        }
        nodes = {"node": int(final.machine.domain)}
        # slow links carry a token to a node once
        if 1 < experts_per_node(Layout(**layout, **nodes)) < plan.ep:
            layout |= nodes | {"dispatch": "per-node"}
    return layout
