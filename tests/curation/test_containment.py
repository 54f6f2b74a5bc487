"""Containment: no true one is ever dropped, false ones are left as rarely as the formula says."""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.curation import anti_join
from weft.curation.containment import containment_graph, ranges_allow, schema_allows
from weft.curation.table_footers import LakeTable, read_lake_table, table_files
from weft.errors import UsageError, WeftError

#: Values by column; a column's name says of which kind it is.
NAN = float("nan")
DAY = datetime.date(2024, 2, 29)
NOON = datetime.datetime(2024, 2, 29, 12, 0, 0)
POOLS: dict[str, list[Any]] = {
    "number": [None, 0, 1, -3, 2**40],
    "real": [None, 0.0, -0.0, 1.0, -3.0, NAN, 0.5],
    "text": [None, "", "a", "ab", "é", "z" * 70],
    "bytes": [None, b"", b"\xff", b"a"],
    "flag": [None, True, False],
    "day": [None, DAY, DAY.replace(year=1960)],
    "time": [None, NOON, NOON.replace(microsecond=5000)],
    "list": [None, [], [1, None], [1, 2]],
    "struct": [None, {"a": 1, "b": "x"}, {"a": None, "b": "y"}],
    "price": [None, decimal.Decimal("1.50"), decimal.Decimal(0)],
    "nothing": [None],
}
#: Types in which the values of a column may be written: all hold all of its values.
TYPES: dict[str, list[pa.DataType]] = {
    "number": [pa.int64(), pa.float64(), pa.decimal128(20, 0)],
    "real": [pa.float64(), pa.float32()],
    "text": [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())],
    "bytes": [pa.binary(), pa.large_binary()],
    "flag": [pa.bool_()],
    "day": [pa.date32(), pa.date64()],
    "time": [pa.timestamp("ms"), pa.timestamp("us"), pa.timestamp("ns")],
    "list": [pa.list_(pa.int64()), pa.list_(pa.int32())],
    "struct": [pa.struct({"a": pa.int64(), "b": pa.string()}), pa.struct({"b": pa.string(), "a": pa.int8()})],
    "price": [pa.decimal128(10, 2), pa.decimal256(40, 5), pa.float64()],
    "nothing": [pa.null(), pa.int32(), pa.string()],
}  # fmt: skip


def array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_decimal(kind):
        values = [None if v is None else decimal.Decimal(v) for v in values]
    if pa.types.is_floating(kind):
        values = [None if v is None else float(v) for v in values]
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode()
    return pa.array(values, kind)


Rows = list[dict[str, Any]]


def write_rows(
    path: Path, rows: Rows, kinds: dict[str, pa.DataType], group: int
) -> LakeTable:
    columns = {name: array([row[name] for row in rows], kind) for name, kind in kinds.items()}  # fmt: skip
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return read_lake_table(path.stem, [path])


@st.composite
def families(draw: st.DrawFn) -> tuple[Rows, list[tuple[list[str], list[int]]]]:
    """Rows of a table, and tables made from it: their columns and their rows, with repetitions and in any order."""
    names = draw(st.lists(st.sampled_from(sorted(POOLS)), min_size=1, max_size=5, unique=True))  # fmt: skip
    row = st.fixed_dictionaries({name: st.sampled_from(POOLS[name]) for name in names})
    rows = draw(st.lists(row, max_size=12))
    index = st.integers(0, len(rows) - 1) if rows else st.nothing()
    tables = [
        (
            draw(st.lists(st.sampled_from(names), min_size=1, unique=True)),
            draw(st.lists(index, max_size=14)) if rows else [],
        )
        for _ in range(draw(st.integers(1, 2)))
    ]
    return rows, tables


def plain(value: Any) -> Any:
    """The value such that equal ones are equal in Python."""
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, list):
        return tuple(value)
    return tuple(sorted(value.items())) if isinstance(value, dict) else value


def truly_contained(a: tuple[list[str], Rows], b: tuple[list[str], Rows]) -> bool:
    if not set(a[0]) <= set(b[0]):
        return False
    have = {tuple(plain(row[name]) for name in a[0]) for row in b[1]}
    return all(tuple(plain(row[name]) for name in a[0]) in have for row in a[1])


