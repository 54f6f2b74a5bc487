"""Tokenization in pieces: the same files as by one process, also after interruptions and mended files."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.data import corpora, tokenize_pieces
from weft.data.joined_pieces import JoinedPieces
from weft.data.source_piece import FileStamp, SourcePiece, stamp_of
from weft.data.tokenize_pieces import cut_into_pieces
from weft.data.tokenize_progress import TokenizeProgress
from weft.data.tokenizer import load_tokenizer
from weft.data.tokens import open_source
from weft.errors import WeftError
from weft.plugins import load_plugins, loaded
from weft.recipe import Source

SMALL = 4096


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sources are cut into small pieces, which this process tokenizes."""
    monkeypatch.setattr(corpora, "LARGE", 0)
    monkeypatch.setattr(tokenize_pieces, "PIECE", SMALL)
    monkeypatch.setenv("WEFT_TOKENIZE_PROCESSES", "1")


def write_lines(file: Path, count: int, seed: int = 0) -> None:
    draw = random.Random(seed)
    file.write_text("".join(
        json.dumps({"text": "" if i % 7 == 3 else "wörter " * draw.randrange(1, 30), "more": i}) + "\n"
        for i in range(count)
    ))  # fmt: skip


def mixed(folder: Path) -> None:
    """Three files of lines, of which two are cut into parts, and one that is compressed."""
    folder.mkdir()
    write_lines(folder / "a.jsonl", 90, 1)
    write_lines(folder / "b.jsonl", 3, 2)
    write_lines(folder / "d.jsonl", 60, 3)
    content = (folder / "d.jsonl").read_bytes()
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(content))


def content_of(folder: Path) -> dict[str, bytes]:
    names = ("tokens.bin", "offsets.npy", "lines.npy", "files.json", "meta.json")
    return {name: (folder / name).read_bytes() for name in names}


def opened(source: Source, cache: Path, spec: str = "bytes") -> dict[str, bytes]:
    tokens = open_source(source, load_tokenizer(spec), cache)
    assert tokens.folder is not None
    assert not [*cache.glob(".tokens-pieces-*")]
    return content_of(tokens.folder)


def reference(source: Source, cache: Path) -> dict[str, bytes]:
    """The files as they are written without pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "LARGE", 2**60)
        return opened(source, cache)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["jsonl", "text", "parquet"])
def test_pieces_give_the_files_of_one_pass(
    tmp_path: Path, kind: str, in_pieces: None
) -> None:
    folder = tmp_path / "corpus"
    if kind == "jsonl":
        mixed(folder)
    elif kind == "text":
        folder.mkdir()
        for i in range(30):
            (folder / f"{i:02}.txt").write_text("some words " * (i * 13 % 70))
    else:
        pytest.importorskip("pyarrow")
        import pyarrow.parquet

        folder.mkdir()
        rows = [f"{i} " * 99 if i % 5 else None for i in range(400)]
        for name in "ab":
            table = pyarrow.table({"text": rows, "n": [*range(400)]})
            pyarrow.parquet.write_table(
                table, folder / f"{name}.parquet", row_group_size=30, compression="none"
            )
    source = Source(kind=kind, path=str(folder))
    assert opened(source, tmp_path / "b") == reference(source, tmp_path / "a")


def test_parts_cover_each_file_once(tmp_path: Path, in_pieces: None) -> None:
    mixed(tmp_path / "corpus")
    files = sorted((tmp_path / "corpus").iterdir())
    stamps = [stamp_of(file) for file in files]
    (tmp_path / "joined").mkdir()
    joined = JoinedPieces(tmp_path / "joined", 2)
    pieces = [*cut_into_pieces(stamps, joined)]
    parts = [piece.part for piece in pieces if piece.part]
    assert len(parts) > 4 and len({piece.name for piece in pieces}) == len(pieces)
    assert sum(piece.size for piece in pieces) == sum(stamp.size for stamp in stamps)
    text = files[0].read_bytes()
    cut = [
        part
        for piece in pieces
        for part in [piece.part]
        if part and piece.files == files[:1]
    ]
    assert b"".join(text[part.start : part.end] for part in cut) == text
    assert all(text[: part.start].count(b"\n") + 1 == part.first for part in cut)


def test_what_is_done_stays_when_an_address_is_signed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = list[str]()

    def noted(path: Path) -> None:
        locks.append(path.name)
        raise InterruptedError

    monkeypatch.setattr(tokenize_pieces, "locked", noted)
    monkeypatch.setattr(
        tokenize_pieces, "documents_of", lambda source: SimpleNamespace(read=[])
    )
    for path in ("https://h/x.txt?sig=1", "https://h/x.txt?sig=2", "https://h/y.txt"):
        with pytest.raises(InterruptedError):
            tokenize_pieces.tokenize_pieces(
                tmp_path, Source(kind="text", path=path), load_tokenizer("bytes"), [], "x"
            )  # fmt: skip
    assert locks[0] == locks[1] != locks[2]


class Killed(BaseException):
    """Stands for a signal that no process can catch."""


@pytest.mark.parametrize("where", ["_add", "append", "finish", "write_piece"])
def test_an_interrupted_tokenization_goes_on(
    tmp_path: Path, where: str, in_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ended at every call of a function in turn, before or in the middle of what the function does."""
    mixed(tmp_path / "corpus")
    source = Source(kind="jsonl", path=str(tmp_path / "corpus"))
    expected = reference(source, tmp_path / "a")
    owner: Any = tokenize_pieces if where == "write_piece" else JoinedPieces
    real: Callable[..., Any] = getattr(owner, where)
    written: list[str] = []
    pieces = tokenize_pieces.write_piece

    def counted(folder: Path, piece: SourcePiece, *more: Any) -> None:
        written.append(piece.name)
        pieces(folder, piece, *more)

    calls = 0

    def ends(*given: Any) -> Any:
        nonlocal calls
        calls -= 1
        if calls < 0:
            if where == "_add":
                real(given[0], given[1], [b"".join(given[2])[:5]])
            raise Killed
        return (counted if where == "write_piece" else real)(*given)

    if where != "write_piece":
        monkeypatch.setattr(tokenize_pieces, "write_piece", counted)
    monkeypatch.setattr(owner, where, ends)
    for allowed in range(1, 200, 5):
        calls = allowed
        try:
            assert opened(source, tmp_path / "b") == expected
            break
        except Killed:
            pass
    else:
        pytest.fail("no end")
    assert len(written) == len(set(written))  # nothing was done twice


