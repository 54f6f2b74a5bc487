"""Grammars: masks against enumerated languages, and text that always is what was asked for."""

from __future__ import annotations

import json
import re
import time
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.tokenizer import Tokenizer, load_tokenizer
from weft.errors import UsageError
from weft.generate.engine import Engine
from weft.generate.lookup import Lookup
from weft.generate.sampling import GREEDY, Sampling
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Source, Train

pytest.importorskip("llguidance")
from weft.generate.grammar import EACH, FIRST, Grammar, Grammars, GrammarSource

# the model's, and the end of a text for a tokenizer of bytes with 257 ids
VOCAB, END = 300, 256
ANYTHING = "start: <[0-255]>*"


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(load_tokenizer("bytes"), VOCAB)


def build(vocab: int = VOCAB) -> Transformer:
    shape = ModelShape(
        vocab=vocab, layers=1, embed=32, heads=4, kv_heads=2, ffn=48, init_std=0.5
    )
    return parallelize(shape, Mesh.single(), Train(seed=2))[0]


def allowed(grammar: Grammar) -> set[int]:
    mask = grammar.mask()
    assert mask.shape == (VOCAB,) and mask.dtype == torch.bool
    return set(mask.nonzero().flatten().tolist())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("abé", max_size=4), min_size=1, max_size=6), st.data())
def test_masks_are_those_of_the_language_also_of_a_copy(
    grammars: Grammars, texts: list[str], data: Any
) -> None:
    """A walk that goes on, tries what cannot follow, and splits in two, beside what the texts say."""
    grammar, said = (
        grammars.compile("lark", f"start: {' | '.join(map(json.dumps, texts))}"),
        list[int](),
    )
    ways, left = (
        [[*text.encode(), END] for text in texts],
        list[tuple[Grammar, set[int]]](),
    )
    for _ in range(12):
        following = {way[len(said)] for way in ways if way[: len(said)] == said}
        assert allowed(grammar) == following
        if data.draw(st.integers(0, 3)) == 0:
            left.append((grammar, following))
            grammar = grammar.copy()
        elif data.draw(st.integers(0, 3)) == 0:
            assert not grammar.accept(
                data.draw(st.sampled_from(sorted({*range(97, 101)} - following)))
            )
        elif following != {END}:
            said.append(data.draw(st.sampled_from(sorted(following - {END}))))
            assert grammar.accept(said[-1])
    assert all(allowed(other) == following for other, following in left)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", [
    GREEDY, Sampling(1.3, 40, 0.9, 0.01, 1.2, 0.5, 0.2, {65: 3.0}, 7), Sampling(seed=3),
], ids=["greedy", "all", "plain"])  # fmt: skip
def test_a_grammar_of_anything_changes_nothing(
    grammars: Grammars, how: Sampling
) -> None:
    model, prompt, anything = build(257), [3, 1, 4], grammars.compile("lark", ANYTHING)
    anything = Grammar(anything._matcher, 257, anything.ends, anything.source)
    alone, held = Engine(model), Engine(model)
    free = alone.submit(prompt, 60, how, [END], n=3)
    same = held.submit(prompt, 60, how, [END], n=3, grammar=anything)
    alone.run(), held.run()
    assert [one.written for one in same] == [one.written for one in free]
    assert [one.finished for one in same] == [one.finished for one in free]


def schema_of(random: Random, depth: int = 2) -> dict[str, Any]:
    """A schema that draws on what people write: bounds, formats, choices, references, optional and closed keys."""
    simple: list[dict[str, Any]] = [
        {"type": "integer", "minimum": (low := random.randint(-99, 99)), "maximum": low + random.randint(0, 500)},
        {"type": "number", "exclusiveMinimum": 0, "maximum": random.randint(1, 9)},
        {"type": "string", "minLength": (least := random.randint(0, 4)), "maxLength": least + random.randint(0, 9)},
        {"type": "string", "pattern": f"^[a-f]{{{random.randint(1, 3)},5}}-\\d+$", "maxLength": 12},
        {"type": "string", "format": random.choice(["date", "uuid", "ipv4"])},
        {"type": ["boolean", "null"]},
        {"enum": ["red", 7, None, {"a": [1]}][random.randint(0, 3) :]},
        {"const": {"nested": [True, "é\n\""]}},
    ]  # fmt: skip
    kind = random.randint(0, 5) if depth else 0
    if kind < 2:
        return random.choice(simple)
    if kind == 2:
        least = random.randint(0, 2)
        return {"type": "array", "items": schema_of(random, depth - 1), "minItems": least,
                "maxItems": least + random.randint(0, 2)}  # fmt: skip
    if kind == 3:
        return {
            "anyOf": [schema_of(random, depth - 1) for _ in range(random.randint(1, 3))]
        }
    names = random.sample(["name", "a b", "ключ", 'q"', "x"], random.randint(1, 4))
    return {
        "type": "object", "properties": {name: schema_of(random, depth - 1) for name in names},
        "required": random.sample(names, random.randint(0, len(names))), "additionalProperties": False,
    }  # fmt: skip


