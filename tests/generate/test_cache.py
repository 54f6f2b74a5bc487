"""Texts that are read piece by piece with caches, against one forward pass without any."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch

from weft.generate.cache import ROOM, KeyValueCache, KeyValues, StateCache, attending, attention_layers, layer_caches
from weft.layout.mesh import Mesh
from weft.models.attention import Attend, attention
from weft.models.transformer import T, Transformer
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train

TOKENS = 12
PIECES = ([12], [1] * 12, [5, 1, 6], [1, 11])
MIXERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "linear": {"mixer": "linear"},
    "retention": {"mixer": "retention"},
    "hybrid": {"mixer": "retention", "softmax_every": 3},
}


def build(mixer: str) -> Transformer:
    shape = ModelShape(vocab=31, layers=3, embed=24, heads=6, kv_heads=2, ffn=32, init_std=0.3, **MIXERS[mixer])
    return parallelize(shape, Mesh.single(), Train(seed=2, dtype="float64"))[0]


def documents(rows: int, tokens: int) -> torch.Tensor:
    return torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32)


@torch.inference_mode()
@pytest.mark.parametrize("pieces", PIECES, ids=str)
@pytest.mark.parametrize("mixer", MIXERS)
def test_logits_are_those_of_one_forward_pass(mixer: str, pieces: list[int]) -> None:
    """Several rows at once, and with the positions that the tokens have in the whole text."""
    model, rows = build(mixer), 2
    tokens = torch.randint(0, 31, (rows, TOKENS), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(TOKENS).expand(rows, -1)
    whole, caches, parts = model(tokens, positions, documents(rows, TOKENS)), layer_caches(model), []
    for ids, at in zip(tokens.split(pieces, 1), positions.split(pieces, 1), strict=True):
        with attending(model, caches):
            parts.append(model(ids, at, documents(rows, ids.shape[1])))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-11 * float(whole.abs().max()))
    # Nothing is left behind in the model.
    assert torch.equal(model(tokens, positions, documents(rows, TOKENS)), whole)


@torch.inference_mode()
@pytest.mark.parametrize("mixer", MIXERS)
def test_requests_that_come_and_go_can_be_read_as_one_packed_row(mixer: str) -> None:
    """What serving builds on: in every step, attention that finds what each request's document has before it."""
    model, lengths = build(mixer), [12, 5, 9]
    texts = [torch.randint(0, 31, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    caches = [layer_caches(model) for _ in texts]
    read, logits = [0, 0, 0], [torch.empty(0, 31, dtype=torch.float64) for _ in texts]

    def together(layer: int, requests: list[int]) -> Attend:
        def attend(q: T, k: T, v: T, cu_seqlens: T) -> T:
            sizes = cu_seqlens.diff().tolist()
            parts = zip(*(x.split(sizes, 1) for x in (q, k, v)), requests, strict=True)
            return torch.cat([caches[r][layer](*x, documents(1, x[0].shape[1])) for *x, r in parts], 1)

        return attend

    # Prompts whole or in chunks beside single tokens; by request, how many tokens it reads in this step.
    for step in ({0: 5, 1: 3}, {1: 1, 0: 1}, {0: 4, 2: 4, 1: 1}, {2: 1, 0: 1}, {2: 4, 0: 1}):
        spans = {r: slice(read[r], read[r] + n) for r, n in step.items()}
        tokens = torch.cat([texts[r][at] for r, at in spans.items()])[None]
        positions = torch.cat([torch.arange(at.start, at.stop) for at in spans.values()])[None]
        cu_seqlens = torch.tensor([0, *accumulate(step.values())], dtype=torch.int32)
        with attending(model, [together(layer, list(step)) for layer in range(3)]):
            out = model(tokens, positions, cu_seqlens)[0].split(list(step.values()))
        for r, part in zip(step, out, strict=True):
            logits[r], read[r] = torch.cat((logits[r], part)), read[r] + len(part)
    assert read == lengths
    for text, found in zip(texts, logits, strict=True):
        alone = model(text[None], torch.arange(len(text))[None], documents(1, len(text)))[0]
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-11 * float(alone.abs().max()))


def test_every_layer_has_the_cache_of_its_mixer_and_its_own() -> None:
    caches = layer_caches(build("hybrid"))
    assert [type(cache) for cache in caches] == [StateCache, StateCache, KeyValueCache]
    assert len(set(map(id, caches))) == 3


def test_layers_attend_as_before_also_after_an_error() -> None:
    model = build("hybrid")
    before = [layer.attend for layer in attention_layers(model)]
    with pytest.raises(KeyError), attending(model, layer_caches(model)):
        assert all(layer.attend is not own for layer, own in zip(attention_layers(model), before, strict=True))
        raise KeyError
    assert [layer.attend for layer in attention_layers(model)] == before
    with pytest.raises(ValueError, match="shorter"), attending(model, layer_caches(model)[:2]):
        pass
    assert [layer.attend for layer in attention_layers(model)] == before


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("pieces", PIECES, ids=str)
def test_softmax_continues_where_it_stopped(pieces: list[int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 12, n, 8, dtype=torch.float64, generator=generator).to(dtype) for n in (4, 2, 2))
    cache = KeyValueCache()
    outs = [cache(*x, documents(1, x[0].shape[1])) for x in zip(*(x.split(pieces, 1) for x in (q, k, v)), strict=True)]
    expected, _ = attention(q.double(), k.double(), v.double(), documents(1, 12))
    near = 1e-11 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(torch.cat(outs, 1).double(), expected, rtol=0, atol=near)


def test_keys_and_values_survive_growth_in_memory_that_is_an_eighth_larger_at_most() -> None:
    k, v = torch.randn(2, 2, 3000, 2, 4).unbind()
    kept, copies = KeyValues(), set()
    for a, b in zip(k.split(7, 1), v.split(7, 1), strict=True):
        keys, values = kept.append(a, b)
        assert kept.store is not None and kept.store.shape[2] <= kept.tokens * 9 / 8 + ROOM
        copies.add(kept.store.shape)
    assert torch.equal(keys, k) and torch.equal(values, v) and len(copies) < 15
