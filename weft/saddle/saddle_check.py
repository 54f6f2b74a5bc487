"""Compares a search for a saddle point over ranks with the same search on one device."""

from __future__ import annotations

from typing import NamedTuple

from weft.layout.mesh import Mesh, from_all
from weft.recipe.recipe import Recipe
from weft.run.rank_processes import rank_process
from weft.saddle.saddle_run import open_saddle
from weft.train.setup import device_type


class SaddleDifference(NamedTuple):
    """Difference between a run on ranks and the same run on one device.

    Attributes:
        ``parameters``: the largest difference of a parameter on any rank, divided by the largest magnitude of any
            parameter on one device.
        ``worst``: name of this parameter.
        ``sent``: bytes that all ranks have sent to others.
    """

    parameters: float
    worst: str
    sent: int


def compare_saddle(recipe: Recipe, rounds: int) -> SaddleDifference | None:
    """Join the ranks of ``recipe``, take ``rounds`` rounds there and on one device, and compare the parameters. All
    ranks must call it. Return the differences on the first rank, and None on all others.
    """
    device = device_type(recipe)
    with rank_process(device, recipe.train.timeout, recipe.train.threads):
        mesh = Mesh.create(recipe.layout, device)
        method = open_saddle(recipe, mesh)
        for number in range(rounds):
            method.take_round(number)
        own = {name: t.cpu() for name, t in method.values.items()}
        everyone = from_all((own, method.exchange.sent), mesh.step_group)
        if not mesh.is_main:
            return None
        alone = open_saddle(recipe, Mesh.single(mesh.device.type))
        for number in range(rounds):
            alone.take_round(number)
        largest = max(float(t.abs().max()) for t in alone.values.values())
        apart = {
            name: max(float((values[name] - t.cpu()).abs().max()) for values, _ in everyone)
            for name, t in alone.values.items()
        }  # fmt: skip
        worst = max(apart, key=apart.__getitem__)
        sent = sum(count for _, count in everyone)
        return SaddleDifference(apart[worst] / (largest or 1.0), worst, sent)
