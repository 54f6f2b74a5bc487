"""Runs on a stream: simulators in threads of the test, a checkpoint and its continuation, layouts, and deaths."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.prove.test_equality import difference
from weft.api import start
from weft.errors import UsageError, WeftError
from weft.net.sockets import listen
from weft.observe.run_metrics import read_metrics
from weft.recipe import build_recipe
from weft.streams import open_surrogate, producer

SHAPES = {"inputs": {"x": [2]}, "outputs": {"y": [3]}}
#: Its first life ends by SIGKILL after so many samples, if the third argument says so.
SIMULATOR = """
import os, sys, time
from weft.streams import producer
with producer() as out:
    for i in range(int(sys.argv[1])):
        x = [i / 50, 1 - i / 50]
        time.sleep(float(sys.argv[2]))
        if str(i) == sys.argv[3] and not out.received:
            os.kill(os.getpid(), 9)
        out.send({"x": x, "y": [x[0] + x[1], x[0] - x[1], 0.5]})
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_SECRET", "of these tests")
    Path("simulator.py").write_text(SIMULATOR)


def free_port() -> int:
    with listen("127.0.0.1") as sock:
        return int(sock.getsockname()[1])


def tree(stream: dict[str, Any], **train: Any) -> dict[str, Any]:
    return {
        "name": "heat",
        "model": {"kind": "mlp", "settings": {"width": 8, "depth": 1}, **SHAPES},
        "stream": {"capacity": 20, "patience": 60} | stream,
        "train": {"steps": 100, "batch": 4} | train,
        "optimizer": {"lr": 0.01},
        "layout": {},
    }


def arrays(i: int) -> dict[str, Any]:
    x = [i / 50, 1 - i / 50]
    return {"x": x, "y": [x[0] + x[1], x[0] - x[1], 0.5]}


def simulate(address: str, count: int, sent: list[int] | None = None) -> None:
    """Send samples, whose numbers are the first inputs, until the training is over."""
    with producer(address, "thread") as out:
        for i in range(count):
            if sent is not None and out.wants(i):
                sent.append(i)
            out.send(arrays(i))


def train_on(
    port: int, count: int, out: Path, resume: str | None = None, sent: list[int] | None = None, **train: Any
) -> Any:  # fmt: skip
    address = f"127.0.0.1:{port}"
    thread = threading.Thread(target=simulate, args=(address, count, sent), daemon=True)
    thread.start()
    stream = {"listen": address, "others": 1, "buffer": "firo", "watermark": 6}
    outcome = start(build_recipe(tree(stream, **train)), out, resume)
    thread.join(20)
    assert not thread.is_alive()
    return outcome


def test_a_run_learns_until_the_stream_ends_and_predicts(tmp_path: Path) -> None:
    outcome = train_on(free_port(), 50, tmp_path / "run")
    assert (
        outcome.progress.step == 13 and not outcome.interrupted
    )  # 12 of 4, and one of 2
    records = read_metrics(tmp_path / "run")
    assert records["train"][-1]["samples"] == 2
    assert records["repetitions"][-1]["samples"] == {"1": 50}
    said = [each["message"] for each in records["event"]]
    assert "the stream ended after 50 samples, which were drawn 50 times" in said
    losses = [each["loss"] for each in records["train"]]
    assert losses[-1] < losses[0]
    surrogate = open_surrogate(tmp_path / "run")
    predicted = surrogate({"x": np.zeros((5, 2))})
    assert predicted["y"].shape == (5, 3)
    with pytest.raises(UsageError, match=r"needs \[rows, 2\]"):
        surrogate({"x": np.zeros((5, 3))})


def test_a_resumed_run_gets_what_was_not_drawn(tmp_path: Path) -> None:
    """Each sample is drawn once over both runs, and those that were drawn before are not sent again."""
    train_on(free_port(), 50, tmp_path / "run", steps=5)
    sent: list[int] = []
    train_on(free_port(), 50, tmp_path / "run", "auto", sent)
    records = read_metrics(tmp_path / "run")
    assert records["repetitions"][-1]["samples"] == {"1": 50}
    assert len(sent) == len({*sent}) == 30
    assert sum(each["samples"] for each in records["train"]) == 50


