"""Every kind of source on small files, and the one line that each mistake gives."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from weft.data.chat.samples import read_samples
from weft.data.corpora import read_documents
from weft.data.files import source_files
from weft.errors import WeftError
from weft.recipe import Source

TEXTS = ["first document", "zweites Dokument: ä €", "", "last"]


def read(kind: str, path: Path | str, **more: object) -> list[str]:
    return list(
        read_documents(Source.model_validate({"kind": kind, "path": str(path), **more}))
    )


def lines(path: Path, records: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def one_line(error: pytest.ExceptionInfo[WeftError], *words: str) -> None:
    text = str(error.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


def test_stdlib_is_source_code_without_tests() -> None:
    names = {str(file) for file in source_files(Source())}
    assert any(name.endswith("/dataclasses.py") for name in names)
    assert not any(
        "/site-packages/" in name or "/test/" in name or "/tests/" in name
        for name in names
    )
    assert next(read_documents(Source()))


def test_text_file_folder_and_glob_are_sorted(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, text in (
        ("b.txt", "B"),
        ("a.txt", "A"),
        ("sub/c.txt", "C"),
        (".hidden", "no"),
        ("d.md", "D"),
    ):
        (tmp_path / name).write_text(text)
    assert read("text", tmp_path / "b.txt") == ["B"]
    assert read("text", tmp_path) == ["A", "B", "D", "C"]
    assert read("text", tmp_path / "*.txt") == ["A", "B"]
    assert read("text", tmp_path / "**/*.txt") == ["A", "B", "C"]


def test_jsonl_plain_and_compressed(tmp_path: Path) -> None:
    plain = lines(tmp_path / "a.jsonl", [{"body": text} for text in TEXTS])
    with gzip.open(tmp_path / "b.jsonl.gz", "wb") as out:
        out.write(plain.read_bytes())
    (tmp_path / "notes.txt").write_text("not read")
    assert read("jsonl", tmp_path, field="body") == TEXTS * 2


def test_jsonl_skips_blank_lines_and_nulls_and_mends_surrogates(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n\n{"text": null}\n{"text": "\\ud800b"}\n')
    assert read("jsonl", file) == ["a", "?b"]


@pytest.mark.parametrize(("where", "kept"), [
    ({"n": 3}, ["b"]), ({"n": 0.5}, ["a"]), ({"n": "3"}, ["b"]), ({"held": True}, ["b"]),
    ({"held": False, "n": 0.5}, ["a"]), ({"n": 4}, []), ({"n": True}, []), ({"held": 1}, []),
])  # fmt: skip
def test_cells_of_tables_are_texts_and_have_values_all_the_same(
    tmp_path: Path, where: dict[str, object], kept: list[str]
) -> None:
    (tmp_path / "t.csv").write_text("text,n,held\na,0.50,False\nb,3,true\nc,,\n")
    assert read("csv", tmp_path / "t.csv", where=where) == kept


def test_large_numbers_of_tables_are_exact_and_texts_of_other_files_are_no_numbers(
    tmp_path: Path,
) -> None:
    large = 2**53 + 1
    (tmp_path / "t.csv").write_text(f"text,n\na,{large}\nb,{large - 1}\n")
    assert read("csv", tmp_path / "t.csv", where={"n": large}) == ["a"]
    (tmp_path / "t.jsonl").write_text(
        '{"text": "a", "n": "1"}\n{"text": "b", "n": 1}\n'
    )
    assert read("jsonl", tmp_path / "t.jsonl", where={"n": 1}) == ["b"]
    rows = pa.table({"text": ["a"], "n": ["1"]})
    pq.write_table(rows, tmp_path / "t.parquet")
    assert read("parquet", tmp_path / "t.parquet", where={"n": 1}) == []


def test_parquet_streams_row_groups(tmp_path: Path) -> None:
    table = pa.table({"text": [*TEXTS, None], "other": list(range(5))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    assert read("parquet", tmp_path) == TEXTS


def test_huggingface_dataset_and_dataset_dict(tmp_path: Path) -> None:
    import datasets

    data = datasets.Dataset.from_dict({"text": TEXTS, "id": list(range(4))})
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(
        tmp_path / "dict"
    )
    datasets.DatasetDict({"test": data}).save_to_disk(tmp_path / "no_train")
    assert read("huggingface", tmp_path / "one") == TEXTS
    assert read("huggingface", tmp_path / "dict") == TEXTS
    for path, words in (("none", "not a dataset"), ("no_train", "'train'")):
        with pytest.raises(WeftError) as error:
            read("huggingface", tmp_path / path)
        one_line(error, words)
    with pytest.raises(WeftError) as error:
        read("huggingface", tmp_path / "one", field="txt")
    one_line(error, "did you mean 'text'")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"text": "a"}\n{"text": \n', ["a.jsonl:2", "JSON"]),
        (b'{"txt": "a"}\n', ["a.jsonl:1", "'text'", "did you mean 'txt'"]),
        (b'{"text": "a"}\n[1]\n', ["a.jsonl:2", "list"]),
        (b'{"text": 3}\n', ["a.jsonl:1", "int"]),
        (b'{"text": "\xff"}\n', ["a.jsonl:1"]),
    ],
)
def test_jsonl_errors_name_file_and_line(
    tmp_path: Path, content: bytes, words: list[str]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(WeftError) as error:
        read("jsonl", tmp_path / "a.jsonl")
    one_line(error, *words)


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "tokens"])
def test_missing_and_empty_sources(tmp_path: Path, kind: str) -> None:
    for path in ("missing", "*.nothing", ""):
        with pytest.raises(WeftError) as error:
            source_files(
                Source.model_validate({"kind": kind, "path": str(tmp_path / path)})
            )
        one_line(error, str(tmp_path), "'path'")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ok \xff")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 nonsense")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:40])
    (tmp_path / "d.jsonl.gz").write_bytes(b"not compressed")
    for kind, name in (
        ("text", "a.txt"),
        ("parquet", "b.parquet"),
        ("jsonl", "c.jsonl.gz"),
        ("jsonl", "d.jsonl.gz"),
    ):
        with pytest.raises(WeftError) as error:
            read(kind, tmp_path / name)
        one_line(error, name)


def test_parquet_without_the_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"content": ["a"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(WeftError) as error:
        read("parquet", tmp_path / "a.parquet", field="contents")
    one_line(error, "a.parquet", "did you mean 'content'")
    with pytest.raises(WeftError) as error:
        read("parquet", tmp_path / "a.parquet", field="n")
    one_line(error, "a.parquet", "int")


def test_a_missing_library_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(WeftError) as error:
        read("parquet", tmp_path / "a.parquet")
    one_line(error, "pyarrow", "weft[data]")


def test_docstrings_are_questions_with_their_lines(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    hidden = '    def _hidden(self):\n        """Nobody asks what this does here."""\n'
    (package / "tools.py").write_text(
        'def cut(x):\n    """Cut it into pieces of\n    equal size.\n\n    More of it."""\n\n\n'
        f'class Saw:\n    """A tool that cuts wood well."""\n\n{hidden}'
        '    def run(self):\n        """Too short."""\n'
    )
    (tmp_path / "broken.py").write_text("def (")
    source = Source(kind="chat", form="docstrings", path=str(tmp_path))
    found = [
        (place.line, *(m["content"] for m in talk.messages))
        for place, talk in read_samples(source)
    ]
    assert found == [
        (
            1,
            "What does the Python function pack.tools.cut do?",
            "Cut it into pieces of equal size.",
        ),
        (
            8,
            "What does the Python class pack.tools.Saw do?",
            "A tool that cuts wood well.",
        ),
    ]
    # the standard library's
    assert len(source_files(Source(kind="chat", form="docstrings"))) > 300
