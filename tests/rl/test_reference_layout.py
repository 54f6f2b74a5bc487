"""The reference model on the policy's ranks under a layout of its own: the same numbers, bytes, resumed either way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.rl.test_rl_loader import TREE, recipe, records
from tests.train.test_own_critic import tensors
from weft.checkpoint.boxes import intersection, volume
from weft.errors import WeftError
from weft.layout.mesh import Mesh, from_all
from weft.parallel.reference_weights import REFERENCE
from weft.prove.equality import compare_with_one_device, run_layout
from weft.recipe import Recipe
from weft.rl.log_probabilities import token_log_probabilities
from weft.rl.role_starts import complete_reference, start_roles
from weft.train.reference_layout import reference_beside
from weft.train.setup import build_for_training, prepare
from weft.train.training import train_job

FROZEN: dict[str, Any] = {"train": {"freeze": ["embed*"]}}
ADAPTED: dict[str, Any] = {"adapter": {"rank": 2}}
LOSS = {"start": {"steps": 1}, "loss": {"kl": "k3", "kl_weight": 0.1}}


def given(layout: dict[str, Any], own: dict[str, Any] | None, **more: Any) -> Recipe:
    roles = {"reference": {"layout": own}} if own else None
    steps = TREE["train"] | {"steps": 4, "dtype": "float64"} | more.pop("train", {})
    return recipe(layout=layout, rl=TREE["rl"] | LOSS, roles=roles, train=steps, **more)


def texts() -> list[tuple[list[int], list[bool]]]:
    rng = np.random.default_rng(4)
    return [
        (rng.integers(0, 257, n).tolist(), [at >= n // 2 for at in range(n)])
        for n in (5, 9, 3, 12)
    ]


def lacking(policy: Any, other: Any) -> int:
    """Bytes of the elements of ``other`` that this rank does not hold of the policy."""
    held = {h.name: h.box for h in policy.held}
    total = 0
    for h in other.held:
        common = intersection(held[h.name], h.box) if h.name in held else None
        total += (volume(h.box) - (volume(common) if common else 0)) * 8
    return total


def read(
    layout: dict[str, Any], own: dict[str, Any], more: dict[str, Any]
) -> tuple[list[np.ndarray], list[np.ndarray], bool]:
    """Log-probabilities under the reference model with its own layout, and as a slot, after the policy has moved on."""
    results: list[Any] = []
    for reference in (own, None):
        job = prepare(given(layout, reference, **more))
        mesh = Mesh.create(job.recipe.layout, "cpu")
        built = build_for_training(job.shape, mesh, job.recipe)
        for h in built.state.held:
            h.local.mul_(1.5)
        received = start_roles(job, built.state, mesh)
        beside = reference_beside(built.state)
        if beside is not None:
            exact = received == lacking(built.state, beside.built.state)
            results.append(all(from_all(exact, mesh.step_group)))
            assert complete_reference(built.state, mesh) >= 0
        for h in built.state.learning:
            h.local.add_(0.1)
        built.state.release()
        words = texts(), 1, 2, 16
        if beside is not None:
            model, state = beside.built
            got = token_log_probabilities(model, state, beside.mesh, *words)
        else:
            with built.state.swapped(REFERENCE):
                got = token_log_probabilities(built.model, built.state, mesh, *words)
        results.append(got)
    exact, laid_out, slot = results
    return laid_out, slot, exact


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("layout", "own", "more"),
    [
        ({"shard": 2}, {"tp": 2}, FROZEN),
        ({"shard": 2}, {"shard": 2}, {}),
        pytest.param({"dp": 2}, {"tp": 2}, ADAPTED, marks=pytest.mark.slow),
        pytest.param({"pp": 2}, {"dp": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"tp": 2}, {"pp": 2}, FROZEN, marks=pytest.mark.slow),
        pytest.param({"dp": 2}, {"cp": 2}, FROZEN, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_log_probabilities_are_those_of_a_slot(
    pool: Any, layout: dict[str, Any], own: dict[str, Any], more: dict[str, Any]
) -> None:
    """Also where some weights do not learn; each rank gets only the elements that it lacks."""
    for laid_out, slot, exact in pool.run(2, read, layout, own, more):
        assert exact
        for a, b in zip(laid_out, slot, strict=True):
            if own.keys() & layout.keys():
                assert np.array_equal(a, b) and a.any()
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def types(layout: dict[str, Any], own: dict[str, Any] | None) -> dict[str, Any]:
    """Data types of the tensors that a checkpoint holds of the reference model, by name."""
    job = prepare(given(layout, own, train={"dtype": "bfloat16"}))
    mesh = Mesh.create(job.recipe.layout, "cpu")
    state = build_for_training(job.shape, mesh, job.recipe).state
    beside = reference_beside(state)
    if beside is not None:
        return {name: part.values.dtype for name, part in beside.state.parts().items()}
    return {f"{REFERENCE}.{h.name}": h.slots[REFERENCE].values.dtype for h in state.learning}  # fmt: skip


def test_its_tensors_are_as_wide_as_a_slot(pool: Any) -> None:
    """So a slot can take them over after a loss of ranks, also where the policy computes in bfloat16."""
    (laid_out, *_) = pool.run(2, types, {"shard": 2}, {"tp": 2})
    (slot, *_) = pool.run(2, types, {"shard": 2}, None)
    assert laid_out == slot and {*slot.values()} == {torch.float32}


def trained(
    out: str,
    layout: dict[str, Any],
    own: dict[str, Any] | None,
    steps: int,
    resume: bool,
) -> str:
    job = prepare(given(layout, own, train={"steps": steps}))
    mesh = Mesh.create(job.recipe.layout, "cpu")
    where = (None, out) if resume else (Path(out), None)
    return str(train_job(job, mesh, *where).checkpoint)


def verified(layout: dict[str, Any], own: dict[str, Any]) -> Any:
    job = prepare(given(layout, own))
    mesh = Mesh.create(job.recipe.layout, "cpu")
    trace = run_layout(job, mesh, 2)
    assert "reference" in trace.slots
    return compare_with_one_device(trace, job, mesh)


@pytest.mark.slow(5)
def test_it_is_verified_with_the_rest(pool: Any) -> None:
    difference, _ = pool.run(2, verified, {"shard": 2}, {"tp": 2})
    assert difference.ok, difference


@pytest.mark.slow(30)
def test_a_run_goes_on_with_either_form_of_the_reference(
    pool: Any, tmp_path: Path
) -> None:
    whole, half = str(tmp_path / "whole"), str(tmp_path / "half")
    (saved, _) = pool.run(2, trained, whole, {"shard": 2}, None, 5, False)
    pool.run(2, trained, half, {"shard": 2}, None, 2, False)
    pool.run(2, trained, half, {"shard": 2}, {"tp": 2}, 3, True)
    pool.run(2, trained, half, {"shard": 2}, {"dp": 2}, 4, True)
    (again, _) = pool.run(2, trained, half, {"shard": 2}, None, 5, True)
    a, b = tensors(saved), tensors(again)
    assert a.keys() == b.keys()
    assert any(name.startswith("optimizer.reference.") for name in a)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-10, atol=1e-12)
    moved = [row.get("reference_moved_bytes") for row in records(Path(half), "rollout")]
    assert moved[-1] is None and 0 in moved


def test_what_does_not_fit_is_one_line() -> None:
    def said(own: dict[str, Any], layout: dict[str, Any], **more: Any) -> str:
        with pytest.raises(WeftError) as error:
            prepare(given(layout, own, **more))
        return str(error.value)

    assert "is over 4 ranks, and 2 train" in said({"tp": 4}, {"dp": 2})
    assert "leave placement and skip" in said(
        {"dp": 2, "ep": 2, "placement": "moving"}, {"dp": 2}
    )
    assert "keeps a second model" in said(
        {"tp": 2}, {"dp": 2}, memory={"moments": "host"}
    )
    assert "tp=3" in said({"tp": 3}, {"dp": 3}, train={"batch": 12})
    with pytest.raises(WeftError, match="has no reference model"):
        prepare(recipe(layout={"dp": 2}, roles={"reference": {"layout": {"tp": 2}}}))
