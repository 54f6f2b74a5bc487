"""Requests that move between engines while they are written, against each of them alone in one engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generate.test_adapters import adapters, merged
from tests.generate.test_leader import model_under
from tests.generate.test_many import HOW, PROMPTS, build
from weft.errors import UsageError, WeftError
from weft.generate import migration
from weft.generate.block_contents import bytes_of
from weft.generate.engine import Engine
from weft.generate.leader import follow_leader
from weft.generate.lookup import Lookup
from weft.generate.migration import Arrival, Departure, MoveFrame
from weft.generate.policies import policy_of
from weft.generate.request import NOT_NUMBERS, Generation
from weft.generate.sampling import GREEDY, Sampling
from weft.generate.workflow import Workflow
from weft.layout.layout import Layout
from weft.models.row_adapters import HostAdapter
from weft.models.transformer import Transformer

NEW, SIZE = 24, 4
KINDS = ("softmax", "windows", "experts", "latent", "retention", "hybrid")


def over_the_wire(frame: MoveFrame) -> MoveFrame:
    """A frame as it arrives: its head was text, its payload is one piece."""
    payload = memoryview(bytearray(b"".join(frame.payload)))
    return MoveFrame(json.loads(json.dumps(frame.head)), [payload])


@dataclass
class Moved:
    """Where a request is after an attempt to move it, and the bytes of blocks in each frame."""

    request: Generation
    lengths: list[int]


def move(
    source: Engine,
    target: Engine,
    request: Generation,
    between: int = 1,
    compile: Any = None,
) -> Moved:
    """Move ``request``, while the source and the target go on; raises WeftError if it stays."""
    # one with steps between its rounds leaves whole blocks to be written beside the steps
    beside: Any = (lambda do: do()) if between else None
    departure, arrival, lengths = (
        Departure(source, request),
        Arrival(target, compile, beside),
        list[int](),
    )
    try:
        while (frame := departure.round()) is not None:
            lengths.append(sum(map(len, frame.payload)))
            assert arrival.take(over_the_wire(frame)) is None
            for _ in range(between):
                source.step()
                target.step()
                arrival.unload()
        computed = request.computed
        frame = departure.leave()
    except WeftError:
        arrival.drop()
        raise
    lengths.append(sum(map(len, frame.payload)))
    try:
        moved = arrival.take(over_the_wire(frame))
    except WeftError:
        departure.stay()
        raise
    assert moved is not None and request.finished == "moved"
    form = target.block_form()
    full, rest = divmod(max(computed, moved.computed), SIZE)
    assert sum(lengths) == full * bytes_of(form, SIZE) + bytes_of(form, rest)
    return Moved(moved, lengths)


@cache
def model_of(kind: str, dtype: torch.dtype = torch.float64) -> Transformer:
    return build(kind, dtype)


@cache
def with_adapters(
    folder: str,
) -> tuple[Transformer, dict[str, HostAdapter], dict[str, Transformer]]:
    """A model, adapters for it, and models with each of them merged."""
    model = build("softmax", torch.float64)
    known = adapters(Path(folder), model, [2, 4])
    return (
        model,
        known,
        {n: merged(build("softmax", torch.float64), a) for n, a in known.items()},
    )


@cache
def written_alone(
    kind: str, prompt: int, how: int, folder: str, adapter: str
) -> Generation:
    """What a prompt gets by itself, drawn in one of several ways."""
    model = with_adapters(folder)[2][adapter] if adapter else model_of(kind)
    engine = Engine(model)
    (one,) = engine.submit(PROMPTS[prompt], NEW, HOW[how], top=2)
    engine.run()
    return one


@dataclass(frozen=True)
class Voyage:
    """Three engines, the requests in the first of them, and where each of them goes when."""

    kind: str
    engines: tuple[dict[str, Any], ...]
    requests: tuple[tuple[int, int, str], ...]  # prompt, way to draw, adapter
    # (steps before, which request, which other engine, steps between rounds)
    moves: tuple[tuple[int, int, int, int], ...]


engine_settings = st.fixed_dictionaries(
    {
        "budget": st.sampled_from((1, 3, 7, 11, 200)),
        "tokens": st.sampled_from((None, None, 160, 400)),
        "limit": st.sampled_from((2, 4, 64)),
        "policy": st.sampled_from(
            list(map(policy_of, ("exact-fill", "chunked:5", "prompts-first")))
        ),
        "draft": st.sampled_from((0, 0, 1, 2)),
    }
)
voyages = st.builds(
    Voyage,
    st.sampled_from(KINDS),
    st.tuples(*[engine_settings] * 3),
    st.lists(
        st.tuples(
            st.integers(0, 6), st.integers(0, 6), st.sampled_from(("", "", "a0", "a1"))
        ),
        min_size=1,
        max_size=4,
    ).map(tuple),
    st.lists(
        st.tuples(
            st.integers(0, 4), st.integers(0, 3), st.integers(0, 1), st.integers(0, 2)
        ),
        min_size=3,
        max_size=30,
    ).map(tuple),
)


def engine_of(voyage: Voyage, settings: dict[str, Any], folder: str) -> Engine:
    own = dict(settings)
    width = own.pop("draft")
    drafter = Lookup(least=1, width=width, shared=200) if width else None
    adapted = voyage.kind == "softmax"
    model = with_adapters(folder)[0] if adapted else model_of(voyage.kind)
    if adapted and own["tokens"]:
        own["tokens"] = 800  # room for two adapters
    engine = Engine(model, size=SIZE, drafter=drafter, **own)
    for name, adapter in with_adapters(folder)[1].items() if adapted else ():
        engine.add_adapter(name, adapter)
    return engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("adapters") / "all")


def run_voyage(voyage: Voyage, folder: str) -> int:
    """Returns how many moves there were; whatever stays has a reason."""
    engines = [engine_of(voyage, each, folder) for each in voyage.engines]
    wanted = [
        (prompt, how, adapter if voyage.kind == "softmax" else "")
        for prompt, how, adapter in voyage.requests
    ]
    requests = [
        engines[0].submit(PROMPTS[p], NEW, HOW[how], top=2, adapter=adapter)[0]
        for p, how, adapter in wanted
    ]
    where, count = [0] * len(requests), [0] * len(requests)
    for steps, number, other, between in voyage.moves:
        for _ in range(steps):
            for engine in engines:
                engine.step()
        at = number % len(requests)
        if requests[at].finished or count[at] == 10:
            continue
        to = (where[at] + 1 + other) % 3
        try:
            moved = move(engines[where[at]], engines[to], requests[at], between)
        except WeftError as error:
            reasons = ("no room", "needed the room", "has ended")
            assert any(reason in str(error) for reason in reasons), error
            continue
        requests[at], where[at] = moved.request, to
        count[at] += 1
    for engine in engines:
        engine.run()
        pool = engine.scheduler.pool
        assert not pool.owners and not engine.scheduler.arriving
    for request, (prompt, how, adapter) in zip(requests, wanted, strict=True):
        single = written_alone(voyage.kind, prompt, how, folder, adapter)
        assert request.written == single.written
        assert request.finished == single.finished
        assert [p for p, _ in request.log_probabilities] == pytest.approx(
            [p for p, _ in single.log_probabilities], abs=1e-9
        )
    return sum(count)


@pytest.mark.slow(8)
@settings(max_examples=4, deadline=None)
@given(voyage=voyages)
def test_tokens_are_the_same_wherever_they_are_written(
    voyage: Voyage, folder: str
) -> None:
    run_voyage(voyage, folder)


@pytest.mark.soak
@settings(max_examples=500, deadline=None)
@given(voyage=voyages)
def test_tokens_are_the_same_on_500_voyages(voyage: Voyage, folder: str) -> None:
    run_voyage(voyage, folder)


@pytest.mark.soak
def test_a_request_makes_ten_moves(folder: str) -> None:
    """Back and forth, behind every other token, drawn and with guesses; also beside requests that stay."""
    for kind in ("softmax", "latent", "hybrid"):
        free = {
            "budget": 7,
            "tokens": None,
            "limit": 64,
            "policy": policy_of("exact-fill"),
        }
        engines = tuple(free | {"draft": draft} for draft in (0, 1, 2))
        stays = tuple((2, 0, i % 2, 0) for i in range(10))
        voyage = Voyage(kind, engines, ((4, 4, ""), (1, 3, "")), stays)
        assert run_voyage(voyage, folder) == 10


def test_a_prompt_that_is_being_read_moves_and_so_does_one_that_waits() -> None:
    """The first step reads 8 of 33 tokens; the other request has not begun."""
    model = model_of("softmax")
    source, target = Engine(model, size=SIZE, budget=8), Engine(model, size=SIZE)
    job = Workflow("job", "first", ("second",), monotonic() + 60)
    requests = [
        source.submit(PROMPTS[i], NEW, HOW[i], top=2, workflow=job)[0] for i in (4, 2)
    ]
    source.step()
    assert requests[0].computed == 8 and not requests[1].runs
    moved = [move(source, target, each, 0) for each in requests]
    assert moved[0].request.computed == 8 and moved[0].request.wanted == 25
    assert moved[1].lengths == [0]
    for each, before in zip(moved, requests, strict=True):
        workflow = each.request.workflow
        assert workflow is not None and workflow.remaining == ("second",)
        assert workflow.deadline == pytest.approx(job.deadline, abs=5)
        assert each.request.asked_at == pytest.approx(before.asked_at, abs=5)
    target.run()
    for each, prompt in zip(moved, (4, 2), strict=True):
        single = written_alone("softmax", prompt, prompt, "", "")
        assert each.request.written == single.written
    assert not source.step() and not source.scheduler.pool.owners


def test_a_prompt_without_numbers_ends_its_texts_wherever_they_are() -> None:
    """A score of the prompt is NaN: the text fails where it has moved, and so do others of the prompt."""
    model, damaged = model_of("softmax"), torch.full((1, 31), torch.nan)
    source, target = Engine(model, size=SIZE, budget=8), Engine(model, size=SIZE)
    texts = [
        source.submit(PROMPTS[4], NEW, GREEDY, top=0, n=n, scored=True) for n in (1, 2)
    ]
    for first, *_ in texts:
        first.take_prompt(0, damaged)
    moved = move(source, target, texts[0][0], 0).request
    source.run()
    target.run()
    for text in (moved, *texts[1]):
        assert (text.finished, text.failure) == ("error", NOT_NUMBERS)


@pytest.mark.soak
def test_siblings_move_each_by_itself() -> None:
    """Before the prompt is read, the next one reads it for the others; afterwards each has what it needs."""
    model, how = model_of("retention"), Sampling(0.9, seed=5)
    expected = []
    for seed in range(5, 9):
        alone = Engine(model)
        expected += alone.submit(PROMPTS[1], NEW, replace(how, seed=seed))
        alone.run()
    for steps in (0, 1, 6):
        source = Engine(model, size=SIZE, budget=8)
        targets = [Engine(model, size=SIZE) for _ in range(2)]
        family = source.submit(PROMPTS[1], NEW, how, n=4)
        for _ in range(steps):
            source.step()
        for at, target in ((0, targets[0]), (2, targets[1])):
            if at == 0 or family[at].runs:
                family[at] = move(source, target, family[at]).request
        for each in (source, *targets):
            each.run()
            assert not each.scheduler.pool.owners
        assert [one.written for one in family] == [one.written for one in expected]


def test_a_sibling_that_is_refused_is_started_once() -> None:
    """While another request still reads the prompt for it, and when that one has read it meanwhile."""
    model, how = model_of("softmax"), Sampling(0.9, seed=5)
    for steps in (0, 6):
        source = Engine(model, size=SIZE, budget=8)
        family = source.submit(PROMPTS[1], NEW, how, n=3)
        source.step()
        departure = Departure(source, family[1])
        departure.leave()
        for _ in range(steps):
            source.step()
        departure.stay()
        source.run()
        for seed, each in enumerate(family, how.seed):
            alone = Engine(model)
            (single,) = alone.submit(PROMPTS[1], NEW, replace(how, seed=seed))
            alone.run()
            assert each.written == single.written
        assert not source.scheduler.running and not source.scheduler.pool.owners


def test_texts_with_a_form_move_with_the_source_of_their_grammar() -> None:
    pytest.importorskip("llguidance")
    from tests.generate.test_grammar import VOCAB
    from tests.generate.test_grammar import build as build_bytes
    from weft.data.tokenizer import load_tokenizer
    from weft.generate.grammar import Grammars

    model, grammars = build_bytes(), Grammars(load_tokenizer("bytes"), VOCAB)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for how in (GREEDY, Sampling(seed=3)):
        alone, source = Engine(model), Engine(model, size=SIZE)
        (single,), (one,) = (
            engine.submit([1, 2, 3], 40, how, grammar=grammars.compile("json", schema))
            for engine in (alone, source)
        )
        alone.run()
        for i in range(6):
            source.step()
            target = Engine(
                model, size=SIZE, drafter=Lookup(least=1) if i % 2 else None
            )
            if i == 3:
                with pytest.raises(WeftError, match="compiles none; move it"):
                    move(source, target, one, 0)
            one, source = move(source, target, one, 0, grammars.compile).request, target
        source.run()
        assert one.written == single.written and len(one.written) > 6
        assert one.finished == single.finished


@pytest.mark.parametrize(
    "lengths",
    [(100, 1600), pytest.param((100, 1000, 5000, 20_000), marks=pytest.mark.soak)],
)
def test_it_stops_for_one_block_at_most_whatever_its_length(
    lengths: tuple[int, ...],
) -> None:
    """The last frame, head and payload, beside those of the rounds; all bytes by the formula, for each length."""
    model, last, whole, size = model_of("softmax", torch.float32), [], [], 16
    shape, given = model.shape, {"size": size, "budget": 4096}
    for length in lengths:
        source, target = Engine(model, **given), Engine(model, **given)
        prompt = [i % 31 for i in range(length)]
        (one,) = source.submit(prompt, 60, Sampling(seed=1), top=1)
        while len(one.written) < 5:
            source.step()
        departure, arrival, sizes = Departure(source, one), Arrival(target), []
        while (frame := departure.round()) is not None:
            sizes.append(sum(map(len, frame.payload)))
            arrival.take(over_the_wire(frame))
            source.step()
        written, tokens = len(one.written), one.computed
        frame = departure.leave()
        last.append((sum(map(len, frame.payload)), len(json.dumps(frame.head))))
        whole.append(sum(sizes) + last[-1][0])
        per_token = 2 * shape.layers * shape.kv_heads * (shape.head_dim or 0) * 4
        assert whole[-1] == per_token * tokens and tokens == length + written - 1
        moved = arrival.take(over_the_wire(frame))
        assert moved is not None
        target.run()
        alone = Engine(model, budget=4096)
        (single,) = alone.submit(prompt, 60, Sampling(seed=1))
        alone.run()
        assert moved.written == single.written and 0 < written < 60
    block = bytes_of(target.block_form(), size)
    assert all(payload < block for payload, _ in last)
    assert max(head for _, head in last) < min(head for _, head in last) + 200
    assert whole[-1] > 10 * whole[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["softmax", "windows", "experts", "latent"])
def test_layers_leave_while_later_ones_are_computed(kind: str) -> None:
    """Of chunks that end within blocks, behind a beginning that was known, beside another request; each byte once."""
    model, happened = model_of(kind), list[tuple[str, int]]()
    hooks = [
        block.register_forward_hook(lambda *_, at=int(i): happened.append(("ends", at)))
        for i, block in model.blocks.items()
    ]
    for budget, known in ((200, False), (7, True)):
        source = Engine(model, size=SIZE, budget=budget)
        target = Engine(model, size=SIZE)
        if known:
            source.submit(PROMPTS[4][:10], 1)
            source.run()
        source.submit(PROMPTS[2], NEW, GREEDY)
        (one,) = source.submit(PROMPTS[4], NEW, HOW[4], top=2)
        departure, arrival, sent = Departure(source, one), Arrival(target), [0]

        def keep(
            frame: MoveFrame, arrival: Arrival = arrival, sent: list[int] = sent
        ) -> None:
            happened.append(("sent", frame.head["layer"]))
            sent[0] += sum(map(len, frame.payload))
            arrival.keep(over_the_wire(frame))

        departure.stream(keep)
        form = target.block_form()
        happened.clear()
        while not one.written:
            source.step()
            if (frame := departure.round()) is not None:
                assert not frame.payload and arrival.take(over_the_wire(frame)) is None
        pass_ = [("sent", 0), ("ends", 0), ("sent", 1), ("ends", 1), ("sent", 2), ("ends", 2)]  # fmt: skip
        assert happened[-6:] == pass_, (
            "all but the last layer's went before the pass ended"
        )
        before, tokens = sent[0], one.computed
        last = departure.leave()
        assert sent[0] == before and not last.payload and not source.reader.streams
        moved = arrival.take(over_the_wire(last))
        assert sent[0] == bytes_of(form, 1) * tokens and tokens == len(PROMPTS[4])
        assert moved is not None and moved.computed == tokens
        target.run()
        assert moved.written == written_alone(kind, 4, 4, "", "").written
    for hook in hooks:
        hook.remove()


def test_layers_that_passes_do_not_give_leave_between_passes() -> None:
    """Passes with requests to several models write a layer's keys in several turns."""
    source, target = (
        Engine(model_of("softmax"), size=SIZE, budget=9),
        Engine(model_of("softmax"), size=SIZE),
    )
    source.add_model("same", model_of("softmax"))
    target.add_model("same", model_of("softmax"))
    (one,) = source.submit(PROMPTS[4], NEW, HOW[4], adapter="same")
    departure, arrival, rounds = Departure(source, one), Arrival(target), 0
    departure.stream(lambda frame: arrival.keep(over_the_wire(frame)))
    while not one.written:
        source.step()
        if (frame := departure.round()) is not None:
            rounds += 1
            assert arrival.take(over_the_wire(frame)) is None
    moved = arrival.take(over_the_wire(departure.leave()))
    assert moved is not None and rounds == 4
    target.run()
    assert moved.written == written_alone("softmax", 4, 4, "", "").written


