"""The phases of a training step, and the methods that an object needs to fill each of them."""

from __future__ import annotations

from enum import Flag, auto
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from weft.data.batch import Batch
    from weft.train.step_values import Agreed, StepInput, StepResult


class Phase(Flag):
    """A phase of a training step. The lower-case name of a phase is the name of the method that fills it.

    Attributes:
        ``GRADIENTS``: forward and backward over the batches leave gradients on this rank.
        ``AGREE``: ranks sum their gradients, and learn loss, norm and whether a rank asks to end the run.
        ``UPDATE``: parameters and optimizer state change.
        ``AFTER``: work between this step and the next, such as an exchange between islands.
    """

    #: Passes over the batches leave gradients on this rank.
    GRADIENTS = auto()
    #: Ranks combine their gradients, and learn loss, norm and whether a rank wishes to stop.
    AGREE = auto()
    #: Parameters and optimizer state change.
    UPDATE = auto()
    #: Something happens between this step and the next one.
    AFTER = auto()

    def __str__(self) -> str:
        names = [(phase.name or "").lower() for phase in self]
        return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


STEP = Phase.GRADIENTS | Phase.AGREE | Phase.UPDATE


class GradientPhase(Protocol):
    """Interface of the first phase of a step: forward and backward passes leave gradients on this rank."""

    def gradients(self, given: StepInput, agree: AgreePhase) -> torch.Tensor:
        """Run forward and backward over the batches ``given``, and leave the gradients on this rank.

        ``agree``: the object that fills the next phase, which sums over ranks. Returns this rank's share of the step's
        mean loss. A technique that fills both phases may return other numbers for its own ``agree``, such as the losses
        at two points, from which ``agree`` computes a slope.
        """


class AgreePhase(Protocol):
    """Interface of the second phase of a step: ranks sum their gradients, and learn the step's result."""

    def label_weight(self, batches: Sequence[Batch]) -> torch.Tensor | None:
        """Return the number by which the plain gradient phase divides the summed loss of a step.

        None stands for the sum of the labels' weights over all ranks. ``batches``: this rank's batches of the step.
        """

    def beyond(self, number: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``number`` over all islands that share one update.

        ``number``: a total over the ranks of this island. Without islands ``number`` itself is returned. The plain
        gradient phase calls this method.
        """

    def agree(self, given: StepInput, shares: torch.Tensor) -> Agreed:
        """Sum the ranks' gradients, and sum the step's loss, squared gradient norm and counts over the ranks.

        ``shares``: the tensor that the gradient phase has returned. The method calls ``before_update`` of the step's
        :class:`~weft.train.step.StepContext` before this rank contributes to the sums. ``given``: the step's input
        on this rank.
        """


class UpdatePhase(Protocol):
    """Interface of the third phase of a step: parameters and optimizer state change, on all ranks alike."""

    def update(self, given: StepInput, agreed: Agreed) -> list[StepResult]:
        """Update the parameters with the gradients in ``agreed``, unless the step is skipped.

        Returns the results, of this step or earlier ones, that have become final, oldest first. ``given``: the
        step's input on this rank.
        """


class AfterPhase(Protocol):
    """Interface of an optional last phase: work between one step and the next, such as an exchange between islands."""

    def after(
        self, results: list[StepResult], finish: Callable[[], list[StepResult]]
    ) -> list[StepResult]:
        """Do the work between steps, and return the results that have become final, oldest first.

        ``results``: the results that the update phase has returned. ``finish``: completes the step's update, and
        returns the results that were not yet final.
        """

    def end(self, results: list[StepResult]) -> list[StepResult]:
        """Wait for work of this phase that is under way, because the run may end here.

        ``results``: the results of the last steps. Returns these results, in which the phase may have changed values.
        """
