"""Sampler and trainer say the same of every token to the last bit, at every step of a run with the invariant engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cases import recipe, start, write_corpus
from tests.rl.test_rl_loader import recipe as rl_recipe
from tests.rl.test_rl_loader import records
from weft.api import start as train
from weft.errors import UsageError
from weft.generate.engine import Engine
from weft.generate.request import Generation
from weft.generate.sampling import Sampling
from weft.layout.layout import Layout
from weft.models.invariant import invariant
from weft.rl.generation_model import GenerationModel
from weft.rl.local_rollouts import LocalRollouts
from weft.rl.log_probabilities import token_log_probabilities
from weft.rl.rollout import GroupRequest, RewardQuestion
from weft.train.step import train_step

#: Sizes with which a pass over a batch adds up otherwise than one over a token does.
MODEL = {"embed": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96, "layers": 2, "init_std": 0.3}  # fmt: skip
PROMPTS = [[(7 * i + 3 * n) % 250 for i in range(5 + 6 * n)] for n in range(6)]
STEPS, ROOM = 4, 80


def said_by_trainer(
    run: Any, texts: Sequence[Generation], alike: bool
) -> list[np.ndarray]:
    """Log-probabilities of the written tokens by the training side, over whole texts."""
    marked = [
        (text.ids, [at >= text.prompt for at in range(len(text.ids))]) for text in texts
    ]
    with invariant(alike):
        found = token_log_probabilities(
            run.model, run.state, run.mesh, marked, room=ROOM
        )
    return [said[text.prompt :] for said, text in zip(found, texts, strict=True)]


def differences(corpus: str, alike: bool) -> list[float]:
    """Over a run whose weights change in each step, the largest difference of a log-probability in each step.

    A text goes on over an update: what is written behind it is compared with the new weights.
    """
    change = {f"model__{name}": value for name, value in MODEL.items()}
    settings = recipe(
        corpus, **change, train__dtype="float32", optimizer__lr=1e-2, optimizer__warmup=0
    )  # fmt: skip
    run = start(settings.model_dump(mode="json"))
    shape = run.model.shape
    own = GenerationModel(shape, run.mesh, Layout(), run.state, settings.train)
    own.refresh(0)
    engine, most = Engine(own.model, size=4, budget=24, invariant=alike), []
    (going,) = engine.submit(PROMPTS[0], 40, Sampling(seed=9), top=0)
    for step in range(STEPS):
        engine.weights_changed(step)
        first = len(going.written)
        texts = [
            each
            for n, prompt in enumerate(PROMPTS)
            for each in engine.submit(prompt, 12, Sampling(seed=n), n=2, top=0)
        ]
        while not all(text.finished for text in texts):
            engine.step()
        texts.append(going)
        said = said_by_trainer(run, texts, alike)
        gaps = []
        for text, trained in zip(texts, said, strict=True):
            sampled = [chance for chance, _ in text.log_probabilities]
            begin = first if text is going else 0
            gaps += [abs(a - b) for a, b in zip(sampled, trained, strict=True)][begin:]
        most.append(max(gaps))
        batches = run.loader.step(step * settings.train.batch)
        assert batches is not None
        train_step(run.model, run.state, batches, run.mesh, lr=1e-2, clip=1.0)
        own.refresh(step + 1)
    return most


def test_log_probabilities_are_the_same_bits_at_every_step(tmp_path: Path) -> None:
    assert differences(write_corpus(tmp_path), True) == [0.0] * STEPS


def test_without_it_they_are_near(tmp_path: Path) -> None:
    """The mismatch is that of roundings, and there is one: the test above tells the two apart."""
    gaps = differences(write_corpus(tmp_path), False)
    assert 0 < max(gaps) < 1e-4


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_the_sampler_says_log_probabilities_at_the_temperature(
    tmp_path: Path, temperature: float
) -> None:
    change = {f"model__{name}": value for name, value in MODEL.items()}
    settings = recipe(write_corpus(tmp_path), **change, train__dtype="float32")
    run = start(settings.model_dump(mode="json"))
    engine = Engine(run.model, size=4, budget=24)
    how = Sampling(temperature, tempered=True)
    rollouts = LocalRollouts(engine, how, 12, ())
    question = RewardQuestion("")
    rollouts.request(
        [GroupRequest(n, question, tuple(p), 2, n) for n, p in enumerate(PROMPTS)]
    )
    groups = rollouts.finished(len(PROMPTS))
    texts = [
        ([*group.request.prompt, *answer.ids], len(group.request.prompt))
        for group in groups
        for answer in group.answers
    ]
    marked = [(ids, [at >= n for at in range(len(ids))]) for ids, n in texts]
    said = [a.log_probabilities for group in groups for a in group.answers]
    gaps = {}
    for heat in (temperature, 1.0):
        trained = token_log_probabilities(
            run.model, run.state, run.mesh, marked, room=ROOM, temperature=heat
        )
        gaps[heat] = [
            np.abs(np.array(own) - theirs[n:]).max()
            for own, theirs, (_, n) in zip(said, trained, texts, strict=True)
        ]
    assert max(gaps[temperature]) < 1e-5
    assert min(gaps[1.0]) > 0.1
    # a raw one, as services report it
    (raw,) = engine.submit(PROMPTS[0], 1, Sampling(temperature), top=0)
    engine.run()
    (own,) = token_log_probabilities(
        run.model, run.state, run.mesh, [(raw.ids, [False] * raw.prompt + [True])]
    )
    assert raw.log_probabilities[0][0] == pytest.approx(own[-1], abs=1e-5)


RL: dict[str, Any] = {
    "rl": {"start": {"steps": 2}},
    "model": {"embed": 64, "heads": 4, "ffn": 96},
}


@pytest.mark.parametrize("alike", [True, False])
def test_a_run_reports_no_mismatch_at_any_step(tmp_path: Path, alike: bool) -> None:
    """Each step's own pass says what the sampler has said, to the last bit, only with the setting."""
    given = rl_recipe(**RL, roles={"rollout": {"invariant": alike}})
    if not alike:  # at another temperature, with a correction that compares both
        rl = {**RL["rl"], "temperature": 0.7, "loss": {"correction": {"weight": "token"}}}  # fmt: skip
        given = rl_recipe(**RL | {"rl": rl})
    run = train(given, out=tmp_path / "run").run
    gaps = [row["mismatch_max"] for row in records(run, "policy")]
    assert len(gaps) == 3 and (max(gaps) == 0) == alike and max(gaps) < 1e-4


def test_what_cannot_be_the_same_bits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.seq_len that 16 divides"):
        odd = rl_recipe(data={"seq_len": 20}, roles={"rollout": {"invariant": True}})
        train(odd, out=tmp_path / "run")
