"""The report page: its numbers, and that a browser without a network really draws it."""

from __future__ import annotations

import html
import json
import math
import random
import re
from pathlib import Path
from unittest import mock

import pytest

from tests.browser import CHROMIUM, dumped_dom, measured
from weft.errors import UsageError, WeftError
from weft.observe import run_page
from weft.observe.chart_lines import POINTS, minutes, running_mean, thin
from weft.observe.charts import charts
from weft.observe.run_metrics import FILE, Metrics, RecordedRun, read_metrics
from weft.observe.run_page import (
    PLOTLY,
    flat,
    headline_numbers,
    rows_side_by_side,
    write_report,
)
from weft.recipe import Recipe, build_recipe

#: Files that want a browser: it starts for them once.
TOGETHER = "browser"

TITLES = ["Loss", "Throughput", "Model flops utilisation", "Step time", "Gradient norm", "Memory", "Learning rate",
          "Machine", "Memory of the machine", "Power"]  # fmt: skip


def fake_run(
    run: Path, steps: int = 400, resume_at: int | None = 250, validation: bool = True, split: bool = True,
    scale: float = 1.0, **settings: object,
) -> Path:  # fmt: skip
    """Write ``steps`` steps; with ``resume_at`` the run crashes 17 steps later and starts again from there."""
    rng, clock = random.Random(0), [1.7e9]
    recipe = Recipe(name="llama-tiny <zigzag>").model_dump(mode="json")
    recipe["train"] |= {"steps": steps, **settings}
    head = {"recipe": recipe, "layout": "shard=2,cp=2", "world": 4, "device": "NVIDIA H200", "parameters": 12_345_678,
            "flops_per_token": 8.1e7, "peak_flops": 9.89e14, "started": "2026-01-02T03:04:05",
            "host": "node-7, Linux 6.1, x86_64, 96 cores, 1008 GiB", "versions": "Weft 0.1, PyTorch 2.13",
            "git": "0123456789ab with changes", "command": "weft train a.toml", "folder": "/home/me"}  # fmt: skip
    attempts = (
        [(0, steps)]
        if resume_at is None
        else [(0, min(steps, resume_at + 17)), (resume_at, steps)]
    )
    for begin, end in attempts:
        with mock.patch("weft.observe.run_metrics.time.time", lambda: clock[0]):
            metrics = Metrics(run)
            metrics.log("run", begin, **head)
            if begin:
                metrics.log(
                    "event", begin, message=f"resumed from checkpoint step-{begin}"
                )
            for step in range(begin + 1, end + 1):
                clock[0] += 0.4
                loss = 1.5 + 4 * math.exp(-step / steps * 6) + rng.gauss(0, 0.06)
                skipped = int(step == 90)
                rate = 1.2e5 * rng.uniform(0.93, 1.0) * (0.2 if step == 1 else 1)
                metrics.log(
                    "train",
                    step,
                    loss=math.nan if skipped else loss,
                    grad_norm=rng.lognormvariate(-0.5, 0.35) + (step % 173 == 0) * 3,
                    lr=3e-4
                    * min(step / 40, 0.55 + 0.45 * math.cos(math.pi * step / steps)),
                    tokens=step * 8192,
                    tokens_per_s=rate,
                    mfu=rate * scale * 3.3e-6,
                    memory_gib=11.2 + 0.3 * (step > 3),
                    memory_now_gib=9.2 + rng.random() / 10,
                    step_s=0.4,
                    data_s=0.004,
                    skipped=skipped,
                )
                if validation and step % 50 == 0:
                    metrics.log(
                        "validation",
                        step,
                        loss=1.56 + 4.1 * math.exp(-step / steps * 6),
                    )
                if step % 13 == 0:
                    load = {
                        "cpu": 0.3 + rng.random() / 5,
                        "host_gib": 80 + step / 10,
                        "gpu": 0.97,
                        "gpu_gib": 70.0,
                    }
                    metrics.log(
                        "hardware", step, **load, gpu_watts=600 + 50 * rng.random()
                    )
                if split and step % 25 == 0:
                    metrics.log(
                        "split",
                        step,
                        compute=0.25 + rng.random() / 50,
                        communication=0.06,
                        data=0.004,
                        optimizer=0.03,
                    )
                if step % 100 == 0:
                    metrics.log(
                        "event",
                        step,
                        message=f"checkpoint saved to {run.name}/step-{step}",
                    )
            if end == steps:
                shown = [
                    {
                        "prompt": "def read(",
                        "text": "path):\n    <b>return</b> open(path)",
                    }
                ]
                shown.append(
                    {
                        "prompt": "What is <it>?",
                        "text": " Now & then.",
                        "before": "Nothing. ",
                    }
                )
                metrics.log("sample", end, samples=shown)
            metrics.close()
        clock[0] += 3600
    return run


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium"
)
@pytest.mark.parametrize(
    "complete", [pytest.param(True, marks=pytest.mark.slow), False]
)
def test_browser_draws_every_chart_offline(tmp_path: Path, complete: bool) -> None:
    run = fake_run(
        tmp_path / "run-7",
        **({} if complete else {"steps": 5, "resume_at": None, "split": False}),
    )
    dom = dumped_dom(write_report(run))
    assert "data-error" not in re.search(r"<html[^>]*>", dom)[0]
    body = re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL)
    for chart in body.split('class="chart')[1:]:
        title = re.search(r'aria-label="([^"]+)"', chart)[1]
        marks = (
            r'<g class="point"><path'
            if title == "Step time"
            else r'class="js-line"[^>]* d="M'
        )
        assert re.search(marks, chart), f"{title} is empty"
    drawn = re.findall(r'aria-label="([^"]+)"', body)
    assert drawn == (
        TITLES if complete else [t for t in TITLES[:-3] if t != "Step time"]
    )
    for text in ("llama-tiny &lt;zigzag&gt;", "shard=2,cp=2", "4 ranks", "NVIDIA H200", "12.3M (12,345,678)", "run-7",
                 "node-7, Linux 6.1", "PyTorch 2.13", "0123456789ab with changes", "weft train a.toml", "/home/me",
                 "<i>def read(</i>path):\n    &lt;b&gt;return", "What is &lt;it&gt;?",
                 '<pre class="sample">Nothing.</pre>', '<pre class="sample">Now &amp; then.</pre>'):  # fmt: skip
        assert text in body
    if complete:
        for text in (
            "400 of 400",
            "3.28M (3,276,800)",
            "resumed from checkpoint step-250",
            "2:40 in 2 attempts",
        ):
            assert text in body
        loss = [r["loss"] for r in read_metrics(run)["train"]]
        assert (
            f"{loss[0]:.3f} → {loss[-1]:.3f}" in body
            and f"ratio {loss[-1] / loss[0]:.3f}" in body
        )


