"""``weft data contained``: the graph and the plan as text and as JSON; what cannot be read is named."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from weft.cli.data import app
from weft.errors import WeftError


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    for name, first, last in (("all", 0, 900), ("half", 0, 450), ("part", 20, 30), ("apart", 900, 910)):  # fmt: skip
        table = pa.table({"id": range(first, last), "name": [f"n{i}" for i in range(first, last)]})  # fmt: skip
        pq.write_table(table, tmp_path / f"{name}.parquet")
    return tmp_path


def contained(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["contained", *map(str, arguments)], standalone_mode=False)  # fmt: skip
    if result.exception:
        raise result.exception
    return result.return_value, result.stdout, result.stderr


def test_says_what_is_contained_and_deletes_nothing(lake: Path) -> None:
    before = {path: path.read_bytes() for path in lake.iterdir()}
    code, text, notes = contained(lake, "--reads", 0)
    assert code == 0 and not notes
    assert (
        f"{lake}/part.parquet is in {lake}/all.parquet (all 10 rows looked for)" in text
    )
    assert (
        f"{lake}/half.parquet is in {lake}/all.parquet (64 of 450 rows looked for)"
        in text
    )
    assert (
        "12 pairs: 0 differ in columns, 9 in ranges, 0 in rows, 3 are contained" in text
    )
    assert "plan: delete 2 of 4 tables" in text and "(nothing is deleted here)" in text
    assert (
        f"half.parquet: its rows are in {lake}/all.parquet; look for all rows first: --rows 0"
        in text
    )
    assert before == {path: path.read_bytes() for path in lake.iterdir()}


def test_json_has_all_of_it(lake: Path) -> None:
    _, text, _ = contained(lake, "--rows", 0, "--json", "--reads", 0)
    report = json.loads(text)
    pairs = {(Path(e["table"]).stem, Path(e["within"]).stem) for e in report["contained"]}  # fmt: skip
    assert pairs == {("half", "all"), ("part", "all"), ("part", "half")}
    assert all(edge["all_rows"] for edge in report["contained"])
    deleted = report["plan"]["delete"].items()
    assert {(Path(a).stem, Path(b).stem) for a, b in deleted} == {
        ("half", "all"),
        ("part", "all"),
    }
    assert report["plan"]["cost"] < report["plan"]["cost_of_all"]
    assert 0 < report["footer_bytes"] < sum(t["bytes"] for t in report["tables"])
    _, text, _ = contained(lake, "--no-plan", "--json")
    assert json.loads(text)["plan"] is None
    _, text, _ = contained(lake, "--reads", 1000)
    assert "plan: keep all tables" in text


def test_what_cannot_be_read_is_named(lake: Path) -> None:
    (lake / "cut.parquet").write_bytes((lake / "all.parquet").read_bytes()[:-30])
    code, text, notes = contained(lake)
    assert code == 1 and "3 are contained" in text
    assert f"note: {lake}/cut.parquet is left out: " in notes
    code, text, _ = contained(lake, "--json")
    assert code == 1 and list(json.loads(text)["not_read"]) == [f"{lake}/cut.parquet"]
    with pytest.raises(WeftError, match=r"no table can be read: .*cut.parquet"):
        contained(lake / "cut.parquet")


def test_folders_as_tables(lake: Path) -> None:
    for name, files in (("one", ["half", "part"]), ("two", ["all"])):
        (lake / name).mkdir()
        for file in files:
            (lake / f"{file}.parquet").rename(lake / name / f"{file}.parquet")
    (lake / "apart.parquet").unlink()
    _, text, _ = contained("--folders", lake, "--rows", 0)
    assert f"{lake}/one is in {lake}/two (all 460 rows looked for)" in text
