"""Layers by a kernel for few rows, against the layers that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.generate.engine import Engine
from weft.generate.request import Generation
from weft.generate.sampling import GREEDY
from weft.layout.mesh import Mesh
from weft.models import row_layers
from weft.models.packed_copies import PackedCopies
from weft.models.row_layers import ROWS, RowLayers, RowOutput, rows_kernel
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train

SHAPE: dict[str, Any] = {
    "vocab": 128, "layers": 3, "embed": 64, "heads": 6, "kv_heads": 2, "head_dim": 16, "ffn": 112, "init_std": 0.2,
}  # fmt: skip

needs_kernel = pytest.mark.skipif(
    rows_kernel(16, 3, 16, 16) is None,
    reason="no C compiler, or PyTorch without libgomp",
)


def build(**shape: Any) -> Transformer:
    model = parallelize(ModelShape(**SHAPE | shape), Mesh.single(), Train(seed=3))[0]
    for name, parameter in model.named_parameters():
        if "norm" in name or name.split(".")[-1] in ("bq", "bk", "bv"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def texts(model: Transformer, count: int) -> list[Generation]:
    """Texts of several lengths that ``model`` has written, with log-probabilities; two begin alike."""
    engine = Engine(model, tokens=4096, limit=ROWS[-1])
    drawn = torch.Generator().manual_seed(5)
    prompts = [torch.randint(128, (1 + i % 5,), generator=drawn).tolist() for i in range(count - 1)]  # fmt: skip
    prompts += [prompts[-1]]
    asked = [engine.submit(ids, 18 + i % 3, GREEDY, top=0)[0] for i, ids in enumerate(prompts)]  # fmt: skip
    engine.run()
    return asked


@needs_kernel
@pytest.mark.parametrize(
    ("count", "threads", "shape"),
    [(2, 1, {}), (ROWS[-1] - 3, 3, {"qkv_bias": True, "tied": True})],
)
def test_few_rows_are_computed_as_by_the_layers(
    monkeypatch: pytest.MonkeyPatch, count: int, threads: int, shape: dict[str, Any]
) -> None:
    model, calls = build(**shape), list[int]()
    monkeypatch.setattr(row_layers, "LARGE", 0)
    monkeypatch.setattr(
        RowLayers, "_computed",
        lambda self, *given, own=RowLayers._computed: (calls.append(given[1]), own(self, *given))[1],
    )  # fmt: skip
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    expected = texts(model, count)
    copies = PackedCopies(model)
    copies.rows = count
    with copies:
        assert isinstance(model.logits, RowOutput)
        written = texts(model, count)
    assert model.woven is None and model.logits is None and not calls[-1] % 16
    assert len(calls) >= 18
    for own, other in zip(written, expected, strict=True):
        assert own.ids == other.ids
        chances = [[chance for chance, _ in each.log_probabilities] for each in (own, other)]  # fmt: skip
        torch.testing.assert_close(*map(torch.tensor, chances), rtol=0, atol=1e-4)


@needs_kernel
@pytest.mark.parametrize(
    ("shape", "served"),
    [
        ({"qkv_bias": True, "tied": True}, True),
        ({"rope_scaling": {"kind": "linear", "factor": 4.0}, "vocab": 130}, True),
        ({"qk_norm": True}, False),
        ({"window": 5}, False),
        ({"window": 5, "full_every": 3}, False),
        ({"activation": "gelu"}, False),
        ({"norm_after": True}, False),
        ({"residual": "ladder"}, False),
        ({"query_dim": 32.0}, False),
        ({"rope_interleaved": True}, False),
        ({"experts": 4}, False),
        ({"kv_rank": 16, "kv_heads": 6}, False),
        ({"mixer": "retention"}, False),
        ({"dropout": 0.1}, False),
        ({"head_dim": 24}, False),
        ({"head_dim": 272}, False),
        ({"ffn": 100}, False),
        ({"embed": 72}, False),
    ],
)
def test_models_that_the_kernel_cannot_compute_are_refused(
    monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], served: bool
) -> None:
    monkeypatch.setattr(row_layers, "LARGE", 0)
    assert row_layers.serves(build(**shape | {"layers": 2}), 3) is served


class Keeper:
    """Counts what it is to keep, and why it is not to."""

    def __init__(self) -> None:
        self.rows, self.why = list[int](), list[str]()

    def keep(self, path: str, names: tuple[str, ...], y: torch.Tensor) -> None:
        self.rows.append(len(y))

    def room(self, path: str, names: tuple[str, ...], rows: int, out: int) -> Any:
        self.rows.append(rows)
        return torch.empty(rows, out)

    def drop(self, why: str) -> None:
        self.why.append(why)


@needs_kernel
def test_packed_blocks_are_not_slowed_down_by_what_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_layers, "LARGE", 0)
    model = build()
    few, many = PackedCopies(model), PackedCopies(model)
    few.rows, many.rows = 3, 200
    few.keeper, many.keeper = Keeper(), Keeper()
    with many:
        assert all(block.lean for block in model.blocks.values())
        assert many.keeper.why
    with few:
        assert model.woven is not None and not few.keeper.why
        texts(model, 3)
    assert few.keeper.rows


@needs_kernel
def test_a_size_that_does_not_compile_is_not_met_while_writing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, own = build(), row_layers.rows_kernel
    monkeypatch.setattr(row_layers, "LARGE", 0)
    monkeypatch.setattr(
        row_layers, "rows_kernel", lambda *sizes: None if sizes[3] == 16 else own(*sizes)
    )  # fmt: skip
    assert not row_layers.serves(model, 20)
    hidden, weight = torch.randn(1, 3, 64), model.output.detach()
    y = RowOutput(weight, 16, 3)(hidden)
    torch.testing.assert_close(y, hidden @ weight.t(), rtol=1e-5, atol=1e-5)


@needs_kernel
def test_a_text_that_is_not_numbers_harms_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_layers, "LARGE", 0)
    model = build()
    hidden = torch.randn(1, 5, 64)
    copies = PackedCopies(model)
    copies.rows = 5
    with torch.inference_mode(), copies:
        assert isinstance(model.logits, RowOutput)
        before = model.logits(hidden)
        hidden[0, 2] = torch.nan
        after = model.logits(hidden)
        exact = hidden.double() @ model.output.double().t()
    assert after[0, 2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(after[0, others], before[0, others])
    torch.testing.assert_close(after[0, others].double(), exact[0, others], rtol=1e-5, atol=1e-5)  # fmt: skip