def test_a_refused_simulator_does_not_end_the_run_without_a_word(tmp_path: Path) -> None:  # fmt: skip
    port = free_port()

    def send_nothing_good() -> None:
        with pytest.raises(UsageError), producer(f"127.0.0.1:{port}", "bad") as out:
            out.send({"x": [0, float("inf")], "y": [0, 0, 0]})

    thread = threading.Thread(target=send_nothing_good)
    thread.start()
    stream = {"listen": f"127.0.0.1:{port}", "others": 1}
    with pytest.raises(WeftError, match=r"no sample has come.*bad was refused: sample 0 has .* 'x'"):  # fmt: skip
        start(build_recipe(tree(stream)), tmp_path / "run")
    thread.join(20)


def test_a_stream_that_is_silent_is_given_up(tmp_path: Path) -> None:
    stream = {"listen": f"127.0.0.1:{free_port()}", "patience": 0.1}
    with pytest.raises(
        WeftError, match="waited for simulators, none of which has joined"
    ):
        start(build_recipe(tree(stream)), tmp_path / "run")


@pytest.mark.parametrize(("change", "why"), [
    ({"stream": {}}, "nobody who sends samples"),
    ({"stream": {"producers": ["a"], "others": 1}}, "set stream.listen"),
    ({"stream": {"producers": ["a"], "buffer": "fifo", "capacity": 5, "watermark": 2}}, "no room above"),
    ({"data": {"path": "x"}}, r"\[data\] does nothing beside \[stream\]"),
    ({"loss": {"kind": "dpo"}}, "compares pairs"),
    ({"layout": {"island": 2}}, "trains several"),
    ({"train": {"steps": 0}}, "steps"),
    ({"validation": {"patience": 2}}, "set stream.held_out"),
    ({"model": {"kind": "mlp"}}, "set model.inputs"),
    ({"stream": None}, r"add \[stream\]"),
])  # fmt: skip
def test_what_does_not_go_together_is_one_line(change: dict[str, Any], why: str) -> None:  # fmt: skip
    with pytest.raises(UsageError, match=why) as caught:
        build_recipe(tree({"producers": ["python a.py"]}) | change)
    assert "\n" not in str(caught.value)


def test_layouts_equal_one_device(pool: Any) -> None:
    given = tree({"producers": ["python a.py"]}, batch=5, dtype="float64")
    given["layout"] = {"dp": 2}
    compared = pool.run(2, difference, given)[0]
    assert compared.ok, compared


@pytest.mark.slow(10)
def test_simulators_that_die_are_started_again(tmp_path: Path) -> None:
    """Two processes are killed in the middle; nothing is lost or counted twice. Validation has samples of its own."""
    command = "python simulator.py"
    own = [f"{command} 60 0.01 20", f"{command} 60 0.01 40"]
    stream = {"producers": own, "held_out": [f"{command} 7 0 -"]}
    outcome = start(build_recipe(tree(stream, steps=5000)), tmp_path / "run")
    records = read_metrics(tmp_path / "run")
    times = {int(k): v for k, v in records["repetitions"][-1]["samples"].items()}
    assert sum(times.values()) == 120 and 0 not in times
    said = [each["message"] for each in records["event"]]
    assert sum("with signal 9 after" in line for line in said) == 2
    assert len(outcome.validations) >= 2


@pytest.mark.slow(5)
def test_a_simulator_that_dies_again_and_again_ends_the_run(tmp_path: Path) -> None:
    Path("broken.py").write_text("raise SystemExit('no licence for the solver')")
    stream = {"producers": ["python broken.py"], "restarts": 1}
    with pytest.raises(WeftError, match=r"2 times in a row .*: no licence for the solver; .*log has"):  # fmt: skip
        start(build_recipe(tree(stream)), tmp_path / "run")
