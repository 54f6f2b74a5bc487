"""Object stores, against a real SeaweedFS: the storage contract, saves and loads, and a server that fails."""

from __future__ import annotations

import gc
import http.client
import mmap
import pickle
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from bench.checkpoint_s3 import KEY, SECRET
from tests.checkpoint.test_format import locals_of, state
from weft.checkpoint.address import open_storage
from weft.checkpoint.boxes import ROOT
from weft.checkpoint.load import StoredCheckpoint
from weft.checkpoint.s3 import PART, S3Storage
from weft.checkpoint.save import Saver
from weft.checkpoint.storage import LocalStorage, Storage, StorageError
from weft.checkpoint.store import verify
from weft.errors import UsageError, WeftError

#: Files that want the S3 server: it starts for them once, and stops after them.
TOGETHER = "s3"
BIG = random.Random(0).randbytes(2 * PART + 12_345)


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return open_storage(
        tmp_path / "root"
        if request.param == "local"
        else request.getfixturevalue("bucket")
    )


# --- the contract, of every storage ---


@pytest.mark.sampled(2)
def test_what_is_written_is_read_whole_and_in_parts(storage: Storage) -> None:
    assert storage.write("data/a", [b"head", memoryview(BIG), b"tail"]) == len(BIG) + 8
    whole = b"head" + BIG + b"tail"
    assert storage.read("data/a") == whole
    assert (
        storage.holds("data/a")
        and not storage.holds("data")
        and not storage.holds("data/b")
    )
    for offset, size in ((0, len(whole)), (3, 2 * PART), (PART - 1, 2), (5, 0)):
        buffer = memoryview(bytearray(size))
        storage.read_into("data/a", offset, buffer)
        assert buffer == whole[offset : offset + size]


@dataclass
class Reused:
    """Chunks that all lie in the same memory, which may change as soon as the next is asked for."""

    data: bytes

    def __iter__(self) -> Iterator[memoryview]:
        memory = bytearray(1000)
        for at in range(0, len(self.data), 1000):
            piece = self.data[at : at + 1000]
            memory[: len(piece)] = piece
            yield memoryview(memory)[: len(piece)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [10_000, len(BIG)])
def test_chunks_may_change_when_the_next_is_asked_for(
    storage: Storage, size: int
) -> None:
    assert storage.write("stream", Reused(BIG[:size])) == size
    assert storage.read("stream") == BIG[:size]


def test_odd_values_are_written(storage: Storage) -> None:
    floats = torch.arange(6, dtype=torch.float32).numpy().reshape(2, 3)
    assert storage.write("deep/er/floats", [memoryview(floats)]) == 24
    assert storage.read("deep/er/floats") == floats.tobytes()
    assert storage.write("empty", []) == 0
    assert storage.read("empty") == b""
    assert storage.write("files/a b+c=ü%20~#&.txt", [b"odd"]) == 3
    assert storage.list("files/") == {"files/a b+c=ü%20~#&.txt": 3}
    assert storage.read("files/a b+c=ü%20~#&.txt") == b"odd"


def test_what_is_short_or_missing_is_an_error_that_names_it(storage: Storage) -> None:
    storage.write("short", [b"12345"])
    for offset, size in ((0, 6), (4, 2), (5, 1), (9, 1), (0, 2 * PART)):
        with pytest.raises(StorageError, match=r"cannot read .*short: it is shorter"):
            storage.read_into("short", offset, memoryview(bytearray(size)))
    for call in (
        lambda: storage.read("none/such"),
        lambda: storage.read_into("none/such", 0, memoryview(bytearray(3))),
        lambda: storage.read_into("none/such", 0, memoryview(bytearray(0))),
    ):
        with pytest.raises(StorageError, match=r"cannot read .*none/such: [^\n]+$"):
            call()


def test_names_are_listed_by_how_they_begin_and_deleted(storage: Storage) -> None:
    assert storage.list() == storage.list("data/") == {}
    for name in ("data/a-1", "data/a-2", "data/b", "database", "weft.json"):
        storage.write(name, [name.encode()])
    assert storage.list("data/") == {"data/a-1": 8, "data/a-2": 8, "data/b": 6}
    assert list(storage.list("data/a-")) == ["data/a-1", "data/a-2"]
    assert list(storage.list("data")) == ["data/a-1", "data/a-2", "data/b", "database"]
    storage.delete(["weft.json", "data/a-1", "none/such"])
    storage.delete([])
    assert list(storage.list()) == ["data/a-2", "data/b", "database"]
    storage.delete(storage.list())
    assert storage.list() == {}


