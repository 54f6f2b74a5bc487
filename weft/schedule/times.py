"""Times of a model's passes, from which kinds compute their cost: per stage, and of a vocabulary that is cut."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Times:
    """Times of one microbatch on one rank or at one stage. All times have the same unit, which the caller chooses.

    Where the times are those of a rank with ``v`` stages, as for builders of schedules, each stage takes ``1 / v`` of
    them.

    Attributes:
        ``forward``: time of the forward pass.
        ``backward_input``: time to compute the gradient of the input.
        ``backward_weight``: time to compute the gradients of the weights.
        ``move``: time of a transfer from one rank to the next.
        ``dispatch``: time in which a forward's tokens travel to experts on other ranks.
        ``combine``: time in which the experts' results travel back in a forward.
        ``back``: factor by which ``dispatch`` and ``combine`` are multiplied to get the times of these transfers in
            backward.
        ``routed``: share of the computation that the experts do, from 0 to 1.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    move: float = 0.0
    dispatch: float = 0.0
    combine: float = 0.0
    back: float = 1.0
    routed: float = 0.5

    @property
    def backward(self) -> float:
        return self.backward_input + self.backward_weight

    def scaled(self, factor: float) -> "Times":
        """Return a copy with every computation and exchange of tokens ``factor`` times as long; ``move`` stays."""
        names = ("forward", "backward_input", "backward_weight", "dispatch", "combine")
        return replace(self, **{name: getattr(self, name) * factor for name in names})


EQUAL = Times()
NONE = Times(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class ModelTimes:
    """Times of one microbatch in a whole model, from which a :class:`weft.schedule.kinds.Kind` computes its cost.

    ``stages[s]``: times of stage ``s``. The embedding and the output layer are either parts of stages, and count there,
    or every rank has an equal share of them. In the second case ``embedding`` and ``output`` are the times of all
    shares together, and ``shares`` is the number of shares (ranks).
    """

    stages: Sequence[Times]
    embedding: Times = NONE
    output: Times = NONE
    shares: int = 1

    def stage(self, stage: int) -> Times:
        """Return the times of ``stage``; zeros for a virtual stage, such as a share of the vocabulary."""
        return self.stages[stage] if 0 <= stage < len(self.stages) else NONE
