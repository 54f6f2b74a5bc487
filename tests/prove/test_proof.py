"""The comparison with one device: rounding noise is no difference, and a millionth of a gradient is."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.cases import recipe, write_corpus
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.layout.parts import Part
from weft.prove.equality import (
    Difference,
    StepTrace,
    compare_with_one_device,
    difference,
    run_layout,
)
from weft.recipe import build_recipe
from weft.train import step
from weft.train.setup import prepare


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def on_another_processor(values: dict[str, Any]) -> Difference | None:
    """The layout's gradients get what rounding may leave of them elsewhere, also those that are zero here."""
    settings = build_recipe(values)
    mesh, job = Mesh.create(settings.layout, "cpu"), prepare(settings)
    real = step.reduced

    def rounded(state: Any, mesh: Mesh, looked_at: bool) -> dict[str, torch.Tensor]:
        grads, rng = real(state, mesh, looked_at), torch.Generator().manual_seed(0)
        for grad in grads.values():
            noise = torch.randn(grad.shape, generator=rng, dtype=grad.dtype)
            grad += noise * torch.finfo(grad.dtype).eps / max(1, grad.numel()) ** 0.5
        return grads

    with mock.patch.object(step, "reduced", rounded):
        mine = run_layout(job, mesh, 3)
    return compare_with_one_device(mine, job, mesh)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("layout", "change"), [
    # One key gets all the attention: the gradients of queries and keys are zero.
    ("dp=2", {"data__seq_len": 1, "train__dtype": "float32"}),
    ("shard=2", {"data__seq_len": 1}),
    ("tp=2", {"model__qkv_bias": True, "model__init_std": 0.02, "train__dtype": "float32", "optimizer__lr": 1e-2}),
], ids=str)  # fmt: skip
def test_rounding_noise_does_not_decide(
    pool: Any, corpus: str, layout: str, change: dict[str, Any]
) -> None:
    settings = recipe(corpus, **change).model_copy(
        update={"layout": Layout.parse(layout)}
    )
    found = pool.run(2, on_another_processor, settings.model_dump(mode="json"))[0]
    assert found.ok, found


#: Parameters, and what is done to their gradient; all of it by a millionth of the gradient's norm.
TENSORS = (
    "embedding.table", "head", "norm.scale", "blocks.0.attention_norm.scale", "blocks.1.ffn_norm.scale",
    "blocks.0.attention.wq", "blocks.1.attention.wk", "blocks.0.attention.bv", "blocks.1.attention.wo",
    "blocks.1.ffn.gate",
)  # fmt: skip
DAMAGE = ("scaled", "one element")


def damaged(values: dict[str, Any]) -> list[tuple[str, str, float, bool]]:
    """Every tensor and damage: the largest relative difference of gradients, and whether it passes for equal."""
    settings = build_recipe(values)
    mesh, job = Mesh.create(settings.layout, "cpu"), prepare(settings)
    real, found = step.reduced, []
    for name in TENSORS:
        for damage in DAMAGE:

            def wrong(
                state: Any,
                mesh: Mesh,
                looked_at: bool,
                name: str = name,
                damage: str = damage,
            ) -> dict[str, Any]:
                grads = real(state, mesh, looked_at)
                whole = torch.linalg.vector_norm(grads[name])
                if damage == "scaled":
                    grads[name] = grads[name] * (1 + 1e-6)
                elif mesh.is_main:
                    grads[name].view(-1)[-1] += 1e-6 * whole
                return grads

            with mock.patch.object(step, "reduced", wrong):
                mine = run_layout(job, mesh, 1)
            seen = compare_with_one_device(mine, job, mesh)
            if seen is not None:
                found.append((name, damage, seen.grad, seen.ok))
    return found


@pytest.mark.slow
def test_a_millionth_of_a_gradient_is_found(pool: Any, corpus: str) -> None:
    values = recipe(
        corpus, layout__tp=2, model__init_std=0.02, model__qkv_bias=True
    ).model_dump(mode="json")
    found = pool.run(2, damaged, values)[0]
    assert len(found) == 20
    assert [one for one in found if one[3] or not 1e-7 < one[2] < 1e-5] == []


@pytest.mark.parametrize(("off", "ok"), [(1e-14, True), (1e-6, False)])
def test_rounding_of_losses_is_no_difference_of_slopes_between_near_points(
    off: float, ok: bool
) -> None:
    """A slope of losses at points 0.002 apart has 500 times the rounding of these, and may itself be small."""

    def trace(slope: float) -> StepTrace:
        grad = slope * torch.tensor([3.0, 4.0], dtype=torch.float64)
        named = {"w": Part(grad, ((0, 2),), mock.Mock())}
        return StepTrace([5.0], [abs(slope)], [named], {}, {})

    slope = 1e-3
    moved = trace(slope + off / 2e-3)
    assert difference([moved], trace(slope), "float64", 2e-3).ok is ok
    assert not difference([moved], trace(slope), "float64").ok


@pytest.mark.parametrize(("grad", "off", "ok"), [
    # nothing but rounding: keys' adapters where every query sees one key
    (1e-17, 1e-17, True),
    # and be they a small part of the model: what does not learn is no measure
    (1e-17, 1e-14, True),
    (1e-17, 1e-12, False),
    (1e-4, 1e-13, False),  # a small gradient that is one
])  # fmt: skip
def test_noise_is_no_measure_where_all_gradients_are_zero(
    grad: float, off: float, ok: bool
) -> None:
    def trace(value: float) -> StepTrace:
        named = {name: Part(torch.tensor([x], dtype=torch.float64), ((0, 1),), mock.Mock())
                 for name, x in [("grad", value), ("w", 2.0), ("frozen", 200.0)]}  # fmt: skip
        return StepTrace([5.0], [abs(value)], [{"w": named.pop("grad")}], named, {})

    assert difference([trace(grad + off)], trace(grad), "float64").ok is ok


@pytest.mark.parametrize(("slot", "off", "ok"), [
    # of a parameter that hardly moves, whose own rounding is no less
    ("outer", 1e-13, True),
    ("outer", 1e-9, False),
    ("exp_avg", 1e-13, False),
    # of islands that agree, in a vector of theirs
    ("pull", 1e-13, True),
    ("pull", 1e-9, False),
])  # fmt: skip
def test_a_difference_of_parameters_is_as_exact_as_these(
    slot: str, off: float, ok: bool
) -> None:
    def trace(moved: float) -> StepTrace:
        grad, parameter = (
            torch.tensor([1e-12], dtype=torch.float64),
            torch.tensor([0.5], dtype=torch.float64),
        )
        named = {
            name: Part(x, ((0, 1),), mock.Mock())
            for name, x in [("grad", grad), ("w", parameter)]
        }
        kept = {
            "w": Part(
                torch.tensor([moved], dtype=torch.float64), ((0, 1),), mock.Mock()
            )
        }
        return StepTrace(
            [5.0],
            [1e-12],
            [{"w": named["grad"]}],
            {"w": named["w"]},
            {slot: kept, "dual": {"w": named["w"]}},
        )

    assert difference([trace(1e-12 + off)], trace(1e-12), "float64").ok is ok
