"""What training a model takes on this machine by every method, whether it fits, and which method to choose.

Sums over the layers what one block of the model and its ends take when they really run here
(:mod:`weft.rehearse.pieces`).
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from weft.checkpoint.weights import shape_named
from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.planner.planned_model import SECTIONS, vocab_of
from weft.planner.tiers import exposed_seconds
from weft.recipe import (
    Adapter,
    Memory,
    ModelShape,
    Optimizer,
    Recipe,
    build_recipe,
    load_recipe,
)
from weft.recipe.shipped import find_recipe
from weft.rehearse.pieces import Piece, measure_pieces
from weft.rehearse.transfers import bytes_per_s, disk_curves
from weft.run.rank_processes import threads_per_rank
from weft.shapes.parameters import learns, parameters
from weft.train.setup import model_shape

#: What each method sets in a recipe. GaLore is of use where gradients do not stay either.
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "full": {"optimizer": {"lr": 2e-5}},
    "lora": {"adapter": {"kind": "lora"}, "optimizer": {"lr": 2e-4}},
    "qlora": {"adapter": {"kind": "qlora"}, "optimizer": {"lr": 2e-4}},
    "galore": {
        "optimizer": {"kind": "galore", "in_backward": True, "clip": 0.0, "lr": 1e-4}
    },
    "zo": {"optimizer": {"estimate": "zeroth-order", "kind": "sgd", "lr": 1e-6}},
}
#: What can rest in files (:class:`weft.recipe.Memory`) where memory is not enough, the least first.
FILED: dict[str, tuple[dict[str, str], ...]] = {
    "full": ({"moments": "file"}, {"weights": "file"}), "galore": ({"moments": "file"},),
}  # fmt: skip
#: Bytes of a file with which the disk is measured, and buffers of a unit: in use, coming and leaving.
MEASURED, BUFFERS = 32 << 20, 3
#: What speaks for each.
WHY = {
    "full": "every weight learns, with AdamW's whole state",
    "lora": "it learns as well as full training where there is little to learn, with few gradients and moments",
    "qlora": "weights in four bits are what makes room",
    "galore": "every weight learns, with moments of low rank and the gradients of one block at a time",
    "zo": "no gradients and no moments, at the price of many more steps",
}
#: Share of the memory that is there which a run may take: two real runs took 4 and 15 % more than is predicted.
USABLE = 0.8
#: A low-rank adapter holds about so many tokens' worth of what there is to learn per parameter: some 2 bits of each
#: (Allen-Zhu & Li 2024), and about one bit per token (Schulman et al. 2025, "LoRA without regret").
TOKENS_PER_PARAMETER = 2


@dataclass(frozen=True)
class Estimate:
    """Estimate of training by one method on this machine.

    Attributes:
        ``method``: full training, an adapter, or another method of :data:`METHODS`.
        ``micro_batch``, ``recompute``: the settings of ``[train]`` that are assumed.
        ``memory``: bytes by purpose.
        ``available``: bytes that training may use.
        ``seconds``: seconds of a step.
        ``tokens``: number of tokens to train for.
        ``learning``: number of parameters that are trained.
        ``places``: kinds of state that rest in files, each with its place. ``memory`` counts no bytes of them, but only
            those of the buffers through which they pass.
    """

    method: str
    micro_batch: int
    recompute: str
    memory: dict[str, float]
    available: float
    seconds: float
    tokens: int
    learning: int
    places: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.total <= USABLE * self.available


def with_method(
    recipe: Recipe, method: str, places: Mapping[str, str] | None = None, **train: Any
) -> Recipe:
    """Return the recipe changed to train by ``method``, a key of :data:`METHODS`; settings of an adapter are kept.

    ``places``: where kinds of state rest, as in ``[memory]``. ``train``: changed settings of ``[train]``.
    """
    tree, sections = recipe.model_dump(mode="json"), METHODS[method]
    adapter = sections.get("adapter")
    tree["adapter"] = (tree["adapter"] or {}) | adapter if adapter else None
    tree["optimizer"] |= sections["optimizer"]
    if method == "galore":
        usual = build_recipe(tree).model_dump(mode="json")["optimizer"]["rank"]
        tree["optimizer"]["rank"] = min(usual, max(4, recipe.model.embed // 4))
    tree["train"] |= train
    tree["memory"] |= places or {}
    return build_recipe(tree)


def estimates(
    recipe: Recipe,
    shape: ModelShape,
    methods: Sequence[str],
    device: torch.device,
    say: Callable[[str], None],
) -> list[Estimate]:
    """Return for each method the estimate of its fastest settings that fit in the memory of ``device``.

    If no settings of a method fit, the estimate is for those settings that need the least memory. ``recipe``: the
    recipe to estimate. ``shape``: the model. ``methods``: keys of :data:`METHODS`. ``say``: called with lines about
    progress.
    """
    if device.type == "cpu":
        torch.set_num_threads(threads_per_rank(recipe.train.threads, 1))
    measured, passes = {}, dict[Adapter | None, dict[str, Piece]]()
    for method in methods:
        say(f"running a block of the model by {method}")
        measured[method] = measure_pieces(
            with_method(recipe, method), shape, device, passes
        )
    gc.collect()
    runtime, available = _runtime(device)
    results, disk = list[Estimate](), dict[str, Any]()
    for method, (block, ends) in measured.items():
        given = recipe.train.micro_batch or recipe.train.batch
        sizes = (
            [given]
            if recipe.train.micro_batch
            else [n for n in range(given, 0, -1) if given % n == 0]
        )
        ways = ("full",) if recipe.train.recompute == "full" else ("none", "full")
        tried = list[Estimate]()
        for places in ({}, *FILED.get(method, ())):
            if places and not disk:
                say("measuring the disk")
                disk = disk_curves(Path(recipe.memory.folder), MEASURED)
            tried += [
                estimate(with_method(recipe, method, places, micro_batch=n, recompute=way), shape, method, block, ends,
                         runtime, available, disk)
                for way in ways[: 1 if method == "zo" else 2] for n in sizes
            ]  # fmt: skip
            if any(e.fits for e in tried):
                break
        results.append(
            next((e for e in tried if e.fits), min(tried, key=lambda e: e.total))
        )
    return results


def recommend(estimates: Sequence[Estimate]) -> Estimate | None:
    """Return the recommended one of ``estimates`` among those that fit in memory; None if none fits.

    LoRA comes first if it has enough parameters for the number of training tokens; otherwise full training comes first.
    """
    fitting = {e.method: e for e in estimates if e.fits}
    small = (
        "lora" in fitting
        and fitting["lora"].tokens <= TOKENS_PER_PARAMETER * fitting["lora"].learning
    )
    order = (
        ("lora", "full", "galore", "qlora", "zo")
        if small
        else ("full", "galore", "lora", "qlora", "zo")
    )
    return next((fitting[method] for method in order if method in fitting), None)


def estimate(
    recipe: Recipe, shape: ModelShape, method: str, block: Piece, ends: Piece, runtime: float, available: float,
    disk: Mapping[str, Any],
) -> Estimate:  # fmt: skip
    """Return the estimated memory and time of the recipe's steps by ``method``, from measurements of parts of the
    model.

    ``block``: the measured block. ``ends``: the measured embedding and output layer. ``runtime``: bytes of the process
    without tensors. ``available``: bytes that training may use. ``disk``: curves of the measured disk, if state rests
    in files.
    """
    rows, passes = recipe.rows_per_pass(recipe.layout)
    tokens, layers, full = (
        rows * recipe.data.seq_len,
        shape.layers,
        recipe.train.recompute == "full",
    )
    chunk, blocks = min(tokens, recipe.train.loss_chunk), block.times(layers)
    memory = {
        "weights": blocks.weights + ends.weights,
        "optimizer": blocks.slots + ends.slots,
    }
    update = blocks.update + ends.update
    x = tokens * shape.embed * {"float64": 8, "float32": 4}.get(recipe.train.dtype, 2)
    if recipe.optimizer.estimate == "zeroth-order":
        memory["copies"] = memory["weights"]
        memory["activations"] = x + max(block.lean.at(tokens), ends.lean.at(chunk))
        seconds = (
            2 * passes * (blocks.forward.at(tokens) + ends.forward.at(tokens)) + update
        )
    else:
        kept, working = block.kept.at(tokens), block.working.at(tokens)
        if full:
            kept, working = x, kept + working
        gradients = blocks.gradients + ends.gradients
        if recipe.optimizer.in_backward and passes == 1:
            gradients = block.gradients + ends.gradients
        # Backward begins with all activations and the output layer's gradient, goes on with the last block's, and ends
        # with all gradients, which later passes begin with.
        table_gradients = ends.gradients * (1.0 if shape.tied else 0.5)
        begin = layers * kept + max(
            ends.kept.at(chunk) + ends.working.at(chunk) + table_gradients,
            table_gradients + working,
        )
        end = kept + working
        memory["gradients"] = gradients
        # gradients leave, and a block sees all passes before the next one does
        filed = recipe.memory.offloads_state
        memory["activations"] = (
            begin if passes > 1 or filed else max(begin - gradients, end)
        )
        # What activations have left to the heap of the C library, large gradients do not get.
        runtime += begin - memory["activations"]
        memory["activations"] += filed * (passes - 1) * layers * kept
        seconds = (
            passes
            * (
                blocks.both.at(tokens)
                + full * blocks.forward.at(tokens)
                + ends.both.at(tokens)
            )
            + update
        )
        if recipe.memory.away:
            forward = passes * (blocks.forward.at(tokens) + ends.forward.at(tokens))
            seconds += _into_files(
                memory,
                recipe,
                block,
                ends,
                disk,
                layers,
                (forward, seconds - forward - update, update),
            )
    memory["runtime"] = runtime
    step, frozen = recipe.train.batch * recipe.data.seq_len, recipe.train.freeze
    adapted = shape.model_copy(update={"adapter": recipe.adapter})
    learning = sum(
        p.numel for p in parameters(adapted) if learns(p.name, adapted, frozen)
    )
    return Estimate(
        method, rows, recipe.train.recompute, memory, available, seconds, step * recipe.train.steps, learning,
        recipe.memory.away,
    )  # fmt: skip


def _into_files(
    memory: dict[str, float], recipe: Recipe, block: Piece, ends: Piece, disk: Mapping[str, Any], layers: int,
    computed: tuple[float, float, float],
) -> float:  # fmt: skip
    """Reduce ``memory`` to the buffers of state that rests in files; return by how many seconds a step gets longer.

    ``computed``: seconds of forward, backward and update. Weights are read for forward and backward. In the update all
    resting state is read and written, except gradients, which are only read.
    """
    held = {"weights": "weights", "gradients": "gradients", "moments": "slots"}
    ahead = recipe.memory.read_ahead
    sizes = {kind: memory["optimizer" if kind == "moments" else kind] for kind in held}
    filed = {
        kind: size * (recipe.memory.place_of(kind) == "file")
        for kind, size in sizes.items()
    }
    for kind, name in held.items():
        if filed[kind]:
            of_block, of_ends = getattr(block, name), getattr(ends, name)
            memory["optimizer" if kind == "moments" else kind] = (
                min(BUFFERS, layers) if ahead else 1
            ) * of_block + of_ends
    # until backward
    stay = min(
        recipe.memory.buffer << 20, max(0.0, filed["weights"] - memory["weights"])
    )
    memory["weights"] += stay
    weights, gradients = filed["weights"], filed["gradients"]
    # Beside its rows a unit that comes from a file has whole parameters, two units' at a time, and sums of gradients.
    memory["copies"] = 2 * block.weights + ends.weights if weights else 0.0
    moved = (
        (weights, 0.0),
        (weights - stay, gradients),
        (sum(filed.values()), weights + filed["moments"]),
    )
    read, write = bytes_per_s(disk["read"]), bytes_per_s(disk["write"])
    waits = [r / read + w / write for r, w in moved]
    if ahead:
        waits = [
            exposed_seconds(wait, compute, layers + 1)
            for wait, compute in zip(waits, computed, strict=True)
        ]
    return float(sum(waits))


def _runtime(device: torch.device) -> tuple[float, float]:
    """Return the bytes that a process has before it builds a model, and the bytes that are free for one."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return 0.0, float(free)
    resident = psutil.Process().memory_info().rss
    return float(resident), float(psutil.virtual_memory().available + resident)


