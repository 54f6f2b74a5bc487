"""How long a run is, and what follows from it: learning rates, warm-up, the display, and what a resumed run says."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import recipe
from weft.checkpoint.run_state import Progress
from weft.data.loader import Loader
from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.observe.run_metrics import read_metrics
from weft.recipe import Optimizer, Recipe, build_recipe
from weft.train.rule_optimizer import (
    floor_note,
    learning_rate,
    rate_jump,
    warmup_note,
    warmup_steps,
)
from weft.train.setup import prepare
from weft.train.training import Outcome, train_job


@pytest.fixture(scope="module")
def sixteen(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sixteen documents, each of which fills a row, with its end token, of the small recipe's 19 tokens."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    draw = random.Random(1)
    rows = ["".join(draw.choices("abcdefgh ", k=18)) for _ in range(16)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return str(path)


def short(corpus: str, **change: Any) -> Recipe:
    return recipe(
        corpus,
        **{"data__validation": 0.0, "train__batch": 2, "train__dtype": "float32"}
        | change,
    )


def run(settings: Recipe, out: Path, resume: str | None = None) -> Outcome:
    return train_job(prepare(settings), Mesh.single(), out, resume)


def rates(out: Path) -> list[float]:
    return [r["lr"] for r in read_metrics(out)["train"]]


def test_one_epoch_decays_to_its_end(
    sixteen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case ``one-epoch``: the real length is that of the data, in rates, display and records."""
    asked = {
        "data__epochs": 1,
        "train__steps": 1000,
        "optimizer__warmup": 2,
        "optimizer__min_lr": 0.0,
    }
    outcome = run(short(sixteen, **asked), tmp_path / "run")
    out = capsys.readouterr().out
    found = rates(tmp_path / "run")
    assert (outcome.progress.step, outcome.progress.position, len(found)) == (8, 16, 8)
    assert found[0] == pytest.approx(1.5e-4) and found[1] == found[2] == 3e-4
    assert all(a > b for a, b in pairwise(found[2:])) and found[-1] < 0.1 * 3e-4
    assert (
        "step 8/8" in out
        and "1000" not in out
        and "the data ended after 16 samples" in out
    )
    assert read_metrics(tmp_path / "run")["run"][-1]["steps"] == 8