@pytest.mark.parametrize("kind", ["softmax", "latent"])
def test_layers_are_written_as_they_come_and_the_last_frame_finds_them_there(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are taken between two steps; of the last chunk, what came before that is written with the next layer."""
    model, counted = model_of(kind), list[int]()
    source, target = Engine(model, size=SIZE, budget=7), Engine(model, size=SIZE)
    (one,) = source.submit(PROMPTS[4], NEW, GREEDY)
    (beside,) = target.submit(PROMPTS[1], NEW, GREEDY)
    between = list[Callable[[], None]]()
    departure, arrival = Departure(source, one), Arrival(target, None, between.append)
    departure.stream(lambda frame: arrival.keep(over_the_wire(frame)))
    while not one.written:
        source.step()
        target.step()
        while between:
            between.pop(0)()
    arrival.unload()
    assert set(arrival._there.values()) == {len(PROMPTS[4])}
    assert len(target.scheduler.arriving) == 1
    last = over_the_wire(departure.leave())

    def counting(page: Any, places: torch.Tensor, values: torch.Tensor) -> None:
        counted.append(len(places))

    monkeypatch.setattr(migration, "write_layer", counting)
    moved = arrival.take(last)
    assert moved is not None and not counted
    target.run()
    assert moved.written == written_alone(kind, 4, 0, "", "").written
    assert beside.written == written_alone(kind, 1, 0, "", "").written


def test_whole_blocks_are_written_beside_the_steps() -> None:
    """Not by the step's thread, which takes blocks for them; at the latest when the next frame is taken."""
    model = model_of("softmax")
    for waits in (False, True):
        source, target = Engine(model, size=SIZE), Engine(model, size=SIZE)
        (one,) = source.submit(PROMPTS[4], NEW, GREEDY)
        source.step()
        departure = Departure(source, one)
        arrival = Arrival(target, None, lambda do: do())
        frame = departure.round()
        assert frame is not None and arrival.take(over_the_wire(frame)) is None
        table = arrival.taken.table
        # the first one has a token of the pass in which the cache was allocated
        assert len(table) == 8 and not target.reader.read_blocks(table[1:], SIZE).any()
        if not waits:
            arrival.unload()
            there = target.reader.read_blocks(table, SIZE).numpy().tobytes()
            assert there == b"".join(frame.payload)
        moved = arrival.take(over_the_wire(departure.leave()))
        assert moved is not None
        target.run()
        assert moved.written == written_alone("softmax", 4, 0, "", "").written


@pytest.mark.parametrize("when", ["lost", "full", "too many"])
def test_blocks_for_what_comes_are_taken_and_given_back_early(when: str) -> None:
    """A text that runs needs them, there are none in the beginning, or a pass ends in its middle."""
    model, given = model_of("softmax"), PROMPTS[4]
    source, frames = Engine(model, size=SIZE), list[MoveFrame]()
    target = Engine(model, size=SIZE, tokens=48)
    (one,) = source.submit(given, NEW - 10, GREEDY)
    departure, arrival = Departure(source, one), Arrival(target, None, lambda do: do())
    departure.stream(lambda frame: frames.append(over_the_wire(frame)))
    source.step()
    if when == "too many":
        head = frames[0].head | {"first": len(given), "tokens": 3 * SIZE}
        frames.append(MoveFrame(head, [memoryview(bytearray(8))]))
    if when == "lost":
        arrival.keep(frames.pop(0))
        assert arrival._there == {0: len(given)}
    texts = target.submit(PROMPTS[1], NEW - 5, GREEDY) if when != "too many" else []
    target.step()
    if when == "lost":
        target.run()
    for frame in frames:
        arrival.keep(frame)
    layers = {"lost": 1, "full": 0, "too many": model.shape.layers}
    assert len(arrival._there) == layers[when]
    target.run()
    last = over_the_wire(departure.leave())
    if when == "lost":
        with pytest.raises(WeftError, match="have needed the room"):
            arrival.take(last)
        departure.stay()
        source.run()
    else:
        if when == "too many":
            assert len(target.scheduler.arriving[0].table) == 12
        one = arrival.take(last)
        assert one is not None and len(one.table) == -(-len(given) // SIZE)
        target.run()
    for text, prompt, count in ((one, 4, NEW - 10), *((t, 1, NEW - 5) for t in texts)):
        alone = written_alone("softmax", prompt, 0, "", "").written
        assert text.written == alone[:count]
    assert not target.scheduler.pool.owners and not target.scheduler.arriving


def test_layers_that_are_missing_or_too_much_are_refused() -> None:
    model = model_of("softmax")
    for change in ("less", "more", "order", "none"):
        source, target = Engine(model, size=SIZE), Engine(model, size=SIZE)
        (one,) = source.submit(PROMPTS[4], NEW, GREEDY)
        departure, arrival, frames = Departure(source, one), Arrival(target), []
        departure.stream(frames.append)
        source.step()
        head, (payload,) = frames.pop()
        if change == "less":
            frames.append(MoveFrame(head, [payload[:-8]]))
        elif change == "more":
            frames.append(MoveFrame(head, [memoryview(bytes(payload) + bytes(8))]))
        elif change == "order":
            frames.append(MoveFrame(head | {"first": 4}, [payload]))
        for frame in frames:
            arrival.keep(frame)
        with pytest.raises(WeftError, match="is damaged"):
            arrival.take(over_the_wire(departure.leave()))
        assert not target.scheduler.pool.owners and not target.scheduler.arriving
        departure.stay()
        source.run()
        assert one.written == written_alone("softmax", 4, 0, "", "").written


def test_which_weights_wrote_which_tokens_moves_along() -> None:
    model = model_of("softmax")
    source, target = Engine(model, size=SIZE), Engine(model, size=SIZE)
    (text,) = source.submit(PROMPTS[1], NEW, GREEDY)
    while len(text.written) < 2:
        source.step()
    source.weights_changed(1)
    target.weights_changed(1)
    while len(text.written) < 4:
        source.step()
    moved = move(source, target, text, between=0).request
    target.run()
    assert moved.versions == [(0, 0), (2, 1)] and len(moved.written) == NEW


def test_rounds_are_limited_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("latent")
    source, target = Engine(model, size=SIZE), Engine(model, size=SIZE)
    block = bytes_of(source.block_form(), SIZE)
    monkeypatch.setattr("weft.generate.migration.ROUND", 3 * block + 1)
    (one,) = source.submit(PROMPTS[4], NEW, GREEDY)
    source.step()
    moved = move(source, target, one, 0)
    assert moved.lengths[:-1] == [3 * block, 3 * block, 2 * block]


def test_what_is_refused_at_last_goes_on_where_it_was(folder: str) -> None:
    model = model_of("softmax")
    for prompt, how in ((1, 0), (4, 4)):
        source, target = Engine(model, size=SIZE), Engine(model, size=SIZE, limit=1)
        (one,) = source.submit(PROMPTS[prompt], NEW, HOW[how], top=2)
        (other,) = target.submit(PROMPTS[2], NEW, GREEDY)
        for engine in (source, source, source, target):
            engine.step()
        with pytest.raises(WeftError, match="no room for the request here"):
            move(source, target, one, 0)
        assert not one.finished
        source.run()
        target.run()
        assert one.written == written_alone("softmax", prompt, how, "", "").written
        assert other.written == written_alone("softmax", 2, 0, "", "").written
        assert not source.scheduler.pool.owners and not target.scheduler.pool.owners
    adapted, known, _ = with_adapters(folder)
    source, target = Engine(adapted, size=SIZE), Engine(adapted, size=SIZE)
    source.add_adapter("a0", known["a0"])
    (one,) = source.submit(PROMPTS[1], NEW, GREEDY, adapter="a0")
    source.step()
    with pytest.raises(WeftError, match="no adapter 'a0' here; add it"):
        move(source, target, one, 0)
    source.run()
    assert one.written == written_alone("softmax", 1, 0, folder, "a0").written


def test_requests_that_run_take_back_what_one_on_its_way_has_taken() -> None:
    """A cache of 12 blocks: eight are on their way when the other request, of 10 blocks in the end, needs them."""
    model = model_of("softmax")
    source, target = Engine(model, size=SIZE), Engine(model, size=SIZE, tokens=48)
    (one,) = source.submit(PROMPTS[4], NEW - 10, GREEDY)
    source.step()
    departure, arrival = Departure(source, one), Arrival(target)
    frame = departure.round()
    assert frame is not None
    assert arrival.take(over_the_wire(frame)) is None
    (other,) = target.submit(PROMPTS[1], NEW - 5, GREEDY)
    target.run()
    assert other.written == written_alone("softmax", 1, 0, "", "").written[: NEW - 5]
    with pytest.raises(WeftError, match="have needed the room"):
        arrival.take(over_the_wire(departure.leave()))
    departure.stay()
    source.run()
    assert one.written == written_alone("softmax", 4, 0, "", "").written[: NEW - 10]
    assert not source.scheduler.pool.owners and not target.scheduler.pool.owners


def test_what_does_not_arrive_stays() -> None:
    model = model_of("softmax", torch.float32)
    source, target = Engine(model, size=SIZE), Engine(model, size=SIZE, tokens=12)
    (one,) = source.submit(PROMPTS[1], NEW, GREEDY)
    source.step()
    departure, arrival = Departure(source, one), Arrival(target)
    frame = departure.round()
    assert frame is not None
    with pytest.raises(WeftError, match="no room for the request here"):
        arrival.take(frame)
    roomy = Engine(model, size=SIZE)
    head, payload = frame.head, b"".join(frame.payload)
    for damaged, said in (
        (MoveFrame(head, [memoryview(payload[:-7])]), "damaged"),
        (MoveFrame({}, [memoryview(payload)]), "damaged"),
        (MoveFrame(head | {"grown": {"ids": 3}}, frame.payload), "damaged"),
        (MoveFrame(head | {"grown": {"ids": [4, [1]]}}, frame.payload), "is missing"),
        (MoveFrame(head | {"first": 2}, frame.payload), "do not go on where 0 end"),
        (MoveFrame(head | {"version": 3}, frame.payload), "weights number 3"),
    ):
        with pytest.raises(WeftError, match=said):
            Arrival(roomy).take(damaged)
        assert not roomy.scheduler.pool.owners and not roomy.scheduler.arriving
    with pytest.raises(WeftError, match=r"blocks of 4 tokens .* have 8 tokens"):
        Arrival(Engine(model, size=8)).take(frame)
    with pytest.raises(WeftError, match="not of this model"):
        Arrival(Engine(model_of("latent"), size=SIZE)).take(frame)
    source.scheduler.renew()
    assert departure.round() is None
    with pytest.raises(WeftError, match="the weights have changed; the request stays"):
        departure.leave()
    source.run()
    alone = Engine(model)
    (single,) = alone.submit(PROMPTS[1], NEW, GREEDY)
    alone.run()
    assert one.written == single.written
    with pytest.raises(WeftError, match="has ended"):
        Departure(source, one).leave()
    with pytest.raises(UsageError, match="let it end where it is"):
        Departure(source, Generation([1, 2], 4, kept=True))


def test_a_frame_with_tokens_that_the_model_lacks_is_refused() -> None:
    model = model_of("softmax")
    source, target = Engine(model, size=SIZE), Engine(model, size=SIZE)
    (one,) = source.submit(PROMPTS[1], NEW, GREEDY)
    source.step()
    departure = Departure(source, one)
    head, payload = departure.leave()
    for grown in ([0, [31] * 21], [0, [*one.ids[:19]]]):
        bad = MoveFrame(
            head | {"grown": head["grown"] | {"ids": grown}, "first": 0}, payload
        )
        with pytest.raises(WeftError, match=r"ids below|damaged"):
            Arrival(target).take(bad)
        assert not target.scheduler.pool.owners and not target.scheduler.running
    departure.stay()
    source.run()
    assert one.written == written_alone("softmax", 1, 0, "", "").written


def as_bytes(frame: MoveFrame) -> tuple[dict[str, Any], bytes]:
    return frame.head, b"".join(frame.payload)


def through(layout: str, mixer: str, frames: list[tuple[dict[str, Any], bytes]]) -> Any:
    """On every rank: on the first, the frames of a request that has come and gone on for a while, beside another."""
    model = model_under(Layout.parse(layout), mixer)
    if dist.get_rank():
        follow_leader(model)
        return None
    engine = Engine(model, size=12, budget=9, ranks=True)
    engine.submit(PROMPTS[1], 30, GREEDY)
    engine.step()
    arrival = Arrival(engine)
    *_, request = [
        arrival.take(MoveFrame(head, [memoryview(bytearray(raw))]))
        for head, raw in frames
    ]
    assert request is not None
    for _ in range(9):
        engine.step()
    departure, sent = Departure(engine, request), []
    while (frame := departure.round()) is not None:
        sent.append(as_bytes(frame))
        engine.step()
    while request in engine.scheduler.due:
        engine.step()
    sent.append(as_bytes(departure.leave()))
    engine.run()
    assert not engine.scheduler.pool.owners
    engine.close()
    return sent, departure.request.written


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mixer", "layout"), [
    *((mixer, layout) for mixer in ("softmax", "latent", "hybrid", "windows")
      for layout in ("tp=2", "tp=3", "cp=2", "cp=3", "pp=2", "tp=2,cp=2", "cp=2,pp=2", "tp=2,pp=2")),
    ("experts", "tp=2,ep=2"), ("experts", "cp=2,ep=2"),
])  # fmt: skip
def test_requests_move_between_engines_of_other_ranks(
    pool: Any, mixer: str, layout: str
) -> None:
    """From one rank to several and back, each cut otherwise: by heads, tokens, layers and states."""
    model, how = model_under(Layout(), mixer), Sampling(0.8, seed=6)
    alone, source, target = (
        Engine(model),
        Engine(model, size=12),
        Engine(model, size=12),
    )
    (single,) = alone.submit(PROMPTS[4], 40, how, top=2)
    alone.run()
    (one,) = source.submit(PROMPTS[4], 40, how, top=2)
    for _ in range(4):
        source.step()
    departure, frames = Departure(source, one), list[Any]()
    while (frame := departure.round()) is not None:
        frames.append(as_bytes(frame))
    frames.append(as_bytes(departure.leave()))
    world = Layout.parse(layout).world
    (back, written), *_ = pool.run(world, through, layout, mixer, frames, timeout=100)
    assert 4 < len(written) < 40 and len(back) > 1
    arrival = Arrival(target)
    *_, moved = [
        arrival.take(MoveFrame(head, [memoryview(bytearray(raw))]))
        for head, raw in back
    ]
    assert moved is not None
    target.run()
    assert moved.written == single.written
    assert [p for p, _ in moved.log_probabilities] == pytest.approx(
        [p for p, _ in single.log_probabilities], abs=1e-9
    )
    form = target.block_form()
    tokens = one.prompt + len(written) - 1
    full, rest = divmod(tokens, 12)
    assert sum(len(raw) for _, raw in back) == full * bytes_of(form, 12) + bytes_of(
        form, rest
    )
