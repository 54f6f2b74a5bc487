"""Which ranks write and which train: the arithmetic, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.cli.roles_plan import plan_roles
from weft.errors import UsageError, WeftError
from weft.planner.rl_roles import (
    PhaseTimes,
    _processes,
    phase_times,
    role_plans,
    writers_waited,
)


def phase(rollout: float, train: float) -> dict[str, Any]:
    known = {"prepare_s": 0.5, "weights_s": 0.1, "lags": {"0": 12, "1": 4}}
    return {"rollout_s": rollout, "train_s": train, **known}


def test_times_of_a_run_count_ranks() -> None:
    phases = [phase(99, 99), phase(2, 1), phase(4, 1), phase(3, 1)]
    assert phase_times(phases, 2, 3) == PhaseTimes(6.0, 4.5, 0.1, 16)
    with pytest.raises(WeftError, match="fewer than three"):
        phase_times(phases[:2], 1, 1)


def test_writers_that_write_ahead_work_while_others_train() -> None:
    """A phase of 5 s in which the trainers wait for 2 s and train for 3 has writers that are busy for all 5."""
    phases = [phase(99, 99), *[phase(wait, 2.5) for wait in (0, 1, 5)]]
    times = phase_times(phases, 2, 1, 1)
    assert times == PhaseTimes(10.0, 3.0, 0.1, 16)
    assert not writers_waited(times, 2, 1)
    plans = {(p.writers, p.trainers, p.staleness): p for p in role_plans(times, 3)}
    assert plans[2, 1, 1].seconds == 5.1  # as the run itself
    assert plans[2, 1, 0].seconds == 8.1
    idle = phase_times([phase(99, 99), *[phase(0.01, 2.5)] * 3], 2, 1, 1)
    assert writers_waited(idle, 2, 1)


def test_plans_against_all_ways_counted_by_hand() -> None:
    plans = role_plans(PhaseTimes(6.0, 2.0, 0.0, 16), 4)
    best = plans[0]
    # 4 ranks in turn: 8 / 4 = 2; 3 write while 1 trains: max(2, 2) = 2, which has older answers
    assert best.in_turn and best.seconds == 2
    assert (plans[1].writers, plans[1].staleness, plans[1].seconds) == (3, 1, 2)
    assert {(p.writers, p.trainers, p.staleness) for p in plans} == {
        (4, 4, 0), *((w, 4 - w, s) for w in (1, 2, 3) for s in (0, 1))
    }  # fmt: skip
    assert plans[-1].seconds == max(6 / w + 2 / (4 - w) for w in (1, 2, 3))
    assert all(0 <= plan.idle < 1 for plan in plans)


def test_the_command_reads_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="no folder"):
        plan_roles(str(tmp_path / "none"), None, 5, False)
    lines = [{"kind": "run", "step": 0, "world": 2, "recipe": {}}]
    lines += [{"kind": "rollout", "step": i, **phase(2, 1)} for i in range(4)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in lines)
    )
    assert plan_roles(str(tmp_path), 4, 3, False) == 0
    assert "in turn\t4\t0\t1.850" in capsys.readouterr().out
    assert plan_roles(str(tmp_path), 4, 3, True) == 0
    assert len(json.loads(capsys.readouterr().out)["plans"]) == 3
    apart = {"roles": {"rollout": {"ranks": 2}}, "rl": {"staleness": 1}}
    lines[0]["recipe"] = apart
    lines += [{"kind": "rollout", "step": i, **phase(0, 1)} for i in range(9)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in lines)
    )
    assert plan_roles(str(tmp_path), None, 9, False) == 0
    output = capsys.readouterr().out
    assert "never waited" in output
    assert "2\t2\t1\t1.600" in output  # of four ranks, as the run itself


def test_a_reference_model_in_processes_of_its_own_is_counted() -> None:
    """By hand: 3 ranks, 6 rank-seconds of training of which 3 are hidden behind the reference model's 2."""
    more = {"old_s": 1.5, "reference_s": 1.0, "reference_wait_s": 1.0}
    phases = [phase(99, 99), *[phase(0.0, 2.5) | {"prepare_s": 1.5} | more] * 3]
    times = phase_times(phases, 2, 2)
    assert times == PhaseTimes(0.0, 6.0, 0.1, 16, 2.0, 3.0)
    plans = {p.references: p for p in role_plans(times, 3) if p.in_turn}
    assert plans[0].seconds == pytest.approx(8 / 3 + 0.1)
    assert plans[1].seconds == pytest.approx(3 / 2 + max(3 / 2, 2) + 0.1)
    assert plans[2].seconds == pytest.approx(3 + 3 + 0.1)
    assert plans[1].settings == "layout of 2, roles.reference.ranks=1"
    assert 0 < plans[2].idle < 1 and plans[0].idle == 0
    # of a run that has one such process, which computes for 2 s while training waits for half a second
    waits = {"old_s": 1.5, "reference_s": 2.0, "reference_wait_s": 0.5}
    apart = [phase(99, 99), *[phase(0.0, 2.5) | {"prepare_s": 2.0} | waits] * 3]
    own = phase_times(apart, 2, 2, references=1)
    assert own == PhaseTimes(0.0, 8.0, 0.1, 16, 2.0, 3.0)
    (same,) = [p for p in role_plans(own, 3) if p.in_turn and p.references == 1]
    assert same.seconds == pytest.approx(2.5 + 1.5 + 0.5 + 0.1)


def test_a_critic_with_layers_of_its_own_is_counted() -> None:
    """By hand: a critic of 4 rank-seconds, 1 of them for values, beside 6 of the policy, 1 of them for values' time."""
    more = {"old_s": 1.0, "values_s": 0.5, "critic_s": 2.0}
    phases = [phase(99, 99), *[phase(1.0, 4.0) | {"prepare_s": 1.0} | more] * 3]
    times = phase_times(phases, 2, 2)
    assert times == PhaseTimes(2.0, 6.0, 0.1, 16, 0.0, 1.0, 4.0, 1.0)
    plans = {(p.critics, p.writers): p for p in role_plans(times, 3) if not p.staleness}
    assert plans[0, 3].seconds == pytest.approx((2 + 6 + 4) / 3 + 0.1)
    assert plans[1, 2].seconds == pytest.approx(2 / 2 + (6 - 1) / 2 + 1 / 1 + 0.1)
    # the critic of one process is late where two ranks would be done
    assert plans[2, 1].seconds == pytest.approx(2 + 5 + max(1, 1 / 2) + 0.1)
    slow = times._replace(critic=9.0)
    late = [p for p in role_plans(slow, 3) if p.critics == 1 and p.in_turn]
    assert [p.seconds for p in late] == [9.0]
    assert plans[1, 2].settings == "layout of 2, roles.critic.ranks=1"
    # of a run with one such process, for which training waits for half a second
    waits = {"old_s": 0.5, "values_s": 1.0, "critic_s": 4.0, "critic_wait_s": 0.5}
    apart = [phase(99, 99), *[phase(1.0, 2.5) | {"prepare_s": 1.0} | waits] * 3]
    own = phase_times(apart, 2, 2, critics=1)
    assert own == PhaseTimes(2.0, 6.0, 0.1, 16, 0.0, 1.0, 4.0, 1.0)
    both = times._replace(reference=3.0)
    assert len(_processes(both, 300)) <= 100 and len(_processes(both, 8)) == 8 * 9 / 2
