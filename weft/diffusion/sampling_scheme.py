"""The interface of systems that sample over ranks (``weft/techniques/sampling_tables/``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.section import Section

if TYPE_CHECKING:
    from weft.diffusion.sampling_table import SamplingShape, SamplingTable


class SamplingSettings(Section):
    """Settings of a sampling scheme that has none of its own: an empty section."""


class SamplingScheme:
    """Base class of schemes for sampling over ranks.

    A scheme decides which rank computes which tokens, and in which earlier step the keys were computed that these
    tokens attend to. ``settings``: the technique's settings, as ``--table NAME:KEY=VALUE`` gives them.
    """

    def __init__(self, settings: Section) -> None:
        self.settings = settings

    def table(self, shape: SamplingShape) -> SamplingTable:
        """Return the sampling table of this scheme for the sizes in ``shape``.

        Raises :class:`weft.diffusion.sampling_table.SamplingTableError` if there is none.
        """
        raise NotImplementedError

    def noise_blocks(self, shape: SamplingShape) -> int:
        """Return how many tokens at the end of a block the next block sees as its context, if the scheme uses
        coordinated noise.

        With 0, the noise of each token is drawn independently (:mod:`weft.diffusion.coordinated_noise`).
        """
        return 0
