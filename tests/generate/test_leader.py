"""The engine over several ranks: every request gets what it gets alone on one, whatever is cut."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.generate.test_adapters import TARGETS, merged, write
from tests.generate.test_cache import MIXERS
from tests.generate.test_many import NEW, PROMPTS, SETTINGS, alone, count_preempted
from weft.checkpoint.convert.peft import read_adapter
from weft.errors import UsageError
from weft.generate import leader
from weft.generate.embedding import embed
from weft.generate.engine import Engine
from weft.generate.joined_texts import hogwild
from weft.generate.leader import check_layout, follow_leader, mesh_of_rank
from weft.generate.lookup import Lookup
from weft.generate.policies import policy_of
from weft.generate.sampling import GREEDY, Sampling
from weft.layout.layout import Layout
from weft.models.transformer import Transformer
from weft.net.lost import PeerLost
from weft.parallel import striped
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train

SHAPE = {
    "vocab": 31,
    "layers": 3,
    "embed": 24,
    "heads": 6,
    "kv_heads": 2,
    "ffn": 32,
    "init_std": 0.3,
}
NAMES = ("chunks of 5", "a cache that is too small")
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {}, "room for two adapters": {"tokens": 800, "size": 4, "budget": 9},
    "chunks of 3 in a small cache": {"tokens": 48, "size": 4, "budget": 5, "policy": policy_of("chunked:3")},
}  # fmt: skip
OF_ALL = (
    "tp=2",
    "tp=3",
    "tp=3,tp_shares=1:3:2",
    "tp=2,sum=direct",
    "tp=3,sum=star,tp_shares=2:3:1",
    "tp=2,cp=2,sum=ring",
    "tp=2,pp=2,sum=auto",
    "cp=2",
    "cp=3",
    "pp=2",
    "pp=3",
    "tp=2,cp=2",
    "tp=2,pp=2",
    "cp=2,pp=2",
)
#: Prompts of any length are cut in parts, of which one computes while the other travels.
IN_PARTS = (
    *((mixer, "tp=2,overlap=domino,overlap_least=0") for mixer in MIXERS if mixer != "ladder"),
    *((mixer, "tp=2,overlap=tokens,overlap_least=0") for mixer in ("softmax", "windows", "latent")),
    ("softmax", "tp=2,overlap=chunks,overlap_least=0"),
    ("windows", "tp=2,pp=2,overlap=domino,parts=3,overlap_least=0"),
    ("experts", "tp=2,ep=2,overlap=domino,overlap_least=0"),
)  # fmt: skip
OF_EXPERTS = (
    "cp=2,ep=2",
    "cp=4,ep=2",
    "tp=2,ep=2",
    "tp=2,cp=2,ep=4",
    "cp=2,pp=2,ep=2,dispatch=per-rank",
)


def model_under(layout: Layout, mixer: str, dtype: str = "float64") -> Transformer:
    shape = ModelShape(**SHAPE | MIXERS[mixer])
    return parallelize(
        shape, mesh_of_rank(layout, "cpu"), Train(seed=2, dtype=dtype), summed=False
    )[0]


def under(
    text: str, mixer: str, dtype: str, names: tuple[str, ...], work: Any, *more: Any
) -> Any:
    """On every rank: the model and its engine under each setting; on the first, what ``work`` finds with each."""
    settings = [(SETTINGS | OWN_SETTINGS)[name] for name in names]
    layout = Layout.parse(text)
    model = model_under(layout, mixer, dtype)
    if layout.world > 1 and dist.get_rank():
        for _ in settings:
            follow_leader(model)
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
        found += again + engine.submit(
            [*PROMPTS[2], 1, 2], NEW, Sampling(seed=7), n=4, top=2
        )
        engine.run()
    pool = engine.scheduler.pool
    assert (
        not pool.owners
        and pool.free == pool.blocks
        and not engine.scheduler.due
        and not engine.sent
    )
    return (
        [(one.written, one.log_probabilities) for one in found],
        again[0].hits,
        len(preempted),
    )


@cache
def answers_of_one(mixer: str, dtype: str) -> list[Any]:
    """What one rank writes."""
    ((found, _, _),) = under("", mixer, dtype, ("as it is",), answers)
    return found


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mixer", "layout"), [
    *((mixer, layout) for mixer in MIXERS for layout in OF_ALL), *(("experts", layout) for layout in OF_EXPERTS),
    *IN_PARTS,
])  # fmt: skip
def test_tokens_are_those_of_each_request_alone(
    pool: Any, mixer: str, layout: str
) -> None:
    """In float64, with log-probabilities; in chunks, in a small cache, from found prefixes, four from one prompt."""
    expected = answers_of_one(mixer, "float64")
    found, *_ = pool.run(
        Layout.parse(layout).world,
        under,
        layout,
        mixer,
        "float64",
        NAMES,
        answers,
        timeout=100,
    )
    for name, (written, hits, preempted) in zip(NAMES, found, strict=True):
        assert hits >= 12 and bool(preempted) == ("small" in name), name
        for (ids, said), (single, said_alone) in zip(written, expected, strict=True):
            assert ids == single, name
            for (p, best), (q, top) in zip(said, said_alone, strict=True):
                assert abs(p - q) < 1e-10 and all(
                    abs(best[i] - top[i]) < 1e-10 for i in top
                )
    assert len({token for ids, _ in expected for token in ids}) > 10


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["tp=2", "cp=2", "pp=2", "tp=2,cp=2"])
@pytest.mark.parametrize("mixer", ["softmax", "windows", "experts", "latent", "hybrid"])
def test_greedy_tokens_in_float32(pool: Any, mixer: str, layout: str) -> None:
    expected = answers_of_one(mixer, "float32")
    names = ("chunks of 3 in a small cache",)
    ((found, _, _),), *_ = pool.run(
        Layout.parse(layout).world,
        under,
        layout,
        mixer,
        "float32",
        names,
        answers,
        timeout=100,
    )
    assert [ids for ids, _ in found[: len(PROMPTS) + 1]] == [
        ids for ids, _ in expected[: len(PROMPTS) + 1]
    ]


def counted(length: int, new: int) -> tuple[list[int], int, list[int]]:
    """On every rank: elements sent for queries and what was found, tokens kept per layer, rows of logits evaluated."""
    sent, evaluated, exchange, linear = (
        [0],
        list[int](),
        striped.exchanged_rows,
        torch.nn.functional.linear,
    )

    def exchanging(
        rows: torch.Tensor, there: list[int], back: list[int], group: Any
    ) -> Any:
        sent[0] += (len(rows) - there[group.rank()]) * rows.shape[1:].numel()
        return exchange(rows, there, back, group)

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        evaluated.extend([x[..., 0].numel()] * (weight.shape[0] == SHAPE["vocab"]))
        return linear(x, weight)

    model = model_under(Layout(cp=dist.get_world_size()), "softmax")
    held: list[int] = []
    with (
        mock.patch.object(striped, "exchanged_rows", exchanging),
        mock.patch("torch.nn.functional.linear", product),
    ):
        if dist.get_rank():
            reader = follow_leader(model)
        else:
            engine = Engine(model, budget=64, size=4, ranks=True)
            engine.submit([(7 * i + 3) % 31 for i in range(length)], new, GREEDY)
            engine.run()
            engine.close()
            reader = engine.reader
    for pages in reader.pages:
        assert pages.store is not None
        held.append(int((pages.store[0].flatten(0, 1).abs().sum((-1, -2)) > 0).sum()))
    return held, sent[0], evaluated


@pytest.mark.parametrize("length", [13, 170])
def test_queries_travel_instead_of_the_cache_which_is_cut_evenly(
    pool: Any, length: int
) -> None:
    """Per token, layer and other rank, a query and what is found with it, however long the text is."""
    found, new = pool.run(3, counted, length, 5), 5
    computed, heads, width = (
        length + new - 1,
        SHAPE["heads"],
        SHAPE["embed"] // SHAPE["heads"],
    )
    assert sum(sent for _, sent, _ in found) == 2 * SHAPE[
        "layers"
    ] * computed * heads * (2 * width + 1)
    for layer in range(SHAPE["layers"]):
        tokens = [held[layer] for held, _, _ in found]
        assert sum(tokens) == computed and max(tokens) - min(tokens) <= 1
    rows = [sum(evaluated) for _, _, evaluated in found]
    assert sum(rows) == new, "of the prompt one position is evaluated, on one rank"


def timed(engine: Engine) -> tuple[float, int, int]:
    """Seconds for four texts, forward passes that set out, and how many were under way at most."""
    most, count, start = 0, 0, engine.reader.start

    def starting(*given: Any) -> Any:
        nonlocal most, count
        most, count = max(most, len(engine.sent) + 1), count + 1
        return start(*given)

    found = [engine.submit([3 + i, 1, 4], 6, GREEDY)[0] for i in range(4)]
    with mock.patch.object(engine.reader, "start", starting):
        began = time.perf_counter()
        engine.run()
    assert all(len(one.written) == 6 for one in found)
    return time.perf_counter() - began, count, most


def slept(name: str, pause: float) -> Any:
    run = leader.RankReader.run

    def running(self: Any, *given: Any) -> Any:
        time.sleep(pause)
        return run(self, *given)

    with mock.patch.object(leader.RankReader, "run", running):
        return under("pp=2", "softmax", "float32", (name,), timed)


@pytest.mark.slow
def test_stages_work_at_the_same_time(pool: Any) -> None:
    """Two stages that take 0.1 s each: a step needs 0.2, and half of the requests are in each of two steps."""
    ((seconds, steps, most),), _ = pool.run(2, slept, "as it is", 0.1)
    assert most == 2 and steps == 12, "two steps per token, of two texts each"
    assert seconds < 0.75 * steps * 0.2, "one behind the other it would be all of it"


def test_what_is_under_way_may_be_unwanted_meanwhile(pool: Any) -> None:
    """A text that is cancelled or computed again while its token is under way gets no token twice."""
    (expected,) = under("", "softmax", "float64", ("as it is",), meddled)
    (found,), _ = pool.run(
        2, under, "pp=2", "softmax", "float64", ("as it is",), meddled
    )
    assert found == expected


def meddled(engine: Engine) -> list[list[int]]:
    """Texts of which one is cancelled, and all are computed again, in the middle."""
    found = [engine.submit(prompt, NEW, GREEDY)[0] for prompt in PROMPTS[:4]]
    for _ in range(3):
        engine.step()
    engine.cancel(found[1])
    engine.scheduler.renew()
    engine.step()
    engine.scheduler.renew()
    engine.run()
    assert not engine.scheduler.pool.owners and not engine.scheduler.due
    return [one.written for one in found if one is not found[1]]


def abandoned(layout: str) -> str:
    """What the first rank says when the other one is gone in the middle of a text."""
    model = model_under(Layout.parse(layout), "softmax")
    if dist.get_rank():
        run, steps = leader.RankReader.run, iter(range(3))

        def running(self: Any, *given: Any) -> Any:
            next(steps)
            return run(self, *given)

        with (
            mock.patch.object(leader.RankReader, "run", running),
            pytest.raises(StopIteration),
        ):
            follow_leader(model)
        return ""
    engine = Engine(model, ranks=True)
    engine.submit(PROMPTS[1], NEW, GREEDY)
    with pytest.raises(PeerLost) as caught:
        engine.run()
    return str(caught.value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["tp=2", "tp=2,sum=direct", "cp=2", "pp=2"])
def test_who_is_gone_is_named(pool: Any, layout: str) -> None:
    said, _ = pool.run(2, abandoned, layout)
    assert "rank 1 is" in said, said


@pytest.mark.parametrize(("layout", "shape", "message"), [
    ("shard=2", {}, "has no use for shard; leave it out"),
    ("dp=2", {}, "has no use for dp; leave it out"),
    ("cp=4,ulysses=2", {}, "has no use for ulysses"),
    ("cp=4,context=ring", {}, "has no use for context"),
    ("tp=2,cp=2,overlap=domino", {}, "leave overlap or cp out"),
    ("tp=2,overlap=tokens", {"mixer": "linear"}, "use 'domino'"),
    ("tp=2,cp=2,ep=4,dispatch=all-gather", {}, "use all-to-all or per-rank"),
    ("tp=8", {}, "tp=8 is more than the model's 6 heads; use tp <= 6"),
    ("pp=8", {}, "too many for a model of 3 layers"),
])  # fmt: skip
def test_layouts_that_cannot_are_one_line(
    layout: str, shape: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        check_layout(Layout.parse(layout), ModelShape(**SHAPE | shape))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_ranks_that_were_not_started_are_missed() -> None:
    with pytest.raises(UsageError, match="needs 2 ranks that are started together"):
        mesh_of_rank(Layout(tp=2), "cpu")


def adapted(engine: Engine, folder: str, names: list[str]) -> list[Any]:
    """What is written for each prompt with the adapter of each of ``names``, all of them twice."""
    for path in sorted(Path(folder).iterdir()):
        engine.add_adapter(path.name, read_adapter(path, engine.model))
    for _ in range(2):
        found = []
        for name, prompt in zip(names, PROMPTS, strict=True):
            found += engine.submit(prompt, NEW, GREEDY, top=0, adapter=name)
            engine.step()
        engine.run()
    assert not engine.scheduler.pool.owners
    return [(one.written, one.log_probabilities) for one in found]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("mixer", "layout"), [
    *((mixer, layout) for mixer in ("softmax", "windows", "hybrid", "latent") for layout in OF_ALL),
    *(("experts", layout) for layout in OF_EXPERTS),
])  # fmt: skip
def test_adapters_are_as_if_merged(
    pool: Any, mixer: str, layout: str, tmp_path: Path
) -> None:
    """Of three ranks and none, in a cache that does not hold them all beside the texts."""
    targets = ("wq_a", "wkv_a", "wo", "gate", "down") if mixer == "latent" else TARGETS
    known = {
        f"a{i}": read_adapter(write(tmp_path / f"a{i}", model_under(Layout(), mixer), rank, i, targets),
                              model_under(Layout(), mixer))
        for i, rank in enumerate([1, 4, 8])
    }  # fmt: skip
    names = ["", "a0", "a1", "a2", "a0", "a1", ""]
    expected = [
        alone(
            merged(model_under(Layout(), mixer), known[n])
            if n
            else model_under(Layout(), mixer),
            p,
            GREEDY,
            top=0,
        )
        for n, p in zip(names, PROMPTS, strict=True)
    ]
    (found,), *_ = pool.run(
        Layout.parse(layout).world, under, layout, mixer, "float64", ("room for two adapters",), adapted, str(tmp_path),
        names, timeout=100,
    )  # fmt: skip
    for (ids, said), single in zip(found, expected, strict=True):
        assert ids == single.written
        assert all(
            abs(p - q) < 1e-10
            for (p, _), (q, _) in zip(said, single.log_probabilities, strict=True)
        )
    assert len({tuple(ids) for ids, _ in found}) > 4


def vectors(engine: Engine) -> list[list[float]]:
    """Of each prompt both vectors, one of them while a step is under way."""
    engine.submit(PROMPTS[1], NEW, GREEDY)
    engine.step()
    found = [
        embed(engine, ids, how).tolist() for ids in PROMPTS for how in ("mean", "last")
    ]
    engine.run()
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("mixer", "layout"), [
    *(("latent", layout) for layout in OF_ALL), *(("experts", layout) for layout in OF_EXPERTS),
])  # fmt: skip
def test_vectors_of_texts(pool: Any, mixer: str, layout: str) -> None:
    (expected,) = under("", mixer, "float64", ("as it is",), vectors)
    (found,), *_ = pool.run(
        Layout.parse(layout).world,
        under,
        layout,
        mixer,
        "float64",
        ("as it is",),
        vectors,
    )
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-6
    )


def seen_by_each_other(engine: Engine) -> list[list[int]] | str:
    try:
        return [
            one.written for one in hogwild(engine, PROMPTS[1], [[1, 2], [3]], 6, GREEDY)
        ]
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize("layout", ["tp=2", "cp=2", "pp=2"])
def test_streams_see_each_other_over_tp_alone(pool: Any, layout: str) -> None:
    (found,), _ = pool.run(
        2, under, layout, "softmax", "float64", ("as it is",), seen_by_each_other
    )
    if layout == "tp=2":
        assert [found] == under(
            "", "softmax", "float64", ("as it is",), seen_by_each_other
        )
    else:
        assert "which cp and pp keep apart; use tp" in found


def guessed(engine: Engine) -> tuple[list[list[int]], int]:
    """What is written with guesses from the texts themselves, and in how many steps."""
    engine.drafter, steps = Lookup(), 0
    found = [engine.submit([*one, *one, *one], 80, GREEDY)[0] for one in PROMPTS[3:6]]
    while not all(one.finished for one in found):
        engine.step()
        steps += 1
    return [one.written for one in found], steps


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["tp=2", "cp=2", "pp=2"])
def test_guesses_change_nothing(pool: Any, layout: str) -> None:
    ((expected, fewer),) = under("", "softmax", "float64", ("as it is",), guessed)
    ((found, steps),), _ = pool.run(
        2, under, layout, "softmax", "float64", ("as it is",), guessed
    )
    assert found == expected and fewer < 80 and (steps == fewer or layout == "pp=2")