@pytest.mark.slow
@pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium"
)
def test_tiles_leave_no_hole_and_a_phone_shows_everything(tmp_path: Path) -> None:
    """Five tiles in rows of three left a hole."""
    page = write_report(
        fake_run(tmp_path / "run", steps=60, resume_at=None, split=False)
    )
    right = "[...d.querySelectorAll('.tiles > .card')].map((card) => Math.round(card.getBoundingClientRect().right))"
    for width in (390, 1280):
        found = measured(
            page, width, {"wide": "d.documentElement.scrollWidth", "right": right}
        )
        assert len(found["right"]) == 5 and found["wide"] == width, found
        assert found["right"][-1] == max(found["right"]) > 0.9 * width, (
            "a hole behind the last tile"
        )


def test_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    page = write_report(
        fake_run(tmp_path / "run", steps=3, resume_at=None),
        out=tmp_path / "elsewhere" / "page.html",
    )
    text = page.read_text()
    assert page == tmp_path / "elsewhere" / "page.html"
    assert re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"(.*?)\"", text) == [
        PLOTLY
    ]
    assert "plotly.js v" in (page.parent / PLOTLY).read_text()
    assert "{{" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)


def test_pages_of_a_folder_share_plotly_and_its_file_is_mended(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", steps=3, resume_at=None)
    pages = write_report(run), write_report(run, run)
    program = run / PLOTLY
    whole = program.read_bytes()
    assert all(page.stat().st_size < len(whole) / 10 for page in pages)
    program.write_bytes(whole[:100])
    write_report(run)
    assert program.read_bytes() == whole


def test_a_run_that_has_not_done_its_steps_says_so(tmp_path: Path) -> None:
    done = fake_run(tmp_path / "done", steps=3, resume_at=None)
    short = fake_run(tmp_path / "short", steps=6, resume_at=None)
    file = short / FILE
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [row for row in rows if row["step"] <= 4 and row["kind"] != "event"]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in kept))
    page = write_report(short).read_text()
    assert "Step 4 of 6: this run was interrupted" in page
    assert "<h2>Events</h2>" not in page  # an empty panel
    assert "this run was interrupted" not in write_report(done).read_text()
    assert "short: Step 4 of 6." in write_report(done, short).read_text()


