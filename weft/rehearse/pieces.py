"""Really runs one block of a model and its ends, and measures time and memory by the number of tokens in a pass.

The model's own modules are built with its widths, one layer deep and with a part of its vocabulary, run forward,
backward and through an update, and every tensor is counted. All results are straight lines in the tokens, of which two
points are measured. No constant is fitted.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from weft.data.batch import Batch
from weft.layout.mesh import Mesh
from weft.models.rope import angles
from weft.models.transformer import Transformer
from weft.parallel.state import State, Unit
from weft.recipe import Adapter, ModelShape, Recipe
from weft.registry import find
from weft.rehearse.journal import processor_seconds
from weft.rehearse.ledger import AllocationWatch, Ledger
from weft.shapes.parameters import parameters
from weft.shapes.shape import flops_per_token
from weft.train.rules.rank_sums import RankSums
from weft.train.setup import build_for_training

T = torch.Tensor

#: Flops of a block's step, and entries of a vocabulary, that are run at most.
WORK, VOCAB = 6e9, 8192


class Line(NamedTuple):
    """A linear function of the number of tokens in a pass: ``fixed + slope * tokens``, in seconds or bytes."""

    fixed: float
    slope: float

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]]) -> "Line":
        (n, low), (m, high) = points
        slope = max(0.0, (high - low) / (m - n))
        return cls(max(0.0, high - slope * m), slope)

    def at(self, tokens: float) -> float:
        return self.fixed + self.slope * tokens


@dataclass(frozen=True)
class Piece:
    """Measured time and memory of a part of the model: one block, or the ends.

    The ends are embedding, last norm, and output layer with the loss. A :class:`Line` gives a value for each number of
    tokens in a pass.

    Attributes:
        ``forward``: seconds of a forward.
        ``both``: seconds of a forward and its backward together.
        ``kept``: bytes kept for backward.
        ``working``: largest number of bytes in use while the part runs, without the kept ones and without gradients of
            weights.
        ``lean``: largest number of bytes that a forward needs if no backward follows.
        ``update``: seconds of the optimizer.
        ``weights``, ``gradients``, ``slots``: bytes of weights, of their gradients and of optimizer state.
    """

    forward: Line
    both: Line
    kept: Line
    working: Line
    lean: Line
    update: float = 0.0
    weights: float = 0.0
    gradients: float = 0.0
    slots: float = 0.0

    def times(self, factor: float) -> "Piece":
        """Return a copy with all seconds and bytes multiplied by ``factor``, such as the number of blocks."""
        forward, both, kept, working, lean = (
            Line(factor * x.fixed, factor * x.slope)
            for x in (self.forward, self.both, self.kept, self.working, self.lean)
        )
        fixed = (
            factor * x for x in (self.update, self.weights, self.gradients, self.slots)
        )
        return Piece(forward, both, kept, working, lean, *fixed)


def measure_pieces(
    recipe: Recipe,
    shape: ModelShape,
    device: torch.device,
    passes: dict[Adapter | None, dict[str, Piece]],
) -> tuple[Piece, Piece]:
    """Measure one block of the model, and its ends with the whole vocabulary, on ``device`` under the recipe's training
    method. Returns both measurements in this order.

    The ends are embedding, last norm and output layer with the loss. ``passes``: a cache of measured forward and
    backward passes by adapter, which this call fills. Methods that differ only in their optimizers share it.
    """
    some = min(shape.vocab, VOCAB)
    # which a small vocabulary may lack
    adapter = recipe.adapter and recipe.adapter.model_copy(update={"tokens": ()})
    change = {"layers": 1, "vocab": some, "origin": None, "adapter": adapter}
    small = shape.model_copy(update=change)
    model, state = build_for_training(small, Mesh.single(device), recipe)
    held = {}
    for unit in state.units:
        slots = sum(part.values.nbytes for h in unit.held for part in h.slots.values())
        held["block" if unit.held[0].name.startswith("blocks") else "ends"] = {
            "update": _update_seconds(recipe, state, unit, device), "slots": slots,
            "weights": sum(h.local.nbytes for h in unit.held),
            "gradients": sum(h.local.nbytes for h in unit.held if h.learns),
        }  # fmt: skip
    if recipe.train.dtype == "bfloat16":
        model.to(torch.bfloat16)
    if recipe.adapter not in passes:
        passes[recipe.adapter] = _passes(recipe, small, model, device)
    shared = passes[recipe.adapter]
    block, ends = (
        replace(shared[name], **held[name])  # type: ignore[arg-type]
        for name in ("block", "ends")
    )
    return block, ends.times(shape.vocab / some)


def _passes(
    recipe: Recipe, small: ModelShape, model: Transformer, device: torch.device
) -> dict[str, Piece]:
    """Measure forward and backward of a block and of the ends, by the tokens of a pass."""
    weights = sum(p.products for p in parameters(small) if p.name.startswith("blocks"))
    most = max(
        32, min(int(WORK / (6 * weights)), recipe.train.batch * recipe.data.seq_len)
    )
    length = min(recipe.data.seq_len, most)
    counts = [max(1, most // length // 4) * length, most // length * length]
    if counts[0] == counts[1]:
        counts[0] = max(1, length // 4)
    longer = _longer(small, length, recipe.data.seq_len)
    model.loss_chunk = max(counts)
    return {
        "block": _piece(model, partial(_block, model), counts, length, device, longer),
        "ends": _piece(model, partial(_ends, model), counts, length, device),
    }


def _longer(small: ModelShape, length: int, wanted: int) -> float:
    """Return the factor by which attention makes a token's work larger in rows of the ``wanted`` length than in
    ``length``.
    """
    table = 6 * small.vocab * small.embed
    return (flops_per_token(small, 0, wanted) - table) / (
        flops_per_token(small, 0, length) - table
    )


def _block(model: Transformer, x: T, batch: Batch, rope: tuple[T, ...]) -> T:
    return model.settled(model.run_block(0, x, rope, batch.cu_seqlens))


def _ends(model: Transformer, x: T, batch: Batch, rope: tuple[T, ...]) -> T:
    """Compute the loss; ``x`` is what the blocks have added to the embedding."""
    return model.loss(model.norm(model.embedding(batch.tokens) + x), batch)


def _piece(
    model: Transformer,
    run: Callable[..., T],
    counts: Sequence[int],
    length: int,
    device: torch.device,
    longer: float = 1.0,
) -> Piece:
    """Measure ``run`` at two numbers of tokens, and return the lines. ``longer``: factor of the time."""
    seen: dict[str, list[tuple[int, float]]] = {}
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    for count in counts:
        width = min(length, count)
        positions = torch.arange(count, device=device).view(-1, width) % width
        tokens = positions % model.shape.vocab
        batch = Batch(
            tokens,
            tokens,
            positions,
            torch.arange(0, count + 1, width, dtype=torch.int32),
        )
        rope = angles(positions, model.freq, dtype)  # all blocks read the same ones
        x = torch.randn(*positions.shape, model.shape.embed, device=device, dtype=dtype)
        for name, value in _seen(
            model, partial(run, batch=batch, rope=rope), x, device, longer
        ).items():
            seen.setdefault(name, []).append((count, value))
    forward, both, kept, working, lean = (
        Line.through(seen[name])
        for name in ("forward", "both", "kept", "working", "lean")
    )
    return Piece(forward, both, kept, working, lean)


def _seen(
    model: Transformer, run: Callable[[T], T], x: T, device: torch.device, longer: float
) -> dict[str, float]:
    """Measure seconds and bytes of one forward and backward."""
    learning = [p for p in model.parameters() if p.requires_grad]

    def forward() -> T:
        with torch.no_grad():
            return run(x)

    def both() -> None:
        y = run(x.requires_grad_())
        y.backward(torch.ones_like(y))
        for tensor in (x, *learning):
            tensor.grad = None

    lean, ledger = Ledger(), Ledger()
    for each in (lean, ledger):  # views of what is there anyway count for nothing
        each.hold((x, *model.parameters()))
    there = ledger.level
    with AllocationWatch(lean):
        forward()
    with AllocationWatch(ledger):
        y = run(x.requires_grad_())
        kept, most = ledger.level - there, ledger.peak - there
        ledger.peak = ledger.level
        y.backward(torch.ones_like(y))
        gradients = sum(p.grad.nbytes for p in learning if p.grad is not None)
    x.grad = y = None  # type: ignore[assignment]
    for p in learning:
        p.grad = None
    return {
        "forward": longer * _seconds(forward, device), "both": longer * _seconds(both, device), "kept": kept,
        "working": max(most, ledger.peak - there - gradients) - kept, "lean": lean.peak - there,
    }  # fmt: skip


def _seconds(run: Callable[[], Any], device: torch.device, times: int = 2) -> float:
    """Return the least of several times: on a CPU in processor time, which other programs hardly lengthen."""

    def now() -> float:
        if device.type != "cuda":
            return processor_seconds()
        torch.cuda.synchronize(device)
        return time.perf_counter()

    taken = []
    for _ in range(times):
        begun = now()
        run()
        taken.append(now() - begun)
    return min(taken)


def _update_seconds(
    recipe: Recipe, state: State, unit: Unit, device: torch.device
) -> float:
    """Measure the optimizer's seconds for one unit; for zeroth order, those of two probes and one update."""
    held = [h for h in unit.held if h.learns]
    if recipe.optimizer.estimate == "zeroth-order":
        # one says it of all: noise is slow
        some = [h for h in held if h.local.dim() > 1][:1]
        direction = find("phases", "zeroth-order").implementation().direction
        share = sum(h.local.numel() for h in held) / max(
            1, sum(h.local.numel() for h in some)
        )
        return (
            3
            * share
            * _seconds(
                lambda: [h.local.add(direction(h, 0)) for h in some], device, times=1
            )
        )
    grads = {h.name: torch.full_like(h.local, 1e-3) for h in held}

    def update() -> None:
        state.updates = 1  # between two sets of directions
        torch.nn.utils.get_total_norm(list(grads.values()) or [torch.zeros(1)])
        state.update(unit, grads, 0.0)

    seconds = _seconds(update, device)
    rule = recipe.optimizer.update_rule(recipe.optimizer, RankSums(Mesh.single()))
    return seconds + rule.rare_seconds(held, lambda work: _seconds(work, device))
