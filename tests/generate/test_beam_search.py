"""Beam search against all texts that there are, and votes."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch

from tests.generate.test_many import PROMPTS, SETTINGS, alone, build
from weft.generate.beam_search import Search, length_penalty, vote
from weft.generate.engine import Engine
from weft.generate.sampling import GREEDY, Sampling
from weft.models.transformer import Transformer


def rows_of(model: Transformer, text: list[int]) -> torch.Tensor:
    """Log-probabilities of the next token behind every token of a text, in one pass over the whole text."""
    with torch.no_grad():
        logits = model(
            torch.tensor([text]),
            torch.arange(len(text))[None],
            torch.tensor([0, len(text)], dtype=torch.int32),
        )[0]
    return logits.log_softmax(-1)


def log_probabilities(model: Transformer, prompt: list[int], ids: list[int]) -> float:
    """Of ``ids`` behind ``prompt``."""
    rows = rows_of(model, [*prompt, *ids])[len(prompt) - 1 : -1]
    return float(rows.gather(1, torch.tensor(ids)[:, None]).sum())


def every_text(
    model: Transformer, prompt: list[int], count: int, stops: set[int], allowed: range
) -> dict[Any, float]:
    """Every text of up to ``count`` tokens, with its log-probability; a pass for each that is not at its end."""
    found = dict[Any, float]()

    def go_on(ids: tuple[int, ...], before: float) -> None:
        row = rows_of(model, [*prompt, *ids])[-1].tolist()
        for token in allowed:
            text, p = (*ids, token), before + row[token]
            if token in stops or len(text) == count:
                found[text] = p
            else:
                go_on(text, p)

    go_on((), 0.0)
    return found


@cache
def every_text_of(mixer: str) -> tuple[Transformer, dict[Any, float]]:
    """A model, and every text of two tokens behind the fourth prompt that 4 and 9 end."""
    model = build(mixer, torch.float64)
    for p in model.parameters():
        p.data *= 1.5
    return model, every_text(model, PROMPTS[3], 2, {4, 9}, range(31))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixer", "alpha"),
    [
        ("softmax", 0.0),
        ("softmax", 0.2),
        ("hybrid", 1.0),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (("softmax", 1.0), ("hybrid", 0.0), ("hybrid", 0.2))
        ),
    ],
)
def test_beams_that_hold_everything_find_the_best_of_all_texts(
    mixer: str, alpha: float
) -> None:
    """Three tokens behind a prompt: of 31 ids, each with every other, in some order the likeliest of all."""
    (model, texts), stops = every_text_of(mixer), {4, 9}
    engine = Engine(model, size=4, limit=2000, budget=5000)
    found = Search(engine, PROMPTS[3], 2, 31, stops, alpha).run()
    scores = {ids: p / length_penalty(len(ids), alpha) for ids, p in texts.items()}
    best = sorted(scores, key=lambda ids: -scores[ids])[:31]
    assert [one.ids for one in found] == [
        [i for i in ids if i not in stops] for ids in best
    ]
    for one, ids in zip(found, best, strict=True):
        assert one.log_probability == pytest.approx(texts[ids], abs=1e-9)
        assert one.score == pytest.approx(scores[ids], abs=1e-9)
    assert not engine.scheduler.pool.owners


@pytest.mark.sampled(3)
@pytest.mark.parametrize("setting", SETTINGS)
def test_one_beam_is_greedy_and_beams_do_not_depend_on_the_batch(setting: str) -> None:
    """Beside other requests, preempted, in chunks, of few requests at a time."""
    model, prompt = build("softmax", torch.float64), PROMPTS[2]
    roomy = Engine(model, size=4)
    assert (
        Search(roomy, prompt, 8, 1).run()[0].ids
        == alone(model, prompt, GREEDY).written[:8]
    )
    expected = Search(roomy, prompt, 8, 3).run()
    engine = Engine(model, **SETTINGS[setting])
    others = [engine.submit(p, 10, GREEDY)[0] for p in PROMPTS]
    found = Search(engine, prompt, 8, 3).run()
    engine.run()
    assert [one.ids for one in found] == [one.ids for one in expected]
    assert [one.score for one in found] == pytest.approx(
        [one.score for one in expected]
    )
    assert [one.written for one in others] == [
        alone(model, p, GREEDY).written for p in PROMPTS
    ]
    assert not engine.scheduler.pool.owners


def test_beams_share_what_they_have_in_common() -> None:
    model, engine = (
        build("softmax", torch.float64),
        Engine(build("softmax", torch.float64), size=4),
    )
    prompt, most = [(3 * i + 1) % 31 for i in range(64)], 0
    search = Search(engine, prompt, 16, 4)
    plan = engine.scheduler.plan

    def planning(*depth: int) -> Any:
        nonlocal most
        step = plan(*depth)
        most = max(most, len(engine.scheduler.pool.owners))
        return step

    engine.scheduler.plan = planning  # type: ignore[method-assign]
    (best, *_) = search.run()
    assert best.log_probability == pytest.approx(
        log_probabilities(model, prompt, best.ids), abs=1e-9
    )
    assert most < 0.5 * 4 * (64 + 16) / 4


def test_pruning_ends_hopeless_beams() -> None:
    model = build("softmax", torch.float64)
    for p in model.parameters():
        p.data *= 2
    passes = []
    for prune in (math.inf, 3.0):
        engine, read = Engine(model, size=4), []
        model.embedding.register_forward_pre_hook(
            lambda _, inputs, read=read: read.append(inputs[0].shape[1])
        )
        found = Search(engine, PROMPTS[3], 12, 4, {21, 3, 17}, prune=prune).run()
        passes.append((sum(read), found[0].ids))
    assert passes[1][0] < passes[0][0] and passes[0][1] != []


def gnmt_search(
    model: Transformer, width: int, count: int, stops: set[int], alpha: float, prune: float
) -> list[tuple[list[int], float]]:  # fmt: skip
    """The texts and scores of a search written down from section 7 of the paper, one whole text after another."""
    live, ended = [([], 0.0)], list[tuple[list[int], float]]()
    for length in range(1, count + 1):
        ways = []
        for ids, chance in live:
            local = rows_of(model, [*PROMPTS[3], *ids])[-1].tolist()
            ways += [
                ([*ids, i], chance + p)
                for i, p in enumerate(local)
                if p >= max(local) - prune
            ]
        live = []
        for ids, chance in sorted(ways, key=lambda way: -way[1]):
            if len(live) == width:
                break
            score = chance / ((5 + length) ** alpha / (5 + 1) ** alpha)
            if ids[-1] in stops:
                ended.append((ids[:-1], score))
            else:
                live.append((ids, chance))
        scores = {
            tuple(ids): chance / ((5 + length) ** alpha / 6**alpha)
            for ids, chance in live
        }
        if length == count:
            ended += [(ids, scores[tuple(ids)]) for ids, _ in live]
        best = max((score for _, score in ended), default=-math.inf)
        live = [way for way in live if scores[tuple(way[0])] >= best - prune]
    kept = [text for text in ended if text[1] >= best - prune]
    return sorted(kept, key=lambda text: -text[1])[:width]


@pytest.mark.parametrize(("alpha", "prune"), [(0.2, 3.0), (0.6, 0.4), (0.0, 1.0)])
def test_a_search_is_that_of_the_paper(alpha: float, prune: float) -> None:
    model, stops = build("softmax", torch.float64), {4, 9, 21}
    for p in model.parameters():
        p.data *= 1.5
    texts = Search(
        Engine(model, size=4), PROMPTS[3], 3, 3, stops, alpha, prune
    ).run()  # fmt: skip
    wanted = gnmt_search(model, 3, 3, stops, alpha, prune)
    assert [text.ids for text in texts] == [ids for ids, _ in wanted]
    assert [text.score for text in texts] == pytest.approx([s for _, s in wanted])
    assert prune > 1 or len(texts) < 3


def test_a_vote_ends_when_it_is_decided() -> None:
    model = build("softmax", torch.float64)
    engine, n = Engine(model, size=4), 15
    whole = [
        one.written for one in engine.submit(PROMPTS[1], 10, Sampling(seed=1), n=n)
    ]
    engine.run()
    written: list[int] = []

    def parity(ids: list[int]) -> bool | None:
        written.append(len(ids))
        return None if ids[0] % 5 == 0 else bool(sum(ids) % 2)

    found, counts = vote(engine, PROMPTS[1], 10, Sampling(seed=1), n, parity)
    assert found in (True, False) and counts[found] == max(counts.values())
    assert not engine.scheduler.pool.owners and len(whole) == n
    # All say the same: more than half of them is enough.
    slow = Engine(model, size=4, limit=2)
    found, counts = vote(
        slow, PROMPTS[1], 10, Sampling(seed=1), n, lambda ids: "always"
    )
    assert (
        found == "always" and counts["always"] == 8 and not slow.scheduler.pool.owners
    )
    assert not slow.scheduler.running and not slow.scheduler.waiting
