"""Conversations that several processes encode: the files, notes and errors of one process."""

from __future__ import annotations

import datetime
import json
import os
import random
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests import chats
from weft.data import line_processes
from weft.data.chat import encode_processes, recipe_encoder
from weft.data.chat.encode_processes import encode_process_count
from weft.data.chat.encode_worker import encode_batch
from weft.data.chat.recipe_encoder import chat_encoder, recipe_template
from weft.data.chat.source import open_chats
from weft.data.files import source_files
from weft.data.line_processes import LineProcesses
from weft.data.tokenizer import load_tokenizer
from weft.errors import UsageError, WeftError
from weft.recipe import Chat, Source

NAMES = ("tokens.bin", "weights.bin", "offsets.npy", "lines.npy", "meta.json")


def talk(number: int, **more: Any) -> dict[str, Any]:
    draw = random.Random(number)
    turns = []
    for _ in range(draw.randrange(1, 3)):
        turns.append({"role": "user", "content": "wörd " * draw.randrange(1, 40)})
        turns.append({"role": "assistant", "content": f"answer {draw.random()}"})
    return {"messages": turns, **more}


def write_lines(file: Path, records: list[Any]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    chats.save_tokenizer(folder / "tokenizer", chats.TEMPLATES["smollm2"])
    return folder


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sources are large, and batches small."""
    monkeypatch.setattr(encode_processes, "LARGE", 0)
    monkeypatch.setattr(encode_processes, "BATCH", 600)
    monkeypatch.setattr("weft.data.tokenize_pieces.PIECE", 1)
    monkeypatch.setenv("WEFT_TOKENIZE_PROCESSES", "2")


class AlwaysNoon(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> AlwaysNoon:
        return cls(2026, 3, 4, 12, 30, tzinfo=tz)


class Inline:
    """Answers as the processes do, in this one."""

    def __init__(self, module: str, task: dict[str, Any], count: int) -> None:
        given = json.loads(json.dumps(task))
        self.source = Source.model_validate(given["source"])
        settings = Chat.model_validate(given["chat"])
        tokenizer = load_tokenizer(given["tokenizer"])
        now = datetime.datetime.fromisoformat(given["now"])
        template = recipe_template(settings, tokenizer, now)
        self.encoder = chat_encoder(settings, template)

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *error: object) -> None: ...

    def submit(self, line: str, about: str) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            answer = encode_batch(json.loads(line), self.source, self.encoder)
            future.set_result(json.loads(json.dumps(answer)))
        except WeftError as error:
            future.set_exception(error)
        return future


@pytest.fixture(
    params=["inline", pytest.param("processes", marks=pytest.mark.slow(15))]
)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "inline":
        monkeypatch.setattr(encode_processes, "LineProcesses", Inline)


def opened(
    source: Source, place: Path, cache: Path, processes: bool, **settings: Any
) -> dict[str, bytes]:
    tokenizer = load_tokenizer(str(place / "tokenizer"))
    with pytest.MonkeyPatch.context() as patch:
        if not processes:
            patch.setenv("WEFT_TOKENIZE_PROCESSES", "1")
        assert (encode_process_count(source, source_files(source)) > 1) == processes
        tokens = open_chats(source, Chat(**settings), tokenizer, cache)
    assert tokens.folder is not None
    files = [name for name in NAMES if (tokens.folder / name).exists()]
    return {name: (tokens.folder / name).read_bytes() for name in files}


def test_files_and_notes_are_those_of_one_process(
    place: Path, tmp_path: Path, several: None, kind: None
) -> None:
    """Also with lines that are left out, fields that are not read, and columns that are renamed."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    records = [talk(i, unread=i) for i in range(30)]
    records[7] = {"messages": 3}
    write_lines(corpus / "a.jsonl", records)
    lines = [json.dumps({"talk": talk(i)["messages"]}) for i in range(20)]
    (corpus / "b.jsonl").write_text("\n".join([*lines[:5], "{no", *lines[5:]]))
    source = Source(
        kind="chat", path=str(corpus), on_error="skip", columns={"talk": "messages"}
    )
    alone = opened(source, place, tmp_path / "a", False)
    joined = opened(source, place, tmp_path / "b", True)
    assert joined == alone
    notes = json.loads(alone["meta.json"])["notes"]
    assert any("2 of 51 records left out" in note and ":8: " in note for note in notes)


def test_the_first_error_of_the_source_is_said(
    place: Path, tmp_path: Path, several: None, kind: None
) -> None:
    """A line that is no record is found by this process while others still encode what stands before it."""
    file = tmp_path / "a.jsonl"
    good = [json.dumps(talk(i)) for i in range(12)]
    bad = json.dumps({"messages": [{"role": "assistant"}]})
    source = Source(kind="chat", path=str(file))
    file.write_text("\n".join([*good[:3], bad, *good[3:], "{no"]))
    with pytest.raises(WeftError, match=r"a\.jsonl:4: "):
        opened(source, place, tmp_path / "cache", True)
    file.write_text("\n".join([*good, "{no"]))
    with pytest.raises(WeftError, match=r"a\.jsonl:13: "):
        opened(source, place, tmp_path / "cache", True)
    write_lines(file, [talk(i) for i in range(9)])
    renamed = source.model_copy(update={"columns": {"none": "messages"}})
    with pytest.raises(UsageError, match="'none', which no record"):
        opened(renamed, place, tmp_path / "cache", True)


def test_pairs_and_values_that_json_lacks(
    place: Path, tmp_path: Path, several: None, kind: None
) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    rows = [
        {
            "prompt": "word " * (1 + i % 9),
            "chosen": f"good {i}",
            "rejected": f"bad {i}",
            "when": datetime.date(2026, 1, 1 + i % 28) if i % 2 else None,
        }
        for i in range(25)
    ]
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    source = Source(kind="preference", path=str(file))
    alone = opened(source, place, tmp_path / "a", False)
    assert opened(source, place, tmp_path / "b", True) == alone


def test_a_template_has_the_same_variables_and_time_everywhere(
    place: Path, tmp_path: Path, several: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dates of a recipe are texts, and the time of day is not midnight where processes encode."""
    monkeypatch.setattr(encode_processes, "LineProcesses", Inline)
    monkeypatch.setattr(recipe_encoder, "datetime", AlwaysNoon)
    template = (
        "{{ since ~ since.year ~ strftime_now('%H:%M') }}{% for message in messages %}"
        "{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"
    )
    variables = {"since": datetime.date(2026, 1, 2)}
    write_lines(tmp_path / "a.jsonl", [talk(i) for i in range(9)])
    source = Source(kind="chat", path=str(tmp_path / "a.jsonl"))
    alone, joined = (
        opened(
            source, place, tmp_path / str(processes), processes,
            template=template, variables=variables,
        )
        for processes in (False, True)
    )  # fmt: skip
    assert joined == alone


def test_a_process_that_dies_is_named(
    place: Path, tmp_path: Path, several: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the middle of an answer."""
    worker = tmp_path / "dying_worker.py"
    worker.write_text(
        "import os, sys\nsys.stdin.readline()\nos.write(1, b'{\"re')\nos._exit(9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.getcwd()}")
    real = encode_processes.LineProcesses
    monkeypatch.setattr(
        encode_processes,
        "LineProcesses",
        lambda module, task, count: real("dying_worker", task, count),
    )
    write_lines(tmp_path / "a.jsonl", [talk(i) for i in range(9)])
    source = Source(kind="chat", path=str(tmp_path / "a.jsonl"))
    with pytest.raises(WeftError, match=r"a\.jsonl has ended with code 9; if memory"):
        opened(source, place, tmp_path / "cache", True)


def test_a_process_that_stands_still_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before it has read its line, which does not fit into a pipe."""
    monkeypatch.setattr(line_processes, "STILL_S", 0.1)
    monkeypatch.setattr(line_processes, "LOOK_S", 0.05)
    (tmp_path / "still_worker.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with LineProcesses("still_worker", {}, 1) as processes:
        answer = processes.submit("x" * 2**17, "a.jsonl")
        with pytest.raises(
            WeftError, match=r"process \d+, which tokenizes a\.jsonl, has"
        ):
            answer.result(60)


def test_small_sources_and_judgements_stay_in_one_process(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [talk(i) for i in range(3)])
    source = Source(kind="chat", path=str(tmp_path / "a.jsonl"))
    assert encode_process_count(source, source_files(source)) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode_processes, "LARGE", 0)
        judged = source.model_copy(update={"kind": "feedback"})
        assert encode_process_count(judged, []) == 1
