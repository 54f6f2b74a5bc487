"""Keys in files of other processes: texts get the tokens that they get alone, and the cache stays small."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from tests.generate.test_adapters import write
from tests.generate.test_many import build
from weft.checkpoint.convert.peft import read_adapter
from weft.errors import UsageError, WeftError
from weft.generate.block_contents import LayerPart
from weft.generate.engine import Engine
from weft.generate.key_file import KeyFile, layout_of
from weft.generate.key_owner import KeyAttention, KeyStretch, RestingQuery, serve_keys
from weft.generate.keys_at_rest import (
    KeysAtRest,
    RestingKeys,
    check_rate,
    hold_adapters,
    rest_keys,
)
from weft.generate.lookup import Lookup
from weft.generate.outside_cache import keep_blocks
from weft.generate.request import Generation
from weft.generate.sampling import GREEDY, Sampling
from weft.models.attention import attend_forward
from weft.models.segments import Segment

T = torch.Tensor
#: A text of several runs and extents; a run of these models is 64 tokens.
LONG = [(7 * i + i // 5) % 31 for i in range(300)]


class ThreadOwner:
    """A thread in place of an owner's process."""

    pid = 0

    def __init__(self, pipe: Connection) -> None:
        self.connection = Connection(os.dup(pipe.fileno()))
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with self.connection:
            serve_keys(self.connection)

    def poll(self) -> int | None:
        return None if self.thread.is_alive() else -9

    def kill(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        self.thread.join(timeout)
        return -9


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.generate.key_file.RUN_TOKENS", 16)
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    assert threads


def resting(kind: str, folder: Path, words: str = "cached=0", **settings: object
) -> tuple[Engine, KeysAtRest, list[str]]:  # fmt: skip
    said: list[str] = []
    engine = Engine(build(kind, torch.float64), budget=40, size=4, **settings)  # type: ignore[arg-type]
    keys = RestingKeys.parse(f"{folder / 'a'},{folder / 'b'},{words}")
    return engine, rest_keys(engine, keys, 2, 600, said.append, start=ThreadOwner), said


def written_alone(kind: str, prompt: list[int], how: Sampling) -> Generation:
    engine = Engine(build(kind, torch.float64), budget=10_000)
    (alone,) = engine.submit(prompt, 24, how, top=3)
    engine.run()
    return alone


@pytest.mark.sampled(2)
@pytest.mark.parametrize("words", ["cached=0", "cached=9", "cached=0.0003"])
@pytest.mark.parametrize("kind", ["softmax", "windows", "latent"])
def test_texts_are_the_same_with_their_keys_in_files(
    kind: str, words: str, tmp_path: Path
) -> None:
    """Prompts in chunks, two texts of one prompt, another one, drafts; past the page cache, through it, or both."""
    engine, rest, _ = resting(kind, tmp_path, words, drafter=Lookup(least=1))
    how = Sampling(0.8, seed=3)
    texts = engine.submit(LONG, 24, how, n=2, top=3)
    texts += engine.submit(LONG[100:240], 24, GREEDY, top=3)
    most, blocks = 0, engine.scheduler.pool.blocks
    while engine.step() or engine.scheduler.running or engine.scheduler.waiting:
        most = max(most, len(engine.scheduler.pool.owners))
    expected = [
        written_alone(kind, LONG, how),
        written_alone(kind, LONG, Sampling(0.8, seed=4)),
        written_alone(kind, LONG[100:240], GREEDY),
    ]
    assert [g.written for g in texts] == [g.written for g in expected]
    for text, alone in zip(texts, expected, strict=True):
        pairs = zip(text.log_probabilities, alone.log_probabilities, strict=True)
        assert all(abs(a[0] - b[0]) < 1e-10 for a, b in pairs)
    assert most <= blocks < sum(len(g.ids) for g in texts) // 4
    used = [owner for owner in rest.owners if owner.asks and owner.sent]
    assert len(used) == 2 or kind == "latent"  # whose run is longer than these texts
    counts = [owner.counts() for owner in used]
    if words == "cached=0":
        assert all(each["read"] and each["written"] and not each["cached"] for each in counts)  # fmt: skip
    if words == "cached=9":
        assert all(not each["calls"] and each["cached"] for each in counts)
    rest.borrower.settle()
    assert not engine.reader.pages[0].lent
    assert [owner.room() for owner in rest.owners] == [
        owner.extents * 4 * owner.layout.blocks for owner in rest.owners
    ]
    rest.close()


def small_file(folder: Path, cached: int = 0) -> KeyFile:
    """Two layers with two key heads of 8 elements in float64; a run is 64 tokens."""
    layers = [LayerPart(i, torch.float64, 2, (0, 1), (8,)) for i in range(2)]
    layout = layout_of(layers, 4)
    assert layout.tokens == 64 and layout.piece(0) == 4096
    return KeyFile(folder, layout, 3, cached)


def test_reads_are_large_counted_and_run_ahead(tmp_path: Path) -> None:
    """A full extent of a layer is one read; the next layer's is under way before it is asked for, and is not stale."""
    file, torch_random = small_file(tmp_path), torch.Generator().manual_seed(0)
    layout = file.layout
    rows = torch.rand(
        4, 16, layout.block_bytes // 8, dtype=torch.float64, generator=torch_random
    )
    contents = rows.view(torch.uint8)
    for run in range(4):
        file.write(1, run, contents[run])
    assert file.file.bytes["written"] == contents.nbytes
    attention = KeyAttention(file)
    query = RestingQuery(0, 1, 400, [KeyStretch(1, 0, 0, 256)])
    q = torch.rand(1, 4, 8, dtype=torch.float64, generator=torch_random)
    values = rows.view(
        64, 2, 2, 4, 2, 8
    )  # [blocks, layers, parts, tokens, heads, width]
    for layer in (0, 1, 0):
        out, lse = attention.attend(layer, [query], q, 0)
        keys, held = values[:, layer].permute(1, 0, 2, 3, 4).flatten(1, 2)
        expected = attend_forward(q, keys, held, [Segment(0, 1, 0, 256, False)])
        assert torch.allclose(out, expected[0], rtol=0, atol=1e-12)
        assert torch.allclose(lse, expected[1], rtol=0, atol=1e-12)
    # three were asked for, and as many ran ahead as there are buffers
    ahead = len(file._pending)
    assert ahead and file.calls == 3 + ahead
    assert file.file.bytes["read"] == file.calls * 4 * layout.rows(0) * layout.piece(0)
    assert torch.equal(file.fetch(1, 2, 5), contents[2, :5])
    file.write(1, 3, contents[0])  # what was read ahead of it is not used
    assert torch.equal(file.fetch(1, 3, 16), contents[0])


def test_a_score_far_from_the_fixed_maximum_is_computed_again(tmp_path: Path) -> None:
    """The first extent sets the maximum; a key of the second overflows beside it."""
    file, layout = small_file(tmp_path, 3), small_file(tmp_path).layout
    rows = torch.zeros(2, 64, 2, 2, 4, 2, 8, dtype=torch.float64)
    rows[1, 3, :, 0] = 3e3
    rows[:, :, :, 1] = torch.rand(2, 64, 2, 4, 2, 8, dtype=torch.float64)
    for extent in range(2):
        for run in range(4):
            part = rows[extent, 16 * run : 16 * run + 16].contiguous().flatten(1)
            file.write(extent, run, part.view(torch.uint8))
    attention = KeyAttention(file)
    query = RestingQuery(
        0, 1, 600, [KeyStretch(0, 0, 0, 256), KeyStretch(1, 0, 256, 512)]
    )
    q = torch.ones(1, 4, 8, dtype=torch.float64)
    out, lse = attention.attend(0, [query], q, 0)
    keys, values = rows[:, :, 0].permute(2, 0, 1, 3, 4, 5).flatten(1, 3)
    expected = attend_forward(q, keys, values, [Segment(0, 1, 0, 512, False)])
    assert attention.again == 1 and layout.runs == 4
    assert torch.allclose(out, expected[0], rtol=0, atol=1e-10)
    assert torch.allclose(lse, expected[1], rtol=0, atol=1e-10)


def test_a_disk_too_slow_is_refused_with_numbers(tmp_path: Path) -> None:
    engine, rest, _ = resting("softmax", tmp_path)
    check_rate(rest.owners, rest.layout, 100, 10_000, 1e9)  # all is read from memory
    rest.owners[0].rate = 5e4
    with pytest.raises(
        UsageError, match=r"reads 0.00 GB/s, .* 10,000 tokens reads .* tokens/s, not 8"
    ):
        check_rate(rest.owners, rest.layout, 0, 10_000, 8)
    check_rate(rest.owners, rest.layout, 0, 10_000, 1e-5)
    rest.close()
    assert engine.scheduler.borrowable


def test_a_rate_that_cannot_be_checked_is_said(tmp_path: Path) -> None:
    engine, said = Engine(build("softmax", torch.float64), size=4), list[str]()
    keys = RestingKeys((tmp_path,), size=1e-3, cached=0, rate=5)
    rest_keys(engine, keys, 1, 0, said.append, start=ThreadOwner).close()
    assert "rate=5 is not checked" in said[0]


def test_a_process_that_is_lost_while_a_step_is_planned(tmp_path: Path) -> None:
    """Texts may be in that step already: they keep their blocks until the process is started again between steps."""
    engine, rest, said = resting("softmax", tmp_path)
    prompts = LONG[:150], LONG[50:180]
    texts = [engine.submit(ids, 24, GREEDY)[0] for ids in prompts]
    while not all(text.written for text in texts) or not rest.borrower.longest:
        engine.step()
    for owner in rest.owners:
        owner._pipe.close()
    assert not rest.relieve()
    assert engine.scheduler.running == texts and not said
    engine.run()
    assert len(said) == 2 and "is started again" in said[0]
    for text, ids in zip(texts, prompts, strict=True):
        assert text.written == written_alone("softmax", ids, GREEDY).written
    rest.close()


def test_a_text_begins_with_as_many_kept_blocks_as_have_room(tmp_path: Path) -> None:
    """The host keeps more blocks of it than the cache has."""
    engine, rest, _ = resting("softmax", tmp_path)
    engine.scheduler.pool.blocks = 40
    kept = keep_blocks(engine, "w", 10**8, None, 0, print)
    expected = written_alone("softmax", LONG, GREEDY).written
    for _ in range(2):
        text = engine.submit(LONG, 24, GREEDY)[0]
        engine.run()
        assert text.written == expected
    assert text.hits == kept.fetched * 4 > 0
    rest.close()


def test_texts_that_share_a_last_block_in_a_full_cache_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block must be copied before one of them writes to it, and no block is free or can be moved as yet."""
    engine, rest, _ = resting("softmax", tmp_path)
    own_blocks = rest.borrower.own_blocks
    # later they can be, because the cache is too small for even one of the texts
    monkeypatch.setattr(
        rest.borrower,
        "own_blocks",
        lambda request: own_blocks(request) if engine.scheduler.preemptions else [],
    )
    texts = engine.submit(LONG[:30], 6, GREEDY, n=2)
    while len(engine.scheduler.running) < 2:
        engine.step()
    engine.scheduler.pool.blocks = len(engine.scheduler.pool.owners)
    assert not rest.borrower.longest
    engine.run()
    expected = written_alone("softmax", LONG[:30], GREEDY).written[:6]
    assert [text.written for text in texts] == [expected] * 2
    assert engine.scheduler.preemptions
    rest.close()


def test_texts_that_share_blocks_move_them_together(tmp_path: Path) -> None:
    """What they share is less than a run, and would keep all that follows in memory."""
    engine, rest, _ = resting("softmax", tmp_path)
    texts = engine.submit(LONG[:44], 160, Sampling(0.8, seed=3), n=3)
    engine.run()
    plain = Engine(build("softmax", torch.float64), budget=10_000)
    alone = plain.submit(LONG[:44], 160, Sampling(0.8, seed=3), n=3)
    plain.run()
    assert [text.written for text in texts] == [text.written for text in alone]
    assert not engine.scheduler.preemptions, "no block could be moved"
    rest.borrower.settle()
    assert not engine.reader.pages[0].lent
    rest.close()


def test_texts_that_fill_no_run_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step would compare every text with every other one."""
    engine, rest, _ = resting("softmax", tmp_path)
    compared, own_blocks = list[int](), rest.borrower.own_blocks
    monkeypatch.setattr(
        rest.borrower,
        "own_blocks",
        lambda text: (compared.append(1), own_blocks(text))[1],
    )
    engine.submit(LONG[:9], 3, GREEDY, n=4)
    engine.run()
    assert not compared
    rest.close()


def test_adapters_have_room_beside_the_newest_blocks(tmp_path: Path) -> None:
    engine, rest, _ = resting("softmax", tmp_path)
    adapter = read_adapter(
        write(tmp_path / "adapter", engine.model, 16, 1), engine.model
    )
    before, pool = engine.scheduler.pool.blocks, engine.scheduler.pool
    engine.add_adapter("a", adapter)
    hold_adapters(engine)
    needed = len(engine.scheduler.adapter_keys["a"])
    assert pool.blocks == before + needed > needed
    pool.blocks = needed + 3
    first = engine.submit(LONG[:50], 30, GREEDY)[0]
    for _ in range(6):
        engine.step()
    # it waits until the adapter fits in
    second = engine.submit(LONG[:30], 3, GREEDY, adapter="a")[0]
    engine.run()
    alone = Engine(engine.model)
    alone.add_adapter("a", adapter)
    expected = alone.submit(LONG[:30], 3, GREEDY, adapter="a")[0]
    alone.run()
    assert first.finished and second.written == expected.written
    pool.blocks = needed
    with pytest.raises(UsageError, match="beside the adapter's"):
        engine.submit(LONG[:30], 3, GREEDY, adapter="a")
    rest.close()


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("", "no folder"), ("s3://a", "no folder"), ("size=3", "names no folder"),
        ("/x,colour=3", "no setting"), ("/x,size=-1", "no setting"), ("/x,rate=fast", "no setting"),
    ],
)  # fmt: skip
def test_words_that_say_nothing(words: str, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        RestingKeys.parse(words)


def test_what_cannot_rest_is_said(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(WeftError, match="it is a file; choose"):
        resting("softmax", tmp_path)
    engine = Engine(build("softmax", torch.float64), size=4)
    with pytest.raises(UsageError, match="below one extent"):
        rest_keys(engine, RestingKeys((tmp_path,), size=1e-9), 1, 0, print)
    for gigabytes in (1e9, 1e30):
        huge = RestingKeys((tmp_path / "b",), size=gigabytes)
        with pytest.raises(WeftError, match=r"no room for .* bytes"):
            rest_keys(engine, huge, 1, 0, print, start=ThreadOwner)
    linear = Engine(build("linear", torch.float64))
    with pytest.raises(UsageError, match="recurrent state"):
        rest_keys(linear, RestingKeys((tmp_path / "b",)), 1, 0, print)


@pytest.mark.soak
def test_a_killed_process_is_named_and_started_again(tmp_path: Path) -> None:
    """Real processes; texts go on with the same tokens, and three losses are an error."""
    said: list[str] = []
    engine = Engine(build("softmax", torch.float64), budget=40, size=4)
    rest = rest_keys(
        engine, RestingKeys.parse(f"{tmp_path},cached=0"), 2, 600, said.append
    )
    (text,) = engine.submit(LONG, 24, GREEDY)
    while len(text.written) < 5:
        engine.step()
    first = rest.owners[0].pid
    os.kill(first, signal.SIGKILL)
    while not text.finished:
        engine.step()
    assert said == [
        f"the process {first} that owns keys in {tmp_path} has ended (exit code -9); "
        "it is started again, and the texts with keys there are computed again"
    ]
    assert text.written == written_alone("softmax", LONG, GREEDY).written
    assert rest.owners[0].counts()["own"] < 1e9
    engine.submit(LONG[1:], 24, GREEDY)
    with pytest.raises(WeftError, match="3 times"):
        for _ in range(2):
            os.kill(rest.owners[0].pid, signal.SIGKILL)
            begun = time.monotonic()
            for _ in range(14):
                engine.step()
            assert time.monotonic() - begun < 60
    rest.close()
