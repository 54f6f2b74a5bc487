"""The engine over several ranks: every request gets what it gets alone on one, whatever is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.generate.test_cache import MIXERS
from tests.generate.test_many import NEW, PROMPTS, SETTINGS, count_preempted
from weft.generate.engine import Engine
from weft.generate.policies import chunked
from weft.generate.ranks import follow, mesh_of_rank
from weft.generate.sampling import GREEDY, Sampling
from weft.layout.layout import Layout
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train

SHAPE = {"vocab": 31, "layers": 3, "embed": 24, "heads": 6, "kv_heads": 2, "ffn": 32, "init_std": 0.3}
NAMES = ("chunks of 5", "a cache that is too small")
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {}, "chunks of 3 in a small cache": {"tokens": 48, "size": 4, "budget": 5, "policy": chunked(3)},
}  # fmt: skip
OF_ALL = ("tp=2", "tp=3", "cp=2", "cp=3", "pp=2", "pp=3", "tp=2,cp=2", "tp=2,pp=2", "cp=2,pp=2")
OF_EXPERTS = ("cp=2,ep=2", "cp=4,ep=2", "tp=2,ep=2", "tp=2,cp=2,ep=4", "cp=2,pp=2,ep=2,dispatch=per-rank")


def model_under(layout: Layout, mixer: str, dtype: str = "float64") -> Transformer:
    shape = ModelShape(**SHAPE | MIXERS[mixer])
    return parallelize(shape, mesh_of_rank(layout, "cpu"), Train(seed=2, dtype=dtype), summed=False)[0]


def under(text: str, mixer: str, dtype: str, names: tuple[str, ...], work: Any, *more: Any) -> Any:
    """On every rank: the model and its engine under each setting; on the first, what ``work`` finds with each."""
    settings = [(SETTINGS | OWN_SETTINGS)[name] for name in names]
    layout = Layout.parse(text)
    model = model_under(layout, mixer, dtype)
    if layout.world > 1 and dist.get_rank():
        for _ in settings:
            follow(model)
        return sum(p.numel() for p in model.parameters())
    found = []
    for setting in settings:
        engine = Engine(model, **setting, ranks=layout.world > 1)
        found.append(work(engine, *more))
        engine.close()
    return found


def answers(engine: Engine) -> tuple[list[Any], int, int]:
    """What is written for each prompt, for one again, and for four that go on from one; tokens found, and preempted."""
    with pytest.MonkeyPatch.context() as patch:
        preempted, found = count_preempted(patch), []
        for prompt in PROMPTS:
            found += engine.submit(prompt, NEW, GREEDY, top=2)
            engine.step()
        engine.run()
        again = engine.submit(PROMPTS[2], NEW, GREEDY, top=2)
        engine.run()
        found += again + engine.submit([*PROMPTS[2], 1, 2], NEW, Sampling(seed=7), n=4, top=2)
        engine.run()
    pool = engine.scheduler.pool
    assert not pool.owners and pool.free == pool.blocks and not engine.scheduler.due and not engine.sent
    return [(one.written, one.log_probabilities) for one in found], again[0].hits, len(preempted)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("mixer", "layout"), [
    *((mixer, layout) for mixer in MIXERS for layout in OF_ALL), *(("experts", layout) for layout in OF_EXPERTS),
])  # fmt: skip
def test_tokens_are_those_of_each_request_alone(pool: Any, mixer: str, layout: str) -> None:
    """In float64, with log-probabilities; in chunks, in a small cache, from found prefixes, four from one prompt."""
    (expected, _, _), *_ = under("", mixer, "float64", ("as it is",), answers)
    found, *_ = pool.run(Layout.parse(layout).world, under, layout, mixer, "float64", NAMES, answers, timeout=100)
    for name, (written, hits, preempted) in zip(NAMES, found, strict=True):
        assert hits >= 12 and bool(preempted) == ("small" in name), name
        for (ids, said), (alone, said_alone) in zip(written, expected, strict=True):
            assert ids == alone, name
            for (p, best), (q, top) in zip(said, said_alone, strict=True):
                assert abs(p - q) < 1e-10 and all(abs(best[i] - top[i]) < 1e-10 for i in top)
    assert len({token for ids, _ in expected for token in ids}) > 10


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", ["tp=2", "cp=2", "pp=2", "tp=2,cp=2"])
@pytest.mark.parametrize("mixer", ["softmax", "windows", "experts", "latent", "hybrid"])
def test_greedy_tokens_in_float32(pool: Any, mixer: str, layout: str) -> None:
    (expected, _, _), *_ = under("", mixer, "float32", ("as it is",), answers)
    names = ("chunks of 3 in a small cache",)
    ((found, _, _),), *_ = pool.run(
        Layout.parse(layout).world, under, layout, mixer, "float32", names, answers, timeout=100
    )
    assert [ids for ids, _ in found[: len(PROMPTS) + 1]] == [ids for ids, _ in expected[: len(PROMPTS) + 1]]
