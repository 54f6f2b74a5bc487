"""Named dimensions and the slice of a logical tensor that a rank owns."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from weft.shapes.dim import Dim

#: Half-open ranges, one per tensor dimension, in logical (single-device) coordinates.
Box = tuple[tuple[int, int], ...]


def extents(box: Box) -> tuple[int, ...]:
    """Return the number of indices of ``box`` in each dimension: the shape of an array of its elements."""
    return tuple(hi - lo for lo, hi in box)


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box that covers a whole tensor of this shape."""
    return tuple((0, size) for size in shape)


def slices(box: Box) -> tuple[slice, ...]:
    """Return ``box`` as a tuple of slices, with which an array of the whole tensor is indexed."""
    return tuple(slice(lo, hi) for lo, hi in box)


def part(count: int, parts: int, index: int) -> tuple[int, int]:
    """Return the range ``(start, stop)`` of share ``index`` if ``count`` elements are cut into ``parts`` shares.

    Shares are contiguous, and their sizes differ by at most one.
    """
    base, extra = divmod(count, parts)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)


def ceil_part(count: int, parts: int, index: int) -> tuple[int, int]:
    """Return the range ``(start, stop)`` of chunk ``index`` of ``count`` elements, as :func:`torch.chunk` cuts them.

    ``parts``: number of chunks. Full chunks come first, then a shorter one, then empty ones.
    """
    size = -(-count // parts)
    return min(index * size, count), min((index + 1) * size, count)


@dataclass(frozen=True)
class Logical:
    """A parameter as one device sees it, and the part of it that this rank computes with.

    Attributes:
        ``dims``: the named dimensions of the whole parameter.
        ``std``: standard deviation of its initial values; None: all ones, 0: all zeros.
        ``cuts``: for each dimension, the mesh axes that cut it.
        ``box``: the range of elements, per dimension of the whole parameter, that this rank computes with.
        ``everywhere``: how the optimizer state is kept. False: ranks divide the rows of ``box`` among them, and each
            keeps the state of a range of rows. True: every rank keeps the state of all these rows.
    """

    dims: tuple[Dim, ...]
    std: float | None
    cuts: tuple[tuple[str, ...], ...]
    box: Box
    everywhere: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return tuple(d.size for d in self.dims)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part that this rank computes with."""
        return extents(self.box)

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return prod(self.shape)

    def cut_by(self, axis: str) -> bool:
        """Return whether ``axis`` cuts the parameter, so that ranks along it compute with different parts."""
        return any(axis in axes for axes in self.cuts)

    def rows(self, lo: int, hi: int) -> Box:
        """Return the box of rows ``lo:hi`` of this rank's part, in indices of the whole parameter."""
        start = self.box[0][0]
        return ((start + lo, start + hi), *self.box[1:])


#: Bytes per element by the names that safetensors gives types.
DTYPES = {
    "F64": 8,
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "I64": 8,
    "I32": 4,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True)
class Tensor:
    """Shape and type of a logical tensor, a tensor as the one-device model has it.

    ``dtype``: name of the type, as in safetensors; ``dims``: names of the dimensions; ``tied``: name of the tensor
    whose values this tensor shares, None if it has its own.
    """

    shape: tuple[int, ...]
    dtype: str
    dims: tuple[str, ...] = ()
    tied: str | None = None

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype]

    @property
    def numel(self) -> int:
        return prod(self.shape)
