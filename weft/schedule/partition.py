"""Which layers go to which stage: the split whose slowest stage is fastest."""

from collections.abc import Sequence
from functools import cache

from weft.errors import UsageError
from weft.model_shape import shape_of
from weft.recipe import ModelShape


def partition(costs: Sequence[float], parts: int, speeds: Sequence[float] | None = None) -> list[range]:
    """Contiguous shares of ``costs``, none empty, with the least largest time; among those, the most even ones.

    ``speeds``: work per time of each part's device. Dynamic programming over (items left, parts left).
    """
    count = len(costs)
    if count < parts:
        raise UsageError(f"{count} layers (with embedding and head) cannot fill {parts} stages; use fewer stages")
    speed = list(speeds) if speeds is not None else [1.0] * parts
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)

    @cache
    def best(start: int, part: int) -> tuple[float, float, int]:
        """Largest time, sum of squared times and first cut of the best split of ``costs[start:]`` over ``part:``."""
        if part == parts - 1:
            time = (total[count] - total[start]) / speed[part]
            return time, time * time, count
        found = (float("inf"), float("inf"), start + 1)
        for end in range(start + 1, count - (parts - part - 1) + 1):
            time = (total[end] - total[start]) / speed[part]
            longest, squares, _ = best(end, part + 1)
            # Rounded, so that two sums of the same numbers in another order count as equal.
            found = min(found, (round(max(time, longest), 9), round(squares + time * time, 9), end))
        return found

    cuts, at = [], 0
    for part in range(parts):
        end = best(at, part)[2]
        cuts.append(range(at, end))
        at = end
    return cuts


def layer_costs(shape: ModelShape, seq_len: int) -> tuple[float, float, float]:
    """Forward flops per token of the embedding, one layer and the output layer with its loss."""
    return shape_of(shape).forward_flops(seq_len)
