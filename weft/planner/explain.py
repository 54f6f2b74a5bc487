"""A layout as plain data and as a recipe."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from weft.errors import UsageError
from weft.planner.cost import CONTEXT, RECOMPUTE, SCHEDULES
from weft.planner.search import CHOSEN, Found, at, describe, tell


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


def recipe_text(found: Found, i: int, model: str) -> str:
    """A recipe that ``weft train`` takes. Raises :class:`UsageError` for what Weft cannot train yet."""
    plan, shape = found.plan(i), found.shape
    if shape.experts:
        raise UsageError("weft train has no experts yet, so there is no recipe for this model; leave --recipe out")
    if not shape.gated:
        raise UsageError("weft train computes SwiGLU only, and this model has no gate; leave --recipe out")
    lines = [f"# weft plan {model}: {describe(plan)}", "[model]"]
    if Path(model).suffix == ".json" or Path(model).is_dir():
        lines.append(f'config = "{Path(model).resolve()}"')
    else:
        names = ("vocab", "layers", "embed", "heads", "kv_heads", "head_dim", "ffn")
        lines += [f"{name} = {int(getattr(shape, name))}" for name in names]
        lines.append(f"tied = {'true' if shape.tied else 'false'}")
    lines += ["", "[layout]"]
    lines += [f"{axis} = {int(getattr(plan, axis))}" for axis in ("dp", "shard", "cp", "tp", "pp")]
    lines += [f"zero = {max(1, int(plan.zero))}", f'context = "{CONTEXT[int(plan.context)]}"']
    if plan.pp > 1:
        lines.append(f'schedule = "{SCHEDULES[int(plan.schedule)]}"')
        if plan.virtual > 1:
            lines.append(f"virtual = {int(plan.virtual)}")
    lines += ["", "[train]", f"batch = {int(plan.batch)}", f"micro_batch = {int(plan.micro_batch)}"]
    lines += [f'recompute = "{RECOMPUTE[int(plan.recompute)]}"']
    lines += [f'dtype = "{"float32" if plan.bits == 32 else "bfloat16"}"', "", "[data]", f"seq_len = {int(plan.seq)}"]
    return "\n".join(lines) + "\n"
