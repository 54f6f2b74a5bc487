"""Big and small feed-forwards: drawn alike under every layout, and on the paths that are asked for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import Case, write_corpus
from tests.prove.test_equality import difference, name, tree
from weft.checkpoint.convert.gguf_write import export_gguf
from weft.errors import WeftError
from weft.generate.engine import Engine
from weft.generate.sampling import GREEDY
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models.drawing import drawing
from weft.models.dropout import token_draws
from weft.models.products import read_only
from weft.models.routed_depth import BIG, SKIP, SMALL, drawn_choices, on_paths
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train
from weft.shapes.config import config_from_shape

TINY: dict[str, Any] = {
    "vocab": 31, "layers": 2, "embed": 24, "heads": 6, "kv_heads": 2, "ffn": 32, "small_ffn": 5, "init_std": 0.3,
}  # fmt: skip
CASES: list[Case] = [
    {"layout": {"tp": 2}, "recompute": "full"},
    {"layout": {"dp": 2, "pp": 2}, "micro_batch": 1},
]
MORE: list[Case] = [
    {"layout": {"shard": 2, "tp": 2}, "recompute": "selective"},
    {"layout": {"cp": 2, "tp": 2}},
    {"layout": {"cp": 3}, "recompute": "full"},
    {"layout": {"tp": 3}, "tied": True},
    {"layout": {"pp": 2, "schedule": "zb-h1", "tp": 2}, "micro_batch": 1, "recompute": "full"},
    {"layout": {"tp": 2, "overlap": "tokens", "overlap_least": 0}},
    {"layout": {"tp": 2}, "model": {"residual": "ladder"}},
    {"layout": {"shard": 2, "tp": 2}, "memory": {"weights": "file", "moments": "file", "activations": "host"}},
]  # fmt: skip


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.soak) for case in MORE)],
    ids=name,
)
def test_every_layout_draws_and_learns_as_one_device(
    pool: Any, corpus: str, case: Case
) -> None:
    case = case | {"model": {"small_ffn": 5} | case.get("model", {})}
    values = tree(corpus, case)
    values["memory"] = (values.get("memory") or {}) | case.get("memory", {}) or None
    result = pool.run(Layout(**case["layout"]).world, difference, values)[0]
    assert result.ok, result


def build(**change: Any) -> Transformer:
    shape = ModelShape(**TINY | change)
    return parallelize(shape, Mesh.single(), Train(seed=2, dtype="float64"))[0]


def logits(model: Transformer) -> torch.Tensor:
    tokens = torch.arange(9)[None] * 5 % 31
    ends = torch.tensor([0, 9], dtype=torch.int32)
    return model(tokens, torch.arange(9)[None], ends)


def test_each_token_takes_the_module_of_its_path() -> None:
    ffn = build().blocks["1"].ffn
    x = torch.randn(1, 6, 24, dtype=torch.float64)
    path = torch.tensor([[[BIG] * 6], [[SKIP, SMALL, BIG, BIG, SMALL, SKIP]]])
    big, small = ffn.big.share(x)[0], ffn.small.share(x)[0]
    with on_paths(path):
        y = ffn.share(x)[0]
    zero = torch.zeros_like(big[0])
    expected = [zero, small[1], big[2], big[3], small[4], zero]
    torch.testing.assert_close(y, torch.stack(expected))
    assert torch.equal(ffn.share(x)[0], big), "without a path all tokens take the big module"  # fmt: skip


def test_training_draws_the_three_choices_evenly_and_by_layer() -> None:
    draws = token_draws(0, 3, 3000)[None]
    first, second = (drawn_choices(draws, f"blocks.{i}.ffn") for i in range(2))
    assert all(900 < count < 1100 for count in Counter(first[0].tolist()).values())
    assert 0.28 < float((first == second).double().mean()) < 0.39
    ffn, x = build().blocks["0"].ffn, torch.randn(1, 3000, 24, dtype=torch.float64)
    with drawing([draws]):
        y = ffn.share(x)
    assert torch.equal((y == 0).all(-1), first == SKIP)


@torch.no_grad()
def test_the_plain_model_is_the_path_of_big_modules_also_in_the_engine() -> None:
    model = build()
    plain = parallelize(
        ModelShape(**TINY | {"small_ffn": 0}),
        Mesh.single(),
        Train(seed=2, dtype="float64"),
    )[0]
    values = dict(model.named_parameters())
    for key, value in plain.named_parameters():
        value.data = values[key.replace(".ffn.", ".ffn.big.")].data.clone()
    expected = logits(plain)
    torch.testing.assert_close(logits(model), expected)
    with on_paths(torch.full((2, 1, 1), BIG)):
        torch.testing.assert_close(logits(model), expected)
    with on_paths(torch.full((2, 1, 1), SMALL)):
        assert float((logits(model) - expected).norm()) > 0.1

    def written(of: Transformer) -> list[int]:
        engine = Engine(of)
        (request,) = engine.submit([3, 5, 7], 8, GREEDY)
        engine.run()
        return request.written

    tokens = written(plain)
    assert written(model) == tokens
    read_only(model, "sparse:0")
    assert written(model) == tokens


def test_what_is_refused_is_one_line(tmp_path: Path) -> None:
    for shape in ({"experts": 4}, {"adapter": {"rank": 2}}):
        with pytest.raises(ValueError, match="small_ffn is for dense layers"):
            ModelShape(**TINY | shape)
    with pytest.raises(WeftError, match="no Hugging Face architecture has small_ffn"):
        config_from_shape(ModelShape(**TINY))
    values = dict(build().named_parameters())
    with pytest.raises(WeftError, match="small_ffn"):
        export_gguf(values.__getitem__, ModelShape(**TINY), tmp_path / "x.gguf", "float32", {}, None)  # fmt: skip
    assert not (tmp_path / "x.gguf").exists()
