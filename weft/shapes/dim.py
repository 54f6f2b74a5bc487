"""Named dimensions of parameters."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Dim:
    """A named dimension of ``count`` units of ``unit`` elements each.

    Axes cut between units and never inside one, such as the rows of a head.
    """

    name: str
    count: int
    unit: int = 1

    @property
    def size(self) -> int:
        return self.count * self.unit
