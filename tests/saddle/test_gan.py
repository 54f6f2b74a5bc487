"""Adversarial training: who minimises and who maximises, what a random choice is, and how images are judged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from weft.layout.mesh import Mesh
from weft.recipe.read import build_recipe, load_recipe
from weft.recipe.recipe import Recipe
from weft.saddle.saddle_problem import Draw, Values
from weft.saddle.saddle_run import open_saddle
from weft.techniques.saddle_problems.gan import frechet_distance

pytest.importorskip("sklearn")


def small(method: str = "extragradient", **settings: Any) -> Recipe:
    """A tiny network over two devices."""
    saddle = {"problem": "gan", "method": method, "devices": 2}
    saddle |= {"hidden": 4, "latent": 3, "batch": 8} | settings
    return build_recipe({"saddle": saddle, "train": {"dtype": "float64"}})


def test_a_step_against_the_operator_helps_both_players() -> None:
    problem = open_saddle(small(), Mesh.single()).problem
    values, draw = problem.start(), Draw(0, whole=True)
    operator = problem.operator(0, values, draw)
    before = float(problem.value(0, values, draw))
    for player, sign in (("generator", -1), ("critic", 1)):
        ahead: Values = {
            name: t - 1e-4 * operator[name] * name.startswith(player)
            for name, t in values.items()
        }
        assert sign * (float(problem.value(0, ahead, draw)) - before) > 1e-8
    assert {name for name in values if name.startswith("critic")} == problem.maximised


def test_the_same_choice_is_the_same_samples_and_devices_have_different_ones() -> None:
    problem = open_saddle(small(), Mesh.single()).problem
    values = problem.start()

    def value(device: int, number: int, whole: bool) -> float:
        return float(problem.value(device, values, Draw(number, whole)))

    assert value(0, 3, False) == value(0, 3, False) != value(0, 4, False)
    assert value(0, 3, True) == value(0, 4, True) != value(1, 3, True)


def test_few_samples_give_the_whole_operator_on_average() -> None:
    """MASHA's reference is that of all samples, and what is sent the difference of few: both have the same mean."""
    problem = open_saddle(small(batch=64), Mesh.single()).problem
    values = problem.start()
    whole = float(problem.value(0, values, Draw(0, whole=True)))
    drawn = [float(problem.value(0, values, Draw(n, whole=False))) for n in range(60)]
    assert abs(np.mean(drawn) - whole) < 4 * np.std(drawn) / 60**0.5 + 0.02


def test_equal_images_have_no_distance_and_moved_ones_that_of_their_means() -> None:
    images = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)).double()
    assert abs(frechet_distance(images, images)) < 1e-10
    assert frechet_distance(images, images * float("nan")) == float("inf")
    assert frechet_distance(images, images + 2) == pytest.approx(6 * 4)
    assert frechet_distance(images, 3 * (images - images.mean(0)) + images.mean(0)) == pytest.approx(
        4 * float(images.var(0).sum())
    )  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("change", [[], ["saddle.method=masha2", "saddle.compress=topk:0.1"]])  # fmt: skip
def test_the_recipe_learns_to_draw_digits(change: list[str]) -> None:
    """Images come nearer to digits than noise of the digits' mean and variances would be."""
    recipe = load_recipe("recipes/gan.toml", change)
    method = open_saddle(recipe, Mesh.single())
    first = method.problem.measures(method.values)["frechet"]
    for number in range(recipe.saddle.rounds):
        method.take_round(number)
    assert method.problem.measures(method.values)["frechet"] < 0.25 * first
