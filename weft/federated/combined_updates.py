"""How the updates of a change are added up: flat, by a tree, in shared memory, or by a robust rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weft.registry import find

if TYPE_CHECKING:
    import torch

    from weft.federated.policy import FederationPolicy
    from weft.recipe.federated_section import Federated

Tensors = Mapping[str, "torch.Tensor"]


class RobustSum:
    """Robust weighted sum of updates, by a rule of ``resilience.aggregate`` that tolerates some wrong updates. It is
    called like :func:`weft.federated.weighted_sum.weighted_sum`.

    Each update is first scaled by its weight relative to the mean weight. The rule combines the scaled updates to one,
    which is multiplied by the sum of all weights. With the rule "mean" this is the weighted sum itself. An update with
    a value that is not finite is left out. With fewer updates than the rule needs, it tolerates fewer wrong ones.

    ``name``: the rule; ``faulty``: number of wrong updates that it tolerates.
    """

    def __init__(self, name: str, faulty: int) -> None:
        from weft.recipe import Resilience

        self.rule = find("aggregator", name, "federated.aggregate").implementation(Resilience())  # fmt: skip
        self.faulty = faulty

    def __call__(
        self, differences: Sequence[Tensors], weights: Sequence[float]
    ) -> dict[str, torch.Tensor]:
        """Return the combination of ``differences`` by name."""
        import torch

        if not differences:
            raise ValueError("there is no update to add up")
        mean = sum(weights) / len(weights)
        rows = torch.stack([
            torch.cat([tensor.flatten().double() for tensor in difference.values()]) * (weight / mean)
            for difference, weight in zip(differences, weights, strict=True)
        ])  # fmt: skip
        gram = rows @ rows.T
        gram = (gram + gram.T) / 2
        whole = gram.diag().isfinite()
        rows, gram = rows[whole], gram[whole][:, whole]
        # [elements], in the order of the first update's tensors
        most = (len(rows) - self.rule.more) // self.rule.each
        faulty = max(0, min(self.faulty - int((~whole).sum()), most))
        if not len(rows):
            flat = torch.zeros(sum(t.numel() for t in differences[0].values())).double()
        else:
            flat = self.rule.combined(rows, gram, faulty) * sum(weights)
        parts = flat.split([tensor.numel() for tensor in differences[0].values()])
        return {
            name: part.view(tensor.shape).to(tensor.dtype)
            for part, (name, tensor) in zip(parts, differences[0].items(), strict=True)
        }


def combine_as_asked(
    policy: FederationPolicy, settings: Federated
) -> Callable[[], None]:
    """Set how ``policy`` sums updates, as ``settings`` say: by a robust rule, by a tree of aggregators, or as a plain
    sum.

    Returns a function to call at the end: it ends the processes of the aggregators, if ``federated.aggregator`` asked
    for processes, and otherwise does nothing.
    """
    combine: Any
    if settings.aggregate != "mean":
        policy.combine = RobustSum(settings.aggregate, settings.faulty)
    elif settings.fan_in and settings.aggregator == "process":
        from weft.federated.shared_updates import SharedUpdates

        policy.combine = combine = SharedUpdates(settings.fan_in)
        return combine.close
    elif settings.fan_in:
        from weft.federated.aggregation_tree import AggregationTree

        policy.combine = AggregationTree(settings.fan_in)
    return lambda: None
