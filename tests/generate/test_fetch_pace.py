"""Whether blocks are read or computed: by the pace of their sources, and what computing would take."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.generate.test_many import PROMPTS, build
from tests.generate.test_outside_cache import engine_with, write
from weft.generate import block_source, fetch_pace, outside_cache
from weft.generate.block_channel import BlockPeer
from weft.generate.block_source import Contents, HostBlocks, TieredBlocks
from weft.generate.engine import Engine
from weft.generate.fetch_pace import FetchPace, line_at


class Clock:
    """A clock that is set by hand."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


def read(pace: FetchPace, clock: Clock, blocks: int, seconds: float) -> None:
    begun = pace.begin()
    clock.now += seconds
    pace.end(begun, blocks)


def test_the_pace_is_a_line_through_the_last_readings(monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    clock = Clock()
    monkeypatch.setattr(fetch_pace, "time", clock)
    pace = FetchPace()
    assert pace.seconds(10) == 0
    read(pace, clock, 1, 0.5)
    assert pace.seconds(1) == pace.seconds(100) == 0.5
    read(pace, clock, 11, 1.5)
    assert pace.seconds(21) == pytest.approx(2.5)
    stuck = pace.begin()
    clock.now += 4.0
    assert pace.seconds(21) == 4.0  # one that does not end makes the next ones late too
    clock.now += fetch_pace.FORGET_S
    pace.end(stuck, 11)
    assert pace.seconds(21) == 4.0 + fetch_pace.FORGET_S
    clock.now += fetch_pace.FORGET_S + 1
    assert pace.seconds(21) == 0
    lost = pace.begin()
    clock.now += fetch_pace.LOST_S + 1
    assert pace.seconds(21) == 0  # what never ends keeps nobody away for ever
    assert pace.begin() > lost and pace._under_way == [clock.now]
    pace.end(lost, 11)
    # a line through both begins below zero
    assert line_at(1, [(1, 0.0), (3, 4.0)]) == pytest.approx(1.0)
    assert line_at(0, [(1, 0.0), (3, 4.0)]) == 0 and line_at(9, [(1, 4.0), (3, 0.0)]) == 2.0  # fmt: skip


def test_what_is_read_is_there_soonest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks in memory, two more in a slow place, one in memory again; a block is computed in a second."""
    clock = Clock()
    monkeypatch.setattr(fetch_pace, "time", clock)
    near, far = HostBlocks(100), HostBlocks(100)
    far.name = "far"
    tiers = TieredBlocks([near, far])
    keys = [bytes([n]) for n in range(5)]
    for n, key in enumerate(keys):
        (far if n in (2, 3) else near).store(key, b"x")
    assert tiers.gainful(keys, lambda blocks: math.inf) == 5
    far_pace = tiers._paces["far"]
    read(far_pace, clock, 2, 2.9)
    assert tiers.gainful(keys, float) == 5  # the last block makes up for it
    read(far_pace, clock, 2, 3.3)
    assert tiers.gainful(keys, float) == 2
    assert tiers.gainful(keys[2:], float) == 0 and tiers.gainful([b"?"], float) == 0
    tiers.close()


class LeavingBlocks(HostBlocks):
    """Blocks of an engine that leaves when they are read."""

    name = "engines"
    way = ""

    def fetch(self, keys: Sequence[bytes]) -> Future[list[Contents]]:
        if self.way == "refused":
            raise RuntimeError("cannot schedule new futures after shutdown")
        reading = Future[list[Contents]]()
        if self.way == "cancelled":  # before it has begun: then wait() does not see it
            reading.cancel()
        return reading


@pytest.mark.parametrize("way", ["cancelled", "stalled", "refused"])
def test_a_place_that_leaves_ends_the_reading(way: str, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(block_source, "READ_S", 0.01)
    near, leaving, files = HostBlocks(100), LeavingBlocks(100), HostBlocks(100)
    files.name, leaving.way = "files", way
    tiers, alone = TieredBlocks([near, leaving, files]), TieredBlocks([leaving])
    for place in (leaving, files):
        place.store(b"k", b"x")
    if way == "refused":
        with pytest.raises(RuntimeError, match="after shutdown"):
            tiers.fetch([b"k"]).result(5)
        with pytest.raises(RuntimeError, match="after shutdown"):
            alone.fetch([b"k"])
        assert not alone._paces["engines"]._under_way
    else:
        assert tiers.fetch([b"k"]).result(5) == [b"x"]  # of the next place that has it
    assert not tiers._paces["engines"]._under_way
    assert tiers.usages()[1].refused == 1


def test_an_engine_that_has_left_gives_no_blocks() -> None:
    def dial(*_: object) -> None:
        raise OSError

    channel: Any = SimpleNamespace(dial=dial)
    peer = BlockPeer(channel, ("127.0.0.1", 9))
    peer.close()
    assert peer.fetch([b"k"]).result(1) == []


class SlowBlocks(HostBlocks):
    """Blocks whose reading takes a twentieth of a second, whatever their number."""

    def fetch(self, keys: Sequence[bytes]) -> Future[list[Contents]]:
        time.sleep(0.05)
        return super().fetch(keys)


def test_a_text_is_computed_where_reading_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(outside_cache, "LEAST_S", 60.0)
    monkeypatch.setattr(fetch_pace, "FORGET_S", 600.0)
    model, slow = build("softmax", torch.float64), SlowBlocks(1 << 20)
    expected = write(Engine(model), PROMPTS[4]).written
    write(engine_with(model, slow)[0], PROMPTS[4])
    tiers = TieredBlocks([slow])

    def fetched(token_seconds: float) -> int:
        engine, cache = engine_with(model, tiers)
        rates = [0.0, token_seconds, 0.0, 0.0, 0.0, 0.0]
        watch: Any = SimpleNamespace(rates=rates, begin=lambda step: None)
        engine.watch = watch
        assert write(engine, PROMPTS[4]).written == expected
        return cache.fetched

    # 32 tokens of its prompt are in blocks
    assert [fetched(s) for s in (1e-3, 1e-3, 1e3, 1e-3)] == [8, 0, 8, 0]
    monkeypatch.setattr(fetch_pace, "FORGET_S", -1.0)
    assert fetched(1e-3) == 8
    tiers.close()
