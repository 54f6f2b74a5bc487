"""The report on checkpoints: the slow rank and stage are named, for one rank and for many, whatever was recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser import CHROMIUM, dumped_dom
from tests.observe.test_run_page import fake_run
from weft.observe.charts import checkpoint_charts
from weft.observe.checkpoint_times import (
    ROWS,
    SLOWEST,
    duration,
    facts,
    heat_map,
    size,
    slowest_in_words,
    stage_seconds,
    stalls,
)
from weft.observe.run_metrics import FILE, Metrics, read_metrics
from weft.observe.run_page import checkpoint_card, write_report

#: Files that want a browser: it starts for them once.
TOGETHER = "browser"

STAGES = {"stage_s": 0.02, "copy_s": 0.1, "hash_s": 0.05, "write_s": 0.8}


def saved(
    ranks: int, saves: int = 5, slow: int | None = None, by: float = 2.1
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in range(10, 10 + saves):
        for rank in range(ranks):
            row = {"step": step, "rank": rank, "bytes": 1 << 20, **STAGES}
            if rank == slow and step != 10:
                row["write_s"] *= by
            rows.append(row)
            if not rank:
                rows.append({"step": step, "rank": 0, "bytes": 0, "commit_s": 0.03})
    return rows


def loaded(ranks: int) -> list[dict[str, Any]]:
    stages = {"plan_s": 0.01, "read_s": 0.5, "verify_s": 0.1, "unpack_s": 0.1}
    return [{"step": 0, "rank": r, "bytes": 1 << 20, **stages} for r in range(ranks)]


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


@pytest.mark.parametrize("ranks", [2, 8, 512])
def test_the_slow_rank_and_stage_are_named(ranks: int) -> None:
    said = plain(slowest_in_words(stage_seconds(saved(ranks, slow=1, by=2.5)), "Saves"))
    ours = 2.5 if ranks > 2 else 5 / 3.5  # of two, the median lies between
    assert said.startswith(
        f"Saves: rank 1 takes {ours:.1f}x the median in write (2.00 s, median "
    )
    assert (
        plain(slowest_in_words(stage_seconds(saved(ranks)), "Saves"))
        == "Saves: no rank stands out."
    )


def test_waiting_and_noise_are_no_fault_of_a_rank() -> None:
    rows = saved(8, slow=3)
    for row in rows:
        if row["rank"] == 5 and "stage_s" in row:
            row |= {"stage_s": 3.0, "hash_s": 0.01}
        if row["rank"] == 6 and "hash_s" in row:
            row["hash_s"] = 0.055
    said = plain(slowest_in_words(stage_seconds(rows), "Saves"))
    assert (
        said == "Saves: rank 3 takes 2.1x the median in write (1.68 s, median 800 ms)."
    )
    rows = [
        r | ({"write_s": 1.3} if r["rank"] == 5 and "write_s" in r else {})
        for r in rows
    ]
    assert slowest_in_words(stage_seconds(rows), "Saves").endswith(
        "; 1 other rank is slow as well."
    )


def test_one_rank() -> None:
    assert (
        plain(slowest_in_words(stage_seconds(saved(1)), "Saves"))
        == "Saves: 1.00 s, most of it write (800 ms)."
    )
    heat = heat_map(saved(1), loaded(1))
    assert heat is not None
    (trace,) = heat["traces"]
    assert trace["y"] == ["rank 0"] and set(trace["z"][0]) == {0}
    assert [x.split()[-1] for x in trace["x"]] == [
        "stage", "copy", "hash", "write", "commit", "plan", "read", "verify", "unpack"
    ]  # fmt: skip
    assert plain(trace["text"][0][3]) == "800 ms"


def test_eight_ranks_have_a_row_each() -> None:
    heat = heat_map(saved(8, slow=3), [])
    assert heat is not None
    (trace,) = heat["traces"]
    assert trace["y"] == [f"rank {r}" for r in reversed(range(8))]
    hottest = max((z, y, x) for y, row in zip(trace["y"], trace["z"], strict=True) for z, x in
                  zip(row, trace["x"], strict=True) if z is not None)  # fmt: skip
    # about twice
    assert hottest[1:] == ("rank 3", "save write") and 0.9 < hottest[0] < 1.1
    commits = [row[trace["x"].index("save commit")] for row in trace["z"]]
    assert commits == [None] * 7 + [0]


def test_of_many_ranks_the_slowest_and_quantiles_are_shown() -> None:
    rows = saved(512, slow=300)
    for row in rows:
        if "write_s" in row and row["rank"] < 100:
            row["write_s"] = 0.9
    heat = heat_map(rows, loaded(512))
    assert heat is not None
    (trace,) = heat["traces"]
    top = trace["y"][::-1]
    assert len(top) == SLOWEST + 3 < ROWS and top[0] == "rank 300"
    assert top[SLOWEST:] == [
        f"other 496: {name}" for name in ("slowest tenth", "median", "fastest tenth")
    ]
    write = [plain(row[trace["x"].index("save write")]) for row in trace["text"]][::-1]
    assert write[SLOWEST:] == ["900 ms", "800 ms", "800 ms"]
    assert len(json.dumps(heat)) < 30_000


def test_stalls() -> None:
    rows = [{"step": 5, "rank": r, "stage_s": 0.1 * r, "copy_s": 0.2} for r in range(3)]
    # the copy went on beside training
    rows += [{"step": 9, "rank": 0, "stage_s": 0.1, "copy_s": 7.0, "wait_s": 0.01}]
    steps, seconds = stalls(
        rows,
        [
            {"step": 5, "stall_s": 9.0},
            {"step": 12, "stall_s": 0.3},
            {"step": 13, "stall_s": None},
        ],
    )
    assert steps == [5, 9, 12] and seconds == pytest.approx([0.4, 0.11, 0.3])


def test_facts() -> None:
    found = {k: plain(v) for k, v in facts(saved(8, slow=3), loaded(8), [])}
    assert found == {
        "Saves": "5",
        "Stall": "120 ms median · 120 ms longest",
        "Bytes of a save": "8 MiB · 1 MiB a rank",
        "Save, median rank": "stage 20.0 ms · copy 100 ms · hash 50.0 ms · write 800 ms · commit 30.0 ms",
        "Save, slowest rank": "rank 3, 1.83 s without waiting",
        "Bytes read": "8 MiB · 1 MiB a rank",
        "Load, median rank": "plan 10.0 ms · read 500 ms · verify 100 ms · unpack 100 ms",
        "Load, slowest rank": "rank 0, 710 ms without waiting",
    }


@pytest.mark.parametrize(
    "rows",
    [
        # no rank
        [
            {"step": 10, "bytes": 5, "hash_s": 0.1, "write_s": 1.0},
            {"step": 10, "bytes": 0, "commit_s": 0.1},
        ],
        [{"step": 10}],
        [
            {
                "step": 10,
                "rank": None,
                "bytes": None,
                "write_s": None,
                "hash_s": "slow",
                "strange_s": 0.0,
            }
        ],
        [
            {"step": 10, "rank": r, "write_s": 0.0, "new_s": 1.0 * (r == 2)}
            for r in range(4)
        ],
        [{"step": 10, "rank": 7, "stage_s": -1e-9, "copy_s": 1e-9}],
    ],
)
def test_odd_records_do_no_harm(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    lines = [{"kind": kind, **row} for row in rows for kind in ("saved", "loaded")]
    (tmp_path / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = read_metrics(tmp_path)
    assert len(records["saved"]) == len(rows)
    assert checkpoint_card(records)["facts"]
    checkpoint_charts(records)
    assert 'id="checkpoints"' in write_report(tmp_path).read_text()


def test_no_checkpoints_no_card(tmp_path: Path) -> None:
    assert (
        checkpoint_card({}) == {}
        and checkpoint_charts({}) == []
        and heat_map([], []) is None
    )
    page = write_report(fake_run(tmp_path / "run", steps=3, resume_at=None)).read_text()
    assert 'id="checkpoints"' not in page


def test_records_of_all_ranks_are_read_and_those_of_a_lost_attempt_are_not(
    tmp_path: Path,
) -> None:
    metrics = Metrics(tmp_path)
    for begin, steps in ((0, (4, 8)), (4, (8, 12))):
        metrics.log("run", begin)
        for rank in range(3):
            metrics.log("loaded", begin, rank=rank, read_s=1.0)
        for step in steps:
            for rank in range(3):
                metrics.log("saved", step, rank=rank, write_s=1.0 + begin)
    metrics.close()
    records = read_metrics(tmp_path)
    assert [(r["step"], r["rank"], r["write_s"]) for r in records["saved"]] == [
        *((4, r, 1.0) for r in range(3)), *((s, r, 5.0) for s in (8, 12) for r in range(3))
    ]  # fmt: skip
    assert len(records["loaded"]) == 6


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (8.5e-4, "850 us"), (0.01234, "12.3 ms"), (0.1, "100 ms"), (1.234, "1.23 s"),
                          (12.34, "12.3 s"), (1234.0, "1234 s"), (0.0009996, "1000 us")]
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert plain(duration(seconds)) == text


def test_sizes() -> None:
    assert [size(n) for n in (0, 1023, 1 << 20, 3.5 * 2**30, 2.0**45)] == [
        "0 B", "0.999 KiB", "1 MiB", "3.5 GiB", "32 TiB"
    ]  # fmt: skip
    assert [size(n) for n in (999.4 * 1024, 999.6 * 1024)] == ["999 KiB", "0.976 MiB"]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium"
)
@pytest.mark.parametrize("ranks", [1, pytest.param(8, marks=pytest.mark.soak), 512])
def test_browser_draws_it(tmp_path: Path, ranks: int) -> None:
    run = fake_run(tmp_path / "run", steps=20, resume_at=None)
    metrics = Metrics(run)
    for kind, rows in (("saved", saved(ranks, slow=3)), ("loaded", loaded(ranks))):
        for row in rows:
            metrics.log(kind, **row)
    metrics.close()
    dom = dumped_dom(write_report(run))
    assert "data-error" not in re.search(r"<html[^>]*>", dom)[0]
    body = re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL)
    card = body[body.index('id="checkpoints"') :]
    assert ("rank 3 takes 2.1x the median in write" in card) == (ranks > 1)
    heat, stall = card.split('class="chart')[1:3]
    assert (
        'aria-label="Seconds by rank and stage"' in heat
        and 'aria-label="Stall"' in stall
    )
    assert heat.count('class="heatmap-label"') >= 9 * min(ranks, 19) - 20
    assert re.search(r'class="js-line"[^>]* d="M', stall)
    # The loss keeps its place: it is the large chart above.
    assert re.search(r'class="card wide"[^>]*><h2>Loss', body)
