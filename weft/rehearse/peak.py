"""Peak memory of a rank, from Weft's own modules and one step of training on tensors without memory.

Shapes, saved activations, gathered parameters, gradients and optimizer state are those of the real step. Only the data
behind the tensors is missing (fake tensors), and messages go nowhere (a fake process group). The workspace of
operators, fragmentation and the runtime's own memory are not counted.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.data.batch import Batch
from weft.errors import UsageError, WeftError
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.net.groups import fake_rank
from weft.planner.finalists import Final
from weft.planner.planned_model import PlannedModel
from weft.planner.planned_recipe import recipe_tree
from weft.recipe import ModelShape, Recipe, build_recipe
from weft.rehearse.ledger import AllocationWatch, Ledger
from weft.rehearse.rehearsed_step import plain_batches
from weft.train.setup import build_for_training, model_shape
from weft.train.step import clear_gradients, reduced_gradients, update


@dataclass(frozen=True)
class Peak:
    """Bytes of tensors on one rank in a step.

    ``rank``: number of the rank. ``state``: bytes of parameters and optimizer state before the step. ``peak``: largest
    number of bytes of all tensors within the step.
    """

    rank: int
    state: int
    peak: int


class _Counted(Batch):
    """A batch whose number of real tokens is known without reading it."""

    @property
    def real_tokens(self) -> int:
        return self.tokens.numel()


def peak_of(recipe: Recipe, shape: ModelShape, rank: int = 0) -> Peak:
    """Run one step of ``rank`` under the recipe's layout on fake tensors, and return the peak of its memory.

    ``shape``: the shape of the model, with its vocabulary. Raises :class:`UsageError` for a recipe with state that does
    not rest on the device.

    The step is shortened where this does not change its peak. It has at most two replicas along ``dp``, because all
    replicas hold equally many bytes. It has only as many microbatches as fill a pipeline.
    """
    for kind, place in recipe.memory.away.items():
        raise UsageError(
            f"memory.{kind} = {place!r}: tensors without memory are nowhere"
        )
    layout = recipe.layout.model_copy(update={"dp": min(recipe.layout.dp, 2)})
    ledger = Ledger()
    with ExitStack() as stack:
        stack.enter_context(fake_rank(rank, layout.world))
        mesh = Mesh.create(layout, "cpu")
        most = 2 * layout.pp + 2 if layout.pp > 1 else 2
        batches = [
            _Counted(**vars(batch))
            for batch in plain_batches(recipe, shape, most)(mesh)
        ]
        real = Transformer.to_empty

        def to_empty(model: Transformer, **more: Any) -> Any:
            # from here on nothing has memory
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            return real(model, **more)

        with mock.patch.object(Transformer, "to_empty", to_empty):
            model, state = build_for_training(
                shape, mesh, recipe, lambda *_: torch.zeros(())
            )
        ledger.hold(
            (*model.parameters(), *(part.values for part in state.tensors().values()))
        )
        held = ledger.level
        watch = AllocationWatch(ledger)
        with watch, watch.resizes():
            grads, _ = reduced_gradients(model, state, batches, mesh)
            update(state, grads, 1e-3)
            clear_gradients(model, state)
        return Peak(rank, held, ledger.peak)


def pipeline_ranks(layout: Layout) -> list[int]:
    """Return the number of one rank at every pipeline position.

    The numbers are those of a run with at most two replicas (``dp``), as :func:`peak_of` rehearses it.
    """
    world = layout.model_copy(update={"dp": min(layout.dp, 2)}).world
    return [p * world // layout.pp for p in range(layout.pp)]


#: Ranks in a fake process group: beyond, making the groups takes longer than anybody waits.
LARGEST = 512


@dataclass(frozen=True)
class Checked:
    """Memory of a step as Weft's modules use it, compared with the planner's prediction.

    ``rank``: the pipeline rank that uses most. ``gib``: its peak GiB; ``predicted_gib``: the prediction. If the step
    cannot be rehearsed, ``reason`` says why, and the numbers are 0.
    """

    rank: int = 0
    gib: float = 0.0
    predicted_gib: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"cannot be rehearsed: {self.reason}"
        off = self.predicted_gib / self.gib - 1
        return (
            f"a step of our own modules holds {self.gib:.3g} GiB at most (pipeline rank {self.rank}); predicted "
            f"{self.predicted_gib:.3g} without context and fragmentation, {off:+.0%}"
        )


def check(final: Final, model: PlannedModel) -> Checked:
    """Rehearse the first, second and last pipeline rank of ``final``, and return the memory of the fullest.

    ``model``: the model for which the layout was planned. If the step cannot be rehearsed, the result has only the
    reason.
    """
    try:
        recipe = build_recipe(recipe_tree(final, model))
        world = recipe.layout.world // recipe.layout.dp * min(2, recipe.layout.dp)
        if world > LARGEST:
            return Checked(reason=f"{world:,} ranks; {LARGEST} at most")
        if final.barriers:
            return Checked(
                reason="vocabulary passes send sizes along, which tensors without memory do not have"
            )
        shape = model_shape(recipe).model_copy(update={"vocab": int(final.shape.vocab)})
        ranks = pipeline_ranks(recipe.layout)
        done = []
        for place in sorted({0, min(1, len(ranks) - 1), len(ranks) - 1}):
            memory = final.ranks[place]
            predicted = float(memory.total - memory.constant) / 2**30
            done.append(
                Checked(
                    place, peak_of(recipe, shape, ranks[place]).peak / 2**30, predicted
                )
            )
        return max(done, key=lambda checked: checked.gib)
    except WeftError as error:
        return Checked(reason=str(error))