def check_recall(
    folder: Path, family: tuple[Rows, list[tuple[list[str], list[int]]]], data: st.DataObject
) -> None:  # fmt: skip
    rows, derived = family
    contents = [(list(rows[0]) if rows else derived[0][0], rows)]
    contents += [(names, [rows[i] for i in order]) for names, order in derived]
    tables = []
    for number, (names, own) in enumerate(contents):
        kinds = {name: data.draw(st.sampled_from(TYPES[name])) for name in names}
        group = data.draw(st.integers(1, 6))
        tables.append(write_rows(folder / f"{number}.parquet", own, kinds, group))
    truth = {
        (str(a), str(b))
        for a in range(len(contents))
        for b in range(len(contents))
        if a != b and truly_contained(contents[a], contents[b])
    }
    for limit in (None, 2):
        graph = containment_graph(tables, limit)
        assert not graph.uncompared
        edges = {(edge.table, edge.within) for edge in graph.edges}
        assert truth <= edges, "a true containment was dropped"
        if limit is None:
            assert edges == truth
            assert all(edge.is_proved for edge in graph.edges)


@given(families(), st.data())
@settings(max_examples=20, deadline=None)
def test_recall_is_one(
    tmp_path_factory: pytest.TempPathFactory, family: Any, data: st.DataObject
) -> None:
    check_recall(tmp_path_factory.mktemp("lake"), family, data)


@pytest.mark.soak
@given(families(), st.data())
@settings(max_examples=4000, deadline=None)
def test_recall_is_one_in_many_families(
    tmp_path_factory: pytest.TempPathFactory, family: Any, data: st.DataObject
) -> None:
    check_recall(tmp_path_factory.mktemp("lake"), family, data)


def write_columns(path: Path, **columns: Any) -> LakeTable:
    pq.write_table(pa.table(columns), path)
    return read_lake_table(path.stem, [path])


def test_each_step_drops_what_it_can(tmp_path: Path) -> None:
    whole = write_columns(tmp_path / "whole.parquet", id=range(100), name=[str(i) for i in range(100)])  # fmt: skip
    part = write_columns(tmp_path / "part.parquet", id=[3, 4, 4])
    other = write_columns(tmp_path / "other.parquet", id=[3], color=["red"])
    beyond = write_columns(tmp_path / "beyond.parquet", id=[3, 100])
    gaps = write_columns(tmp_path / "gaps.parquet", id=[3.0, 4.5])
    graph = containment_graph([whole, part, other, beyond, gaps], None)
    assert {(e.table, e.within) for e in graph.edges} == {("part", "whole")}
    assert graph.dropped["ranges"] >= 2 and graph.dropped["rows"] >= 1
    assert sum(graph.dropped.values()) + 1 == 5 * 4
    assert not schema_allows(other, whole) and not ranges_allow(beyond, whole)
    assert schema_allows(gaps, whole) and ranges_allow(gaps, whole)


def test_integers_beyond_floats_are_not_equal_to_them(tmp_path: Path) -> None:
    exact = write_columns(tmp_path / "a.parquet", x=[2**53 + 1])
    rounded = write_columns(tmp_path / "b.parquet", x=pa.array([2.0**53, 2.0**54]))
    even = write_columns(tmp_path / "c.parquet", x=[2**53])
    edges = containment_graph([exact, rounded, even], None).edges
    assert [(e.table, e.within) for e in edges] == [("c", "b")]


def test_footers_alone_are_read(tmp_path: Path) -> None:
    """The middle of the file is overwritten: nobody who reads footers only can notice."""
    path = tmp_path / "a.parquet"
    table = write_columns(path, x=np.random.default_rng(0).normal(size=50_000))
    whole = path.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    assert table.footer_bytes == footer < len(whole) / 100
    path.write_bytes(b"PAR1" + bytes(len(whole) - footer - 4) + whole[-footer:])
    assert read_lake_table("a", [path]).ranges == table.ranges
    assert table.ranges["x"].is_whole and table.rows == 50_000


