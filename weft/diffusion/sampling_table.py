"""Sampling over ranks as data: which rank computes which tokens of which step, from keys of which age.

A sampler is a loop over noise levels around a denoiser. Its tokens are cut into blocks: bands of an image, or frames of
a video. A row of a table is some layers of the denoiser for some blocks in one step, with the blocks whose keys and
values these attend to. Each of those has an *age* (0: of this step, 1: of the step before) and a range of its tokens.
A table whose ages are all 0, and whose ranges are whole, computes what one device computes. Every lossy system is such
a table with other ages or ranges. Which bytes travel follows from the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from weft.errors import WeftError

if TYPE_CHECKING:
    from weft.diffusion.tile_grid import TileGrid


class LayerRange(NamedTuple):
    """A range of a denoiser's layers: from index ``first`` up to but not including ``end``."""

    first: int
    end: int


class KeyBlock(NamedTuple):
    """Keys and values that a row attends to: tokens ``first`` to ``end - 1`` of a block, ``age`` steps old.

    Attributes:
        ``block``: index of the block.
        ``first``, ``end``: range of tokens within the block.
        ``age``: how many steps before the row's step they were computed, counted in steps of their own block. With
            ``joined`` it may be -1: latents that are one step ahead.
        ``joined``: whether the block's latents join the row's own tokens as further queries, so that their keys are
            computed once more in this row. Otherwise the keys are those that the block's own row has computed.
        ``far``: whether the row's queries see them at any distance, if the table has a window.
    """

    block: int
    first: int
    end: int
    age: int = 0
    joined: bool = False
    far: bool = False


class GuideBlock(NamedTuple):
    """Prediction for another block that corrects a row's own prediction, before the row's latents are updated.

    Attributes:
        ``block``: index of the other block: another tile, or the small image that guides all tiles.
        ``age``: how many steps before the row's step it was predicted.
        ``weight``: weight of the correction, if the block is the small image.
    """

    block: int
    age: int = 0
    weight: float = 1.0


class DenoisingRow(NamedTuple):
    """Entry of a sampling table: one rank computes some layers of the denoiser for some blocks of tokens in one step.

    Attributes:
        ``step``: the denoising step of the blocks, from 0; blocks of a video may be at different steps.
        ``rank``: the rank that computes.
        ``layers``: the layers that are computed, in order.
        ``queries``: indices of the blocks whose tokens are computed together, in ascending order.
        ``keys``: the keys that they attend to, their own included.
        ``guides``: predictions for other blocks, in a table of tiles.
    """

    step: int
    rank: int
    layers: LayerRange
    queries: tuple[int, ...]
    keys: tuple[KeyBlock, ...]
    guides: tuple[GuideBlock, ...] = ()


class SamplingTableError(WeftError):
    """Raised for a table that does not compute a sample; the message names the row, the block or the rank."""


@dataclass(frozen=True)
class SamplingShape:
    """Size of a sampling problem: steps, layers, tokens and ranks.

    Attributes:
        ``ranks``: number of ranks.
        ``steps``: number of denoising steps.
        ``layers``: number of the denoiser's layers.
        ``units``: number of rows of patches of an image, or of frames of a video. Blocks consist of whole units.
        ``unit``: tokens of a unit.
        ``video``: whether the units are frames.
    """

    ranks: int
    steps: int
    layers: int
    units: int
    unit: int
    video: bool = False

    @property
    def noun(self) -> str:
        """Word for the units in error lines, such as "frames"."""
        return "frames" if self.video else "rows of patches"


