"""Weights that are only read, packed or in few bits, against the model as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import UsageError
from weft.generate.engine import Engine
from weft.generate.sampling import GREEDY
from weft.layout.mesh import Mesh
from weft.models import products
from weft.models.products import (
    EXACT_UNSIGNED,
    Int8,
    KernelOfBytes,
    Packed,
    form_of,
    has_kernel_of_bytes,
    read_only,
    times_codes,
)
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.recipe import Adapter, ModelShape, Train

SHAPE: dict[str, Any] = {
    "vocab": 128,
    "layers": 2,
    "embed": 64,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 96,
    "init_std": 0.2,
}


def build(**shape: Any) -> Transformer:
    return parallelize(ModelShape(**SHAPE | shape), Mesh.single(), Train(seed=3))[0]


@torch.no_grad()
def logits(model: Transformer) -> torch.Tensor:
    ids = torch.randint(0, 128, (1, 20), generator=torch.Generator().manual_seed(1))
    return model(ids, torch.arange(20)[None], torch.tensor([0, 20], dtype=torch.int32))


@pytest.mark.parametrize(("word", "near", "bytes_per_weight"), [
    ("float", 1e-6, 4), ("int8", 0.1, 1 + 4 / 64), ("int4", 0.6, 0.5 + 4 / 32),
])  # fmt: skip
@pytest.mark.parametrize(
    "shape",
    [{}, {"tied": True, "qkv_bias": True, "qk_norm": True}],
    ids=["plain", "other"],
)
def test_a_model_that_is_only_read_says_the_same(
    word: str, near: float, bytes_per_weight: float, shape: Any
) -> None:
    expected = logits(build(**shape))
    model = build(**shape)
    held = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    held -= 0 if model.shape.tied else model.embedding.table.numel()
    size = read_only(model, word)
    assert size <= held * bytes_per_weight
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    assert not names & {"wq", "wk", "wv", "wo", "gate", "up", "down", "head"}, (
        "the memory of weights is given back"
    )
    error = (logits(model) - expected).norm() / expected.norm()
    assert (1e-3 if word != "float" else -1) < error < near
    engine, single = Engine(model), Engine(model)
    prompts = ([3, 5, 7], [9] * 5, [11])
    found = [engine.submit(prompt, 8, GREEDY)[0] for prompt in prompts]
    engine.run()
    assert [one.written for one in found] == [
        [*single.stream(single.submit(p, 8, GREEDY)[0])] for p in prompts
    ]


def test_adapters_are_merged() -> None:
    shape = {"adapter": Adapter(rank=4, alpha=8)}
    model = build(**shape)
    for name, p in model.named_parameters():
        if name.endswith(".b"):
            p.data.normal_(std=0.2)
    expected, plain = logits(model), logits(build())
    assert (expected - plain).norm() > 0.1 * plain.norm()
    read_only(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    assert not any("adapters" in name for name, _ in model.named_parameters())


def test_in_eight_bits_a_row_is_multiplied_alike_whatever_stands_beside_it() -> None:
    drawn = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=drawn)
    product = Int8(weight)
    x = torch.randn(40, 64, generator=drawn) * torch.logspace(-6, 6, 40)[:, None]
    x[7] = 0
    whole = product(x)
    assert all(
        torch.equal(whole[i : i + n], product(x[i : i + n]))
        for i in range(40)
        for n in (1, 2, 5)
    )
    assert not whole[7].any() and whole.isfinite().all()
    # Two bytes per number: what is lost is the weight's rounding.
    scales = weight.abs().amax(1, keepdim=True) / 127
    rounded = x @ ((weight / scales).round() * scales).T
    assert ((whole - rounded).norm(dim=1) <= 1e-4 * rounded.norm(dim=1)).all()


@pytest.mark.parametrize(
    ("word", "near"), [("float", 1e-6), ("int8", 0.013), ("int4", 0.1)]
)
def test_one_product(word: str, near: float) -> None:
    drawn = torch.Generator().manual_seed(0)
    weight, x = (
        torch.randn(96, 128, generator=drawn),
        torch.randn(2, 5, 128, generator=drawn),
    )
    expected = x @ weight.T
    assert (form_of(word, weight)(x) - expected).norm() < near * expected.norm()


def test_sizes_that_kernels_do_not_take() -> None:
    drawn = torch.Generator().manual_seed(0)
    x, odd = torch.randn(3, 40, generator=drawn), torch.randn(17, 40, generator=drawn)
    exact = (x.double() @ odd.double().T).float()
    assert not form_of("float", odd).packed and isinstance(form_of("int4", odd), Packed)
    # Relative to the whole: what is nearly zero is all rounding, and each PyTorch adds up in an order of its own.
    for word, near in (("float", 1e-6), ("int4", 1e-6), ("int8", 0.02)):
        assert (form_of(word, odd)(x) - exact).norm() < near * exact.norm()


@pytest.mark.parametrize(("shape", "word", "said"), [
    ({}, "int5", "weights cannot be 'int5'; did you mean 'int8'. Choose from: float, bfloat16, int8, int4, sparse,"),
    ({"experts": 4, "experts_per_token": 2}, "bfloat16", "weights in bfloat16 are for dense models"),
    ({"experts": 4, "experts_per_token": 2}, "int8", "weights in int8 are for dense models with plain attention"),
])  # fmt: skip
def test_what_cannot_be(shape: Any, word: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_only(build(**shape), word)


def test_weights_and_cache_can_be_rounded_to_bfloat16() -> None:
    expected, model = logits(build()), build()
    held = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    held -= model.embedding.table.numel()
    assert read_only(model, "bfloat16") == 2 * held
    said = logits(model)
    assert said.dtype == torch.bfloat16
    error = (said.float() - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.05
    engine = Engine(model)
    (text,) = engine.submit([3, 5, 7], 8, GREEDY)
    engine.run()
    assert len(text.written) == 8
    assert engine.reader.pages[0].store.dtype == torch.bfloat16  # type: ignore[union-attr]


def test_mixtures_are_packed_as_far_as_they_are_dense() -> None:
    shape = {"experts": 4, "experts_per_token": 2}
    model, expected = build(**shape), logits(build(**shape))
    read_only(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


#: The ways to call oneDNN's kernel that are exact on this CPU.
EXACT_WAYS = list(filter(has_kernel_of_bytes, (None, EXACT_UNSIGNED)))


@pytest.mark.skipif(
    not EXACT_WAYS, reason="this CPU has no kernel that multiplies bytes exactly (VNNI)"
)
@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 3000), st.integers(0, 2**32)
)
@settings(max_examples=40, deadline=None)
def test_any_cpu_comes_to_the_bits_of_the_kernel_of_bytes(
    rows: int, out: int, inner: int, seed: int
) -> None:
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (rows, inner), dtype=torch.uint8, generator=drawn)
    codes = torch.randint(-127, 128, (out, inner), dtype=torch.int8, generator=drawn)
    x[0], codes[0] = 255, 127  # the largest sums
    for part in EXACT_WAYS:
        assert torch.equal(times_codes(x, codes), KernelOfBytes(codes, part)(x))


def test_a_kernel_that_rounds_large_sums_multiplies_parts_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As oneDNN does with AMX: it converts sums of unsigned bytes to float32, then subtracts what is for the 128."""

    def rounding(self: KernelOfBytes, rows: torch.Tensor, codes: torch.Tensor) -> Any:
        products = (rows.long() @ codes.long().t()).float()
        return products - (128 * codes.long().sum(1)).float()

    monkeypatch.setattr(KernelOfBytes, "_product", rounding)
    monkeypatch.setattr(products.onednn, "qlinear_prepack", lambda codes, _: codes)
    answers = has_kernel_of_bytes.__wrapped__
    monkeypatch.setattr(products, "has_kernel_of_bytes", answers)
    drawn = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (12, 519), dtype=torch.uint8, generator=drawn)
    codes = torch.randint(-127, 128, (22, 519), dtype=torch.int8, generator=drawn)
    x[0], codes[0] = 255, 127
    assert not torch.equal(KernelOfBytes(codes)(x), times_codes(x, codes))
    assert torch.equal(products.kernel_of(codes)(x), times_codes(x, codes))


