"""Kinds of overlap compute what one device computes, one part bitwise; others compute while a part's tokens travel."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest

from tests.cases import Case, recipe, start, write_corpus
from tests.parallel.test_experts import name
from tests.prove.test_equality import difference
from weft.layout.flights import StartedCollective
from weft.layout.layout import Layout
from weft.models import fused
from weft.models.token_parts import PassTokens
from weft.registry import names
from weft.techniques.overlaps.nano import NanoBatches
from weft.techniques.overlaps.nano.nano_search import TRIALS, NanoChoice, every_choice
from weft.train.step import train_step

MIXTURE: dict[str, Any] = {
    "experts": 6, "expert_ffn": 9, "balance_loss": 0.3, "bias_rate": 0.05, "router": "sigmoid",
    "shared_experts": 1,
}  # fmt: skip
LATENT = {"kv_rank": 5, "rope_dim": 2, "value_dim": 4, "kv_heads": 4}
ADAPTER = {"kind": "lora", "rank": 2, "dropout": 0.3}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def tree(corpus: str, case: Case) -> dict[str, Any]:
    """The values of a small recipe, with those of ``case``: a layout in words, and sections."""
    values: dict[str, Any] = recipe(corpus).model_dump(mode="json")
    for section, changed in case.items():
        if section != "layout":
            values[section] = (values.get(section) or {}) | changed
    asked = Layout.parse(case["layout"]).model_dump(exclude_defaults=True)
    return values | {"layout": values["layout"] | {"overlap_least": 0} | asked}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [
    {"layout": "tp=2,overlap=domino"},
    {"layout": "tp=2,overlap=tokens"},
    {"layout": "tp=2,overlap=chunks"},
    {"layout": "tp=2,overlap=nano"},
    *[pytest.param(case, marks=pytest.mark.soak) for case in (
        {"layout": "tp=3,overlap=tokens,parts=3", "model": {"window": 5}},
        {"layout": "tp=2,dp=2,zero=1,overlap=tokens"},
        {"layout": "tp=2,pp=2,overlap=tokens,schedule=zb-h1"},
        {"layout": "tp=2,pp=2,overlap=chunks,vocab_barriers=1"},
        {"layout": "tp=2,shard=2,overlap=domino", "train": {"recompute": "full"}},
        {"layout": "tp=2,overlap=chunks", "train": {"recompute": "selective"}},
        {"layout": "tp=2,cp=2,overlap=domino"},
        {"layout": "tp=2,cp=2,overlap=domino", "train": {"micro_batch": 1}},
        {"layout": "tp=2,overlap=domino", "model": MIXTURE},
        {"layout": "tp=2,ep=2,overlap=domino", "model": MIXTURE},
        {"layout": "dp=2,ep=2,overlap=domino", "model": MIXTURE},
        {"layout": "tp=2,dp=2,ep=4,overlap=domino", "model": MIXTURE | {"capacity": 0.8, "router_early": True}},
        {"layout": "tp=2,overlap=domino", "model": {"mixer": "retention"}},
        {"layout": "tp=2,overlap=tokens", "model": LATENT},
        {"layout": "tp=2,overlap=domino", "adapter": ADAPTER, "train": {"recompute": "full"}},
        {"layout": "tp=2,overlap=tokens", "adapter": ADAPTER},
        {"layout": "tp=2,overlap=tokens", "memory": {"activations": "host"}},
        {"layout": "tp=2,pp=2,overlap=domino", "memory": {"activations": "host"}, "train": {"recompute": "full"}},
        {"layout": "tp=2,overlap=tokens", "memory": {"weights": "file"}},
    )],
], ids=lambda case: name(case))  # fmt: skip
def test_equal_to_one_device(pool: Any, corpus: str, case: Case) -> None:
    values = tree(corpus, case)
    result = pool.run(Layout(**values["layout"]).world, difference, values)[0]
    assert result.ok, result


def watched_step(values: dict[str, Any]) -> dict[str, Any]:
    """On every rank: loss and norm of a step, and for each collective that was cut in two the number of products
    between its start and its end, in forward and backward.
    """
    _, mesh, model, state, loader = start(values)
    products, between = [0], list[int]()
    begun: dict[int, int] = {}
    create, land = StartedCollective.__init__, StartedCollective.land
    times = fused.times

    def started(flight: StartedCollective, *given: Any) -> None:
        create(flight, *given)
        begun[id(flight)] = products[0]

    def landed(flight: StartedCollective) -> Any:
        between.append(products[0] - begun.pop(id(flight)))
        return land(flight)

    def counted(*given: Any, **named: Any) -> Any:
        products[0] += 1
        return times(*given, **named)

    with (
        mock.patch.object(StartedCollective, "__init__", started),
        mock.patch.object(StartedCollective, "land", landed),
        mock.patch.object(fused, "times", counted),
    ):
        batches = loader.step(0) or []
        result = train_step(model, state, batches, mesh, lr=1e-3, clip=1.0)
    assert not begun
    return {"loss": result.loss, "norm": result.grad_norm, "between": between}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", names("overlap"))
def test_others_compute_while_tokens_travel(pool: Any, corpus: str, kind: str) -> None:
    values = tree(corpus, {"layout": f"tp=2,overlap={kind}"})
    for seen in pool.run(2, watched_step, values):
        between = seen["between"]
        # two layers with two halves each, there and back
        assert len(between) >= 2 * 2 * 2 * 2 * 2
        assert sum(count > 0 for count in between) > 0.7 * len(between)


def test_one_part_is_the_plain_pass(pool: Any, corpus: str) -> None:
    layouts = ["tp=2", *(f"tp=2,parts=1,overlap={kind}" for kind in names("overlap"))]
    plain, *parts = (
        pool.run(2, watched_step, tree(corpus, {"layout": layout}))
        for layout in layouts
    )
    assert not plain[0]["between"] and all(each == plain for each in parts)


@pytest.mark.parametrize("fastest", [
    NanoChoice(1), NanoChoice(3), NanoChoice(2, rows=True, order="phases"), NanoChoice(2, growth=1.5),
])  # fmt: skip
def test_search_finds_number_order_and_sizes(fastest: NanoChoice) -> None:
    """Of times that grow with the distance from the fastest. The first pass of each choice is slow, and chance disturbs
    the second.
    """
    tokens, nano = PassTokens(rows=4, tokens=1024, unit=2), NanoBatches()

    def seconds(choice: NanoChoice) -> float:
        alike = [choice.number == fastest.number, choice.rows == fastest.rows]
        alike += [choice.order == fastest.order, choice.growth == fastest.growth]
        return 10.0 - sum(a * b for a, b in zip(alike, (4, 3, 2, 1), strict=True))

    passes = Counter[NanoChoice]()
    while nano.awaits(tokens):
        search = nano.searches[4, 11, False]
        choice = search.choice
        slow = 100.0 * (not passes[choice])
        # by chance the fastest is slow once, and another fast
        luck = {fastest: 1.5, NanoChoice(4): -5.0} if passes[choice] == 1 else {}
        nano.took(tokens, nano(tokens), seconds(choice) + slow + luck.get(choice, 0.0))
        passes[choice] += 1
        # of another choice, which was under way
        nano.took(tokens, NanoChoice(7).weave(tokens), 0.0)
    assert search.choice == fastest
    assert passes.total() < TRIALS * len(every_choice(tokens))
