"""State of a control run as checkpoints take it: tensors by name, the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from weft.layout.dims import Tensor, whole_box
from weft.layout.mesh import Mesh
from weft.layout.parts import NAMES, Part

T = torch.Tensor


@dataclass(frozen=True)
class NoTiers:
    """Placeholder for the tiers of a training state, which are the kinds of memory that hold its tensors.

    A control run needs no choice of tiers, because all its tensors are always in memory.
    """

    staging: Path | None = None


class ControlState:
    """State of a control run for checkpoints: ``tensors`` by name, of which every rank of ``mesh`` has a full copy."""

    tiers = NoTiers()

    def __init__(self, tensors: Mapping[str, T], mesh: Mesh) -> None:
        self._tensors, self._mesh = tensors, mesh

    def saved(self) -> dict[str, Part]:
        """Return all tensors as parts to be saved. Each tensor is saved by one rank, although all ranks have it."""
        rank, ranks = self._mesh.rank("dp"), self._mesh.layout.dp
        return {
            name: Part(
                t.detach(),
                whole_box(t.shape),
                Tensor(tuple(t.shape), NAMES[t.dtype]),
                rank,
                ranks,
            )
            for name, t in self._tensors.items()
        }


def adam_tensors(
    optimizer: torch.optim.Adam, names: Mapping[T, str]
) -> dict[str, T]:  # fmt: skip
    """Return Adam's moments and step counts by name. The tensors are the optimizer's own, so that loading fills them.

    ``names``: name of each parameter. Moments that the optimizer has not created yet are created as zeros.
    """
    tensors: dict[str, T] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            slots = optimizer.state[p]
            if not slots:
                slots["step"] = torch.zeros(())
                slots["exp_avg"] = torch.zeros_like(p)
                slots["exp_avg_sq"] = torch.zeros_like(p)
            tensors |= {f"optimizer.{slot}.{names[p]}": t for slot, t in slots.items()}
    return tensors
