"""Blocks kept in host memory and files: the tokens of one request alone, and never a block that is not right."""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.generate.test_adapters import adapters
from tests.generate.test_many import HOW, PROMPTS, build
from weft.errors import UsageError
from weft.generate import block_files
from weft.generate.block_channel import BLOCKS
from weft.generate.block_contents import bytes_of
from weft.generate.block_files import BlockFiles
from weft.generate.block_source import BlockSource, HostBlocks, TieredBlocks
from weft.generate.engine import Engine
from weft.generate.outside_cache import (
    OutsideCache,
    cache_name,
    join_memories,
    keep_blocks,
)
from weft.generate.request import Generation
from weft.generate.sampling import GREEDY, Sampling
from weft.models.transformer import Transformer
from weft.net.endpoint import Endpoint
from weft.net.wire import SealedConnection

NEW, SIZE = 10, 4


def name_of(model: Transformer) -> str:
    """A name that differs where weights do."""
    return f"{sum(float(p.detach().double().sum()) for p in model.parameters())}"


def engine_with(
    model: Transformer, source: BlockSource, seconds: float = 60, **settings: Any
) -> tuple[Engine, OutsideCache]:
    engine = Engine(model, **{"size": SIZE} | settings)
    return engine, OutsideCache(engine, source, name_of(model), seconds)


def write(
    engine: Engine, prompt: list[int], how: Sampling = GREEDY, **more: Any
) -> Generation:
    (one,) = engine.submit(prompt, NEW, how, top=1, **more)
    engine.run()
    return one


def said(one: Generation) -> list[Any]:
    return [round(p, 9) for p, _ in one.log_probabilities]


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "kind", ["softmax", "windows", "experts", "latent", "retention", "hybrid"]
)
def test_what_one_engine_computed_another_finds(kind: str, tmp_path: Path) -> None:
    """In host memory, in files, and after a new start; drawn and greedy, beside requests that are new."""
    model = build(kind, torch.float64)
    single = [write(Engine(model), PROMPTS[i], HOW[i]) for i in range(len(PROMPTS))]
    memory, warned = HostBlocks(1 << 20), list[str]()
    first, _ = engine_with(model, memory)
    alone = [write(first, PROMPTS[i], HOW[i]) for i in range(len(PROMPTS))]
    assert [one.written for one in alone] == [one.written for one in single]
    files = BlockFiles(tmp_path, "model", 1 << 30, warned.append)
    second, cache = engine_with(model, TieredBlocks([memory, files]), budget=9)
    both = [
        second.submit(p, NEW, how, top=1)[0]
        for p, how in zip(PROMPTS, HOW, strict=True)
    ]
    second.run()
    assert [one.written for one in both] == [one.written for one in single]
    assert [said(one) for one in both] == [said(one) for one in single]
    # prompts of 33, 22 and 20 tokens, of which one is computed in any case
    assert [one.hits for one in both][4] == 32 and cache.fetched >= 8 + 5
    write(second, [*PROMPTS[4][::-1]])
    second.close()
    later = BlockFiles(tmp_path, "model", 1 << 30, warned.append)
    third, cache = engine_with(model, later)
    again = write(third, [*PROMPTS[4][::-1]])
    assert again.written == write(Engine(model), [*PROMPTS[4][::-1]]).written
    assert again.hits == 32 and cache.fetched == 8 and not warned
    third.close()
    assert not third.scheduler.pool.owners


def test_a_turn_finds_what_the_answer_before_it_wrote() -> None:
    model = build("softmax", torch.float64)
    memory = HostBlocks(1 << 20)
    first, _ = engine_with(model, memory)
    one = write(first, PROMPTS[1])
    second, _ = engine_with(model, memory)
    ids = [*one.ids, 3, 4]
    turn = write(second, ids)
    # the last written token is not computed
    assert turn.hits == (len(one.ids) - 1) // SIZE * SIZE
    assert turn.written == write(Engine(model), ids).written


