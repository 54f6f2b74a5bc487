"""Named dimensions of parameters."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Dim:
    """A named dimension: ``count`` units of ``unit`` elements; units (the rows of a head, say) are never cut."""

    name: str
    count: int
    unit: int = 1

    @property
    def size(self) -> int:
        return self.count * self.unit
