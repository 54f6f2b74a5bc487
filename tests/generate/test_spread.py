"""Generation over ranks against generation on one device: tokens, logits, what is kept, sent and evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.generate.one_text import OneText
from weft.errors import UsageError
from weft.generate import engine, spread
from weft.generate.engine import generate
from weft.generate.sampling import GREEDY, Sampling
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.parallel.context.tables import SCHEMES
from weft.recipe import ModelShape, Train

VOCAB, LAYERS, EMBED, HEADS, KV, NEW = 61, 2, 32, 4, 2, 12
#: Prompts of odd lengths, of fewer tokens than ranks or blocks, and one token alone.
LENGTHS = (1, 2, 3, 7, 13, 50)


def build(dtype: Any = "float64", **more: Any) -> Transformer:
    shape = ModelShape(vocab=VOCAB, layers=LAYERS, embed=EMBED, heads=HEADS, kv_heads=KV, ffn=48, init_std=0.5, **more)
    return parallelize(shape, Mesh.single(), Train(seed=2, dtype=dtype))[0]


def prompt(length: int) -> list[int]:
    return [(7 * i + 3) % VOCAB for i in range(length)]


@contextmanager
def recorded() -> Iterator[dict[str, list[Any]]]:
    """Logits that were chosen from, products of the output layer as rows, and elements gathered over ranks."""
    seen: dict[str, list[Any]] = {"logits": [], "rows": [], "gathered": []}
    choose, linear, gather = engine.choose, torch.nn.functional.linear, spread.all_gather

    def chosen(logits: torch.Tensor, *rest: Any) -> int:
        seen["logits"].append(logits.clone())
        return choose(logits, *rest)

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if weight.shape[0] == VOCAB:
            seen["rows"].append(x[..., 0].numel())
        return linear(x, weight)

    def gathered(whole: torch.Tensor, part: torch.Tensor, group: Any) -> Any:
        seen["gathered"].append(part.numel())
        return gather(whole, part, group=group)

    with (
        mock.patch.object(engine, "choose", chosen),
        mock.patch("torch.nn.functional.linear", product),
        mock.patch.object(spread, "all_gather", gathered),
    ):
        yield seen


def continued(lengths: tuple[int, ...], context: str, temperature: float = 0.0) -> list[tuple[list[int], Any]]:
    """On every rank, of every prompt: the new ids and what :func:`recorded` has seen."""
    model, layout, found = build(), Layout(cp=dist.get_world_size(), context=context), []
    for length in lengths:
        with recorded() as seen:
            ids = list(generate(model, prompt(length), NEW, (), Sampling(temperature, 10, seed=5), layout))
        found.append((ids, seen))
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("world", "context"), [(2, "zigzag"), (4, "zigzag"), *[(3, scheme) for scheme in SCHEMES]])
def test_tokens_and_logits_are_those_of_one_device(pool: Any, world: int, context: str) -> None:
    model = build()
    answers = pool.run(world, continued, LENGTHS, context)
    for number, length in enumerate(LENGTHS):
        with recorded() as alone:
            expected = list(generate(model, prompt(length), NEW, (), GREEDY))
        assert len(set(expected)) > 2
        assert all(answer[number][0] == expected for answer in answers), length
        logits = [answer[number][1]["logits"] for answer in answers]
        assert sorted(map(len, logits)) == [0] * (world - 1) + [NEW]  # one rank evaluates and chooses
        torch.testing.assert_close(max(logits, key=len), alone["logits"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("world", [2, 4])
def test_samples_follow_the_seed_under_any_number_of_ranks(pool: Any, world: int) -> None:
    expected = list(generate(build(), prompt(21), NEW, (), Sampling(1.0, 10, seed=5)))
    for answer in pool.run(world, continued, (21,), "zigzag", 1.0):
        assert answer[0][0] == expected


def test_only_the_last_position_is_evaluated_and_results_travel_instead_of_the_cache(pool: Any) -> None:
    """Also on one device: one row of logits per new token, never those of the prompt."""
    with recorded() as alone:
        list(generate(build(), prompt(50), NEW, (), GREEDY))
    assert alone["rows"] == [1] * NEW
    rows = []
    for ((_, seen),) in pool.run(4, continued, (50,), "zigzag"):
        rows.append(sum(seen["rows"]))
        head_dim = EMBED // HEADS
        assert seen["gathered"] == [HEADS * (head_dim + 1)] * (LAYERS * (NEW - 1))  # (out, lse) of a token, per layer
    assert sorted(rows) == [0, 0, 0, NEW]


def kept(length: int, new: int) -> tuple[list[int], int]:
    """On every rank: tokens in the cache of every layer, and bytes that it takes."""
    reader = spread.SpreadReader(build(), Layout(cp=dist.get_world_size()))
    with torch.inference_mode():
        reader.read(prompt(length))
        for _ in range(new):
            reader.read([1])
    stores = [cache.past.store for cache in reader.caches]
    return [c.past.tokens for c in reader.caches], sum(s.numel() * s.element_size() for s in stores if s is not None)


def test_the_cache_is_cut_evenly_and_grows_evenly(pool: Any) -> None:
    length, new = 4001, 300
    answers = pool.run(4, kept, length, new)
    for layer in range(LAYERS):
        held = [tokens[layer] for tokens, _ in answers]
        assert sum(held) == length + new and max(held) - min(held) <= 2
    one_token = 2 * 8 * KV * EMBED // HEADS * LAYERS
    assert all(size <= one_token * (max(held) * 9 / 8 + spread.ROOM) for _, size in answers)


def refused(settings: dict[str, Any], shape: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as caught:
        next(generate(build(**shape), [1], 1, (), GREEDY, layout=Layout(**settings)))
    return str(caught.value)


@pytest.mark.parametrize(("settings", "shape", "message"), [
    ({"tp": 2}, {}, "over cp only, not over tp; use --layout cp=2"),
    ({"cp": 2, "pp": 2}, {}, "over cp only, not over pp; use --layout cp=4"),
    ({"cp": 4, "context": "ulysses"}, {}, "does not exchange heads"),
    ({"cp": 4, "ulysses": 2}, {}, "does not exchange heads"),
    ({"cp": 2}, {"mixer": "retention"}, "for softmax layers"),
    ({"cp": 3}, {}, "needs 3 ranks that are started together"),
], ids=str)  # fmt: skip
def test_layouts_that_cannot(settings: dict[str, Any], shape: dict[str, Any], message: str) -> None:
    assert message in refused(settings, shape)


def precisions(length: int) -> list[list[int]]:
    found, layout = [], Layout(cp=dist.get_world_size())
    with torch.inference_mode():
        for dtype in ("float32", "bfloat16"):
            reader = spread.SpreadReader(build("float32").to(getattr(torch, dtype)), layout)
            logits = reader.read(prompt(length))
            found.append([] if logits is None else logits.float().tolist())
    return found


def test_in_lower_precision_logits_are_as_close_as_on_one_device(pool: Any) -> None:
    """In float32 to 1e-5 of the largest logit; in bfloat16 no further from float64 than on one device."""
    with torch.inference_mode():
        exact, half = (OneText(model).read(prompt(50)) for model in (build(), build("float32").to(torch.bfloat16)))
    (single, low), *_ = [answer for answer in pool.run(4, precisions, 50) if answer[0]]
    assert (torch.tensor(single) - exact).abs().max() < 1e-5 * exact.abs().max()
    assert (torch.tensor(low) - exact).abs().max() < 2 * (half - exact).abs().max()