def test_false_containments_are_left_as_often_as_the_formula_says(
    tmp_path: Path,
) -> None:
    """5 % of the rows are missing in the other table: 64 rows do not show that in (1 - 0.05)^64 of the cases."""
    table = write_columns(tmp_path / "a.parquet", x=range(10_000))
    whole = np.arange(10_000)
    there = set(whole[whole % 20 != 7].tolist())
    trials = 600
    left = 0
    for seed in range(trials):
        sample = anti_join.sample_rows(table, 64, seed)
        assert sample is not None and sample.size == 64
        left += set(sample.table["x"].to_pylist()) <= there
    p = 0.95**64
    assert abs(left - trials * p) < 2.576 * math.sqrt(trials * p * (1 - p))
    # the join is what the sets say
    within = write_columns(tmp_path / "b.parquet", x=sorted(there))
    for seed in range(3):
        sample = anti_join.sample_rows(table, 64, seed)
        assert sample is not None
        missing = set(sample.table["x"].to_pylist()) - there
        assert anti_join.missing_rows(sample, within) == len(missing)


@given(families(), st.data())
@settings(max_examples=30, deadline=None)
def test_duckdb_and_pyarrow_agree(
    tmp_path_factory: pytest.TempPathFactory, family: Any, data: st.DataObject
) -> None:
    pytest.importorskip("duckdb")
    folder = tmp_path_factory.mktemp("lake")
    rows, _ = family
    plain_names = ("number", "real", "text", "flag", "day", "time")
    names = [name for name in (rows[0] if rows else []) if name in plain_names]
    kinds = {name: data.draw(st.sampled_from(TYPES[name])) for name in names}
    if not names:
        return
    whole = write_rows(folder / "w.parquet", rows, kinds, 3)
    row = st.fixed_dictionaries({name: st.sampled_from(POOLS[name]) for name in names})
    own = data.draw(st.lists(row, min_size=1, max_size=4))
    sample = anti_join.sample_rows(write_rows(folder / "s.parquet", own, kinds, 2), None, 0)  # fmt: skip
    assert sample is not None and anti_join._duckdb_compares(sample, whole)
    joined = anti_join._missing_in_duckdb(sample, whole)
    assert joined == len(anti_join._missing_in_batches(sample, whole))


def test_samples_cross_row_groups_and_files(tmp_path: Path) -> None:
    for number in range(3):
        part = pa.table({"x": range(number * 10, number * 10 + 10)})
        pq.write_table(part, tmp_path / f"{number}.parquet", row_group_size=3)
    files = table_files([tmp_path], whole_folders=True)[str(tmp_path)]
    table = read_lake_table("t", files)
    assert table.rows == 30
    whole = anti_join.sample_rows(table, None, 0)
    assert whole is not None and whole.table["x"].to_pylist() == list(range(30))
    drawn = [anti_join.sample_rows(table, 5, seed) for seed in range(60)]
    values = {x for sample in drawn if sample for x in sample.table["x"].to_pylist()}
    assert values == set(range(30))


def test_which_files_are_tables(tmp_path: Path) -> None:
    for name in ("a/x.parquet", "a/y.parquet", "b/z.parquet", "b/.hidden/w.parquet"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"x": [1]}), path)
    names = {k: len(v) for k, v in table_files([tmp_path], True).items()}
    assert names == {str(tmp_path / "a"): 2, str(tmp_path / "b"): 1}
    again = [tmp_path / "a", tmp_path / "a/x.parquet"]
    assert len(table_files(again, whole_folders=False)) == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="there is no Parquet file in it"):
        table_files([tmp_path / "empty"], False)
    with pytest.raises(UsageError, match="there is no such folder"):
        table_files([tmp_path / "nowhere"], False)


def damaged(path: Path, change: Callable[[bytes], bytes]) -> Path:
    pq.write_table(pa.table({"x": [1]}), path)
    path.write_bytes(change(path.read_bytes()))
    return path


def test_damaged_files_are_named(tmp_path: Path) -> None:
    cut = damaged(tmp_path / "cut.parquet", lambda whole: whole[:-20])
    with pytest.raises(WeftError, match=r"cut.parquet is no whole Parquet file"):
        read_lake_table("t", [cut])
    empty = damaged(tmp_path / "empty.parquet", lambda whole: b"")
    with pytest.raises(WeftError, match=r"footer of .*empty.parquet"):
        read_lake_table("t", [empty])
    noise = damaged(
        tmp_path / "noise.parquet", lambda whole: bytes(len(whole) - 8) + whole[-8:]
    )
    with pytest.raises(WeftError, match=r"footer of .*noise.parquet"):
        read_lake_table("t", [noise])
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"y": [1]}), tmp_path / "b.parquet")
    with pytest.raises(WeftError, match="they are not one table"):
        read_lake_table("t", [tmp_path / "a.parquet", tmp_path / "b.parquet"])
