"""``weft top``: engines, queues, blocks and tokens per second from a server's metrics."""

from __future__ import annotations

import pytest

from tests.serve.running import Running
from weft.data.tokenizer import load_tokenizer
from weft.errors import UsageError, WeftError
from weft.serve.engine_table import EngineRow, Snapshot, read_engines, table_rows


def row(name: str, tokens: int, state: str = "ready") -> EngineRow:
    return EngineRow(name, state, 2, 1, 30, 1000, tokens, 4)


def test_rates_are_between_two_looks_also_when_engines_come_and_go() -> None:
    before = Snapshot(10.0, [row("a", 100), row("b", 50), row("gone", 9)])
    now = Snapshot(12.0, [row("a", 120), row("b", 10), row("new", 500, "draining")])
    cells = table_rows(now, before)
    assert cells[0] == ("a", "ready", "2", "1", "30 of 1,000", "10.0", "4")
    assert [each[5] for each in cells] == ["10.0", "0.0", "-", "10.0"]
    assert cells[2][1] == "draining" and cells[3][2:5] == ("6", "3", "90 of 3,000")
    assert table_rows(Snapshot(0.0, []), None)[0][:2] == ("all", "no engine")


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
    with pytest.raises(UsageError, match="is no address"):
        read_engines("localhost:1")
