"""Experts write together: tokens and probabilities are those of whole passes, whatever else the engine does."""

from __future__ import annotations

import pytest
import torch

from weft.data.tokenizer import load_tokenizer
from weft.errors import UsageError
from weft.generate.engine import Engine
from weft.generate.expert_engine import ExpertEngine
from weft.generate.sampling import GREEDY, Sampling
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train
from weft.train.expert_join import BayesRouter, joined_log_probabilities
from weft.train.expert_set import OpenedExperts

T = torch.Tensor

PROMPTS = ([3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8, 1, 8], [1, 6])


def build(layers: int, embed: int, seed: int) -> Transformer:
    shape = ModelShape(
        vocab=61, layers=layers, embed=embed, heads=2, ffn=2 * embed, init_std=0.5
    )
    return parallelize(shape, Mesh.single(), Train(seed=seed, dtype="float64"))[0]


@pytest.fixture(scope="module")
def experts() -> OpenedExperts:
    """Two experts of different size."""
    models = (build(2, 32, 1), build(1, 16, 2))
    router = BayesRouter((0.6, 0.4))
    return OpenedExperts(models, {}, load_tokenizer("bytes"), router)


@torch.no_grad()
def logs_of(model: Transformer, ids: list[int]) -> T:
    documents = torch.tensor([0, len(ids)], dtype=torch.int32)
    positions = torch.arange(len(ids))[None]
    return model(torch.tensor([ids]), positions, documents)[0].log_softmax(-1)


def without_cache(experts: OpenedExperts, ids: list[int], count: int) -> list[int]:
    """The likeliest next tokens by both experts, from passes over the whole text."""
    ids = [*ids]
    for _ in range(count):
        logs = [logs_of(model, ids) for model in experts.models]
        after = torch.tensor(ids[1:])[:, None]
        evidence = torch.stack([each[:-1].gather(1, after).sum() for each in logs])
        weights = experts.router.log_weights(evidence[None])
        joint = joined_log_probabilities([each[-1:] for each in logs], weights)
        ids.append(int(joint.argmax()))
    return ids[-count:]


def test_texts_are_those_of_passes_over_the_whole_text(experts: OpenedExperts) -> None:
    """Several at once, in a cache that has no room for all: some lose their blocks and begin again."""
    engine = ExpertEngine(experts, experts.models[0], 64, budget=16)
    texts = [engine.submit(list(ids), 24, GREEDY)[0] for ids in PROMPTS]
    engine.run()
    for text, ids in zip(texts, PROMPTS, strict=True):
        assert text.written == without_cache(experts, list(ids), 24)
    alone = Engine(experts.models[0])
    single = [alone.submit(list(ids), 24, GREEDY)[0] for ids in PROMPTS]
    alone.run()
    # the other expert has a say
    assert [text.written for text in single] != [text.written for text in texts]
    engine.submit([1], 1, GREEDY)
    engine.run()
    assert len(engine.texts) <= 1  # what has ended is forgotten


def test_log_probabilities_and_several_answers_are_of_both(
    experts: OpenedExperts,
) -> None:
    engine = ExpertEngine(experts, experts.models[0])
    how = Sampling(1.0, seed=3)
    texts = engine.submit(list(PROMPTS[0]), 4, how, n=2, top=0)
    engine.run()
    assert texts[0].written != texts[1].written
    for text in texts:
        said = sum(pair[0] for pair in text.log_probabilities)
        wholes = []
        for model in experts.models:
            logs = logs_of(model, text.ids)
            own = logs[:-1].gather(1, torch.tensor(text.ids[1:])[:, None])[:, 0]
            wholes.append(own)
        prior = torch.tensor(experts.router.prior, dtype=torch.float64).log()
        before = torch.stack([own[: len(PROMPTS[0]) - 1].sum() for own in wholes])
        whole = torch.stack([own.sum() for own in wholes])
        joint = (prior + whole).logsumexp(0) - (prior + before).logsumexp(0)
        assert said == pytest.approx(float(joint), rel=1e-9)


def test_prompts_are_not_scored(experts: OpenedExperts) -> None:
    engine = ExpertEngine(experts, experts.models[0])
    with pytest.raises(UsageError, match="weft eval"):
        engine.submit([1, 2], 1, GREEDY, scored=True)


def test_a_cache_as_large_as_memory_allows(experts: OpenedExperts) -> None:
    """As ``weft serve`` opens the engine: each expert's cache is measured with a text that all of them have ended."""
    engine = ExpertEngine(experts, experts.models[0], budget=16)
    assert engine.fit(2**18) >= 64
    assert all(not each.scheduler.running for each in (engine, *engine.others))
    text = engine.submit(list(PROMPTS[2]), 4, GREEDY)[0]
    engine.run()
    assert text.written == without_cache(experts, list(PROMPTS[2]), 4)
