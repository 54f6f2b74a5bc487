"""Every optimizer: what its paper or PyTorch's computes on one device, and the same under every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import recipe, write_corpus
from tests.checkpoint.test_resume import go, series, tree
from tests.prove.test_equality import difference
from weft.errors import WeftError
from weft.layout.dims import Dim
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.memory.noise import normal, random_bits
from weft.memory.quantised import (
    Blocks,
    decoded,
    dynamic_map,
    encoded,
    rounded_bf16,
    unpacked,
)
from weft.models.nf4 import packed
from weft.parallel.state import Held, State, Unit
from weft.recipe import Optimizer
from weft.registry import names
from weft.techniques.optimizers.galore import projection
from weft.techniques.optimizers.muon import orthogonal
from weft.techniques.phases.zeroth_order.two_points import direction
from weft.train import rule_optimizer
from weft.train.build_step import build_step
from weft.train.rule_optimizer import RuleOptimizer, slot_bytes
from weft.train.rules import compact_adamw
from weft.train.setup import build_for_training, prepare
from weft.train.step import StepContext, reduced_gradients

T = torch.Tensor
WAYS = [{"estimate": "zeroth-order", "kind": "sgd"}]
WAYS += [{"kind": kind} for kind in names("optimizer")]
WAYS += [{"state": state} for state in names("moments")]


def name(way: dict[str, Any]) -> str:
    return "-".join(str(v).replace(" ", "_") for v in way.values())


def one_state(
    *shapes: tuple[int, ...], way: dict[str, Any], dtype: torch.dtype = torch.float64
) -> State:
    """Parameters of these shapes on one device, drawn at random, with an optimizer."""
    mesh, generator, held = Mesh.single(), torch.Generator().manual_seed(1), []
    for i, shape in enumerate(shapes):
        parameter = torch.nn.Parameter(
            torch.randn(shape, generator=generator).to(dtype)
        )
        logical = mesh.place.logical(
            [Dim(f"d{k}", n) for k, n in enumerate(shape)], 0.1
        )
        held.append(
            Held(
                f"blocks.{i}.w",
                logical,
                mesh.place.hold(logical),
                parameter.detach(),
                parameter,
            )
        )
    optimizer = RuleOptimizer(Optimizer(**{"weight_decay": 0.1, **way}), mesh)
    state = State([Unit(held)], optimizer=optimizer)
    state.make_slots()
    return state


def run(
    state: State, steps: int, lr: float = 1e-2, seed: int = 2
) -> list[dict[str, T]]:
    """Update by gradients drawn at random; returns these."""
    generator, seen = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        grads = {
            h.name: torch.randn(h.local.shape, generator=generator).to(h.local.dtype)
            for h in state.held
        }
        seen.append({name: g.clone() for name, g in grads.items()})
        for unit in state.units:
            state.update(unit, grads, lr)
    return seen


def by_pytorch(state: State, make: Any, grads: list[dict[str, T]]) -> list[T]:
    """What PyTorch's optimizer makes of the same parameters, by the same gradients."""
    parameters = [torch.nn.Parameter(h.local.clone()) for h in state.held]
    other = make(parameters)
    for step in grads:
        for h, parameter in zip(state.held, parameters, strict=True):
            parameter.grad = step[h.name].clone()
        other.step()
    return [p.detach() for p in parameters]


def largest_difference(state: State, others: list[T]) -> float:
    return max(
        (h.local - p).abs().max().item()
        for h, p in zip(state.held, others, strict=True)
    )


@pytest.mark.parametrize("way", WAYS, ids=name)
def test_parameters_without_rows_here_count_their_updates(way: dict[str, Any]) -> None:
    """A rank that holds no rows of its first parameter draws the same random directions as the others."""
    first, second = one_state((6, 5), (7, 5), way=way).held
    box = ((0, 0), first.box[1])
    empty = torch.nn.Parameter(first.local[:0].clone())
    placement = replace(first.placement, box=box)
    without = Held(first.name, first.logical, placement, empty.detach(), empty)
    optimizer = RuleOptimizer(Optimizer(**way), Mesh.single())
    state = State([Unit([without]), Unit([second])], optimizer=optimizer)
    state.make_slots()
    run(state, 3)
    assert [int(h.updates) for h in state.held] == [3, 3]
    assert state.updates == 3


