"""DistriFusion: each rank has a band, and sees the other bands as they were one step before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from weft.diffusion.sampling_scheme import SamplingScheme
from weft.registry import register
from weft.section import Section

if TYPE_CHECKING:
    from weft.diffusion.sampling_table import SamplingShape, SamplingTable


class DistrifusionSettings(Section):
    """Settings of DistriFusion: staleness, in steps, of the keys and values of other ranks' parts of the image. Another
    setting is the number of first steps without staleness.
    """

    age: int = Field(
        1,
        ge=0,
        description=(
            "How many steps old the keys and values of other ranks' bands are that a rank uses; 0: it waits "
            "for those of the same step."
        ),
    )
    synchronous: int = Field(
        1,
        ge=1,
        description=(
            "Number of steps at the beginning in which ranks wait for keys and values of the same step. It is "
            "one more than DistriFusion's warmup_steps."
        ),
    )


@register(
    "sampling-table",
    "distrifusion",
    settings=DistrifusionSettings,
    title="DistriFusion: displaced patches",
    paper="Li et al. 2024",
    recipe="weft sample --checkpoint RUN --layout cp=4 --table distrifusion",
    proof="tests/diffusion/test_sampling_tables.py",
    figure=(
        "after `10` steps error 0.0364, after `50` 0.0094 (`bench/sampling_tables.py`); "
        "simulated on 4 GPUs 3.53x, published 3.4x (`bench/sampling_tables.py`)"
    ),
)
class Distrifusion(SamplingScheme):
    """Cuts the image into bands, one per rank (Li et al. 2024). A band attends to its own fresh keys, and to all other
    bands' keys of the previous step. Old keys can travel while the next step is computed. The first steps are
    synchronous: they wait for fresh keys of all bands. Each rank has the whole model.
    """

    settings: DistrifusionSettings

    def table(self, shape: SamplingShape) -> SamplingTable:
        from weft.diffusion.sampling_table import (
            DenoisingRow,
            LayerRange,
            SamplingTable,
            cut_units,
            whole_block,
        )

        blocks, layers = cut_units(shape, shape.ranks), LayerRange(0, shape.layers)
        rows = []
        for step in range(shape.steps):
            late = step >= self.settings.synchronous
            age = min(self.settings.age, step) if late else 0
            for rank in range(shape.ranks):
                keys = tuple(
                    whole_block(blocks, block, 0 if block == rank else age)
                    for block in range(shape.ranks)
                )
                rows.append(DenoisingRow(step, rank, layers, (rank,), keys))
        return SamplingTable(
            "distrifusion", shape.ranks, shape.steps, shape.layers, blocks, tuple(rows), shape.unit
        )  # fmt: skip
