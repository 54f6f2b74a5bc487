"""A run whose answers are written by engines elsewhere: the run of before with staleness 0, and never too stale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.main import get_command

from tests.cluster.inprocess import until
from tests.rl.test_remote_rollouts import InThread
from tests.rl.test_rl_loader import letters, parameters, recipe, records, train
from weft.cli import cluster_engine
from weft.cli.app import app
from weft.errors import UsageError
from weft.net.endpoint import Endpoint
from weft.rl import rl_checks, rollout_processes

__all__ = ["letters"]


class EnginesInThreads:
    """In the place of the processes that a run starts: engines in threads of this process."""

    def __init__(
        self, count: int, run: Endpoint, secret: str, say: Callable[[str], None], threads: int, *more: Any
    ) -> None:  # fmt: skip
        self.engines = [
            InThread(run, f"e{number}", slow=0.002 * number, secret=secret)
            for number in range(count)
        ]

    def await_joined(self, joined: Callable[[], int], limit: float) -> None:
        until(lambda: joined() == len(self.engines))

    def close(self, names: Sequence[str]) -> None:
        for each in self.engines:
            each.thread.join(20)
            assert not each.thread.is_alive()
            each.endpoint.close()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in threads in the place of processes, so that they compute as invariantly as this process does."""
    monkeypatch.setattr(rollout_processes, "start_rollout_engines", EnginesInThreads)
    monkeypatch.setattr(rl_checks, "check_alike", lambda recipe, role: None)


@pytest.mark.parametrize("count", [1, 2])
def test_weft_takes_the_command_that_starts_an_engine(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Other tests put threads in the place of these processes."""
    commands, written = list[Sequence[str]](), list[Any]()
    place: Any = SimpleNamespace(start=lambda words, _: commands.append(words))
    run: Any = SimpleNamespace(address=("127.0.0.1", 9))
    monkeypatch.setattr(cluster_engine, "_write_rollouts", lambda *a: written.append(a))
    rollout_processes.start_rollout_engines(count, run, "s", print, places=[place] * 2)
    assert len(commands) == count
    for python, weft, *words in commands:
        assert (python, weft) == ("-m", "weft")
        get_command(app).main(words, standalone_mode=False)
    assert [given[2] for given in written] == [f"engine-{i}" for i in range(count)]


#: With log-probabilities that do not depend on which answers are written at the same time.
IN_TURN = {"rollout": {"invariant": True}}
ELSEWHERE = {"rollout": {"ranks": 2, "invariant": True}}


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize(
    "change",
    [{}, pytest.param({"redraw": 1, "epochs": 2}, marks=pytest.mark.slow(3))],
    ids=["", "two epochs, questions drawn again"],
)
def test_staleness_zero_is_the_loop_in_turn_bit_for_bit(
    tmp_path: Path, letters: dict[str, Any], change: dict[str, Any]
) -> None:
    same: dict[str, Any] = {
        "tasks": [letters],
        "rl": {"start": {"steps": 0}} | change,
        "train": {"steps": 5 * change.get("epochs", 1)},
    }
    in_turn = train(recipe(**same, roles=IN_TURN), out=tmp_path / "turn")
    elsewhere = train(recipe(**same, roles=ELSEWHERE), out=tmp_path / "elsewhere")
    a, b = parameters(in_turn), parameters(elsewhere)
    assert all(torch.equal(a[name], b[name]) for name in a)
    phases = [records(run.run, "rollout") for run in (in_turn, elsewhere)]
    assert [r["reward"] for r in phases[0]] == [r["reward"] for r in phases[1]]
    assert len({r["reward"] for r in phases[0]}) > 1
    assert [r["lags"] for r in phases[1]] == [{"0": 16}] * 5


@pytest.mark.usefixtures("engines")
def test_answers_are_written_ahead_and_never_too_stale(
    tmp_path: Path, letters: dict[str, Any]
) -> None:
    given = recipe(
        tasks=[letters],
        rl={"staleness": 1, "start": {"steps": 1}},
        roles=ELSEWHERE,
        train={"steps": 7},
    )
    phases = records(train(given, out=tmp_path / "run").run, "rollout")
    assert [r["phase"] for r in phases] == [*range(6)]
    lags = [int(lag) for r in phases for lag in r["lags"]]
    assert max(lags) == 1
    assert phases[0]["lags"] == {"0": 16}
    assert all(sum(r["lags"].values()) == 16 for r in phases)


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"rl": {"staleness": 1}}, "set roles.rollout.ranks"),
        ({"rl": {"staleness": 1, "redraw": 1}, "roles": {"rollout": {"ranks": 1}}}, "leave one of them out"),
        ({"roles": {"rollout": {"ranks": 1, "layout": {"tp": 2}}}}, "other processes write"),
        ({"roles": {"rollout": {"listen": "127.0.0.1:70000"}}}, "no port below 65536"),
        ({"roles": {"rollout": {"listen": "127.0.0.1:7000"}}}, "set WEFT_SECRET here and there"),
    ],
)  # fmt: skip
def test_what_engines_elsewhere_cannot_do_is_refused(
    sections: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEFT_SECRET", raising=False)
    with pytest.raises(UsageError, match=why):
        train(recipe(**sections), out=tmp_path / "run")