def test_nothing_is_overwritten(storage: Storage) -> None:
    storage.write("small", [b"first"])
    storage.write("large", [BIG])
    for name in ("small", "large"):
        for size in (6, len(BIG)):
            with pytest.raises(StorageError, match=f"cannot write .*{name}: .*exists"):
                storage.write(name, [bytes(size)])
        assert not storage.create(name, b"second")
    assert storage.read("small") == b"first" and storage.read("large") == BIG


@pytest.mark.sampled(1)
def test_of_many_that_create_one_wins(storage: Storage) -> None:
    for turn in range(3):
        start = threading.Barrier(16)

        def race(
            number: int, turn: int = turn, start: threading.Barrier = start
        ) -> bool:
            start.wait()
            return storage.create(f"root-{turn}", b"by %d" % number)

        with ThreadPoolExecutor(16) as threads:
            made = list(threads.map(race, range(16)))
        assert sum(made) == 1
        assert storage.read(f"root-{turn}") == b"by %d" % made.index(True)
        assert list(storage.list("root")) == [f"root-{n}" for n in range(turn + 1)]


# --- addresses and credentials ---


def test_addresses() -> None:
    assert open_storage("s3://b/some//pre/fix/") == S3Storage("b", "some/pre/fix")
    assert open_storage(Path("s3://b/p")) == S3Storage("b", "p")
    assert str(open_storage("s3://b")) == str(open_storage("s3://b/")) == "s3://b"
    assert isinstance(open_storage("runs/one"), LocalStorage) and isinstance(
        open_storage(Path("/tmp")), LocalStorage
    )
    for bad in ("gs://b/p", f"s3://{KEY}:{SECRET}@b/p", "s3:///p"):
        with pytest.raises(UsageError) as caught:
            open_storage(bad)
        assert SECRET not in str(caught.value)


def test_without_obstore_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(StorageError, match=r"^s3:// needs .*weft\[s3\]'$"):
        S3Storage("b").read("x")


def test_credentials_are_never_shown(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = "WRONGSECRETxyz"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong)
    store = S3Storage("bucket", "p")
    shown = [str(store), repr(store)]
    for call in (
        lambda: store.read("x"),
        lambda: store.read_into("x", 0, memoryview(bytearray(3))),
        lambda: store.write("x", [b"1"]),
        lambda: store.write("x", [BIG]),
        lambda: store.create("x", b"1"),
        lambda: store.list(),
        lambda: store.delete(["x"]),
    ):
        with pytest.raises(
            StorageError, match=r"s3://bucket/p.*: the server answered 403[^\n]*$"
        ) as caught:
            call()
        assert caught.value.__cause__ is None and caught.value.__context__ is None
        shown.append(str(caught.value))
    assert not any(
        text in line for line in shown for text in (wrong, KEY, "Signature=")
    )
    data = pickle.dumps(store)
    assert wrong.encode() not in data
    assert pickle.loads(data) == store


def test_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.example")
    # goes before the other
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="no credentials; set AWS_ACCESS_KEY_ID"):
        S3Storage("b").read("x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with pytest.raises(
        StorageError, match="cannot read s3://b/x: the endpoint refuses connections"
    ):
        S3Storage("b", patience=0.3).read("x")
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    with pytest.raises(StorageError, match="not encrypted"):
        S3Storage("b").read("x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://{KEY}:{SECRET}@store.example")
    with pytest.raises(
        StorageError, match=r"cannot use .*without credentials"
    ) as caught:
        S3Storage("b").read("x")
    assert SECRET not in str(caught.value)


# --- checkpoints ---


def check(storage: Storage, values: dict[str, torch.Tensor]) -> None:
    checkpoint = StoredCheckpoint(storage)
    verify(checkpoint)
    back = {name: torch.full_like(v, 1) for name, v in values.items()}
    checkpoint.load(locals_of(back))
    assert all(torch.equal(back[name], values[name]) for name in values)


@pytest.fixture
def saver() -> Iterator[Saver]:
    saver = Saver(lambda text: None, timeout=60)
    yield saver
    saver.close()


