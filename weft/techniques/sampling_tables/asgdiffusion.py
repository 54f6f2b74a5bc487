"""ASGDiffusion: tiles of an image larger than those of training, guided by a small one that is one step older."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from weft.diffusion.sampling_scheme import SamplingScheme
from weft.registry import register
from weft.section import Section

if TYPE_CHECKING:
    from weft.diffusion.sampling_table import GuideBlock, SamplingShape, SamplingTable
    from weft.diffusion.tile_grid import TileGrid


class AsgdiffusionSettings(Section):
    """Settings of ASGDiffusion: size of the image, overlap of its tiles, and staleness of other ranks' predictions in
    steps. Further settings say how strongly, and for how many steps, a small copy of the image guides the tiles.
    """

    scale: int = Field(
        2,
        ge=1,
        description="Height and width of the image as a multiple of those of the training images.",
    )
    overlap: int = Field(
        0,
        ge=0,
        description="Number of rows or columns of patches that a tile shares with its neighbour.",
    )
    weight: float = Field(
        1.0,
        ge=0,
        le=1,
        description=(
            "Strength, from 0 to 1, with which the prediction for the reduced image corrects the tiles; 0: tiles are "
            "independent."
        ),
    )
    structure: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of the steps, from the first on, in which the reduced image guides the tiles.",
    )
    age: int = Field(
        1,
        ge=0,
        description=(
            "How many steps old the other ranks' predictions are that a rank uses; 0: it waits for those of "
            "the same step."
        ),
    )
    synchronous: int = Field(
        1,
        ge=1,
        description=(
            "Number of steps at the beginning in which ranks wait for each other's predictions of the same "
            "step."
        ),
    )


@register(
    "sampling-table",
    "asgdiffusion",
    settings=AsgdiffusionSettings,
    title="ASGDiffusion: guided tiles of a larger image",
    paper="Li et al. 2024",
    recipe="weft sample --checkpoint RUN --layout cp=5 --table asgdiffusion",
    proof="tests/diffusion/test_tiles.py",
    figure=(
        "error of age after `10` steps 0.0348, after `50` 0.0088 (`bench/sampling_tables.py`); a classifier of every "
        "other pixel knows digits of twice the size: guided in `50` of `50` steps 0.90, in none 0.13 "
        "(`bench/sampling_tables.py`)"
    ),
)
class Asgdiffusion(SamplingScheme):
    """Makes an image ``scale`` times as high and wide as in training out of tiles, each an image of the model's size
    (Li et al. 2024). The model also denoises a copy of the image that is reduced to that size. The copy's prediction
    corrects the predictions of the tiles in the first steps, so that they become parts of one image. One rank computes
    the copy beside the tiles of the other ranks, which use the copy's prediction of the step before. Where tiles
    overlap, the mean of their predictions counts. The paper weighs guidance by a map of the objects that texts attend
    to; here all places have the same weight.
    """

    settings: AsgdiffusionSettings

    def table(self, shape: SamplingShape) -> SamplingTable:
        from weft.diffusion.sampling_table import (
            DenoisingRow,
            LayerRange,
            SamplingTable,
            SamplingTableError,
            whole_block,
        )
        from weft.diffusion.tile_grid import TileGrid

        if shape.video:
            raise SamplingTableError(
                "asgdiffusion makes images, and this model makes videos; take video-infinity or dualparal"
            )
        grid = TileGrid(
            shape.units, shape.unit, self.settings.scale, self.settings.overlap
        )
        count = len(grid.corners)
        if shape.ranks > count + 1:
            raise SamplingTableError(
                f"{count} tiles and what guides them are work for at most {count + 1} ranks, and there are "
                f"{shape.ranks}; take fewer ranks, or a larger scale"
            )
        blocks, layers = (grid.tokens,) * (count + 1), LayerRange(0, shape.layers)
        guides = [self._guides(grid, shape.steps, step) for step in range(shape.steps)]
        read = {s - g.age for s, of in enumerate(guides) for t in of for g in t if g.block == count}  # fmt: skip
        rows = []
        for step in range(shape.steps):
            # the small image comes first, so that with age 0 others wait for it as briefly as they can
            for place, block in enumerate((count, *range(count))):
                if block == count and step not in read:
                    continue
                rank, seen = place * shape.ranks // (count + 1), (whole_block(blocks, block),)  # fmt: skip
                of_row = guides[step][block] if block < count else ()
                rows.append(DenoisingRow(step, rank, layers, (block,), seen, of_row))
        return SamplingTable(
            "asgdiffusion", shape.ranks, shape.steps, shape.layers, blocks, tuple(rows), shape.unit, None, grid
        )  # fmt: skip

    def _guides(
        self, grid: TileGrid, steps: int, step: int
    ) -> list[tuple[GuideBlock, ...]]:
        """Return for each tile the predictions that it takes in ``step``.

        They are those of tiles that overlap it, and that of the small image.
        """
        from weft.diffusion.sampling_table import GuideBlock

        count, settings = len(grid.corners), self.settings
        age = min(settings.age, step) if step >= settings.synchronous else 0
        small: tuple[GuideBlock, ...] = ()
        if settings.weight and step < round(settings.structure * steps):
            small = (GuideBlock(count, age, settings.weight),)
        return [
            (*(GuideBlock(other, age) for other in grid.sharing(tile)), *small)
            for tile in range(count)
        ]
