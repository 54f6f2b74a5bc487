"""Names of the documents that a data run has written, by their places and their ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from weft.data.document_names import names_of_documents
from weft.data.tokens import read_tokens, write_tokens
from weft.recipe import Source


def test_tokens_beside_documents_have_their_names(tmp_path: Path) -> None:
    documents = tmp_path / "documents"
    documents.mkdir()
    for number in range(2):
        (documents / f"0000{number}.jsonl").write_text("".join(
            json.dumps({"id": f"raw:{number}.txt#{i}", "text": "x"}) + "\n" for i in (1, 2)
        ))  # fmt: skip
    write_tokens(tmp_path / "tokens", [np.array([1])] * 4, 10, 9)
    source = Source(kind="tokens", path=str(tmp_path / "tokens"))
    names = names_of_documents(source, read_tokens(tmp_path / "tokens"))
    assert names is not None
    assert names.name(2) == f"{documents}/00001.jsonl:1"
    assert names.find("https://host/docs/00001.jsonl:2") == [3]
    assert names.find("00001.jsonl:2") == [3] and names.find("00001.jsonl") == [2, 3]
    for name in ("raw:1.txt#2", "1.txt#2", "1.txt:2"):
        assert names.with_id(name) == [3]
    assert names.with_id("2.txt#1") == names.find("00002.jsonl") == []


def test_tokens_without_documents_or_with_others_have_no_names(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens", [np.array([1])] * 4, 10, 9)
    source = Source(kind="tokens", path=str(tmp_path / "tokens"))
    assert names_of_documents(source, read_tokens(tmp_path / "tokens")) is None
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents/0.jsonl").write_text('{"text": "only one"}\n')
    assert names_of_documents(source, read_tokens(tmp_path / "tokens")) is None
