"""Ensembles: Jensen's inequality, one member alone, and what ``weft eval`` says of several models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cases import recipe, write_corpus
from tests.conftest import Command
from weft.api import start
from weft.data.batch import IGNORE
from weft.data.tasks import Text
from weft.errors import UsageError
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.recipe import Recipe
from weft.train.ensemble import (
    Average,
    TokenOutputs,
    ensemble_loss,
    ensemble_scores,
    joint_log_probabilities,
    token_outputs,
)
from weft.train.ensemble_members import open_members
from weft.train.score import scores
from weft.train.setup import Job, build_for_training, prepare
from weft.train.step import evaluate


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return prepare(recipe(write_corpus(tmp_path_factory.mktemp("ensemble"))))


@pytest.fixture(scope="module")
def models(job: Job) -> list[Transformer]:
    """Four models with other initial weights."""
    members: list[Transformer] = []
    for seed in range(4):
        train = job.recipe.train.model_copy(update={"seed": seed})
        own = job.recipe.model_copy(update={"train": train})
        members.append(build_for_training(job.shape, Mesh.single(), own).model)
    return members


def steps_of(job: Job) -> list:
    loader = job.loader(job.corpus.train, Mesh.single())
    return [loader.step(i * job.recipe.train.batch) for i in range(3)]


@pytest.mark.parametrize("average", ["probabilities", "logits"])
def test_joint_loss_is_at_most_the_mean_of_its_members(
    job: Job, models: list[Transformer], average: Average
) -> None:
    """By Jensen for probabilities; for logits because the geometric mean's normalizer is at most 1. Token by token."""
    result = ensemble_loss(models, steps_of(job), average)
    assert result.joint < sum(result.members) / 4
    assert len(set(result.members)) == 4
    for batches in steps_of(job):
        for batch in batches:
            outputs = [token_outputs(model, batch) for model in models]
            labels = batch.labels.flatten()
            labels = labels[labels != IGNORE, None]
            every = slice(0, len(labels))
            joint = joint_log_probabilities(outputs, every, average)
            torch.testing.assert_close(
                joint.exp().sum(-1), torch.ones(len(labels), dtype=joint.dtype)
            )
            own = torch.stack([o.log_probabilities(every) for o in outputs])
            assert (joint >= own.mean(0) - 1e-12).all()


def test_average_of_logits_is_softmax_of_their_mean() -> None:
    logits = torch.randn(3, 5, 7, dtype=torch.float64)
    joint = joint_log_probabilities(
        [TokenOutputs(each, None) for each in logits], slice(0, 5), "logits"
    )
    torch.testing.assert_close(joint, logits.mean(0).log_softmax(-1))


def test_one_member_is_the_model(job: Job, models: list[Transformer]) -> None:
    built = build_for_training(job.shape, Mesh.single(), job.recipe)
    alone = ensemble_loss([built.model], steps_of(job))
    expected = evaluate(built.model, built.state, steps_of(job), Mesh.single())
    assert alone.joint == pytest.approx(expected, abs=1e-12)
    texts = [Text([1, 2, 3], [4, 5]), Text([9], [8, 7, 6, 5]), Text([3] * 9, [1])]
    same = scores(built.model, None, Mesh.single(), texts)
    for joint, single in zip(ensemble_scores([built.model], texts), same, strict=True):
        assert joint.log_probability == pytest.approx(single.log_probability, abs=1e-10)
        assert joint.greedy == single.greedy
    twice = ensemble_scores([models[1], models[1]], texts)
    for joint, single in zip(twice, ensemble_scores([models[1]], texts), strict=True):
        assert joint.log_probability == pytest.approx(single.log_probability, abs=1e-10)


def trained(values: Recipe, folder: Path, seed: int) -> Path:
    train = values.train.model_copy(update={"seed": seed})
    return start(values.model_copy(update={"train": train}), folder).run


@pytest.mark.slow(4)
def test_command_evaluates_ensembles(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    values = recipe(write_corpus(tmp_path), train__steps=2, layout__dp=1)
    runs = [trained(values, tmp_path / f"member{i}", i) for i in range(2)]
    texts = tmp_path / "texts.txt"
    texts.write_text("abc defg\nabcabc gg h\n" * 4)
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "ab", "answer": "cd"}\n')
    capsys.readouterr()
    words = ["eval", questions, "--from", runs[0], "--held-out", texts, "--json"]
    code, out, err = command(*words, "--with", runs[1])
    assert code == 0, err
    both = json.loads(out)
    losses = [each["loss"] for each in both["held-out"]["members"]]
    assert both["held-out"]["loss"] <= sum(losses) / 2 and losses[0] != losses[1]
    answers = [each["loss"] for each in both["questions"]["members"]]
    assert both["questions"]["loss"] <= sum(answers) / 2
    alone = json.loads(command(*words)[1])
    assert alone["held-out"]["loss"] == pytest.approx(losses[0])
    assert alone["questions"]["loss"] == pytest.approx(answers[0])
    assert "members" not in alone["questions"]
    code, out, err = command(*words[:-1], "--with", runs[1], "--average", "logits")
    assert code == 0 and "ensemble" in out, err
    code, out, err = command(*words, "--with", runs[0])
    assert code == 2 and "is given twice" in err
    code, out, err = command("eval", "--from", runs[0])
    assert code == 2 and "give files of questions" in err
    other = recipe(
        write_corpus(tmp_path), train__steps=1, layout__dp=1, model__vocab=300
    )
    wide = trained(other, tmp_path / "wide", 0)
    with pytest.raises(UsageError, match="has other tokens than"):
        open_members([str(runs[0]), str(wide)], "cpu", print)
