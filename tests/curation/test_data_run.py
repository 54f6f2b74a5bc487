"""Runs of data pipelines: the result depends on nothing but the sources and the file, and nothing is done twice."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import Command
from weft.curation import operator_code, run_output, source_units
from weft.curation.data_run import DataResult, run_pipeline
from weft.curation.read_pipeline import build_pipeline, load_pipeline
from weft.curation.source_units import source_labels
from weft.curation.work_folder import sole_writer
from weft.errors import UsageError, WeftError
from weft.recipe import Source

Step = dict[str, Any]


def write_lines(path: Path, texts: list[str], **more: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [{"text": text} | more for text in texts]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def run(
    folder: Path, *steps: Step, out: str = "out", workers: int = 0, **more: Any
) -> DataResult:
    tree = {
        "plugins": ["tests.my_operators"],
        "sources": [{"kind": "jsonl", "path": str(folder / "data")}],
        "steps": list(steps),
    }
    return run_pipeline(build_pipeline(tree | more), folder / out, workers)


def rows(folder: Path, out: str = "out") -> list[dict[str, Any]]:
    files = sorted((folder / out / "documents").glob("*.parquet"))
    return [row for f in files for row in pyarrow.parquet.read_table(f).to_pylist()]


def manifest(folder: Path, out: str = "out") -> bytes:
    return (folder / out / "manifest.json").read_bytes()


PARTS: Step = {"operator": "parts"}
LENGTHS: Step = {"operator": "lengths", "least": 3}
SAME: Step = {"operator": "same"}

TEXTS = st.lists(
    st.lists(st.text("ab|", max_size=6), min_size=1, max_size=4), min_size=1, max_size=4
)


@pytest.mark.slow(4)
@given(TEXTS, st.integers(1, 9), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_result_does_not_depend_on_shards_and_order(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[list[str]],
    shards: int,
    draw: random.Random,
) -> None:
    """The order in which files are written, and by which a folder lists them, is nothing that counts."""
    folder = tmp_path_factory.mktemp("run")
    pairs = [(f"{number}.jsonl", texts) for number, texts in enumerate(files)]
    steps = draw.sample([PARTS, LENGTHS, SAME], 3)
    for place, shards_here in (("one", 1), ("several", shards)):
        draw.shuffle(pairs)
        for name, texts in pairs:
            write_lines(folder / place / "data" / name, texts)
        run(folder / place, *steps, shards=shards_here)
    assert rows(folder / "one") == rows(folder / "several")
    cards = [json.loads((folder / p / "out/card.json").read_text()) for p in ("one", "several")]  # fmt: skip
    for card in cards:
        card.pop("manifest")
        card["sources"][0].pop("path")
    assert cards[0] == cards[1]
    shutil.rmtree(folder)


def test_steps_do_what_they_say(tmp_path: Path) -> None:
    write_lines(tmp_path / "data/a.jsonl", ["long text|no", "", "long text"], page=7)
    result = run(tmp_path, PARTS, LENGTHS, SAME)
    assert rows(tmp_path) == [
        {"id": "data:a.jsonl#1/0", "text": "long text", "alike": 2, "length": 9, "page": 7}
    ]  # fmt: skip
    assert [s.counts.left for s in result.steps] == [3, 2, 1]
    assert result.steps[0].counts.reasons == {"left out by the mapper": 1}
    assert result.steps[1].counts.reasons == {"short": 1}
    (sample,) = result.steps[2].counts.samples["same"]
    assert sample.id == "data:a.jsonl#3/0"
    assert sample.reason == "same: data:a.jsonl#1/0"


def test_everything_kept_is_the_source_itself(tmp_path: Path) -> None:
    records = [
        {"text": "häb", "n": 1, "list": [1, 2], "id": "own", "maybe": None},
        {"text": " \n", "n": 2, "list": [], "id": "x", "maybe": "y"},
    ]
    (tmp_path / "data").mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "data/a.jsonl").write_text(lines)
    result = run(tmp_path, {"operator": "lengths"}, output={"format": "jsonl"})
    written = (tmp_path / "out/documents/00000.jsonl").read_text().splitlines()
    for number, (line, record) in enumerate(zip(written, records, strict=True), 1):
        wanted = record | {
            "id": f"data:a.jsonl#{number}", "source_id": record["id"], "length": len(str(record["text"])),
        }  # fmt: skip
        assert json.loads(line) == wanted
    assert result.documents == 2 and not result.notes


def test_workers_give_the_same_manifest(tmp_path: Path) -> None:
    for number in range(4):
        write_lines(tmp_path / f"data/{number}.jsonl", [f"text {number}", "same", "ab"])
    steps = (LENGTHS, SAME)
    run(tmp_path, *steps, shards=4)
    first = manifest(tmp_path)
    shutil.rmtree(tmp_path / "out")
    run(tmp_path, *steps, shards=4, workers=2)
    assert manifest(tmp_path) == first


@pytest.mark.soak
@pytest.mark.slow(10)
def test_ended_process_is_replaced_once(tmp_path: Path) -> None:
    write_lines(tmp_path / "data/a.jsonl", ["text"])
    result = run(tmp_path, SAME | {"die": str(tmp_path / "died")}, workers=1)
    assert result.documents == 1 and (tmp_path / "died").exists()
    with pytest.raises(
        WeftError, match=r"the process of shard 0 \(steps\) ended by exit"
    ):
        run(tmp_path, SAME | {"die": "/dev/null/never"}, workers=1)


def calls(log: Path) -> list[str]:
    lines = log.read_text().split() if log.exists() else []
    log.unlink(missing_ok=True)
    return sorted(lines)


def test_nothing_is_done_twice(tmp_path: Path) -> None:
    write_lines(tmp_path / "data/a.jsonl", ["a", "bb", "ccc", "dddd"])
    write_lines(tmp_path / "data/b.jsonl", ["ccc", "eeeee"])
    first, second = tmp_path / "first", tmp_path / "second"
    filtered = {"operator": "lengths", "least": 3, "log": str(first)}
    same = {"operator": "same", "log": str(second)}

    run(tmp_path, filtered, same, shards=2)
    assert len(calls(first)) == 6 and len(calls(second)) == 4
    before = manifest(tmp_path)
    again = run(tmp_path, filtered, same, shards=2)
    assert again.reused == again.tasks and manifest(tmp_path) == before

    # a threshold that lets more pass: only what is new to the second step is summarized
    run(tmp_path, filtered | {"least": 2}, same, shards=2)
    assert not calls(first) and calls(second) == ["data:a.jsonl#2"]
    # a setting of the decision: no pass at all
    run(tmp_path, filtered, same | {"keep": "last"}, shards=2)
    assert not calls(first) and not calls(second)
    assert [r["id"] for r in rows(tmp_path)][-1] == "data:b.jsonl#2"
    # another step before: its suffix is done again
    run(tmp_path, PARTS, filtered, same, shards=2)
    assert len(calls(first)) == 6 and len(calls(second)) == 4
    # back to what was: as it was
    run(tmp_path, filtered, same, shards=2)
    assert not calls(first) and not calls(second) and manifest(tmp_path) == before


def test_only_a_changed_file_is_read_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    step = {"operator": "lengths", "log": str(log)}
    for name in "abc":
        write_lines(tmp_path / f"data/{name}.jsonl", [f"text of {name}"])
    run(tmp_path, step, shards=3)
    calls(log)
    write_lines(tmp_path / "data/0.jsonl", ["a text before all others"])
    write_lines(tmp_path / "data/c.jsonl", ["another text of c"])
    run(tmp_path, step, shards=4)
    assert calls(log) == ["data:0.jsonl#1", "data:c.jsonl#1"]


def test_document_on_which_an_operator_fails_is_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "data/a.jsonl", ["good", "bad 1", "fine", "bad 2"])
    step = {"operator": "lengths", "fails": "bad"}
    with pytest.raises(WeftError) as error:
        run(tmp_path, step)
    assert "steps[0] (lengths): the operator raised an error on 2" in str(error.value)
    assert "#2: ValueError: cannot read 'bad 1'; data:a.jsonl#4" in str(error.value)
    assert not (tmp_path / "out/manifest.json").exists()
    result = run(tmp_path, step | {"on_error": "skip"}, SAME)
    assert [row["text"] for row in rows(tmp_path)] == ["good", "fine"]
    assert result.steps[0].counts.failed == 2
    assert "2 documents left out" in result.notes[0]


def test_two_runs_on_one_folder(tmp_path: Path) -> None:
    write_lines(tmp_path / "data/a.jsonl", ["text"])
    run(tmp_path)
    with (tmp_path / "out/.work/lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711")
        lock.flush()
        with pytest.raises(WeftError, match="process 4711 writes to"):
            run(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    with pytest.raises(WeftError, match="has files that 'weft data run' has not"):
        run(tmp_path, out="other")


def test_damaged_intermediate_file_is_named_and_mended(tmp_path: Path) -> None:
    write_lines(tmp_path / "data/a.jsonl", ["text"])
    run(tmp_path, LENGTHS)
    before = manifest(tmp_path)
    (file,) = (tmp_path / "out/.work/texts").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:-9] + b"x" * 9)
    with pytest.raises(WeftError, match=f"{file.name} was damaged"):
        run(tmp_path, LENGTHS, SAME)
    run(tmp_path, LENGTHS)
    assert manifest(tmp_path) == before


def test_damaged_source_is_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "data/a.jsonl", ["text"])
    with (tmp_path / "data/a.jsonl").open("a") as file:
        file.write('{"text": "cut o')
    with pytest.raises(WeftError, match=r"a\.jsonl:2: not valid JSON"):
        run(tmp_path)
    (tmp_path / "data/b.jsonl.gz").write_bytes(b"\x1f\x8bno")
    with pytest.raises(WeftError, match=r"cannot read .*b\.jsonl\.gz"):
        run(tmp_path, sources=[{"kind": "jsonl", "path": f"{tmp_path}/data/b.jsonl.gz"}])  # fmt: skip


def test_schema_that_changes(tmp_path: Path) -> None:
    lines = ['{"text": "a", "n": 1}', '{"text": "b", "n": "two"}']
    (tmp_path / "data").mkdir()
    for number, line in enumerate(lines):
        (tmp_path / f"data/{number}.jsonl").write_text(line)
    for shards in (1, 2):
        result = run(tmp_path, shards=shards)
        (note,) = result.notes
        assert "column 'n'" in note and "data:1.jsonl#1" in note
        assert [row["n"] for row in rows(tmp_path)] == ["1", '"two"']


def test_empty_source_and_empty_result(tmp_path: Path) -> None:
    write_lines(tmp_path / "data/a.jsonl", ["text"])
    write_lines(tmp_path / "empty/a.jsonl", [])
    both = [{"kind": "jsonl", "path": str(tmp_path / p)} for p in ("data", "empty")]
    with pytest.raises(WeftError, match=r"sources\[1\] \(empty\) holds no document"):
        run(tmp_path, sources=both)
    result = run(tmp_path, LENGTHS | {"least": 99})
    assert "steps[0] (lengths) dropped the last ones: short (1)" in result.problem


def test_parts_of_large_files_are_all_of_them(tmp_path: Path) -> None:
    texts = [f"text {'x' * (number % 7)}" for number in range(50)]
    write_lines(tmp_path / "data/a.jsonl", texts)
    table = pyarrow.table({"text": texts})
    (tmp_path / "tables").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "tables/a.parquet", row_group_size=9)
    parquet = [{"kind": "parquet", "path": str(tmp_path / "tables")}]
    for sources in ({}, {"sources": parquet}):
        result = run(tmp_path, shards=7, **sources)
        assert [row["text"] for row in rows(tmp_path)] == texts
        numbers = [int(row["id"].partition("#")[2]) for row in rows(tmp_path)]
        assert numbers == list(range(1, 51))
        assert len(list((tmp_path / "out/documents").glob("*"))) >= 6
        assert result.documents == 50


def test_mistakes_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text(
        f'[[sources]]\nkind = "text"\npath = "{tmp_path}"\n[[steps]]\noperator = "words"\n'
    )
    assert load_pipeline(file, ["steps.words.least=3"]).steps[0].model_dump()["least"] == 3  # fmt: skip
    for item, why in (
        ("steps.wrds.least=3", "did you mean 'words'"),
        ("steps.words.lest=3", "steps.0.lest"),
        ("steps.0.operator=wordz", "did you mean 'words'"),
        ("shards=-1", "shards"),
    ):
        with pytest.raises(UsageError, match=why):
            load_pipeline(file, [item])
    with pytest.raises(WeftError, match=r"pipeline stdlip does not exist"):
        load_pipeline("stdlip")


def test_command(tmp_path: Path, command: Command) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("some words")
    file = tmp_path / "p.toml"
    file.write_text(f'sources = [{{ kind = "text", path = "{tmp_path}/texts" }}]\n')
    words = ["data", "run", str(file), "--out", str(tmp_path / "o"), "--workers", "0"]
    code, output, _ = command(*words)
    assert code == 0 and "written\t\t1\t10 characters" in output
    code, output, _ = command(*words, "--json")
    assert code == 0 and json.loads(output)["documents"] == 1
    code, _, error = command(*words, "--set", "steps=[{operator='words'}]")
    assert code == 1 and "no document is left" in error


def test_what_operators_say_of_a_decision_is_kept_with_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for site in ("x", "y"):
        texts = [f"{site} {number} here" for number in range(4)]
        write_lines(tmp_path / f"data/{site}.jsonl", texts, site=site)
    steps: list[Step] = [
        {"operator": "clusters", "number": 8},
        {"operator": "prune", "number": 6, "label": "site"},
        {"operator": "top", "number": 3, "keep": "random", "group": "site", "floor": 1},
    ]
    first = run(tmp_path, *steps)
    assert [note.partition(": ")[2][:26] for note in first.notes] == [
        "8 of 8 documents kept, of ",
        "warning: 8 examples are to",
        "kept by site: x 3 of 4, y ",
        first.notes[3].partition(": ")[2][:26],
    ]
    assert first.notes[3].startswith("steps[2] (top): kept by site: ")
    for more in (
        [],
        [LENGTHS | {"least": 1}],
    ):  # kept decisions, with others after them
        again = run(tmp_path, *steps, *more)
        assert again.notes == first.notes and again.reused > 0
        page = (tmp_path / "out/report.html").read_text()
        card = json.loads((tmp_path / "out/card.json").read_text())
        said = [line for step in card["steps"] for line in step["notes"]]
        assert said == [note.partition(": ")[2] for note in first.notes]
        assert all(line in page for line in said)
    assert capfd.readouterr().err == ""


def test_a_document_is_not_kept_by_another_whose_id_begins_alike(
    tmp_path: Path,
) -> None:
    write_lines(tmp_path / "data/a.jsonl", ["", *["text|text"] * 11])
    result = run(tmp_path, PARTS)
    assert result.steps[0].counts.reasons == {"left out by the mapper": 1}
    assert result.sources[0].dropped == {"0": 1}


def test_a_run_that_ended_after_another_leaves_no_documents_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run before it, done again, publishes its own documents, of which the files are called alike."""
    write_lines(tmp_path / "data/a.jsonl", ["one", "another"])
    run(tmp_path)
    before = rows(tmp_path)
    real = run_output.write_json_file

    def ended(path: Path, value: Any) -> None:
        if path.name == "published-documents.json":
            raise KeyboardInterrupt
        real(path, value)

    with monkeypatch.context() as patch:
        patch.setattr(run_output, "write_json_file", ended)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, {"operator": "lengths", "least": 5})
    assert len(rows(tmp_path)) == 1
    run(tmp_path)
    assert rows(tmp_path) == before