def test_words_of_a_layout_have_a_legend(tmp_path: Path) -> None:
    page = write_report(fake_run(tmp_path / "run", steps=3, resume_at=None)).read_text()
    meanings = dict(re.findall(r"<dt>(\w+)</dt><dd>(.*?)</dd>", page))
    assert list(meanings) == ["shard", "cp"]
    assert "parallel ranks" in meanings["cp"]


def test_no_run_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / FILE).touch()
    for run in (tmp_path / "missing", tmp_path / "empty"):
        with pytest.raises(WeftError, match="holds no metrics") as caught:
            write_report(run)
        assert "\n" not in str(caught.value)
    with pytest.raises(WeftError, match="cannot write the report"):
        write_report(fake_run(tmp_path / "run", steps=2, resume_at=None), out=tmp_path)


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Metrics(run).log("run", 0)
    assert write_report(run).is_file()
    assert (
        charts([RecordedRun("run", read_metrics(run))]) == []
        and headline_numbers(read_metrics(run)) == []
    )


def test_the_recipe_is_on_the_page(tmp_path: Path) -> None:
    page = write_report(fake_run(tmp_path / "run", steps=2, resume_at=None)).read_text()
    shown = html.unescape(re.search(r"<pre>(.*?)</pre>", page, flags=re.DOTALL)[1])
    recipe = build_recipe(json.loads(shown))
    assert recipe.name == "llama-tiny <zigzag>" and recipe.train.steps == 2


def small_ticks(body: str) -> list[str]:
    """Texts on the axis of the utilisation."""
    chart = body[body.index('aria-label="Model flops utilisation"') :].split(
        'class="chart'
    )[0]
    return re.findall(r'class="ytick"><text[^>]*>([^<]*)</text>', chart)


@pytest.mark.slow
@pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium"
)
def test_the_axis_of_a_small_utilisation_tells_its_ticks_apart(tmp_path: Path) -> None:
    """It read 1%, 1%, 1%, 0%, 0%."""
    run = fake_run(tmp_path / "run", steps=40, resume_at=None, scale=0.03)
    ticks = small_ticks(dumped_dom(write_report(run)))
    assert (
        len(ticks) >= 4
        and len(set(ticks)) == len(ticks)
        and all(t.endswith("%") for t in ticks)
    ), ticks


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium"
)
def test_runs_side_by_side(tmp_path: Path) -> None:
    one = fake_run(tmp_path / "one", steps=80, resume_at=None)
    two = fake_run(tmp_path / "two", steps=60, resume_at=None, scale=0.5, batch=16)
    page = write_report(one, two)
    assert page == one / "compare.html"
    dom = dumped_dom(page)
    assert "data-error" not in re.search(r"<html[^>]*>", dom)[0]
    body = re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL)
    assert re.findall(r'aria-label="([^"]+)"', body) == TITLES
    for chart in body.split('class="chart')[1:]:
        names = {
            name
            for name in ("one", "two")
            if re.search(rf'data-unformatted="{name}|>{name}<', chart)
        }
        assert names == {"one", "two"}, chart[:200]
    recipes = re.search(r'id="recipes".*?</section>', body, flags=re.DOTALL)[0]
    rows = [
        re.findall(r"<td>(.*?)</td>", row)
        for row in re.findall(r"<tr class.*?</tr>", recipes)
    ]
    assert sorted(rows) == [["train.batch", "8", "16"], ["train.steps", "80", "60"]]
    right = "Math.max(...[...d.querySelectorAll('.beside td')].map((cell) => cell.getBoundingClientRect().right))"
    phone = measured(
        page, 390, {"wide": "d.documentElement.scrollWidth", "right": right}
    )
    assert phone["wide"] == 390 and phone["right"] <= 390
    assert body.count("What the model writes · ") == 2 and "Side by side" in body


def test_what_stands_beside_what() -> None:
    rows = rows_side_by_side([{"a": "1", "b": "2"}, {"b": "3", "c": "4", "a": "1"}])
    assert [(r.name, r.values, r.differs) for r in rows] == [
        ("a", ["1", "1"], False), ("b", ["2", "3"], True), ("c", ["-", "4"], True)
    ]  # fmt: skip
    assert dict(flat({"x": {"y": 1, "z": [2]}, "w": None})) == {
        "x.y": "1",
        "x.z": "[2]",
        "w": "null",
    }


