"""Named dimensions of parameters."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Dim:
    """A named dimension of a parameter. It consists of ``count`` blocks of ``unit`` elements, such as attention heads.

    Axes of the mesh cut the dimension only between these blocks, so that each head stays on one rank.
    """

    name: str
    count: int
    unit: int = 1

    @property
    def size(self) -> int:
        return self.count * self.unit