def test_a_checkpoint_makes_the_round_trip(bucket: str, saver: Saver) -> None:
    store, values = (
        open_storage(bucket),
        state(0) | {"model.large": torch.randn(3000, 2000)},
    )
    saver.save(store, 7, locals_of(values), {"layout": "one"}, {"note.txt": b"hello"})
    saver.finish()
    check(store, values)
    assert StoredCheckpoint(store).meta["step"] == 7
    for name in store.list():
        assert SECRET.encode() not in store.read(
            name
        ) and KEY.encode() not in store.read(name)
    saver.save(store, 7, locals_of(state(1)), {"layout": "one"}, {})
    with pytest.raises(WeftError, match="committed before"):
        saver.finish()
    check(store, values)


# --- a server that fails ---

#: What is to happen to a request: "" (nothing), a status, "drop" (it never arrives), "lost" (its answer does not),
#: "torn" (half of its answer does), "slow".
Fault = Callable[[str, str], str]


class Proxy:
    """Stands between the client and the server, and does to requests what ``fault`` says."""

    def __init__(self, upstream: int) -> None:
        self.fault: Fault = lambda method, path: ""
        self.seen: list[tuple[str, str]] = []
        self.left = 0  # of the requests that :meth:`once` is to spoil
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fault = proxy.fault(self.command, self.path)
                proxy.seen.append((self.command, self.path))
                self.close_connection = fault in ("drop", "lost", "torn")
                if fault == "drop":
                    return
                if fault.isdigit():
                    self.send_response(int(fault))
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                if fault == "slow":
                    time.sleep(0.1)
                there = http.client.HTTPConnection("127.0.0.1", upstream, timeout=60)
                there.putrequest(
                    self.command, self.path, skip_host=True, skip_accept_encoding=True
                )
                for name, value in self.headers.items():
                    there.putheader(name, value)
                there.endheaders(body)
                response = there.getresponse()
                content = response.read()
                there.close()
                if fault == "lost":
                    return
                self.send_response(response.status)
                for name, value in response.getheaders():
                    if name.lower() not in (
                        "content-length",
                        "connection",
                        "transfer-encoding",
                        "date",
                        "server",
                    ):
                        self.send_header(name, value)
                length = (
                    response.getheader("Content-Length")
                    if self.command == "HEAD"
                    else str(len(content))
                )
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                self.wfile.write(
                    content[: len(content) // 2] if fault == "torn" else content
                )

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *_: object) -> None:  # a client that was killed
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(
            target=self.server.serve_forever, args=(0.05,), daemon=True
        ).start()

    def once(self, what: str, method: str, part: str = "", times: int = 1) -> None:
        """Do ``what`` to the first requests of ``method`` with ``part`` in their address."""
        assert self.left == 0, "what was to fail was not asked for"
        self.left, lock = times, threading.Lock()

        def fault(found: str, path: str) -> str:
            with lock:
                if found == method and part in path and self.left:
                    self.left -= 1
                    return what
            return ""

        self.fault = fault