def subject(
    model: str, batch: int | None, seq: int | None, tokens: int | None = None
) -> tuple[Recipe, ModelShape]:
    """Return the recipe to estimate, and the shape of its model without an adapter.

    ``model``: a recipe, or the name of a model. ``batch``: sequences per step. ``seq``: tokens in each sequence.
    ``tokens``: the number of tokens to train for. Each of these three is the recipe's if it is None.
    """
    if (file := find_recipe(model)) is not None:
        recipe = load_recipe(file)
        recipe.need_model()
        shape = model_shape(recipe)
        if shape.kind == "diffusion":
            raise UsageError(
                f"{model} makes images, and --here measures models that read texts; leave it out, give --cluster, or "
                "try a few steps with weft train --set train.steps=10"
            )
    else:
        shape = SECTIONS[model] if model in SECTIONS else shape_named(model)
        recipe = load_recipe("finetune", origin=model)
    if not (tokens or recipe.train.steps):
        raise UsageError(f"{model} trains for data.epochs = {recipe.data.epochs}, and how many steps these are is not "
                         "planned; say --tokens")  # fmt: skip
    batch, seq = batch or recipe.train.batch, seq or recipe.data.seq_len
    steps = -(-tokens // (batch * seq)) if tokens else recipe.train.steps
    train: dict[str, Any] = {"batch": batch, "steps": steps}
    train |= {"dtype": "bfloat16"} if torch.cuda.is_available() else {}
    data = recipe.data.model_copy(update={"seq_len": seq})
    recipe = recipe.model_copy(update={
        "train": recipe.train.model_copy(update=train), "data": data, "layout": Layout(),
        "model": shape.model_copy(update={"adapter": None, "origin": None}), "generate": None,
        "memory": Memory(folder=recipe.memory.folder),
    })  # fmt: skip
    return recipe, recipe.model.model_copy(
        update={"vocab": shape.vocab or vocab_of(recipe)}
    )


def command(model: str, chosen: Estimate, recipe: Recipe) -> str:
    """Return the shell command that trains ``model`` by the method ``chosen``, with the settings of ``recipe``."""
    file, sections = find_recipe(model), METHODS[chosen.method]
    words = ["weft", "train", f"finetune --from {model}" if file is None else model]
    if file is not None and chosen.method == "full" and recipe.adapter is None:
        sections = {}  # as the recipe trains already, and at its own rate
    changed = with_method(recipe, chosen.method)
    values = {
        f"{s}.{k}": getattr(getattr(changed, s), k)
        for s, v in sections.items()
        for k in v
    }
    values |= {
        "train.batch": recipe.train.batch,
        "train.micro_batch": chosen.micro_batch,
    }
    values |= {"data.seq_len": recipe.data.seq_len, "train.recompute": chosen.recompute}
    kinds = {
        kind: place
        for kind, place in chosen.places.items()
        if kind == "weights" or "weights" not in chosen.places
    }
    if file is not None:  # whose own places are none that the estimate has
        given = load_recipe(file).memory.model_dump(
            exclude_defaults=True, exclude={"folder"}
        )
        values |= {f"memory.{key}": Memory.model_fields[key].default for key in given}
    values |= {f"memory.{kind}": place for kind, place in kinds.items()}
    if "adapter" not in sections and (file is None or recipe.adapter is not None):
        words.append("--set adapter=none")
    technique = type(changed.optimizer).model_fields.keys() - Optimizer.model_fields
    values |= {
        f"optimizer.{name}": getattr(changed.optimizer, name) for name in technique
    }
    words += [f"--set {name}={str(value).lower()}" for name, value in values.items()]
    return " ".join(words)


def local_reasons(estimates: Sequence[Estimate], chosen: Estimate | None) -> list[str]:
    """Return one sentence per method of ``estimates`` on why it was chosen or not. ``chosen``: None if none fits."""
    lines = []
    for e in estimates:
        most = max((m for m in e.memory if m != "runtime"), key=lambda m: e.memory[m])
        size = f"{e.total / 2**30:.2f} GiB, of which {e.memory[most] / 2**30:.2f} are {most}"
        if not e.fits:
            lines.append(
                f"{e.method} does not fit: {size}; {USABLE * e.available / 2**30:.2f} can be used here"
            )
        elif e is chosen:
            lines.append(f"{e.method} is the one to take: {size}; {WHY[e.method]}")
        if e.fits and e.places:
            lines.append(
                f"{e.method} has room with {' and '.join(e.places)} in files, which the disk brings every step"
            )
    if chosen is not None and chosen.method == "lora":
        lines.append(
            f"{chosen.tokens:,} tokens are less than the {TOKENS_PER_PARAMETER * chosen.learning:,} that an adapter of "
            f"{chosen.learning:,} parameters holds, so full training would learn no more"
        )
    return lines
