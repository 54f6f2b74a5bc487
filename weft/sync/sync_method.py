"""The interface of sync methods: what islands send at the end of a round, and how they use the answer.

A method works on flat vectors of parameters ``theta``, however they are cut. What outlasts a round is kept in slots,
such as ``anchor``, the parameters that all islands had when the round began. The *difference* (the pseudo-gradient) is
``anchor`` minus ``theta``: what the island has learned since, with the sign of a gradient. An *answer* is the mean of
the vectors sent, over the islands that took part. :mod:`weft.train.islands` decides when rounds begin and end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from weft.errors import UsageError

if TYPE_CHECKING:
    import torch

    from weft.recipe import Sync
    from weft.sync.simulated_round import Round

Slots = Mapping[str, "torch.Tensor"]


class SyncMethod:
    """Method by which islands agree (``sync.update``). A method is built with the section ``[sync]``.

    ``slots``: the names of the slots that the method needs; ``anchor`` begins as the parameters, others as zeros.
    ``shared``: those that are the same on all islands between two rounds. An island that has others is given the right
    ones, and sends its difference from the right anchor. ``late``: the answer of a round is applied when the next one
    ends; in the first it is zeros. ``partners``: the values of ``sync.partner`` that the method goes with.
    ``in_pairs``: islands exchange in random pairs, whatever ``sync.partner`` says. ``in_fragments``: parameters can go
    in fragments, and answers can be applied ``sync.delay`` steps after a round. ``is_mean``: islands continue with the
    mean of their parameters, so that those who agree in every step can exchange gradients instead.
    """

    slots: tuple[str, ...] = ("anchor",)
    shared: tuple[str, ...] = ("anchor",)
    late: ClassVar[bool] = False
    partners: ClassVar[tuple[str, ...]] = ("all",)
    in_pairs: ClassVar[bool] = False
    in_fragments: ClassVar[bool] = False
    is_mean: ClassVar[bool] = False

    def __init__(self, settings: Sync) -> None:
        self.settings = settings

    def sent(self, theta: torch.Tensor, slots: Slots) -> torch.Tensor:
        """Return the vector that an island sends at the end of a round, by default its difference, ``anchor`` minus
        ``theta``.
        """
        return slots["anchor"] - theta

    def applied(
        self, theta: torch.Tensor, slots: Slots, answer: torch.Tensor, islands: int
    ) -> torch.Tensor:
        """Return the island's next parameters, and change the ``slots`` in place.

        ``theta``: its present parameters; ``answer``: the mean of the vectors sent; ``islands``: how many islands took
        part.
        """
        raise NotImplementedError

    def simulate(self, at: Round) -> None:
        """Change one parameter of all islands as a round does: the reference against which ``weft verify`` compares.

        ``at``: the parameter on all islands. The body must not use the method's other code
        (:mod:`weft.prove.simulated`).
        """
        raise UsageError(
            f"sync.update = {self.settings.update!r} has no SyncMethod.simulate, so that there is nothing to compare "
            "with; write one, or verify with --set sync.update=average"
        )
