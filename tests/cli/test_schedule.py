"""``weft schedule``: numbers against closed forms, files, and mistakes that cost one line."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.conftest import Command
from weft.schedule.build import build, builders
from weft.schedule.lanes import text_timeline
from weft.schedule.simulate import simulate, uniform_costs


@pytest.fixture
def weft(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run the command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return partial(command, "schedule")


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 2), (4, 8), (8, 32)])
def test_json_has_the_closed_forms(
    weft: Any, name: str, ranks: int, microbatches: int
) -> None:
    code, out, _ = weft(
        name, "--stages", ranks, "--microbatches", microbatches, "--json"
    )
    found = json.loads(out)
    assert code == 0
    makespan = 3 * (microbatches + ranks - 1)
    assert (
        found["schedule"] == name
        and found["stages"] == ranks
        and found["microbatches"] == microbatches
    )
    assert found["makespan"] == found["elapsed"] == makespan
    assert found["bubble_rate"] == pytest.approx(3 * (ranks - 1) / makespan)
    peaks = [
        microbatches if name == "gpipe" else min(microbatches, ranks - r)
        for r in range(ranks)
    ]
    assert found["peak_activations"] == peaks


def test_times_and_chunks_count(weft: Any) -> None:
    times = ["--forward", 2, "--backward-input", 3, "--backward-weight", 1]
    found = json.loads(weft("interleaved-1f1b", "--virtual", 3, *times, "--json")[1])
    assert found["bubble_rate"] == pytest.approx(
        (4 - 1) / 3 * 6 / (8 * 6 + (4 - 1) / 3 * 6)
    )
    assert len(found["peak_activations"]) == 4
    slower = json.loads(weft("1f1b", *times, "--comm", 0.5, "--json")[1])
    assert slower["makespan"] > 6 * (8 + 3)


def test_text_shows_the_numbers_and_the_lanes(weft: Any) -> None:
    code, out, _ = weft("1f1b", "--stages", 2, "--microbatches", 3)
    assert code == 0
    assert re.search(r"makespan +12 ms", out) and re.search(
        r"bubble rate +25\.00%", out
    )
    assert re.search(r"peak activations +2 1 ", out)
    assert (
        "rank 0  F0F1    B0--F2B1--  B2--" in out
        and "rank 1    F0B0--F1B1--F2B2--" in out
    )
    # Too wide for the terminal: numbers only.
    code, out, _ = weft("1f1b", "--stages", 8, "--microbatches", 64)
    assert code == 0 and "rank 0" not in out and "bubble rate" in out


def test_lanes_fill_the_width_in_colour() -> None:
    table = build("1f1b", 4, 12)
    simulation = simulate(table, uniform_costs(table))
    wide, narrow = (
        text_timeline(simulation, 200, True),
        text_timeline(simulation, 60, True),
    )
    assert (
        text_timeline(simulation, 40, True)
        == []
        == text_timeline(simulation, 60, False)
    )
    assert len(wide) == len(narrow) == 5  # four lanes and a legend
    assert "11" in wide[0].plain and narrow[0].plain.startswith(
        "rank 0  0123      0 41 52 "
    )
    assert (
        max(lane.cell_len for lane in wide) <= 200
        and max(lane.cell_len for lane in narrow) <= 60
    )


def test_files_are_written(weft: Any, tmp_path: Path) -> None:
    code, out, _ = weft(
        "zb-h1", "--svg", "a.svg", "--html", "deep/down/a.html", "--trace", "a.json"
    )
    assert code == 0 and "a.svg" in out and "a.html" in out and "a.json" in out
    picture = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert (
        sum((g.get("class") or "").startswith("a ") for g in picture.iter())
        == 4 * 8 * 3
    )
    assert (
        (tmp_path / "deep/down/a.html")
        .read_text(encoding="utf-8")
        .startswith("<!doctype html>")
    )
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == 4 * 8 * 3


def test_all_schedules_are_listed(weft: Any) -> None:
    code, out, _ = weft()
    assert code == 0 and all(
        name in out and builder.paper in out for name, builder in builders().items()
    )
    code, out, _ = weft("--json")
    assert code == 0 and [entry["schedule"] for entry in json.loads(out)] == list(
        builders()
    )


@pytest.mark.parametrize(("words", "code", "said"), [
    (["1f2b"], 2, r"'1f2b'; did you mean '1f1b'\?"),
    (["1f1b", "--stages", "0"], 2, r"'--stages'"),
    (["1f1b", "--microbatches", "many"], 2, r"'--microbatches'"),
    (["1f1b", "--virtual", "3"], 2, r"1 chunk"),
    (["1f1b", "--forward", "-1"], 2, r"'--forward'.*greater than or equal to 0"),
    (["1f1b", "--comm", "nan"], 2, r"--comm"),
    (["1f1b", "--comm", "inf"], 2, r"--comm inf is not possible"),
    (["1f1b", "--forward", "0", "--backward-input", "0", "--backward-weight", "0"], 2, r"nothing takes any time"),
    (["1f1b", "--html", "."], 1, r"cannot write --html \.: Is a directory"),
    (["--svg", "a.svg"], 2, r"--svg needs the name of a schedule"),
])  # fmt: skip
def test_mistakes_cost_one_line(
    weft: Any, words: list[str], code: int, said: str, tmp_path: Path
) -> None:
    ended, out, err = weft(*words)
    assert ended == code and re.search(said, err), err
    assert (
        err.startswith("weft: error: ")
        and err.count("\n") == 1
        and "Traceback" not in out + err
    )
    assert not list(tmp_path.iterdir())


def test_exchanges_of_experts_are_drawn_beside_what_others_compute(
    weft: Any, tmp_path: Path
) -> None:
    words = (
        "dualpipe-v",
        "--stages",
        2,
        "--microbatches",
        6,
        "--exchange",
        1,
        "--svg",
        tmp_path / "a.svg",
    )
    found = json.loads(weft(*words, "--json")[1])
    ways = found["exchanges_beside"]
    assert set(ways) == {"nothing", "other pass", "same pass"}
    assert found["makespan"] == min(ways.values()) < ways["nothing"]
    assert "combine" in (tmp_path / "a.svg").read_text()
    text = weft(*words)[1]
    assert "exchanges beside" in text and "other pass" in text