def test_memory_forgets_what_was_used_longest_ago() -> None:
    memory = HostBlocks(30)
    for number in range(3):
        memory.store(bytes([number]), bytes(10))
    assert memory.find([b"\0", b"\1", b"\2", b"\3"]) == 3 and memory.bytes == 30
    assert len(memory.fetch([b"\0"]).result()) == 1
    memory.store(b"\3", bytes(10))
    assert [memory.find([bytes([n])]) for n in range(4)] == [1, 0, 1, 1]
    memory.store(b"\4", bytes(31))
    assert not memory.find([b"\4"]) and memory.bytes == 30
    # the end of a text goes before its beginning
    memory.fetch([b"\0", b"\2", b"\3"])
    memory.store(b"\5", bytes(10))
    assert memory.find([b"\0", b"\2", b"\3"]) == 2


def test_what_each_source_gives_takes_and_refuses_is_counted(tmp_path: Path) -> None:
    """Blocks that only files have; a memory that is too small for any; files that are damaged."""
    model, warned = build("softmax", torch.float64), list[str]()
    for turn in range(3):
        memory = HostBlocks(1 << 20 if turn == 1 else 10)
        if turn == 2:
            for damaged in files_in(tmp_path):
                damaged.write_bytes(damaged.read_bytes()[:-1])
        files = BlockFiles(tmp_path, "m", 1 << 30, warned.append)
        engine, cache = engine_with(model, TieredBlocks([memory, files]))
        write(engine, PROMPTS[4])
        engine.close()
        looked, (host, kept) = cache.usage()
        size = bytes_of(engine.block_form(), SIZE)
        assert looked == 8 and host.name == "host" and kept.name == "files"
        assert host.fetched == 0 and kept.fetched_bytes == kept.fetched * size
        assert kept.stored_bytes == kept.stored * size
        if turn == 0:  # of 42 computed tokens
            assert (kept.fetched, kept.stored, kept.refused) == (0, 10, 0)
            assert (host.stored, host.refused) == (0, 10)
        elif turn == 1:
            assert (kept.fetched, kept.stored, kept.refused) == (8, 0, 0)
            assert (host.stored, host.stored_bytes, host.refused) == (8, 8 * size, 0)
        else:
            # the first one ends what can be fetched, and is computed and stored again
            assert (kept.fetched, kept.stored, kept.refused) == (0, 1, 8)
    assert len(warned) == 1


def test_no_block_of_other_weights_adapters_tenants_or_sizes_is_used(
    tmp_path: Path,
) -> None:
    """All kept in one place, under the keys that engines ask for."""
    model, other = build("softmax", torch.float64), build("softmax", torch.float64)
    for p in other.parameters():
        p.data *= 1.1
    known = adapters(tmp_path / "0", model, [2, 2])
    memory = HostBlocks(1 << 30)
    first, _ = engine_with(model, memory, tokens=4000)
    first.add_adapter("a", known["a0"])
    for more in ({}, {"adapter": "a"}, {"tenant": "t"}):
        write(first, PROMPTS[4], **more)
    engine, cache = engine_with(other, memory)
    assert write(engine, PROMPTS[4]).written == write(Engine(other), PROMPTS[4]).written
    # another adapter of the same name, after a new start
    second, of_second = engine_with(model, memory, tokens=4000)
    second.add_adapter("a", known["a1"])
    plain = Engine(model, tokens=4000)
    plain.add_adapter("a", known["a1"])
    one = write(second, PROMPTS[4], adapter="a")
    assert one.written == write(plain, PROMPTS[4], adapter="a").written
    assert not one.hits and not of_second.fetched and not cache.fetched
    assert not write(second, PROMPTS[4], tenant="u").hits
    assert write(second, PROMPTS[4], tenant="t").hits == 32
    # blocks of other sizes have other names
    wide = Engine(model, size=8)
    assert cache_name(wide, "m") != cache_name(first, "m") != cache_name(first, "n")
    of_wide = OutsideCache(wide, memory, name_of(model))
    assert write(wide, PROMPTS[4]).written == write(Engine(model), PROMPTS[4]).written
    assert not of_wide.fetched


