"""Decode steps from tensors that stay where they are: the path that a GPU records as graphs, repeated here as it is."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generate.test_cache import build as build_mixer
from tests.generate.test_engine import build
from weft.generate.decode_step import decode_requests, padded_count, repeat_pass
from weft.generate.engine import Engine
from weft.generate.layer_stream import LayerStream
from weft.generate.lookup import Lookup
from weft.generate.reader import PagedReader
from weft.generate.request import Request
from weft.generate.sampling import GREEDY, Sampling
from weft.generate.scheduler import ScheduledStep
from weft.models.transformer import Transformer


class Recordings:
    """Repeats passes as they are, and counts how many were recorded and repeated."""

    def __init__(self) -> None:
        self.recorded = self.repeated = 0

    def __call__(self, compute):  # type: ignore[no-untyped-def]
        self.recorded += 1
        # outside of it the cache cannot be written to, and other kernels run
        assert torch.is_inference_mode_enabled()

        def replay() -> torch.Tensor:
            self.repeated += 1
            return repeat_pass(compute)()

        return replay


def recording_engine(model: Transformer, record: Recordings, **options) -> Engine:  # type: ignore[no-untyped-def]
    engine = Engine(model, **options)
    assert isinstance(engine.reader, PagedReader)
    assert engine.reader.record_decoding(record) == ""
    return engine


def alone(
    model: Transformer, prompt: list[int], count: int, how: Sampling
) -> list[int]:
    engine = Engine(model)
    (text,) = engine.submit(prompt, count, how)
    engine.run()
    return text.written


@pytest.fixture(scope="module")
def model() -> Transformer:
    return build()


@pytest.mark.slow(4)
@settings(max_examples=3, deadline=None)
@given(
    seed=st.integers(0, 2**16), size=st.sampled_from([1, 4, 16]), tight=st.booleans()
)
def test_each_text_is_written_as_if_it_were_alone(
    model: Transformer, seed: int, size: int, tight: bool
) -> None:
    """Texts come, go and are cancelled at any step; blocks are few, shared and copied, and the memory grows."""
    drawn, record = random.Random(seed), Recordings()
    tokens = 80 if tight else None
    engine = recording_engine(model, record, tokens=tokens, size=size, budget=24, limit=5)  # fmt: skip
    texts = []
    for number in range(drawn.randint(1, 7)):
        prompt = [drawn.randrange(8) for _ in range(drawn.choice([1, 2, 5, 20]))]
        how = GREEDY if drawn.random() < 0.7 else Sampling(0.9, seed=number)
        count = drawn.randint(1, 25)
        written = engine.submit(prompt, count, how, n=drawn.choice([1, 1, 2]))
        texts += [(each, prompt, count) for each in written]
        for _ in range(drawn.randrange(6)):
            engine.step()
        if drawn.random() < 0.2:
            engine.cancel(drawn.choice(texts)[0])
    engine.run()
    assert engine.scheduler.pool.free == engine.scheduler.pool.blocks
    for each, prompt, count in texts:
        whole = alone(model, prompt, count, each.how)
        assert each.written == whole[: len(each.written)]
        assert each.finished == "stop" or each.written == whole


def test_steps_are_recorded_once_for_each_padded_number_of_texts(
    model: Transformer,
) -> None:
    record = Recordings()
    engine = recording_engine(model, record, tokens=4000)
    engine.reader.reserve(engine.scheduler.pool.blocks)  # type: ignore[union-attr]
    for texts in (3, 4, 3):
        for i in range(texts):
            engine.submit([5, i], 20, GREEDY)
        engine.run()
    assert (record.recorded, record.repeated) == (1, 3 * 19)
    engine.submit([5, 9], 20, GREEDY)
    engine.run()
    assert (record.recorded, record.repeated) == (2, 4 * 19)


def test_grown_memory_is_recorded_anew_and_steps_can_be_recorded_at_the_start(
    model: Transformer,
) -> None:
    record = Recordings()
    engine = recording_engine(model, record, limit=3)
    engine.record_steps()
    assert record.recorded == 3  # of four, two and one
    (text,) = engine.submit([1, 2], 280, GREEDY)
    engine.run()
    assert 3 < record.recorded < 10
    assert text.written == alone(model, [1, 2], 280, GREEDY)


def test_rows_without_a_text_leave_the_cache_as_it_was(model: Transformer) -> None:
    engine = recording_engine(model, Recordings(), size=4)
    for i in range(3):
        engine.submit([7, i], 9, GREEDY)
    engine.step()
    engine.step()
    pages = engine.reader.pages[0]
    assert pages.store is not None
    before = pages.store.clone()
    engine.step()
    changed = (pages.store != before).flatten(2).any(-1).any(0).nonzero()[:, 0]
    own = {text.table[-1] for text in engine.scheduler.running}
    assert {*changed.tolist()} <= {*own, len(pages.store[0]) - 1}


def test_drafts_and_prompts_go_the_ordinary_way(model: Transformer) -> None:
    record = Recordings()
    engine = recording_engine(model, record, drafter=Lookup())
    (text,) = engine.submit([1, 2, 3, 1, 2, 3, 1, 2], 30, GREEDY)
    engine.run()
    assert text.written == alone(model, [1, 2, 3, 1, 2, 3, 1, 2], 30, GREEDY)
    plain = Request([1, 2, 3], 5, computed=2, table=[0])
    assert decode_requests(ScheduledStep({plain: 1}, [])) == [plain]
    adapted = Request([1, 2, 3], 5, "name", computed=2, table=[0])
    lent = Request([1, 2, 3], 5, computed=2, table=[-1])
    begun = Request([1, 2, 3], 5, computed=1, table=[0])
    for other in (adapted, lent, begun):
        assert decode_requests(ScheduledStep({plain: 1, other: 1}, [])) == []


def test_the_last_token_of_a_prompt_that_travels_is_not_recorded(
    model: Transformer,
) -> None:
    """Its layers give their keys away while the pass goes on, which a recorded pass cannot."""
    record = Recordings()
    engine = recording_engine(model, record, budget=4)
    (text,) = engine.submit([1, 2, 3, 4, 5], 3, GREEDY)
    assert isinstance(engine.reader, PagedReader)
    stream = LayerStream(engine.reader.pages, text, lambda *given: None)
    engine.reader.streams.append(stream)
    engine.step()
    engine.step()
    assert (stream.whole, record.repeated) == (5, 0)
    engine.run()
    assert record.repeated == 2


def test_models_that_need_the_host_in_a_pass_are_not_recorded(
    model: Transformer,
) -> None:
    reader = PagedReader(build_mixer("retention"))
    assert "plain keys" in reader.record_decoding(repeat_pass)
    assert reader.decoding is None
    reader = PagedReader(model, alike=True)
    assert "invariant" in reader.record_decoding(repeat_pass)
    if not torch.cuda.is_available():
        assert PagedReader(model).record_graphs() == "no GPU"
    assert [padded_count(n) for n in (1, 2, 3, 5, 64)] == [1, 2, 4, 8, 64]


def test_steps_are_recorded_again_only_for_weights_that_lie_elsewhere() -> None:
    """A policy's weights change in place between rollouts, or get the memory of a state that was built anew."""
    model, record = build(), Recordings()
    engine = recording_engine(model, record)
    engine.weights_changed(0)

    def write(version: int) -> int:
        (text,) = engine.submit([1, 2, 3], 4, GREEDY)
        engine.run()
        assert text.written == alone(model, [1, 2, 3], 4, GREEDY)
        for weight in model.parameters():
            weight.data += 0.1 * torch.randn(weight.shape, dtype=weight.dtype)
        engine.weights_changed(version)
        return record.recorded

    first = write(1)
    assert write(2) == first
    head = [*model.parameters()][-1]
    head.data = head.data.clone()
    engine.weights_changed(3)
    assert write(4) == 2 * first
