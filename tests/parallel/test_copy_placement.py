"""Where experts are, by their loads: balance, an exact oracle, choices divided among copies, and copies for a pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import start, write_corpus
from tests.parallel.test_experts import tree
from weft.layout.layout import Layout
from weft.layout.mesh import from_all
from weft.models.experts import Mixture
from weft.parallel.experts import copies as module
from weft.parallel.experts import moves
from weft.parallel.experts import rows as travel
from weft.parallel.experts.copies import Copies
from weft.parallel.experts.copy_placement import divided, loads_of_ranks, with_copies
from weft.parallel.state import State
from weft.prove.equality import _whole
from weft.train.step import train_step

Array = np.ndarray


def zipf(experts: int, seed: int) -> Array:
    """Loads that fall with the rank of an expert to the power 1.2, dealt to experts at random."""
    return np.random.default_rng(seed).permutation(
        1e5 / np.arange(1, experts + 1) ** 1.2
    )


def owners_of(experts: int, ranks: int) -> Array:
    return np.arange(experts) * ranks // experts


def skew(loads: Array, copies: Array) -> float:
    total = loads_of_ranks(loads, copies)
    return float(total.max() / total.mean())


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("per_rank", [2, 4, 8])
def test_two_more_slots_per_rank_even_out_skewed_loads(
    ranks: int, per_rank: int
) -> None:
    experts, found = per_rank * ranks, []
    for seed in range(20):
        loads, owners = zipf(experts, seed), owners_of(experts, ranks)
        copies = with_copies(loads, owners, ranks, 2)
        slots = copies.sum(0) - np.bincount(
            owners, copies[np.arange(experts), owners], ranks
        )
        assert copies.any(1).all() and slots.max() <= 2
        found.append((skew(loads, np.eye(ranks)[owners]), skew(loads, copies)))
    static, even = np.array(found).T
    assert static.mean() > 1.7
    assert even.mean() <= 1.04 and even.max() <= 1.10


def least_skew(loads: Array, owners: Array, ranks: int, spare: int) -> float:
    """The exact optimum of :func:`with_copies`, by HiGHS.

    ``here[e, n, r]``: of expert ``e``, which has ``n + 1`` copies, one is on rank ``r``.
    """
    # not for the ranks of other tests, which import this file as well
    from scipy.optimize import Bounds, LinearConstraint, milp

    experts = len(loads)
    size, here = (
        experts * ranks * ranks,
        np.arange(experts * ranks * ranks).reshape(experts, ranks, ranks),
    )
    # whether ``e`` has ``n`` copies
    numbered = size + np.arange(experts * ranks).reshape(experts, ranks)
    rows, lows, highs = [], [], []

    def rule(low: float, high: float, *terms: tuple[Any, Any]) -> None:
        row = np.zeros(size + experts * ranks + 1)
        for at, values in terms:
            row[at] += values
        rows.append(row), lows.append(low), highs.append(high)

    for e in range(experts):
        rule(1, 1, (numbered[e], 1))
        for n in range(ranks):
            rule(0, 0, (here[e, n], 1), (numbered[e, n], -(n + 1)))
        for r in range(ranks):
            rule(0, 1, (here[e, :, r], 1))
    for r in range(ranks):
        rule(0, spare, (here[owners != r, :, r].flatten(), 1))
        rule(
            -np.inf,
            0,
            (here[:, :, r], loads[:, None] / (1 + np.arange(ranks))),
            (-1, -1),
        )
    cost = np.zeros(len(rows[0]))
    cost[-1] = 1
    found = milp(
        cost, constraints=LinearConstraint(np.array(rows), lows, highs), integrality=1 - cost,
        bounds=Bounds(0, np.append(np.ones(len(cost) - 1), np.inf)), options={"time_limit": 20, "mip_rel_gap": 0.003},
    )  # fmt: skip
    return float(found.x[-1] / loads.sum() * ranks)


@pytest.mark.parametrize("seed", range(4))
def test_greedy_balance_is_near_the_exact_one(seed: int) -> None:
    loads, owners = zipf(6, seed), owners_of(6, 3)
    least = least_skew(loads, owners, 3, 2)
    assert (
        least * 0.995
        <= skew(loads, with_copies(loads, owners, 3, 2))
        <= max(1.02, 1.05 * least)
    )


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_what_is_routed_to_copies_adds_up_exactly(
    ranks: int, experts: int, data: st.DataObject
) -> None:
    """Also where choices are fewer than copies or do not divide; LAER-MoE's planner routed 7 tokens as 8."""
    numbers = data.draw(
        st.lists(st.integers(0, 9), min_size=ranks * experts, max_size=ranks * experts)
    )
    counts = torch.tensor(numbers).view(ranks, experts)
    homes = data.draw(
        st.lists(st.integers(0, ranks - 1), min_size=experts, max_size=experts)
    )
    more = data.draw(
        st.lists(st.booleans(), min_size=ranks * experts, max_size=ranks * experts)
    )
    copies = torch.tensor(more).view(experts, ranks)
    copies[torch.arange(experts), torch.tensor(homes)] = True
    # [from, experts, to]
    routed = torch.stack([divided(counts, copies, rank) for rank in range(ranks)])
    assert torch.equal(routed.sum(2), counts) and (routed >= 0).all()
    assert not routed[:, ~copies].any()
    for total, here in zip(routed.sum(0), copies, strict=True):
        assert total[here].max() - total[here].min() <= 1
    # Nothing leaves a rank whose own copy has room.
    spare = (routed.sum(0).amax(1, keepdim=True) - 1).clamp(min=0)
    for rank in range(ranks):
        own = routed[rank, :, rank]
        assert ((own == counts[rank]) | ~copies[:, rank] | (own >= spare[:, 0])).all()


