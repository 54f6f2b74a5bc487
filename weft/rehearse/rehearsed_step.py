"""Runs one rank's training step alone, in a process group that moves nothing, and records work, messages and memory.

This is the planner's view of a layout on a machine at hand: Weft's own modules, timed as they run, with every
collective and message in the order in which this rank issues them. So counts and sizes cannot drift from the code. The
computed values are meaningless.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from weft.data.batch import Batch
from weft.data.loader import Loader
from weft.errors import WeftError
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.layout.sequence import padded_length
from weft.recipe import Data, ModelShape, Recipe, Train
from weft.rehearse.journal import Event, Journal, silent_rank
from weft.rehearse.ledger import AllocationWatch, Ledger
from weft.train.setup import build_for_training, model_shape, prepare
from weft.train.step import clear_gradients, clip_scale, reduced_gradients, update

#: Steps that are timed; of every piece of work the quickest counts.
TIMES = 2


@dataclass(frozen=True)
class Rehearsal:
    """Events of one rank in one rehearsed step, and the memory of its tensors.

    ``events``: the rank's work, collectives and messages, in order. ``state``: bytes of the tensors that are alive
    before the step. ``peak``: largest number of bytes of tensors that are alive at a time.
    """

    events: Sequence[Event]
    state: int = 0
    peak: int = 0

    @property
    def seconds(self) -> float:
        """Processor seconds of this rank's own work in the step, without communication."""
        return sum(e.seconds for e in self.events)

    def slower(self, factor: float) -> Rehearsal:
        """Return a copy of the rehearsal in which all recorded work takes ``factor`` times as long."""
        return replace(
            self, events=[replace(e, seconds=factor * e.seconds) for e in self.events]
        )


def rehearse(
    recipe: Recipe,
    shape: ModelShape,
    batches: Callable[[Mesh], Sequence[Batch]],
    rank: int,
) -> Rehearsal:
    """Rehearse one step of ``rank`` under the recipe's layout, on the CPU in this process alone.

    ``shape``: the model. ``batches``: returns the batches of a rank's step, given its mesh.
    """
    with silent_rank(rank, recipe.layout.world) as journal:
        return watch(recipe, shape, batches, journal)


def every_rank(
    recipe: Recipe, shape: ModelShape, batches: Callable[[Mesh], Sequence[Batch]]
) -> list[Rehearsal]:
    """Rehearse the step of all ranks, and return a rehearsal per rank.

    Ranks along ``dp``, ``shard`` and ``tp`` do the same work on parts of equal size, so only one of them is run. The
    others get copies of its rehearsal, with their own partners in collectives and messages. ``shape``: the model.
    ``batches``: returns the batches of a rank's step, given its mesh.
    """
    layout = recipe.layout
    rehearsals: dict[tuple[int, ...], Rehearsal] = {}
    sizes = [layout.size(axis) for axis in layout.axis_order]
    alike = [axis in ("dp", "shard", "tp") for axis in layout.axis_order]
    ranks = []
    for rank in range(layout.world):
        place = np.array(np.unravel_index(rank, sizes))
        model = np.where(alike, 0, place)
        key = tuple(model.tolist())
        if key not in rehearsals:
            source = int(np.ravel_multi_index(key, sizes))
            rehearsals[key] = rehearse(recipe, shape, batches, source)
        ranks.append(_moved(rehearsals[key], place - model, sizes))
    return ranks


def _moved(seen: Rehearsal, by: np.ndarray, sizes: Sequence[int]) -> Rehearsal:
    """Return the rehearsal of the rank whose coordinates are ``by`` further along every axis."""
    if not by.any():
        return seen
    wide = np.array(sizes)
    at = np.array(np.unravel_index(np.arange(wide.prod()), sizes)).T  # [rank, axis]
    to = np.ravel_multi_index(tuple(((at + by) % wide).T), sizes).tolist()

    def move(e: Event) -> Event:
        if e.kind in ("send", "recv"):
            return replace(e, ranks=(to[e.ranks[0]], e.ranks[1]))
        return replace(e, ranks=tuple(sorted(to[r] for r in e.ranks))) if e.ranks else e

    return replace(seen, events=[move(e) for e in seen.events])


