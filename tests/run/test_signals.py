"""Signals that ask a run to end: the first is a wish, a repetition is the same wish, a later one is an order."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.checkpoint.store import committed_checkpoints, step_of
from weft.run import signals
from weft.run.saved_steps import recorded_steps, what_is_saved
from weft.run.signals import REPEAT_S, Stopped, StopRequests, noted_signals

NUMBERS = st.sampled_from([signal.SIGINT, signal.SIGTERM])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 3.0), NUMBERS), min_size=1, max_size=6))
def test_what_comes_within_two_seconds_of_the_first_is_the_same_wish(
    gaps: list[tuple[float, int]],
) -> None:
    """Others are orders, each of which is passed on."""
    now = [100.0]
    asked, orders = StopRequests(lambda: now[0]), list[int]()
    asked.noted, asked.again = [], orders.append
    times = []
    for gap, number in gaps:
        now[0] += gap
        times.append(now[0])
        asked.note(number)
    due = [
        number
        for at, (_, number) in zip(times, gaps, strict=True)
        if at - times[0] > REPEAT_S
    ]
    assert orders == due and asked.noted == [gaps[0][1], *due]
    assert (asked.asked, asked.at_once) == (gaps[0][1], bool(due))


def test_where_nobody_notes_it_a_signal_raises_once() -> None:
    now = [0.0]
    asked = StopRequests(lambda: now[0])
    with pytest.raises(Stopped):
        asked.note(signal.SIGTERM)
    asked.note(signal.SIGTERM)  # while the first is on its way
    assert asked.code == 143 and asked.words(None) == "stopped by SIGTERM"
    now[0] = 2.5
    with pytest.raises(Stopped):
        asked.note(signal.SIGINT)
    assert asked.words(None) == "ended at once, by another SIGINT"


@pytest.mark.parametrize("inherited", [signal.default_int_handler, signal.SIG_IGN])
def test_a_command_takes_a_signal_that_it_inherited_as_ignored(
    monkeypatch: pytest.MonkeyPatch, inherited: signal.Handlers
) -> None:
    """Background jobs of a script inherit that. One that an import has swallowed still counts."""
    monkeypatch.setattr(signals, "requests", requests := StopRequests())
    signal.signal(signal.SIGINT, inherited)
    requests.watch()
    with noted_signals([signal.SIGINT]) as received:
        assert not received
    with contextlib.suppress(Stopped):
        signal.raise_signal(signal.SIGINT)
    with noted_signals([signal.SIGINT]) as received:
        signal.raise_signal(signal.SIGINT)
        assert received == [signal.SIGINT], "the first, of before, and its repetition"
    with noted_signals([signal.SIGTERM]) as received:
        assert not received
    signal.raise_signal(signal.SIGINT)  # still the same wish
    time.sleep(0.1)
    monkeypatch.setattr(signals, "REPEAT_S", 0.05)
    with pytest.raises(Stopped), noted_signals([signal.SIGINT]):
        signal.raise_signal(signal.SIGINT)


def test_a_program_gets_its_own_handlers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run of a notebook knows nothing of the signal that ended the first."""
    monkeypatch.setattr(signals, "requests", requests := StopRequests())
    before = signal.getsignal(signal.SIGTERM)
    for _ in range(2):
        with requests.watching(), noted_signals([signal.SIGTERM]) as received:
            assert not received
            signal.raise_signal(signal.SIGTERM)
            assert received == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before and not requests.asked


def test_a_repetition_is_known_by_when_it_came_and_not_by_when_it_is_handled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python handles signals between two operations, and one of PyTorch's may take long."""
    monkeypatch.setattr(signals, "requests", requests := StopRequests())
    monkeypatch.setattr(signals, "REPEAT_S", 0.3)
    requests.watch()
    with noted_signals([signal.SIGINT, signal.SIGTERM]) as received:
        signal.raise_signal(signal.SIGINT)
        # as if Python's could not run now
        handler = signal.signal(signal.SIGTERM, lambda number, frame: None)
        subprocess.run(["/bin/sh", "-c", f"kill -TERM {os.getpid()}"], check=True)
        time.sleep(0.5)
        signal.signal(signal.SIGTERM, handler)
        requests.note(signal.SIGTERM)
        assert received == [signal.SIGINT] and not requests.at_once
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGTERM)