def homes(layer: Copies) -> torch.Tensor:
    """Where experts are owned, bool ``[experts, ranks]``."""
    found = torch.zeros_like(layer.plan.copies)
    for rank, items in enumerate(layer.ranks.homes):
        found[list(items), rank] = True
    return found


def three_steps(values: dict[str, Any]) -> tuple[list[float], int, int, int]:
    """On every rank: losses, numbers that it sent of weights and their gradients, and copies on all ranks by pass.

    And the bytes of copies that the steps' results have of all ranks.
    """
    _, mesh, model, state, loader = start(values)
    layers = [m.copies for m in model.modules() if isinstance(m, Mixture)]
    losses, numbers, away, said = [], 0, 0, 0

    def exchange(
        rows: torch.Tensor, sent: list[int], received: list[int], group: Any
    ) -> Any:
        nonlocal numbers
        # and not of tokens
        if rows.shape[1:] == (
            3 * values["model"]["expert_ffn"] * values["model"]["embed"],
        ):
            assert not sent[group.rank()]
            numbers += rows.numel()
        return send(rows, sent, received, group)

    send = travel.exchanged_rows
    with mock.patch.object(travel, "exchanged_rows", exchange):
        for step in range(3):
            batches = loader.step(5 * step) or []
            for layer in layers:
                assert isinstance(layer, Copies)
                away += int((layer.plan.copies & ~homes(layer)).sum()) * len(batches)
            result = train_step(model, state, batches, mesh, lr=1e-3, clip=1.0)
            losses.append(result.loss)
            said += result.sent[1]
    return losses, numbers, away, said


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_bytes_are_those_of_the_experts_that_are_lent(
    pool: Any, tmp_path: Any, recompute: str
) -> None:
    """Each copy away from home is sent in every forward run, and its gradient comes back; in every run alike."""
    case = {
        "layout": "shard=4,ep=4",
        "model": "eight experts",
        "recompute": recompute,
        "placement": "sharded",
    }
    values = tree(write_corpus(tmp_path), case)
    found = pool.run(4, three_steps, values)
    width, runs = (
        3 * values["model"]["expert_ffn"] * values["model"]["embed"],
        2 + (recompute == "full"),
    )
    assert sum(sent for _, sent, *_ in found) == found[0][2] * runs * width > 0
    assert found[0][3] == 8 * found[0][2] * runs * width
    assert [losses for losses, *_ in found] == [
        losses for losses, *_ in pool.run(4, three_steps, values)
    ]