def watch(
    recipe: Recipe,
    shape: ModelShape,
    batches: Callable[[Mesh], Sequence[Batch]],
    journal: Journal,
) -> Rehearsal:
    """Run steps in the existing process group, and return the events and the memory of this rank in one step.

    The first step counts the bytes of tensors. Several more steps are timed. Each piece of work is timed once per step,
    and its shortest time counts. ``shape``: the model. ``batches``: returns the batches of a rank's step, given its
    mesh. ``journal``: records the events.
    """
    mesh = Mesh.create(recipe.layout, "cpu")
    model, state = build_for_training(shape, mesh, recipe, lambda *_: torch.zeros(()))
    ledger, given = Ledger(), batches(mesh)
    ledger.hold(
        (*model.parameters(), *(part.values for part in state.tensors().values()))
    )
    before = ledger.level

    def step() -> Sequence[Event]:
        journal.begin()
        grads, _ = reduced_gradients(model, state, given, mesh)
        journal.close()
        journal.turn("optimizer")
        update(state, grads, 1e-3, clip_scale(2.0, 1.0))
        clear_gradients(model, state)
        journal.close()
        return journal.events

    seen = AllocationWatch(ledger, inside=True)
    with seen, seen.resizes():
        step()
    runs = zip(*(step() for _ in range(TIMES)), strict=True)
    quickest = [
        replace(same[-1], seconds=min(e.seconds for e in same)) for same in runs
    ]
    # What rests in files has the same tensors as elsewhere, and takes no memory but for buffers.
    resting = [
        group
        for kinds in state.tiers.groups.values()
        for group in kinds.values()
        if group.region is not None
    ]
    away = (
        sum(t.nbytes for group in resting for t in group.tensors) - state.tiers.pooled
    )
    return Rehearsal(quickest, before - away, ledger.peak - away)


def plain_batches(
    recipe: Recipe, shape: ModelShape, most: int = sys.maxsize
) -> Callable[[Mesh], list[Batch]]:
    """Return a function that makes a rank's batches of artificial rows, one document each, given the rank's mesh.

    Sizes are those of the recipe. ``shape``: the model. ``most``: the largest number of batches to make.
    """

    def make(mesh: Mesh) -> list[Batch]:
        rows, passes = recipe.rows_per_pass(recipe.layout)
        length = padded_length(recipe.data.seq_len, recipe.layout)
        ids = torch.arange(rows * length // mesh.size("cp")).view(rows, -1)
        edges = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
        return [
            Batch(ids % shape.vocab, ids % shape.vocab, ids % length, edges)
            for _ in range(min(passes, most))
        ]

    return make


def batches_of(
    recipe: Recipe,
) -> tuple[ModelShape, Callable[[Mesh, int], Sequence[Batch]]]:
    """Return the model's shape, and a function that makes the batches of a step, given a mesh and the step's number.

    The batches come from the recipe's data. If the recipe has none or its data cannot be opened, rows are artificial.
    """
    shape = model_shape(recipe)
    if recipe.data.sources:
        try:
            job = prepare(recipe)
        except WeftError:
            pass  # whether the data is there is not what is asked
        else:
            loaders: list[Loader] = []  # made once the mesh is there

            def real(mesh: Mesh, step: int) -> Sequence[Batch]:
                loaders[:] = loaders or [job.loader(job.corpus.train, mesh)]
                return loaders[0].step(step * recipe.train.batch) or []

            return job.shape, real
    plain = plain_batches(recipe, shape)
    return shape, lambda mesh, step: plain(mesh)


def reference(layout: str, size: str, alone: bool = True) -> Rehearsal:
    """Run rank 0's step of a small model for the probe, under ``layout`` (such as ``tp=2``).

    ``size``: size of the model, ``small``, ``large``, or ``tiny`` (for tests). ``alone``: whether to run in a process
    group that moves nothing; else the step runs with the existing ranks.
    """
    sizes = {
        "tiny": (4, 16, 8, 64),
        "small": (2, 256, 256, 2048),
        "large": (4, 256, 512, 2048),
    }
    layers, embed, seq, vocab = sizes[size]
    model = ModelShape(
        layers=layers,
        embed=embed,
        heads=4,
        kv_heads=2,
        ffn=2 * embed,
        vocab=vocab,
        qk_norm=True,
        tied=True,
    )
    recipe = Recipe(
        model=model,
        layout=Layout.parse(layout),
        data=Data(seq_len=seq),
        train=Train(batch=4),
    )
    batches = plain_batches(recipe, model)
    return (
        rehearse(recipe, model, batches, 0)
        if alone
        else watch(recipe, model, batches, Journal())
    )


def usual_step() -> float:
    """Return the median processor seconds of a small model's step in this process at present.

    It is one of the measurements of a probe, by which rehearsed times are scaled later.
    """
    return statistics.median(reference("dp=1", "large").seconds for _ in range(3))
