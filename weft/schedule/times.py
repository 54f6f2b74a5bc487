"""Times of a model's passes, from which kinds compute their cost: per stage, and of a vocabulary that is cut."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Times:
    """Times of one microbatch on one rank or stage, in any unit.

    Builders get the times of a rank, which spends ``forward / v`` on each of its ``v`` stages. ``move``: time of a
    transfer from one rank to the next. ``dispatch`` and ``combine``: moving tokens to the experts of other ranks and
    back in forward; backward takes ``back`` times as long. ``routed``: the experts' share of the computation.
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
        """Return times with every computation and exchange ``factor`` times as long."""
        names = ("forward", "backward_input", "backward_weight", "dispatch", "combine")
        return replace(self, **{name: getattr(self, name) * factor for name in names})


EQUAL = Times()
NONE = Times(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class ModelTimes:
    """Times of one microbatch in a whole model, from which a :class:`weft.schedule.kinds.Kind` computes its cost.

    ``stages[s]``: times of stage ``s``. ``embedding`` and ``output``: times of these whole layers, if they are cut over
    all ranks into ``shares`` instead of being on the first and last stage.
    """

    stages: Sequence[Times]
    embedding: Times = NONE
    output: Times = NONE
    shares: int = 1

    def stage(self, stage: int) -> Times:
        """Return the times of ``stage``; zeros for a virtual stage, such as a share of the vocabulary."""
        return self.stages[stage] if 0 <= stage < len(self.stages) else NONE