def test_a_mended_file_costs_its_own_pieces_only(
    tmp_path: Path, in_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed(tmp_path / "corpus")
    whole = (tmp_path / "corpus/b.jsonl").read_text()
    (tmp_path / "corpus/b.jsonl").write_text(whole[:-9] + "\n")
    source = Source(kind="jsonl", path=str(tmp_path / "corpus"))
    seen: list[str] = []
    real = tokenize_pieces.write_piece

    def noted(folder: Path, piece: SourcePiece, *more: Any) -> None:
        seen.extend(file.name for file in piece.files)
        real(folder, piece, *more)

    monkeypatch.setattr(tokenize_pieces, "write_piece", noted)
    with pytest.raises(WeftError, match=r"b\.jsonl:3: not valid JSON"):
        open_source(source, load_tokenizer("bytes"), tmp_path / "b")
    (tmp_path / "corpus/b.jsonl").write_text(whole)
    before = seen.count("a.jsonl")
    assert opened(source, tmp_path / "b") == reference(source, tmp_path / "a")
    assert seen.count("a.jsonl") == before > 1


def test_a_line_in_a_later_part_is_named(tmp_path: Path, in_pieces: None) -> None:
    file = tmp_path / "a.jsonl"
    write_lines(file, 90)
    lines = file.read_text().splitlines()
    lines[70] = '{"texts": "schema changes here"}'
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(WeftError, match=r"a\.jsonl:71: no field 'text'.*'texts'"):
        opened(Source(kind="jsonl", path=str(file)), tmp_path / "b")


def test_a_file_that_changes_is_named(
    tmp_path: Path, in_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed(tmp_path / "corpus")
    file = tmp_path / "corpus/d.jsonl"
    real = tokenize_pieces.documents_in

    def changing(source: Source, files: list[Path], *more: Any) -> Any:
        if files == [file]:
            with open(file, "a") as out:
                out.write('{"text": "one more"}\n')
        return real(source, files, *more)

    monkeypatch.setattr(tokenize_pieces, "documents_in", changing)
    with pytest.raises(WeftError, match=r"d\.jsonl has changed while it was read"):
        opened(Source(kind="jsonl", path=str(file.parent)), tmp_path / "b")


@pytest.mark.slow(6)
def test_two_processes_give_the_files_of_one_and_survive_kills(tmp_path: Path) -> None:
    """The process and its two helpers are killed at several instants; then it goes on."""
    mixed(tmp_path / "corpus")
    source = Source(kind="jsonl", path=str(tmp_path / "corpus"))
    expected = reference(source, tmp_path / "a")
    program = (
        "import sys; from weft.data import corpora, tokenize_pieces; corpora.LARGE = 0\n"
        f"tokenize_pieces.PIECE = {SMALL}\n"
        "from weft.data.tokenizer import load_tokenizer; from weft.data.tokens import open_source\n"
        "from weft.recipe import Source; from pathlib import Path; print('ready', flush=True)\n"
        "open_source(Source(kind='jsonl', path=sys.argv[1]), load_tokenizer('bytes'), Path(sys.argv[2]))\n"
    )
    environment = os.environ | {"WEFT_TOKENIZE_PROCESSES": "2"}
    command = [sys.executable, "-c", program, source.path or "", str(tmp_path / "b")]
    for wait in (0.6, 0.7, None):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        assert process.stdout and process.stdout.readline() == b"ready\n"
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
    assert process.returncode == 0
    (folder,) = (tmp_path / "b").glob("tokens-*")
    assert content_of(folder) == expected
    assert not [*(tmp_path / "b").glob(".tokens-pieces-*")]


def test_a_helper_that_dies_is_named(
    tmp_path: Path, in_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed(tmp_path / "corpus")
    monkeypatch.setenv("WEFT_TOKENIZE_PROCESSES", "2")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    source = Source(kind="jsonl", path=str(tmp_path / "corpus"))
    with pytest.raises(WeftError, match="ended with code 1; if memory was short"):
        open_source(source, load_tokenizer("bytes"), tmp_path / "b")
    monkeypatch.setenv("WEFT_TOKENIZE_PROCESSES", "none")
    with pytest.raises(WeftError, match="no number of processes"):
        open_source(source, load_tokenizer("bytes"), tmp_path / "b")


@pytest.mark.slow(3)
def test_an_interrupt_leaves_no_process_and_keeps_what_is_done(
    tmp_path: Path,
    in_pieces: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C reaches the whole group: helpers that have just started take no notice, and end with the process."""
    mixed(tmp_path / "corpus")
    source = Source(kind="jsonl", path=str(tmp_path / "corpus"))
    helpers: list[subprocess.Popen[str]] = []

    class Interrupted(subprocess.Popen[str]):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            self.send_signal(signal.SIGINT)
            helpers.append(self)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    monkeypatch.setenv("WEFT_TOKENIZE_PROCESSES", "2")
    real = JoinedPieces.append
    joined: list[str] = []

    def interrupted(own: JoinedPieces, piece: SourcePiece) -> None:
        real(own, piece)
        joined.append(piece.name)
        if len(joined) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(JoinedPieces, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_source(source, load_tokenizer("bytes"), tmp_path / "b")
    assert helpers and all(helper.returncode is not None for helper in helpers)
    monkeypatch.setenv("WEFT_TOKENIZE_PROCESSES", "1")
    assert opened(source, tmp_path / "b") == reference(source, tmp_path / "a")
    assert len(joined) == len(set(joined))
    assert "Traceback" not in capfd.readouterr().err


def test_progress_names_files_rate_and_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stamps = [FileStamp(f"{i}", 10_000_000, 0) for i in range(3)]
    progress = TokenizeProgress("data source x", 3, 30_000_000)
    progress.skip(SourcePiece((stamps[0],), size=10_000_000))
    progress.add(SourcePiece((stamps[1],), size=10_000_000))
    assert progress.line(5.0) == (
        "weft: data source x: tokenized 20 of 30 MB (10 MB done before), file 2 of 3, 2.0 MB/s, 0:05 left"
    )
    assert capsys.readouterr().err == ""  # nothing for what takes no time
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    progress.show()
    assert capsys.readouterr().err.startswith("weft: data source x: tokenized 20 of")


@pytest.mark.soak
@pytest.mark.slow(4)
def test_processes_read_from_places_of_plugins(
    tmp_path: Path,
    in_pieces: None,
    own_techniques: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A place that only a plugin knows is known to the processes that tokenize, too."""
    mixed(tmp_path / "corpus")
    (tmp_path / "shelf_place.py").write_text(
        "from pathlib import Path\n"
        "from weft import register\n"
        "from weft.data.remote_store import RemoteFile\n"
        "@register('remote', 'shelf')\n"
        "class Shelf:\n"
        f"    root = Path({str(tmp_path / 'corpus')!r})\n"
        "    def __init__(self, address): pass\n"
        "    def list_files(self, name):\n"
        "        return [RemoteFile(f.name, f.stat().st_size, 'one') for f in sorted(self.root.iterdir())]\n"
        "    def read_from(self, file, start):\n"
        "        yield (self.root / file.name).read_bytes()[start:]\n"
    )
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("WEFT_TOKENIZE_PROCESSES", "2")
    load_plugins(["shelf_place"])
    tokenizer = load_tokenizer("bytes")
    try:
        source = Source(kind="jsonl", path="shelf://host")
        far = open_source(source, tokenizer, tmp_path / "b")
    finally:
        loaded.discard("shelf_place")
    assert far.folder is not None
    near = reference(
        Source(kind="jsonl", path=str(tmp_path / "corpus")), tmp_path / "a"
    )
    assert content_of(far.folder)["tokens.bin"] == near["tokens.bin"]
