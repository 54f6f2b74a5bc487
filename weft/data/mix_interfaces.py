"""Interfaces of mixtures of sources and of their plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class SourceMixture(Protocol):
    """Interface of a mixture (kind ``mixture``): which share of the samples each source has, and when.

    A mixture is built from its description alone, so that a checkpoint that holds the description knows the order of
    the data.
    """

    @classmethod
    def describe(cls, data: Any, facts: Any) -> dict[str, Any]:
        """Return the description of the mixture that the section ``data`` asks for, as JSON values.

        ``data``: the section ``[data]`` with the technique's settings. ``facts``: what is known of the sources, a
        :class:`weft.data.mix_plan.MixFacts`. The description counts in samples, so that it means the same for every
        batch size. Raises :class:`UsageError`.
        """

    def __init__(self, about: Mapping[str, Any]) -> None:
        """Build the mixture from its description ``about``."""

    def shares(self, first: int, last: int) -> Sequence[float]:
        """Return the mean share of each source in the samples ``first`` to ``last - 1``; the shares add up to 1."""


class MixPlan(Protocol):
    """Interface of a plan of a mixture.

    ``block``: number of samples of a block.
    """

    @property
    def block(self) -> int:
        """Number of samples of a block."""

    def drawn(self, blocks: int) -> list[int]:
        """Return how many samples of each source are in the first ``blocks`` blocks."""