@pytest.mark.slow
def test_text_always_meets_its_schema(grammars: Grammars) -> None:
    """200 random schemas, of a model with random weights, many at once; none is cut, as all of them are bounded."""
    jsonschema = pytest.importorskip("jsonschema")
    random, engine = Random(5), Engine(build())
    schemas = [schema_of(random) for _ in range(200)]
    written = {}
    for number, schema in enumerate(schemas):
        # A number is as long as the model likes: digits are made unlikely, and blanks.
        how = Sampling(bias=dict.fromkeys([*b"0123456789 \n\t\r"], -3.0), seed=number)
        written[
            engine.submit(
                [number % 256], 3000, how, grammar=grammars.compile("json", schema)
            )[0]
        ] = schema
    engine.run()
    for one, schema in written.items():
        assert one.finished == "stop", (schema, bytes(one.written))
        text = bytes(one.written).decode()
        jsonschema.validate(
            json.loads(text), schema, format_checker=jsonschema.FormatChecker()
        )
    assert len({bytes(one.written) for one in written}) > 120


@pytest.mark.slow
def test_what_was_preempted_goes_on_where_it_stood(grammars: Grammars) -> None:
    grammar = grammars.compile(
        "json",
        {"type": "array", "items": {"type": "integer"}, "minItems": 9, "maxItems": 9},
    )
    model = build()
    roomy, narrow = Engine(model, size=4), Engine(model, tokens=160, size=4, budget=7)
    how = [
        Sampling(bias=dict.fromkeys([*b"0123456789 \n\t\r"], -2.0), seed=seed)
        for seed in range(6)
    ]
    asked = [
        [engine.submit([5], 140, one, grammar=grammar)[0] for one in how]
        for engine in (roomy, narrow)
    ]
    roomy.run(), narrow.run()
    assert narrow.scheduler.preemptions and [one.written for one in asked[0]] == [
        one.written for one in asked[1]
    ]
    assert all(
        len(json.loads(bytes(one.written))) == 9
        for one in asked[1]
        if one.finished == "stop"
    )


@pytest.mark.parametrize(
    "how",
    [GREEDY, Sampling(0.3, bias=dict.fromkeys(b" \n\t\r", -9.0), seed=3)],
    ids=["greedy", "drawn"],
)
def test_guesses_change_nothing(grammars: Grammars, how: Sampling) -> None:
    """Some of them break the grammar, as they come from a prompt that does."""
    prompt = list(b'[{"a": 1}, {"a": 2, "b": 1}, {"a": 3}, {"a": 4}')
    item = {
        "type": "object",
        "properties": {"a": {"const": 5}},
        "required": ["a"],
        "additionalProperties": False,
    }
    grammar = grammars.compile(
        "json", {"type": "array", "items": item, "minItems": 3, "maxItems": 3}
    )
    plain, guessing = Engine(build()), Engine(build(), drafter=Lookup())
    (one,), (other,) = (
        engine.submit(prompt, 200, how, grammar=grammar) for engine in (plain, guessing)
    )
    steps = [sum(1 for _ in iter(engine.step, [])) for engine in (plain, guessing)]
    assert one.written == other.written and json.loads(bytes(one.written)) == 3 * [
        {"a": 5}
    ]
    assert steps[1] < steps[0]


