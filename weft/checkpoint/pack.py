"""Copies elements between boxes: staging, writing, loading and resharding all do it with these functions.

A box of a tensor lies in memory as a strided array (the canonical form of Pearson et al. 2021, TEMPI): two boxes that
meet exchange their common elements by one strided copy. Elements are moved as bytes, whatever they mean. No PyTorch:
the process that writes checkpoints starts without it.
"""

import mmap
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from weft.checkpoint.boxes import meet, volume
from weft.layout.dims import Box, extents

T = TypeVar("T")

#: Elements of 1, 2, 4 or 8 bytes, as opaque numbers.
Elements = NDArray[Any]


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """``box`` as an index into the elements of ``outer``."""
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
    """The elements ``box`` that lie row-major in ``buffer`` from byte ``offset`` on; shares the memory."""
    flat: Elements = np.frombuffer(buffer, f"u{itemsize}", volume(box), offset)
    return flat.reshape(extents(box))


def move(target: Elements, target_box: Box, source: Elements, source_box: Box) -> None:
    """Copy the elements that both boxes have."""
    common = meet(target_box, source_box)
    if common is not None:
        target[within(common, target_box)] = source[within(common, source_box)]


def grouped(
    items: Iterable[T],
    most: int,
    size: Callable[[T], int],
    joins: Callable[[T, T], bool] = lambda before, item: True,
) -> Iterator[list[T]]:
    """Consecutive items in lists of at most ``most`` bytes, or of one item that is larger.

    ``size``: bytes of an item; ``joins(before, item)``: whether an item may be in one list with the one before it.
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