def test_sums_of_codes_are_exact_on_any_cpu() -> None:
    drawn = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (5, 2100), dtype=torch.uint8, generator=drawn)
    codes = torch.randint(-127, 128, (600, 2100), dtype=torch.int8, generator=drawn)
    assert torch.equal(
        times_codes(x, codes), ((x.long() - 128) @ codes.long().t()).float()
    )


def test_a_cpu_whose_sums_would_overflow_multiplies_by_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What oneDNN adds up in 16 bits is no kernel, whatever PyTorch says of the CPU."""
    whole, model = build(), build()
    read_only(whole, "int8")
    monkeypatch.setattr(products, "has_kernel_of_bytes", lambda part: False)
    read_only(model, "int8")
    assert torch.equal(logits(model), logits(whole))


@pytest.mark.usefixtures("forked_python")
def test_a_mask_of_onednn_is_obeyed() -> None:
    """A CPU without VNNI, which a mask makes of one that has it: PyTorch says that it has, and its kernel overflows."""
    script = "from weft.models.products import has_kernel_of_bytes; print(has_kernel_of_bytes())"
    words = [sys.executable, "-c", script]
    done = subprocess.run(
        words,
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(("word", "kept"), [("float", True), ("int4", False)])
def test_weights_that_are_in_four_bits_stay_there_unless_other_ones_are_asked_for(
    word: str, kept: bool
) -> None:
    model = build(adapter=Adapter(kind="qlora", rank=4))
    expected = logits(model)
    read_only(model, word)
    error = (logits(model) - expected).norm() / expected.norm()
    assert (
        error < 0.6
        and any("codes" in name for name, _ in model.named_parameters()) == kept
    )
