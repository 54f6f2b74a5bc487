"""Guesses that a small model draws: what is written is distributed as without them."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from scipy.stats import chi2_contingency, chisquare

from tests.generate.test_many import PROMPTS, alone, build
from weft.generate.engine import Engine
from weft.generate.guessed_tokens import Guess, choose_token, draw, odds
from weft.generate.row_sampling import TextState
from weft.generate.sampling import GREEDY, Sampling
from weft.generate.token_counts import TokenCounts
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train
from weft.techniques.drafters.small_model import DraftModel

ROOT = Path(__file__).parents[2]

HOWS = {
    "plain": Sampling(),
    "top-p and penalties": Sampling(
        0.8, top_p=0.9, repetition=1.3, frequency=0.4, presence=0.2
    ),
    "top-k and a bias": Sampling(1.4, top_k=6, bias={3: 2.0, 7: -50.0}),
    "min-p": Sampling(1.0, min_p=0.1),
}


class Given:
    """A stream of numbers that are known beforehand."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = list(numbers)

    def random(self) -> float:
        return self.numbers.pop(0)


def state(
    how: Sampling, prompt: Any, written: Any, allowed: torch.Tensor | None = None
) -> TextState:
    counts = TokenCounts(prompt, written) if how.penalises else None
    return TextState(how, 0.0, counts, allowed)


def rows(seed: int, count: int = 2) -> list[torch.Tensor]:
    return list(
        torch.randn(
            count,
            16,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(seed),
        )
        * 2
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_the_enumerated_distribution_is_that_without_guesses(how: Sampling) -> None:
    """Over all guesses and all numbers: where the first one is accepted, and what the second one then draws."""
    for seed in range(20):
        (row, other), prompt, written = rows(seed), [1, 2], [3, 3, 5]
        p, q = (odds(each, state(how, prompt, written)) for each in (row, other))
        found = torch.zeros(16, dtype=torch.float64)
        for x in q.nonzero().flatten().tolist():
            edge = min(1.0, float(p[x] / q[x]))
            guess, below = Guess(x, q), Given(edge * (1 - 1e-9))
            if edge:
                assert (
                    choose_token(row, state(how, prompt, written), below, guess) == x
                    and not below.numbers
                )  # type: ignore[arg-type]
            found[x] += q[x] * edge
            # the number that is drawn next falls on each token as its share of what is left
            if edge < 1:
                left = (p - q).clamp(min=0)
                ends = torch.cat(
                    [torch.zeros(1, dtype=torch.float64), (left / left.sum()).cumsum(0)]
                )
                for token in left.nonzero().flatten().tolist():
                    middle = float(ends[token] + ends[token + 1]) / 2
                    stream: Any = Given(edge + (1 - edge) / 2, middle)
                    assert (
                        choose_token(row, state(how, prompt, written), stream, guess)
                        == token
                    )
                    found[token] += q[x] * (1 - edge) * (left[token] / left.sum())
        assert (found - p).abs().max() < 1e-12
        rate = sum(
            float(q[x]) * min(1.0, float(p[x] / q[x]))
            for x in q.nonzero().flatten().tolist()
        )
        # 1 - total variation
        assert rate == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)


@pytest.mark.slow(2)
def test_a_guess_of_chances_that_are_not_its_own_is_seen() -> None:
    """An argmax checked as if it had been drawn: the fault that makes other texts."""
    row, other = rows(3)
    p, q = (odds(each, state(Sampling(), [], [])) for each in (row, other))
    drawn, stream, x = Counter[int](), Random(0), int(q.argmax())
    for _ in range(4000):
        drawn[choose_token(row, state(Sampling(), [], []), stream, Guess(x, q))] += 1
    assert (
        chisquare([drawn[i] for i in range(16)], (p / p.sum() * 4000).numpy()).pvalue
        < 1e-6
    )


def nudged(model: Transformer, scale: float) -> Transformer:
    """The same model with noise of this size in its weights."""
    for p in model.parameters():
        noise = torch.Generator().manual_seed(1)
        p.data += scale * torch.randn(p.shape, dtype=p.dtype, generator=noise)
    return model


