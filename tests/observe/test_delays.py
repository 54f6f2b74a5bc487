"""The page says who made the others wait, and nothing of it where nobody did."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from weft.observe import delays
from weft.observe.run_metrics import Metrics
from weft.observe.run_page import write_report


def record(
    step: int, *verdicts: tuple[str, list[int]], matrix: Any = None
) -> dict[str, Any]:
    said = [
        {"kind": k, "ranks": r, "factor": 2.0, "text": f"rank {r[0]} is a slow {k}"}
        for k, r in verdicts
    ]
    rows = [
        {
            "rank": r,
            "machine": "m",
            "compute": 0.1 * (1 + (r == 1)),
            "wait": 0.1 * (r != 1),
        }
        for r in range(4)
    ]
    return {
        "step": step,
        "verdicts": said,
        "ranks": rows,
        "matrix": matrix,
        "size": 1 << 18,
    }


MATRIX = [
    [None if i == j else 0.2 if i == 2 else 0.002 for j in range(4)] for i in range(4)
]


def test_verdicts_have_a_beginning_and_an_end() -> None:
    one, two = ("computer", [1]), ("sender", [2])
    records = [record(10), record(20, one), record(30, one, two), record(60, two)]
    assert delays.periods(records) == [
        ("steps 20 to 60", "rank 1 is a slow computer"), ("since step 30", "rank 2 is a slow sender"),
    ]  # fmt: skip


def test_a_page_shows_the_ranks_and_the_matrix(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.log("run", 0, recipe={"name": "one"}, layout="dp=4", world=4)
    for one in (
        record(10),
        record(20, ("computer", [1]), ("sender", [2]), matrix=MATRIX),
    ):
        metrics.log("delays", one.pop("step"), **one)
    metrics.close()
    page = write_report(tmp_path).read_text()
    (section,) = re.findall(
        r'<section class="card" id="delays">.*?</section>', page, re.DOTALL
    )
    assert (
        "since step 20" in section
        and "rank 2 is a slow sender" in section
        and "256 KiB" in section
    )
    assert (
        section.count('<td style="--heat: 100%" class="hot">200</td>') == 3
        and section.count('class="named"') == 2
    )
    bars = [
        float(width) for width in re.findall(r'<i style="width: ([\d.]+)%"', section)
    ]
    assert bars == [50, 50, 100, 0, 50, 50, 50, 50]


def test_a_page_of_a_run_in_which_nobody_was_slow_says_nothing(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.log("run", 0, recipe={"name": "one"}, layout="dp=4", world=4)
    quiet = record(10, matrix=MATRIX)
    metrics.log("delays", quiet.pop("step"), **quiet)
    metrics.close()
    assert 'id="delays"' not in write_report(tmp_path).read_text()


def test_many_ranks_are_not_drawn() -> None:
    many = record(10, ("computer", [1])) | {"ranks": record(10)["ranks"] * 10}
    assert delays.card([many])["rows"] == [] and delays.card([many])["periods"]
