"""Secure sums: the sum itself, whoever is lost, and nothing but noise for who lacks a seed."""

from __future__ import annotations

import itertools

import pytest
import torch

from weft.errors import WeftError
from weft.federated.secure_sum import (
    MaskKey,
    ToldSeed,
    masked,
    new_mask_key,
    rounded_integers,
    unmasked_sum,
)

NAMES = ("a", "b", "c", "d")


def cohort(
    values: dict[str, torch.Tensor], name: str = "round"
) -> tuple[dict[str, torch.Tensor], dict[str, MaskKey]]:
    keys = {client: new_mask_key() for client in values}
    sent = {
        client: masked(
            x,
            client,
            {o: keys[client].seed(keys[o].public, name) for o in values if o != client},
        )
        for client, x in values.items()
    }
    return sent, keys


@pytest.mark.parametrize("clients", [2, 4])
def test_the_secure_sum_is_the_sum(clients: int) -> None:
    torch.manual_seed(clients)
    values = {name: torch.randn(50, dtype=torch.float64) for name in NAMES[:clients]}
    sent, _ = cohort(values)
    total = sum(values.values())
    assert (unmasked_sum(sent) - total).abs().max() <= clients * 2.0**-41
    flat = torch.stack([*sent.values()]).double()
    assert not any(
        torch.allclose(x, v * 2.0**40)
        for x, v in zip(flat, values.values(), strict=True)
    )


@pytest.mark.parametrize(
    "lost", [set(p) for n in (1, 2) for p in itertools.combinations(NAMES, n)]
)
def test_lost_clients_are_taken_out_by_the_seeds_of_the_others(lost: set[str]) -> None:
    values = {name: torch.full((5,), float(i + 1)) for i, name in enumerate(NAMES)}
    sent, keys = cohort(values)
    rest = {name: x for name, x in sent.items() if name not in lost}
    told = [
        ToldSeed(n, o, keys[n].seed(keys[o].public, "round"))
        for n in rest
        for o in sorted(lost)
    ]
    expected = sum(float(values[name][0]) for name in rest)
    assert unmasked_sum(rest, told).tolist() == [expected] * 5
    # the fault: with a seed missing, or that of another sum, the result is noise
    wrong = [
        *told[1:],
        ToldSeed(
            told[0].client, told[0].lost, keys["a"].seed(keys["b"].public, "another")
        ),
    ]
    assert unmasked_sum(rest, told[1:]).abs().min() > 1
    assert unmasked_sum(rest, wrong).abs().min() > 1


def test_what_would_wrap_around_is_refused() -> None:
    with pytest.raises(WeftError, match="secure sums over 2 clients hold less"):
        rounded_integers(torch.tensor([2.0**22]), 2)
    with pytest.raises(WeftError, match="hold less"):
        rounded_integers(torch.tensor([float("nan")]), 2)
    with pytest.raises(WeftError, match="damaged"):
        new_mask_key().seed("00" * 31, "round")