@pytest.fixture
def proxy(server: int, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy = Proxy(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    yield proxy
    proxy.server.shutdown()
    proxy.server.server_close()


def behind(bucket: str, patience: float = 20, timeout: float = 20) -> S3Storage:
    """Storage whose requests the proxy sees."""
    name, _, prefix = bucket.removeprefix("s3://").partition("/")
    return S3Storage(name, prefix, patience=patience, timeout=timeout, pause=0.01)


FAULTS = ["500", "503", "drop", "lost", "torn", "slow"]


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("what", FAULTS)
def test_every_request_may_fail_once(proxy: Proxy, bucket: str, what: str) -> None:
    store = behind(bucket)
    proxy.once(what, "PUT")
    assert store.create("root", b"mine"), "ours, although the answer may have been lost"
    proxy.once(what, "PUT")
    assert not store.create("root", b"another's")
    for number, (method, part) in enumerate(
        (("POST", "uploads"), ("PUT", "partNumber=2"), ("POST", "uploadId"))
    ):
        proxy.once(what, method, part)
        assert store.write(f"large-{number}", [memoryview(BIG)]) == len(BIG)
        proxy.once(what, "GET", "large")
        assert store.read(f"large-{number}") == BIG
    proxy.once(what, "GET", "large", times=2)
    buffer = memoryview(bytearray(len(BIG)))
    store.read_into("large-0", 0, buffer)
    assert buffer == BIG
    proxy.once(what, "GET", "list-type")
    assert len(store.list()) == 4
    proxy.once(what, "POST", "delete")
    store.delete(["large-1", "large-2"])
    assert list(store.list()) == ["large-0", "root"] and proxy.left == 0


@pytest.mark.slow
def test_a_request_that_hangs_is_repeated(proxy: Proxy, bucket: str) -> None:
    store, done = behind(bucket, timeout=1.5), threading.Event()
    first = iter([True])

    def hang(method: str, path: str) -> str:
        if method == "PUT" and next(first, False):
            done.wait(60)
        return ""

    proxy.fault = hang
    assert store.create("root", b"mine")
    done.set()
    assert store.read("root") == b"mine"


@pytest.mark.soak
@pytest.mark.slow
def test_a_server_that_stays_away_is_given_up_on(
    proxy: Proxy, bucket: str, saver: Saver
) -> None:
    store, values = behind(bucket, patience=0.4), state(0)
    for what, cause in (
        ("503", "the server answered 503"),
        ("drop", "the connection broke off"),
    ):
        proxy.fault = lambda method, path, what=what: what  # type: ignore[misc]
        for call in (
            lambda: store.read("x"),
            lambda: store.write("x", [BIG]),
            lambda: store.create("x", b"1"),
            lambda: store.list(),
        ):
            begun = time.monotonic()
            with pytest.raises(
                StorageError, match=rf"^cannot \w+ s3://bucket/.*: {cause}[^\n]*$"
            ):
                call()
            assert time.monotonic() - begun < 30
    proxy.fault = lambda method, path: "503" if method == "PUT" and ROOT in path else ""
    saver.save(store, 1, locals_of(values), {}, {})
    with pytest.raises(WeftError, match=f"{ROOT}: the server answered 503"):
        saver.finish()
    proxy.fault = lambda method, path: ""
    assert not store.list(), "what a save that failed has written is taken away"
    with pytest.raises(WeftError, match="not a checkpoint"):
        check(store, values)


@pytest.mark.slow
def test_the_memory_is_free_again_after_a_failed_upload(
    proxy: Proxy, bucket: str
) -> None:
    """The writer closes its memory then, which fails while anyone has a view of it."""
    proxy.fault = lambda method, path: "503" if "partNumber" in path else ""
    store = behind(bucket, patience=0.5)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with mmap.mmap(-1, len(BIG)) as memory, memoryview(memory) as view:
                try:
                    store.write("x", [b"head", view[:-5]])
                except StorageError as error:
                    assert "503" in str(error)
                else:
                    raise AssertionError
    finally:
        gc.enable()


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_saves_on_a_bad_day_are_right_or_absent(
    proxy: Proxy, bucket: str, saver: Saver, seed: int
) -> None:
    dice, lock = random.Random(seed), threading.Lock()

    def fault(method: str, path: str) -> str:
        with lock:
            return dice.choice(FAULTS) if dice.random() < 0.35 else ""

    committed = 0
    for turn in range(4):
        store = behind(f"{bucket}/{turn}", patience=dice.choice([1, 30]))
        values = state(turn) | {
            "model.large": torch.full((2300, 1000), float(turn + seed))
        }
        proxy.fault = fault
        saver.save(
            store, turn, locals_of(values), {"layout": "one"}, {"note.txt": b"hello"}
        )
        try:
            saver.finish()
            done = True
        except WeftError:
            done = False
        proxy.fault = lambda method, path: ""
        # a commit of which no answer ever arrives counts all the same
        if done or ROOT in store.list():
            proxy.fault = fault
            check(behind(f"{bucket}/{turn}"), values)
            committed += 1
    assert committed


@pytest.mark.slow
def test_a_writer_killed_while_it_uploads_leaves_nothing_to_see(
    proxy: Proxy, bucket: str, saver: Saver
) -> None:
    before, store = behind(f"{bucket}/1"), behind(f"{bucket}/2")
    values = state(0) | {"model.large": torch.randn(5000, 2000)}  # five parts
    saver.save(before, 1, locals_of(values), {}, {})
    saver.finish()
    proxy.seen.clear()
    arrived, killed = threading.Event(), threading.Event()

    def held(method: str, path: str) -> str:
        if "partNumber" in path:
            arrived.set()
            killed.wait(120)
            return "drop"
        return ""

    proxy.fault = held
    saver.save(store, 2, locals_of(values), {}, {})
    assert arrived.wait(120)
    assert saver._writer is not None
    saver._writer.process.kill()
    killed.set()
    with pytest.raises(WeftError, match="died"):
        saver.finish()
    proxy.fault = lambda method, path: ""
    assert not any(
        method == "POST" and "uploadId" in path for method, path in proxy.seen
    )
    assert store.list() == {}
    check(before, values)
    saver.save(store, 2, locals_of(values), {}, {})
    saver.finish()
    check(store, values)