def test_names_and_fields_that_are_no_unicode(tmp_path: Path) -> None:
    """Bytes in names of files, and halves of characters in fields beside the text, stop no run."""
    write_lines(tmp_path / "data/a\udcff.jsonl", ["text"], tags=["\ud800"], of={"\udfff": 1})  # fmt: skip
    run(tmp_path)
    (row,) = rows(tmp_path)
    assert row["id"] == "data:a\\xff.jsonl#1" and row["tags"] == ["?"]
    assert json.loads(row["of"]) == {"?": 1}


def test_steps_whose_addresses_differ_behind_a_query_have_other_digests() -> None:
    steps = [
        mock.Mock(operator="words", model_dump=mock.Mock(return_value={"of": f"https://h/?{query}"}))
        for query in "ab"
    ]  # fmt: skip
    first, second = (operator_code.step_digests(step, mock.Mock(spec=["late"], late=())) for step in steps)  # fmt: skip
    assert first.early != second.early and first.whole != second.whole


def test_labels_of_sources_are_different() -> None:
    paths = ("/a/x~v", "/b/x~v", "/x~2", "/c/x", "/d/x", "/e/*.txt", "/f/*.txt")
    sources = [Source(kind="text", path=path) for path in paths]
    labels = source_labels(sources)
    assert labels == ["x~v", "x~v~2", "x~2", "x", "x~3", "text", "text~2"]
    signed = [Source(kind="text", path=f"{at}://me:word@x") for at in ("s3", "https")]
    assert source_labels(signed) == ["x", "x~2"]