def test_too_many_runs_are_one_line(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", steps=2, resume_at=None)
    with pytest.raises(
        UsageError, match="6 runs are too many for one page; give at most 5"
    ):
        write_report(*[run] * 6)


def test_without_plotly_there_is_a_line(tmp_path: Path) -> None:
    with (
        mock.patch.object(run_page, "find_spec", return_value=None),
        pytest.raises(WeftError, match="pip install plotly"),
    ):
        run_page.write_plotly(tmp_path)


def test_long_runs_are_thinned_but_keep_their_spikes() -> None:
    values = [1.0] * 50_000
    values[31_415] = 9.0
    thinned = thin(list(range(len(values))), values)
    assert (
        len(thinned["x"]) <= POINTS + 2
        and max(thinned["y"]) == 9.0
        and thinned["x"][-1] == len(values) - 1
    )
    steps = charts(
        [
            RecordedRun(
                "run", {"train": [{"step": i, "loss": v} for i, v in enumerate(values)]}
            )
        ]
    )
    assert len(json.dumps(steps)) < 200_000


def test_pauses_between_attempts_are_no_time_of_the_run() -> None:
    attempts = [{"time": 100.0}, {"time": 1000.0}]
    rows = [{"time": t} for t in (160.0, 220.0, 1060.0, 1120.0)]
    assert minutes(rows, attempts) == [1, 2, 3, 4] and minutes(rows[:2], []) == [0, 1]


def test_running_mean_keeps_a_straight_line_straight() -> None:
    values = [5.0 - 0.01 * i for i in range(500)]
    smooth = running_mean(values)
    assert smooth[:490] == pytest.approx(values[:490]) and smooth[-1] == pytest.approx(
        values[-1], abs=0.05
    )


def test_loads_of_experts_over_the_mean_of_their_layer() -> None:
    counts = {
        "loads": {"1": [1, 3], "4": [5, 5, 5, 5]},
        "most": 1.5,
        "dropped_share": 0.1,
        "tokens_mib": 2.5,
        "moves_mib": 0,
    }
    loads = [{"step": n, **counts} for n in range(1, 900)]
    found = {
        chart["title"]: chart
        for chart in charts([RecordedRun("r", {"experts": loads})])
    }
    assert set(found) == {"Load of experts", "Dropped", "Sent for experts", "Experts"}
    assert [line["name"] for line in found["Sent for experts"]["traces"]] == [
        "tokens",
        "moves of experts",
    ]
    trace = found["Experts"]["traces"][0]
    assert [row[0] for row in trace["z"]] == [0.5, 1.5, 1, 1, 1, 1] and len(
        trace["x"]
    ) <= 250
    assert found["Experts"]["layout"]["yaxis"] == {
        "tickvals": [0, 2],
        "ticktext": ["layer 1", "layer 4"],
    }


def test_who_took_part_is_drawn_in_steps_up_to_the_end() -> None:
    views = [
        {"step": 0, "time": 100.0, "ranks": 4},
        {"step": 1, "time": 160.0, "ranks": 3},
    ]
    trained = [{"step": n, "time": 100.0 + 60 * n, "loss": 1 / n} for n in (1, 2, 3)]
    found = {
        c["title"]: c
        for c in charts([RecordedRun("r", {"view": views, "train": trained})])
    }["Who took part"]
    loss, ranks = found["traces"]
    assert (loss["x"], loss["y"]) == ([1, 2, 3], [1.0, 0.5, 0.333333])
    assert (ranks["x"], ranks["y"], ranks["line"]["shape"]) == (
        [0, 1, 3],
        [4, 3, 3],
        "hv",
    )
    assert "Who took part" not in [
        c["title"]
        for c in charts([RecordedRun("r", {"view": views[:1], "train": trained})])
    ]


def test_samples_of_a_stream_are_counted_by_their_draws() -> None:
    stream = [
        {"step": n, "received": 4 * n, "buffer": 9, "waited_s": 0.1} for n in range(9)
    ]
    kept = [{"step": 9, "samples": {"0": 2, "1": 5, "3": 1}}]
    drawn = {
        chart["title"]: chart
        for chart in charts([RecordedRun("r", {"stream": stream, "repetitions": kept})])
    }
    assert set(drawn) == {"Stream", "Waiting for simulations", "Repetitions"}
    (bars,) = drawn["Repetitions"]["traces"]
    assert bars["type"] == "bar" and (bars["x"], bars["y"]) == ([0, 1, 3], [2, 5, 1])
