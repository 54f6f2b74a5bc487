"""Prompts that another process reads: every text has the tokens that it gets alone, whatever happens to the process."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import threading
from multiprocessing.connection import Connection
from types import SimpleNamespace

import psutil
import pytest
import torch

from tests.generate.test_many import NEW, PROMPTS, build, each_alone
from weft.errors import WeftError
from weft.generate.beam_search import Search
from weft.generate.core_share import ANY
from weft.generate.engine import Engine
from weft.generate.lookup import Lookup
from weft.generate.prefill_process import BEAT, TRIES, PrefillProcess, serve_prefill
from weft.generate.quotas import FixedQuota
from weft.generate.request import Generation
from weft.generate.sampling import GREEDY, Sampling
from weft.generate.shared_model import share_model
from weft.generate.split_phases import SplitPhases

KINDS = ["softmax", "windows", "experts", "latent", "retention", "hybrid"]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that stand for processes say when they end, and may be silent for as long as others have the cores."""
    monkeypatch.setattr("weft.generate.prefill_process.SILENT_S", math.inf)


class Killed(BaseException):
    """Ends a thread that stands for a process, wherever it is."""


class ThreadProcess:
    """A thread in place of the process, with file descriptors of its own. ``layers_left``: until it dies."""

    def __init__(self, pipe: Connection, weights: int, cache: int) -> None:
        self.layers_left, self.gate = 10**9, threading.Event()
        self.gate.set()
        handles = [os.dup(each) for each in (pipe.fileno(), weights, cache)]
        self.thread = threading.Thread(target=self._run, args=handles, daemon=True)
        self.thread.start()

    def _run(self, pipe: int, weights: int, cache: int) -> None:
        connection = Connection(pipe)
        try:
            serve_prefill(connection, weights, cache, lambda share: None, self._watch)
        except Killed:
            pass
        finally:
            connection.close()
            os.close(weights)
            os.close(cache)

    def _watch(self) -> None:
        self.gate.wait(60)
        self.layers_left -= 1
        if self.layers_left < 0:
            raise Killed

    def poll(self) -> int | None:
        return None if self.thread.is_alive() else -9

    def kill(self) -> None:
        self.layers_left = 0
        self.gate.set()

    def wait(self, timeout: float | None = None) -> int:
        self.thread.join(120)  # which is certain to come, whatever else runs
        assert not self.thread.is_alive()
        return -9


class Split:
    """An engine with a thread that reads prompts."""

    def __init__(self, kind: str, **settings: object) -> None:
        model = build(kind, torch.float32)
        shared = share_model(model)
        tokens = settings.pop("tokens", 1000)
        self.engine = Engine(model, tokens=tokens, size=4, **settings)  # type: ignore[arg-type]
        self.threads: list[ThreadProcess] = []
        self.said: list[str] = []
        self.process = PrefillProcess(
            self.engine, shared, [0, 1], self.said.append, self._start
        )
        self.phases = SplitPhases(
            self.engine, self.process, FixedQuota(0.5), [0, 1], lambda share: None
        )
        self.process.await_ready()

    def _start(self, pipe: Connection, weights: int, cache: int) -> ThreadProcess:
        self.threads.append(ThreadProcess(pipe, weights, cache))
        return self.threads[-1]

    def check_nothing_is_left(self) -> None:
        scheduler = self.engine.scheduler
        assert not scheduler.pool.owners and not scheduler.due
        assert not scheduler.running and not scheduler.waiting
        self.engine.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_each_request_alone(kind: str, seed: int) -> None:
    """In large and small caches, with guesses, with requests that are cancelled, and a process that dies."""
    drawn = random.Random(f"{kind} {seed}")
    expected = [one.written for one in each_alone(kind, torch.float32)]
    settings = [{"budget": 9}, {"tokens": 48, "budget": 9}, {"budget": 64, "drafter": Lookup(least=1)}]  # fmt: skip
    both = Split(kind, **settings[seed])
    engine, asked = both.engine, list[tuple[int, Generation]]()
    for _ in range(3):
        for number, prompt in enumerate(PROMPTS):
            (generation,) = engine.submit(prompt, NEW, GREEDY)
            asked.append((number, generation))
            for _ in range(drawn.randrange(3)):
                engine.step()
            if drawn.random() < 0.2:
                engine.cancel(drawn.choice(asked)[1])
            if drawn.random() < 0.1:
                both.threads[-1].layers_left = drawn.randrange(4)
    engine.run()
    for number, generation in asked:
        cut = generation.finished == "stop"
        assert generation.written == expected[number][: len(generation.written)]
        assert cut or len(generation.written) == NEW
    # a new process may have become ready too late for those, and may be about to end
    for _ in range(3 if not both.phases.passes else 0):
        both.process.await_ready()
        engine.submit(PROMPTS[0], NEW, GREEDY)
        engine.run()
    assert both.phases.passes
    both.check_nothing_is_left()


