"""Aggregation as a tree of events: leaf, middle and top aggregators, each of which adds up what has come (LIFL).

An aggregator adds an update to its sum as soon as it comes. After ``fan_in`` of them it passes the sum on to the
aggregator above, and is free for the next ones. Weighted sums travel upward together with the sums of their weights,
never means of means, so that the tree computes what a flat sum does (Qi et al. 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]


class CarriedSum(NamedTuple):
    """A weighted sum of updates that a node of the tree passes on.

    ``tensors``: the sum by name. ``weight``: sum of the updates' weights. ``updates``: number of updates.
    """

    tensors: dict[str, torch.Tensor]
    weight: float
    updates: int


class TreeAggregator:
    """One node of an aggregation tree, which adds up updates or the sums of other nodes.

    ``fan_in``: number of additions after which the node passes its sum to the node above.

    Attributes:
        ``above``: the aggregator above; None until it is needed.
        ``total``: the sum so far; None before the first addition.
    """

    def __init__(self, fan_in: int) -> None:
        self.fan_in = fan_in
        self.above: TreeAggregator | None = None
        self.total: CarriedSum | None = None
        self._additions = 0
        # tensors of a sum that has been passed on, for the next one
        self._spare: dict[str, torch.Tensor] | None = None

    def add_update(self, update: Tensors, weight: float) -> None:
        """Add ``weight`` times an update to the sum. The update is not kept, and not changed."""
        total = self.total
        if total is None:
            self.total = CarriedSum(self._scaled(update, weight), weight, 1)
        else:
            for name, tensor in update.items():
                total.tensors[name].add_(tensor, alpha=weight)
            self.total = CarriedSum(total.tensors, total.weight + weight, total.updates + 1)  # fmt: skip
        self._carry()

    def _scaled(self, update: Tensors, weight: float) -> dict[str, torch.Tensor]:
        """Return ``weight`` times an update, in the tensors of an earlier sum if there are some."""
        if self._spare is None:
            return {name: tensor * weight for name, tensor in update.items()}
        spare, self._spare = self._spare, None
        for name, tensor in update.items():
            spare[name].copy_(tensor).mul_(weight)
        return spare

    def add_sum(self, carried: CarriedSum) -> bool:
        """Add ``carried``, the sum of a node below. Returns whether that node may reuse the tensors of the sum."""
        total = self.total
        if total is None:
            self.total = carried
        else:
            for name, tensor in carried.tensors.items():
                total.tensors[name].add_(tensor)
            weight = total.weight + carried.weight
            self.total = CarriedSum(total.tensors, weight, total.updates + carried.updates)  # fmt: skip
        self._carry()
        return total is not None

    def _carry(self) -> None:
        """Pass the sum on if it is full."""
        self._additions += 1
        if self._additions < self.fan_in:
            return
        assert self.total is not None
        if self.above is None:
            self.above = TreeAggregator(self.fan_in)
        full, self.total, self._additions = self.total, None, 0
        if self.above.add_sum(full):
            self._spare = full.tensors

    def finished(self) -> CarriedSum | None:
        """Return the sum of all additions so far, or None without any. Resets this node and the nodes above."""
        total = self.total
        self.total, self._additions, self._spare = None, 0, None
        if self.above is None:
            return total
        if total is not None:
            self.above.add_sum(total)
        return self.above.finished()

    @property
    def sums(self) -> int:
        """Number of sums for which this node and the nodes above hold memory."""
        above = self.above.sums if self.above is not None else 0
        return (self.total is not None or self._spare is not None) + above


class AggregationTree:
    """Computes weighted sums of updates by a tree of partial sums, in this process.

    It is called like :func:`weft.federated.weighted_sum.weighted_sum`. ``fan_in``: number of updates, or of sums, that
    a node adds up.
    """

    def __init__(self, fan_in: int) -> None:
        self._leaf = TreeAggregator(fan_in)

    def __call__(
        self, differences: Sequence[Tensors], weights: Sequence[float]
    ) -> dict[str, torch.Tensor]:
        """Return ``sum_i weights_i differences_i`` by name. Raises :class:`ValueError` if there are none."""
        for difference, weight in zip(differences, weights, strict=True):
            self._leaf.add_update(difference, weight)
        total = self._leaf.finished()
        if total is None:
            raise ValueError("there is no update to add up")
        return total.tensors
