"""Named dimensions and the slice of a logical tensor that a rank owns."""

from dataclasses import dataclass
from math import prod

#: Half-open ranges, one per tensor dimension, in logical (single-device) coordinates.
Box = tuple[tuple[int, int], ...]


def part(count: int, parts: int, index: int) -> tuple[int, int]:
    """Balanced contiguous share ``index`` of ``count`` things in ``parts``: sizes differ by at most one."""
    base, extra = divmod(count, parts)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)


def ceil_part(count: int, parts: int, index: int) -> tuple[int, int]:
    """Share as :func:`torch.chunk` cuts it (FSDP2's rule): all shares full, then a short one, then empty ones."""
    size = -(-count // parts)
    return min(index * size, count), min((index + 1) * size, count)


@dataclass(frozen=True)
class Dim:
    """One named dimension: ``count`` units of ``unit`` elements (a head of ``head_dim`` rows is never cut)."""

    name: str
    count: int
    unit: int = 1

    @property
    def size(self) -> int:
        return self.count * self.unit


@dataclass(frozen=True)
class Logical:
    """A parameter as one device sees it.

    ``dims`` name its dimensions, ``std`` is its initial standard deviation (``None``: all ones, 0: all zeros), ``box``
    the part that this rank's place on ``tp`` holds. ``whole`` is true if every ``tp`` rank holds all of it, so that its
    gradient is a sum over ``tp``.
    """

    dims: tuple[Dim, ...]
    std: float | None
    box: Box
    whole: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(d.size for d in self.dims)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(hi - lo for lo, hi in self.box)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def rows(self, lo: int, hi: int) -> Box:
        """The box of local rows ``lo:hi`` (a further cut of dimension 0, as FSDP2 makes it)."""
        start = self.box[0][0]
        return ((start + lo, start + hi), *self.box[1:])
