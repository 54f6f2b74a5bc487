"""Asymptotes: recovery of planted ones, the joint search of settings, and ``weft data asymptote``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from weft.cli.data import app
from weft.curation.asymptote import fit_asymptote
from weft.curation.settings_search import SearchedRun, search_settings
from weft.errors import WeftError

SIZES = [1e5, 3e5, 1e6, 3e6, 1e7, 3e7]


def losses_of(exponent: float, noise: float = 0.0, seed: int = 0) -> list[float]:
    random = np.random.default_rng(seed)
    exact = 3.0 * (np.array(SIZES) / 1e5) ** -exponent + 2.0
    return list(exact * (1 + random.normal(0, noise, len(SIZES))))


@pytest.mark.parametrize("exponent", [0.2, 0.5, 1.0])
def test_exact_losses_are_fitted_exactly(exponent: float) -> None:
    law = fit_asymptote(SIZES, losses_of(exponent), resamples=0)
    assert law.floor == pytest.approx(2.0, rel=1e-4)
    assert law.exponent == pytest.approx(exponent, rel=1e-3)
    assert law.loss(1e5) == pytest.approx(5.0, rel=1e-4)


def test_interval_holds_the_floor_about_as_often_as_it_says() -> None:
    held = 0
    for seed in range(12):
        law = fit_asymptote(SIZES, losses_of(0.5, 0.003, seed), 40, seed)
        assert law.floor == pytest.approx(2.0, rel=0.06)
        held += law.low <= 2.0 <= law.high
    assert held >= 8


def test_average_of_members_has_the_exponent_of_a_mean() -> None:
    """The variance of a mean of K members falls as 1 / K."""
    members = [1.0, 2, 3, 4, 8]
    law = fit_asymptote(members, [0.4 / k + 3.3 for k in members], resamples=0)
    assert (law.exponent, law.floor) == pytest.approx((1.0, 3.3), rel=1e-3)


def test_search_takes_the_best_of_each_size_and_notes_edges() -> None:
    runs = [
        SearchedRun(size, loss + abs(np.log(decay / best)), {"weight_decay": decay, "lr": 1e-3})
        for size, loss, best in zip(SIZES, losses_of(0.5), [1, 1, 1, 1, 1, 3], strict=True)
        for decay in (0.1, 1.0, 3.0)
    ]  # fmt: skip
    search = search_settings(runs)
    assert [run.settings["weight_decay"] for run in search.best] == [1, 1, 1, 1, 1, 3]
    assert search.asymptote is not None
    assert search.asymptote.floor == pytest.approx(2.0, rel=1e-3)
    (note,) = search.notes
    assert "at size 3e+07 the best weight_decay is 3, the largest" in note
    few = search_settings(runs[:6])
    assert few.asymptote is None and "2 sizes do not show" in few.notes[-1]


@pytest.mark.parametrize(
    ("sizes", "losses", "said"),
    [
        ([1, 2, 3], [3, 2, 1], "3 sizes do not show"),
        ([1, 2, 3, 4], [2.0, 2.0, 2.0, 2.1], "does not fall from size 1"),
        ([1, 2, 3, -4], [4, 3, 2, 1], "above 0"),
    ],
)
def test_what_has_no_asymptote_is_said(
    sizes: list[float], losses: list[float], said: str
) -> None:
    with pytest.raises(WeftError, match=said):
        fit_asymptote(sizes, losses)


def asked(*words: Any) -> Any:
    return CliRunner().invoke(app, ["asymptote", *map(str, words)])


def recorded(folder: Path, parameters: float, decay: float, loss: float) -> None:
    recipe = {"optimizer": {"weight_decay": decay, "lr": 0.003}, "data": {"epochs": 16}}
    records: list[dict[str, Any]] = [
        {"kind": "run", "step": 0, "recipe": recipe, "parameters": parameters},
        {"kind": "validation", "step": 9, "loss": loss},
    ]
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in records)
    )


def test_command_reads_sweeps_and_tables(tmp_path: Path) -> None:
    for size, loss in zip(SIZES, losses_of(0.5), strict=True):
        for decay in (0.1, 1.0, 3.0):
            folder = tmp_path / f"sweep-{size:g}" / f"weight_decay={decay}"
            recorded(folder, size, decay, loss + abs(decay - 1))
    sweeps = sorted(tmp_path.glob("sweep-*"))
    shown = asked(*sweeps)
    assert shown.exit_code == 0, shown.output
    assert "asymptote 2.00" in shown.stdout and "note:" not in shown.stdout
    assert "100k\t5.0000\t1\t0.003\t16" in shown.stdout
    table = tmp_path / "members.csv"
    table.write_text(
        "members,loss\n" + "".join(f"{k},{0.4 / k + 3.3}\n" for k in (1, 2, 4, 8))
    )
    said = json.loads(asked(table, "--over", "members", "--json").stdout)
    assert said["asymptote"]["floor"] == pytest.approx(3.3, rel=1e-3)
    for words, why in (
        ([table], "no number in 'parameters'"),
        ([tmp_path / "absent"], "neither a table"),
        ([sweeps[0], "--over", "members"], "is for tables"),
    ):
        ended = asked(*words)
        assert isinstance(ended.exception, WeftError) and why in str(ended.exception)
