"""Compare two checkpoints bit by bit, whatever layouts they were saved from."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.checkpoint.load import StoredCheckpoint
from weft.layout.dims import Box, Tensor, extents, part, whole_box
from weft.layout.parts import TORCH_DTYPES, Part

CHUNK = 1 << 22  # elements that are compared together
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorDifference:
    """Difference between the values of one tensor in two checkpoints.

    ``different``: number of elements that differ; ``max``: largest absolute difference; ``relative``: 2-norm of the
    difference, divided by that of the tensor in the first checkpoint.
    """

    different: int  # elements
    max: float  # absolute difference
    relative: float  # 2-norm of the difference, divided by that of the first tensor


@dataclass(frozen=True)
class Comparison:
    """Differences between a first and a second checkpoint.

    Attributes:
        ``meta``: fields of the root file that differ, by name, each with its value in the first and in the second
            checkpoint.
        ``missing``: names of tensors that only the first checkpoint holds.
        ``extra``: names of tensors that only the second checkpoint holds.
        ``changed``: tensors whose dtype or shape differs, by name, each with ``[dtype, shape]`` in the first and in the
            second.
        ``values``: difference of each tensor whose values differ, by name.
    """

    meta: dict[str, list[Any]]  # pairs
    missing: list[str]  # in the second
    extra: list[str]  # in the second only
    changed: dict[str, list[list[Any]]]  # pairs of dtype and shape
    values: dict[str, TensorDifference] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether all tensors are equal. Differing fields of the root file, such as step or layout, do not count."""
        return not (self.missing or self.extra or self.changed or self.values)


def compare(left: StoredCheckpoint, right: StoredCheckpoint) -> Comparison:
    """Read the two checkpoints ``left`` and ``right`` from end to end, and return their differences.

    In the result ``left`` is the first checkpoint, and ``right`` the second.
    """
    fields = ("step", "layout", "world", "data", "progress")
    meta = {
        k: [left.meta.get(k), right.meta.get(k)]
        for k in fields
        if left.meta.get(k) != right.meta.get(k)
    }
    missing = [name for name in left.tensors if name not in right.tensors]
    extra = [name for name in right.tensors if name not in left.tensors]
    changed, values = {}, {}
    for name in (name for name in left.tensors if name in right.tensors):
        first, second = (
            [side.tensors[name].dtype, side.tensors[name].shape]
            for side in (left, right)
        )
        if first != second:
            changed[name] = [first, second]
        elif (gap := _difference(name, left.tensors[name], left, right)).different:
            values[name] = gap
    return Comparison(meta, missing, extra, changed, values)


def _difference(
    name: str, tensor: Tensor, left: StoredCheckpoint, right: StoredCheckpoint
) -> TensorDifference:
    count, largest, apart, norm = 0, 0.0, 0.0, 0.0
    rows = (*tensor.shape, 1)[0]
    for i in range(pieces := min(rows, -(-tensor.numel // CHUNK))):
        box: Box = (part(rows, pieces, i), *whole_box(tensor.shape[1:]))[
            : len(tensor.shape)
        ]
        x, y = (
            torch.empty(extents(box), dtype=TORCH_DTYPES[tensor.dtype]) for _ in "xy"
        )
        left.load({name: Part(x, box, tensor)})
        right.load({name: Part(y, box, tensor)})
        unequal = x.view(BITS[tensor.itemsize]) != y.view(BITS[tensor.itemsize])
        norm += float(x.double().square().sum())
        if differing := int(unequal.sum()):
            gap = (x[unequal].double() - y[unequal].double()).abs()
            count, apart = count + differing, apart + float(gap.square().sum())
            largest = max(largest, float(gap.max()), key=lambda v: (math.isnan(v), v))
    return TensorDifference(
        count, largest, math.sqrt(apart / norm) if norm else math.inf
    )