def test_an_epoch_more_begins_with_the_row_after_the_last_one(
    sixteen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of five leave one row for the fourth step, and a run that goes on leaves none out."""
    seen: list[int] = []
    real = Loader.step

    def step(self: Loader, position: int) -> Any:
        batches = real(self, position)
        seen.extend(sample for part in self.sample_ranges(position) for sample in part)
        return batches

    monkeypatch.setattr(Loader, "step", step)
    first = run(
        short(sixteen, data__epochs=1, train__batch=5, train__steps=99),
        tmp_path / "run",
    )
    assert (first.progress.step, first.progress.position) == (4, 16)
    again = run(
        short(sixteen, data__epochs=2, train__batch=5, train__steps=99),
        tmp_path / "run",
        "auto",
    )
    assert (again.progress.step, again.progress.position) == (8, 32) and seen == list(
        range(32)
    )


def test_epochs_alone_are_enough(sixteen: str, tmp_path: Path) -> None:
    tree = short(sixteen).model_dump(mode="json")
    tree["data"] |= {"epochs": 3}
    del tree["train"]["steps"]
    alone = build_recipe(tree)
    assert alone.train.steps == 0 and prepare(alone).steps(Progress()) == 24
    # as ranks and checkpoints get it
    assert build_recipe(alone.model_dump(mode="json")) == alone
    assert Recipe().train.steps == 100
    with pytest.raises(
        UsageError,
        match=r"train\.steps = 0 is as many as data\.epochs need, and these are 0",
    ):
        build_recipe({"train": {"steps": 0}})


@settings(max_examples=40, deadline=None)
@given(
    epochs=st.integers(1, 3), batch=st.integers(1, 9), asked=st.integers(0, 60), done=st.integers(0, 5),
    axes=st.sampled_from([{}, {"dp": 2}, {"island": 2}, {"shard": 3, "tp": 2}, {"pp": 2}]),
)  # fmt: skip
def test_the_length_is_what_the_loader_gives(
    sixteen: str, epochs: int, batch: int, asked: int, done: int, axes: dict[str, int]
) -> None:
    """Under any layout, and from any step of a run that had another batch until then."""
    change = {
        "data__epochs": epochs,
        "train__batch": batch,
        "train__steps": asked,
        "layout": Layout(**axes),
    }
    values = short(sixteen).model_dump(mode="json")
    for key, value in change.items():
        section, _, name = key.partition("__")
        values[section] = (
            values[section] | {name: value} if name else value.model_dump()
        )
    job = prepare(build_recipe(values))
    loader = job.loader(job.corpus.train, Mesh.single())
    progress, begun = Progress(), 0
    for _ in range(done):
        progress.advance(3, 1, True)
    steps = job.steps(progress)
    while loader.step(progress.position + begun * batch) is not None:
        begun += 1
    assert steps == (min(asked, done + begun) if asked else done + begun)


@settings(max_examples=100, deadline=None)
@given(
    schedule=st.sampled_from(["cosine", "linear", "wsd", "constant"]), steps=st.integers(1, 400),
    warmup=st.none() | st.integers(0, 500) | st.floats(0.001, 0.999), floor=st.sampled_from([0.0, 0.1, 1.0]),
)  # fmt: skip
def test_rates_rise_and_then_never_rise_again(
    schedule: Any, steps: int, warmup: int | float | None, floor: float
) -> None:
    how = Optimizer(lr=1.0, schedule=schedule, warmup=warmup, min_lr=floor)
    found, until = (
        [learning_rate(how, step, steps) for step in range(steps)],
        warmup_steps(how, steps),
    )
    assert all(a < b for a, b in pairwise(found[:until])) and all(
        a >= b for a, b in pairwise(found[until:])
    )
    assert all(0 < rate <= 1 for rate in found) and bool(warmup_note(how, steps)) == (
        until > steps
    )
    if until < steps:
        assert found[until] == pytest.approx(1.0)
        assert schedule == "constant" or learning_rate(
            how, steps, steps
        ) == pytest.approx(floor)


def test_warmup_by_default_as_a_share_and_linear_decay() -> None:
    assert [
        warmup_steps(Optimizer(), steps) for steps in (3, 9, 10, 99, 100, 5000)
    ] == [0, 0, 1, 9, 10, 100]
    assert (
        warmup_steps(Optimizer(warmup=0.25), 10) == 2
        and warmup_steps(Optimizer(warmup=3.0), 10) == 3
    )
    linear = Optimizer(lr=1.0, schedule="linear", warmup=0.2, min_lr=0.0)
    assert [learning_rate(linear, step, 10) for step in range(10)] == pytest.approx(
        [0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    )
    wrong = {1.5: "1.5: it should be a whole number of steps, or a share", -1: "-1: it should be greater than or equal",
             "long": "'long': it should be a whole number or a number"}  # fmt: skip
    for warmup, why in wrong.items():
        with pytest.raises(
            UsageError, match=re.escape(f"recipe: optimizer.warmup = {why}")
        ):
            build_recipe({"optimizer": {"warmup": warmup}})
    with pytest.raises(
        UsageError,
        match=r"data\.bos = 'maybe': it should be true or false or 'auto' or 'prompts'",
    ):
        build_recipe({"data": {"bos": "maybe"}})


def test_a_long_warmup_is_said_before_the_first_step(
    sixteen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case ``long-warmup``."""
    run(short(sixteen, train__steps=4, optimizer__warmup=100), tmp_path / "run")
    out = capsys.readouterr().out
    said = out.index(
        "optimizer.warmup = 100 steps is longer than the run, which has 4: the learning rate gets to 1.2e-05"
    )
    assert said < out.index("step 1/4")
    run(short(sixteen, train__steps=4, optimizer__warmup=None), tmp_path / "other")
    assert "longer than the run" not in capsys.readouterr().out
    assert rates(tmp_path / "other")[0] == pytest.approx(3e-4)


@pytest.mark.parametrize(("lr", "floor", "schedule", "said"), [
    (3e-4, 3e-5, "cosine", "falls to 9e-09; to end at a rate of 3e-05, set it to 0.1"),
    (2e-5, 2e-6, "linear", "falls to 4e-11; to end at a rate of 2e-06, set it to 0.1"),
    (3e-4, 3e-5, "constant", ""), (3e-4, 0.0, "cosine", ""), (3e-4, 0.01, "wsd", ""), (1e-5, 1e-4, "wsd", ""),
])  # fmt: skip
def test_a_rate_in_the_place_of_a_share_is_said(
    lr: float, floor: float, schedule: Any, said: str
) -> None:
    note = floor_note(Optimizer(lr=lr, min_lr=floor, schedule=schedule))
    assert said in note and bool(note) == bool(said)


def test_a_rate_in_the_place_of_a_share_is_said_before_the_first_step(
    sixteen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(short(sixteen, train__steps=2, optimizer__min_lr=3e-5), tmp_path / "run")
    out = capsys.readouterr().out
    said = out.index(
        "optimizer.min_lr = 3e-05 is a share of lr: the learning rate falls"
    )
    assert said < out.index("step 1/2")


def test_a_jump_of_the_rate_on_resume_is_said(
    sixteen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    first = short(sixteen, train__steps=4, checkpoint__every=2)
    run(first, out)
    capsys.readouterr()
    run(first, out, str(out / "checkpoints/step-000002"))
    assert "jumps" not in capsys.readouterr().out
    run(short(sixteen, train__steps=40), out, str(out / "checkpoints/step-000004"))
    said = next(
        line for line in capsys.readouterr().out.splitlines() if "jumps" in line
    )
    before, now = (
        learning_rate(first.optimizer, 3, 4),
        learning_rate(first.optimizer, 4, 40),
    )
    assert (
        f"jumps from {before:.3g} in step 4 to {now:.3g} in step 5, where 3e-05 was due"
        in said
    )
    assert (
        said.endswith("because of a run of 40 steps instead of 4")
        and read_metrics(out)["train"][4]["lr"] == now
    )
    lower = first.optimizer.model_copy(update={"lr": 1e-4})
    assert "because of optimizer.lr" in rate_jump(first.optimizer, lower, 1, 4, 4)
    assert not rate_jump(first.optimizer, first.optimizer, 4, 4, 4)


def test_a_complete_run_says_so(
    sixteen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, asked = tmp_path / "run", short(sixteen, train__steps=2)
    run(asked, out)
    assert "is complete" not in capsys.readouterr().out
    assert run(asked, out, "auto").progress.step == 2
    said = "the run is complete: it has taken 2 steps, and train.steps = 2 asks for no more; raise train.steps"
    assert said in capsys.readouterr().out
    ended = short(sixteen, data__epochs=1, train__steps=99)
    run(ended, tmp_path / "data")
    run(ended, tmp_path / "data", "auto")
    assert (
        "data.epochs = 1 asks for no more; raise data.epochs" in capsys.readouterr().out
    )