def test_blocks_of_other_models_are_kept_by_the_hash_of_their_weights() -> None:
    """A fine-tune of the base that comes back under its name; another one of that name; one without a hash."""
    base, tuned, other = (build("softmax", torch.float64) for _ in range(3))
    for model, factor in ((tuned, 1.1), (other, 1.2)):
        for p in model.parameters():
            p.data *= factor
    memory = HostBlocks(1 << 30)
    fetched = []
    cases = (tuned, b"1"), (tuned, b"1"), (other, b"2"), (other, b"")
    for model, digest in cases:
        engine, cache = engine_with(base, memory)
        engine.add_model("m", model, digest)
        text = write(engine, PROMPTS[4], adapter="m")
        assert text.written == write(Engine(model), PROMPTS[4]).written
        engine.remove_model("m")
        assert "m" not in engine.adapter_digests
        fetched.append(cache.fetched)
    assert fetched == [0, 8, 0, 0]
    plain, cache = engine_with(base, memory)
    assert write(plain, PROMPTS[4]).written == write(Engine(base), PROMPTS[4]).written
    assert not cache.fetched


def test_new_weights_use_nothing_that_is_kept_and_keep_nothing() -> None:
    model, memory = build("softmax", torch.float64), HostBlocks(1 << 30)
    engine, cache = engine_with(model, memory)
    write(engine, PROMPTS[4])
    kept = memory.bytes
    for p in model.parameters():
        p.data *= 1.1
    engine.scheduler.renew()
    assert write(engine, PROMPTS[4]).written == write(Engine(model), PROMPTS[4]).written
    write(engine, PROMPTS[4][::-1])
    assert memory.bytes == kept and not cache.fetched


def test_blocks_of_new_weights_are_kept_under_their_fingerprint() -> None:
    """Engines with the same new weights share them; another fingerprint, or none, finds nothing."""
    model, memory = build("softmax", torch.float64), HostBlocks(1 << 30)
    engine, cache = engine_with(model, memory)
    write(engine, PROMPTS[4])
    for p in model.parameters():
        p.data *= 1.1
    engine.weights_changed(1, "b")
    assert write(engine, PROMPTS[4]).written == write(Engine(model), PROMPTS[4]).written
    assert not cache.fetched
    for version, fingerprint, finds in (
        (1, "b", True),
        (1, "c", False),
        (1, "", False),
        (2, "b", False),
    ):
        like, of_like = engine_with(model, memory)
        like.weights_changed(version, fingerprint)
        assert write(like, PROMPTS[4]).written == write(engine, PROMPTS[4]).written
        assert bool(of_like.fetched) == finds, (version, fingerprint)


def test_files_that_are_not_right_are_named_once_and_computed_again(
    tmp_path: Path,
) -> None:
    """Cut, changed, empty, another block's, and one that is a folder."""
    model = build("softmax", torch.float64)
    single, drawn = write(Engine(model), PROMPTS[4]), random.Random(3)
    for how in range(5):
        folder, warned = tmp_path / str(how), list[str]()
        source = BlockFiles(folder, "m", 1 << 30, warned.append)
        engine, _ = engine_with(model, source)
        write(engine, PROMPTS[4])
        engine.close()
        paths = files_in(folder)
        assert len(paths) == 10 and not warned
        for path in paths[:3] + drawn.sample(paths[3:], 4):
            raw = path.read_bytes()
            changed = bytearray(raw)
            changed[-5] ^= 1
            if how == 4:
                path.unlink()
                path.mkdir()
            else:
                other = paths[-1 if path != paths[-1] else 0].read_bytes()
                path.write_bytes([raw[:-9], bytes(changed), b"", other][how])
        for _ in range(2):
            source = BlockFiles(folder, "m", 1 << 30, warned.append)
            engine, cache = engine_with(model, source)
            one = write(engine, PROMPTS[4])
            assert one.written == single.written and said(one) == said(single)
            assert cache.fetched < 8 or how < 4
            engine.close()
        what = "cannot be read (Is a directory)" if how == 4 else "is damaged or alien"
        assert what in warned[0] and len(warned) <= 2, warned
        # what was damaged is there again
        assert len(files_in(folder)) == 10 or how == 4


def test_a_full_disk_costs_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, warned = build("softmax", torch.float64), list[str]()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(block_files.os, "replace", full)
    engine, _ = engine_with(model, BlockFiles(tmp_path, "m", 1 << 30, warned.append))
    for prompt in PROMPTS[1:5]:
        assert write(engine, prompt).written == write(Engine(model), prompt).written
    engine.close()
    assert warned == [
        f"{tmp_path} takes no more cache blocks (No space left on device); it is tried again every 60 s"
    ]
    assert not files_in(tmp_path)
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot be made: .*; give another folder"):
        BlockFiles(tmp_path / "file", "m", 1, warned.append)