def test_a_file_that_is_no_text_is_skipped_on_demand_and_files_not_read_are_named(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "good.txt").write_text("a text")
    (folder / "bad.txt").write_bytes(b"bad\x80\x81")
    (folder / "blob.bin").write_bytes(b"\x00\x01")
    source = {"kind": "text", "path": str(folder), "name": "mail"}
    with pytest.raises(WeftError, match=r"bad\.txt as text"):
        run(tmp_path, SAME, sources=[source])
    result = run(tmp_path, SAME, sources=[source | {"on_error": "skip"}])
    assert [row["id"] for row in rows(tmp_path)] == ["mail:good.txt"]
    assert any("bad.txt" in line for line in result.notes)
    assert any("source mail" in n and "blob.bin" in n for n in result.notes)


def test_a_wrong_value_is_explained_by_the_operator_of_its_step() -> None:
    tree = {"steps": [{"operator": "words", "least": "twenty"}]}
    with pytest.raises(UsageError, match=r"steps\.0\.least = 'twenty'.*least: .*words"):
        build_pipeline(tree | {"sources": [{"kind": "stdlib"}]})


def test_numbers_have_one_type_in_any_shards(tmp_path: Path) -> None:
    """Whole numbers among others are floats, and numbers that no type of a table holds are JSON."""
    numbers = [1, 2.5, 3, 4]
    large = [1, 2**53 + 1, 2, 3]
    huge = [[1], [2**70], [], None]
    mixed = [1, 0.5, 2**60 + 1, 2]
    lines = [
        json.dumps({"text": f"{i}", "n": n, "large": a, "huge": b, "mixed": c})
        for i, (n, a, b, c) in enumerate(zip(numbers, large, huge, mixed, strict=True))
    ]
    for number, line in enumerate(lines):
        write_lines(tmp_path / f"data/{number}.jsonl", [])
        (tmp_path / f"data/{number}.jsonl").write_text(line)
    for shards in (1, 4):
        run(tmp_path, shards=shards, out=f"out-{shards}")
    one, several = rows(tmp_path, "out-1"), rows(tmp_path, "out-4")
    assert one == several
    assert [row["n"] for row in one] == numbers and isinstance(one[0]["n"], float)
    assert [row["large"] for row in one] == large
    assert [row["huge"] for row in one] == ["[1]", f"[{2**70}]", "[]", None]
    assert [row["mixed"] for row in one] == ["1", "0.5", f"{2**60 + 1}", "2"]


