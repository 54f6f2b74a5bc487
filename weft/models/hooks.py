"""Hooks that the passes of a model call, and the stages of a model that is partly on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

    from weft.data.batch import Batch
    from weft.models.loss import Criterion
    from weft.models.preference import Objective

    T = torch.Tensor


class BlockSaver(Protocol):
    """Moves the tensors that blocks save for backward (:class:`weft.memory.activations.SavedActivations`)."""

    def block(
        self, module: nn.Module, x: T, *shared: T
    ) -> AbstractContextManager[None]:
        """Return a context for the forward pass of the block ``module`` on its input ``x``.

        ``shared``: tensors that all blocks save for backward, such as the rotary cosines.
        """


@dataclass(frozen=True)
class Hooks:
    """Hooks that the passes of a model call.

    ``criterion``: the loss of tokens, ``objective``: the loss of pairs of answers; without them it is cross entropy.
    ``saver`` moves the tensors that blocks save for backward. ``passed`` is called after each pass of a training step,
    with the number of passes done and the number of all passes.
    """

    criterion: Criterion | None = None
    objective: Objective | None = None
    saver: BlockSaver | None = None
    passed: Callable[[int, int], None] | None = None


#: Hooks of a model whose passes call nothing.
NO_HOOKS = Hooks()


class EarlyUpdates(NamedTuple):
    """Optimiser updates that run during backward: ``update`` is called for a unit as soon as its gradient is complete.

    ``units``: the units of the model to which this applies.
    """

    units: Container[object]
    update: Callable[..., None]


class Stages(Protocol):
    """The pipeline stages of a model that this rank runs (:class:`weft.parallel.pipeline.Pipeline`)."""

    #: Whether units pass memory one by one, as their weights rest in files.
    streamed: bool

    def accumulate(
        self,
        batches: Sequence[Batch],
        total: Callable[[], T],
        early: EarlyUpdates | None = None,
    ) -> T:
        """Run forward and backward of every microbatch in ``batches``, and return this rank's share of the mean loss.

        ``total``: returns the weight of all labels of the step, by which the sum of losses is divided. ``early``:
        updates that run during backward.
        """

    def evaluate(self, batches: Sequence[Batch], hooks: Hooks | None = None) -> T:
        """Return this rank's share of the sum of the losses of the microbatches ``batches``, without gradients."""

    def evaluate_at(
        self, points: Sequence[Callable[..., T]], batches: Sequence[Batch]
    ) -> list[T]:
        """Return what :meth:`evaluate` returns, once for each of ``points``.

        A point is a function from a parameter to the values that replace this rank's part of it.
        """
