"""``weft plan RUN --rl``: which ranks should write answers, and which should train."""

import json
from pathlib import Path
from typing import Any

from weft.cli.console import print_table
from weft.errors import UsageError


def plan_roles(run: str, ranks: int | None, top: int, as_json: bool) -> int:
    """Print how to divide ranks between generation and training, by the times of the run in the folder ``run``.

    ``ranks``: number of ranks to divide; None: as many as the run had, at least 2. ``top``: number of divisions to
    print. ``as_json``: print JSON instead of a table. Returns the exit code.
    """
    from weft.observe.run_metrics import read_metrics
    from weft.planner.rl_roles import phase_times, role_plans, writers_waited

    folder = Path(run)
    if not folder.is_dir():
        raise UsageError(
            f"--rl reads the times of a run with [rl], and {run} is no folder; give one such as runs/rl-sums"
        )
    records = read_metrics(folder)
    if not records.get("rollout"):
        raise UsageError(f"the run in {run} has no rollout phases; give one with [rl]")
    head: dict[str, Any] = records["run"][-1]
    trainers = int(head.get("world") or 1)
    roles = head["recipe"].get("roles") or {}
    role = roles.get("rollout", {})
    apart = int(role.get("ranks") or 0)
    writers = apart or trainers
    staleness = int((head["recipe"].get("rl") or {}).get("staleness") or 0)
    ahead = staleness if apart else 0
    references = int(roles.get("reference", {}).get("ranks") or 0)
    critics = int(roles.get("critic", {}).get("ranks") or 0)
    times = phase_times(
        records["rollout"], writers, trainers, ahead, references, critics
    )
    own = trainers + apart + references + critics
    plans = role_plans(times, ranks or max(2, own))[:top]
    if as_json:
        print(
            json.dumps(
                {"times": times._asdict(), "plans": [p._asdict() for p in plans]}
            )
        )
        return 0
    print(
        f"a phase of {times.answers:.0f} answers: writing {times.write:.2f} rank-seconds, training {times.train:.2f}, "
        f"weights {times.weights:.3f} s"
        + (f", reference model {times.reference:.2f}" if times.reference else "")
        + (f", critic {times.critic:.2f}" if times.critic else "")
    )
    if ahead and writers_waited(times, writers, trainers):
        print(
            "this run wrote ahead and never waited for answers, so that writing may take less than that; "
            "a run with rl.staleness=0 tells"
        )
    print_table(
        (
            "write",
            "train",
            *(["reference"] if times.reference else []),
            *(["critic"] if times.critic else []),
            "staleness",
            "s/phase",
            "answers/s",
            "waiting",
            "settings",
        ),
        [
            (
                "in turn" if plan.in_turn else str(plan.writers),
                str(plan.trainers),
                *([str(plan.references or "in turn")] if times.reference else []),
                *([str(plan.critics or "in turn")] if times.critic else []),
                str(plan.staleness),
                f"{plan.seconds:.3f}",
                f"{times.answers / plan.seconds:.1f}",
                f"{plan.idle:.0%}",
                plan.settings,
            )
            for plan in plans
        ],
    )
    return 0
