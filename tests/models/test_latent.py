"""Latent attention: equal to one device under every layout, and absorbed in generation, from a small cache."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.cases import Case, recipe, write_corpus
from tests.parallel.test_experts import check, name
from weft.generate.packed_row import TextSlice
from weft.generate.reader import PagedReader
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models.latent import LatentAttention
from weft.models.paged import LatentPages, Reading
from weft.models.spans import Span
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train

V2: dict[str, Any] = {"kv_rank": 10, "rope_dim": 4, "rope_interleaved": True}
V3: dict[str, Any] = V2 | {"q_rank": 7, "value_dim": 5, "rope_scaling": {
    "kind": "yarn", "factor": 4, "original_max_position": 16, "mscale": 1.0, "mscale_all_dim": 0.7}}  # fmt: skip
WIDE: dict[str, Any] = V2 | {"value_dim": 13, "window": 6}
MODELS = {"v2": V2, "v3": V3, "wide values": WIDE}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [
    {"layout": "tp=2,shard=2", "model": "v3"},
    {"layout": "cp=2", "model": "wide values", "recompute": "selective"},
    {"layout": "pp=2", "model": "v2", "schedule": "zb-v"},
    pytest.param({"layout": "tp=3", "model": "v2", "recompute": "full"}, marks=pytest.mark.slow),
    pytest.param({"layout": "cp=2,tp=2", "model": "v3", "context": "ulysses"}, marks=pytest.mark.slow),
    pytest.param({"layout": "cp=3", "model": "v3", "context": "rsa"}, marks=pytest.mark.slow),
    pytest.param({"layout": "pp=2,tp=2", "model": "v3"}, marks=pytest.mark.slow),
    pytest.param({"layout": "tp=2", "model": "v3", "adapter": "lora"}, marks=pytest.mark.slow),
    pytest.param({"layout": "shard=2,tp=2", "model": "v3", "adapter": "qlora"}, marks=pytest.mark.slow),
    pytest.param({"layout": "cp=2,shard=2", "model": "v3", "experts": True}, marks=pytest.mark.slow),
], ids=name)  # fmt: skip
def test_equal_to_one_device(pool: Any, corpus: str, case: Case) -> None:
    change = {f"model__{key}": value for key, value in MODELS[case["model"]].items()}
    if case.get("experts"):
        change |= {
            "model__experts": 4,
            "model__router": "sigmoid",
            "model__shared_experts": 1,
            "model__expert_ffn": 9,
        }
    if "adapter" in case:
        change |= {
            "adapter__kind": case["adapter"],
            "adapter__rank": 3,
            "adapter__targets": ["wq_*", "wkv_*", "wo"],
        }
    values = recipe(
        corpus, train__recompute=case.get("recompute", "none"), layout__context=case.get("context", "zigzag"),
        layout__schedule=case.get("schedule", "1f1b"), **change,
    ).model_dump(mode="json")  # fmt: skip
    check(
        pool,
        values
        | {
            "layout": values["layout"]
            | Layout.parse(case["layout"]).model_dump(exclude_defaults=True)
        },
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "more", [V2, V3, WIDE, V3 | {"adapter": {"rank": 2, "kind": "dora"}}], ids=str
)
def test_absorbed_equals_expanded(more: dict[str, Any]) -> None:
    """A prompt, a token, two more pieces, from latent vectors alone, against all tokens at once."""
    shape = ModelShape(vocab=50, layers=2, embed=24, heads=4, init_std=0.2, **more)
    model = parallelize(shape, Mesh.single(), Train(dtype="float64"))[0]
    torch.manual_seed(0)
    for parameter in model.parameters():
        # norms and adapters are not as they begin
        parameter.data += 0.05 * torch.randn_like(parameter)
    ids, positions = torch.randint(0, 50, (2, 17)), torch.arange(17).expand(2, 17)
    tables = [3, 0, 4], [1, 7, 2]
    with torch.no_grad():
        expected = model(ids, positions, torch.tensor([0, 17, 34], dtype=torch.int32))
        for edges in ((0, 7, 8, 12, 17), range(18)):
            reader = PagedReader(model, 6)
            for a, b in pairwise(edges):
                found = reader.read(
                    [
                        TextSlice(ids[i, a:b].tolist(), a, table)
                        for i, table in enumerate(tables)
                    ]
                )
                assert (
                    found - expected[:, b - 1]
                ).abs().max() < 1e-10 * expected.abs().max()
    assert expected.std() > 0.3


def test_the_cache_has_the_published_size() -> None:
    """DeepSeek-V3 keeps 576 numbers of a token and layer; in 61 layers and bfloat16 that is 70,272 bytes a token."""
    shape = ModelShape(vocab=9, layers=61, embed=8, heads=128, head_dim=128, q_rank=4, kv_rank=512, rope_dim=64,
                       value_dim=128, ffn=4)  # fmt: skip
    layer = (
        LatentAttention(shape, Mesh.single(), 0)
        .to_empty(device="cpu")
        .to(torch.bfloat16)
    )
    layer.attend = pages = LatentPages(9)
    pages.reading = Reading([Span(0, 9, 0, [0])], torch.arange(9))
    rope = (torch.ones(1, 1, 9, 1, 32), torch.zeros(1, 1, 9, 1, 32))
    with torch.no_grad():
        layer(
            torch.ones(1, 9, 8, dtype=torch.bfloat16),
            rope,
            torch.tensor([0, 9], dtype=torch.int32),
        )
    assert pages.store is not None
    kept = pages.store[:, 0]
    assert kept.numel() == 9 * 576 and kept.nbytes * shape.layers == 9 * 70_272
    # of keys and values of all heads
    assert kept.nbytes * 64 < 9 * 2 * shape.heads * (128 + 64 + 128) * 2


def test_latent_attention_is_not_combined_with_other_kinds() -> None:
    from weft.parallel.build import check_fits
    from weft.refusal import Conflict

    with pytest.raises(Conflict, match="kv_rank = 10 is softmax attention"):
        check_fits(ModelShape(**V2, qk_norm=True), Layout())
    with pytest.raises(ValueError, match="rope_dim = 3 must be even"):
        ModelShape(kv_rank=4, rope_dim=3)
