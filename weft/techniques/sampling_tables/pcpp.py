"""PCPP: each rank sees only the parts of the two neighbouring bands that are nearest, one step old."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from weft.diffusion.sampling_scheme import SamplingScheme
from weft.registry import register
from weft.section import Section

if TYPE_CHECKING:
    from weft.diffusion.sampling_table import KeyBlock, SamplingShape, SamplingTable


class PcppSettings(Section):
    """Settings of PCPP: the part of the neighbouring bands of the image that a rank sees, and the staleness of its keys
    and values in steps. Another setting is the number of first steps without staleness.
    """

    part: float = Field(
        0.5,
        ge=0,
        le=1,
        description=(
            "Share of each neighbouring band whose keys and values a rank reads, nearest rows first; 0: ranks "
            "exchange nothing."
        ),
    )
    age: int = Field(
        1,
        ge=0,
        description=(
            "How many steps old the keys and values of neighbouring bands are that a rank uses; 0: it waits for those "
            "of the same step."
        ),
    )
    synchronous: int = Field(
        1,
        ge=1,
        description="Number of steps at the beginning in which every rank reads all keys and values of the same step.",
    )


@register(
    "sampling-table",
    "pcpp",
    settings=PcppSettings,
    title="PCPP: partially conditioned patches",
    paper="Zhang et al. 2024",
    recipe="weft sample --checkpoint RUN --layout cp=4 --table pcpp",
    proof="tests/diffusion/test_sampling_tables.py",
    figure=(
        "after `10` steps error 0.2602, after `50` 0.2681 (`bench/sampling_tables.py`); "
        "simulated on 8 GPUs 7.78x, published 8.02x (`bench/sampling_tables.py`)"
    ),
)
class Pcpp(SamplingScheme):
    """Cuts the image into bands, one per rank (Zhang et al. 2024). A band attends to itself, and to parts of its two
    neighbours with keys that are one step old. Less travels than in DistriFusion, and only between neighbours. The
    parts that a band does not see cause an error that more steps do not make smaller, unlike the error of old keys.
    """

    settings: PcppSettings

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
            for rank in range(shape.ranks):
                if step < self.settings.synchronous:
                    seen = [whole_block(blocks, b) for b in range(shape.ranks)]
                else:
                    seen = [whole_block(blocks, rank), *self._near(blocks, rank, step)]
                rows.append(
                    DenoisingRow(step, rank, layers, (rank,), tuple(sorted(seen)))
                )
        return SamplingTable(
            "pcpp", shape.ranks, shape.steps, shape.layers, blocks, tuple(rows), shape.unit
        )  # fmt: skip

    def _near(self, blocks: tuple[int, ...], rank: int, step: int) -> list[KeyBlock]:
        """Return what the band of ``rank`` sees of its neighbours: the end of the one before, the begin of the next."""
        from weft.diffusion.sampling_table import KeyBlock

        age, near = min(self.settings.age, step), []
        for block in (rank - 1, rank + 1):
            if not 0 <= block < len(blocks):
                continue
            tokens = round(self.settings.part * blocks[block])
            first = blocks[block] - tokens if block < rank else 0
            if tokens:
                near.append(KeyBlock(block, first, first + tokens, age))
        return near
