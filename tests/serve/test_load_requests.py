"""``bench/load.py``: arrivals, figures by hand, and what it says about a server whose times are known."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import load
import pytest
from load import Target, run

from tests.conftest import Command
from tests.serve.running import Running, until
from weft.cli.app import app
from weft.data.tokenizer import load_tokenizer
from weft.errors import UsageError
from weft.serve.load_requests import (
    LoadRequest,
    RequestOutcome,
    arrival_pauses,
    latency_statistics,
    random_requests,
    read_limits,
    read_percentiles,
    sharegpt_requests,
)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is one of weft's here, as it is in ``python bench/load.py``."""
    monkeypatch.setattr(app, "registered_commands", [*app.registered_commands])
    load.register()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    running = Running(load_tokenizer("bytes"))
    yield running
    until(running.empty)
    running.close()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    """Of a gamma distribution with that shape: the squared coefficient of variation is 1 / burstiness."""
    found = arrival_pauses(20_000, 5.0, burstiness, 1)
    assert statistics.mean(found) == pytest.approx(1 / 5, rel=0.05)
    assert statistics.variance(found) * 25 == pytest.approx(1 / burstiness, rel=0.12)
    assert set(arrival_pauses(9, float("inf"), burstiness, 1)) == {0.0}


def test_lengths_are_those_asked_for() -> None:
    asks = random_requests(500, 40, 10, 0.5, 7, 3)
    assert (
        all(27 <= len(a.prompt) <= 67 and 5 <= a.tokens <= 15 for a in asks)
        and len({a.tokens for a in asks}) == 11
    )
    assert (
        len({tuple(a.prompt[:7]) for a in asks})
        == 1
        < len({tuple(a.prompt[:8]) for a in asks})
    )
    assert {(len(a.prompt), a.tokens) for a in random_requests(9, 40, 10, 0, 0, 3)} == {
        (40, 10)
    }
    talks = sharegpt_requests(4000, 3)
    # the longest are cut
    assert statistics.mean(len(a.prompt) for a in talks) == pytest.approx(161, rel=0.12)
    assert statistics.median(a.tokens for a in talks) == pytest.approx(
        338 * 2.718281828 ** (-(0.9**2) / 2), rel=0.08
    )
    assert all(4 <= n <= 1024 for a in talks for n in (len(a.prompt), a.tokens))


def test_figures_are_vllms() -> None:
    one = RequestOutcome(
        began=10.0, times=[10.5, 10.6, 11.0], end=11.0, prompt=7, written=3
    )
    two = RequestOutcome(began=11.0, times=[11.1], end=11.1, prompt=5, written=1)
    lost = RequestOutcome(began=11.0, error="500")
    found = latency_statistics(
        [one, two, lost], 4.0, [50, 100], {"ttft": 200, "e2el": 900}
    )
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, ["500"])
    assert found["output_throughput"] == 1.0 and found["total_token_throughput"] == 4.0
    assert found["request_throughput"] == 0.5 and found["request_goodput"] == 0.25
    assert found["mean_ttft_ms"] == pytest.approx(300) and found[
        "p100_ttft_ms"
    ] == pytest.approx(500)
    assert found["mean_tpot_ms"] == pytest.approx(250) and found[
        "median_itl_ms"
    ] == pytest.approx(250)
    assert found["p100_itl_ms"] == pytest.approx(400) and found[
        "mean_e2el_ms"
    ] == pytest.approx(550)
    assert latency_statistics([lost], 4.0, [50], {})["completed"] == 0


@pytest.mark.slow
def test_times_are_those_of_the_server(server: Running, monkeypatch: Any) -> None:
    """An engine whose steps take 30 ms: two answers at a time share them, and one at a time takes twice as long."""
    step = server.engine.step
    monkeypatch.setattr(server.engine, "step", lambda: (time.sleep(0.03), step())[1])
    target = Target(str(server.client.base_url), ignore_eos=True)
    asks = [LoadRequest([1, 2, 3, number], 12) for number in range(4)]
    found = {}
    for most in (1, 4):
        outcomes, seconds = asyncio.run(run(target, asks, [0.0] * 4, most))
        assert [(one.prompt, one.written, one.error) for one in outcomes] == [
            (4, 12, "")
        ] * 4
        found[most] = latency_statistics(outcomes, seconds, [50], {})
        assert found[most]["mean_e2el_ms"] >= 12 * 30
        # less than 30 where a busy machine sees the first token late
        assert found[most]["median_tpot_ms"] >= 25
    # four times as long where nothing else runs
    assert found[1]["duration"] > 2 * found[4]["duration"]
    # the clock of a question starts when it is sent
    assert found[1]["mean_ttft_ms"] < found[1]["mean_e2el_ms"] / 2


@pytest.mark.slow
def test_the_command(server: Running, command: Command, tmp_path: Path) -> None:
    url = ["load", "--base-url", f"{server.client.base_url}/v1"]
    words = ["--num-prompts", "6", "--random-input-len", "9", "--random-output-len", "5", "--ignore-eos",
             "--request-rate", "200", "--burstiness", "0.5", "--goodput", "e2el:60000"]  # fmt: skip
    code, out, _ = command(*url, *words, "--json", "--metric-percentiles", "99")
    found = json.loads(out)
    assert found["completed"] == 6 and server.server.metrics.hits._value.get() == 0, (
        "a warm-up was one of them"
    )
    assert code == 0 and found["total_output_tokens"] == 30
    assert (
        found["total_input_tokens"] == 54
        and found["request_goodput"] == found["request_throughput"]
    )
    assert found["p99_ttft_ms"] >= found["median_ttft_ms"] > 0
    (tmp_path / "asks.jsonl").write_text(
        '{"prompt": "abc", "output_tokens": 2}\n{"prompt": "de"}\n'
    )
    code, out, _ = command(
        *url, "--dataset-name", "custom", "--dataset-path", tmp_path / "asks.jsonl"
    )
    assert code == 0 and "output_throughput" in out
    code, out, error = command(*url, "--model", "other", "--num-prompts", "1")
    assert code == 1 and "no request was answered: 404" in error


@pytest.mark.parametrize(("words", "code", "said"), [
    (["--base-url", "http://127.0.0.1:9"], 1, "does not answer"),
    (["--dataset-name", "x"], 2, "choose random, sharegpt"), (["--goodput", "ttft"], 2, "give METRIC:MS"),
    (["--metric-percentiles", "101"], 2, "numbers from 0 to 100"), (["--goodput", "x:1"], 2, "knows no x"),
    (["--dataset-name", "custom", "--dataset-path", "none"], 2, "is no file"), (["--api-key", "none"], 2, "--api-key"),
])  # fmt: skip
def test_mistakes(command: Command, words: list[str], code: int, said: str) -> None:
    found, _, error = command("load", *words)
    assert found == code and said in error and "Traceback" not in error


def test_words_are_read() -> None:
    assert read_limits(["ttft:5", "itl:0.5"]) == {
        "ttft": 5,
        "itl": 0.5,
    } and read_percentiles("50,99.9") == [50, 99.9]
    with pytest.raises(UsageError):
        read_percentiles("")