def test_the_files_that_were_read_longest_ago_are_removed(tmp_path: Path) -> None:
    """Also those of other models, and parts that a crash has left; other people's files stay."""
    size = block_files.HEADER + 100
    old = tmp_path / "other" / "ab" / f"ab{'0' * 30}.block"
    old.parent.mkdir(parents=True)
    old.write_bytes(bytes(size))
    os.utime(old, (1, 1))
    left, theirs = tmp_path / "other" / "ab" / "x.part", tmp_path / "notes.txt"
    left.write_bytes(b"1")
    os.utime(left, (1, 1))
    theirs.write_bytes(bytes(10_000))
    files = BlockFiles(tmp_path, "m", 10 * size, print)
    keys = [bytes([n] * 16) for n in range(12)]
    for key in keys[:9]:
        files.store(key, bytes(100))
    files.close()
    assert old.exists() and not left.exists()
    files = BlockFiles(tmp_path, "m", 10 * size, print)
    for number, key in enumerate(keys[:9]):
        os.utime(files._path(key), (100 + number, 100 + number))
    assert len(files.fetch(keys[:1]).result()) == 1
    for key in keys[9:]:
        files.store(key, bytes(100))
    files.close()
    there = [Path(files._path(key)).exists() for key in keys]
    assert not old.exists() and theirs.exists()
    assert there[0] and not there[1] and there[-1] and 8 <= sum(there) <= 10


