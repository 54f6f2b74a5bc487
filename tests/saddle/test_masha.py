"""Saddle points over ranks: equal to one device, exact without compression, and MASHA where naive compression fails."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from weft.api import start
from weft.checkpoint.store import committed_checkpoints
from weft.errors import UsageError, WeftError
from weft.layout.mesh import Mesh
from weft.recipe.read import build_recipe
from weft.recipe.recipe import Recipe
from weft.saddle.saddle_method import SaddleMethod
from weft.saddle.saddle_problem import Draw, Values
from weft.saddle.saddle_run import open_saddle


def game(layout: dict[str, int] | None = None, **settings: Any) -> Recipe:
    """A small bilinear game in float64."""
    saddle = {"size": 6, "lr": 0.1, "rounds": 20} | settings
    return build_recipe({
        "saddle": saddle, "train": {"dtype": "float64"}, "layout": layout or {},
    })  # fmt: skip


def on_one(recipe: Recipe, rounds: int) -> SaddleMethod:
    """All devices in this process, after some rounds."""
    method = open_saddle(recipe, Mesh.single())
    for number in range(rounds):
        method.take_round(number)
    return method


def joined(values: Values) -> torch.Tensor:
    return torch.cat([t.flatten() for t in values.values()])


def by_hand(method: SaddleMethod, rate: float, rounds: int) -> torch.Tensor:
    """The extragradient method on the mean objective, by its closed form."""
    problem: Any = method.problem
    mean = problem.matrices.mean(0)
    zero = torch.zeros_like(mean)
    whole = torch.cat((torch.cat((zero, mean), 1), torch.cat((-mean.mT, zero), 1)))
    whole += problem.weight * torch.eye(len(whole), dtype=whole.dtype)
    offset = problem.offsets.mean(0).flatten()
    z = torch.zeros_like(offset)
    for _ in range(rounds):
        ahead = z - rate * (whole @ z + offset)
        z = z - rate * (whole @ ahead + offset)
    return z


@pytest.mark.parametrize("method", ["extragradient", "naive", "masha1", "masha2"])
def test_nothing_compressed_is_the_extragradient_method(method: str) -> None:
    """MASHA then has a new reference in every round."""
    ours = on_one(game(method=method), 12)
    expected = by_hand(ours, 0.1, 12)
    assert (joined(ours.values) - expected).norm() < 1e-12 * expected.norm()
    assert expected.norm() > 0.1


def test_the_operator_is_zero_at_the_saddle_point() -> None:
    problem: Any = open_saddle(game(), Mesh.single()).problem
    x, y = problem.solution.chunk(2)
    draw = Draw(0, whole=True)
    parts = [joined(problem.operator(d, {"x": x, "y": y}, draw)) for d in range(4)]
    assert sum(parts).norm() < 1e-12 < parts[0].norm()
    assert problem.measures({"x": x, "y": y})["distance"] < 1e-12


def over_ranks(values: dict[str, Any], rounds: int) -> tuple[Any, int, int]:
    """On every rank: the parameters after some rounds, counted and real bytes to other ranks."""
    recipe = build_recipe(values)
    mesh = Mesh.create(recipe.layout, torch.device("cpu"))
    method = open_saddle(recipe, mesh)
    sent = 0
    gather, broadcast = dist.gather, dist.broadcast

    def gathered(tensor: torch.Tensor, into: Any, **options: Any) -> Any:
        nonlocal sent
        sent += 0 if into else tensor.nbytes
        return gather(tensor, into, **options)

    def broadcasted(tensor: torch.Tensor, **options: Any) -> Any:
        nonlocal sent
        if mesh.rank("dp") == 0:
            sent += tensor.nbytes * (mesh.layout.dp - 1)
        return broadcast(tensor, **options)

    with (
        mock.patch("torch.distributed.gather", gathered),
        mock.patch("torch.distributed.broadcast", broadcasted),
    ):
        for number in range(rounds):
            method.take_round(number)
    return method.values, method.exchange.sent, sent


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("method", "compress"), [
    ("masha1", "randk:0.3"), ("masha2", "topk:0.3"), ("extragradient", "none"), ("naive", "randk:0.3"),
    ("masha1", "int6:random"), ("masha2", "int4"), ("masha2", "sign"), ("masha2", "powersgd:1"), ("masha2", "cocktail"),
])  # fmt: skip
def test_ranks_compute_what_one_device_does_and_send_what_the_formula_says(
    pool: Any, method: str, compress: str
) -> None:
    rounds = 8
    recipe = game(
        {"dp": 4}, method=method, compress=compress, compress_back="none" if compress == "sign" else ""
    )  # fmt: skip
    answers = pool.run(4, over_ranks, recipe.model_dump(mode="json"), rounds)
    alone = on_one(recipe, rounds)
    expected = joined(alone.values)
    up, down = alone.traffic(rounds)
    for rank, (values, counted, real) in enumerate(answers):
        assert (joined(values) - expected).norm() <= 1e-10 * expected.norm()
        assert counted == real == (up if rank else 3 * down)


def test_bytes_are_those_of_compressed_and_of_whole_messages() -> None:
    """12 values: 3 of 6 for each player, and twelve whole at each reference."""
    method = on_one(game(compress="randk:0.5", refresh=0.3), 40)
    assert 3 < method.wholes < 30
    assert method.traffic(40) == (40 * 6 * 8 + method.wholes * 12 * 8,) * 2
    # by default both kinds of messages take the same
    assert on_one(game(compress="randk:0.5"), 1).refresh == 0.5


def test_a_run_goes_on_from_its_checkpoint_on_other_ranks(
    pool: Any, tmp_path: Path
) -> None:
    """With residuals of all devices and of the server; and a changed problem is refused."""
    recipe = game(method="masha2", compress="topk:0.3", rounds=7)
    start(recipe, tmp_path / "a")
    longer = game({"dp": 2}, method="masha2", compress="topk:0.3", rounds=15)
    answers = pool.run(2, continued, longer.model_dump(mode="json"), str(tmp_path / "a"))  # fmt: skip
    expected = joined(on_one(longer, 15).values)
    for values in answers:
        assert (joined(values) - expected).norm() <= 1e-12 * expected.norm()
    assert len(committed_checkpoints(tmp_path / "a/checkpoints")) == 2
    with pytest.raises(WeftError, match=r"has saddle\.size = 6, the recipe 5; restore"):
        start(game(method="masha2", compress="topk:0.3", size=5), tmp_path / "a", "auto")  # fmt: skip


def continued(values: dict[str, Any], folder: str) -> Any:
    """On every rank: go on with a run to its end; return its parameters."""
    from weft.saddle import saddle_run

    recipe = build_recipe(values)
    mesh = Mesh.create(recipe.layout, torch.device("cpu"))
    opened: list[SaddleMethod] = []

    def note(*args: Any) -> SaddleMethod:
        opened.append(open_saddle(*args))
        return opened[0]

    with mock.patch.object(saddle_run, "open_saddle", note):
        saddle_run.saddle_job(recipe, mesh, Path(folder), "auto")
    return opened[0].values


@pytest.mark.parametrize(("change", "line"), [
    ({"compress": "topk:0.1"}, r"method = 'masha1' needs compressors that lose nothing on average.*'topk:0.1' does"),
    ({"method": "extragradient", "compress": "int8"}, "sends everything; leave compress out"),
    ({"compress": "topk"}, "compress: compressor 'topk' needs the share"),
    ({"problem": "chess"}, "bilinear"), ({"devices": 3, "layout": {"dp": 2}}, "devices = 3 cannot be divided"),
])  # fmt: skip
def test_wrong_settings_are_refused(change: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        game(**change)


def test_other_sections_are_refused() -> None:
    with pytest.raises(UsageError, match=r"\[optimizer\] does nothing beside \[saddle\]"):  # fmt: skip
        build_recipe({"saddle": {}, "optimizer": {"kind": "sgd"}})
    with pytest.raises(UsageError, match=r"train\.steps does nothing beside \[saddle\]"):  # fmt: skip
        build_recipe({"saddle": {}, "train": {"steps": 7}})
    with pytest.raises(UsageError, match=r"the recipe has \[saddle\]"):
        build_recipe({"saddle": {}}).need_model()


def test_what_leaves_all_bounds_ends_the_run_by_name(tmp_path: Path) -> None:
    recipe = game(method="naive", compress="randk:0.2", lr=50.0, rounds=2000)
    with pytest.raises(WeftError, match=r"'naive' has left all bounds.*lower saddle.lr"):  # fmt: skip
        start(recipe, tmp_path / "a")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("method", "compress"), [("masha1", "randk:0.2"), ("masha2", "topk:0.2")]
)
def test_masha_converges_where_naive_compression_does_not(
    pool: Any, method: str, compress: str
) -> None:
    """Over four ranks: MASHA comes near; compressed operators go or stay away, at its step size and ten times it."""
    recipe = game({"dp": 4}, method=method, compress=compress, size=20, lr=0.04)
    values = recipe.model_dump(mode="json")
    problem = open_saddle(recipe, Mesh.single()).problem
    near = [
        problem.measures(pool.run(4, over_ranks, values, rounds)[0][0])["distance"]
        for rounds in (1500, 3000)
    ]
    assert near[1] < 3e-3 and near[1] < 0.1 * near[0]
    for rate in (0.4, 0.04):
        other = game({"dp": 4}, method="naive", compress=compress, size=20, lr=rate)
        answers = pool.run(4, over_ranks, other.model_dump(mode="json"), 1500)
        assert not problem.measures(answers[0][0])["distance"] < 0.1


def test_directions_hold_what_they_lost() -> None:
    """MASHA2 feeds back: what a device has sent and what is left of it are what it had to send."""
    method: Any = on_one(game(method="masha2", compress="topk:0.3"), 5)
    assert all(
        any(float(t.abs().sum()) for t in values.values())
        for way in (method.up, method.back)
        for values in way.residuals.values()
    )
    assert {*method.up.residuals} == {0, 1, 2, 3} and {*method.back.residuals} == {4}
    assert [f.name for f in dataclasses.fields(method.up)] == ["compressor", "residuals"]  # fmt: skip
