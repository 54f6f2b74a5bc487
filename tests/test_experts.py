"""Models with experts under every layout equal one device: losses for balance, biases and counts included."""

from __future__ import annotations

from math import comb
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.cases import Case, pairwise, recipe, start, write_corpus
from tests.models.test_experts import MODELS
from tests.test_equality import difference
from weft.layout.layout import Layout
from weft.models.router import Router
from weft.parallel.experts import dispatch
from weft.parallel.units import all_gather, reduce_scatter
from weft.recipe import ModelShape, Train
from weft.train.step import train_step
from weft.train.types import check_types

FACTORS: dict[str, list[Any]] = {
    "layout": [
        "shard=2", "tp=2", "cp=2", "pp=2,shard=2", "shard=2,ep=2", "dp=2,ep=2", "tp=2,ep=2", "cp=2,shard=2,ep=4",
        "shard=2,tp=2,ep=2", "shard=2,tp=2,ep=4", "pp=2,shard=2,ep=2", "dp=2,shard=2,ep=2",
    ],
    "dispatch": ["all-to-all", "per-rank", "all-gather"],
    "model": ["mixtral", "qwen2", "deepseek-v2", "deepseek-v3", "step"],
    "zero": [1, 2, 3],
    "recompute": ["none", "selective", "full"],
    "micro_batch": [None, 1],
    "early": [False, True],
}  # fmt: skip
CASES = list(pairwise(**FACTORS))
QUICK = CASES[::12]


def name(case: Case) -> str:
    return "-".join(f"{k}:{v}".replace(" ", "_") for k, v in case.items())


def tree(corpus: str, case: Case) -> dict[str, Any]:
    model = {"layers": 2, "experts": 6, "expert_ffn": 9, "balance_loss": 0.3, "bias_rate": 0.05}
    model |= {"router_early": case.get("early", False)} | MODELS[case["model"]]
    values = recipe(
        corpus,
        layout__zero=case.get("zero", 3),
        train__recompute=case.get("recompute", "none"),
        train__micro_batch=case.get("micro_batch"),
        train__dtype=case.get("dtype", "float64"),
        layout__schedule=case.get("schedule", "1f1b"),
        **{f"model__{key}": value for key, value in model.items()},
    ).model_dump(mode="json")
    given = Layout.parse(case["layout"]).model_dump(exclude_defaults=True)
    given |= {"dispatch": case.get("dispatch", "all-to-all")}
    return values | {"layout": values["layout"] | given}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def check(pool: Any, values: dict[str, Any]) -> None:
    """Equal by numbers, and typed."""
    layout = Layout(**values["layout"])
    found = pool.run(layout.world, difference, values)[0]
    assert found.ok, found
    shape = ModelShape(**values["model"]).model_copy(update={"vocab": 257})
    assert check_types(shape, layout, Train(recompute=values["train"]["recompute"])) is None


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=name(c), marks=[pytest.mark.slow] * (c not in QUICK)) for c in CASES]
)
def test_equal_to_one_device(pool: Any, corpus: str, case: Case) -> None:
    check(pool, tree(corpus, case))


@pytest.mark.parametrize("layout", [
    "shard=1024,ep=64", "dp=16,shard=16,tp=4,ep=1024", "dp=8,shard=32,cp=2,tp=2,ep=128", "shard=128,tp=8,ep=8",
])  # fmt: skip
@pytest.mark.parametrize("dispatch", ["all-to-all", "per-rank", "all-gather"])
def test_large_worlds_are_typed(layout: str, dispatch: str) -> None:
    shape = ModelShape(
        vocab=257, layers=2, embed=32, heads=8, experts=1024, expert_ffn=16, first_dense=1, balance_loss=0.1
    )
    assert check_types(shape, Layout.parse(f"{layout},dispatch={dispatch}"), Train()) is None