def test_adafactor_is_pytorchs() -> None:
    way = {"kind": "adafactor", "weight_decay": 0.0}
    before, state = one_state((7, 5), (6,), way=way), one_state((7, 5), (6,), way=way)
    grads = run(state, 6)
    others = by_pytorch(
        before, lambda p: torch.optim.Adafactor(p, lr=1e-2, weight_decay=0.0), grads
    )
    assert largest_difference(state, others) < 1e-12


def test_muon_is_pytorchs_but_for_its_bfloat16() -> None:
    way = {"kind": "muon", "momentum": 0.9}
    before, state = (
        one_state((9, 5), (4, 11), way=way),
        one_state((9, 5), (4, 11), way=way),
    )
    grads = run(state, 4)
    others = by_pytorch(
        before,
        lambda p: torch.optim.Muon(
            p, lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
        ),
        grads,
    )
    moved = max(
        (h.local - b.local).abs().max().item()
        for h, b in zip(state.held, before.held, strict=True)
    )
    assert largest_difference(state, others) < 0.03 * moved


def test_muons_update_has_singular_values_near_one() -> None:
    x = torch.randn(
        12, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    values = torch.linalg.svdvals(orthogonal(x))
    assert values.min() > 0.6 and values.max() < 1.3
    torch.testing.assert_close(orthogonal(x.mT), orthogonal(x).mT)


def test_lion_is_as_published() -> None:
    way = {"kind": "lion", "betas": (0.9, 0.99)}
    before, state = one_state((3, 4), way=way), one_state((3, 4), way=way)
    w, m = before.held[0].local.clone(), torch.zeros(3, 4, dtype=torch.float64)
    for step in run(state, 5):
        g = step["blocks.0.w"]
        w = w - 1e-2 * ((0.9 * m + 0.1 * g).sign() + 0.1 * w)
        m = 0.99 * m + 0.01 * g
    assert largest_difference(state, [w]) < 1e-14


@pytest.mark.parametrize("bits", [8, 4])
def test_small_moments_with_an_element_per_block_are_adamw(bits: int) -> None:
    way = {"state": f"{bits}bit", "block": 1}
    state, full = one_state((64, 64), (3,), way=way), one_state((64, 64), (3,), way={})
    run(state, 5)
    run(full, 5)
    assert largest_difference(state, [h.local for h in full.held]) < 1e-14


@pytest.mark.parametrize("state", ["8bit", "4bit", "bfloat16"])
def test_small_moments_stay_near_adamw_and_weigh_what_is_said(state: str) -> None:
    shape = (64, 512)
    mine, full = (
        one_state(shape, way=way, dtype=torch.float32) for way in ({"state": state}, {})
    )
    grads = run(mine, 20, lr=1e-3)
    run(full, 20, lr=1e-3)
    assert (
        largest_difference(mine, [h.local for h in full.held])
        < {"8bit": 2e-2, "4bit": 2e-2, "bfloat16": 2e-3}[state]
    )
    assert len(grads) == 20
    kept = sum(
        p.values.numel() * p.values.element_size() for p in mine.held[0].slots.values()
    )
    said = slot_bytes(Optimizer(state=state), 4) * 64 * 512
    assert said <= kept <= said * 1.04
    assert kept <= {"8bit": 0.27, "4bit": 0.14, "bfloat16": 0.5}[state] * 8 * 64 * 512


def test_galore_in_the_whole_space_is_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    """With permutations as directions: Adam does not survive other rotations, so full rank alone is no test."""

    def permutation(grad: T, side: int, rank: int) -> T:
        return torch.eye(rank, dtype=grad.dtype)[
            torch.randperm(rank, generator=torch.Generator().manual_seed(0))
        ]

    monkeypatch.setattr(projection, "singular_directions", permutation)
    way: dict[str, Any] = {"eps": 1e-30, "weight_decay": 0.0}
    whole = {"kind": "galore", "rank": 99, "scale": 1.0}
    state, full = (
        one_state((7, 5), (3, 8), way=way | kind) for kind in (whole, {"kind": "adamw"})
    )
    run(state, 6)
    run(full, 6)
    assert largest_difference(state, [h.local for h in full.held]) < 1e-12


def test_natural_galore_inverts_the_fisher_matrix() -> None:
    state = one_state((6, 4), way={"kind": "natural-galore", "rank": 3, "history": 2})
    rule, held = state.optimizer.rule.adam, state.held[0]  # type: ignore[union-attr]
    lows = [
        torch.randn(
            6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(i)
        )
        for i in range(3)
    ]
    for count, low in enumerate(lows, 1):
        found = rule._natural(held, low, count)
    past = torch.stack([low.flatten() for low in lows[-2:]], dim=1)
    dense = projection.DAMPING * torch.eye(18, dtype=torch.float64) + past @ past.mT
    torch.testing.assert_close(
        found.flatten(),
        torch.linalg.solve(dense, lows[-1].flatten()),
        rtol=1e-8,
        atol=1e-8,
    )
    bytes_kept = (
        held.slots["past"].values.numel() / held.slots["exp_avg"].values.numel()
    )
    assert bytes_kept == 2


def test_natural_galore_keeps_its_figures_where_gradients_are_large() -> None:
    """As estimates of zeroth order are: their squares are 1e12 times the damping."""
    state = one_state((6, 4), way={"kind": "natural-galore", "rank": 3, "history": 1})
    rule, held = state.optimizer.rule.adam, state.held[0]  # type: ignore[union-attr]
    low = 1e4 * torch.randn(
        6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    expected = low / (projection.DAMPING + low.square().sum())
    torch.testing.assert_close(
        rule._natural(held, low, 1), expected, rtol=1e-12, atol=0.0
    )


def test_directions_have_one_sign() -> None:
    x = torch.randn(
        9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    for side in (0, 1):
        found = projection.singular_directions(x, side, 4)
        torch.testing.assert_close(found, projection.singular_directions(-x, side, 4))
        torch.testing.assert_close(found @ found.mT, torch.eye(4, dtype=torch.float64))


def test_directions_of_opposite_rows_have_one_sign() -> None:
    """Of a softmax over two, whose rows' gradients are opposite: which entry is larger is rounding."""
    row = torch.randn(
        7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    for noise in (1 + 1e-14, 1 - 1e-14):
        for sign in (1, -1):
            found = projection.singular_directions(
                torch.stack((row * noise, -row)) * sign, 0, 1
            )
            torch.testing.assert_close(
                found, torch.tensor([[0.5**0.5, -(0.5**0.5)]], dtype=torch.float64)
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_directions_that_a_gradient_has_not_are_none(dtype: torch.dtype) -> None:
    """Of two tokens there are two; what rounding takes for a third would differ under every layout."""
    ends = [
        torch.randn(n, 2, dtype=dtype, generator=torch.Generator().manual_seed(n))
        for n in (9, 6)
    ]
    for side in (0, 1):
        found = projection.singular_directions(ends[0] @ ends[1].mT, side, 4)
        other = projection.singular_directions(
            (3 * ends[0]) @ (ends[1].mT / 3), side, 4
        )
        torch.testing.assert_close(found, other)
        assert not found[2:].any() and torch.allclose(
            found[:2] @ found[:2].mT, torch.eye(2, dtype=dtype), atol=1e-5
        )
    assert not projection.singular_directions(torch.zeros(4, 3), 0, 2).any()


def test_groups_and_the_average() -> None:
    groups = [
        {"match": "blocks.1.*", "lr": 0.0},
        {"match": "*.2.w", "weight_decay": 0.5},
    ]
    way = {"groups": groups, "ema": 0.9}
    before, state = (
        one_state((3, 4), (3, 4), (3, 4), way=way),
        one_state((3, 4), (3, 4), (3, 4), way=way),
    )
    grads = run(state, 1)
    assert torch.equal(before.held[1].local, state.held[1].local)
    for i, decay in ((0, 0.1), (2, 0.5)):
        other = one_state((3, 4), (3, 4), (3, 4), way={"weight_decay": decay})
        run(other, 1)
        assert torch.equal(other.held[i].local, state.held[i].local)
        average = 0.9 * before.held[i].local + 0.1 * state.held[i].local
        torch.testing.assert_close(state.held[i].slots["ema"].values, average)
    assert len(grads) == 1


def test_names_are_matched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def matches(name: str, pattern: str) -> bool:
        asked.append(name)
        return False

    monkeypatch.setattr(rule_optimizer, "fnmatchcase", matches)
    state = one_state((3, 4), (3,), way={"groups": [{"match": "*", "lr": 0.5}]})
    run(state, 3)
    assert sorted(asked) == ["blocks.0.w", "blocks.1.w"]


@given(st.integers(1, 40), st.integers(1, 9), st.data())
@settings(max_examples=60, deadline=None)
def test_blocks_do_not_depend_on_the_cut(
    length: int, size: int, data: st.DataObject
) -> None:
    x = torch.randn(2, length, generator=torch.Generator().manual_seed(length))
    cut = data.draw(st.integers(0, length))
    parts = [
        (x[:, :cut], Blocks(size, length, 0)),
        (x[:, cut:], Blocks(size, length, cut)),
    ]
    whole = Blocks(size, length, 0)
    assert torch.equal(
        whole.largest(x), torch.stack([b.largest(p) for p, b in parts]).amax(0)
    )
    scale = whole.largest(x.abs())
    spread = torch.cat([b.spread(scale, p.size(1)) for p, b in parts], dim=1)
    assert torch.equal(spread, whole.spread(scale, length))
    codes = encoded(x, spread, dynamic_map(True, 7, 8))
    again = decoded(codes, spread, dynamic_map(True, 7, 8))
    assert torch.equal(encoded(again, spread, dynamic_map(True, 7, 8)), codes)


def test_codes_of_four_bits_share_a_byte() -> None:
    codes = torch.randint(
        0, 16, (3, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    assert packed(codes).shape == (3, 4) and torch.equal(unpacked(packed(codes)), codes)


def test_stochastic_rounding_keeps_the_mean_and_what_bfloat16_can_say() -> None:
    bits = random_bits(torch.arange(200_000), seed=3)
    for value in (1.003, -1.003, 3e-5):
        found = rounded_bf16(torch.full((200_000,), value), bits).double()
        assert found.unique().numel() == 2
        assert abs(found.mean().item() / value - 1) < 1e-4
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), float("-inf")])
    assert torch.equal(rounded_bf16(exact, bits[:6]).float(), exact)
    assert rounded_bf16(torch.tensor([float("nan")]), bits[:1]).isnan().all()


def test_directions_are_normal_and_parts_of_one_tensor() -> None:
    positions = torch.arange(200_000).view(400, 500)
    x = normal(positions, 9, torch.float64)
    assert (
        abs(x.mean().item()) < 1e-2
        and abs(x.std().item() - 1) < 1e-2
        and 4 < x.abs().max() < 7
    )
    assert torch.equal(x[17:40, 3:9], normal(positions[17:40, 3:9], 9, torch.float64))
    neighbours = torch.corrcoef(torch.stack((x.flatten()[:-1], x.flatten()[1:])))[0, 1]
    assert abs(neighbours.item()) < 1e-2


def test_the_estimate_is_the_slope_along_its_direction(corpus: str) -> None:
    """As the distance goes to zero: what backward says of the direction. And parameters do not drift."""
    settings = recipe(
        corpus,
        optimizer__estimate="zeroth-order",
        optimizer__epsilon=1e-6,
        optimizer__kind="sgd",
    )
    job, mesh = prepare(settings), Mesh.single()
    model, state = build_for_training(job.shape, mesh, settings)
    before = [h.local.clone() for h in state.held]
    batches = job.loader(job.corpus.train, mesh).step(0)
    assert batches is not None
    exact = {
        name: g.clone()
        for name, g in reduced_gradients(model, state, batches, mesh)[0].items()
    }
    state.clear_gradients()
    step = build_step(StepContext(model, state, mesh), settings)
    found = step.take(batches, lr=0.0)[0]
    slope = sum((exact[h.name] * direction(h, 0)).sum().item() for h in state.held)
    assert found.grad_norm == pytest.approx(abs(slope), rel=1e-6)
    assert all(torch.equal(h.local, x) for h, x in zip(state.held, before, strict=True))
    step.take(batches, lr=1e-3)
    estimated = {h.name: (x - h.local) for h, x in zip(state.held, before, strict=True)}
    assert sum((exact[n] * estimated[n]).sum().item() for n in exact) > 0  # downhill


def test_hashed_bits_are_even_and_seeds_differ() -> None:
    a, b = (
        random_bits(torch.arange(100_000), seed).double() / 2**32
        for seed in (1, 1 + (7 << 32))
    )
    for x in (a, b):
        assert abs(x.mean().item() - 0.5) < 5e-3 and abs(x.var().item() * 12 - 1) < 2e-2
    assert abs(torch.corrcoef(torch.stack((a, b)))[0, 1].item()) < 2e-2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


QUICK = [{"shard": 2, "tp": 2}]
LAYOUTS = [
    *QUICK,
    {"shard": 3},
    {"dp": 2, "cp": 2},
    {"pp": 2, "tp": 2},
    {"pp": 2, "shard": 2, "vocab_barriers": 1},
]


def slots_difference(values: dict[str, Any]) -> Any:
    compact_adamw.SMALL = 200  # so that the matrices of a small model count as large
    try:
        return difference(values)
    finally:
        compact_adamw.SMALL = 4096


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("layout", "way"), [
    # Of the other layouts each way sees two, which are others for the next way; all are for soak.
    pytest.param(layout, way, id=f"{name(layout)}-{name(way)}",
                 marks=[] if layout in QUICK else pytest.mark.slow if (i + j) % 2 else pytest.mark.soak)
    for i, layout in enumerate(LAYOUTS) for j, way in enumerate(WAYS)
])  # fmt: skip
def test_equal_to_one_device_with_all_slots(
    pool: Any, corpus: str, layout: dict[str, int], way: dict[str, Any]
) -> None:
    """Slots too: a checkpoint of any layout goes on as one device's would."""
    given = {f"optimizer__{k}": v for k, v in way.items()}
    given |= {
        "optimizer__block": 7,
        "optimizer__rank": 5,
        "optimizer__refresh": 2,
        "optimizer__ema": 0.5,
    }
    values = recipe(
        corpus, model__ffn=44, **given, **{f"layout__{k}": v for k, v in layout.items()}
    )
    found = pool.run(
        Layout(**layout).world, slots_difference, values.model_dump(mode="json")
    )[0]
    assert found.ok, found


def resumed(
    pool: Any, values: dict[str, Any], layout: dict[str, int], run: Path, to: Path
) -> None:
    """Go on from the middle of ``run`` under ``layout``."""
    pool.run(
        Layout(**layout).world,
        go,
        values,
        str(to),
        str(run / "checkpoints" / "step-000003"),
    )


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [
    {"kind": "galore"},
    pytest.param({"state": "8bit"}, marks=pytest.mark.slow),
    pytest.param({"kind": "adafactor"}, marks=pytest.mark.slow),
], ids=name)  # fmt: skip
def test_another_layout_goes_on_with_the_same_losses(
    pool: Any, corpus: str, tmp_path: Path, way: dict[str, Any]
) -> None:
    given = {f"optimizer__{k}": v for k, v in way.items()} | {
        "optimizer__rank": 5,
        "optimizer__refresh": 2,
    }
    given |= {"optimizer__block": 7, "optimizer__ema": 0.5, "model__ffn": 44}
    home, other = {"shard": 2, "tp": 2}, {"shard": 3}
    whole, on = tmp_path / "whole", tmp_path / "on"
    pool.run(4, go, tree(corpus, home, **given), str(whole))
    resumed(pool, tree(corpus, other, **given), other, whole, on)
    losses = series(whole)
    assert {
        step: pytest.approx(losses[step], rel=1e-9) for step in (4, 5, 6)
    } == series(on)


def test_another_optimizer_does_not_go_on_silently(
    pool: Any, corpus: str, tmp_path: Path
) -> None:
    pool.run(1, go, tree(corpus, {}, optimizer__kind="lion"), str(tmp_path / "lion"))
    with pytest.raises(
        WeftError, match=r"optimizer\.kind = 'adamw'.*'lion'.*model\.from"
    ):
        resumed(pool, tree(corpus, {}), {}, tmp_path / "lion", tmp_path / "on")