def test_a_handover_copies_nothing_and_blocks_lie_in_the_memory_of_both() -> None:
    """The other process writes a prompt's keys; the text goes on with these blocks, and this process wrote none."""
    both = Split("softmax", budget=64)
    pages, written = both.engine.reader.pages[0], list[int]()
    own = threading.get_ident()
    write = type(pages).write

    def writing(self: object, *new: torch.Tensor) -> None:
        if threading.get_ident() == own:
            written.append(new[0].shape[1])
        write(self, *new)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(pages), "write", writing)
        # a step that finds the first token may write the second, and the text's end gives its blocks back
        (generation,) = both.engine.submit(PROMPTS[4], 3, GREEDY)
        while len(generation.written) < 1:
            both.engine.step()
        table, sent = list(generation.table), both.process.sent
        both.engine.run()
        assert both.process.sent == sent
    assert set(written) == {
        1
    }  # one token for each of the layers, and nothing of the prompt
    assert table and both.phases.passes == 1
    assert pages.store is not None
    stored = pages.store[:, table[0]]
    assert stored.abs().sum() > 0
    again = Split("softmax").engine
    (alike,) = again.submit(PROMPTS[4], 3, GREEDY)
    again.run()
    assert alike.written == generation.written
    both.check_nothing_is_left()
    again.close()


def test_both_compute_at_once_and_blocks_under_way_are_given_to_nobody() -> None:
    """While the other process stands in the middle of a prompt, texts write on, and a cancelled prompt keeps its
    blocks until its pass has ended.
    """
    both = Split("softmax", tokens=160, budget=64)
    engine, pool = both.engine, both.engine.scheduler.pool
    (text,) = engine.submit(PROMPTS[0], NEW, GREEDY)
    while not text.written:
        engine.step()
    # a step that finds the first one may write the second one
    before = len(text.written)
    gate = threading.Event()
    both.threads[-1].gate = gate
    (prompt,) = engine.submit(PROMPTS[4], 2, GREEDY)
    for _ in range(4):
        engine.step()
    assert len(text.written) == before + 4 and not prompt.written and prompt.table
    held = set(prompt.table)
    engine.cancel(prompt)
    assert held <= pool.owners.keys()
    gate.set()
    engine.run()
    assert text.written == each_alone("softmax", torch.float32)[0].written
    both.check_nothing_is_left()


def test_beams_and_several_texts_of_a_prompt_are_those_of_one_process() -> None:
    """Both branch where a prompt ends, so that the logits of a pass are read after the next one has begun."""
    results = []
    both = Split("softmax", budget=9)
    plain = Engine(build("softmax", torch.float32), tokens=1000, size=4, budget=9)
    for engine in (both.engine, plain):
        others = engine.submit(PROMPTS[4], NEW, GREEDY)
        texts = engine.submit(PROMPTS[2], NEW, Sampling(seed=3), n=3, top=2)
        best = Search(engine, PROMPTS[1], 6, 3).run()
        engine.run()
        written = [text.written for text in (*others, *texts)]
        results.append((written, [hypothesis.ids for hypothesis in best]))
    assert results[0] == results[1]
    assert both.phases.passes
    both.check_nothing_is_left()


