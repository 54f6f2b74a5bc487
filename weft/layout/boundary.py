"""Typed, differentiable collectives: the few functions through which ranks exchange data inside a model.

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

from weft.layout.axes import DATA_AXES, FOLDED, LIVE_AXES, MODEL_AXES
from weft.layout.dims import Logical
from weft.layout.mesh import Mesh

T = torch.Tensor

#: A type on one mesh axis.
Kind = spmd.PerMeshAxisLocalSpmdType

# spmd_types calls two functional collectives by the names they had before PyTorch 2.13.
warnings.filterwarnings(
    "ignore", r".*is deprecated", FutureWarning, module="spmd_types"
)


def gather_tokens(x: T, mesh: Mesh) -> T:
    """Gather the tokens of a norm region over ``tp``: return ``[batch, seq, embed]``, the same on every rank of ``tp``.

    A norm region is the part of a layer between two parts that are cut over ``tp``. In it each rank of ``tp`` holds
    different tokens, ``x`` ``[batch, seq/tp, embed]`` (sequence parallelism). The result has type R: the ranks hold the
    same value, and their gradients are summands. With ``mesh.sums`` every rank holds all tokens already.
    """
    if mesh.size("tp") == 1 or mesh.sums:
        return x
    return spmd.all_gather(x, mesh.group("tp"), src=S(1), dst=R, **_as_is(x))


def scatter_tokens(x: T, mesh: Mesh) -> T:
    """Sum ``x`` ``[batch, seq, embed]`` over ``tp``; return this rank's tokens of it, ``[batch, seq/tp, embed]``.

    The result belongs to a norm region, in which each rank of ``tp`` holds different tokens (sequence parallelism).
    With ``mesh.sums`` every rank gets all tokens of the sum.
    """
    if mesh.size("tp") == 1:
        return x
    if mesh.sums:
        return mesh.sums.add(x)
    return spmd.reduce_scatter(x, mesh.group("tp"), src=V, dst=S(1), **_as_is(x))


def own_tokens(x: T, mesh: Mesh) -> T:
    """Return this rank's part ``[batch, seq/tp, embed]`` of ``x`` ``[batch, seq, embed]``, which all ranks of ``tp``
    hold.

    This is the reverse of :func:`gather_tokens`. The gradients of ``x`` on the ranks are summands of its whole
    gradient.
    """
    if mesh.size("tp") == 1 or mesh.sums:
        return x
    return spmd.convert(x, mesh.group("tp"), src=R, dst=S(1))


def sum_tokens(x: T, mesh: Mesh) -> T:
    """Sum ``x`` ``[batch, seq, embed]`` over ``tp``, and return the whole sum on every rank.

    The result has the type R (replicated): the ranks hold the same value, and their gradients are summands.
    """
    if mesh.size("tp") == 1:
        return x
    if mesh.sums:
        return mesh.sums.add(x)
    return spmd.all_reduce(x, mesh.group("tp"), src=V, dst=R, **_as_is(x))


def _as_is(x: T) -> dict[str, Any]:
    """Return options that keep activations and their gradients in their own precision on the way."""
    return {"op_dtype": x.dtype, "backward_options": {"op_dtype": x.dtype}}


def own(weight: T, start: int, stop: int, mesh: Mesh) -> T:
    """Return rows ``start:stop`` of the parameter ``weight``, of which every ``tp`` rank holds a full copy.

    Each rank asks for different rows, and the gradient of ``weight`` is summed over ``tp``.
    """
    if mesh.size("tp") == 1:
        return weight[start:stop]
    # "expert mode": every rank reading its own rows of one copy is what is wanted here.
    return spmd.reinterpret(weight, mesh.group("tp"), src=R, dst=V, expert_mode=True)[
        start:stop
    ]


def share_of_sum(x: T, mesh: Mesh, **types: Kind) -> T:
    """Return what this rank contributes to a sum over the axes in ``types``, such that the sum counts every value once.

    ``x``: this rank's value. ``types``: for each axis, what the ranks along it hold: different values (V), the same
    value (R or I), or summands of a sum (P). Where ranks hold the same value, the first one returns it and the others
    return zeros; else a rank returns ``x``. The result is a summand (P) on each of these axes. An all-reduce over them,
    which the caller does, gives the sum.
    """
    for axis, kind in types.items():
        if mesh.size(axis) > 1 and kind is not P:
            group = mesh.group(axis)
            if kind is V:
                x = spmd.reinterpret(x, group, src=V, dst=P)
            else:  # "expert mode": zeroing all but the first rank is what is wanted here
                x = spmd.convert(x, group, src=kind, dst=P, expert_mode=True)
    return x


def step_sum(x: T, mesh: Mesh) -> T:
    """Sum ``x`` over all ranks of this island (all ranks of the run, if there are no islands) by an all-reduce, and
    return the sum.

    On each rank ``x`` is a summand: its type is P (partial) over all axes.
    """
    return spmd.all_reduce(x, mesh.step_group, dst=R) if mesh.layout.world > 1 else x


def sum_over(axis: str, x: T, mesh: Mesh) -> T:
    """Sum ``x``, of which each rank along ``axis`` has a summand (type P), by an all-reduce.

    The result has the type I: the same value with the same gradient on all ranks.
    """
    return spmd.all_reduce(x, mesh.group(axis), dst=I) if mesh.size(axis) > 1 else x


def total_of_shares(x: T, axes: Iterable[str], mesh: Mesh) -> T:
    """Sum ``x``, which differs between the ranks along ``axes`` (type V), by an all-reduce along each axis.

    The result has the type R: the same value on all ranks, whose gradients are summands.
    """
    for axis in axes:
        x = spmd.all_reduce(share_of_sum(x, mesh, **{axis: V}), mesh.group(axis), dst=R)
    return x


#: Types of values: different on every rank, a function of the rank's data alone, or the same on all ranks.
OWN: dict[str, Kind] = dict.fromkeys(LIVE_AXES, V)
BY_DATA: dict[str, Kind] = {axis: V if axis in DATA_AXES else R for axis in LIVE_AXES}
SAME: dict[str, Kind] = dict.fromkeys(LIVE_AXES, R)
#: Type of a rank's share of a pending sum.
SHARE: dict[str, Kind] = dict.fromkeys(LIVE_AXES, P)

#: A context in which types of tensors are neither checked nor derived.
untyped = spmd.no_typecheck


def _types(logical: Logical, uncut: Kind) -> dict[str, Kind]:
    """Varying over axes that cut the parameter, and ``uncut`` over others; pipeline ranks aside."""
    # Experts are spread over the data ranks: nothing more can be said of each of their axes.
    data = dict.fromkeys(DATA_AXES, V if logical.cut_by(FOLDED) else uncut)
    return data | {axis: V if logical.cut_by(axis) else uncut for axis in MODEL_AXES}


def parameter_types(logical: Logical) -> dict[str, Kind]:
    """Return the type of a parameter in forward, by axis.

    It is V (ranks hold different values) over the axes that cut the parameter, and R (the same value) over all
    others. ``logical``: the parameter, with the axes that cut it.
    """
    return _types(logical, R)


def gradient_types(logical: Logical) -> dict[str, Kind]:
    """Return the type of a parameter's gradient after backward, by axis.

    It is V (ranks hold different values) over axes that cut the parameter, and P (summands of a sum) over all
    others. ``logical``: the parameter, with the axes that cut it.
    """
    return _types(logical, P)


def state_types(logical: Logical) -> dict[str, Kind]:
    """Return, for each mesh axis, whether its ranks hold the same or different values of a parameter's state.

    The reduced gradient has the same types. The type is V (the ranks along the axis hold different values) for
    ``pp``, ``shard``, ``cp`` and the axes that cut the parameter ``logical``. It is I (the same value with the same
    gradient) for all other axes.
    """
    return _types(logical, I) | {"pp": V, "shard": V, "cp": V}


def own_number(value: float, mesh: Mesh, **types: Kind) -> T:
    """Return ``value``, which this rank has computed, as a float64 scalar tensor with a declared type.

    ``types``: for each axis, what the ranks along it hold: different values (V), the same value (R or I), or summands
    of a sum (P).
    """
    with untyped():
        x = torch.tensor(value, dtype=torch.float64, device=mesh.device)
    return declare(x, mesh, **types)


def own_share(value: float, mesh: Mesh, **types: Kind) -> T:
    """Return ``value`` as this rank's part of a sum that counts every value once: a float64 scalar tensor of type P.

    ``types``: for each axis, what the ranks along it hold: different values (V), the same value (R or I), or summands
    of a sum (P). Where ranks hold the same value, only the first contributes it, and the others contribute 0. An
    all-reduce over these axes, which the caller does, gives the sum.
    """
    return share_of_sum(own_number(value, mesh, **types), mesh, **types)


def declare(x: T, mesh: Mesh, **types: Kind) -> T:
    """Declare the type of ``x`` by axis, and return ``x``. Only ``weft verify --types`` checks the declaration.

    ``types``: for each axis, what the ranks along it hold. V (varying): different values. R (replicated): the same
    value, whose gradients are summands. I (invariant): the same value with the same gradient. P (partial): summands of
    a sum.
    """
    if spmd.TYPE_CHECKING:
        live = [axis for axis in LIVE_AXES if mesh.size(axis) > 1 and axis in types]
        spmd.assert_type(x, {mesh.group(axis): types[axis] for axis in live})
    return x