@pytest.mark.parametrize("case", [
    {"layout": "shard=2,cp=2", "model": "hugging face"},
    {"layout": "tp=3", "model": "deepseek-v3", "recompute": "full"},
    {"layout": "shard=4,ep=4", "model": "qwen3", "micro_batch": 1},  # of 6 experts
    {"layout": "dp=2,shard=2,ep=4,order=dp shard", "model": "mixtral", "dispatch": "per-rank"},
    {"layout": "shard=2,tp=2,ep=4,order=tp shard", "model": "deepseek-v3"},
    {"layout": "shard=4,ep=4", "model": "two experts"},
    {"layout": "shard=2,tp=2,ep=4", "model": "one expert", "dispatch": "per-rank"},
    pytest.param({"layout": "dp=2,shard=2,tp=2,ep=4", "model": "two experts", "dispatch": "all-gather"},
                 marks=pytest.mark.slow),
    pytest.param({"layout": "pp=2,shard=4,ep=4", "model": "two experts", "recompute": "full"}, marks=pytest.mark.slow),
    pytest.param({"layout": "dp=2,shard=2,tp=2,ep=4", "model": "qwen2"}, marks=pytest.mark.slow),
    pytest.param({"layout": "dp=2,shard=2,tp=2,ep=8", "model": "eight experts"}, marks=pytest.mark.slow),
    pytest.param({"layout": "pp=2,shard=2,tp=2,ep=4", "model": "qwen3"}, marks=pytest.mark.slow),
    pytest.param({"layout": "pp=2,dp=2,ep=2", "model": "qwen3", "schedule": "zb-v"}, marks=pytest.mark.slow),
    pytest.param({"layout": "shard=4,ep=2", "model": "step", "dtype": "float32"}, marks=pytest.mark.slow),
    pytest.param({"layout": "shard=2,tp=2", "model": "pr-moe", "recompute": "selective"}, marks=pytest.mark.slow),
    pytest.param({"layout": "dp=2", "model": "all experts"}, marks=pytest.mark.slow),
    pytest.param({"layout": "dp=2", "model": "one expert", "early": True}, marks=pytest.mark.slow),
    {"layout": "dp=3", "model": "step", "micro_batch": 1},
    pytest.param({"layout": "pp=2,shard=2", "model": "deepseek-v3", "schedule": "zb-v"}, marks=pytest.mark.slow),
    pytest.param({"layout": "pp=2", "model": "step", "schedule": "dualpipe", "recompute": "full"},
                 marks=pytest.mark.slow),
    pytest.param({"layout": "shard=2", "model": "qwen2", "dtype": "float32"}, marks=pytest.mark.slow),
], ids=name)  # fmt: skip
def test_odd_cases(pool: Any, corpus: str, case: Case) -> None:
    check(pool, tree(corpus, case))


def sent_and_chosen(values: dict[str, Any]) -> tuple[int, list[list[list[int]]], int]:
    """On every rank of ``ep``: numbers that it sends to others in a step, what its tokens chose, and its own number."""
    _, mesh, model, state, loader = start(values)
    group, chosen, sent = mesh.group("exchange"), [], 0
    me, ranks = group.rank(), group.size()

    def exchange(found: Any, rows: torch.Tensor, received: Any, out: list[int], group: Any = None) -> None:
        nonlocal sent
        sent += (sum(out) - out[me]) * rows[:1].numel() if rows.dim() > 1 else 0
        to_all(found, rows, received, out, group=group)

    def gather(found: Any, x: torch.Tensor, group: Any) -> None:
        nonlocal sent
        sent += x.numel() * (ranks - 1)
        all_gather(found, x, group=group)

    def scatter(found: torch.Tensor, x: Any, group: Any) -> None:
        nonlocal sent
        sent += found.numel() * (ranks - 1)
        reduce_scatter(found, x, group=group)

    def choose(self: Router, x: torch.Tensor, seen: Any) -> Any:
        found = route(self, x, seen)
        chosen.append(found.ids.tolist())
        return found

    route, to_all = Router.forward, dist.all_to_all_single
    with (
        mock.patch.object(dispatch, "all_gather", gather), mock.patch.object(dispatch, "reduce_scatter", scatter),
        mock.patch.object(dist, "all_to_all_single", exchange), mock.patch.object(Router, "forward", choose),
    ):  # fmt: skip
        train_step(model, state, loader.step(0) or [], mesh, lr=1e-3, clip=1.0)
    return sent, chosen, me


@pytest.mark.parametrize("way", ["all-to-all", "per-rank", "all-gather"])
def test_bytes_of_each_dispatcher_are_those_of_its_formula(pool: Any, corpus: str, way: str) -> None:
    values = tree(corpus, {"layout": "shard=4,ep=4", "model": "eight experts", "dispatch": way})
    width, experts, k, ranks = values["model"]["embed"], 8, 3, 4
    total = expected = 0  # over all ranks: what one sends, another sends back
    for sent, layers, me in pool.run(4, sent_and_chosen, values):
        total += sent
        for tokens in layers:
            owners = [[e // 2 for e in ids] for ids in tokens]
            if way == "all-to-all":  # rows there and back, twice, and counts to all
                expected += 4 * width * sum(o != me for one in owners for o in one) + experts * (ranks - 1)
            elif way == "per-rank":  # with weights, their gradients and ids
                copies = sum(len({*one} - {me}) for one in owners)
                expected += (4 * width + 3 * k) * copies + ranks * (ranks - 1)
            else:
                expected += (4 * width + 3 * k) * len(tokens) * (ranks - 1)
    assert total == expected > 0


def test_all_gather_pays_where_tokens_have_as_many_experts_as_there_are_ranks() -> None:
    """Rows sent by a rank per token, of ``k`` experts at random among 64: the formulas of the page."""
    ranks, experts = 4, 64
    for k in (1, 2, 4, 6, 8):
        rows = k * (ranks - 1) / ranks
        copies = (ranks - 1) * (1 - comb(experts - experts // ranks, k) / comb(experts, k))
        assert copies <= rows and (ranks - 1 <= rows) is (k >= ranks)
