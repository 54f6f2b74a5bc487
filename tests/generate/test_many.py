"""Many requests under every setting of the engine, against each of them alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.generate.test_cache import build as build_double
from weft.errors import UsageError
from weft.generate.engine import Engine
from weft.generate.policies import exact_fill, policy_of
from weft.generate.request import Generation
from weft.generate.sampling import GREEDY, Sampling
from weft.generate.scheduler import Scheduler
from weft.models.transformer import Transformer

#: Prompts that begin alike, one twice, and single tokens.
BEGINNING = [(5 * i + 2) % 31 for i in range(20)]
PROMPTS = [
    [3],
    BEGINNING,
    [*BEGINNING, 4, 9],
    [7, 1, 3],
    [(3 * i + 1) % 31 for i in range(33)],
    BEGINNING,
    [9] * 9,
]
NEW = 10
SETTINGS: dict[str, dict[str, Any]] = {
    "one token a step": {"budget": 1, "size": 3},
    "chunks of 5": {"budget": 16, "policy": policy_of("chunked:5"), "size": 4},
    "exact fill": {"budget": 7, "policy": exact_fill, "size": 1},
    "prompts first": {"budget": 64, "policy": policy_of("prompts-first"), "size": 16},
    "two at once": {"limit": 2, "size": 4},
    "a cache that is too small": {"tokens": 48, "size": 4, "budget": 9},
    "prompts first in a small cache": {
        "tokens": 56,
        "size": 2,
        "policy": policy_of("prompts-first"),
    },
}
HOW = [
    GREEDY, Sampling(seed=1), Sampling(0.7, top_k=5, seed=2), Sampling(top_p=0.8, frequency=0.5, seed=3),
    Sampling(1.3, min_p=0.05, repetition=1.2, seed=4), GREEDY,
    Sampling(0.9, presence=0.4, bias={2: 1.0, 5: -9}, seed=5),
]  # fmt: skip


def build(mixer: str, dtype: torch.dtype) -> Transformer:
    return build_double(mixer).to(dtype)


def alone(
    model: Transformer, prompt: list[int], how: Sampling, top: int | None = None
) -> Generation:
    """What one request gets whose prompt is read in one piece."""
    engine = Engine(model, budget=10_000)
    (one,) = engine.submit(prompt, NEW, how, top=top)
    engine.run()
    return one


@cache
def each_alone(mixer: str, dtype: torch.dtype, drawn: bool = False) -> list[Generation]:
    """What each of the prompts gets alone, greedy or drawn in its own way, with the three best of every step."""
    model = build(mixer, dtype)
    return [
        alone(model, prompt, how if drawn else GREEDY, top=3)
        for prompt, how in zip(PROMPTS, HOW, strict=True)
    ]


def count_preempted(monkeypatch: pytest.MonkeyPatch) -> list[Generation]:
    """Who is to wait again, though it ran."""
    seen: list[Generation] = []
    requeue = Scheduler.requeue

    def requeueing(self: Scheduler, request: Generation) -> None:
        if request.runs:
            seen.append(request)
        requeue(self, request)

    monkeypatch.setattr(Scheduler, "requeue", requeueing)
    return seen


@pytest.mark.sampled(4)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    "mixer", ["softmax", "windows", "experts", "latent", "retention", "hybrid"]
)
def test_tokens_are_those_of_each_request_alone(
    mixer: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy in float32; requests join while others run, and prefixes of ended ones are found."""
    expected = [one.written for one in each_alone(mixer, torch.float32)]
    engine, preempted = (
        Engine(build(mixer, torch.float32), **SETTINGS[setting]),
        count_preempted(monkeypatch),
    )
    found: list[Generation] = []
    for prompt in PROMPTS:
        found += engine.submit(prompt, NEW, GREEDY)
        engine.step()
    engine.run()
    again = engine.submit(PROMPTS[2], NEW, GREEDY)
    engine.run()
    assert [one.written for one in (*found, *again)] == [*expected, expected[2]]
    assert len({token for one in expected for token in one}) > 10
    assert again[0].hits >= 16, "the prompt was known"
    assert bool(preempted) == ("small" in setting), (
        "of a small cache somebody gives back"
    )
    pool = engine.scheduler.pool
    assert not pool.owners and pool.free == pool.blocks


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "setting", ["chunks of 5", "a cache that is too small", "two at once"]
)
@pytest.mark.parametrize("mixer", ["softmax", "experts", "latent", "hybrid"])
def test_log_probabilities_and_samples_do_not_depend_on_the_batch(
    mixer: str, setting: str
) -> None:
    """In float64: every request with another way to sample and a seed of its own."""
    model = build(mixer, torch.float64)
    engine = Engine(model, **SETTINGS[setting])
    found = [
        engine.submit(p, NEW, how, top=3)[0]
        for p, how in zip(PROMPTS, HOW, strict=True)
    ]
    engine.run()
    for one, single in zip(
        found, each_alone(mixer, torch.float64, drawn=True), strict=True
    ):
        assert one.written == single.written
        for (p, best), (q, top) in zip(
            one.log_probabilities, single.log_probabilities, strict=True
        ):
            assert abs(p - q) < 1e-10 and best.keys() == top.keys()
            assert all(abs(best[i] - top[i]) < 1e-10 for i in best)
    # And they are what one pass over the whole text says.
    one = found[1]
    ids = torch.tensor([one.ids])
    whole = model(
        ids,
        torch.arange(len(one.ids))[None],
        torch.tensor([0, len(one.ids)], dtype=torch.int32),
    )[0]
    scores = whole.log_softmax(-1)[one.prompt - 1 : -1].gather(
        1, ids[0, one.prompt :, None]
    )[:, 0]
    torch.testing.assert_close(
        torch.tensor([p for p, _ in one.log_probabilities]).double(),
        scores,
        rtol=0,
        atol=1e-6,
    )
    assert (
        max(
            abs(p - q)
            for (p, _), q in zip(one.log_probabilities, scores.tolist(), strict=True)
        )
        < 1e-10
    )


