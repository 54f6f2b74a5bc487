"""PipeFusion: patches flow through stages of layers, and see fresh keys of the patches before them in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from weft.diffusion.sampling_scheme import SamplingScheme
from weft.registry import register
from weft.section import Section

if TYPE_CHECKING:
    from weft.diffusion.sampling_table import SamplingShape, SamplingTable


class PipefusionSettings(Section):
    """Settings of PipeFusion: into how many patches the image is cut, how many steps at the beginning use no stale keys
    and values, and how many steps old these are in later steps.
    """

    patches: int = Field(
        0,
        ge=0,
        description="Number of parts into which the image is cut for the pipeline; 0: as many as there are ranks.",
    )
    synchronous: int = Field(
        1,
        ge=1,
        description="Number of steps at the beginning in which the image passes the pipeline as a whole.",
    )
    age: int = Field(
        1,
        ge=0,
        le=1,
        description=(
            "How many steps old the keys and values are that a part uses of the parts after it; 0: in every "
            "step the image passes the pipeline as a whole."
        ),
    )


@register(
    "sampling-table",
    "pipefusion",
    settings=PipefusionSettings,
    title="PipeFusion: patches through a pipeline",
    paper="Fang et al. 2024",
    recipe="weft sample --checkpoint RUN --layout cp=4 --table pipefusion",
    proof="tests/diffusion/test_sampling_tables.py",
    figure=(
        "after `10` steps error 0.0272, after `50` 0.0074 (`bench/sampling_tables.py`); "
        "tokens x width from stage to stage, as the formula"
    ),
)
class Pipefusion(SamplingScheme):
    """Cuts the layers into stages and lets the patches of an image flow through them like microbatches (Fang et al.
    2024). A patch attends to fresh keys of the patches that have passed its stage in this step, and to the other
    patches' keys of the previous step. Keys stay on their stage; only activations travel, from a stage to the next.
    Each rank has its own layers.
    """

    settings: PipefusionSettings

    def table(self, shape: SamplingShape) -> SamplingTable:
        from weft.diffusion.sampling_table import (
            DenoisingRow,
            SamplingTable,
            cut_layers,
            cut_units,
            whole_block,
        )

        blocks = cut_units(shape, self.settings.patches or shape.ranks)
        stages, every = cut_layers(shape.layers, shape.ranks), range(len(blocks))
        rows = []
        for step in range(shape.steps):
            if step < self.settings.synchronous or not self.settings.age:
                fresh = tuple(whole_block(blocks, block) for block in every)
                for rank, layers in enumerate(stages):
                    rows.append(DenoisingRow(step, rank, layers, tuple(every), fresh))
                continue
            for patch in every:
                keys = tuple(
                    whole_block(blocks, block, int(block > patch)) for block in every
                )
                for rank, layers in enumerate(stages):
                    rows.append(DenoisingRow(step, rank, layers, (patch,), keys))
        return SamplingTable(
            "pipefusion", shape.ranks, shape.steps, shape.layers, blocks, tuple(rows), shape.unit
        )  # fmt: skip
