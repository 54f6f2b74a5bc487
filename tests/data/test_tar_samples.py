"""Samples of WebDataset's tar files."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest

from weft.data.corpora import read_documents
from weft.data.files import read_records, select_files
from weft.data.source_report import SourceReport
from weft.errors import UsageError, WeftError
from weft.recipe import Source


def packed(members: dict[str, bytes], mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return out.getvalue()


MEMBERS = {
    "shard/0001.txt": b"erste",
    "shard/0001.json": json.dumps({"id": "one", "lang": "de"}).encode(),
    "shard/0001.jpg": b"\xff\xd8 no text",
    "shard/0002.json.gz": gzip.compress(json.dumps({"text": "zweite"}).encode()),
    "other/0002.txt": b"third",
}


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tgz"])
def test_members_with_one_name_are_one_record(tmp_path: Path, name: str) -> None:
    data = packed(MEMBERS)
    (tmp_path / name).write_bytes(data if name == "a.tar" else gzip.compress(data))
    source, report = Source(kind="jsonl", path=str(tmp_path)), SourceReport()
    assert [*read_documents(source, report)] == ["erste", "zweite", "third"]
    assert report.unread["lang"] == 1
    first = next(record for _, record in read_records(tmp_path / name))
    assert first == {
        "text": "erste", "txt": "erste", "jpg": None, "id": "one", "lang": "de", "__key__": "shard/0001",
    }  # fmt: skip
    with pytest.raises(UsageError, match=r"set data\.kind = 'jsonl'"):
        [*read_documents(Source(kind="text", path=str(tmp_path / name)))]


def test_conversations_stand_in_tar_files_too(tmp_path: Path) -> None:
    from weft.data.chat.samples import read_samples

    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    members = {f"{i}.json": json.dumps({"messages": talk}).encode() for i in range(3)}
    (tmp_path / "talks.tar").write_bytes(packed(members))
    read = [*read_samples(Source(kind="chat", path=str(tmp_path)))]
    assert [place.line for place, _ in read] == [1, 2, 3]


def test_tar_files_beside_other_records_are_named_and_not_read(tmp_path: Path) -> None:
    (tmp_path / "backup.tar").write_bytes(packed(MEMBERS))
    (tmp_path / "a.csv").write_text("text\nonly\n")
    source = Source(kind="jsonl", path=str(tmp_path))
    assert [*read_documents(source)] == ["only"]
    assert [file.name for file in select_files(source).left] == ["backup.tar"]


@pytest.mark.parametrize(
    "end", [100, 512, 1100, 2048, 4096, 6000, -10241, -10240, -9800]
)
def test_a_tar_file_that_is_cut_is_named(tmp_path: Path, end: int) -> None:
    data = packed({f"{i}.txt": b"x" * 700 for i in range(8)})
    assert len(data) % 10240 == 0
    body = len(data.rstrip(b"\0")) // 512 * 512 + 512
    (tmp_path / "a.tar").write_bytes(
        data[: end if end > 0 else body - 1 if end == -10241 else body]
    )
    with pytest.raises(
        WeftError,
        match=r"a\.tar (is a damaged tar file|ends too early), after \d+ samples",
    ):
        [*read_documents(Source(kind="jsonl", path=str(tmp_path / "a.tar")))]


def test_wrong_members_are_named_or_skipped(tmp_path: Path) -> None:
    members = {
        "a.txt": b"good",
        "b.json": b"{",
        "c.txt": b"\xff\xff",
        "d.txt.gz": b"no gzip",
        "e.txt": b"fine",
    }
    (tmp_path / "a.tar").write_bytes(packed(members))
    path = str(tmp_path / "a.tar")
    with pytest.raises(WeftError, match=r"a\.tar:2: member b\.json: "):
        [*read_documents(Source(kind="jsonl", path=path))]
    report = SourceReport()
    kept = [*read_documents(Source(kind="jsonl", path=path, on_error="skip"), report)]
    assert kept == ["good", "fine"] and report.skipped == 3
