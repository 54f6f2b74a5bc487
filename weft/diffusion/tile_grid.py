"""Tiles of an image that is larger than those of a model's training, as numbers of tokens."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from weft.errors import UsageError


class TileCorner(NamedTuple):
    """Row and column, in tokens, at which a tile begins in the large image."""

    row: int
    column: int


@dataclass(frozen=True)
class TileGrid:
    """Tiles of the size of a training image that cover an image ``scale`` times as high and as wide.

    Raises :class:`weft.errors.UsageError` for an overlap with which tiles do not cover the image evenly.

    Attributes:
        ``rows``, ``columns``: height and width of a tile in tokens.
        ``scale``: how many times as large the image is along each axis.
        ``overlap``: number of tokens that neighbouring tiles share along each axis.
    """

    rows: int
    columns: int
    scale: int
    overlap: int = 0

    def __post_init__(self) -> None:
        fitting = [o for o in range(min(self.rows, self.columns)) if self._covers(o)]
        if self.overlap not in fitting:
            raise UsageError(
                f"an image of {self.scale * self.rows} x {self.scale * self.columns} patches is not covered evenly by "
                f"tiles of {self.rows} x {self.columns} with an overlap of {self.overlap}; take an overlap of "
                f"{' or '.join(map(str, fitting))}"
            )

    def _covers(self, overlap: int) -> bool:
        sides = (self.rows, self.columns)
        return all((self.scale * n - overlap) % (n - overlap) == 0 for n in sides)

    @property
    def tokens(self) -> int:
        """Number of tokens of a tile."""
        return self.rows * self.columns

    @cached_property
    def corners(self) -> tuple[TileCorner, ...]:
        """First row and column of each tile, row by row of tiles."""
        down, across = (
            range(0, self.scale * n - self.overlap, n - self.overlap)
            for n in (self.rows, self.columns)
        )
        return tuple(TileCorner(row, column) for row in down for column in across)

    def sharing(self, tile: int) -> tuple[int, ...]:
        """Return the other tiles that have tokens in common with ``tile``."""
        own = self.corners[tile]
        return tuple(
            other
            for other, corner in enumerate(self.corners)
            if other != tile
            and abs(corner.row - own.row) < self.rows
            and abs(corner.column - own.column) < self.columns
        )
