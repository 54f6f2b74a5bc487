"""Reads and writes the whole learning parameters of a state, whatever layout its ranks have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from weft.layout.dims import Tensor, whole_box
from weft.layout.parts import NAMES, Part

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.parallel.state import Held, State

T = torch.Tensor


def whole_part(values: T) -> Part:
    """Return ``values`` as a part that covers its whole logical tensor, so that it can be saved in a checkpoint like
    the parts of sharded tensors.
    """
    shape = tuple(values.shape)
    return Part(values, whole_box(shape), Tensor(shape, NAMES[values.dtype]))


@torch.no_grad()
def gathered_parameters(
    state: State, mesh: Mesh, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, T]:
    """Gather the whole learning parameters, by name, on the first rank; return an empty dict elsewhere. All ranks must
    call it.

    ``shapes``: the shape of each learning parameter of the whole model. The tensors are copies on the host.
    """
    state.bring_home()
    state.expose()
    own = {h.name: h.part(h.local.detach()) for h in state.learning}
    return gathered_parts(own, mesh, shapes)


@torch.no_grad()
def gathered_parts(
    own: Mapping[str, Part], mesh: Mesh, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, T]:
    """Gather the ranks' parts of tensors on the first rank; return an empty dict elsewhere. All ranks must call it.

    ``own``: this rank's part of each tensor. ``shapes``: the shape of each tensor. The result is a copy on the host.
    """
    if mesh.layout.world == 1:
        return {
            name: part.values.to("cpu", copy=True).view(shapes[name])
            for name, part in own.items()
        }
    from weft.checkpoint.reshard import redistribute

    targets = dict[str, Part]()
    if mesh.is_main:
        like = next(iter(own.values())).values
        targets = {
            name: whole_part(torch.empty(shape, dtype=like.dtype, device=like.device))
            for name, shape in shapes.items()
        }
    redistribute(own.items(), targets, mesh.step_group)
    return {name: part.values.to("cpu") for name, part in targets.items()}


@torch.no_grad()
def scatter_parameters(state: State, mesh: Mesh, whole: Mapping[str, T]) -> None:
    """Set the learning parameters of all ranks, the parts in ``state``, from ``whole``: the whole tensors by name,
    which only the first rank has. All ranks must call it.
    """
    state.bring_home()
    state.expose()
    scatter_parts(
        {h.name: h.part(h.local.detach()) for h in state.learning}, mesh, whole
    )
    state.release()  # what was gathered is of other values


@torch.no_grad()
def scatter_parts(
    targets: Mapping[str, Part], mesh: Mesh, whole: Mapping[str, T]
) -> None:
    """Fill this rank's parts ``targets`` from ``whole``, the whole tensors that the first rank has by name. All ranks
    must call it.
    """
    if mesh.layout.world == 1:
        for name, part in targets.items():
            part.values.copy_(whole[name][part.index].view_as(part.values))
        return
    from weft.checkpoint.reshard import redistribute

    sources = list[tuple[str, Part]]()
    if mesh.is_main:
        like = next(iter(targets.values())).values
        sources = [
            (name, whole_part(values.to(like.device, like.dtype)))
            for name, values in whole.items()
        ]
    redistribute(sources, targets, mesh.step_group)


def zeros_like_held(held: Held) -> Part:
    """Return a part (tensor and box) of zeros that has the shape and box of the parameter ``held``."""
    return held.part(torch.zeros_like(held.local.detach()))
