"""Distillation: loss and gradients of its formula, the cross entropy at its edge, and teachers with other tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import recipe, write_corpus
from tests.conftest import Command
from weft.api import start
from weft.data.batch import IGNORE
from weft.errors import UsageError
from weft.layout.mesh import Mesh
from weft.recipe import Recipe
from weft.techniques.phases.distillation.teaching import Teaching, open_teachers
from weft.train.build_step import build_step
from weft.train.ensemble import joint_log_probabilities, token_outputs
from weft.train.setup import build_for_training, prepare
from weft.train.step import PlainStep, StepContext
from weft.train.step_values import StepInput


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("distillation"))


@pytest.fixture(scope="module")
def runs(corpus: str) -> list[str]:
    """Two trained models."""
    base = recipe(corpus, train__steps=2, layout__dp=1)
    folders = []
    for seed in (1, 2):
        train = base.train.model_copy(update={"seed": seed})
        own = base.model_copy(update={"train": train})
        folders.append(str(start(own, Path(corpus).parent / f"teacher{seed}").run))
    return folders


def gradients(values: Recipe, how: Any = None) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the first step. ``how``: makes what fills the phase; by default the recipe's step."""
    job, mesh = prepare(values), Mesh.single()
    model, state = build_for_training(job.shape, mesh, values)
    context = StepContext(model, state, mesh)
    filler = build_step(context, values).gradients if how is None else how(context)
    batches = job.loader(job.corpus.train, mesh).step(0)
    assert batches is not None
    loss = filler.gradients(StepInput(batches, 1.0, 0.0, 0.0), PlainStep(context))
    return float(loss), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("average", ["probabilities", "logits"])
def test_loss_and_gradients_are_those_of_the_formula(
    corpus: str, runs: list[str], average: str
) -> None:
    values = recipe(
        corpus,
        loss__teachers=runs,
        loss__teacher_share=0.7,
        loss__teacher_average=average,
    )
    job, mesh = prepare(values), Mesh.single()
    model, state = build_for_training(job.shape, mesh, values)
    opened = open_teachers(runs, StepContext(model, state, mesh))
    teachers = [each.double() for each in opened]
    loss, grads = gradients(values, lambda of: Teaching(of, teachers, values.loss))
    batches = job.loader(job.corpus.train, mesh).step(0)
    assert batches is not None
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        labels = batch.labels.flatten()
        learned = labels != IGNORE
        outputs = [token_outputs(each, batch) for each in teachers]
        target = joint_log_probabilities(outputs, slice(0, int(learned.sum())), average)
        logits = model(batch.tokens, batch.positions, batch.cu_seqlens)
        own = logits.flatten(0, 1)[learned].log_softmax(-1)
        hard = -own.gather(1, labels[learned, None]).sum()
        total = total + 0.7 * -(target.exp() * own).sum() + 0.3 * hard
    total = total / sum(batch.label_weight for batch in batches)
    total.backward()
    assert loss == pytest.approx(float(total.detach()), abs=1e-12)
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, atol=1e-12, rtol=1e-9)


def test_hardly_any_share_is_the_cross_entropy(corpus: str, runs: list[str]) -> None:
    plain = gradients(recipe(corpus))
    taught = gradients(recipe(corpus, loss__teachers=runs, loss__teacher_share=1e-14))
    assert taught[0] == pytest.approx(plain[0], abs=1e-12)
    for name, grad in plain[1].items():
        torch.testing.assert_close(taught[1][name], grad, atol=1e-12, rtol=1e-9)


def test_teacher_itself_leaves_no_gradient(corpus: str, runs: list[str]) -> None:
    """A model whose only teacher is itself is at the minimum of the teachers' share."""
    values = recipe(corpus, loss__teachers=runs[:1], loss__teacher_share=1.0)

    def same(context: StepContext) -> Teaching:
        return Teaching(context, [context.model], values.loss)

    _, grads = gradients(values, same)
    assert max(float(grad.abs().max()) for grad in grads.values()) < 1e-12


def test_other_tokens_are_refused(corpus: str, runs: list[str]) -> None:
    with pytest.raises(
        UsageError, match=r"has other tokens \(257\) than this run \(300\)"
    ):
        prepare(recipe(corpus, loss__teachers=runs, model__vocab=300))


def test_validation_stays_the_cross_entropy(
    corpus: str, runs: list[str], tmp_path: Path
) -> None:
    """The loss of the last step is the teachers', and that on held-out data is comparable with other runs'."""
    values = recipe(
        corpus, loss__teachers=runs, layout__dp=1, train__steps=1, validation__every=1
    )
    taught = start(values, tmp_path / "taught")
    plain = start(
        recipe(corpus, layout__dp=1, train__steps=1, validation__every=1),
        tmp_path / "plain",
    )
    assert taught.validations[0] == plain.validations[0]
    assert taught.metrics()[0]["loss"] != plain.metrics()[0]["loss"]


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["dp=2", "shard=2"])
def test_layouts_equal_one_device(
    corpus: str, runs: list[str], tmp_path: Path, launched: Command, layout: str
) -> None:
    """Ranks open the teachers without waiting for each other: the proof's one device is a rank alone."""
    file = tmp_path / "taught.toml"
    file.write_text(
        "model = { layers = 1, embed = 16, heads = 2 }\n"
        f"data = {{ kind = 'jsonl', path = '{corpus}', seq_len = 32, validation = 0.0 }}\n"
        f"train = {{ batch = 4 }}\nloss = {{ teachers = {runs} }}\n"
    )
    code, out, err = launched("verify", file, "--layout", layout)
    assert code == 0 and out.count("equal") == 5, out + err
