"""Requests to a base and its fine-tunes in one batch, against each model alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.generate.test_adapters import merged, write
from tests.generate.test_cache import MIXERS
from tests.generate.test_many import NEW, PROMPTS, alone
from tests.models.test_shared_weights import (
    Weights,
    empty,
    random_weights,
    tuned,
    values_of,
)
from weft.checkpoint.convert.peft import read_adapter
from weft.errors import UsageError
from weft.generate.early_exit import EarlyExit
from weft.generate.engine import Engine
from weft.generate.lookup import Lookup
from weft.generate.packed_row import TextSlice
from weft.generate.request import Generation
from weft.generate.sampling import GREEDY, Sampling
from weft.models.adapter_shelf import LentAdapter
from weft.models.products import Packed
from weft.models.shared_weights import SharedWeights
from weft.models.transformer import Transformer
from weft.recipe import ModelShape

SHAPE = ModelShape(
    vocab=31, layers=5, embed=24, heads=6, kv_heads=2, ffn=32, init_std=0.3
)


class Zoo(NamedTuple):
    shape: ModelShape
    weights: dict[str, Weights]  # "" is the base

    def models(self, form: str | None = "float") -> dict[str, Transformer]:
        shared, models = SharedWeights(form), {}
        for name, weights in self.weights.items():
            models[name] = empty(self.shape)
            shared.fill(models[name], values_of(weights))
        return models

    def alone(self, name: str) -> Transformer:
        model = empty(self.shape)
        SharedWeights(None).fill(model, values_of(self.weights[name]))
        return model


@cache
def zoo(kind: str) -> Zoo:
    """Fine-tunes of a base, with two layers changed each."""
    shape = SHAPE.model_copy(update=MIXERS[kind])
    base = random_weights(shape)
    pairs = [*combinations(range(shape.layers), 2)][: 10 if kind == "softmax" else 4]
    names = {f"m{i}": [f"blocks.{at}" for at in pair] for i, pair in enumerate(pairs)}
    kinds = {name: tuned(base, name, *parts) for name, parts in names.items()}
    return Zoo(shape, {"": base, **kinds})


def engine_of(models: dict[str, Transformer], **settings: object) -> Engine:
    engine = Engine(models[""], **settings)  # type: ignore[arg-type]
    for name, model in models.items():
        if name:
            engine.add_model(name, model)
    return engine


@cache
def expected(kind: str, name: str, prompt: int, seed: int) -> list[int]:
    how = GREEDY if seed < 0 else Sampling(0.8, top_k=8, seed=seed)
    return alone(zoo(kind).alone(name), PROMPTS[prompt], how).written


def asked(
    engine: Engine, names: Sequence[str], seed: int = -1, **more: str
) -> dict[tuple[str, int], Generation]:
    """A request for every model, while earlier ones run."""
    how = GREEDY if seed < 0 else Sampling(0.8, top_k=8, seed=seed)
    drawn, requests = random.Random(seed), {}
    for number, name in enumerate(names):
        prompt = number % len(PROMPTS)
        requests[name, prompt] = engine.submit(
            PROMPTS[prompt], NEW, how, adapter=name, **more
        )[0]
        if drawn.random() < 0.5:
            engine.step()
    engine.run()
    return requests


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["softmax", "experts", "latent", "hybrid"])
@pytest.mark.parametrize("seed", [-1, 4])
def test_tokens_are_those_of_each_model_alone(kind: str, seed: int) -> None:
    """In float32, with random budgets, small caches and guesses; twice, so that prefixes are found."""
    models, drawn = zoo(kind).models(), random.Random(seed)
    drafter = Lookup(least=1) if drawn.random() < 0.5 else None
    engine = engine_of(
        models, budget=drawn.choice([5, 16, 512]), size=4, tokens=drawn.choice([200, None]),
        limit=drawn.choice([3, 64]), drafter=drafter,
    )  # fmt: skip
    names = [*models, *drawn.choices([*models], k=4)]
    written = set()
    for some in (names, names[:4]):
        for (name, prompt), request in asked(engine, some, seed).items():
            assert request.written == expected(kind, name, prompt, seed), name
            written.add(tuple(request.written))
    assert len(written) > len(models) - 2, "the models differ"
    assert not engine.scheduler.pool.owners


def test_own_blocks_of_every_model_are_lean() -> None:
    """With weights of sizes that are packed; tokens are those of each model alone, with other operators."""
    shape = ModelShape(
        vocab=31, layers=2, embed=64, heads=4, kv_heads=2, ffn=64, init_std=0.3
    )
    base = random_weights(shape)
    wide = Zoo(shape, {"": base, "m": tuned(base, "m", "blocks.1")})
    models = wide.models()
    engine = engine_of(models)
    blocks = [block for model in models.values() for block in model.blocks.values()]
    packs = Packed(torch.zeros(64, 64)).packed
    assert [getattr(block, "lean", None) is not None for block in blocks] == [packs] * 4
    for (name, prompt), request in asked(engine, ["", "m", "m"]).items():
        own = alone(wide.alone(name), PROMPTS[prompt], GREEDY)
        assert request.written == own.written


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["softmax", "ladder"])
def test_early_logits_are_those_of_each_model_alone(kind: str) -> None:
    """Whether the layers before the exit are shared or own, and in a row with texts that want several logits."""
    reader, ids = engine_of(zoo(kind).models()).reader, [3, 1, 4]
    names, shown = ("", "m0", "m3"), list[torch.Tensor]()
    parts = [
        TextSlice(ids, 0, [i], 1 + i, adapter=LentAdapter(name, ()) if name else None)
        for i, name in enumerate(names)
    ]
    logits = reader.read(parts, early=EarlyExit(3, shown.append))
    places, ends = torch.arange(3)[None], torch.tensor([0, 3], dtype=torch.int32)
    for layers, rows in ((3, shown[0]), (SHAPE.layers, logits)):
        for i, text in enumerate(rows.split([1, 2, 3])):
            model = zoo(kind).alone(names[i])
            own = model(torch.tensor([ids]), places, ends, route=range(layers))
            torch.testing.assert_close(text, own[0, -1 - i :], rtol=0, atol=1e-4)
    assert len(shown) == 1 and (shown[0] - logits).abs().max() > 0.01


def test_equal_prompts_of_different_models_share_no_keys() -> None:
    engine = engine_of(zoo("softmax").models(), size=4)
    first, second = (
        engine.submit(PROMPTS[1], NEW, GREEDY, adapter=name)[0] for name in ("m1", "m2")
    )
    engine.run()
    assert first.written != second.written
    again = [engine.submit(PROMPTS[1], 1, adapter=name)[0] for name in ("m1", "m3")]
    engine.run()
    assert [request.hits for request in again] == [16, 0]


def test_a_block_runs_once_for_all_models_that_have_it() -> None:
    """All models begin together: an own block runs once for its model, the others once for all of theirs."""
    models = zoo("softmax").models()
    engine, runs = engine_of(models), [0]
    blocks = {b for model in models.values() for b in model.blocks.values()}
    for block in blocks:
        block.register_forward_hook(lambda *_: runs.__setitem__(0, runs[0] + 1))
    for name in models:
        engine.submit([1, 2, 3], NEW, GREEDY, adapter=name)
    engine.run()
    assert len(blocks) == 5 + 10 * 2
    assert runs[0] == NEW * len(blocks), "in every step each block once"
    runs[0] = 0
    for name in ("", "m3"):
        engine.submit([1, 2, 3, 4], 1, GREEDY, adapter=name)
    engine.run()
    assert runs[0] == 5 + 2


def test_adapters_of_the_base_beside_other_models(tmp_path: Path) -> None:
    models = zoo("softmax").models()
    base = zoo("softmax").alone("")
    engine = engine_of(models, budget=20, size=4, drafter=Lookup(least=1))
    adapter = read_adapter(write(tmp_path / "a", base, 4, 0), base)
    engine.add_adapter("a", adapter)
    names = ["a", "m1", "", "a", "m2", "a"]
    requests = asked(engine, names)
    changed = merged(zoo("softmax").alone(""), adapter)
    for (name, prompt), request in requests.items():
        if name == "a":
            assert request.written == alone(changed, PROMPTS[prompt], GREEDY).written
        else:
            assert request.written == expected("softmax", name, prompt, -1)


def test_a_model_leaves_and_comes_again() -> None:
    models = zoo("softmax").models()
    engine = engine_of(models, size=4)
    for _ in range(2):
        (request,) = engine.submit(PROMPTS[4], NEW, GREEDY, adapter="m5")
        engine.run()
        assert request.written == expected("softmax", "m5", 4, -1)
        engine.remove_model("m5")
        with pytest.raises(UsageError, match="there is no adapter 'm5' here"):
            engine.submit([1], 1, adapter="m5")
        engine.add_model("m5", models["m5"])
    assert request.hits == 32, "its blocks are found again"


def test_what_cannot_be() -> None:
    models = zoo("softmax").models()
    engine = engine_of(models)
    with pytest.raises(UsageError, match="there is a model or adapter 'm1' already"):
        engine.add_model("m1", models["m1"])
    other = empty(SHAPE.model_copy(update={"ffn": 16, "vocab": 40}))
    said = "wide is of another shape than the base, with vocab = 40 and not 31, ffn = 16 and not 32"
    with pytest.raises(UsageError, match=said):
        engine.add_model("wide", other)
    with pytest.raises(UsageError, match="neither invariant nor a cache policy"):
        Engine(zoo("softmax").alone(""), invariant=True).add_model("m1", models["m1"])
