"""Copy elements between boxes of a tensor, for staging, writing, loading and resharding.

A box lies in memory as a strided array, so two boxes exchange their common elements by one strided copy (the canonical
form of Pearson et al. 2021, TEMPI). Elements are copied as opaque bytes. This file needs no PyTorch, because the
process that writes checkpoints starts without it.
"""

import mmap
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from weft.checkpoint.boxes import intersection, volume
from weft.layout.dims import Box, extents

T = TypeVar("T")

#: Elements of 1, 2, 4 or 8 bytes, as opaque numbers.
Elements = NDArray[Any]


def index_within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices that select the elements of ``box`` in an array of the elements of the box ``outer``."""
    return tuple(
        slice(lo - first, hi - first)
        for (lo, hi), (first, _) in zip(box, outer, strict=True)
    )


def elements(
    buffer: bytes | bytearray | memoryview | mmap.mmap,
    box: Box,
    itemsize: int,
    offset: int = 0,
) -> Elements:
    """View bytes of ``buffer`` as an array: the elements of ``box``, which are stored there row-major.

    ``itemsize``: bytes of an element; ``offset``: the byte of ``buffer`` at which they begin.
    """
    flat: Elements = np.frombuffer(buffer, f"u{itemsize}", volume(box), offset)
    return flat.reshape(extents(box))


def copy_common(
    target: Elements, target_box: Box, source: Elements, source_box: Box
) -> None:
    """Copy the elements that two boxes of a tensor share from the array ``source`` to the array ``target``.

    ``target_box`` and ``source_box``: the boxes whose elements the two arrays hold.
    """
    common = intersection(target_box, source_box)
    if common is not None:
        target[index_within(common, target_box)] = source[
            index_within(common, source_box)
        ]


def group_by_bytes(
    items: Iterable[T],
    most: int,
    size: Callable[[T], int],
    joins: Callable[[T, T], bool] = lambda before, item: True,
) -> Iterator[list[T]]:
    """Group consecutive ``items`` into lists of at most ``most`` bytes. A larger item gets a list of its own.

    ``size(item)``: bytes of an item; ``joins(before, item)``: whether an item may be in the same list as the item
    before it.
    """
    group: list[T] = []
    total = 0
    for item in items:
        if group and (total + size(item) > most or not joins(group[-1], item)):
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group
