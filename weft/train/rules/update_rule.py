"""The interface of update rules, and facts about them that Weft needs before PyTorch is imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from weft.refusal import Rule

if TYPE_CHECKING:
    import torch

    from weft.layout.parts import Part
    from weft.parallel.state import Held


#: Times a piece of work, in seconds.
Timer = Callable[[Callable[[], object]], float]

#: For rules that keep something of whole rows or columns of an expert's matrix.
WHOLE_ROWS = Rule(
    "pieces of experts with rows and columns",
    "layout shape optimizer",
    lambda a: bool(a.shape.mixtures) and a.least_experts < a.layout.ep,
    "ep = {0.layout.ep} cuts experts in pieces, and the optimizer keeps something of their whole rows and columns",
    "use optimizer.kind = 'adamw' in float32 or bfloat16, or ep <= {0.least_experts}",
)


class UpdateRule:
    """Base class of update rules, which update parameters in place.

    A rule is built with the section ``[optimizer]`` and a :class:`~weft.train.rules.rank_sums.RankSums`.

    Attributes:
        ``for_matrices``: whether the rule is only for the matrices of blocks (two dimensions or more, none of them
            the vocabulary); AdamW then updates all other parameters.
        ``for_stacks``: whether a rule for matrices also updates stacks of matrices, such as experts' weights.
        ``elementwise``: whether the update of an element needs only that element's gradient and state, so that
            ranks need not communicate.
        ``stays``: whether an element whose gradient is 0 keeps its value, apart from weight decay.
        ``kept``: about how many elements of optimizer state the rule keeps per element of a parameter.
        ``shaping``: names of settings that change the shapes of the state, so that a run cannot resume with other
            values of them.
    """

    for_matrices: ClassVar[bool] = False
    for_stacks: ClassVar[bool] = True
    elementwise: ClassVar[bool] = False
    kept: ClassVar[float] = 0.0
    stays: ClassVar[bool] = False
    shaping: ClassVar[tuple[str, ...]] = ()

    def rare_seconds(self, held: Sequence[Held], timed: Timer) -> float:
        """Return the estimated seconds of work that only some updates do, such as a decomposition, as a mean over all
        updates.

        ``held``: the parameters. ``timed``: a function that runs a sample of the work and returns its seconds.
        """
        return 0.0

    def slots(self, held: Held) -> dict[str, Part]:
        """Return the initial optimizer state of the parameter ``held``: tensors by slot name."""
        return {}

    def update(
        self,
        held: Sequence[Held],
        grads: Sequence[torch.Tensor],
        lr: float,
        decay: float,
    ) -> None:
        """Update the parameters ``held`` once in place by their gradients ``grads``.

        ``lr``: learning rate. ``decay``: decoupled weight decay, which the rule multiplies by ``lr``.
        """
        raise NotImplementedError
