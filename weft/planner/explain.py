"""A layout as plain data and as a recipe."""

import json
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from weft.errors import UsageError
from weft.planner.cost import CONTEXT, RECOMPUTE, SCHEDULES
from weft.planner.search import CHOSEN, Found, at, describe, tell
from weft.planner.shape import SHAPES


def record(found: Found, i: int) -> dict[str, Any]:
    """Layout ``i`` with its seconds and GiB, split by cause."""
    plan, cost, memory = found.plan(i), at(found.cost, i), at(found.memory, i)
    layout = {k: tell(k, getattr(plan, k)) for k in CHOSEN}
    return {
        "layout": {k: v if k in ("context", "schedule", "recompute") else int(v) for k, v in layout.items()},
        "text": describe(plan),
        "seconds": found.seconds(i),
        "tokens_per_s": plan.batch * plan.seq / found.seconds(i),
        "mfu": found.utilisation(i),
        "gib": found.gib(i),
        "time": {f.name: float(getattr(cost, f.name)) for f in fields(cost)},
        "memory": {f.name: float(getattr(memory, f.name)) / 2**30 for f in fields(memory)},
    }


def recipe_tree(found: Found, i: int, model: str) -> dict[str, Any]:
    """Layout ``i`` as the sections of a recipe; if ``model`` is a recipe, that one with another layout.

    Raises :class:`UsageError` for what Weft cannot train yet.
    """
    plan, shape = found.plan(i), found.shape
    if shape.experts:
        raise UsageError("weft train has no experts yet, so there is no recipe for this model; leave --recipe out")
    if not shape.gated:
        raise UsageError("weft train computes SwiGLU only, and this model has no gate; leave --recipe out")
    path = Path(model)
    if path.suffix == ".toml":
        tree = tomllib.loads(path.read_text())
    elif model in SHAPES:
        names = ("vocab", "layers", "embed", "heads", "kv_heads", "head_dim", "ffn")
        tree = {"model": {name: int(getattr(shape, name)) for name in names} | {"tied": bool(shape.tied)}}
    else:
        tree = {"model": {"config": str((path / "config.json" if path.is_dir() else path).resolve())}}
    layout: dict[str, Any] = {axis: int(getattr(plan, axis)) for axis in ("pp", "dp", "shard", "cp", "tp")}
    layout |= {"zero": max(1, int(plan.zero)), "context": CONTEXT[int(plan.context)]}
    if plan.pp > 1:
        layout["schedule"] = SCHEDULES[int(plan.schedule)]
        layout |= {"virtual": int(plan.virtual)} if plan.virtual > 1 else {}
    train: dict[str, Any] = {"batch": int(plan.batch), "micro_batch": int(plan.micro_batch)}
    train |= {"recompute": RECOMPUTE[int(plan.recompute)], "dtype": "float32" if plan.bits == 32 else "bfloat16"}
    tree["layout"] = layout
    tree["train"] = tree.get("train", {}) | train
    tree["data"] = tree.get("data", {}) | {"seq_len": int(plan.seq)}
    return tree


def toml(tree: dict[str, Any]) -> str:
    """A recipe's tree as TOML: sections of plain values, lists and small tables."""

    def value(v: Any) -> str:
        if isinstance(v, dict):
            return "{ " + ", ".join(f"{k} = {value(x)}" for k, x in v.items()) + " }"
        return f"[{', '.join(map(value, v))}]" if isinstance(v, list) else json.dumps(v, ensure_ascii=False)

    plain = [f"{key} = {value(v)}" for key, v in tree.items() if not isinstance(v, dict)]
    sections = [
        "\n".join([f"[{name}]", *(f"{key} = {value(v)}" for key, v in section.items())])
        for name, section in tree.items()
        if isinstance(section, dict)
    ]
    return "\n\n".join(["\n".join(plain)] * bool(plain) + sections) + "\n"
