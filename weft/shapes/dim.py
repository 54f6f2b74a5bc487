"""Named dimensions of parameters."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Dim:
    """One named dimension: ``count`` units of ``unit`` elements (a head of ``head_dim`` rows is never cut)."""

    name: str
    count: int
    unit: int = 1

    @property
    def size(self) -> int:
        return self.count * self.unit
