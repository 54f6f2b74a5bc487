"""Runs whose mixture moves: resumed at any step, with another mixture, and under other layouts."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cases import recipe
from weft.checkpoint.address import open_storage
from weft.checkpoint.run_state import Progress
from weft.checkpoint.store import open_checkpoint
from weft.data.order_inverse import samples_drawn
from weft.errors import UsageError
from weft.layout.mesh import Mesh
from weft.observe.run_metrics import read_metrics
from weft.recipe import Recipe
from weft.train.document_use import RunDocuments
from weft.train.mix_run import continued_mix, resume_mix
from weft.train.setup import Job, prepare
from weft.train.training import Outcome, train_job

#: Two sources, of which the second is small.
SCHEDULE = {
    "mix": "schedule",
    "mix_schedule": [{"at": 0, "weights": [1, 0]}, {"at": 0.5, "weights": [1, 1]}],
}
COOLING = {"mix": "temperature", "mix_final_temperature": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, draw = tmp_path_factory.mktemp("mixed"), random.Random(3)
    for name, count in ("large", 200), ("small", 12):
        rows = ["".join(draw.choices("abcdefgh ", k=18)) for _ in range(count)]
        lines = "".join(json.dumps({"text": row}) + "\n" for row in rows)
        (path / f"{name}.jsonl").write_text(lines)
    return path


def asked(folder: Path, mix: dict[str, Any], **change: Any) -> Recipe:
    sources = [
        {"kind": "jsonl", "path": str(folder / f"{name}.jsonl"), "name": name}
        for name in ("large", "small")
    ]
    data = {f"data__{key}": value for key, value in mix.items()}
    return recipe(
        str(folder / "large.jsonl"),
        **{"data__sources": sources, "train__steps": 40, "train__batch": 4}
        | data
        | change,
    )


def run(settings: Recipe, out: Path, resume: str | None = None) -> Outcome:
    return train_job(prepare(settings), Mesh.single(), out, resume)


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(out)["train"]]


def located(job: Job, *samples: int) -> list[tuple[int, int]]:
    return [job.corpus.train.locate(i) for i in range(*samples)]


def test_a_resumed_run_reads_on_as_if_it_had_not_ended(
    folder: Path, tmp_path: Path
) -> None:
    change: dict[str, Any] = {
        "train__steps": 8,
        "checkpoint__every": 3,
        "checkpoint__keep": 9,
    }
    for number, mix in enumerate((SCHEDULE, COOLING | {"mix_by": "weighting"})):
        out = tmp_path / f"run-{number}"
        run(asked(folder, mix, **change), out)
        again = tmp_path / f"again-{number}"
        resumed = run(
            asked(folder, mix, **change), again, str(out / "checkpoints/step-000003")
        )
        assert losses(again) == losses(out)[3:]
        legs = resumed.progress.loader["mix"]["legs"]
        assert len(legs) == 1 and legs[0]["start"] == 0


def test_another_mix_goes_on_after_what_sources_have_given(
    folder: Path, tmp_path: Path
) -> None:
    """What was read stays, each source goes on behind it, and a third resume knows all of it."""
    change: dict[str, Any] = {
        "train__steps": 9,
        "checkpoint__every": 3,
        "checkpoint__keep": 9,
    }
    first = asked(folder, {}, **change)
    run(first, tmp_path / "a")
    stored = str(tmp_path / "a/checkpoints/step-000006")
    run(asked(folder, SCHEDULE, **change), tmp_path / "b", stored)
    said = [r["message"] for r in read_metrics(tmp_path / "b")["event"]]
    line = next(text for text in said if text.startswith("another mix"))
    assert line.startswith(
        "another mix from sample 24 on: schedule by sampling: large "
    )
    assert not any("other data is read on" in text for text in said)
    third = run(asked(folder, SCHEDULE, **change), tmp_path / "c", str(tmp_path / "b"))
    known = RunDocuments(tmp_path / "b")
    (attempt,) = known.attempts
    assert known.corpus(attempt).train.legs[1].start == 24  # for weft data who
    legs = third.progress.loader["mix"]["legs"]
    assert [leg["start"] for leg in legs] == [0, 24]
    progress = Progress(6, 24, 0, 6, {"mix": {**third.progress.loader["mix"]}})
    again = prepare(asked(folder, SCHEDULE, **change))
    corpus, notes = continued_mix(again.corpus, again.recipe, progress)
    job = replace(again, corpus=corpus)
    assert not notes and located(job, 24) == located(prepare(first), 24)
    read = located(job, 300)
    for source in range(2):
        indices = sorted(index for which, index in read if which == source)
        assert indices == [*range(len(indices))]
    assert samples_drawn(job.corpus.train, 24) == legs[1]["given"]


def test_a_checkpoint_of_before_knows_its_mix_by_its_recipe(
    folder: Path, tmp_path: Path
) -> None:
    """A run with fixed weights whose checkpoint says nothing of a mix goes on with other weights, nothing twice."""
    change: dict[str, Any] = {"train__steps": 4, "checkpoint__every": 2}
    run(asked(folder, {}, **change), tmp_path / "a")
    root = open_checkpoint(open_storage(str(tmp_path / "a/checkpoints/step-000002")))
    corpus, progress = prepare(asked(folder, COOLING, **change)).corpus, Progress(2, 8)
    del root.meta["progress"]["loader"]
    assert resume_mix(corpus, root.meta, progress) == root.meta["data"]
    (leg,) = progress.loader["mix"]["legs"]
    assert leg["plan"] == {"kind": "static", "weights": [1.0, 1.0]}


def test_fixed_weights_are_read_as_ever_and_said(folder: Path) -> None:
    job = prepare(asked(folder, {}))
    assert job.corpus.train.legs == ()
    assert job.notes[-1] == "mix: static by sampling: large 50.0%, small 50.0%"


def test_what_sources_do_not_have(folder: Path, tmp_path: Path) -> None:
    wrong = {"mix": "schedule", "mix_schedule": [{"at": 0, "weights": {"smal": 1}}]}
    with pytest.raises(UsageError, match="called 'smal'; did you mean 'small'"):
        prepare(asked(folder, wrong))


def test_the_loss_of_each_source_is_recorded(folder: Path, tmp_path: Path) -> None:
    """The losses of the sources at a validation lie around the loss of all, on the same held-out rows."""
    change: dict[str, Any] = {"train__steps": 2, "data__validation": 0.3}
    run(
        asked(folder, COOLING, **change, validation__every=2, validation__batches=0),
        tmp_path / "run",
    )
    records = read_metrics(tmp_path / "run")
    for whole, parts in zip(records["validation"], records["mix"], strict=True):
        large, small = parts["losses"]["large"], parts["losses"]["small"]
        assert min(large, small) <= whole["loss"] <= max(large, small)
        assert abs(large - small) > 0


def trained(
    folder: str, mix: dict[str, Any], change: dict[str, Any], out: str, resume: str
) -> list[float]:
    """Train under a layout, on from a checkpoint or not; the losses of the steps."""
    change = {"train__steps": 6, "checkpoint__every": 3, "checkpoint__keep": 9} | change
    settings = asked(Path(folder), mix, train__dtype="float64", **change)
    mesh = Mesh.create(settings.layout, "cpu")
    train_job(prepare(settings), mesh, Path(out), resume or None)
    return losses(Path(out)) if mesh.is_main else []


#: Mixtures, and what a run goes on with after three steps of each: the same one, or fixed weights.
MOVING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "weighed": (COOLING | {"mix_by": "weighting"}, COOLING | {"mix_by": "weighting"}),
    "cooled": (COOLING, {}),
    "scheduled": (SCHEDULE, SCHEDULE),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        pytest.param("weighed", ("dp",), marks=pytest.mark.slow(3)),
        *(
            pytest.param(kind, ("dp", "tp", "pp", "cp", "shard"), marks=[pytest.mark.soak, pytest.mark.slow(30)])
            for kind in MOVING
        ),
    ],
)  # fmt: skip
def test_every_layout_reads_and_weighs_as_one_device(
    pool: Any, folder: Path, tmp_path: Path, kind: str, axes: tuple[str, ...]
) -> None:
    """From the first step on, and from a checkpoint of one device with a mixture of its own."""
    before, after = MOVING[kind]
    one, here = str(tmp_path / "one"), str(folder)
    alone = pool.run(1, trained, here, before, {}, one, "")[0]
    stored = f"{one}/checkpoints/step-000003"
    later = pool.run(1, trained, here, after, {}, str(tmp_path / "later"), stored)[0]
    for axis in axes:
        layout = {f"layout__{axis}": 2}
        ranks = pool.run(2, trained, here, before, layout, str(tmp_path / axis), "")
        assert ranks[0] == pytest.approx(alone, rel=1e-10), axis
        out = str(tmp_path / f"{axis}-later")
        ranks = pool.run(2, trained, here, after, layout, out, stored)
        assert ranks[0] == pytest.approx(later[-len(ranks[0]) :], rel=1e-10), axis
        assert len(ranks[0]) == 3
