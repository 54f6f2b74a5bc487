"""Texts that are read piece by piece from pages, against one forward pass without any."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from weft.generate.engine import Engine
from weft.generate.packed_row import TextSlice
from weft.generate.reader import PagedReader
from weft.layout.mesh import Mesh
from weft.models.attention import attention
from weft.models.paged import (
    ROOM,
    KeyValuePages,
    Reading,
    StatePages,
    attending,
    attention_layers,
    layer_pages,
)
from weft.models.spans import Span
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train

MIXERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "windows": {"window": 5, "full_every": 3},
    "linear": {"mixer": "linear"},
    "retention": {"mixer": "retention"},
    "hybrid": {"mixer": "retention", "softmax_every": 3},
    "latent": {
        "kv_rank": 10,
        "rope_dim": 4,
        "q_rank": 7,
        "value_dim": 5,
        "kv_heads": None,
    },
    "experts": {"experts": 4, "experts_per_token": 2},
    "ladder": {"residual": "ladder", "ladder_from": 1},
}


def build(mixer: str) -> Transformer:
    shape = {
        "vocab": 31,
        "layers": 3,
        "embed": 24,
        "heads": 6,
        "kv_heads": 2,
        "ffn": 32,
        "init_std": 0.3,
    }
    return parallelize(
        ModelShape(**shape | MIXERS[mixer]),
        Mesh.single(),
        Train(seed=2, dtype="float64"),
    )[0]


def document(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def draw_text(length: int) -> list[int]:
    return torch.randint(
        0, 31, (length,), generator=torch.Generator().manual_seed(length)
    ).tolist()


@torch.inference_mode()
@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("mixer", MIXERS)
def test_texts_that_come_and_go_in_one_packed_row_have_the_logits_of_one_forward_pass(
    mixer: str, size: int
) -> None:
    """Whole prompts and chunks beside single tokens, in blocks that lie anywhere; logits behind every chunk."""
    model, drawn = build(mixer), random.Random(size)
    texts = [draw_text(length) for length in (12, 5, 9, 30)]
    free = drawn.sample(range(100), 100)
    tables = [[free.pop() for _ in range(-(-len(text) // size))] for text in texts]
    expected = [
        model(torch.tensor([t]), torch.arange(len(t))[None], document(len(t)))[0]
        for t in texts
    ]
    reader, read = PagedReader(model, size), [0] * len(texts)
    steps: list[dict[int, int]] = [
        {0: 5, 1: 3},
        {1: 1, 0: 1, 3: 17},
        {0: 4, 2: 4, 1: 1},
        {2: 1, 3: 12, 0: 1},
        {2: 4, 0: 1},
    ]
    for step in [*steps, {3: 1}]:
        parts = [
            TextSlice(texts[r][read[r] : read[r] + n], read[r], tables[r], r != 2)
            for r, n in step.items()
        ]
        found = reader.read(parts)
        for r, n in step.items():
            read[r] += n
        wanted = [expected[r][read[r] - 1] for r in step if r != 2]
        torch.testing.assert_close(
            found,
            torch.stack(wanted),
            rtol=0,
            atol=1e-11 * float(expected[0].abs().max()),
        )
    assert read == list(map(len, texts))
    # Nothing is left behind in the model.
    assert torch.equal(
        model(torch.tensor([texts[0]]), torch.arange(12)[None], document(12))[0],
        expected[0],
    )


@torch.inference_mode()
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_text_goes_on_from_blocks_of_another_one(mixer: str) -> None:
    """From full blocks that are shared, and from the copy of one that is not full."""
    model, text = build(mixer), draw_text(10)
    reader = PagedReader(model, 4)
    reader.read([TextSlice(text, 0, [5, 2, 7])])
    for end in ([1, 2], [3]):
        longer = [*text, *end]
        expected = model(
            torch.tensor([longer]),
            torch.arange(len(longer))[None],
            document(len(longer)),
        )[0, -1]
        found = reader.read([TextSlice(longer[10:], 10, [5, 2, 1])], [(7, 1)])[0]
        torch.testing.assert_close(
            found, expected, rtol=0, atol=1e-11 * float(expected.abs().max())
        )
        found = reader.read([TextSlice(longer[8:], 8, [5, 2, 0])])[0]
        torch.testing.assert_close(
            found, expected, rtol=0, atol=1e-11 * float(expected.abs().max())
        )


@torch.inference_mode()
@pytest.mark.parametrize("mixer", MIXERS)
def test_what_others_left_in_blocks_is_never_read(mixer: str) -> None:
    model, text, reader = build(mixer), draw_text(10), PagedReader(build(mixer), 4)
    reader.read([TextSlice(text, 0, [0, 1, 2])])
    for pages in reader.pages:
        assert pages.store is not None
        pages.store.fill_(torch.nan)
    expected = model(torch.tensor([text]), torch.arange(10)[None], document(10))[0]
    for end in (3, 5, 10):
        past = {3: 0, 5: 3, 10: 5}[end]
        found = reader.read([TextSlice(text[past:end], past, [2, 0, 1])])[0]
        torch.testing.assert_close(
            found, expected[end - 1], rtol=0, atol=1e-11 * float(expected.abs().max())
        )


def test_every_layer_has_the_pages_of_its_mixer_and_its_own() -> None:
    pages = layer_pages(build("hybrid"), 4)
    assert [type(one) for one in pages] == [StatePages, StatePages, KeyValuePages]
    assert len(set(map(id, pages))) == 3


def test_layers_attend_as_before_also_after_an_error() -> None:
    model = build("hybrid")
    before = [layer.attend for layer in attention_layers(model)]
    with pytest.raises(KeyError), attending(model, layer_pages(model, 4)):
        assert all(
            layer.attend is not own
            for layer, own in zip(attention_layers(model), before, strict=True)
        )
        raise KeyError
    assert [layer.attend for layer in attention_layers(model)] == before
    with (
        pytest.raises(ValueError, match="shorter"),
        attending(model, layer_pages(model, 4)[:2]),
    ):
        pass
    assert [layer.attend for layer in attention_layers(model)] == before


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 1, 3, 300])
@pytest.mark.parametrize(
    "pieces", [[700], [1] * 20, [5, 1, 6], [1, 11], [600, 1, 50, 49]], ids=str
)
def test_softmax_continues_where_it_stopped(
    pieces: list[int], window: int, dtype: torch.dtype
) -> None:
    generator, total = torch.Generator().manual_seed(1), sum(pieces)
    q, k, v = (
        torch.randn(1, total, n, 8, dtype=torch.float64, generator=generator).to(dtype)
        for n in (4, 2, 2)
    )
    pages, outs, past = KeyValuePages(16), [], 0
    for some in zip(*(x.split(pieces, 1) for x in (q, k, v)), strict=True):
        count = some[0].shape[1]
        pages.reading = Reading(
            [Span(0, count, past, range(44))], torch.arange(past, past + count)
        )
        outs.append(pages(*some, document(count), *([window] if window else [])))
        past += count
    expected, _ = attention(q.double(), k.double(), v.double(), document(total), window)
    near = 1e-11 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(torch.cat(outs, 1).double(), expected, rtol=0, atol=near)


def test_an_engine_with_a_limit_has_its_whole_cache_at_once_and_pays_for_what_is_used() -> None:  # fmt: skip
    """A step that copied the cache to a larger one would hold up all texts."""
    engine = Engine(build("softmax"), tokens=20_000, size=4)
    engine.submit([1, 2, 3], 2)
    engine.run()
    (first, *_) = stores = [pages.store for pages in engine.reader.pages]
    assert first is not None and first.shape[1] >= 5000 and first[:, -1].eq(0).all()
    engine.submit([i % 31 for i in range(2000)], 2)
    engine.run()
    assert all(a is b for a, b in zip(stores, (p.store for p in engine.reader.pages), strict=True))  # fmt: skip
    # more than the host can promise: as much as is needed, and more of it later
    pages = KeyValuePages(4)
    pages.reserved = 10**14
    assert pages.room(3, torch.zeros(1), 2, (4, 1, 8)).shape[1] < 10**6


def test_pages_grow_with_what_is_used_and_keep_what_they_have() -> None:
    pages, seen = KeyValuePages(4), set()
    kept = torch.randn(1, 4000, 1, 2)
    for at in range(0, 4000, 4):
        pages.reading = Reading(
            [Span(0, 4, at, range(at // 4 + 1))], torch.arange(at, at + 4)
        )
        pages.write(*[kept[:, at : at + 4]] * 2)
        assert (
            pages.store is not None
            and pages.store.shape[1] * 4 <= (at + 4) * 9 / 8 + ROOM
        )
        seen.add(pages.store.shape)
    assert (
        torch.equal(pages.store[:, :1000].flatten(1, 2), kept.expand(2, -1, -1, -1))
        and len(seen) < 20
    )
