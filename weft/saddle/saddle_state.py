"""State of a search for a saddle point, as checkpoints take it, which does not depend on the number of ranks."""

from __future__ import annotations

import torch

from weft.layout.dims import Tensor, whole_box
from weft.layout.mesh import Mesh
from weft.layout.parts import NAMES, Part
from weft.rl.control.control_state import NoTiers
from weft.saddle.saddle_method import SaddleMethod

T = torch.Tensor


class SaddleState:
    """The state of ``method`` for checkpoints: tensors that are equal on all ranks of ``mesh``, and the compression
    residuals of this rank's senders. The residuals of all senders are rows of one logical tensor, so that a run with
    other ranks can take them over.
    """

    tiers = NoTiers()

    def __init__(self, method: SaddleMethod, mesh: Mesh) -> None:
        self._method, self._mesh = method, mesh

    def saved(self) -> dict[str, Part]:
        """Return all tensors of the state as parts of logical tensors. Loading a checkpoint writes into the same
        memory.
        """
        rank, ranks = self._mesh.rank("dp"), self._mesh.layout.dp
        parts = {
            name: Part(
                t.detach(),
                whole_box(t.shape),
                Tensor(tuple(t.shape), NAMES[t.dtype]),
                rank,
                ranks,
            )
            for name, t in self._method.shared().items()
        }
        for way, (direction, senders) in self._method.residuals().items():
            own = direction.residuals or {}
            if not own:
                continue
            first = min(own) if way == "up" else 0
            names = next(iter(own.values()))
            for name in names:
                rows = torch.stack([own[sender][name] for sender in sorted(own)])
                # the residuals become views of what a checkpoint reads into
                for row, sender in zip(rows, sorted(own), strict=True):
                    own[sender][name] = row
                box = ((first, first + len(rows)), *whole_box(rows.shape[1:]))
                shape = (senders, *rows.shape[1:])
                parts[f"residuals.{way}.{name}"] = Part(
                    rows, box, Tensor(shape, NAMES[rows.dtype])
                )
        return parts
