"""Sources on web servers, on the hub and in object stores: cut, slow, changed, or larger than the cache."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest

from tests.cases import recipe
from weft.cache import DOWNLOADS
from weft.checkpoint.resume_check import other_differences
from weft.checkpoint.run_state import Progress
from weft.curation.data_pipeline import DataPipeline
from weft.curation.data_run import run_pipeline
from weft.data import corpora, remote_files, tokenize_pieces
from weft.data.corpora import read_documents, source_fingerprint
from weft.data.files import select_files
from weft.data.loader import open_data
from weft.data.remote_store import RemoteProblem
from weft.data.source_check import check_sources
from weft.data.tokenizer import load_tokenizer
from weft.data.tokens import open_source
from weft.errors import UsageError, WeftError
from weft.net import http_ranges
from weft.recipe import Data, Source
from weft.techniques.remote_sources.https import WebFolder
from weft.train.setup import prepare


class Web(BaseHTTPRequestHandler):
    """A web server and a hub with files, and with faults that are set by path: a list, one for each request."""

    files: ClassVar[dict[str, bytes]] = {}
    faults: ClassVar[dict[str, list[Any]]] = {}
    asked: ClassVar[list[tuple[str, str, str | None]]] = []
    protocol_version = "HTTP/1.0"

    def do_HEAD(self) -> None:
        self._answer(head=True)

    def do_GET(self) -> None:
        self._answer(head=False)

    def _answer(self, head: bool) -> None:
        path, ranged = self.path, self.headers.get("Range")
        self.asked.append((self.command, path, ranged))
        waiting = [] if head else self.faults.get(path, [])
        fault = waiting.pop(0) if waiting else None
        if isinstance(fault, float):
            time.sleep(fault)
        if callable(fault):
            fault()
        if isinstance(fault, int) and fault >= 400:
            self._send(fault, b"", {})
            return
        if path.startswith("/api/datasets/me/texts/revision/"):
            if self.headers.get("Authorization") != "Bearer hf_mine":
                self._send(401, b"", {})
                return
            names = [
                n.partition("/resolve/abc/")[2]
                for n in self.files
                if "/resolve/abc/" in n
            ]
            siblings = [
                {
                    "rfilename": name,
                    "size": len(self.files[f"/datasets/me/texts/resolve/abc/{name}"]),
                    "blobId": name,
                }
                for name in names
            ]
            self._send(
                200, json.dumps({"sha": "abc", "siblings": siblings}).encode(), {}
            )
            return
        if path not in self.files:
            self._send(404, b"", {})
            return
        data = self.files[path]
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        start = int(ranged.removeprefix("bytes=").split("-")[0]) if ranged else 0
        if ranged:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        body = b"" if head else data[start:]
        cut = isinstance(fault, tuple) and fault[0]
        self._send(
            206 if ranged else 200, body, headers, len(data) - start, cut or None
        )

    def _send(
        self,
        code: int,
        body: bytes,
        headers: dict[str, str],
        length: int | None = None,
        cut: int | None = None,
    ) -> None:
        self.send_response(code)
        for name, value in {
            **headers,
            "Content-Length": str(len(body) if length is None else length),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(body[:cut])

    def log_message(self, *given: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def web(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The address of a folder of the server, with an empty cache and little patience."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote_files, "PATIENCE_S", 5.0)
    monkeypatch.setattr(remote_files, "PAUSE_S", 0.01)
    for known in (Web.files, Web.faults, Web.asked):
        known.clear()
    remote_files._listed.cache_clear()
    yield f"{server}/data"


def texts(source: Source) -> list[str]:
    return [*read_documents(source)]


def lines(*words: str) -> bytes:
    return "".join(json.dumps({"text": word}) + "\n" for word in words).encode()


def test_braces_name_files_that_are_downloaded_when_read(web: str) -> None:
    for i in range(3):
        Web.files[f"/data/part-{i:02}.jsonl.gz"] = gzip.compress(
            lines(f"a{i}", f"b{i}")
        )
    source = Source(kind="jsonl", path=f"{web}/part-{{00..02}}.jsonl.gz")
    data = Data(sources=(source,), validation=0.0, seq_len=8)
    select_files(source)
    assert [method for method, *_ in Web.asked] == ["HEAD"] * 3
    assert texts(source) == ["a0", "b0", "a1", "b1", "a2", "b2"]
    check_sources(data)
    corpus = open_data(data)
    assert corpus.description.endswith("6 documents (0 for validation), 18 tokens")
    assert [method for method, *_ in Web.asked].count("GET") == 3  # each file once


def test_a_cut_download_goes_on_where_it_was_cut(web: str) -> None:
    Web.files["/data/a.txt"] = content = os.urandom(3_000_000).hex().encode()
    Web.faults["/data/a.txt"] = [(2_000_000,), 500, (1_500_000,)]
    assert texts(Source(kind="text", path=f"{web}/a.txt")) == [content.decode()]
    ranges = [ranged for method, _, ranged in Web.asked if method == "GET"]
    assert ranges == [None, "bytes=2000000-", "bytes=2000000-", "bytes=3500000-"]


def test_a_file_of_unknown_size_begins_again(
    web: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Web.files["/data/a.txt"] = b"x" * 2_000_000
    Web.faults["/data/a.txt"] = [(900_000,)]

    def unknown(*given: Any) -> http_ranges.HttpFile:
        return http_ranges.HttpFile(-1, "")

    monkeypatch.setattr("weft.techniques.remote_sources.https.http_file", unknown)
    assert texts(Source(kind="text", path=f"{web}/a.txt")) == ["x" * 2_000_000]
    assert [ranged for *_, ranged in Web.asked] == [None, None]


def test_a_long_download_says_how_far_it_is(
    web: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "SILENT_S", 0.0)
    Web.files["/data/a.txt"] = b"x" * 3_000_000
    texts(Source(kind="text", path=f"{web}/a.txt"))
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("weft: downloads http://127.0.0.1:") and len(said) >= 2
    assert said[0].endswith("/data/a.txt: 0.001 of 0.003 GB")


def test_a_killed_download_goes_on_too(web: str) -> None:
    Web.files["/data/a.txt"] = b"x" * 3_000_000
    Web.faults["/data/a.txt"] = [(1_000_000,), 403]
    source = Source(kind="text", path=f"{web}/a.txt")
    with pytest.raises(WeftError, match="403"):
        texts(source)
    assert texts(source) == ["x" * 3_000_000]
    assert Web.asked[-1] == ("GET", "/data/a.txt", "bytes=1000000-")


@pytest.mark.parametrize(("faults", "said"), [
    ([403], r"cannot read http://127.0.0.1:\d+/data/a.txt: the server answered 403 \(Forbidden\)$"),
    ([404], r"the server answered 404 \(Not Found\)$"),
    ([500] * 99, r"the server answered 500 \(Internal Server Error\) \(0 s of attempts\)$"),
    ([1.5] * 3, r"the server did not answer within 0 s \(0 s of attempts\)$"),
])  # fmt: skip
def test_what_a_server_answers_is_one_line(
    web: str, faults: list[Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "PATIENCE_S", 0.5)
    if isinstance(faults[0], float):
        monkeypatch.setattr(http_ranges, "ANSWER_S", 0.4)
    Web.files["/data/a.txt"] = b"content"
    Web.faults["/data/a.txt"] = faults
    with pytest.raises(WeftError, match=said) as error:
        texts(Source(kind="text", path=f"{web}/a.txt"))
    assert "\n" not in str(error.value)


def test_a_file_that_changes_is_named(web: str) -> None:
    Web.files["/data/a.txt"] = b"x" * 2_000_000

    def change() -> None:
        Web.files["/data/a.txt"] = b"y" * 2_000_000

    source = Source(kind="text", path=f"{web}/a.txt")
    before = source_fingerprint(source)
    Web.faults["/data/a.txt"] = [(900_000,), change]
    with pytest.raises(WeftError, match=r"data/a\.txt: it has changed"):
        texts(source)
    remote_files._listed.cache_clear()  # as the next command lists again
    assert source_fingerprint(source) != before
    assert texts(source) == ["y" * 2_000_000]  # nothing of the old part


def test_secrets_of_an_address_are_not_shown(web: str) -> None:
    address = web.replace("http://", "http://me:word@") + "/a.txt?sig=hidden"
    with pytest.raises(WeftError) as error:
        texts(Source(kind="text", path=address))
    assert "the server answered 404" in str(error.value)
    with pytest.raises(WeftError, match="lists no files") as other:
        texts(Source(kind="text", path=address.replace("a.txt", "*.txt")))
    assert not any("hidden" in str(each.value) for each in (error, other))
    title = Source(kind="text", path=address).title  # as in the line of a mixture
    assert title == web + "/a.txt"
    assert not {"word", "hidden"} & set(str(error.value).replace("/", " ").split())


def test_a_renewed_password_leaves_files_fingerprint_and_curation(
    web: str, tmp_path: Path
) -> None:
    Web.files["/data/a.txt"] = b"some text"
    read = [
        Source(kind="text", path=web.replace("//", f"//me:{word}@") + "/a.txt")
        for word in ("old", "new")
    ]
    assert source_fingerprint(read[0]) == source_fingerprint(read[1])
    runs = [
        run_pipeline(DataPipeline(sources=(each,)), tmp_path / "out", 0)
        for each in read
    ]
    assert runs[0].reused == 0 and runs[1].reused == runs[1].tasks
    (listing,) = (tmp_path / "cache" / DOWNLOADS).rglob(remote_files.LISTING)
    # downloads need the password: for this user alone
    assert "me:new" in listing.read_text() and listing.stat().st_mode & 0o77 == 0
    for file in (tmp_path / "out").rglob("*"):
        assert not file.is_file() or b"//me:" not in file.read_bytes(), file


def test_records_and_checkpoints_of_a_run_keep_no_secret_of_an_address(
    web: str, tmp_path: Path
) -> None:
    Web.files["/data/a.txt?sig=hidden"] = b"some text of the web " * 40
    address = web.replace("http://", "http://me:word@") + "/a.txt?sig=hidden"
    source = {"kind": "text", "path": address}
    asked = recipe("", data__sources=(source,), data__validation=0.0, data__cache=tmp_path)  # fmt: skip
    recorded = prepare(asked).facts(Progress())["recipe"]
    assert recorded["data"]["sources"][0]["path"] == web + "/a.txt"
    kept = mock.Mock(meta={"recipe": asked.model_dump(mode="json"), "data": ""})
    kept.meta["progress"] = {"position": 3}
    lines = other_differences(kept, asked, "other")
    assert not any("me:word" in line or "weights" in line for line in lines), lines
    assert asked.data.sources[0].path == address  # which is what a resumed run reads


def test_a_corpus_larger_than_the_cache_is_tokenized(
    web: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At no time are there more than two files of five, and the tokens are those of all."""
    monkeypatch.setenv("WEFT_DOWNLOADS_GB", "0.000025")
    monkeypatch.setattr(corpora, "LARGE", 0)
    monkeypatch.setattr(tokenize_pieces, "PIECE", 4096)
    monkeypatch.setenv("WEFT_TOKENIZE_PROCESSES", "1")
    contents = [lines(*(f"{i} {j} " * 20 for j in range(60))) for i in range(5)]
    for i, content in enumerate(contents):
        Web.files[f"/data/{i}.jsonl"] = content
        (tmp_path / f"{i}.jsonl").write_bytes(content)
    there: list[int] = []
    real = remote_files._download

    def noted(*given: Any) -> None:
        real(*given)
        root = tmp_path / "cache" / DOWNLOADS
        there.append(sum(f.stat().st_size for f in root.rglob("*.jsonl")))

    monkeypatch.setattr(remote_files, "_download", noted)
    tokenizer = load_tokenizer("bytes")
    source = Source(kind="jsonl", path=f"{web}/{{0..4}}.jsonl")
    tokens = open_source(source, tokenizer)
    assert len(there) == 5 and max(there) <= 25_000 < sum(map(len, contents))
    local = open_source(Source(kind="jsonl", path=str(tmp_path / "*.jsonl")), tokenizer)
    assert tokens.fingerprint == local.fingerprint


