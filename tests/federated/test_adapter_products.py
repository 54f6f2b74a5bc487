"""Averages of products of adapters: right where averages of factors are wrong."""

from __future__ import annotations

import pytest
import torch

from weft.errors import UsageError
from weft.federated.adapter_products import AdapterProducts
from weft.federated.weighted_sum import weighted_sum

T = torch.Tensor


def factors(seed: int, rank: int = 1) -> dict[str, T]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"wq.a": (rank, 6), "wq.b": (5, rank), "other": (3,)}
    return {
        n: torch.randn(s, generator=generator, dtype=torch.float64)
        for n, s in shapes.items()
    }


def moved(x: dict[str, T], by: dict[str, T]) -> dict[str, T]:
    return {name: x[name] + by[name] for name in x}


def product(x: dict[str, T]) -> T:
    return x["wq.b"] @ x["wq.a"]


def test_one_client_of_any_rank_keeps_its_product() -> None:
    for rank in (1, 3):
        base, difference = factors(0, rank), factors(1, rank)
        products = AdapterProducts.of(base)
        change = products.factor_difference(
            products.product_difference(difference, base), base
        )
        assert torch.allclose(
            product(moved(base, change)), product(moved(base, difference)), atol=1e-12
        )
        assert torch.equal(change["other"], difference["other"])


def test_clients_of_rank_one_with_one_row_space_are_averaged_exactly() -> None:
    """Their products have a mean of rank one; the means of their factors have another product."""
    base = factors(0)
    first, second = factors(1), factors(2)
    second["wq.a"] = (
        3 * (base["wq.a"] + first["wq.a"]) - base["wq.a"]
    )  # the same direction, another length
    products = AdapterProducts.of(base)
    weights = [0.25, 0.75]
    mean = sum(
        w * product(moved(base, d))
        for w, d in zip(weights, (first, second), strict=True)
    )
    ups = [products.product_difference(d, base) for d in (first, second)]
    change = products.factor_difference(weighted_sum(ups, weights), base)
    assert torch.allclose(product(moved(base, change)), mean, atol=1e-12)
    naive = weighted_sum([first, second], weights)
    assert (product(moved(base, naive)) - mean).abs().max() > 0.1


def test_a_mean_of_higher_rank_is_approximated_as_well_as_can_be() -> None:
    base = factors(0)
    products = AdapterProducts.of(base)
    ups = [products.product_difference(factors(seed), base) for seed in (1, 2, 3)]
    total = weighted_sum(ups, [1 / 3] * 3)
    wanted = product(base) + total["wq.product"]
    change = products.factor_difference(total, base)
    left = torch.linalg.svdvals(wanted - product(moved(base, change)))
    assert torch.allclose(left[:-1], torch.linalg.svdvals(wanted)[1:], atol=1e-12)


def test_without_adapters_there_is_nothing_to_average() -> None:
    with pytest.raises(UsageError, match=r"add \[adapter\]"):
        AdapterProducts.of({"w": 1, "x.a": 2})
