"""Every layout equals one device: loss, each gradient, the gradient norm, parameters after three steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest

from tests.cases import Case, pairwise, recipe, write_corpus
from tests.faults import FAULTS
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models import linear_attention
from weft.prove.equality import Difference, compare_with_one_device, run_layout
from weft.prove.types import check_types
from weft.recipe import Train, build_recipe
from weft.train.setup import prepare

AXES = ("dp", "shard", "cp", "tp")
#: Every combination of the axes in {1, 2} with at most 8 ranks, and each axis alone at 4.
LAYOUTS = [
    dict(zip(AXES, sizes, strict=True))
    for sizes in itertools.product((1, 2), repeat=4)
    if sum(sizes) < 8
]
LAYOUTS += [{axis: 4} for axis in AXES]

FACTORS: dict[str, list[Any]] = {
    "layout": LAYOUTS,
    "zero": [1, 2, 3],
    "recompute": ["none", "selective", "full"],
    "context": ["ring", "ulysses"],
    "kv_heads": [4, 2, 1],
    "vocab": [0, 260],  # 257, which nothing divides, and an even one
    "micro_batch": [None, 1],  # one pass, and several
    "tied": [False, True],
    "extras": [False, True],  # qk-norm and biases
    "dtype": ["float64", "float32"],
}
CASES = list(pairwise(**FACTORS))
QUICK = 12


def name(case: Case) -> str:
    return "-".join(
        str(Layout(**v)).replace(" ", "_") if k == "layout" else f"{k}:{v}"
        for k, v in case.items()
    )


def tree(corpus: str, case: Case) -> dict[str, Any]:
    extras = case.get("extras", False)
    values = recipe(
        corpus,
        layout__zero=case.get("zero", 3),
        layout__context=case.get("context", "ring"),
        train__recompute=case.get("recompute", "none"),
        train__micro_batch=case.get("micro_batch"),
        train__dtype=case.get("dtype", "float64"),
        train__freeze=case.get("freeze", []),
        model__kv_heads=case.get("kv_heads", 2),
        model__heads=case.get("heads", 4),
        model__vocab=case.get("vocab", 0),
        model__tied=case.get("tied", False),
        model__qk_norm=extras,
        model__qkv_bias=extras,
        model__mixer=case.get("mixer", "softmax"),
        model__softmax_every=2 * ("mixer" in case),
        layout__scan=case.get("scan", "gather"),
        **{f"layout__{axis}": size for axis, size in case["layout"].items()},
    ).model_dump(mode="json")
    values["model"] |= case.get("model", {})
    return values


def difference(
    values: dict[str, Any], fault: Callable[..., Any] | None = None, target: str = ""
) -> Difference | None:
    """On every rank: the layout, with ``fault`` in the place of ``weft.train.step.target``; on rank 0 the reference."""
    settings = build_recipe(values)
    mesh = Mesh.create(settings.layout, "cpu")
    job = prepare(settings)
    with mock.patch(f"weft.train.step.{target}", fault) if fault else nullcontext():
        mine = run_layout(job, mesh, steps=3)
    return compare_with_one_device(mine, job, mesh)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=name(c), marks=[pytest.mark.slow] * (i >= QUICK))
        for i, c in enumerate(CASES)
    ],
)
def test_equal_to_one_device(pool: Any, corpus: str, case: Case) -> None:
    world = Layout(**case["layout"]).world
    found = pool.run(world, difference, tree(corpus, case))[0]
    assert found.ok, found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [
    {"layout": {"tp": 3}},
    {"layout": {"cp": 3}},
    {"layout": {"tp": 3, "tp_shares": [3, 1, 2]}, "heads": 6, "kv_heads": 3},
    {"layout": {"tp": 4}, "heads": 6, "kv_heads": 3},
    {"layout": {"tp": 4}, "heads": 5, "kv_heads": 1},
    {"layout": {"shard": 3, "tp": 2}, "zero": 2, "micro_batch": 1},
    {"layout": {"dp": 3, "cp": 2}, "context": "ulysses"},
    # the replicas' microbatches, which skip stages, are not all full
    pytest.param({"layout": {"pp": 3, "dp": 2, "skip": 0.2}, "micro_batch": 2, "model": {"layers": 6}},
                 marks=pytest.mark.soak),
], ids=name)  # fmt: skip
def test_odd_sizes(pool: Any, corpus: str, case: Case) -> None:
    found = pool.run(Layout(**case["layout"]).world, difference, tree(corpus, case))[0]
    assert found.ok, found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [
    {"layout": {"cp": 3}, "mixer": "retention", "context": "zigzag", "scan": "pass"},
    {"layout": {"cp": 4}, "mixer": "linear", "kv_heads": 1},
    pytest.param({"layout": {"cp": 4}, "mixer": "retention", "recompute": "selective", "scan": "pass"},
                 marks=pytest.mark.slow),
    pytest.param({"layout": {"cp": 2, "tp": 2, "shard": 2}, "mixer": "retention"}, marks=pytest.mark.slow),
    pytest.param({"layout": {"cp": 2, "tp": 2, "shard": 2}, "mixer": "linear", "recompute": "full", "scan": "pass"},
                 marks=pytest.mark.slow),
    pytest.param({"layout": {"pp": 2, "cp": 2}, "mixer": "retention", "recompute": "selective"},
                 marks=pytest.mark.slow),
], ids=name)  # fmt: skip
def test_hybrids_of_softmax_and_linear_attention(
    pool: Any, corpus: str, case: Case
) -> None:
    layout = Layout(
        **case["layout"],
        context=case.get("context", "ring"),
        scan=case.get("scan", "gather"),
    )
    found = pool.run(layout.world, difference, tree(corpus, case))[0]
    assert found.ok, found
    shape = build_recipe(tree(corpus, case)).model.model_copy(update={"vocab": 257})
    assert (
        check_types(shape, layout, Train(recompute=case.get("recompute", "none")))
        is None
    )


#: What Gemma 3 adds: norms behind, scaled embeddings and queries, GELU, and windows with a rope base of their own.
GEMMA = {
    "window": 5, "full_every": 3, "window_theta": 100.0, "query_dim": 3.0, "activation": "gelu", "norm_after": True,
    "scaled_embedding": True, "qk_norm": True, "tied": True, "layers": 3,
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [
    {"layout": {"shard": 2}},
    {"layout": {"tp": 2}},
    {"layout": {"pp": 2}},
    {"layout": {"pp": 2, "vocab_barriers": 2}},
    {"layout": {"cp": 2}, "context": "zigzag"},
    {"layout": {"cp": 3}, "context": "lightseq", "recompute": "selective"},
    pytest.param({"layout": {"pp": 2, "vocab_barriers": 1, "tp": 2}}, marks=pytest.mark.slow),
    pytest.param({"layout": {"cp": 4}, "context": "rsa"}, marks=pytest.mark.slow),
    pytest.param({"layout": {"cp": 2, "tp": 2, "shard": 2}, "context": "tokenring"}, marks=pytest.mark.slow),
    pytest.param({"layout": {"cp": 2, "tp": 2}, "context": "ulysses", "recompute": "full"}, marks=pytest.mark.slow),
    pytest.param({"layout": {"pp": 2, "cp": 2}, "context": "ring"}, marks=pytest.mark.slow),
    pytest.param({"layout": {"pp": 2, "tp": 2}, "dtype": "float32"}, marks=pytest.mark.slow),
], ids=name)  # fmt: skip
def test_windows_and_norms_of_gemma(pool: Any, corpus: str, case: Case) -> None:
    layout = Layout(**case["layout"], context=case.get("context", "ring"))
    values = tree(corpus, case | {"model": GEMMA})
    found = pool.run(layout.world, difference, values)[0]
    assert found.ok, found
    shape = build_recipe(values).model.model_copy(update={"vocab": 257})
    assert (
        check_types(shape, layout, Train(recompute=case.get("recompute", "none")))
        is None
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "balance", ["greedy", pytest.param("flexsp", marks=pytest.mark.soak)]
)
def test_windows_of_documents_placed_by_length(
    pool: Any, corpus: str, balance: str
) -> None:
    values = tree(
        corpus,
        {
            "layout": {"dp": 2, "cp": 2},
            "zero": 1,
            "model": {"window": 4, "full_every": 2},
        },
    )
    values["layout"] |= {"balance": balance}
    found = pool.run(4, difference, values)[0]
    assert found.ok, found


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_recompute_runs_no_linear_attention_again(
    pool: Any, corpus: str, mode: str
) -> None:
    case = {"layout": {"cp": 2}, "mixer": "linear", "recompute": mode}
    forwards, scans = pool.run(2, count_scans, tree(corpus, case))[0]
    # one linear layer, three steps of one pass; a scan back as well
    assert (forwards, scans) == (1 * 3, 2 * 3)


def count_scans(values: dict[str, Any]) -> tuple[int, int]:
    """How often linear attention is run forward, and how often states cross the ranks."""
    settings = build_recipe(values)
    with (
        mock.patch.object(
            linear_attention, "forward", wraps=linear_attention.forward
        ) as forward,
        mock.patch.object(
            linear_attention, "prefixes", wraps=linear_attention.prefixes
        ) as prefixes,
    ):
        run_layout(prepare(settings), Mesh.create(settings.layout, "cpu"), steps=3)
    return forward.call_count, prefixes.call_count


def test_all_layouts_and_pairs_are_covered() -> None:
    assert len(LAYOUTS) == 19
    assert {repr(c["layout"]) for c in CASES} == {repr(v) for v in LAYOUTS}
    seen = {
        (a, repr(c[a]), b, repr(c[b])) for c in CASES for a in FACTORS for b in FACTORS
    }
    assert all(
        (a, repr(x), b, repr(y)) in seen
        for a in FACTORS
        for b in FACTORS
        if a != b
        for x in FACTORS[a]
        for y in FACTORS[b]
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "layout", [{"shard": 2, "tp": 2}, {"dp": 2, "cp": 2, "tp": 2}], ids=str
)
def test_planted_faults_are_found(
    pool: Any, corpus: str, fault: str, layout: dict[str, int]
) -> None:
    planted, target, _ = FAULTS[fault]
    found = pool.run(
        Layout(**layout).world,
        difference,
        tree(corpus, {"layout": layout}),
        planted,
        target,
    )[0]
    assert not found.ok
    assert max(found.grad, found.loss) > 1e-3
