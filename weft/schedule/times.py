"""What the work of a model takes, as costs of kinds ask for it: per stage, and of the vocabulary where it is cut."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Times:
    """Of one microbatch on one rank or stage, in any unit; ``move``: from one rank to the next.

    As an argument of builders these are times of a rank, which spends ``forward / v`` on each of ``v`` stages.
    ``dispatch`` and ``combine``: tokens to the experts of other ranks, and back, in forward; backward takes ``back``
    times as long for that. ``routed``: the share of the computation that is between the two.
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
        """The same with every computation and exchange ``factor`` times as long."""
        names = ("forward", "backward_input", "backward_weight", "dispatch", "combine")
        return replace(self, **{name: getattr(self, name) * factor for name in names})


EQUAL = Times()
NONE = Times(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class ModelTimes:
    """Of one microbatch in a whole model, as what a :class:`weft.schedule.kinds.Kind` costs is computed from it.

    ``stages[s]``: of stage ``s``. Where embedding and output layer are cut over all ranks instead of standing on the
    first and last stage: ``embedding`` and ``output``, both whole, and ``shares``, the number of cuts.
    """

    stages: Sequence[Times]
    embedding: Times = NONE
    output: Times = NONE
    shares: int = 1

    def stage(self, stage: int) -> Times:
        """Of ``stage``; nothing for what is none of the model's, such as a share of the vocabulary."""
        return self.stages[stage] if 0 <= stage < len(self.stages) else NONE