def test_tokens_of_many_bytes(corpus_tokenizer: Tokenizer) -> None:
    """Of a tokenizer with merges, all that allowed tokens begin with can be gone on with to a text that is met."""
    grammars = Grammars(corpus_tokenizer, corpus_tokenizer.vocab + 9)
    engine = Engine(build(corpus_tokenizer.vocab + 9))
    grammar = grammars.compile("regex", "(the|and|that){3,5}!")
    answers = engine.submit([1], 60, Sampling(), n=20, grammar=grammar)
    engine.run()
    for one in answers:
        assert one.finished == "stop" and re.fullmatch(
            "(the|and|that){3,5}!", corpus_tokenizer.decode(one.written)
        )
    assert any(
        len(corpus_tokenizer.decode([i])) > 1 for one in answers for i in one.written
    )


@pytest.fixture(scope="module")
def corpus_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text("and that the cat and the dog thought that! " * 50)
    return load_tokenizer(
        "train:300", [Source(kind="text", path=str(folder / "text.txt"))], folder
    )


@pytest.mark.parametrize(("kind", "text", "said"), [
    ("json", {"type": "integer", "minimum": 5, "maximum": 3}, r"minimum \(5\) is greater than maximum"),
    ("json", {"type": "object", "required": ["a"], "properties": {"a": {"enum": []}}}, "property 'a' is unsatisf"),
    ("json", {"type": "strin"}, "Invalid type: strin"),
    ("json", {"not": {"type": "string"}}, "Unimplemented keys"),
    ("json", {"$ref": "http://example.org/x"}, "Resource 'http://example.org/x'"),
    ("json", {"type": "string", "pattern": "a("}, "regex parse error"),
    ("json", "{", "cannot be read"),
    ("regex", "a(", "unclosed group|regex parse error"),
    ("lark", "start: nope", 'unknown name: "nope"'),
])  # fmt: skip
def test_what_cannot_be_met_is_said_at_once(
    grammars: Grammars, kind: Any, text: Any, said: str
) -> None:
    with pytest.raises(UsageError, match=said) as error:
        grammars.compile(kind, text)
    assert "\n" not in str(error.value)


def test_a_grammar_that_gives_up_ends_its_own_text_alone(grammars: Grammars) -> None:
    import llguidance

    tight = llguidance.LLParserLimits(step_max_items=60)
    text = 'start: a*\na: "a" a "b" | "a" | a a'
    source = llguidance.LLMatcher.grammar_from_lark(text)
    failing = Grammar(
        llguidance.LLMatcher(grammars._tokens, source, limits=tight, log_level=0),
        VOCAB,
        (END,),
        GrammarSource("lark", text),
    )
    engine = Engine(build())
    lost, fine = (
        engine.submit([1], 90, Sampling(0, bias={END: -90.0}), grammar=failing)[0],
        engine.submit([1], 20, GREEDY, [END])[0],
    )
    engine.run()
    assert lost.finished == "error" and lost.grammar and "limit" in lost.grammar.failure
    assert (
        fine.finished == "length"
        and engine.scheduler.pool.free == engine.scheduler.pool.blocks
    )


def test_a_grammar_that_takes_too_long_ends_its_own_text_alone(
    grammars: Grammars,
) -> None:
    """Its time grows with the cube of the text: all others would wait for it."""
    slow = grammars.compile("lark", "start: a\na: a a a | a a | /[ab]/")
    engine = Engine(build())
    (lost,) = engine.submit([1], 3000, Sampling(0, bias={END: -90.0}), grammar=slow)
    began = time.thread_time()
    engine.run()
    assert (
        lost.finished == "error"
        and lost.grammar
        and lost.grammar.failure == "it takes too much time"
    )
    assert time.thread_time() - began < FIRST + 3000 * EACH
    assert len(lost.written) > 30 and not lost.grammar.copy().accept(97)


def test_another_process_compiles_the_same_from_the_source(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for grammar in (grammars.compile("json", schema), grammars.compile("regex", "a+b")):
        again = Grammars(load_tokenizer("bytes"), VOCAB).compile(*grammar.copy().source)
        while not set(allowed(grammar)) <= {END}:
            assert allowed(again) == allowed(grammar)
            token = max(allowed(grammar) - {END})
            assert grammar.accept(token) and again.accept(token)
            if len(allowed(grammar)) > 200:
                break
