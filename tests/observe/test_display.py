"""What a person sees while a run goes on."""

from __future__ import annotations

import io
import os
import re
from unittest import mock

import pytest
from rich.console import Console

from weft.observe.display import Display, clock, compact


def test_plain_lines_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(1000, "run [x] · tp=2", interval=0.0) as display:
        for step in (1, 2, 999):
            display.update(
                step,
                loss=5.0 / step,
                grad_norm=0.5,
                tokens_per_s=1e5 * step,
                mfu=0.4,
                memory_now_gib=1.25,
                memory_gib=3.0,
                ignored=1,
            )
            display.note(f"step {step} [done]")
        display.update(1000, loss=None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run [x] · tp=2" and "· step 2 [done]" in lines
    steps = [line for line in lines if line.startswith("step ")]
    assert len({line.index("memory") for line in steps}) == 1
    assert re.fullmatch(
        r"step 1000/1000  loss  0\.0050  grad    0\.5  tok/s  99\.9M  MFU 40\.0%  memory 1\.25 GiB  peak 3\.00 GiB",
        steps[-1],
    )


def test_plain_lines_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(500, "run", interval=60) as display:
        for step in range(1, 501):
            display.update(step, loss=1.0)
    assert [line[:12] for line in capsys.readouterr().out.splitlines()] == [
        "run",
        "step   1/500",
        "step 500/500",
    ]


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(5, "run", enabled=False) as display:
        display.update(5, loss=1.0)
        display.note("hello")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("width", [44, 120])
def test_terminal_is_left_as_it_was(width: int) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, highlight=False)
    with (
        mock.patch.dict(os.environ, {"TERM": "xterm"}),
        mock.patch("weft.observe.display.Console", lambda **kwargs: console),
        pytest.raises(KeyboardInterrupt),
        Display(10, "run") as display,
    ):
        display.update(1, loss=3.0)
        display.update(
            2,
            loss=2.5,
            validation=2.6,
            tokens_per_s=12_345,
            mfu=0.3,
            memory_gib=1.5,
            grad_norm=1,
            lr=1e-3,
        )
        display.note("checkpoint saved")
        raise KeyboardInterrupt
    text = screen.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is hidden"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    for part in (
        "2/10",
        "loss 2.5000",
        "validation 2.6000",
        "12.3k",
        "30.0%",
        "1.50 GiB",
        "· checkpoint saved",
    ):
        assert part in plain
    assert all(len(line) <= width for line in plain.replace("\r", "\n").splitlines())


def test_numbers() -> None:
    assert [compact(n) for n in (0, 950, 12_345, 4.56e6, 7e9)] == [
        "0",
        "950",
        "12.3k",
        "4.56M",
        "7B",
    ]
    assert [compact(n) for n in (999.6, 999_400, 999_600, -999_600)] == [
        "1k",
        "999k",
        "1M",
        "-1M",
    ]
    assert [clock(s) for s in (-1, 9, 61, 3661, 200_000)] == [
        "0:00",
        "0:09",
        "1:01",
        "1:01:01",
        "2d 7:33",
    ]


def test_a_validation_is_said_once_off_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Display(9, "run", interval=0.0) as display:
        display.update(1, loss=1.0, validation=2.0)
        for step in (2, 3):
            display.update(step, loss=1.0)
        display.update(3, validation=1.5)
    lines = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("step")
    ]
    assert ["validation" in line for line in lines] == [True, False, False, True]


def test_a_step_that_takes_long_shows_its_passes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with (
        Display(9, "run", interval=60.0, slow=5.0) as display,
        mock.patch("weft.observe.display.time") as time,
    ):
        time.monotonic.return_value = 100.0
        display.update(1, loss=1.0)
        for done in range(1, 65):
            time.monotonic.return_value = 100.0 + done
            display.passes(done, 64)
    lines = [line for line in capsys.readouterr().out.splitlines() if "pass" in line]
    assert lines == [
        f"step 2/9  pass {done} of 64 after 0:{done:02}" for done in (5, 10, 20, 40)
    ]


def test_a_terminal_shows_the_time_and_the_passes_of_a_slow_step() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, highlight=False)
    with (
        mock.patch.dict(os.environ, {"TERM": "xterm"}),
        mock.patch("weft.observe.display.Console", lambda **kwargs: console),
        mock.patch("weft.observe.display.time") as time,
    ):
        time.monotonic.return_value = 100.0
        with Display(9, "run", slow=5.0) as display:
            display.update(1, loss=1.0)
            time.monotonic.return_value = 131.0
            display.passes(3, 8)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "this step 0:31" in plain and "pass 3 of 8" in plain
