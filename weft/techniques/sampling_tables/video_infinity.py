"""Video-Infinity: each rank has a clip, and a frame sees those around it and some of the whole video."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from weft.diffusion.sampling_scheme import SamplingScheme
from weft.registry import register
from weft.section import Section

if TYPE_CHECKING:
    from weft.diffusion.sampling_table import KeyBlock, SamplingShape, SamplingTable


class VideoInfinitySettings(Section):
    """Settings of Video-Infinity: number of neighbouring frames, and of global frames, that a frame attends to."""

    padding: int = Field(
        8,
        ge=0,
        description="Number of frames, before and after a rank's own, to which its frames attend.",
    )
    everywhere: int = Field(
        16,
        ge=0,
        description="Number of frames, evenly spaced over the whole video, to which all frames attend.",
    )


@register(
    "sampling-table",
    "video-infinity",
    settings=VideoInfinitySettings,
    title="Video-Infinity: clips with dual-scope attention",
    paper="Tan et al. 2024",
    recipe="weft sample --checkpoint RUN --layout cp=4 --table video-infinity",
    proof="tests/diffusion/test_sampling_tables.py",
    figure="full window equal to one device; at most 2 x padding + everywhere frames per rank and layer",
)
class VideoInfinity(SamplingScheme):
    """Lets a frame attend to ``padding`` frames on either side and to ``everywhere`` frames spread over the whole video
    (Tan et al. 2024). Each rank has a clip of consecutive frames. It receives at most ``2 * padding + everywhere``
    frames per layer, however long the video is. A frame that is near as well as global counts once; beyond the ends of
    the video there are no frames.
    """

    settings: VideoInfinitySettings

    def table(self, shape: SamplingShape) -> SamplingTable:
        from weft.diffusion.sampling_table import (
            DenoisingRow,
            LayerRange,
            SamplingTable,
            cut_units,
        )

        blocks, layers = cut_units(shape, shape.ranks), LayerRange(0, shape.layers)
        keys = [self._seen(blocks, shape, rank) for rank in range(shape.ranks)]
        rows = tuple(
            DenoisingRow(step, rank, layers, (rank,), keys[rank])
            for step in range(shape.steps)
            for rank in range(shape.ranks)
        )
        window = min(self.settings.padding, shape.units)
        whole = window >= shape.units - 1
        return SamplingTable(
            "video-infinity", shape.ranks, shape.steps, shape.layers, blocks, rows, shape.unit,
            None if whole else window,
        )  # fmt: skip

    def _seen(
        self, blocks: tuple[int, ...], shape: SamplingShape, rank: int
    ) -> tuple[KeyBlock, ...]:
        """Return the keys of the clip of ``rank``: runs of frames of one clip that are all global, or all not."""
        from weft.diffusion.sampling_table import KeyBlock

        starts = [sum(blocks[:block]) // shape.unit for block in range(len(blocks) + 1)]
        low = starts[rank] - self.settings.padding
        high = starts[rank + 1] + self.settings.padding
        count = min(self.settings.everywhere, shape.units)
        spread = {frame * shape.units // count for frame in range(count)}
        keys: list[KeyBlock] = []
        for block in range(len(blocks)):
            for frame in range(starts[block], starts[block + 1]):
                far = frame in spread
                if not far and not low <= frame < high:
                    continue
                first = (frame - starts[block]) * shape.unit
                if keys and keys[-1].block == block and keys[-1].end == first and keys[-1].far == far:  # fmt: skip
                    keys[-1] = keys[-1]._replace(end=first + shape.unit)
                else:
                    keys.append(
                        KeyBlock(block, first, first + shape.unit, 0, False, far)
                    )
        return tuple(keys)
