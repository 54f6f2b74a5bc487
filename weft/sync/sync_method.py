"""The interface of sync methods: what islands send at the end of a round, and how they use the answer.

A method works on flat vectors of parameters ``theta``, however they are cut. What outlasts a round is kept in slots,
such as ``anchor``, the parameters that all islands had when the round began. The *difference* (the pseudo-gradient) is
``anchor`` minus ``theta``: what the island has learned since, with the sign of a gradient. An *answer* is the mean of
the vectors sent, over the islands that took part. :mod:`weft.train.islands` decides when rounds begin and end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from weft.errors import UsageError

if TYPE_CHECKING:
    import torch

    from weft.recipe import Sync
    from weft.sync.simulated_round import Round

Slots = Mapping[str, "torch.Tensor"]


class SyncMethod:
    """Base of the methods by which islands agree (``sync.update``), each built with the recipe's section ``[sync]``.

    An island sends a vector at the end of a round, and the mean of all islands' vectors is the round's *answer*.

    Attributes:
        ``slots``: names of the slots: tensors that each island keeps for each parameter. ``anchor`` begins as a copy of
            the parameter, all others as zeros.
        ``shared``: those slots that are the same on all islands between two rounds. If an island's shared slots are
            found to differ, they are replaced by the slots of most islands.
        ``following``: those slots that follow the island's own parameters, and move with them when a run ends with the
            mean over all islands.
        ``late``: whether the answer of a round is applied when the next round ends; the first answer is then zeros.
        ``partners``: the values of ``sync.partner`` that the method supports.
        ``in_pairs``: whether islands exchange in random pairs, whatever ``sync.partner`` says.
        ``in_fragments``: whether parameters can be exchanged in fragments, and answers applied ``sync.delay`` steps
            later.
        ``in_rounds``: whether all islands take part in every round, so that one that is lost can be left out. If not,
            the method brings a phase of its own (:meth:`filler`), and losing an island ends the run.
        ``is_mean``: whether islands continue with the mean of their parameters. Islands that agree in every step can
            then exchange gradients instead.
    """

    slots: tuple[str, ...] = ("anchor",)
    shared: tuple[str, ...] = ("anchor",)
    following: ClassVar[tuple[str, ...]] = ()
    late: ClassVar[bool] = False
    partners: ClassVar[tuple[str, ...]] = ("all",)
    in_pairs: ClassVar[bool] = False
    in_fragments: ClassVar[bool] = False
    is_mean: ClassVar[bool] = False
    in_rounds: ClassVar[bool] = True

    def __init__(self, settings: Sync) -> None:
        self.settings = settings

    def initial(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return the initial tensor of the slot ``name``: a copy of ``values`` for the slot ``anchor``, else zeros.

        ``values``: present values of the parameter to which the slot belongs. A subclass may return other values.
        """
        return values.clone() if name == "anchor" else values.new_zeros(values.shape)

    def filler(self, context: Any) -> Any:
        """Return the object that fills the phase after a step, for a method without rounds.

        ``context``: the :class:`weft.train.step.StepContext` of the run, whose ``presence`` is set.
        """
        raise NotImplementedError

    def sent(self, theta: torch.Tensor, slots: Slots) -> torch.Tensor:
        """Return the vector that an island sends at the end of a round.

        By default it is the tensor ``anchor`` of ``slots`` minus ``theta``: how far the parameters have moved in the
        round. ``theta``: the island's parameters as a flat vector; ``slots``: tensors kept with the parameters, by
        name.
        """
        return slots["anchor"] - theta

    def applied(
        self, theta: torch.Tensor, slots: Slots, answer: torch.Tensor, islands: int
    ) -> torch.Tensor:
        """Return the island's next parameters, a flat vector, and change the ``slots`` in place.

        ``theta``: the island's present parameters, flat; ``slots``: tensors kept with the parameters, by name;
        ``answer``: the mean of the vectors that :meth:`sent` returned on the islands that took part; ``islands``: how
        many these are.
        """
        raise NotImplementedError

    def simulate(self, at: Round) -> None:
        """Change one parameter of all simulated islands as the end of a round does.

        ``weft verify`` compares the parameters of a real run with the result.

        ``at``: the parameter on all islands. An implementation must be independent of the method's other code, so that
        the comparison finds mistakes in that code.
        """
        raise UsageError(
            f"sync.update = {self.settings.update!r} has no SyncMethod.simulate, so that there is nothing to compare "
            "with; write one, or verify with --set sync.update=average"
        )
