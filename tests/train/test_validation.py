"""Validation on a file of its own, the best checkpoint, and runs that end when they get no better."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import recipe, write_corpus
from weft.api import finish_run
from weft.checkpoint.best import FILE, Best, best_checkpoint, read_best, write_best
from weft.checkpoint.store import candidates, committed_checkpoints, open_checkpoint
from weft.cli.checkpoint import prune_command
from weft.errors import UsageError, WeftError
from weft.layout.mesh import Mesh
from weft.observe.run_metrics import read_metrics
from weft.recipe import Recipe, Validation, build_recipe
from weft.train.evaluation import Evaluation
from weft.train.lowest_loss import LowestLoss, comparable
from weft.train.setup import prepare
from weft.train.training import Outcome, train_job


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def unseen(tmp_path_factory: pytest.TempPathFactory) -> str:
    draw, path = random.Random(7), tmp_path_factory.mktemp("unseen") / "unseen.jsonl"
    rows = ["".join(draw.choices("abcdefgh", k=18)) for _ in range(11)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return str(path)


def small(corpus: str, **change: Any) -> Recipe:
    return recipe(
        corpus, **{"train__dtype": "float32", "validation__every": 1} | change
    )


def run(
    asked: Recipe,
    out: Path,
    resume: str | None = None,
    losses: list[float] | None = None,
) -> Outcome:
    """Train, with these ``losses`` for its validations if they are given: the first is that before any step."""
    mesh = Mesh.single()
    if losses is None:
        return train_job(prepare(asked), mesh, out, resume)

    def told(evaluation: Evaluation) -> float:
        loss = losses[evaluation.recorder._progress.step]
        evaluation.validations.append(loss)
        return loss

    with mock.patch.object(Evaluation, "_validate", told):
        return train_job(prepare(asked), mesh, out, resume)


def test_a_file_of_its_own(corpus: str, unseen: str) -> None:
    apart, none, share = (
        prepare(small(corpus, data__validation=given)).corpus
        for given in (unseen, 0.0, 0.1)
    )
    assert apart.fingerprint == none.fingerprint != share.fingerprint
    assert (
        apart.train.total == none.train.total
        and len(apart.train.streams[0].lengths) == 60
    )
    assert none.validation is None and apart.validation is not None
    (stream,) = apart.validation.streams
    texts = [json.loads(line)["text"] for line in Path(unseen).read_text().splitlines()]
    read = [
        bytes(stream.ids[a : a + n - 1].tolist()).decode()
        for a, n in zip(stream.starts, stream.lengths, strict=True)
    ]
    assert read == texts and "11 documents (11 for validation)" in apart.description


def test_all_of_it_or_some_batches(corpus: str, unseen: str) -> None:
    for batches, rows in ((0, 11), (2, 10), (99, 11)):
        job = prepare(
            small(corpus, data__validation=unseen, validation__batches=batches)
        )
        seen: list[int] = []

        def counted(
            model: Any, state: Any, steps: Any, mesh: Any, seen: list[int] = seen
        ) -> float:
            seen += [
                sample for step in steps for batch in step for sample in batch.samples
            ]
            return 1.0

        with mock.patch("weft.train.evaluation.evaluate", counted):
            Evaluation(
                job,
                Mesh.single(),
                mock.Mock(),
                mock.Mock(),
                mock.Mock(),
                lambda: None,
                bool,
                [],
            )._validate()
        assert seen == list(range(rows))


def test_what_cannot_be_validated_on_is_one_line(
    corpus: str, unseen: str, tmp_path: Path
) -> None:
    link = tmp_path / "link.jsonl"
    link.symlink_to(corpus)
    for path in (corpus, str(link), str(Path(corpus).parent / "*.jsonl")):
        with pytest.raises(UsageError, match="is trained on as well"):
            prepare(small(corpus, data__validation=path))
    with pytest.raises(
        WeftError, match=r"data source nowhere\.jsonl: there is no such file"
    ):
        prepare(small(corpus, data__validation="nowhere.jsonl"))
    for value in (1.0, -0.1, 500, ""):
        with pytest.raises(
            UsageError,
            match=r"validation = .*: it should be a share of the documents, below 1, or",
        ):
            build_recipe({"data": {"validation": value}})
    for name in ("keep_best", "patience"):
        with pytest.raises(
            UsageError,
            match=f"{name} waits for validations, and every = 0 turns them off",
        ):
            build_recipe({"validation": {name: 1, "every": 0}})
        with pytest.raises(
            UsageError,
            match=rf"validation\.{name} waits for validations, and no document is held out",
        ):
            prepare(
                small(corpus, **{"data__validation": 0.0, f"validation__{name}": True})
            )


@pytest.mark.slow(4)
def test_the_best_checkpoint_stays_and_has_a_name(corpus: str, tmp_path: Path) -> None:
    """Of one kept checkpoint the best is there too; it is what an export gets, and can be named as a model."""
    out, losses = tmp_path / "run", [9.0, 5.0, 3.0, 4.0, 3.5, 3.0, 6.0, 2.0]
    asked = small(
        corpus,
        validation__keep_best=True,
        checkpoint__every=1,
        checkpoint__keep=1,
        train__steps=6,
    )
    outcome = run(asked, out, losses=losses)
    assert outcome.best == Best(2, 3.0, "checkpoints/step-000002")
    assert [place.name for place in committed_checkpoints(out / "checkpoints")] == [
        "step-000002",
        "step-000006",
    ]
    assert os.readlink(out / "best") == "checkpoints/step-000002"
    (place,) = candidates(str(out / "best"))
    assert open_checkpoint(place).meta["progress"]["step"] == 2
    assert prune_command(str(out), last=1) == 0 and (out / "best/weft.json").is_file()
    moved = out.rename(tmp_path / "moved")
    assert open_checkpoint(moved / "best").meta["step"] == 2
    # One more step is better than all: it is the best from then on, and what was that goes.
    more = asked.model_copy(
        update={"train": asked.train.model_copy(update={"steps": 7})}
    )
    export = more.model_copy(
        update={"checkpoint": more.checkpoint.model_copy(update={"export": "model"})}
    )
    outcome = run(export, moved, "auto", losses)
    assert outcome.best == Best(7, 2.0, "checkpoints/step-000007")
    assert [place.name for place in committed_checkpoints(moved / "checkpoints")] == [
        "step-000006",
        "step-000007",
    ]
    with (
        mock.patch("weft.checkpoint.model.export_model") as exported,
        mock.patch("weft.observe.measured.append"),
    ):
        finish_run(export, outcome)
    assert exported.call_args.args[0] == str(moved / "checkpoints/step-000007")
    # A run that goes back to before its best looks for a new one.
    run(more, moved, str(moved / "checkpoints/step-000007"), losses)
    (moved / FILE).write_text(
        json.dumps({"step": 99, "loss": 0.1, "checkpoint": "checkpoints/step-000007"})
    )
    assert run(asked.model_copy(update={"train": asked.train.model_copy(update={"steps": 8})}), moved, "auto",
               [*losses, 2.5]).best.step == 8  # fmt: skip


def test_best_between_checkpoints_is_saved(corpus: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(
        small(corpus, validation__keep_best=True, train__steps=4),
        out,
        losses=[9.0, 5.0, 3.0, 4.0, 3.5],
    )
    assert [place.name for place in committed_checkpoints(out / "checkpoints")] == [
        "step-000001",
        "step-000002",
        "step-000004",
    ]
    assert best_checkpoint(out) == str(out / "checkpoints/step-000002")
    (out / FILE).write_text("{")
    with pytest.raises(WeftError, match=r"best\.json is damaged; remove it"):
        read_best(out)


@pytest.mark.slow(3)
def test_a_run_that_gets_no_better_ends(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, losses = (
        tmp_path / "run",
        [9.0, 5.0, 3.0, 4.0, float("nan"), 3.0, 1.0, 2.0, 2.0, 2.0],
    )
    asked = small(corpus, validation__patience=3, train__steps=9)
    why = "the run ends early, after step 5: 3 validations have not been below 3.0000, that of step 2"
    assert run(asked, out, losses=losses).progress.step == 5
    assert why in capsys.readouterr().out and [
        p.name for p in committed_checkpoints(out / "checkpoints")
    ] == ["step-000005"]
    assert run(asked, out, "auto", losses).progress.step == 5
    assert why in capsys.readouterr().out
    longer = asked.model_copy(
        update={"validation": asked.validation.model_copy(update={"patience": 4})}
    )
    outcome = run(longer, out, "auto", losses)
    assert outcome.progress.step == 9 and outcome.best == Best(6, 1.0)
    assert [r["step"] for r in outcome.metrics()] == list(
        range(1, 10)
    ) and not outcome.metrics("nothing")


def test_losses_of_other_data_are_not_compared(
    corpus: str, unseen: str, tmp_path: Path
) -> None:
    other = Path(unseen).with_name("other.jsonl")
    other.write_text(Path(unseen).read_text() + '{"text": "one more"}\n')
    of = {
        path: prepare(small(corpus, data__validation=path)).corpus.validated
        for path in (unseen, str(other))
    }
    assert (
        len(set(of.values())) == 2
        and prepare(small(unseen, data__validation=corpus)).corpus.validated not in of
    )
    assert (
        prepare(small(corpus, data__validation=unseen, data__epochs=2)).corpus.validated
        == of[unseen]
    )
    best = Best(4, 1.0, data=of[unseen])
    assert comparable(best, of[unseen], 4) == (best, "") and comparable(
        best, of[unseen], 3
    ) == (Best(), "")
    now, said = comparable(best, of[str(other)], 9)
    assert (
        now == Best()
        and "the run looks for a new one" in said
        and comparable(Best(), "any", 9) == (Best(), "")
    )


def test_a_best_elsewhere_is_named_without_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_best(Path(), Best(1, 2.0, "s3://bucket/run/step-000001"))
    assert (
        best_checkpoint(tmp_path) == "s3://bucket/run/step-000001"
        and not (tmp_path / "best").is_symlink()
    )
    elsewhere = tmp_path.parent / "elsewhere/step-000002"
    write_best(tmp_path, Best(2, 1.0, str(elsewhere)))
    assert best_checkpoint(tmp_path) == os.readlink(tmp_path / "best") == str(elsewhere)
    assert read_best(tmp_path / "nowhere") == Best() and not best_checkpoint(
        tmp_path / "nowhere"
    )


@settings(max_examples=60, deadline=None)
@given(
    losses=st.lists(st.sampled_from([1.0, 2.0, 3.0, float("nan")]), min_size=1, max_size=12),
    every=st.integers(1, 4), patience=st.integers(0, 4),
)  # fmt: skip
def test_patience_counts_validations(
    losses: list[float], every: int, patience: int
) -> None:
    lowest, waited, least = (
        LowestLoss(Validation(every=every, patience=patience), Best()),
        0,
        float("inf"),
    )
    for number, loss in enumerate(losses, 1):
        waited, least = (0, loss) if loss < least else (waited + 1, least)
        lowest.take(number * every, loss)
        assert lowest.best.loss == least
        enough = bool(patience) and least < float("inf") and waited >= patience
        assert bool(lowest.why_enough(number * every)) == enough


def ended(values: dict[str, Any], out: str) -> tuple[int, int, float]:
    asked = build_recipe(values)
    outcome = train_job(prepare(asked), Mesh.create(asked.layout, "cpu"), Path(out))
    return outcome.progress.step, outcome.best.step, outcome.best.loss


@pytest.mark.slow(10)
def test_all_ranks_end_as_one_device_does(
    pool: Any, corpus: str, unseen: str, tmp_path: Path
) -> None:
    change: dict[str, Any] = {
        "train__dtype": "float64",
        "train__steps": 30,
        "optimizer__lr": 0.2,
        "validation__every": 2,
    }
    change |= {
        "validation__patience": 2,
        "validation__keep_best": True,
        "data__validation": unseen,
    }
    alone = ended(
        small(corpus, **change).model_dump(mode="json"), str(tmp_path / "alone")
    )
    cut = small(corpus, **change, layout__shard=2, layout__tp=2).model_dump(mode="json")
    together = pool.run(4, ended, cut, str(tmp_path / "together"))
    assert alone[0] < 30 and all(
        one[:2] == alone[:2] and one[2] == pytest.approx(alone[2]) for one in together
    )
    assert read_metrics(tmp_path / "together")["train"][-1]["step"] == alone[0]
    assert os.readlink(tmp_path / "together/best") == os.readlink(
        tmp_path / "alone/best"
    )