def follow(token: int) -> torch.Tensor:
    """A grammar of the toy model: which tokens can follow this one, bool ``[16]``."""
    return torch.tensor([(3 * token + i) % 5 != 0 for i in range(16)])


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "count", [1_500, pytest.param(200_000, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_samples_have_the_distribution_of_the_model(how: Sampling, count: int) -> None:
    """Chi-square on the second token, behind a first one that may be a guess; the grammar forbids some guesses."""
    # a toy model: the logits behind every token, at the start behind none
    table = torch.stack(rows(0, 17))
    small = table + torch.stack(rows(1, 17)) * 0.5
    first = odds(table[16], state(how, [], [], follow(16)))
    expected = sum(
        (first[a] * odds(table[a], state(how, [], [a], follow(a))) for a in range(16)),
        torch.zeros(16, dtype=torch.float64),
    )
    stream, own, drawn = Random(5), Random(6), Counter[int]()
    q = {a: odds(small[a], state(how, [], [a] if a < 16 else [])) for a in range(17)}
    for _ in range(count):
        path = [draw(q[16], own.random())]
        path.append(draw(q[path[0]], own.random()))
        token = choose_token(
            table[16], state(how, [], [], follow(16)), stream, Guess(path[0], q[16])
        )
        guess = Guess(path[1], q[token]) if token == path[0] else None
        drawn[
            choose_token(
                table[token], state(how, [], [token], follow(token)), stream, guess
            )
        ] += 1
    kept = [i for i in range(16) if expected[i] > 0]
    assert sum(drawn[i] for i in kept) == count
    assert (
        chisquare(
            [drawn[i] for i in kept],
            (expected[kept] / expected[kept].sum() * count).numpy(),
        ).pvalue
        > 1e-3
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("ahead", "layer"), [(0, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("mixer", ["softmax", "hybrid"])
def test_greedy_tokens_are_those_without_a_small_model(
    mixer: str, ahead: int, layer: int
) -> None:
    """The same model as its own small one is always right; another one seldom."""
    model, twin, other = (build(mixer, torch.float64) for _ in range(3))
    nudged(other, 0.02)
    expected = [alone(model, prompt, GREEDY).written for prompt in PROMPTS]
    for small, most in itertools.product((twin, other), (1, 4)):
        drafter = DraftModel(small, most, ahead, early_layer=layer)
        engine, steps = Engine(model, size=4, drafter=drafter), 0
        found = [engine.submit(prompt, 10, GREEDY)[0] for prompt in PROMPTS]
        while engine.scheduler.running or engine.scheduler.waiting:
            engine.step()
            steps += 1
        assert [one.written for one in found] == expected
        drafter.propose([])  # waits for what is being made
        assert (
            not engine.scheduler.pool.owners
            and not drafter.engine.scheduler.pool.owners
        )
        if small is twin:
            assert steps == 1 + -(-9 // (most + 1))
            assert bool(drafter.ready) == bool(ahead)


def test_drawn_tokens_do_not_depend_on_what_was_made_ahead() -> None:
    """Where likely tokens are drawn, guesses are often ready; they are those that would be made in time."""
    model, small = (build("softmax", torch.float64) for _ in range(2))
    nudged(small, 0.02)
    how, texts = Sampling(0.3, top_p=0.95, seed=4), {}
    for ahead, layer in ((0, 0), (2, 0), (2, 2)):
        drafter = DraftModel(small, 3, ahead, early_layer=layer)
        engine = Engine(model, size=4, drafter=drafter)
        requests = [engine.submit(prompt, 8, how)[0] for prompt in PROMPTS[2:4]]
        engine.run()
        texts[ahead, layer] = [request.written for request in requests]
        assert bool(drafter.ready) == bool(ahead)
    assert all(each == texts[0, 0] for each in texts.values())


def test_the_engine_draws_with_a_small_model_as_without() -> None:
    """The third token, over seeds, of the model itself and with guesses of another one."""
    model, other = build("softmax", torch.float64), build("softmax", torch.float64)
    for p in other.parameters():
        p.data *= 1.3
    counts = {}
    for name, drafter in (("without", None), ("with", DraftModel(other, 3))):
        engine = Engine(model, drafter=drafter, limit=256, budget=4096)
        ones = engine.submit(
            [3, 1, 4], 3, Sampling(0.5, seed=10**6 * bool(drafter)), n=1200
        )
        engine.run()
        counts[name] = Counter(one.written[2] for one in ones)
    both = counts["with"] + counts["without"]
    often = [i for i, count in both.items() if count >= 40]
    observed = [[counts[name][i] for i in often] for name in counts]
    assert chi2_contingency(observed).pvalue > 1e-3


@pytest.mark.soak
def test_branches_of_an_early_layer_that_is_right_are_always_ready() -> None:
    """Where the layers behind the first add nothing, that layer names every outcome; a small model does not."""
    model, twin = (build("softmax", torch.float64) for _ in range(2))
    for name, p in model.named_parameters():
        if name.endswith(("wo", "down")) and not name.startswith("blocks.0."):
            p.data.zero_()
    small, counts = nudged(twin, 0.05), {}
    for layer in (0, 1):
        drafter = DraftModel(small, 3, 1, early_layer=layer)
        engine = Engine(model, size=4, drafter=drafter)
        for prompt in PROMPTS:
            engine.submit(prompt, 20, GREEDY)
        engine.run()
        counts[layer] = drafter.needed, drafter.ready
    assert counts[1][0] == counts[1][1] > counts[0][1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layer", [0, 1])
def test_requests_with_the_same_text_have_guesses_of_their_own(layer: int) -> None:
    """Drawn with other seeds and settings, two of them forked from one prompt: each as it is alone."""
    model, small = (build("softmax", torch.float64) for _ in range(2))
    nudged(small, 0.02)
    hows = [Sampling(0.3, seed=1), Sampling(0.3, seed=2), GREEDY, Sampling(0.7, seed=1)]

    def write(*each: Sampling, n: int = 1) -> list[list[int]]:
        drafter = DraftModel(small, 3, 2, early_layer=layer)
        engine = Engine(model, size=4, drafter=drafter)
        asked = [engine.submit(PROMPTS[1], 8, how, n=n) for how in each]
        engine.run()
        return [text.written for texts in asked for text in texts]

    alone_texts = [write(how)[0] for how in hows]
    assert write(*hows) == alone_texts
    assert write(hows[0], n=2) == alone_texts[:2]


def pages() -> list[int]:
    """Pages of this repository, as bytes."""
    names = ("README.md", "CONTRIBUTING.md", "docs/how-to/generate.md")
    return [*b"".join((ROOT / name).read_bytes() for name in names)]


def trained(layers: int, embed: int) -> Transformer:
    """A model that has learned to go on with this repository's pages, byte by byte."""
    text = torch.tensor(pages())
    shape = ModelShape(
        vocab=256, layers=layers, embed=embed, heads=4, kv_heads=2, ffn=2 * embed
    )
    model = parallelize(shape, Mesh.single(), Train(seed=layers))[0]
    optimizer, random = torch.optim.AdamW(model.parameters(), 4e-3), Random(0)
    count, steps = 384, 500
    for step in range(steps):
        rate = 4e-3 * min(1, step / 20) * (1 - step / steps)
        optimizer.param_groups[0]["lr"] = rate
        at = random.randrange(len(text) - count)
        row, ends = text[at : at + count], torch.tensor([0, count - 1])
        logits = model(row[None, :-1], torch.arange(count - 1)[None], ends.int())[0]
        torch.nn.functional.cross_entropy(logits, row[1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.soak
def test_later_layers_of_a_trained_model_name_more_of_the_outcomes() -> None:
    """How many guesses are ready, by who names the one likely other token: the small model, or a layer of the model."""
    model, small = trained(4, 64), trained(1, 48)
    text, ready = pages(), dict[int, float]()
    prompts = [text[at : at + 48] for at in range(100, len(text) - 48, 1500)][:16]
    for layer in range(4):
        drafter = DraftModel(small, 4, 1, early_layer=layer)
        engine = Engine(model, drafter=drafter)
        for prompt in prompts:
            engine.submit(prompt, 40, GREEDY)
        engine.run()
        ready[layer] = round(drafter.ready / drafter.needed, 3)
        print(layer, drafter.needed, ready[layer])
    assert ready[3] > ready[1] + 0.05 and ready[3] > 0.5, ready
