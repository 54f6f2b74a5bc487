"""The study of paths: costs, candidates, an oracle, a router that learns, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.chats import TEMPLATES, save_tokenizer
from tests.conftest import Command
from tests.models.test_routed_depth import build
from weft.errors import UsageError
from weft.generate.path_study import (
    candidate_paths,
    path_costs,
    study_paths,
    text_windows,
    token_losses,
    train_router,
    write_study,
)
from weft.models.routed_depth import BIG, SKIP, SMALL

IDS = torch.randint(0, 31, (16 * 11 + 1,), generator=torch.Generator().manual_seed(0)).tolist()  # fmt: skip
COST = 5 / 32


def test_the_cost_of_a_path_is_that_of_its_modules() -> None:
    paths = torch.tensor([[BIG, SKIP, SMALL], [BIG, SKIP, BIG]])
    assert path_costs(paths, 0.25).tolist() == [1.0, 0.0, 0.625]


def test_shallow_models_try_all_paths_and_deep_ones_those_of_a_beam() -> None:
    text = text_windows(IDS, 16)
    assert len({*map(tuple, candidate_paths(build(), text, COST, [0.5]).t().tolist())}) == 9  # fmt: skip
    deep = candidate_paths(build(layers=6), text, COST, [0.9])
    costs = path_costs(deep, COST)
    assert costs.max() == 1 and costs.min() <= 0.9 and deep.shape[1] < 3**6


def test_the_oracle_is_no_worse_than_any_path_and_all_stay_within_the_budget() -> None:
    model = build(init_std=0.5)
    study = study_paths(model, IDS, [0.0, 0.5, 1.0], 16)
    assert study.exhaustive and study.paths == 9 and study.tokens == 4 * 16
    nothing, half, all_big = study.budgets
    # only one path costs nothing
    assert nothing.oracle == pytest.approx(nothing.fixed) == nothing.random == nothing.router  # fmt: skip
    assert nothing.choices == [[1, 0, 0], [1, 0, 0]]
    assert half.oracle <= nothing.oracle and all_big.oracle <= half.oracle
    assert half.oracle < half.fixed
    assert all(cost <= 0.5 for cost in half.costs.values())
    assert len(study.without) == 2 and json.dumps(study.record())
    text = text_windows(IDS, 16)
    losses = token_losses(model, text, torch.full((2, 1, 1), BIG))[7:]
    assert study.whole == pytest.approx(float(losses.mean()))


def test_a_router_learns_which_path_is_best_where_what_it_reads_says_so() -> None:
    gen = torch.Generator().manual_seed(1)
    hidden = torch.randn(800, 6, generator=gen)
    losses = torch.stack([hidden[:, 0], -hidden[:, 0], torch.zeros(800)], 1)
    router = train_router(hidden[:600], losses[:600], 0)
    chosen = router(hidden[600:]).argmax(1)
    best = losses[600:].argmin(1)
    assert float((chosen == best).double().mean()) > 0.9


@pytest.mark.parametrize(("budgets", "window", "line"), [
    ([], 16, "budgets are shares"), ([1.5], 16, "budgets are shares"), ([0.5], 100, "the text has 177 tokens"),
])  # fmt: skip
def test_what_cannot_be_studied_is_one_line(
    budgets: list[float], window: int, line: str
) -> None:
    with pytest.raises(UsageError, match=line):
        study_paths(build(), IDS, budgets, window)
    with pytest.raises(UsageError, match="no small feed-forwards"):
        study_paths(build(small_ffn=0), IDS, [0.5], 16)


def test_a_page_shows_the_study(tmp_path: Path) -> None:
    study = study_paths(build(), IDS, [0.5], 16)
    page = write_study(study, "tiny <b>", tmp_path / "page.html", "plotly.js")
    text = page.read_text()
    assert "What the oracle takes at 0.5" in text and "tiny <b>" not in text


def test_the_command_needs_a_model_with_small_modules(
    command: Command, tmp_path: Path
) -> None:
    from weft.models.hugging_face import export, tokenizer_files

    plain = build(small_ffn=0, vocab=512)
    files = tokenizer_files(save_tokenizer(tmp_path / "t", TEMPLATES["smollm2"]))
    export(dict(plain.named_parameters()), plain.shape, tmp_path / "plain", torch.float32, files)  # fmt: skip
    (tmp_path / "text").write_text("the user asks " * 60)
    words = ["bench", "paths", "--from", tmp_path / "plain", "--data", tmp_path / "text"]  # fmt: skip
    code, _, err = command(*words)
    assert code == 2 and "recipes/duo.toml" in err and err.count("\n") == 1
    code, _, err = command(*words, "--budgets", "a")
    assert code == 2 and "--budgets a are no shares" in err
