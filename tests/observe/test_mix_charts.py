"""Charts of mixtures: shares of what was read, and losses by source."""

from __future__ import annotations

from typing import Any

from weft.observe.charts import charts
from weft.observe.mix_charts import mixture_charts, shares_read
from weft.observe.run_metrics import RecordedRun


def read(step: int, *samples: int) -> dict[str, Any]:
    names = ("big.jsonl", "small.jsonl", "late.jsonl")
    sources = [
        {"name": name, "samples": count, "lines": []}
        for name, count in zip(names, samples, strict=False)
    ]
    return {"step": step, "sources": sources}


def test_shares_are_those_of_the_samples_between_records() -> None:
    rows = shares_read(
        [read(10, 30, 10), read(20, 40, 40), read(20, 40, 40)], ["a", "b"]
    )
    assert rows == [
        {"step": 10, "a": 0.75, "b": 0.25},
        {"step": 20, "a": 0.25, "b": 0.75},
    ]
    # a source that a resumed run has added
    later = shares_read([read(10, 30, 10), read(20, 30, 10, 5)], ["a", "b"])
    assert later[-1] == {"step": 20, "big.jsonl": 0, "small.jsonl": 0, "late.jsonl": 1}


def test_page_has_both_charts_of_a_mixture_that_moves() -> None:
    records = {
        "run": [{"step": 0, "recipe": {}}],
        "read": [read(10, 30, 10), read(20, 40, 40)],
        "mix": [
            {"step": 10, "losses": {"a": 2.0, "b": None}, "shares": {"a": 0.5, "b": 0.5}},
            {"step": 20, "losses": {"a": 1.5, "b": 3.0}},
        ],
    }  # fmt: skip
    run = RecordedRun("run", records)
    drawn = {chart["title"]: chart for chart in charts([run])}
    shares, losses = drawn["Mixture"]["traces"], drawn["Loss of each source"]["traces"]
    assert [(t["name"], [*t["x"]], [*t["y"]]) for t in shares] == [
        ("a", [10, 20], [0.75, 0.25]),
        ("b", [10, 20], [0.25, 0.75]),
    ]
    assert [(t["name"], [*t["y"]]) for t in losses] == [("a", [2.0, 1.5]), ("b", [3.0])]


def test_runs_without_a_moving_mixture_have_neither() -> None:
    assert mixture_charts({"read": [read(10, 30, 10)]}, []) == []
    # held-out data of their own are of no source
    alone = {"mix": [{"step": 10, "losses": {}}], "read": []}
    assert mixture_charts(alone, []) == []
