"""The policy's whole parameters, gathered on the first training rank from any layout for engines elsewhere."""

from __future__ import annotations

import torch

from weft.layout.dims import Box, Tensor, whole_box
from weft.layout.mesh import Mesh, from_all
from weft.layout.parts import NAMES, TORCH_DTYPES
from weft.parallel.state import State
from weft.rl.generation_model import changes
from weft.rl.weight_moves import BUCKET, WeightMover, weight_plan

T = torch.Tensor


class GatheredPolicy:
    """Gathers the parameters of ``state`` on the first rank of ``mesh``, again and again, as they change in training.

    ``dtype``: type in which the parameters are gathered, "float32", "float64" or "bfloat16". ``bucket``: most bytes of
    messages that a rank holds at a time.
    """

    def __init__(
        self, mesh: Mesh, state: State, dtype: str, bucket: int = BUCKET
    ) -> None:
        self.mesh, self.state, self.bucket = mesh, state, bucket
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._movers: dict[bool, tuple[WeightMover, dict[str, Tensor]]] = {}

    @property
    def first_rank(self) -> bool:
        """Whether this rank gets the parameters."""
        group = self.mesh.step_group
        return group is None or group.rank() == 0

    def changed(self) -> dict[str, T]:
        """Return the whole parameters that may have changed since the last call, on the host; none on other ranks than
        the first. Collective.

        The first call returns all parameters. The tensors are new ones each time.
        """
        self.state.bring_home()
        self.state.settle()
        first = not self._movers
        if first not in self._movers:
            self._movers[first] = self._mover(first)
        mover, wanted = self._movers[first]
        sources = {h.name: {h.box: h.local} for h in self.state.held}
        device = self.mesh.device
        targets: dict[str, dict[Box, T]] = {
            name: {
                whole_box(tensor.shape): torch.empty(
                    tensor.shape, dtype=TORCH_DTYPES[tensor.dtype], device=device
                )
            }
            for name, tensor in wanted.items()
        }
        mover.move(sources, targets)
        return {
            name: values.cpu()
            for name, boxes in targets.items()
            for values in boxes.values()
        }

    def _mover(self, first: bool) -> tuple[WeightMover, dict[str, Tensor]]:
        """Agree with the other ranks on what is gathered: everything at first, later what changes in training."""
        tensors, held = {}, {}
        for h in self.state.held:
            own = h.local.dtype
            kept = self.dtype if own.is_floating_point else own
            tensors[h.name] = Tensor(h.logical.shape, NAMES[kept])
            if first or changes(h):
                held[h.name] = [h.box]
        group = self.mesh.step_group
        everyones = from_all((tensors, held), group)
        known: dict[str, Tensor] = {}
        for of_rank, _ in everyones:
            known |= of_rank
        moving = sorted({name for _, of_rank in everyones for name in of_rank})
        wanted = {name: known[name] for name in moving}
        needed = [{name: [whole_box(each.shape)] for name, each in wanted.items()}]
        needed += [{} for _ in everyones[1:]]
        rank = group.rank() if group is not None else 0
        plan = weight_plan(known, [of_rank for _, of_rank in everyones], needed, rank)
        mover = WeightMover(plan, known, group, self.mesh.device, self.bucket)
        return mover, wanted if rank == 0 else {}