def test_engines_share_a_folder_while_both_write(tmp_path: Path) -> None:
    """Two sources of one folder, as of two processes, and six threads of requests in turn."""
    model, warned = build("softmax", torch.float64), list[str]()
    prompts = [[(i * j + 1) % 31 for i in range(21)] for j in range(1, 7)]
    single = [write(Engine(model), prompt).written for prompt in prompts]
    engines = [
        engine_with(
            build("softmax", torch.float64),
            BlockFiles(tmp_path, "m", 1 << 30, warned.append),
        )
        for _ in range(2)
    ]

    def work(engine: Engine, order: list[int]) -> None:
        texts[id(engine)] = {i: write(engine, prompts[i]).written for i in order}

    texts: dict[int, dict[int, list[int]]] = {}
    threads = [
        threading.Thread(target=work, args=(engine, order))
        for (engine, _), order in zip(
            engines, (list(range(6)), list(range(5, -1, -1))), strict=True
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for engine, _ in engines:
        assert [texts[id(engine)][i] for i in range(6)] == single
        engine.close()
    assert not warned and not list(tmp_path.rglob("*.part"))
    third, cache = engine_with(model, BlockFiles(tmp_path, "m", 1 << 30, warned.append))
    assert [write(third, prompt).written for prompt in prompts] == single
    assert cache.fetched == 6 * 5


class SlowBlocks(HostBlocks):
    """Gives blocks only when the test lets it."""

    def __init__(self) -> None:
        super().__init__(1 << 30)
        self.asked: list[tuple[list[bytes], Future[Any]]] = []

    def fetch(self, keys: Any) -> Future[Any]:
        self.asked.append((list(keys), Future()))
        return self.asked[-1][1]

    def give(self, count: int | None = None) -> None:
        for keys, future in self.asked:
            future.set_result(HostBlocks.fetch(self, keys).result()[:count])
        self.asked = []


def test_others_compute_while_a_request_waits_for_its_blocks() -> None:
    model, slow = build("softmax", torch.float64), SlowBlocks()
    engine, _ = engine_with(model, slow)
    write(engine, PROMPTS[4])
    single = {i: write(Engine(model), PROMPTS[i]).written for i in (2, 4)}
    for count, hits in ((None, 32), (3, 12), (0, 0)):
        engine, cache = engine_with(model, slow)
        (waits,) = engine.submit(PROMPTS[4], NEW, GREEDY)
        (goes,) = engine.submit(PROMPTS[2], NEW, GREEDY, tenant=str(count))
        for _ in range(5):
            engine.step()
        assert not waits.ready and not waits.written and len(goes.written) == 5
        slow.give(count)
        engine.run()
        assert waits.written == single[4] and goes.written == single[2]
        assert waits.hits == hits and not cache.late
    # nothing comes: after the limit it computes
    engine, cache = engine_with(model, slow, seconds=0.05)
    assert write(engine, PROMPTS[4]).written == single[4]
    assert cache.late == 1 and slow.asked[-1][1].cancelled()
    # cancelled and preempted while it waits
    slow.asked = []
    engine, cache = engine_with(model, slow)
    (gone,), (back,) = (engine.submit(PROMPTS[4], NEW, GREEDY) for _ in range(2))
    engine.step()
    engine.cancel(gone)
    engine.scheduler.add(back)
    slow.give()
    while not back.finished:
        engine.step()
        slow.give()
    assert back.written == single[4] and not gone.written
    assert not engine.scheduler.pool.owners


class BrokenBlocks(HostBlocks):
    def fetch(self, keys: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(ValueError("nothing works"))
        return future


def test_a_source_that_fails_is_named_once() -> None:
    model, warned, broken = (
        build("softmax", torch.float64),
        list[str](),
        BrokenBlocks(1 << 30),
    )
    write(engine_with(model, broken)[0], PROMPTS[4])
    engine = Engine(model, size=SIZE)
    OutsideCache(engine, broken, name_of(model), warn=warned.append)
    for prompt in (PROMPTS[4], [*PROMPTS[4], 2]):
        assert write(engine, prompt).written == write(Engine(model), prompt).written
    assert warned == [
        "kept cache blocks cannot be used (nothing works); texts are computed"
    ]


def until(come: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not come():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def test_engines_read_each_others_host_memory() -> None:
    """Over real endpoints: what one computed, the other fetches; then the one is lost, and nothing else is."""
    model = build("softmax", torch.float64)
    endpoints = [Endpoint("127.0.0.1") for _ in range(2)]
    engines, peers = [], []
    for endpoint in endpoints:
        engine = Engine(model, size=SIZE)
        cache = keep_blocks(engine, "model", 1 << 30, None, 0, print)
        joined = join_memories(cache, endpoint, "secret")
        assert joined is not None
        engines.append((engine, cache))
        peers.append(joined)
    for own, other in ((0, 1), (1, 0)):
        peers[own].meet([endpoints[other].address])
    (first, _), (second, cache) = engines
    single = [write(Engine(model), PROMPTS[i]) for i in (2, 4)]
    assert [write(first, PROMPTS[i]).written for i in (2, 4)] == [
        one.written for one in single
    ]
    (peer,) = peers[1].peers.values()
    until(lambda: len(peer.keys) >= 15)
    one = write(second, PROMPTS[4])
    assert one.written == single[1].written and one.hits == 32 and cache.fetched == 8
    assert said(one) == said(single[1])
    # what it has forgotten meanwhile is computed
    for source in first.outside.source.sources[:1]:  # type: ignore[union-attr]
        source.close()
    one = write(second, PROMPTS[2])
    assert one.written == single[0].written and not one.hits
    until(lambda: not peer.keys)
    write(first, [*PROMPTS[4], 5, 6])
    until(lambda: peer.keys)
    # it is gone, and the other one has not noticed yet
    known = set(peer.keys)
    endpoints[0].close()
    peer.keys = known
    longer = [*PROMPTS[4], 5, 6, 1, 2]
    assert write(second, longer).written == write(Engine(model), longer).written
    for engine, _ in engines:
        engine.close()
    endpoints[1].close()
    assert not peers[1].peers


def test_a_peer_that_says_nonsense_is_not_believed() -> None:
    def nonsense(connection: SealedConnection) -> None:
        with suppress(OSError):
            while connection.receive().head:
                connection.send({"added": 16, "sizes": [7, 9]}, [memoryview(bytes(16))])

    server, client = Endpoint("127.0.0.1"), Endpoint("127.0.0.1")
    server.open(BLOCKS, "secret", nonsense)
    model = build("softmax", torch.float64)
    engine = Engine(model, size=SIZE)
    cache = keep_blocks(engine, "model", 1 << 30, None, 0, print)
    peers = join_memories(cache, client, "secret")
    assert peers is not None
    peers.meet([server.address])
    (peer,) = peers.peers.values()
    until(lambda: peer.keys)

    class Every(set[bytes]):
        def __contains__(self, key: object) -> bool:
            return True

    peer.keys = Every()
    assert write(engine, PROMPTS[4]).written == write(Engine(model), PROMPTS[4]).written
    assert not cache.fetched
    engine.close()
    server.close()
    client.close()
