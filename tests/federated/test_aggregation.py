"""Trees of aggregators: the flat sum exactly, in bounded memory, here and in a process that finds updates in memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.federated.quadratics import QuadraticCohort, clock
from weft.errors import UsageError, WeftError
from weft.federated.aggregation_tree import AggregationTree, TreeAggregator
from weft.federated.combined_updates import RobustSum, combine_as_asked
from weft.federated.shared_updates import SharedUpdates
from weft.federated.weighted_sum import weighted_sum
from weft.recipe import build_recipe

T = torch.Tensor


def updates(count: int) -> list[dict[str, T]]:
    draw = torch.Generator().manual_seed(count)
    return [
        {
            "a": torch.randn(3, 5, dtype=torch.float64, generator=draw),
            "b": torch.randn(7, dtype=torch.float64, generator=draw),
        }
        for _ in range(count)
    ]


def weights(count: int) -> list[float]:
    return [(1 + 7 * i % 5) / 10 for i in range(count)]


def same(one_sum: dict[str, T], other: dict[str, T]) -> bool:
    return all(torch.allclose(one_sum[n], other[n], rtol=0, atol=1e-12) for n in other)


@pytest.mark.parametrize("fan_in", [2, 3, 4, 16])
@pytest.mark.parametrize("count", [1, 2, 7, 16, 65])
def test_a_tree_is_the_flat_sum(fan_in: int, count: int) -> None:
    """Weighted sums go up, and never means of means, which an uneven last group would spoil."""
    tree = AggregationTree(fan_in)
    flat = weighted_sum(updates(count), weights(count))
    kept = updates(count)
    assert same(dict(tree(kept, weights(count))), flat)
    assert all(torch.equal(a["a"], b["a"]) for a, b in zip(kept, updates(count), strict=True))  # fmt: skip
    # warm: the same aggregators once more
    assert same(dict(tree(updates(count), weights(count))), flat)


def test_a_tree_holds_few_sums_and_counts_all() -> None:
    leaf, most = TreeAggregator(4), 0
    for update, weight in zip(updates(64), weights(64), strict=True):
        leaf.add_update(update, weight)
        most = max(most, leaf.sums)
    total = leaf.finished()
    assert total is not None
    assert total.updates == 64 and total.weight == pytest.approx(sum(weights(64)))
    # leaf, middle, top, and the top's top at the last update
    assert most <= 4


@pytest.fixture(scope="module")
def shared() -> Iterator[SharedUpdates]:
    """With an aggregator that is a real interpreter."""
    with SharedUpdates(4) as aggregator:
        yield aggregator


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [1, 2, 7, 16])
def test_shared_memory_is_the_flat_sum(shared: SharedUpdates, count: int) -> None:
    flat = weighted_sum(updates(count), weights(count))
    assert same(shared(updates(count), weights(count)), flat)
    assert shared.peak() <= 4 + 1


@pytest.mark.usefixtures("forked_python")
@pytest.mark.slow(5)
def test_a_dead_aggregator_is_one_line(shared: SharedUpdates) -> None:
    other = SharedUpdates(3)
    other(updates(1), [1.0])
    assert other._child is not None
    other._child.process.kill()
    other._child.process.wait()
    with pytest.raises(WeftError, match="aggregator process is gone"):
        other(updates(9), weights(9))
    other.close()
    # and one whose updates change their form goes on with the new one
    wide = [{"a": torch.ones(100)}]
    assert shared(wide, [0.5])["a"].tolist() == [0.5] * 100
    gc.collect()


def test_a_robust_rule_takes_no_garbage() -> None:
    """One update of five is gigantic, one is NaN; what comes out lies among the others."""
    kept = [{"x": torch.tensor([1.0 + i / 10, 2.0])} for i in range(5)]
    bad = [*kept, {"x": torch.tensor([1e9, -1e9])}, {"x": torch.tensor([torch.nan, 0])}]
    for name in ("trimmed-mean", "geometric-median", "krum"):
        combined = RobustSum(name, 2)(bad, [1 / 7] * 7)["x"]
        assert 0.9 <= float(combined[0]) <= 1.6 and float(combined[1]) == pytest.approx(2.0, abs=0.1), name  # fmt: skip
        # equal updates come out as they are, times the sum of their weights
        alike = RobustSum(name, 1)([kept[0]] * 5, [0.2] * 5)["x"]
        assert torch.allclose(alike, kept[0]["x"])


@pytest.mark.usefixtures("forked_python")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("process", [False, pytest.param(True, marks=pytest.mark.slow(5))])  # fmt: skip
def test_a_policy_adds_up_as_its_recipe_says(process: bool) -> None:
    plain = clock(QuadraticCohort([1.0, 5.0, 2.0, 8.0, 3.0]), [1] * 5, steps=2)
    plain.run(3)
    for settings in ({"fan_in": 2}, {"fan_in": 3, "aggregator": "process"}):
        tree = clock(QuadraticCohort([1.0, 5.0, 2.0, 8.0, 3.0]), [1] * 5, steps=2, **settings)  # fmt: skip
        free = combine_as_asked(tree.policy, tree.policy.settings)
        tree.run(3)
        free()
        assert torch.allclose(tree.parameters["x"], plain.parameters["x"], rtol=0, atol=1e-12)  # fmt: skip
        assert tree.policy.combine is not weighted_sum
    median = {"aggregate": "geometric-median", "steps": 2}
    robust = clock(QuadraticCohort([1.0, 5.0, 2.0, 1e6, 3.0]), [1] * 5, **median)
    combine_as_asked(robust.policy, robust.policy.settings)
    robust.run(30)
    assert 1 < float(robust.parameters["x"]) < 6


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"fresh": "inversion"}, "federated.fresh is about simulated clients"),
        ({"drops": 0.5}, "federated.drops is about simulated clients"),
        ({"secure": True, "aggregate": "krum"}, "hides the updates"),
    ],
)
def test_what_a_real_server_cannot_do_is_refused(
    settings: dict[str, object], word: str
) -> None:
    with pytest.raises(UsageError, match=word):
        build_recipe({"federated": {"listen": "127.0.0.1:0", **settings}})
