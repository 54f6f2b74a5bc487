"""The few functions through which ranks exchange data inside a model: typed, differentiable collectives.

Types are those of ``spmd_types``: per mesh axis a tensor is replicated (R: same value, gradient a partial sum),
invariant (I: same value, same gradient), varying (V) or partial (P: a sum is pending). On an axis of size one every
function here returns its input, so code on one device and on many is the same code.
"""

import warnings
from collections.abc import Iterable
from typing import Any

import spmd_types as spmd
import torch
from spmd_types import I, P, R, S, V

from weft.layout.axes import DATA_AXES, FOLDED, MODEL_AXES
from weft.layout.dims import Logical
from weft.layout.mesh import LIVE_AXES, Mesh

#: A type on one mesh axis.
Kind = spmd.PerMeshAxisLocalSpmdType

# spmd_types calls two functional collectives by the names they had before PyTorch 2.13.
warnings.filterwarnings(
    "ignore", r".*is deprecated", FutureWarning, module="spmd_types"
)


def gather_tokens(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Leave a norm region: ``[batch, seq/tp, embed]`` varying to ``[batch, seq, embed]`` replicated on ``tp``."""
    if mesh.size("tp") == 1:
        return x
    return spmd.all_gather(x, mesh.group("tp"), src=S(1), dst=R, **_as_is(x))


def scatter_tokens(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Enter a norm region: sum the ranks' ``[batch, seq, embed]`` and keep ``[batch, seq/tp, embed]``."""
    if mesh.size("tp") == 1:
        return x
    return spmd.reduce_scatter(x, mesh.group("tp"), src=V, dst=S(1), **_as_is(x))


def _as_is(x: torch.Tensor) -> dict[str, Any]:
    """Activations and their gradients travel in the precision they are computed in, forward and backward."""
    return {"op_dtype": x.dtype, "backward_options": {"op_dtype": x.dtype}}


def gather_vocab(logits: torch.Tensor, sizes: list[int], mesh: Mesh) -> torch.Tensor:
    """Whole logits ``[batch, seq, vocab]`` from vocabulary shares of (possibly unequal) ``sizes``."""
    if mesh.size("tp") == 1:
        return logits
    most = max(sizes)
    if most == min(sizes):
        return spmd.all_gather(logits, mesh.group("tp"), src=S(2), dst=R)
    # gloo takes equal parts only
    even = torch.nn.functional.pad(logits, (0, most - logits.shape[2]))
    parts = spmd.all_gather(even, mesh.group("tp"), src=S(2), dst=R).split(most, dim=2)
    own_parts = [part[..., :size] for part, size in zip(parts, sizes, strict=True)]
    return torch.cat(own_parts, dim=2)


def own(weight: torch.Tensor, start: int, stop: int, mesh: Mesh) -> torch.Tensor:
    """Rows of a parameter that every ``tp`` rank holds whole; its gradient is then a sum over ``tp``."""
    if mesh.size("tp") == 1:
        return weight[start:stop]
    # "expert mode": every rank reading its own rows of one copy is what is wanted here.
    return spmd.reinterpret(weight, mesh.group("tp"), src=R, dst=V, expert_mode=True)[
        start:stop
    ]


def share_of_sum(x: torch.Tensor, mesh: Mesh, **types: Kind) -> torch.Tensor:
    """Turn ``x``, of the given type per axis, into a pending sum over all axes in which nothing is counted twice.

    Where ranks hold the same value (R or I), all but the first contribute zero.
    """
    for axis, kind in types.items():
        if mesh.size(axis) > 1 and kind is not P:
            group = mesh.group(axis)
            if kind is V:
                x = spmd.reinterpret(x, group, src=V, dst=P)
            else:  # "expert mode": zeroing all but the first rank is what is wanted here
                x = spmd.convert(x, group, src=kind, dst=P, expert_mode=True)
    return x


def step_sum(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Finish a sum that is pending over all axes, in one all-reduce over the ranks that take the step together."""
    return spmd.all_reduce(x, mesh.step_group, dst=R) if mesh.layout.world > 1 else x


def sum_over(axis: str, x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Finish a sum that is pending over one axis; every rank gets it, as something to keep (invariant)."""
    return spmd.all_reduce(x, mesh.group(axis), dst=I) if mesh.size(axis) > 1 else x


def total_of_shares(x: torch.Tensor, axes: Iterable[str], mesh: Mesh) -> torch.Tensor:
    """Sum over ``axes`` of the share that each rank has; every rank can compute with it (replicated)."""
    for axis in axes:
        x = spmd.all_reduce(share_of_sum(x, mesh, **{axis: V}), mesh.group(axis), dst=R)
    return x


#: Types of numbers: each rank has its own; they depend on the rank's data alone; they are the same on all ranks.
OWN: dict[str, Kind] = dict.fromkeys(LIVE_AXES, V)
BY_DATA: dict[str, Kind] = {axis: V if axis in DATA_AXES else R for axis in LIVE_AXES}
SAME: dict[str, Kind] = dict.fromkeys(LIVE_AXES, R)
#: Each rank has a share of a sum that is still to be made.
SHARE: dict[str, Kind] = dict.fromkeys(LIVE_AXES, P)

#: A context in which types of tensors are neither checked nor derived.
untyped = spmd.no_typecheck


def _types(logical: Logical, data: dict[str, Kind], uncut: Kind) -> dict[str, Kind]:
    """``data`` per data axis; over the axes that share the work, varying where the parameter is cut, else ``uncut``."""
    return data | {axis: V if logical.cut_by(axis) else uncut for axis in MODEL_AXES}


def parameter_types(logical: Logical) -> dict[str, Kind]:
    """The type of a full parameter, as compute sees it."""
    # Of experts, which are spread over data ranks, that is all that can be said of each of their axes.
    return _types(
        logical, dict.fromkeys(DATA_AXES, V if logical.cut_by(FOLDED) else R), R
    )


def gradient_types(logical: Logical) -> dict[str, Kind]:
    """The type of a full parameter's gradient after backward: a partial sum over every axis that does not cut it."""
    return _types(
        logical, dict.fromkeys(DATA_AXES, V if logical.cut_by(FOLDED) else P), P
    )


def state_types(logical: Logical) -> dict[str, Kind]:
    """The type of what is held of a parameter or its reduced gradient: rows, the same on every replica."""
    return _types(
        logical,
        {"pp": V, "dp": V if logical.cut_by(FOLDED) else I, "shard": V, "cp": V},
        I,
    )


def own_number(value: float, mesh: Mesh, **types: Kind) -> torch.Tensor:
    """A float64 scalar from a number that this rank alone knows, of the given type per axis."""
    with untyped():
        x = torch.tensor(value, dtype=torch.float64, device=mesh.device)
    return declare(x, mesh, **types)


def own_share(value: float, mesh: Mesh, **types: Kind) -> torch.Tensor:
    """This rank's share of a sum over all ranks of such a number: a pending float64 scalar, nothing counted twice."""
    return share_of_sum(own_number(value, mesh, **types), mesh, **types)


def declare(x: torch.Tensor, mesh: Mesh, **types: Kind) -> torch.Tensor:
    """State the type of ``x`` per axis; checked under ``weft verify --types`` and free otherwise."""
    if spmd.TYPE_CHECKING:
        live = [axis for axis in LIVE_AXES if mesh.size(axis) > 1 and axis in types]
        spmd.assert_type(x, {mesh.group(axis): types[axis] for axis in live})
    return x