@pytest.mark.parametrize(
    "settings", [{}, {"limit": 2}, {"tokens": 64, "size": 4}], ids=str
)
@pytest.mark.parametrize("mixer", ["softmax", "retention"])
def test_several_answers_go_on_from_one_reading_of_the_prompt(
    mixer: str, settings: dict[str, Any]
) -> None:
    model, prompt = build(mixer, torch.float64), PROMPTS[2]
    how = Sampling(seed=7)
    expected = [alone(model, prompt, Sampling(seed=7 + i), top=0) for i in range(4)]
    engine, read = Engine(model, **{"size": 4} | settings), []
    model.embedding.register_forward_pre_hook(
        lambda _, inputs: read.append(inputs[0].shape[1])
    )
    found = engine.submit(prompt, NEW, how, n=4, top=0)
    engine.run()
    assert [one.written for one in found] == [one.written for one in expected]
    assert len({tuple(one.written) for one in found}) == 4
    best = max(found, key=lambda one: one.score)
    assert (
        best.score == pytest.approx(max(one.score for one in expected))
        and best.score < 0
    )
    if not settings:
        assert sum(read) == len(prompt) + 4 * (NEW - 1)
    assert not engine.scheduler.pool.owners


def test_a_cancelled_request_leaves_nothing_and_its_siblings_go_on() -> None:
    model = build("softmax", torch.float64)
    expected = [alone(model, PROMPTS[1], Sampling(seed=i)).written for i in range(3)]
    for after in range(5):
        engine = Engine(model, budget=8, size=4)
        other, family = (
            engine.submit(PROMPTS[4], NEW, GREEDY),
            engine.submit(PROMPTS[1], NEW, Sampling(), n=3),
        )
        for _ in range(after):
            engine.step()
        engine.cancel(other[0])
        engine.cancel(family[0])
        engine.cancel(family[1])
        engine.run()
        assert family[2].written == expected[2] and not engine.scheduler.pool.owners
        assert [one.finished for one in (*other, *family)] == ["stop"] * 3 + ["length"]


def test_it_ends_at_stops_and_streams_side_by_side() -> None:
    model = build("softmax", torch.float64)
    expected = [alone(model, prompt, GREEDY).written for prompt in PROMPTS[:3]]
    engine = Engine(model)
    streams = [
        engine.stream(engine.submit(prompt, NEW, GREEDY)[0]) for prompt in PROMPTS[:3]
    ]
    assert [list(one) for one in zip(*streams, strict=True)] == [
        list(one) for one in zip(*expected, strict=True)
    ]
    (one,) = engine.submit(PROMPTS[1], NEW, GREEDY, stops={expected[1][4]})
    engine.run()
    assert (
        one.written == expected[1][: expected[1].index(expected[1][4])]
        and one.finished == "stop"
    )


def test_new_weights_make_nothing_of_the_old_ones_be_used() -> None:
    model, other = build("softmax", torch.float64), build("softmax", torch.float64)
    for p in other.parameters():
        p.data *= 1.1
    engine = Engine(model, size=4, budget=8)
    (early,) = engine.submit(PROMPTS[1], NEW, GREEDY)
    engine.run()
    (running,) = engine.submit(PROMPTS[2], NEW, GREEDY)
    engine.step()
    assert running.hits and len(running.written) == 1
    model.load_state_dict(other.state_dict())
    engine.scheduler.renew()
    (late,) = engine.submit(PROMPTS[1], NEW, GREEDY)
    engine.run()
    assert late.written == alone(other, PROMPTS[1], GREEDY).written != early.written
    engine = Engine(other)
    (rest,) = engine.submit([*PROMPTS[2], running.written[0]], NEW - 1, GREEDY)
    engine.run()
    assert rest.written == running.written[1:]


@pytest.mark.parametrize(("settings", "asked", "said"), [
    ({"tokens": 32}, {}, "48 tokens of prompt and answer do not fit into a cache of 32; ask for fewer"),
    ({"budget": 0}, {}, "a step needs room for one token"),
    ({}, {"how": Sampling(bias={31: 1.0})}, "a bias is for an id that the model does not have; it has 31"),
])  # fmt: skip
def test_what_cannot_be(
    settings: dict[str, Any], asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        Engine(build("softmax", torch.float32), **settings).submit(
            [1] * 39, NEW, **asked
        )
