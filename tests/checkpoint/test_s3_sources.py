"""Sources of data in an S3 bucket, by a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.checkpoint.s3 import S3Storage
from weft.data import remote_files
from weft.data.corpora import read_documents
from weft.errors import WeftError
from weft.recipe import Source
from weft.recipe.storage_address import storage_address

#: Files that want the S3 server: it starts for them once, and stops after them.
TOGETHER = "s3"


@pytest.mark.slow(10)
def test_objects_of_a_bucket_are_read(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote_files, "PATIENCE_S", 0.5)
    remote_files._listed.cache_clear()
    place = storage_address(bucket)
    storage = S3Storage(place.bucket, place.path)

    def line(word: str) -> bytes:
        return json.dumps({"text": word}).encode() + b"\n"

    for name in ("a-0", "a-1", "b-0"):
        storage.write(f"docs/{name}.jsonl", [line(name)])
    storage.write("large.txt", [b"x" * (9 << 20)])
    assert [*read_documents(Source(kind="jsonl", path=f"{bucket}/docs/a-*.jsonl"))] == [
        "a-0",
        "a-1",
    ]
    assert len([*read_documents(Source(kind="jsonl", path=f"{bucket}/docs"))]) == 3
    (large,) = read_documents(Source(kind="text", path=f"{bucket}/large.txt"))
    assert len(large) == 9 << 20
    with pytest.raises(WeftError, match=r"has no file 'none\.txt'"):
        [*read_documents(Source(kind="text", path=f"{bucket}/none.txt"))]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    remote_files._listed.cache_clear()
    with pytest.raises(WeftError, match=r"cannot list s3://.*403") as error:
        [*read_documents(Source(kind="jsonl", path=f"{bucket}/docs"))]
    assert "wrong-secret" not in str(error.value) and "\n" not in str(error.value)


def test_an_object_that_changes_is_named(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    remote_files._listed.cache_clear()
    place = storage_address(bucket)
    storage = S3Storage(place.bucket, place.path)
    storage.write("a.txt", [b"before"])
    source = Source(kind="text", path=f"{bucket}/a.txt")
    remote_files.list_remote(source.path or "")
    storage.delete(["a.txt"])
    storage.write("a.txt", [b"behind"])
    with pytest.raises(WeftError, match=r"cannot read s3://.*a\.txt: it has changed"):
        [*read_documents(source)]
