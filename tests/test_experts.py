"""Models with experts under every layout equal one device: losses for balance, biases and counts included."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import Case, pairwise, recipe, write_corpus
from tests.models.test_experts import MODELS
from tests.test_equality import difference
from weft.layout.layout import Layout
from weft.recipe import ModelShape, Train
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
