"""Predictions of tiles joined to that of a large image, and corrected by the prediction for a small one."""

from collections.abc import Mapping
from typing import Any

import torch

from weft.diffusion.tile_grid import TileGrid
from weft.errors import UsageError
from weft.models.patches import patchify, unpatchify
from weft.shapes.diffusion_shape import DiffusionSettings

T = torch.Tensor


class TileMix:
    """Cuts the tiles of ``grid`` from a large image, joins them again, and guides them by a small image.

    The small image consists of every ``scale``-th pixel of the large one along each axis, so that its noise has the
    right variance. Each of its pixels corrects a square of ``scale`` x ``scale`` pixels of the large image. The
    correction is the prediction for the pixel of the small image, minus the tile's prediction for the same pixel. The
    same noise is in both predictions, so that it cancels out.

    ``values``: number of values of a token; ``patch``: height and width of a patch in pixels. Raises
    :class:`UsageError` if tiles begin within a square.
    """

    def __init__(self, grid: TileGrid, values: int, patch: int) -> None:
        self.grid, self.patch = grid, patch
        self.small = DiffusionSettings(
            size=(grid.rows * patch, grid.columns * patch), channels=values // patch**2, patch=patch
        )  # fmt: skip
        for corner in grid.corners:
            row, column = (n * patch for n in corner)
            if row % grid.scale or column % grid.scale:
                raise UsageError(
                    f"a tile begins at pixel {row}, {column} of the large image, within a square of {grid.scale} x "
                    f"{grid.scale} pixels that guidance corrects as one; take another scale or overlap"
                )

    @property
    def size(self) -> tuple[int, ...]:
        """Height and width of the large image in pixels."""
        return tuple(self.grid.scale * n for n in self.small.size)

    def _place(self, tile: int) -> tuple[Any, ...]:
        corner = self.grid.corners[tile]
        sides = zip(corner, self.small.size, strict=True)
        spans = (slice(n * self.patch, n * self.patch + side) for n, side in sides)
        return (..., *spans)

    def cut(self, pixels: T, tile: int) -> T:
        """Cut tile number ``tile`` from ``pixels``, and return its tokens ``[samples, tokens, values]``.

        ``pixels``: the large image ``[samples, channels, height, width]``.
        """
        return patchify(pixels[self._place(tile)], self.small)

    def joined(self, tiles: Mapping[int, T]) -> T:
        """Join ``tiles`` to the large image ``[samples, channels, height, width]``, with means where they overlap.

        ``tiles``: tokens ``[samples, tokens, values]`` by number of the tile. Pixels that no tile covers are NaN.
        """
        first = next(iter(tiles.values()))
        total = first.new_zeros(len(first), self.small.channels, *self.size)
        counts = first.new_zeros(self.size)
        for tile in sorted(tiles):
            total[self._place(tile)] += unpatchify(tiles[tile], self.small)
            counts[self._place(tile)] += 1
        return total / counts

    def reduced(self, tiles: Mapping[int, T]) -> T:
        """Join all ``tiles``, and return the tokens ``[samples, tokens, values]`` of the small image."""
        step = self.grid.scale
        return patchify(self.joined(tiles)[..., ::step, ::step], self.small)

    def mixed(
        self, tile: int, tiles: Mapping[int, T], guide: T | None, weight: float
    ) -> T:
        """Return the combined prediction for tile number ``tile``, ``[samples, tokens, values]``.

        ``tiles``: predictions for this tile and for all that overlap it, by number; they are averaged. ``guide``:
        prediction for the small image, None without one; its correction is multiplied by ``weight``.
        """
        whole = self.joined(tiles) if len(tiles) > 1 else None
        pixels = unpatchify(tiles[tile], self.small) if whole is None else whole[self._place(tile)]  # fmt: skip
        if guide is not None:
            step, corner = self.grid.scale, self.grid.corners[tile]
            seen = pixels[..., ::step, ::step]
            top, left = (n * self.patch // step for n in corner)
            height, width = seen.shape[-2:]
            wanted = unpatchify(guide, self.small)[
                ..., top : top + height, left : left + width
            ]
            moved = weight * (wanted - seen)
            for axis in (-2, -1):
                moved = moved.repeat_interleave(step, axis)
            pixels = pixels + moved[..., : pixels.shape[-2], : pixels.shape[-1]]
        return patchify(pixels, self.small)
