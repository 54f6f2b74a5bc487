"""DualParal: a queue of blocks of frames, each one noise level behind the one before, through a pipeline of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from weft.diffusion.sampling_scheme import SamplingScheme
from weft.registry import register
from weft.section import Section

if TYPE_CHECKING:
    from weft.diffusion.sampling_table import KeyBlock, SamplingShape, SamplingTable


class DualparalSettings(Section):
    """Settings of DualParal: lengths of blocks and of their context, in frames."""

    frames: int = Field(
        8,
        ge=1,
        description="Number of frames in a block. Blocks pass the pipeline of ranks one after the other.",
    )
    context: int = Field(
        8,
        ge=0,
        description="Number of frames of the previous and of the next block to which a block attends.",
    )


@register(
    "sampling-table",
    "dualparal",
    settings=DualparalSettings,
    title="DualParal: blocks of frames through a pipeline",
    paper="Wang et al. 2025",
    recipe="weft sample --checkpoint RUN --layout cp=4 --table dualparal",
    proof="tests/diffusion/test_sampling_tables.py",
    figure=(
        "the same memory for 8 and 24 blocks; without context equal to each block alone; simulated on 8 GPUs 6.02x and "
        "7.14x by context, published up to 6.54x (`bench/sampling_tables.py`)"
    ),
)
class Dualparal(SamplingScheme):
    """Denoises a long video as a queue of blocks of frames, in memory that does not depend on its length (Wang et al.
    2025). In every iteration a block of pure noise enters the queue, all blocks in it take one step, and the cleanest
    leaves. The layers are cut over the ranks; blocks stream through them, the noisiest first. A block also attends to
    frames of its neighbours. The last frames of the block before it are computed together with it. The first frames of
    the block after it have just passed the rank, so that their keys are still there. Without context every block is
    sampled as if it were alone.
    """

    settings: DualparalSettings

    def table(self, shape: SamplingShape) -> SamplingTable:
        from weft.diffusion.sampling_table import (
            DenoisingRow,
            SamplingTable,
            SamplingTableError,
            cut_layers,
        )

        frames, context = self.settings.frames, self.settings.context
        if context > frames:
            raise SamplingTableError(
                f"a context of {context} frames is longer than a block of {frames}; take a shorter one"
            )
        first = min(frames + context, shape.units)
        if (shape.units - first) % frames:
            raise SamplingTableError(
                f"{shape.units} frames are not a first block of {first} and whole blocks of {frames}; "
                f"take {first + (shape.units - first) // frames * frames} frames"
            )
        count = 1 + (shape.units - first) // frames
        blocks = tuple(shape.unit * n for n in (first, *[frames] * (count - 1)))
        stages, rows = cut_layers(shape.layers, shape.ranks), []
        for iteration in range(shape.steps + count - 1):
            entered = min(iteration, count - 1)
            for block in range(entered, max(-1, iteration - shape.steps), -1):
                step = iteration - block
                keys = self._seen(blocks, shape, block, step)
                for rank, layers in enumerate(stages):
                    rows.append(DenoisingRow(step, rank, layers, (block,), keys))
        return SamplingTable(
            "dualparal", shape.ranks, shape.steps, shape.layers, blocks, tuple(rows), shape.unit
        )  # fmt: skip

    def _seen(
        self, blocks: tuple[int, ...], shape: SamplingShape, block: int, step: int
    ) -> tuple[KeyBlock, ...]:
        """Return the keys of a block: the end of the block before, its own, and the begin of the next one."""
        from weft.diffusion.sampling_table import KeyBlock

        keys = [KeyBlock(block, 0, blocks[block])]
        tokens = self.settings.context * shape.unit
        if tokens and block:
            end = blocks[block - 1]
            keys.insert(0, KeyBlock(block - 1, end - tokens, end, -1, joined=True))
        # the next block enters one iteration later
        if tokens and block + 1 < len(blocks) and step:
            keys.append(KeyBlock(block + 1, 0, tokens, 1))
        return tuple(keys)

    def noise_blocks(self, shape: SamplingShape) -> int:
        return self.settings.context * shape.unit