def test_a_file_that_changes_while_it_is_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "data/a.jsonl", ["one", "another"])
    real = source_units.read_records

    def changing(*given: Any) -> Any:
        write_lines(tmp_path / "data/a.jsonl", ["one", "another", "more"])
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(source_units, "read_records", changing)
        with pytest.raises(WeftError, match=r"a\.jsonl has changed while it was read"):
            run(tmp_path)
    run(tmp_path)
    assert len(rows(tmp_path)) == 3


def test_code_of_a_plugin_is_all_that_it_imports_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parcel").mkdir()
    sources = {
        "parcel/__init__.py": "",
        "parcel/operator.py": "from . import far\nfrom .near import value\n",
        "parcel/near.py": "import json\nvalue = 1\n",
        "parcel/far.py": "raise RuntimeError\n",
        "single_operator.py": "def map():\n    from beside_it import value\n",
        "beside_it.py": "import numpy\n",
    }
    for name, text in sources.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    def digests() -> list[str]:
        operator_code.code_digest.cache_clear()
        return [*map(operator_code.code_digest, ("parcel.operator", "single_operator"))]

    before = digests()
    assert digests() == before
    for name, which in ("parcel/near.py", 0), ("parcel/far.py", 0), ("beside_it.py", 1):
        (tmp_path / name).write_text(sources[name] + "\n#\n")
        now = digests()
        assert [a == b for a, b in zip(now, before, strict=True)] == [which != 0, which != 1]  # fmt: skip
        before = now


def test_a_disk_that_is_full_from_the_start_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock, the first file that is written, cannot hold the number of the process."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as during:
        during.setattr(os, "write", full)
        with (
            pytest.raises(WeftError, match=r"out: No space left on device; make room"),
            sole_writer(tmp_path / "out"),
        ):
            pass
    with sole_writer(tmp_path / "out"):
        assert (tmp_path / "out/.work/lock").read_text() == str(os.getpid())
