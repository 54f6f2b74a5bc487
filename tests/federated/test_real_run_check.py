"""``weft verify`` of a federated recipe: real clients against the virtual clock; what cannot be compared is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.errors import UsageError
from weft.federated import real_run_check
from weft.recipe import load_recipe

RECIPE = Path("recipes/federated.toml")


def test_what_the_virtual_clock_does_not_repeat_is_refused() -> None:
    recipe = load_recipe(RECIPE, ["federated.compress_back=int8"])
    with pytest.raises(UsageError, match="does not repeat"):
        real_run_check.compare_real_run(recipe, print)


@pytest.mark.slow(20)
@pytest.mark.soak
def test_real_clients_with_control_variates_are_those_of_the_virtual_clock() -> None:
    recipe = load_recipe(RECIPE, ["federated.policy=scaffold-m"])
    result = real_run_check.compare_real_run(recipe, print)
    assert result.ok and result.updates >= result.changes == real_run_check.ROUNDS