def test_a_file_that_is_being_read_stays(
    web: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        Web.files[f"/data/{name}.txt"] = name.encode() * 1000
    monkeypatch.setenv("WEFT_DOWNLOADS_GB", "0.0000015")
    a, b = select_files(Source(kind="text", path=f"{web}/{{a,b}}.txt")).read
    with remote_files.in_use(a):
        remote_files.downloaded(b)
        assert a.exists() and b.exists()
    with remote_files.in_use(b):
        pass
    b.unlink()
    remote_files.downloaded(b)
    assert not a.exists()
    monkeypatch.setenv("WEFT_DOWNLOADS_GB", "much")
    b.unlink()
    with pytest.raises(UsageError, match="WEFT_DOWNLOADS_GB='much' is no size"):
        remote_files.downloaded(b)


def test_a_place_that_does_not_answer_is_read_by_its_last_listing(
    web: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Web.files["/data/a.txt"] = b"content"
    source = Source(kind="text", path=f"{web}/a.txt")
    assert texts(source) == ["content"]
    remote_files._listed.cache_clear()
    monkeypatch.setattr(remote_files, "PATIENCE_S", 0.1)

    def broken(*given: Any) -> Any:
        raise http_ranges.HttpProblem("the network is down", again=True)

    monkeypatch.setattr("weft.techniques.remote_sources.https.http_file", broken)
    assert texts(source) == ["content"]
    assert "the network is down; its last listing is used" in capsys.readouterr().err


def test_the_hub_gives_files_of_one_commit(
    web: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server)
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    at = "/datasets/me/texts/resolve/abc"
    Web.files[f"{at}/data/train-0.jsonl"] = lines("one")
    Web.files[f"{at}/data/train-1.jsonl"] = lines("two")
    Web.files[f"{at}/data/test-0.jsonl"] = lines("held out")
    Web.files[f"{at}/README.md"] = b"about"
    for path in (
        "hf://datasets/me/texts",
        "hf://datasets/me/texts@main/data",
        "hf://datasets/me/texts/data/train-*.jsonl",
    ):
        assert texts(Source(kind="jsonl", path=path)) == ["one", "two"], path
    assert texts(
        Source(kind="jsonl", path="hf://datasets/me/texts/**/t*t-?.jsonl")
    ) == ["held out"]
    with pytest.raises(WeftError, match=r"no file 'none-\*'"):
        texts(Source(kind="jsonl", path="hf://datasets/me/texts/data/none-*"))
    monkeypatch.setenv("HF_TOKEN", "wrong")
    remote_files._listed.cache_clear()
    with pytest.raises(WeftError, match=r"401.*hf auth login"):
        texts(Source(kind="jsonl", path="hf://datasets/me/texts"))


def test_addresses_that_cannot_be_read(web: str) -> None:
    Web.files |= {"/data/a?x=1": b"1", "/data/a?x=2": b"2"}
    for path, kind, said in (
        (f"{web}/a?x={{1,2}}", "text", r"differ behind '\?' alone"),
        (f"{web}/*.txt", "text", "lists no files"),
        ("ftp://host/a.txt", "text", "data.path = 'ftp' is not possible"),
        ("hf://models/x", "text", "no address of the hub"),
        ("s3://bucket/tokens", "tokens", "a folder of this machine"),
    ):
        with pytest.raises(WeftError, match=said) as error:
            select_files(Source(kind=kind, path=path))
        assert "\n" not in str(error.value)


def test_names_of_objects_match_patterns() -> None:
    matches = remote_files._matches
    assert matches("a/b/c.jsonl", "**/*.jsonl") and matches("c.jsonl", "**/*.jsonl")
    assert matches("a/c.jsonl", "*/c.jsonl") and not matches("a/b/c.jsonl", "*/c.jsonl")
    assert matches("a1.txt", "a[0-9].txt") and not matches("ab.txt", "a[0-9].txt")
    assert [*remote_files._expanded("x-{08..10}.{a,b}")][:3] == [
        "x-08.a",
        "x-08.b",
        "x-09.a",
    ]


def test_pipelines_read_from_elsewhere_too(web: str) -> None:
    from weft.curation.source_units import read_unit, source_units
    from weft.data.source_report import SourceReport

    Web.files["/data/a.jsonl"] = lines(*(f"{i} " * 30 for i in range(50)))
    Web.files["/data/b.jsonl"] = lines("end")
    source = Source(kind="jsonl", path=f"{web}/{{a,b}}.jsonl")
    units = source_units([source], 2000)
    read = [d for u in units for d in read_unit(u, source, 10**6, SourceReport())]
    assert [text for part in read for text in part.texts] == texts(source)
    ids = [name for part in read for name in part.ids]
    assert len(set(ids)) == 51 and ids[-1].endswith("b.jsonl#1")


def test_a_download_of_an_older_content_is_not_read(web: str) -> None:
    """A file that has as many bytes as before is downloaded again, if the place says that it is another one."""
    source = Source(kind="text", path=f"{web}/a.txt")
    for content in ("x" * 1000, "y" * 1000):
        Web.files["/data/a.txt"] = content.encode()
        remote_files._listed.cache_clear()  # as the next command lists again
        assert texts(source) == [content] == texts(source)
    assert [method for method, *_ in Web.asked].count("GET") == 2


def test_pieces_of_two_contents_are_never_a_file(
    web: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that sees only behind the last piece that a file has changed leaves no part to go on from."""
    Web.files["/data/a.txt"] = b"x" * 1000
    (path,) = select_files(Source(kind="text", path=f"{web}/a.txt")).read

    def mixed(self: Any, file: Any, start: int) -> Iterator[bytes]:
        yield b"z" * (file.size - start)
        raise RemoteProblem("it has changed", changed=True)

    with monkeypatch.context() as patch:
        patch.setattr(WebFolder, "read_from", mixed)
        with pytest.raises(WeftError, match="it has changed"):
            remote_files.downloaded(path)
    assert remote_files.downloaded(path).read_bytes() == b"x" * 1000
