"""Named dimensions of parameters."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Dim:
    """A named dimension of ``count`` units of ``unit`` elements each.

    Axes of the mesh cut it between units and never inside of one; the rows of an attention head, for example, are a
    unit.
    """

    name: str
    count: int
    unit: int = 1

    @property
    def size(self) -> int:
        return self.count * self.unit