def everything(state: State) -> dict[str, torch.Tensor]:
    """Whole tensors of the state, wherever their rows are."""
    parts = {
        f"{slot}.{h.name}": part
        for h in state.held
        for slot, part in {"": h.part(h.local), **h.slots}.items()
    }
    return _whole(
        from_all(
            {
                name: replace(part, values=part.values.clone())
                for name, part in parts.items()
            }
        )
    )


def moving_steps(
    values: dict[str, Any],
) -> tuple[list[float], int, int, list[int], tuple[int, int]]:
    """On every rank: losses, numbers that it sent of what moved, numbers that moved, and how often each layer did.

    And what it sent after all steps but the last, with the bytes of all ranks that the steps' results have of it.
    """
    _, mesh, model, state, loader = start(values)
    layers = [m.copies for m in model.modules() if isinstance(m, Mixture)]
    losses, sent, moved, times, early, said = [], 0, 0, [0] * len(layers), 0, 0

    def start_exchange(rows: torch.Tensor, *where: Any) -> Any:
        nonlocal sent
        sent += rows.numel()
        return send(rows, *where)

    send = moves.start_exchange
    with (
        mock.patch.object(moves, "start_exchange", start_exchange),
        mock.patch.object(module, "REST", 1),
    ):
        for step in range(5):
            before, early = [layer.order for layer in layers], sent
            result = train_step(
                model, state, loader.step(5 * step) or [], mesh, lr=1e-2, clip=1.0
            )
            losses.append(result.loss)
            said += result.sent[2]
            for i, layer in enumerate(layers):
                assert sorted(layer.order) == sorted(before[i])
                places = int((layer.order != before[i]).sum())
                moved += places * sum(
                    t[0].numel() for t in moves.tensors_of(layer.state)
                )
                times[i] += places > 0
    assert any((layer.order != layer.home).any() for layer in layers)
    here = everything(state)
    saved = state.saved()
    assert all(part.rows is None for part in saved.values())
    again = everything(state)
    assert here.keys() == again.keys() and all(
        torch.equal(here[name], again[name]) for name in here
    )
    return losses, sent, moved, times, (early, said)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["shard=4,ep=4", "dp=2,shard=2,ep=2"])
def test_experts_move_with_their_state(pool: Any, tmp_path: Any, layout: str) -> None:
    """Nothing changes but where they are; weights and moments of what moved are sent; checkpoints see nothing."""
    values = tree(
        write_corpus(tmp_path),
        {"layout": layout, "model": "eight experts", "placement": "moving", "spare": 1},
    )
    found = pool.run(4, moving_steps, values)
    copies = Layout(**values["layout"]).size("dp", "shard") // values["layout"]["ep"]
    assert sum(sent for _, sent, *_ in found) == found[0][2] * copies > 0
    assert min(found[0][3]) > 0 and len({tuple(times) for *_, times, _ in found}) == 1
    assert found[0][4][1] == 8 * sum(early for *_, (early, _) in found) > 0
    values["layout"] |= {"placement": "static"}
    losses = pool.run(4, losses_of, values)[0]
    assert found[0][0] == pytest.approx(losses, rel=1e-9)


def losses_of(values: dict[str, Any]) -> list[float]:
    _, mesh, model, state, loader = start(values)
    return [
        train_step(model, state, loader.step(5 * i) or [], mesh, lr=1e-2, clip=1.0).loss
        for i in range(5)
    ]
