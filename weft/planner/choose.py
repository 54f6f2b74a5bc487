"""The planner's first choice for a recipe that names no layout."""

from dataclasses import dataclass

from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.planner.cost import OFFLOAD, RECOMPUTE
from weft.planner.engine import ENGINES
from weft.planner.explain import layout_tree, title, verdict
from weft.planner.finalists import finalists
from weft.planner.machine import DEVICES, Cluster, find_device
from weft.planner.search import Pin, search
from weft.planner.shape import shape_of, vocab_of
from weft.recipe import ModelShape, Recipe

#: Products of so many bits in a precision.
BITS = {"float64": 32, "float32": 32, "bfloat16": 16}


@dataclass(frozen=True)
class Choice:
    """``recipe`` with a layout; ``overrides`` say the same as words of a command line; ``line`` says it to people."""

    recipe: Recipe
    overrides: tuple[str, ...]
    line: str


def local_cluster(device: str, memory: float, world: int, per_node: int) -> Cluster:
    """Ranks on devices of this name with ``memory`` bytes each; what is not a preset counts as the nearest one."""
    try:
        name = find_device(device, memory / 1e9).name
    except UsageError:
        gpus = [d for d in DEVICES.values() if d.name != "CPU"]
        name = min(gpus, key=lambda d: abs(d.memory - memory / 1e9)).name
    return Cluster(device=name, count=world, per_node=per_node, domain=per_node, memory=memory / 1e9)


def choose(recipe: Recipe, model: ModelShape, cluster: Cluster) -> Choice:
    """Plan ``recipe`` for ``cluster``; what its ``[train]`` section says stays. ``model``: its shape, looked up.

    Deterministic, so that every rank comes to the same layout by itself. Raises :class:`UsageError` if none fits.
    """
    train = recipe.train
    pins = [Pin.parse(f"{name}={getattr(train, name)}") for name in ("micro_batch", "recompute")
            if name in train.model_fields_set and getattr(train, name) is not None]  # fmt: skip
    if train.offload != "none" and cluster.machine().host_memory:  # on a CPU, device and host are one
        pins.append(Pin.parse(f"offload={train.offload}"))
    shape = shape_of(model, vocab_of(recipe))
    try:
        found = search(shape, cluster, ENGINES["weft"], train.batch, recipe.data.seq_len, BITS[train.dtype], pins)
    except UsageError as error:
        raise UsageError(f"no layout for {cluster.count} ranks: {error}; or name one: --layout dp=N") from None
    finals = finalists(found, 5, vocabulary=True)
    first = finals[0]
    layout = Layout.model_validate(layout_tree(first))
    new = {"micro_batch": int(first.plan.micro_batch), "recompute": RECOMPUTE[int(first.plan.recompute)]}
    new |= {"offload": OFFLOAD[int(first.plan.offload)]} if first.plan.offload else {}
    planned = recipe.model_copy(update={"layout": layout, "train": train.model_copy(update=new)})
    text = ",".join(f"{name}={value}" for name, value in layout if value != Layout.model_fields[name].default)
    overrides = ("--layout", text, *(word for k, v in new.items() for word in ("--set", f"train.{k}={v}")))
    line = f"layout  {title(first)}: the planner's choice of {len(found.order):,} that fit {cluster.count} ranks"
    if len(finals) > 1:
        line += f" ({verdict(first, finals[1])})"
    return Choice(planned, overrides, f"{line}; to pin another: --layout {text}")
