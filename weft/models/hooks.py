"""Functions that the passes of a model call, and the interface of a model's pipeline stages on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

    from weft.data.batch import Batch
    from weft.models.answer_loss import Objective
    from weft.models.loss import Criterion

    T = torch.Tensor


class BlockSaver(Protocol):
    """Interface of objects that offload the tensors that blocks save for backward.
    :class:`weft.memory.activations.SavedActivations` implements it.
    """

    def block(
        self, module: nn.Module, x: T, *shared: T
    ) -> AbstractContextManager[None]:
        """Return a context for the forward pass of the block ``module`` on its input ``x``.

        ``shared``: tensors that all blocks save for backward, such as the rotary cosines.
        """


@dataclass(frozen=True)
class Hooks:
    """Functions that the passes of a model call.

    Attributes:
        ``criterion``: the loss of tokens; None: cross entropy.
        ``objective``: the loss of pairs of answers, or a policy's loss; None: the loss of tokens.
        ``saver``: offloads the tensors that blocks save for backward; None: they stay on the device.
        ``passed``: called after each pass of a training step, with the number of passes done and of all passes.
    """

    criterion: Criterion | None = None
    objective: Objective | None = None
    saver: BlockSaver | None = None
    passed: Callable[[int, int], None] | None = None


#: Hooks of a model whose passes call nothing.
NO_HOOKS = Hooks()


class EarlyUpdates(NamedTuple):
    """Parameter updates that run during backward.

    ``units``: the units (parameters that are updated together) that are updated during backward; ``update``: called for
    each of them as soon as its gradient is complete.
    """

    units: Container[object]
    update: Callable[..., None]


class Stages(Protocol):
    """Interface of the pipeline stages of a model that this rank runs (:class:`weft.parallel.pipeline.Pipeline`).

    ``streamed``: whether weights rest in files, so that units pass through memory one by one.
    """

    #: Whether units pass memory one by one, as their weights rest in files.
    streamed: bool

    def accumulate(
        self,
        batches: Sequence[Batch],
        total: Callable[[], T],
        early: EarlyUpdates | None = None,
    ) -> T:
        """Run forward and backward of every microbatch in ``batches``, and return this rank's share of the mean loss.

        ``total``: function that returns the sum of the weights of all labels in the step. The sum of losses is divided
        by it. ``early``: parameter updates to make during backward; None: none.
        """

    def evaluate(self, batches: Sequence[Batch], hooks: Hooks | None = None) -> T:
        """Return this rank's share of the sum of the losses of the microbatches ``batches``, without gradients.

        ``hooks``: functions whose losses replace the model's own; None: the model's own.
        """

    def evaluate_at(
        self, points: Sequence[Callable[..., T]], batches: Sequence[Batch]
    ) -> list[T]:
        """Return the result of :meth:`evaluate` on ``batches`` at each of ``points``, in order.

        A point is a function from a parameter to the values that replace this rank's shard of the parameter.
        """
