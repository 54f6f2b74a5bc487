"""The interface of aggregators: rules by which the gradients of replicas are combined."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

    from weft.recipe import Resilience


class Aggregator:
    """Rule that combines the gradients of replicas, some of which may be faulty (``resilience.aggregate``).

    It is built with the recipe's section ``[resilience]``. A rule that is a weighted sum implements :meth:`weights`;
    any other rule implements :meth:`combined`.

    ``each``, ``more``: numbers from which the least number of replicas follows. If ``faulty`` replicas may be faulty,
    the rule needs at least ``each * faulty + more`` replicas.
    """

    each: ClassVar[int] = 2
    more: ClassVar[int] = 1

    def __init__(self, settings: Resilience) -> None:
        self.settings = settings

    def combined(
        self, chunks: torch.Tensor, gram: torch.Tensor, faulty: int
    ) -> torch.Tensor:
        """Return the combination of the replicas' gradients, ``[elements]``, for one chunk of the gradient's elements.

        ``chunks``: this chunk of each replica's gradient, ``[replicas, elements]``. ``gram``: inner products of the
        whole gradients, ``[replicas, replicas]``, float64, on the CPU. ``faulty``: how many of these replicas may be
        faulty.
        """
        return self.weights(gram, faulty).to(chunks) @ chunks

    def weights(self, gram: torch.Tensor, faulty: int) -> torch.Tensor:
        """Return the weight of each replica's gradient in the combined gradient, ``[replicas]``.

        ``gram``: inner products of the gradients, ``[replicas, replicas]``; ``faulty``: how many replicas may be
        faulty.
        """
        raise NotImplementedError
