"""``weft top``: engines, queues, blocks and tokens per second from a server's metrics."""

from __future__ import annotations

import urllib.error
from email.message import Message
from http.client import BadStatusLine
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serve.running import Running, until
from weft.cli.top import top_command
from weft.data.tokenizer import load_tokenizer
from weft.errors import UsageError, WeftError
from weft.generate.outside_cache import keep_blocks
from weft.serve.engine_table import (
    COLUMNS,
    EngineRow,
    Snapshot,
    fitted_table,
    read_engines,
    table_rows,
)


def row(name: str, tokens: int, state: str = "ready") -> EngineRow:
    return EngineRow(name, state, 2, 1, 30, 1000, tokens, 4)


def test_rates_are_between_two_looks_also_when_engines_come_and_go() -> None:
    before = Snapshot(10.0, [row("a", 100), row("b", 50), row("gone", 9)])
    now = Snapshot(12.0, [row("a", 120), row("b", 10), row("new", 500, "draining")])
    cells = table_rows(now, before)
    assert cells[0] == ("a", "ready", "2", "1", "30 of 1,000", "10.0", "4", "-")
    assert [each[5] for each in cells] == ["10.0", "0.0", "-", "10.0"]
    assert cells[2][1] == "draining" and cells[3][2:5] == ("6", "3", "90 of 3,000")
    assert table_rows(Snapshot(0.0, []), None)[0][:2] == ("all", "no engine")
    kept = [
        row(name, 0)._replace(looked=20, fetched={"host": 5, "files": n})
        for n, name in enumerate("ab")
    ]
    cells = table_rows(Snapshot(0.0, kept), None)
    assert [each[7] for each in cells] == [
        "host 25 %, files 0 %", "host 25 %, files 5 %", "host 25 %, files 2 %",
    ]  # fmt: skip


def test_a_server_of_one_engine_is_shown() -> None:
    server = Running(load_tokenizer("bytes"))
    url = f"http://127.0.0.1:{server.address[1]}"
    server.post("completions", prompt="ab", max_tokens=5, ignore_eos=True)
    (engine,) = read_engines(f"{url}/v1/").engines
    assert engine == EngineRow("", "ready", 0, 0, 0, 512, 5, 0)
    assert table_rows(read_engines(url), None)[0][0] == "(this server)"
    server.close()
    with pytest.raises(WeftError, match="does not answer"):
        read_engines(url)
    for wrong in ("localhost:1", "http://", "http://127.0.0.1:99999", "http://[::1"):
        with pytest.raises(UsageError, match="is no address"):
            read_engines(wrong)


def test_blocks_kept_outside_are_counted_for_each_place() -> None:
    server = Running(load_tokenizer("bytes"))
    keep_blocks(server.engine, "m", 1 << 20, None, 0, print)
    url = f"http://127.0.0.1:{server.address[1]}"
    server.post("completions", prompt="a" * 40, max_tokens=3, ignore_eos=True)
    until(lambda: server.engine.outside.source.usages()[0].stored)  # type: ignore[union-attr]
    (engine,) = read_engines(url).engines
    assert engine.looked == 40 // 8 - 1 or engine.looked == 40 // 8
    assert engine.fetched == {"host": 0}
    (source,) = server.service.loads()[""].sources
    text = server.client.get("/metrics").text
    assert f'weft_kept_blocks_stored_total{{source="host"}} {source[3]:.1f}' in text
    assert table_rows(read_engines(url), None)[0][7] == "host 0 %"
    server.close()


def test_another_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(url: str, timeout: float) -> Any:
        raise urllib.error.HTTPError(url, 404, "Not Found", Message(), None)

    monkeypatch.setattr("urllib.request.urlopen", lacks)
    with pytest.raises(UsageError, match=r"is no server of weft serve \(HTTP 404\)"):
        read_engines("http://h")

    def speaks_otherwise(url: str, timeout: float) -> Any:
        raise BadStatusLine("\0\1")

    monkeypatch.setattr("urllib.request.urlopen", speaks_otherwise)
    with pytest.raises(UsageError, match="does not speak HTTP"):
        read_engines("http://h")


def widths(columns: list[str], rows: list[list[str]]) -> int:
    """Characters of a table, with two behind each column."""
    return sum(max(map(len, column)) + 2 for column in zip(columns, *rows, strict=True))


def test_a_table_fits_its_terminal() -> None:
    """With 40 engines, in low and narrow terminals: the sum of all is there, and what is left out is counted."""
    engines = [row(f"node-{i:03}.example.com-4711", 0)._replace(running=i % 7) for i in range(40)]  # fmt: skip
    now = Snapshot(0.0, engines)
    whole = fitted_table(now, None, 200, 60)
    assert tuple(whole.columns) == COLUMNS and len(whole.rows) == 41
    assert whole.rows[0][0] == engines[0].name
    low = fitted_table(now, None, 200, 24)
    assert len(low.rows) == 22 and low.rows[-2][0] == "... 20 others"
    assert low.rows[-1] == whole.rows[-1]
    kept = {each[0] for each in low.rows[:-2]}
    assert {e.name for e in engines if e.running == 6} < kept
    for width in (90, 60, 50, 40, 30):
        for height in (24, 5, 1):
            narrow = fitted_table(now, None, width, height)
            assert widths(*narrow) <= width, (width, narrow)
            assert (
                len(narrow.rows) <= max(2, height - 2) and narrow.rows[-1][0] == "all"
            )
    assert fitted_table(now, None, 38, 24).columns == ["engine", "writing", "waiting"]
    cut = fitted_table(now, None, 50, 24).rows[0][0]
    assert cut.startswith("node-0") and "…" in cut and cut.endswith("4711")
    assert fitted_table(Snapshot(0.0, []), None, 80, 24).rows[0][:2] == ["all", "no engine"]  # fmt: skip


def test_a_pipe_gets_every_look_until_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter([Snapshot(float(i), [row("a", 10 * i)]) for i in range(3)])
    monkeypatch.setattr("weft.serve.engine_table.read_engines", lambda url: next(looks))
    sleeps = iter([None, None])

    def sleep(seconds: float) -> None:
        try:
            next(sleeps)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr("weft.cli.top.time", SimpleNamespace(sleep=sleep))
    assert top_command("http://h") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "\t".join(COLUMNS) and lines[1].split("\t")[5] == "10.0"
    assert len(lines) == 6 and lines[2] == ""
