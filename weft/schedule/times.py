"""Times of a model's passes, from which kinds compute their cost: per stage, and of a vocabulary that is cut."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Times:
    """Times of one microbatch on one rank or stage, in any unit.

    Builders of schedules get the times of a rank, which spends ``forward / v`` on each of its ``v`` stages.

    Attributes:
        ``forward``: time of the forward pass.
        ``backward_input``, ``backward_weight``: times of the gradient of the input and of those of the weights.
        ``move``: time of a transfer from one rank to the next.
        ``dispatch``, ``combine``: times to move tokens in forward to experts on other ranks, and results back.
        ``back``: ratio of the backward times of ``dispatch`` and ``combine`` to their forward times.
        ``routed``: the experts' share of the computation, from 0 to 1.
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

    ``stages[s]``: times of stage ``s``. ``embedding`` and ``output``: times of the whole embedding and output layer
    where these are not in a stage, but cut into ``shares`` equal shares, one per rank.
    """

    stages: Sequence[Times]
    embedding: Times = NONE
    output: Times = NONE
    shares: int = 1

    def stage(self, stage: int) -> Times:
        """Return the times of ``stage``; zeros for a virtual stage, such as a share of the vocabulary."""
        return self.stages[stage] if 0 <= stage < len(self.stages) else NONE
