"""What the work of a model takes, as costs of kinds ask for it: per stage, and of the vocabulary where it is cut."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """Of one microbatch on one rank or stage, in any unit; ``move``: from one rank to the next.

    As an argument of builders these are times of a rank, which spends ``forward / v`` on each of ``v`` stages.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    move: float = 0.0

    @property
    def backward(self) -> float:
        return self.backward_input + self.backward_weight

    def scaled(self, factor: float) -> "Times":
        """The same with every computation ``factor`` times as long."""
        return Times(self.forward * factor, self.backward_input * factor, self.backward_weight * factor, self.move)


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
