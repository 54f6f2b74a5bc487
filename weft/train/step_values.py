"""Values of a training step: its input, what its ranks agree on, and its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from weft.data.batch import Batch

#: A run ends when so many steps in a row were skipped, because loss or gradient norm were not finite.
MOST_SKIPPED = 5


class StepResult(NamedTuple):
    """The result of a step, summed over all ranks that took it.

    Attributes:
        ``loss``: mean loss over the step's real tokens, weighted by the labels' weights.
        ``grad_norm``: global gradient norm before clipping.
        ``tokens``: number of real tokens, without padding.
        ``skipped``: whether the update was left out, because loss or norm was not finite.
        ``stop``: whether some rank asks to end the run.
        ``loads``: number of tokens routed to each expert, layer after layer. If experts have a capacity, the number of
            tokens that each layer dropped follows. Empty without experts.
        ``sent``: bytes that ranks sent each other for experts, by kind in the order of :data:`weft.models.router.SENT`.
        ``samples``: number of samples, and sum of their :func:`~weft.data.order.sample_hashes`; None if nobody counts
            them.
        ``undone``: whether updates that were made before the norm was known had to be taken back.
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
    """The input of a step on this rank.

    ``batches``: the microbatches. ``lr``: the learning rate. ``clip``: largest global gradient norm; 0: no limit.
    ``stop``: whether this rank asks to end the run.
    """

    batches: Sequence[Batch]
    lr: float
    clip: float = 0.0
    stop: bool = False


class Agreed(NamedTuple):
    """Result of the second phase of a step, in which ranks sum their gradients.

    ``grads``: this rank's reduced gradients by name. ``result``: a function that waits for the step's result and
    returns it.
    """

    grads: dict[str, torch.Tensor]
    result: Callable[[], StepResult]