@dataclass(frozen=True)
class SamplingTable:
    """A way to sample over ranks, as a table of rows. A sample's tokens are divided into blocks.

    Attributes:
        ``name``: name of the scheme.
        ``ranks``: number of ranks.
        ``steps``, ``layers``: numbers of steps and of the denoiser's layers.
        ``blocks``: number of tokens of each block.
        ``rows``: the rows; each rank computes its own in this order.
        ``unit``: number of tokens of a unit, which is a row of patches or a frame.
        ``window``: largest distance in units at which a token attends to others, except for keys that are ``far``;
            None: no limit.
        ``tiles``: how the blocks cover a larger image; None: they are parts of one image or video. With tiles, the last
            block is the small image that guides the others; its latents are computed from theirs in each of its rows.
    """

    name: str
    ranks: int
    steps: int
    layers: int
    blocks: tuple[int, ...]
    rows: tuple[DenoisingRow, ...]
    unit: int = 1
    window: int | None = None
    tiles: TileGrid | None = None

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Position in the whole sample, in tokens, at which each block begins, by index of the block."""
        return (0, *accumulate(self.blocks[:-1]))

    @cached_property
    def owners(self) -> Mapping[tuple[int, int, int], DenoisingRow]:
        """Rows by what they compute: for each triple ``(step, layer, block)`` the row that computes it."""
        return MappingProxyType(
            {
                (row.step, layer, block): row
                for row in self.rows
                for layer in range(*row.layers)
                for block in row.queries
            }
        )

    @property
    def guide(self) -> int | None:
        """Index of the block that is the small image and guides tiles; None if there are no tiles."""
        return None if self.tiles is None else len(self.blocks) - 1

    def of_rank(self, rank: int) -> Iterator[DenoisingRow]:
        """Yield the rows (entries of the table) that ``rank`` computes, in their order."""
        return (row for row in self.rows if row.rank == rank)

    def synchronous(self) -> int:
        """Return the number of steps in which every row attends to all keys of the sample, computed in the same step.

        In a table of tiles, a row attends to the keys of its own tile.
        """
        lossy = {
            row.step
            for row in self.rows
            if any(key.age or key.joined for key in row.keys)
            or any(guide.age for guide in row.guides)
            or (
                self.tiles is None
                and sum(key.end - key.first for key in row.keys) < sum(self.blocks)
            )
        }
        return self.steps - len(lossy)

    def exact(self) -> bool:
        """Return whether the table computes the same as one device: no step has stale or missing keys, and there is no
        window.
        """
        return self.synchronous() == self.steps and self.window is None


def whole_block(table_blocks: tuple[int, ...], block: int, age: int = 0) -> KeyBlock:
    """Return the keys of all tokens of ``block``, ``age`` steps old.

    ``table_blocks``: number of tokens of every block.
    """
    return KeyBlock(block, 0, table_blocks[block], age)


def cut_units(shape: SamplingShape, parts: int) -> tuple[int, ...]:
    """Divide the units (rows of patches, or frames) of ``shape`` into ``parts`` bands, as evenly as possible.

    Returns the number of tokens of each band. Raises :class:`SamplingTableError` if there are fewer units than parts.
    """
    if parts > shape.units:
        raise SamplingTableError(
            f"{shape.units} {shape.noun} cannot be cut into {parts} blocks; take fewer ranks"
        )
    each, more = divmod(shape.units, parts)
    return tuple(shape.unit * (each + (part < more)) for part in range(parts))


def cut_layers(layers: int, ranks: int) -> tuple[LayerRange, ...]:
    """Divide ``layers`` layers into ``ranks`` ranges of nearly equal length, one for each rank.

    Raises :class:`SamplingTableError` if a rank would have no layer.
    """
    if ranks > layers:
        raise SamplingTableError(
            f"{layers} layers cannot be cut into {ranks} stages; take fewer ranks"
        )
    bounds = [layers * rank // ranks for rank in range(ranks + 1)]
    return tuple(map(LayerRange, bounds[:-1], bounds[1:]))


def exact_table(shape: SamplingShape) -> SamplingTable:
    """Return the table that computes the same as one device.

    Each rank computes a band of tokens, which attend to all keys of the same step.
    """
    blocks = cut_units(shape, shape.ranks)
    every = tuple(whole_block(blocks, block) for block in range(shape.ranks))
    layers = LayerRange(0, shape.layers)
    rows = [
        DenoisingRow(step, rank, layers, (rank,), every)
        for step in range(shape.steps)
        for rank in range(shape.ranks)
    ]
    return SamplingTable(
        "exact", shape.ranks, shape.steps, shape.layers, blocks, tuple(rows), shape.unit
    )
