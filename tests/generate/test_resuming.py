"""A text that another engine has begun goes on from its tokens alone, as if it had been written in one place."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from scipy.stats import chisquare, kstest

from tests.generate.test_many import HOW, PROMPTS, build
from weft.data.tokenizer import load_tokenizer
from weft.errors import UsageError
from weft.generate.engine import Engine
from weft.generate.lookup import Lookup
from weft.generate.random_numbers import TokenNumbers, uniform_number
from weft.generate.sampling import GREEDY, Sampling
from weft.layout.mesh import Mesh
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train
from weft.techniques.drafters.small_model import DraftModel

NEW = 16


def test_numbers_are_uniform_independent_and_the_same_for_ever() -> None:
    """By seed, by place and by draw; two numbers are pinned, as texts depend on them."""
    assert (
        uniform_number(0, 0) == 0.633398068541001
        and uniform_number(7, 3, 1) == 0.7746898298933509
    )
    numbers = TokenNumbers(7, 3)
    assert [numbers.random(), numbers.random()] == [
        uniform_number(7, 3),
        uniform_number(7, 3, 1),
    ]
    along = {
        "seeds": [uniform_number(i, 5) for i in range(3000)],
        "places": [uniform_number(5, i) for i in range(3000)],
        "draws": [uniform_number(5, 5, i) for i in range(3000)],
    }
    for each in along.values():
        assert kstest(each, "uniform").pvalue > 1e-3
        pairs = Counter((int(4 * a), int(4 * b)) for a, b in pairwise(each))
        counts = [pairs[pair] for pair in product(range(4), repeat=2)]
        assert chisquare(counts).pvalue > 1e-3
    assert all(0 <= x < 1 for each in along.values() for x in each)
    assert (
        len({uniform_number(s, p, d) for s, p, d in product(range(-9, 9), repeat=3)})
        == 18**3
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", [
    {}, {"drafter": Lookup(least=1), "size": 4}, {"tokens": 96, "size": 4, "budget": 9},
], ids=["plain", "guesses", "a small cache"])  # fmt: skip
def test_a_text_goes_on_from_any_of_its_tokens(settings: dict[str, Any]) -> None:
    """Sampled in many ways, with penalties that count what the other engine wrote."""
    model = build("softmax", torch.float64)
    engine = Engine(model)
    whole = [
        engine.submit(prompt, NEW, how, n=2, least=5, stops={0})
        for prompt, how in zip(PROMPTS, HOW, strict=True)
    ]
    engine.run()
    engine = Engine(model, **settings)
    further = [
        (
            text,
            cut,
            engine.submit(
                prompt, NEW, text.how, least=5, stops={0}, written=text.written[:cut]
            )[0],
        )
        for prompt, texts in zip(PROMPTS, whole, strict=True)
        for text in texts
        for cut in range(0, len(text.written) + (text.finished == "stop"), 3)
    ]
    said = Counter[Any]()
    waits = engine.scheduler
    # a step in a small cache may have no token: its text gave up its blocks
    while (step := engine.step()) or waits.running or waits.waiting:
        said.update(each.request for each in step if each.token is not None)
    for text, cut, rest in further:
        assert rest.written == text.written and rest.finished == text.finished
        assert said[rest] == len(text.written) - cut, (
            "events are of further tokens only"
        )
    assert len(further) > 60 and not engine.scheduler.pool.owners


def test_a_grammar_goes_on_from_any_of_its_tokens() -> None:
    pytest.importorskip("llguidance")
    from weft.generate.grammar import Grammars

    grammars = Grammars(load_tokenizer("bytes"), 300)
    shape = ModelShape(
        vocab=300, layers=1, embed=32, heads=4, kv_heads=2, ffn=48, init_std=0.5
    )
    model = parallelize(shape, Mesh.single(), Train(seed=2))[0]
    how, prompt = Sampling(1.1, presence=0.5, seed=3), [3, 1, 4]
    form = grammars.compile("regex", "(ab|ba|c[0-9]{2}){4,9}")
    engine = Engine(model)
    (whole,) = engine.submit(prompt, 40, how, grammar=form)
    engine.run()
    assert whole.finished == "stop" and len(whole.written) >= 8
    for drafter in (None, Lookup(least=1)):
        engine = Engine(model, drafter=drafter)
        rests = [
            engine.submit(prompt, 40, how, grammar=form, written=whole.written[:cut])[0]
            for cut in range(len(whole.written) + 1)
        ]
        engine.run()
        for rest in rests:
            assert (rest.written, rest.finished) == (whole.written, "stop")
    with pytest.raises(UsageError, match="written tokens do not follow the grammar"):
        engine.submit(prompt, 40, how, grammar=form, written=[97, 97])
    (fresh,) = engine.submit(prompt, 40, how, grammar=form)
    engine.run()
    assert fresh.written == whole.written, "the caller's grammar has not advanced"


def test_greedy_guesses_of_a_small_model_go_on_from_any_token() -> None:
    model, other = build("softmax", torch.float64), build("softmax", torch.float64)
    for p in other.parameters():
        p.data *= 1.05
    engine = Engine(model)
    (whole,) = engine.submit(PROMPTS[1], NEW, GREEDY)
    engine.run()
    engine = Engine(model, drafter=DraftModel(other, 3))
    rests = [
        engine.submit(PROMPTS[1], NEW, GREEDY, written=whole.written[:cut])[0]
        for cut in range(NEW)
    ]
    engine.run()
    assert [rest.written for rest in rests] == [whole.written] * NEW


def test_streams_and_ends_of_a_text_that_was_begun() -> None:
    model = build("softmax", torch.float64)
    engine = Engine(model, size=4)
    (whole,) = engine.submit(PROMPTS[2], NEW, GREEDY, top=1)
    engine.run()
    (rest,) = engine.submit(PROMPTS[2], NEW, GREEDY, top=1, written=whole.written[:5])
    assert list(engine.stream(rest)) == whole.written[5:]
    assert [p for p, _ in rest.log_probabilities] == pytest.approx(
        [p for p, _ in whole.log_probabilities[5:]]
    )
    assert rest.hits >= 16, "what is cached of the written tokens is not computed again"
    (full,) = engine.submit(PROMPTS[2], NEW, GREEDY, written=whole.written)
    assert full.finished == "length" and not engine.scheduler.waiting
    with pytest.raises(UsageError, match="ids below the model's 31"):
        engine.submit(PROMPTS[2], NEW, GREEDY, written=[31])


def test_a_text_that_was_begun_goes_on_before_those_that_nobody_has_begun() -> None:
    """But not before more urgent ones; among themselves they keep their order."""
    engine = Engine(build("softmax", torch.float64), size=4, limit=1)
    engine.submit(PROMPTS[0], 2, GREEDY)
    engine.step()
    waiting = [
        engine.submit(PROMPTS[at], 4, GREEDY, written=written, priority=priority)[0]
        for at, written, priority in ((1, (), 0), (2, (3,), 0), (3, (4,), 0), (4, (), -1))
    ]  # fmt: skip
    ended = list[int]()
    while len(ended) < len(waiting):
        engine.step()
        ended += [i for i, each in enumerate(waiting) if each.finished and i not in ended]  # fmt: skip
    assert ended == [3, 1, 2, 0]
