"""Values of a training step: its input, what its ranks agree on, and its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from weft.data.batch import Batch


class StepResult(NamedTuple):
    """The result of a step over all ranks that took it. A ``skipped`` step changed nothing.

    ``loss``: the weighted mean over the step's real ``tokens``. ``stop``: whether some rank asks to end the run.
    ``loads``: tokens routed to each expert, layer after layer; with a capacity, then the tokens that each dropped.
    ``sent``: bytes that ranks sent each other for the experts, in the order of :data:`weft.models.router.SENT`.
    ``samples``: how many samples the step has seen and the sum of their :func:`~weft.data.order.sample_hashes`; None if
    nobody counts them. ``undone``: updates made before the norm was known had to be taken back.
    """

    loss: float
    grad_norm: float
    tokens: int
    skipped: bool
    stop: bool
    loads: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()
    samples: tuple[int, int] | None = None
    undone: bool = False


class StepInput(NamedTuple):
    """The input of a step. ``stop``: whether this rank asks to end the run. ``clip``: largest global norm."""

    batches: Sequence[Batch]
    lr: float
    clip: float = 0.0
    stop: bool = False


class Agreed(NamedTuple):
    """Agreed results of a step: reduced local gradients by name; ``result`` waits for the step's result."""

    grads: dict[str, torch.Tensor]
    result: Callable[[], StepResult]
