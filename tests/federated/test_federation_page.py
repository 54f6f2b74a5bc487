"""The page of a federated run says who took part when, and how much each client counted."""

from __future__ import annotations

from typing import Any

from weft.federated.federation_page import (
    client_lanes,
    client_rows,
    drawn_curve,
    federation_page,
    staleness_bars,
)

CHANGES: list[dict[str, Any]] = [
    {
        "step": 1, "clients": ["a", "b<script>"], "weights": [0.5, 0.25], "staleness": [0, 3], "seconds": [2.0, 8.0],
        "steps": [10, 20], "arrived": [9.0, 10.0], "time": 10.0, "bytes": 1000, "loss": 2.0,
    },
    {
        "step": 2, "clients": ["a"], "weights": [0.5], "staleness": [0], "seconds": [5.0], "steps": [10],
        "arrived": [20.0], "time": 20.0, "bytes": 1800, "loss": 1.0,
    },
]  # fmt: skip


def test_table_and_lanes_are_counted_from_the_records() -> None:
    rows = {row.client: row for row in client_rows(CHANGES, {"a": 7, "idle": 3})}
    assert [*rows] == ["a", "idle", "b<script>"]
    assert rows["a"].updates == "2" and rows["a"].steps == "20"
    # 0.5 10 + 0.5 10 of 15 in all
    assert rows["a"].effective == "66.7%" and rows["b<script>"].effective == "33.3%"
    assert rows["a"].waited == "0.5" and rows["idle"].updates == "0"
    lanes = client_lanes(CHANGES, ["a", "b<script>"])
    assert [len(lane.bars) for lane in lanes] == [2, 1]
    # from 7 s to 9 s of 20 s
    assert lanes[0].bars[0].x == 7 / 20 * 560
    assert lanes[1].bars[0].stale == 3
    assert [bar.updates for bar in staleness_bars(CHANGES)] == [2, 0, 0, 1]


def test_the_page_escapes_names_and_draws_both_curves() -> None:
    recipe = {"name": "five", "federated": {"policy": "fedavg"}}
    page = federation_page({"federated": CHANGES, "run": [{"recipe": recipe}]})
    assert "b&lt;script&gt;" in page and "b<script>" not in page
    assert page.count('class="curve"') == 2 and "Loss over bytes" in page


def test_a_run_without_changes_has_a_page() -> None:
    assert "not changed twice" in federation_page({"run": [{"recipe": {}}]})
    assert drawn_curve("x", [1.0], [2.0]).path == ""


def test_a_real_run_without_arrivals_has_a_page() -> None:
    """A server records traffic by session, and no arrival times."""
    missing = ("arrived", "bytes", "steps")
    plain = [{k: v for k, v in c.items() if k not in missing} for c in CHANGES]
    page = federation_page({"federated": plain, "run": [{"recipe": {"federated": {"listen": "host:1"}}}]})  # fmt: skip
    assert "clock" in page and page.count('class="curve"') == 1