def test_a_process_that_never_starts_is_said_and_one_process_does_all() -> None:
    both = Split("softmax", budget=64)
    both.process._start = lambda *_: Stillborn()  # type: ignore[assignment]
    both.threads[-1].kill()
    generations = [both.engine.submit(p, NEW, GREEDY)[0] for p in PROMPTS]
    both.engine.run()
    expected = [alone.written for alone in each_alone("softmax", torch.float32)]
    assert [g.written for g in generations] == expected
    for _ in range(9):
        both.process.look()
    assert "one process does all" in both.said[-1] and not both.process.ready
    with pytest.raises(WeftError, match="does not start"):
        both.process.await_ready()


def test_silence_is_what_was_heard_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was stopped for a minute with all else has not listened for a minute."""
    monkeypatch.setattr("weft.generate.prefill_process.SILENT_S", 10.0)
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    process = object.__new__(PrefillProcess)
    process._control, process.sent = torch.zeros(3), 0
    process._pipe = SimpleNamespace(send_bytes=len, poll=lambda seconds: False)  # type: ignore[assignment]
    process.begin({})  # type: ignore[arg-type]
    ended = []
    for passed in (60.0, *[1.0] * 9, 1.0):
        now[0] += passed
        ended.append(process.has_ended(0))
    assert ended == [False] * 10 + [True]
    process._control[BEAT] += 1
    assert not process.has_ended(0)


class Stuck:
    """A process in a call that the system does not interrupt."""

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int:
        raise subprocess.TimeoutExpired("weft", timeout or 0)


def test_a_process_that_does_not_end_at_once_is_given_up() -> None:
    process, said = object.__new__(PrefillProcess), list[str]()
    process._pipe = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    process._process, process._failures, process._say = Stuck(), TRIES, said.append  # type: ignore[assignment]
    process._bury(OSError())
    assert "has not ended within 60 s" in said[0] and process.pid is None


class Stillborn:
    """A process that has ended at once."""

    def poll(self) -> int | None:
        return 1

    def kill(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        return 1


def private_bytes(pid: int) -> int:
    """Bytes of the shared files that a process has copied for itself."""
    maps = psutil.Process(pid).memory_maps(grouped=False)
    shared = [each for each in maps if "weft-shared" in each.path]
    assert len(shared) == 2 and sum(each.shared_dirty for each in shared)
    return sum(each.private_dirty for each in shared)


@pytest.mark.soak  # every day the process ends within a model's layers, in this process
def test_a_real_process_that_is_killed_and_frozen(monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Requests of the killed process are computed here; a new process comes. Weights and cache exist once."""
    monkeypatch.setattr("weft.generate.prefill_process.SILENT_S", 0.5)
    model = build("softmax", torch.float32)
    shared, said = share_model(model), list[str]()
    engine = Engine(model, tokens=1000, size=4, budget=16)
    process = PrefillProcess(engine, shared, [ANY, ANY], said.append)
    phases = SplitPhases(
        engine, process, FixedQuota(0.5), [ANY, ANY], lambda share: None
    )
    expected = [alone.written for alone in each_alone("softmax", torch.float32)]
    try:
        for ending in (None, signal.SIGKILL, signal.SIGSTOP):
            process.await_ready()
            passes, lost = phases.passes, phases.lost
            generations = [engine.submit(p, NEW, GREEDY)[0] for p in PROMPTS]
            if ending is not None:
                assert process.pid
                os.kill(process.pid, ending)
            engine.run()
            assert [g.written for g in generations] == expected
            if ending is None:
                assert phases.passes > passes
                assert process.pid and not private_bytes(process.pid)
            else:
                assert phases.lost > lost
        assert len(said) == 2 and "no sign of life" in said[1]
    finally:
        engine.close()
