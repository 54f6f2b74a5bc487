"""Generation with caches against generation without, and against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generate.one_text import generate
from weft.data.detokenizer import stream_text
from weft.data.tokenizer import Tokenizer, load_tokenizer
from weft.errors import UsageError
from weft.generate.sampling import GREEDY, Sampling
from weft.layout.mesh import Mesh
from weft.models.hugging_face import export
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize, resident_state
from weft.recipe import ModelShape, RopeScaling, Source, Train

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": RopeScaling(factor=8, original_max_position=16)},
    "qwen2": {"qkv_bias": True, "tied": True},
    "qwen3": {"qk_norm": True, "head_dim": 12},
}
PROMPT = [3, 1, 4, 1, 5]


def build(name: str = "llama") -> Transformer:
    shape = ModelShape(
        vocab=61,
        layers=2,
        embed=32,
        heads=4,
        kv_heads=2,
        ffn=48,
        init_std=0.5,
        **SHAPES[name],
    )
    return parallelize(shape, Mesh.single(), Train(seed=2))[0]


@torch.no_grad()
def without_cache(model: Transformer, ids: list[int], count: int) -> list[int]:
    ids = list(ids)
    for _ in range(count):
        n = len(ids)
        logits = model(
            torch.tensor([ids]),
            torch.arange(n)[None],
            torch.tensor([0, n], dtype=torch.int32),
        )
        ids.append(int(logits[0, -1].argmax()))
    return ids[-count:]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("prompt", [PROMPT, [7]])
def test_greedy_equals_no_cache_and_transformers(
    name: str, prompt: list[int], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    model = build(name)
    ids = list(generate(model, prompt, 24, (), GREEDY))
    assert ids == without_cache(model, prompt, 24)
    assert len(set(ids)) > 3
    export(
        {p.name: p.local for p in resident_state(model, model.mesh).held},
        model.shape,
        tmp_path / "out",
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    out = theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=24,
        do_sample=False,
    )
    assert out[0, len(prompt) :].tolist() == ids


def test_it_ends_at_eos_and_yields_as_it_goes() -> None:
    model = build()
    ids = list(generate(model, PROMPT, 24, (), GREEDY))
    eos = ids[5]
    assert list(generate(model, PROMPT, 24, (eos,), GREEDY)) == ids[: ids.index(eos)]
    steps = generate(model, PROMPT, 10**9, (), GREEDY)
    assert [next(steps) for _ in range(3)] == ids[:3]
    assert not torch.is_inference_mode_enabled()  # not between two ids
    assert list(generate(model, PROMPT, 0, (), GREEDY)) == []


def test_sampling_follows_the_seed_and_top_k() -> None:
    model = build()
    draw = [
        list(generate(model, PROMPT, 12, (), Sampling(seed=seed))) for seed in (1, 1, 2)
    ]
    assert draw[0] == draw[1] != draw[2]
    greedy = list(generate(model, PROMPT, 12, (), GREEDY))
    assert list(generate(model, PROMPT, 12, (), Sampling(5.0, 1))) == greedy
    assert list(generate(model, PROMPT, 12, (), Sampling(1e-30))) == greedy
    assert len(list(generate(model, PROMPT, 3, (), Sampling(top_k=10**6)))) == 3


@pytest.mark.parametrize("prompt", [[], [61], [-1]])
def test_impossible_prompts(prompt: list[int]) -> None:
    with pytest.raises(
        UsageError, match="at least one token, of ids below the model's 61"
    ):
        next(generate(build(), prompt, 1, (), GREEDY))


TEXT = "naïve café: 日本語 🙂🙂 שלום\n  spaces, €5 �"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.txt").write_text(
        "some plain words, and a few more plain words\n" * 20
    )
    return load_tokenizer(
        "train:280",
        [Source(kind="text", path=str(folder / "text.txt"))],
        folder / "cache",
    )


@pytest.mark.parametrize("kind", ["bytes", "trained"])
def test_streamed_text_is_the_text_in_whole_characters(
    kind: str, trained: Tokenizer
) -> None:
    tokenizer = trained if kind == "trained" else load_tokenizer("bytes")
    ids = tokenizer.encode(TEXT).tolist()
    pieces = list(stream_text(tokenizer, ids))
    assert "".join(pieces) == tokenizer.decode(ids) == TEXT
    assert (
        sum("\ufffd" in piece for piece in pieces) == 1 and len(pieces) > len(TEXT) / 2
    )
    cut = list(stream_text(tokenizer, tokenizer.encode("a🙂").tolist()[:-1]))
    assert cut[0] == "a" and set(cut[1]) == {"\ufffd"}
    assert "".join(stream_text(tokenizer, [*ids, tokenizer.eos])) == TEXT


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=30))
def test_any_bytes(data: bytes) -> None:
    tokenizer = load_tokenizer("bytes")
    assert "".join(stream_text(tokenizer, list(data))) == tokenizer.decode(list(data))


def test_spaces_that_a_tokenizer_drops_in_front_stay_within() -> None:
    class Words:
        def decode(self, ids: Any) -> str:
            return " ".join("abc"[i] for i in ids)

    assert list(stream_text(Words(), [0, 1, 2])) == ["a", " b", " c"]


def test_time_per_token_does_not_need_the_past_again() -> None:
    model, seen = build(), []
    model.embedding.register_forward_pre_hook(
        lambda _, inputs: seen.append(tuple(inputs[0].shape))
    )
    list(generate(model, PROMPT, 4, (), GREEDY))
    assert seen == [(1, 5), (1, 1), (1, 1), (1, 1)]
