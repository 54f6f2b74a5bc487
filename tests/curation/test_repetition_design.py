"""Proposed small runs: the bound of the errors, what they narrow, and what they may cost."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.curation.test_repetition_law import PLANTED, planted_runs
from weft.cli.data import app
from weft.curation.repetition_design import half_life_errors, propose_runs
from weft.curation.repetition_fit import FittedLaw, PoolRun, fit_repetition_law
from weft.errors import UsageError

FITTED = FittedLaw(PLANTED, (), 0.01)
RUNS = planted_runs(PLANTED, 0.0, 0)


def test_fits_are_as_good_as_the_bound_says():
    """Over seeds, the error of a fitted half-life has the standard deviation that the runs allow."""
    logs = []
    for seed in range(12):
        fitted = fit_repetition_law(planted_runs(PLANTED, 0.01, seed), resamples=0)
        logs.append([np.log(fitted.law.pools[n].half_life) for n in ("clean", "noisy")])
    truth = np.log([PLANTED.pools[n].half_life for n in ("clean", "noisy")])
    spread = np.sqrt(((np.array(logs) - truth) ** 2).mean(0))
    bound = half_life_errors(FITTED, RUNS)
    assert spread[0] == pytest.approx(bound["clean"], rel=0.5)
    assert spread[1] == pytest.approx(bound["noisy"], rel=0.5)


def test_proposed_runs_narrow_more_than_the_same_runs_again():
    proposed = propose_runs(FITTED, RUNS, 16, longest=16)
    parts = {run.size for run in proposed}
    assert parts <= {30.0, 300.0, 3000.0, 30000.0}
    assert max(run.epochs for run in proposed) == 16
    more = [PoolRun(r.pool, r.size * r.epochs, r.epochs, 1.0) for r in proposed]
    after = half_life_errors(FITTED, [*RUNS, *more])
    again = half_life_errors(FITTED, [*RUNS, *RUNS[::4]])
    assert len(RUNS[::4]) == 16
    assert max(after.values()) < 0.9 * max(again.values())
    assert max(after.values()) == pytest.approx(proposed[-1].uncertainty, rel=1e-3)
    # the pool whose half-life is known worst gets more
    count = Counter(run.pool for run in proposed)
    assert count["noisy"] > count["clean"]


def test_no_proposed_run_costs_more_than_one_that_was_made():
    few = [run for run in RUNS if run.size <= 3000 and run.epochs <= 4]
    proposed = propose_runs(FITTED, few, 8)
    assert max(run.size * run.epochs for run in proposed) <= 12000
    assert 4 < max(run.epochs for run in proposed) <= 16
    with pytest.raises(UsageError, match=r"at most 0\.5 epochs"):
        propose_runs(FITTED, few, 1, longest=0.5)


def test_law_of_larger_pools_is_told_by_the_parts_that_were_read():
    large = replace(PLANTED.pools["clean"], size=1e9)
    other = FittedLaw(
        replace(PLANTED, pools={**PLANTED.pools, "clean": large}), (), 0.01
    )
    assert half_life_errors(other, RUNS) == pytest.approx(
        half_life_errors(FITTED, RUNS)
    )


def test_command_names_the_next_runs(tmp_path: Path):
    file = tmp_path / "runs.jsonl"
    rows = [
        {"pool": r.pool, "tokens": r.samples, "epochs": r.epochs, "loss": r.loss}
        for r in planted_runs(PLANTED, 0.002, 0)
        if r.epochs <= 4
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["plan", str(file), "--tokens", "3e4", "--propose", "2", "--longest", "8"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    lines = [line for line in shown.stdout.splitlines() if line.startswith("next: ")]
    assert len(lines) == 2 and "8 epochs of 30 tokens" in lines[0]
