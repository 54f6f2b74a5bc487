"""RegMix on its published runs, exact cases, simulated mixtures, and ``weft data plan --mixtures``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr
from typer.testing import CliRunner

from weft.cli.data import app
from weft.curation.mixture_regression import (
    best_mixture,
    fit_mixture_losses,
    rank_correlation,
    simulated_mixtures,
)
from weft.errors import WeftError

PUBLISHED = Path(__file__).parent / "regmix"
COMMON_CRAWL = 11


def published(name: str) -> tuple[np.ndarray, np.ndarray]:
    rows = np.loadtxt(PUBLISHED / name)
    weights = rows[:, :17] / rows[:, :17].sum(1, keepdims=True)
    return weights, rows[:, 17:]


def linear(weights: np.ndarray, losses: np.ndarray, asked: np.ndarray) -> np.ndarray:
    ones = np.ones((len(weights), 1))
    solved = np.linalg.lstsq(np.hstack([weights, ones]), losses, rcond=None)[0]
    return np.hstack([asked, np.ones((len(asked), 1))]) @ solved


def test_published_runs_are_ranked() -> None:
    """Runs at 1 M parameters rank others at 1 M and at 60 M; a linear fit reaches 0.907 and 0.900."""
    weights, losses = published("train_1m.txt")
    asked, measured = published("test.txt")
    assert len(weights) == len(asked) == 256
    regression = fit_mixture_losses(weights, losses[:, 0])
    predicted = regression.predict(asked)
    small, large = (rank_correlation(predicted.means, measured[:, i]) for i in (0, 1))
    assert small >= 0.98 and large >= 0.98
    plain = linear(weights, losses[:, 0], asked)
    assert rank_correlation(plain, measured[:, 0]) < 0.93 < small
    assert rank_correlation(regression.held_back(), losses[:, 0]) >= 0.98


def test_published_runs_lead_to_common_crawl() -> None:
    """What is best for the loss on Common Crawl is mostly Common Crawl, and no worse than the best run."""
    weights, losses = published("train_1m.txt")
    choice = best_mixture(
        [str(i) for i in range(17)], weights, losses[:, 0], draws=5000
    )
    assert max(choice.weights, key=choice.weights.__getitem__) == str(COMMON_CRAWL)
    assert sum(choice.weights.values()) == pytest.approx(1)
    assert choice.loss < choice.best_run + 3 * choice.deviation
    assert choice.loss < choice.prior_loss - 0.2


def planted(weights: np.ndarray) -> np.ndarray:
    """A loss with its minimum inside: a power law of each share."""
    return np.array((0.4, 0.2, 0.1) * (weights + 0.02) ** -0.3).sum(1)


def test_planted_minimum_is_recovered() -> None:
    weights = simulated_mixtures(np.ones(3) / 3, 60, seed=1)
    choice = best_mixture(["a", "b", "c"], weights, planted(weights), draws=20000)
    grid = simulated_mixtures(np.ones(3) / 3, 50000, seed=2)
    optimum = grid[planted(grid).argmin()]
    assert [choice.weights[name] for name in "abc"] == pytest.approx(optimum, abs=0.06)
    reached = planted(np.array([list(choice.weights.values())]))[0]
    assert reached <= planted(grid).min() * 1.005


def test_held_back_losses_are_those_of_a_fit_without_the_run() -> None:
    weights = simulated_mixtures(np.ones(3) / 3, 12, seed=3)
    losses = planted(weights)
    regression = fit_mixture_losses(weights, losses)
    others = np.arange(12) != 4
    # the same mean, spread and features as with all runs
    known = regression.features(weights)
    noise = regression.kernel.noise * np.eye(11)
    cross = regression.covariance(known[4:5], known[others])
    inner = regression.covariance(known[others], known[others]) + noise
    expected = losses.mean() + cross @ np.linalg.solve(
        inner, losses[others] - losses.mean()
    )
    assert regression.held_back()[4] == pytest.approx(expected[0], abs=1e-8)


def test_ranks_are_scipys() -> None:
    a, b = np.array([3.0, 1, 1, 2, 5]), np.array([1.0, 2, 2, 2, 9])
    assert rank_correlation(a, b) == pytest.approx(spearmanr(a, b)[0])


def test_simulated_mixtures_keep_absent_domains_absent() -> None:
    drawn = simulated_mixtures(np.array([0.5, 0.0, 0.5]), 500)
    assert np.allclose(drawn.sum(1), 1) and not drawn[:, 1].any()
    assert drawn[:, 0].min() < 0.01 and drawn[:, 0].max() > 0.99


def tables(folder: Path) -> tuple[Path, Path]:
    weights = np.round(simulated_mixtures(np.ones(3) / 3, 20, seed=4), 3)
    mixtures, losses = folder / "mixtures.csv", folder / "losses.csv"
    mixtures.write_text(
        "index,web,code,books\n"
        + "".join(f"{i},{a},{b},{c}\n" for i, (a, b, c) in enumerate(weights))
    )
    rows = [f"{i},{loss},7\n" for i, loss in enumerate(planted(weights))]
    losses.write_text("index,loss,other\n" + "".join(reversed(rows)))
    return mixtures, losses


def plan(*words: Any) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, words)])


def test_command_joins_tables_by_index(tmp_path: Path) -> None:
    mixtures, losses = tables(tmp_path)
    words = ["--mixtures", mixtures, "--losses", losses, "--target", "loss"]
    shown = plan(*words, "--json")
    assert shown.exit_code == 0, shown.output
    said = json.loads(shown.stdout)
    assert list(said["weights"]) == ["web", "code", "books"]
    assert said["weights"]["web"] > said["weights"]["books"]
    assert said["rank_correlation"] > 0.9
    assert "web\t0." in plan(*words).stdout


@pytest.mark.parametrize(
    ("change", "words", "said"),
    [
        ("", ["--target", "los"], "did you mean 'loss'"),
        ("", [], "--mixtures needs --target"),
        ("", ["--target", "other"], "all 20 runs have the loss 7"),
        ("index,web,code\n0,1,0\n", ["--target", "loss"], "1 runs on mixtures are too few"),
        ("index,web,code\n0,1,0.5\n", ["--target", "loss"], "run 1 add up to 1.5"),
        ("index,web,code\n0,1,x\n", ["--target", "loss"], "code of run 1 is 'x'"),
        ("index,web,code\n77,1,0\n", ["--target", "loss"], "no run with index = 77"),
        ("web,code\n1,0\n", ["--target", "loss"], "has 1 runs and"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_a_line(
    tmp_path: Path, change: str, words: list[str], said: str
) -> None:
    mixtures, losses = tables(tmp_path)
    if change:
        mixtures.write_text(change)
    ended = plan("--mixtures", mixtures, "--losses", losses, *words)
    assert isinstance(ended.exception, WeftError) and said in str(ended.exception)
    assert "\n" not in str(ended.exception)
