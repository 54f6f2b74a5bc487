"""Interfaces of mixtures of sources and of their plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class SourceMixture(Protocol):
    """Interface of a mixture (kind ``mixture``): which share of the samples each source has, and when.

    A mixture is built from its description alone. A checkpoint keeps the description, and so determines the order of
    the data.
    """

    @classmethod
    def describe(cls, data: Any, facts: Any) -> dict[str, Any]:
        """Return the description of the mixture that the section ``data`` asks for, as JSON values.

        ``data``: the section ``[data]`` with the technique's settings. ``facts``: what is known of the sources, a
        :class:`weft.data.mix_plan.MixFacts`. The description counts in samples, so that it means the same for every
        batch size. Raises :class:`UsageError` for settings that do not fit the sources.
        """

    def __init__(self, about: Mapping[str, Any]) -> None:
        """Build the mixture from its description ``about``."""

    def shares(self, first: int, last: int) -> Sequence[float]:
        """Return the mean share of each source in the samples ``first`` to ``last - 1``; the shares add up to 1."""


class MixPlan(Protocol):
    """Interface of a mixture's plan, which divides samples among sources in blocks of :attr:`block` samples."""

    @property
    def block(self) -> int:
        """Number of successive samples that form a block, within which every source has its share."""

    def drawn(self, blocks: int) -> list[int]:
        """Return how many samples each source has in the first ``blocks`` blocks together, in the sources' order."""
