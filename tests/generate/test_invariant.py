"""Log-probabilities to the last bit those of training's forward pass over the whole text, whatever the batch."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch

from weft.errors import UsageError
from weft.generate.engine import Engine, Generation
from weft.generate.lookup import Lookup
from weft.generate.policies import exact_fill, policy_of
from weft.generate.sampling import Sampling
from weft.generate.scheduler import Scheduler
from weft.layout.mesh import Mesh
from weft.models.invariant import TILE, invariant
from weft.models.products import read_only
from weft.models.row_adapters import HostAdapter
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train

SHAPE: dict[str, Any] = {
    "vocab": 97,
    "layers": 2,
    "embed": 64,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 96,
    "init_std": 0.3,
}
SHAPES: dict[str, dict[str, Any]] = {
    "usual sizes": {"qk_norm": True}, "odd sizes": {"embed": 24, "heads": 6, "ffn": 34, "tied": True},
    "windows": {"window": 21, "full_every": 2, "qkv_bias": True},
}  # fmt: skip


def build(**shape: Any) -> Transformer:
    return parallelize(ModelShape(**SHAPE | shape), Mesh.single(), Train(seed=4))[0]


def trained(
    model: Transformer, texts: list[list[int]], alike: bool = True
) -> list[torch.Tensor]:
    """Of every text, the log-probabilities of all tokens after each of its own, by training's pass over all of them."""
    ids = [i for text in texts for i in text]
    ids += [0] * (-len(ids) % TILE)
    positions = [at for text in texts for at in range(len(text))]
    ends = torch.tensor([0, *(len(text) for text in texts)]).cumsum(0)
    with invariant(alike):
        logits = model(
            torch.tensor([ids]), torch.tensor([[*positions, *range(len(ids) - len(positions))]]),
            torch.tensor([*ends.tolist(), len(ids)][: len(texts) + 1 + (len(ids) > len(positions))], dtype=torch.int32),
        )[0]  # fmt: skip
    return [logits[a:b].log_softmax(-1) for a, b in pairwise(ends.tolist())]


def check(found: list[Generation], scores: list[torch.Tensor]) -> int:
    """How many log-probabilities are those of training to the last bit; all must be."""
    for one, said in zip(found, scores, strict=True):
        expected = said[one.prompt - 1 : -1].gather(
            1, torch.tensor(one.written)[:, None]
        )[:, 0]
        assert [p for p, _ in one.log_probabilities] == expected.tolist()
    return sum(len(one.written) for one in found)


def random_engine(model: Transformer, drawn: Random) -> Engine:
    policy = drawn.choice(
        [
            exact_fill,
            policy_of("prompts-first"),
            policy_of(f"chunked:{drawn.randrange(1, 40)}"),
        ]
    )
    size, tokens = drawn.choice([1, 3, 4, 16, 64]), drawn.choice([None, 192, 192])
    drafter = drawn.choice([None, Lookup(least=1)])
    return Engine(
        model,
        tokens,
        drawn.randrange(1, 200),
        drawn.randrange(1, 15),
        policy,
        size,
        drafter,
        invariant=True,
    )


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("least", [300, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", SHAPES)
def test_random_batches(kind: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, others, preemption, found prefixes and guesses; training packs the texts into a row of its own."""
    model, drawn, preempted, hits, steps = build(**SHAPES[kind]), Random(kind), 0, 0, 0
    remove = Scheduler.remove

    def removing(self: Scheduler, request: Generation) -> None:
        nonlocal preempted
        preempted += not request.finished
        remove(self, request)

    monkeypatch.setattr(Scheduler, "remove", removing)
    compared = 0
    while steps < least:
        engine, found = random_engine(model, drawn), list[Generation]()
        beginning = [drawn.randrange(97) for _ in range(drawn.randrange(1, 150))]
        for seed in range(drawn.randrange(1, 8)):
            length, tail = (
                drawn.choice([1, 40, drawn.randrange(1, 150)]),
                drawn.randrange(3),
            )
            prompt = beginning[:length] + [drawn.randrange(97) for _ in range(tail)]
            found += engine.submit(
                prompt,
                drawn.randrange(1, 40),
                Sampling(seed=seed),
                top=0,
                n=drawn.randrange(1, 3),
            )
            for _ in range(drawn.randrange(3)):
                steps += bool(engine.step())
        while engine.step() or engine.scheduler.running or engine.scheduler.waiting:
            steps += 1
        hits += sum(one.hits for one in found)
        drawn.shuffle(found)
        with torch.no_grad():
            compared += check(found, trained(model, [one.ids for one in found]))
    assert preempted and hits and compared > least


def test_without_it_bits_differ() -> None:
    model = build()
    engine = Engine(model)
    (one,) = engine.submit([3, 5, 7], 40, Sampling(), top=0)
    engine.run()
    with torch.no_grad(), pytest.raises(AssertionError):
        check([one], trained(model, [one.ids], alike=False))


def test_packed_weights_and_gradients() -> None:
    """What generates may have packed weights; what learns has gradients that no tile changes much."""
    model, packed = build(), build()
    read_only(packed)
    engine = Engine(packed, budget=9, invariant=True)
    found = [
        engine.submit([i] * (i + 1), 30, Sampling(seed=i), top=0)[0] for i in range(9)
    ]
    engine.run()
    said = trained(model, [found[3].ids])
    check(found[3:4], [said[0].detach()])
    said[0][:, 5].sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    trained(model, [found[3].ids], alike=False)[0][:, 5].sum().backward()
    for name, p in model.named_parameters():
        assert (gradients[name] - p.grad).norm() < 1e-4 * p.grad.norm()


@pytest.mark.parametrize(
    "shape",
    [{"experts": 4, "experts_per_token": 2}, {"mixer": "retention"}, {"ffn": 33}],
    ids=str,
)
def test_what_cannot_be(shape: dict[str, Any]) -> None:
    with pytest.raises(
        UsageError, match="are for dense models with plain attention on one CPU"
    ):
        Engine(build(**shape), invariant=True)


def test_a_cache_exists_before_the_first_step() -> None:
    """As for blocks that come from another engine, or from files, before anything was computed here."""
    engine = Engine(build(), 64, invariant=True)
    assert engine.block_form()
    (generation,) = engine.submit([1, 2, 3], 4)
    engine.run()
    assert len(generation.written) == 4


def test_adapters_are_refused() -> None:
    with pytest.raises(UsageError, match="what adapters add depends on the batch"):
        Engine(build(), invariant=True).add_adapter("one", HostAdapter((), ()))