def test_words_say_what_a_run_has_saved(tmp_path: Path) -> None:
    run = {"kind": "run", "step": 0, "given": {"name": "own"}}
    steps = [run, *({"kind": "train", "step": step} for step in range(1, 8))]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(step) + "\n" for step in steps) + '{"kind": "tr'
    )
    assert (
        what_is_saved(tmp_path)
        == f"7 steps were taken, and none is saved: there is no checkpoint in {tmp_path}"
    )
    (tmp_path / "checkpoints/step-000005").mkdir(parents=True)
    (tmp_path / "checkpoints/step-000005/weft.json").write_text("{}")
    said = what_is_saved(tmp_path)
    assert (
        said.startswith("steps 6 to 7 are not saved: the last checkpoint is ")
        and "step-000005" in said
    )
    assert said.endswith(f"; continue with: weft train --resume {tmp_path}")
    (tmp_path / "metrics.jsonl").unlink()
    assert what_is_saved(tmp_path).startswith("all of its steps are saved: ")


TINY = """
[model]
layers = 1
embed = 16
heads = 2
[data]
seq_len = 32
kind = "text"
path = "words.txt"
[layout]
{layout}
[train]
steps = {steps}
batch = 4
[validation]
every = 0
[checkpoint]
every = 40
[generate]
tokens = 2
"""


def double_signal(
    folder: Path,
    layout: str,
    steps: int,
    delay: float,
    pair: tuple[int, int],
    whole_group: bool,
) -> str:
    """Send a pair of signals to a run, 0.3 s apart; how that ended: "saved", "said", or "over" before it came.

    ``delay``: seconds after the start, or after the first step if negative. Raises :class:`AssertionError` if the run
    has lost steps without a word.
    """
    (folder / "words.txt").write_text(
        "".join(f"word {number} and another\n" for number in range(400))
    )
    (folder / "tiny.toml").write_text(TINY.format(layout=layout, steps=steps))
    words = [sys.executable, "-m", "weft", "train", "tiny.toml", "--out", "run"]
    process = subprocess.Popen(
        words,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = folder / "run/metrics.jsonl"
    deadline = time.monotonic() + 240
    while delay < 0 and time.monotonic() < deadline:
        if metrics.exists() and '"kind": "train"' in metrics.read_text():
            delay = -delay
    time.sleep(delay)
    send = partial(os.killpg if whole_group else os.kill, process.pid)
    for number in pair:
        with contextlib.suppress(ProcessLookupError):
            send(number)
        time.sleep(0.3)
    out, err = process.communicate(timeout=240)
    told = f"{layout!r} {pair} {delay:.2f} s: {process.returncode}\n{out}\n{err}"
    assert "Traceback" not in out + err, told
    # all was done and said before it came
    if "report      " in out and "stopped by" not in out:
        assert process.returncode in (0, 128 + pair[0], -pair[0], -pair[1]), told
        return "over"
    assert process.returncode == 128 + pair[0], told
    steps_taken = max(recorded_steps(folder / "run"), default=0)
    kept = (
        [step_of(place) for place in committed_checkpoints(folder / "run/checkpoints")]
        if steps_taken
        else []
    )
    if "stopped by" in out:
        assert kept[-1] == steps_taken and err == "", told
        return "saved"
    assert (
        err.startswith(("weft: interrupted", "weft: stopped by SIGTERM"))
        and err.count("\n") == 1
    ), told
    assert (
        not steps_taken
        or "all of its steps are saved" in err
        or "is saved" in err
        or "not saved" in err
    ), told
    return "said"


@pytest.mark.soak
@pytest.mark.parametrize("case", range(40))
def test_double_signals_at_forty_instants(tmp_path: Path, case: int) -> None:
    """Of the start, of training and of the end: saved, or said."""
    draw = random.Random(case)
    pair = draw.choice(
        [(signal.SIGINT,) * 2, (signal.SIGTERM,) * 2, (signal.SIGINT, signal.SIGTERM)]
    )
    layout, whole = ["", "dp = 2"][case % 2], draw.random() < 0.5
    delay = 1.5 + 1.2 * case if case < 16 else -(0.05 + 0.35 * (case - 16))
    print(f"{delay:.2f} s: {double_signal(tmp_path, layout, 150, delay, pair, whole)}")
