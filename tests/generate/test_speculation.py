"""Speculation: whatever is guessed, a request gets the tokens that it gets without, in fewer passes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.generate.test_many import HOW, NEW, PROMPTS, alone, build, each_alone
from weft.generate.drafter import Drafter
from weft.generate.engine import Engine
from weft.generate.lookup import Lookup, NgramIndex
from weft.generate.policies import policy_of
from weft.generate.request import Generation
from weft.generate.sampling import GREEDY, Sampling

SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {"size": 4},
    "chunks of 5": {"budget": 16, "policy": policy_of("chunked:5"), "size": 4},
    "a budget that cuts guesses": {"budget": 3, "size": 2},
    "a cache that is too small": {"tokens": 48, "size": 4, "budget": 9},
    "two at once": {"limit": 2, "size": 3},
}


class Oracle(Drafter):
    """Guesses of which some are right: the true text with faults in it, as one path or as several."""

    def __init__(self, texts: Sequence[Sequence[int]], vocab: int, width: int) -> None:
        self.texts, self.vocab, self.width, self.drawn = (
            texts,
            vocab,
            width,
            random.Random(0),
        )

    def propose(self, requests: Sequence[Generation]) -> None:
        for one in requests:
            text = next(
                (t for t in self.texts if list(t[: len(one.ids)]) == one.ids), ()
            )
            one.drafts = [
                self._path(text[len(one.ids) :], one.most - len(one.ids))
                for _ in range(self.width)
            ]

    def _path(self, rest: Sequence[int], most: int) -> list[int]:
        length = min(most, self.drawn.randint(1, 7))
        faulty = [
            self.drawn.randrange(self.vocab) if self.drawn.random() < 0.2 else token
            for token in rest
        ]
        return ([*faulty, *[0] * length])[:length]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(
    "mixer", ["softmax", "windows", "experts", "latent", "retention", "hybrid"]
)
def test_tokens_and_their_log_probabilities_are_those_without_guesses(
    mixer: str, width: int, setting: str
) -> None:
    """Greedy and drawn, with penalties and a bias; of linear layers too, whose state cannot be taken back."""
    expected = each_alone(mixer, torch.float64, drawn=True)
    engine = Engine(
        build(mixer, torch.float64),
        **SETTINGS[setting],
        drafter=Oracle([one.ids for one in expected], 31, width),
    )
    found = [
        engine.submit(p, NEW, how, top=3)[0]
        for p, how in zip(PROMPTS, HOW, strict=True)
    ]
    steps = 0
    while engine.scheduler.running or engine.scheduler.waiting:
        engine.step()
        steps += 1
        assert all(
            len(r.ids) <= r.most and r.computed < len(r.ids)
            for r in engine.scheduler.running
        )
    assert [one.written for one in found] == [one.written for one in expected]
    for one, single in zip(found, expected, strict=True):
        for (p, best), (q, top) in zip(
            one.log_probabilities, single.log_probabilities, strict=True
        ):
            assert abs(p - q) < 1e-10 and best.keys() == top.keys()
    assert not engine.scheduler.pool.owners, "blocks of guesses are left"
    if setting == "roomy":
        assert steps < 0.8 * (NEW + 1), "guesses that are mostly right save passes"


def test_wrong_blocks_of_guesses_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the test above sees a state that goes on from tokens that were not written."""
    model = build("retention", torch.float64)
    expected = [alone(model, p, GREEDY) for p in PROMPTS]
    engine = Engine(model, size=4, drafter=Oracle([one.ids for one in expected], 31, 1))
    engine.scheduler.pool.states = False  # the fault
    found = [engine.submit(p, NEW, GREEDY)[0] for p in PROMPTS]
    engine.run()
    assert [one.written for one in found] != [one.written for one in expected]


def test_places_are_those_of_a_search_through_the_text() -> None:
    drawn = random.Random(1)
    for least in (1, 2, 3):
        text, places = [drawn.randrange(3) for _ in range(60)], NgramIndex(least)
        for at in range(0, 60, 7):
            places.extend(text[at : at + 7])
        tail = [drawn.randrange(3) for _ in range(9)]

        def common(end: int, text: list[int] = text, tail: list[int] = tail) -> int:
            return next(
                (n for n in range(9) if end == n or text[end - n - 1] != tail[-n - 1]),
                9,
            )

        longest = max(common(end) for end in range(1, 60))
        expected = [end for end in range(59, 0, -1) if common(end) == longest]
        length, ends = places.find(tail, 9)
        assert (length, ends) == (longest, expected) if longest >= least else (0, [])


def test_paths_follow_what_mostly_comes_and_repeat_at_the_end_of_the_text() -> None:
    places = NgramIndex(2)
    places.extend([1, 2, 3, 4, 9, 1, 2, 3, 4, 8, 1, 2, 5, 1, 2])
    length, ends = places.find([7, 1, 2], 24)
    assert (length, ends) == (2, [12, 7, 2])
    # 3 and 4 stand twice, and 8 is later than 9
    assert places.follow(ends, [], 3, 0.1) == [3, 4, 8]
    assert (
        places.follow(ends, [], 3, 0.5) == [3, 4]
        and places.follow(ends, [], 3, 0.7) == []
    )
    places = NgramIndex(1)
    places.extend([5, 6, 5, 6])
    assert places.follow(places.find([6, 5, 6], 24)[1], [], 5, 0.1) == [5, 6, 5, 6, 5]


def written(
    drafter: Lookup | None, prompts: Sequence[Sequence[int]], new: int
) -> tuple[list[list[int]], int]:
    """What is written after each of the prompts, one after the other, and in how many passes."""
    engine, texts, steps = (
        Engine(build("softmax", torch.float64), drafter=drafter),
        [],
        0,
    )
    for prompt in prompts:
        (one,) = engine.submit(prompt, new, GREEDY)
        while engine.step():
            steps += 1
        texts.append(one.written)
    return texts, steps


@pytest.mark.soak
def test_texts_that_repeat_themselves_or_others_take_fewer_passes() -> None:
    """A random model soon repeats itself; and the second of two equal requests finds all in the first one's text."""
    prompts, new = [PROMPTS[1], PROMPTS[1]], 120
    expected, passes = written(None, prompts, new)
    assert len(set(expected[0])) > 3
    own, fewer = written(Lookup(), prompts, new)
    shared, fewest = written(Lookup(shared=10_000, width=2), prompts, new)
    assert own == shared == expected and passes == 2 * new
    assert fewer < 0.8 * passes and fewest < 0.6 * fewer


def test_who_is_never_right_seldom_guesses() -> None:
    drafter = Lookup()
    one = Generation([1, 2] * 8, 10**6, how=Sampling())
    guesses, token = 0, 3
    for _ in range(400):
        drafter.propose([one])
        guesses += sum(map(len, one.drafts))
        token += 1
        one.ids += [1, 2, token]  # what stood behind [1, 2] never comes again
    assert 0 < guesses < 20
    assert drafter._requests and not drafter._others.get(("", ""), ())
    one.finished = "stop"
    drafter.propose([])
    assert not drafter._requests
