"""Models with experts under every layout equal one device: losses for balance, biases and counts included."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from math import comb
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.cases import Case, pairwise, recipe, start, write_corpus
from tests.models.test_experts import MODELS
from tests.prove.test_equality import difference
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models.feed_forward import FeedForward
from weft.models.router import Choice, Router
from weft.parallel.experts import rows
from weft.parallel.experts.connect import count_pieces
from weft.parallel.experts.hashed import Hashed
from weft.parallel.experts.members import Members
from weft.parallel.units import all_gather, reduce_scatter
from weft.prove.equality import compare_with_one_device, run_layout
from weft.prove.types import check_types
from weft.recipe import ModelShape, Recipe, Train
from weft.techniques.dispatch.adaptive.options import (
    Adaptive,
    numbers_sent,
    weights_sent,
)
from weft.techniques.dispatch.timed.choice import TimedDispatch
from weft.techniques.dispatch.timed.trials import OptionTimes
from weft.train.setup import prepare
from weft.train.step import train_step

FACTORS: dict[str, list[Any]] = {
    "layout": [
        "shard=2", "tp=2", "cp=2", "pp=2,shard=2", "shard=2,ep=2", "dp=2,ep=2", "tp=2,ep=2", "cp=2,shard=2,ep=4",
        "shard=2,tp=2,ep=2", "shard=2,tp=2,ep=4", "pp=2,shard=2,ep=2", "dp=2,shard=2,ep=2",
    ],
    "dispatch": ["all-to-all", "per-rank", "all-gather", "two-level", "per-node", "adaptive"],
    "model": ["mixtral", "qwen2", "deepseek-v2", "deepseek-v3", "step"],
    "zero": [1, 2, 3],
    "recompute": ["none", "selective", "full"],
    "micro_batch": [None, 1],
    "early": [False, True],
    "capacity": [0.0, 0.8],
    "pieces": [1, 3],
    "placement": ["static", "sharded", "moving"],
}  # fmt: skip
CASES = list(pairwise(**FACTORS))
#: What the quick part and all of `make test` take of the cases; the others are for soak.
QUICK, SAMPLE = CASES[::12], CASES[::4]


def name(case: Case) -> str:
    return "-".join(f"{k}:{v}".replace(" ", "_") for k, v in case.items())


def tree(corpus: str, case: Case) -> dict[str, Any]:
    model = {
        "layers": 2,
        "experts": 6,
        "expert_ffn": 9,
        "balance_loss": 0.3,
        "bias_rate": 0.05,
    }
    model |= {
        "router_early": case.get("early", False),
        "capacity": case.get("capacity", 0.0),
    } | MODELS[case["model"]]
    values = recipe(
        corpus,
        layout__zero=case.get("zero", 3),
        train__recompute=case.get("recompute", "none"),
        train__micro_batch=case.get("micro_batch"),
        train__dtype=case.get("dtype", "float64"),
        layout__schedule=case.get("schedule", "1f1b"),
        **{f"model__{key}": value for key, value in model.items()},
    ).model_dump(mode="json")
    given = Layout.parse(case["layout"]).model_dump(exclude_defaults=True)
    given |= {
        "dispatch": case.get("dispatch", "all-to-all"),
        "node": 2,
        "pieces": case.get("pieces", 1),
    }
    if given.get("ep"):
        given |= {
            "placement": case.get("placement", "static"),
            "spare": case.get("spare", 2),
        }
    return values | {"layout": values["layout"] | given}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def check(pool: Any, values: dict[str, Any]) -> None:
    """Equal by numbers, and typed."""
    layout = Layout(**values["layout"])
    found = pool.run(layout.world, difference, values)[0]
    assert found.ok, found
    shape = ModelShape(**values["model"]).model_copy(update={"vocab": 257})
    assert (
        check_types(shape, layout, Train(recompute=values["train"]["recompute"]))
        is None
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            c,
            id=name(c),
            marks=[]
            if c in QUICK
            else pytest.mark.slow
            if c in SAMPLE
            else pytest.mark.soak,
        )
        for c in CASES
    ],
)
def test_equal_to_one_device(pool: Any, corpus: str, case: Case) -> None:
    check(pool, tree(corpus, case))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", [
    "shard=1024,ep=64", "dp=16,shard=16,tp=4,ep=1024", "dp=8,shard=32,cp=2,tp=2,ep=128", "shard=128,tp=8,ep=8",
])  # fmt: skip
@pytest.mark.parametrize(
    "dispatch",
    [
        "all-to-all",
        "per-rank",
        "all-gather",
        "two-level",
        "per-node",
        "adaptive",
        "timed",
    ],
)
def test_large_worlds_are_typed(layout: str, dispatch: str) -> None:
    shape = ModelShape(
        vocab=257,
        layers=2,
        embed=32,
        heads=8,
        experts=1024,
        expert_ffn=16,
        first_dense=1,
        balance_loss=0.1,
    )
    assert (
        check_types(
            shape, Layout.parse(f"{layout},dispatch={dispatch},node=8"), Train()
        )
        is None
    )


@pytest.mark.parametrize("experts", [2, 6])
def test_each_option_is_typed(experts: int) -> None:
    """Of experts cut in their width, and on unequally many ranks."""
    shape = ModelShape(
        vocab=257, layers=1, embed=32, heads=8, experts=experts, expert_ffn=11
    )
    for option in range(7):
        with mock.patch.object(
            Adaptive, "best", lambda self, numbers, option=option: option
        ):
            assert (
                check_types(
                    shape, Layout.parse("shard=2,cp=2,ep=4,dispatch=adaptive"), Train()
                )
                is None
            )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [
    {"layout": "shard=2,cp=2", "model": "hugging face"},
    {"layout": "tp=3", "model": "deepseek-v3", "recompute": "full"},
    {"layout": "shard=4,ep=4", "model": "qwen3", "micro_batch": 1},  # of 6 experts
    {"layout": "dp=2,shard=2,ep=4,order=dp shard", "model": "mixtral", "dispatch": "per-rank"},
    {"layout": "shard=2,tp=2,ep=4,order=tp shard", "model": "deepseek-v3"},
    {"layout": "shard=4,ep=4", "model": "two experts"},
    {"layout": "shard=2,tp=2,ep=4", "model": "one expert", "dispatch": "per-rank"},
    pytest.param({"layout": "dp=2,shard=2,tp=2,ep=4", "model": "two experts", "dispatch": "all-gather"},
                 marks=pytest.mark.slow),
    pytest.param({"layout": "pp=2,shard=4,ep=4", "model": "two experts", "recompute": "full"}, marks=pytest.mark.slow),
    pytest.param({"layout": "dp=2,shard=2,tp=2,ep=4", "model": "qwen2"}, marks=pytest.mark.slow),
    pytest.param({"layout": "dp=2,shard=2,tp=2,ep=8", "model": "eight experts"}, marks=pytest.mark.slow),
    pytest.param({"layout": "pp=2,shard=2,tp=2,ep=4", "model": "qwen3"}, marks=pytest.mark.slow),
    pytest.param({"layout": "pp=2,dp=2,ep=2", "model": "qwen3", "schedule": "zb-v"}, marks=pytest.mark.slow),
    pytest.param({"layout": "shard=4,ep=2", "model": "step", "dtype": "float32"}, marks=pytest.mark.slow),
    pytest.param({"layout": "shard=2,tp=2", "model": "pr-moe", "recompute": "selective"}, marks=pytest.mark.slow),
    pytest.param({"layout": "dp=2", "model": "all experts"}, marks=pytest.mark.slow),
    pytest.param({"layout": "dp=2", "model": "one expert", "early": True}, marks=pytest.mark.slow),
    {"layout": "dp=3", "model": "step", "micro_batch": 1},
    pytest.param({"layout": "pp=2,shard=2", "model": "deepseek-v3", "schedule": "zb-v"}, marks=pytest.mark.slow),
    pytest.param({"layout": "pp=2", "model": "step", "schedule": "dualpipe", "recompute": "full"},
                 marks=pytest.mark.slow),
    pytest.param({"layout": "shard=2", "model": "qwen2", "dtype": "float32"}, marks=pytest.mark.slow),
], ids=name)  # fmt: skip
def test_odd_cases(pool: Any, corpus: str, case: Case) -> None:
    check(pool, tree(corpus, case))


def loads_of_a_step(values: dict[str, Any]) -> tuple[int, ...]:
    _, mesh, model, state, loader = start(values)
    return train_step(model, state, loader.step(0) or [], mesh, lr=1e-3, clip=1.0).loads


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "layout", ["shard=2", "tp=2", "cp=2,shard=2,ep=4", "shard=2,tp=2,ep=4", "dp=2,cp=2"]
)
def test_what_is_chosen_and_dropped_is_counted_alike_under_every_cut(
    pool: Any, corpus: str, layout: str
) -> None:
    case = {"model": "qwen3", "capacity": 0.6, "micro_batch": 1}
    one = pool.run(1, loads_of_a_step, tree(corpus, case | {"layout": ""}))[0]
    assert (
        len(one) == 2 * 6 + 2 and sum(one[:12]) == 2 * 2 * 5 * 19 and min(one[12:]) > 10
    )
    values = tree(corpus, case | {"layout": layout, "dispatch": "per-rank"})
    assert (
        pool.run(Layout(**values["layout"]).world, loads_of_a_step, values)
        == [one] * Layout.parse(layout).world
    )


class Sent(NamedTuple):
    """On a rank of ``ep``: numbers and messages that it sends to others in a step, by what it sends them among.

    ``chosen``: what its tokens chose, by layer and pass. ``counted``: what an adaptive dispatcher had counted.
    ``said``: the bytes that the step's result has of all ranks.
    """

    numbers: Counter[str]
    messages: Counter[str]
    chosen: list[list[list[int]]]
    me: int
    counted: int
    said: tuple[int, ...]


def sent_in_a_step(values: dict[str, Any], option: int = 0) -> Sent:
    """``option``: the one that an adaptive dispatcher takes."""
    _, mesh, model, state, loader = start(values)
    chosen: list[list[list[int]]] = []
    numbers, messages, counted = Counter[str](), Counter[str](), 0

    def note(group: Any, sent: int) -> None:
        among = (
            group.group_desc
            if group.group_desc.startswith(("mesh_within", "mesh_across"))
            else "all"
        )
        numbers[among] += sent
        messages[among] += group.size() - 1

    def exchange(
        found: Any,
        rows: torch.Tensor,
        received: Any,
        out: list[int],
        group: Any,
        **how: Any,
    ) -> Any:
        note(group, (sum(out) - out[group.rank()]) * rows[:1].numel())
        return to_all(found, rows, received, out, group=group, **how)

    def gather(found: Any, x: torch.Tensor, group: Any, **how: Any) -> Any:
        note(group, x.numel() * (group.size() - 1))
        return all_gather(found, x, group=group, **how)

    def scatter(found: torch.Tensor, x: Any, group: Any, **how: Any) -> Any:
        note(group, found.numel() * (group.size() - 1))
        return reduce_scatter(found, x, group=group, **how)

    def choose(self: Router, x: torch.Tensor, seen: Any) -> Any:
        found = route(self, x, seen)
        chosen.append(found.ids.tolist())
        return found

    def buckets(self: Hashed, x: torch.Tensor, ids: torch.Tensor) -> Any:
        found = hashed(self, x, ids)
        chosen[-1] = found[1][:, None].tolist()  # what their means choose
        return found

    def best(self: Adaptive, counts: torch.Tensor) -> int:
        nonlocal counted
        counted += int(counts[option])
        return option

    route, to_all, hashed = Router.forward, dist.all_to_all_single, Hashed._buckets
    with (
        mock.patch.object(Hashed, "_buckets", buckets),
        mock.patch.object(rows, "all_gather", gather), mock.patch.object(rows, "reduce_scatter", scatter),
        mock.patch.object(dist, "all_to_all_single", exchange), mock.patch.object(Router, "forward", choose),
        mock.patch.object(Adaptive, "best", best),
    ):  # fmt: skip
        result = train_step(model, state, loader.step(0) or [], mesh, lr=1e-3, clip=1.0)
    return Sent(
        numbers, messages, chosen, mesh.group("exchange").rank(), counted, result.sent
    )


def expected_numbers(
    chosen: list[list[list[int]]], me: int, width: int
) -> dict[str, list[int]]:
    """By each way, of 8 experts on 4 ranks, 2 on a node; ways of two levels: within nodes, and between them."""
    owners = [[e // 2 for e in ids] for tokens in chosen for ids in tokens]
    k, away = len(owners[0]), [{*one} - {me} for one in owners]
    # there and back, twice; with weights, their gradients and ids
    row, copy = 4 * width, 4 * width + 3 * k
    choices = [o for one in owners for o in one]
    return {
        "all-to-all": [row * sum(o != me for o in choices)],
        "per-rank": [copy * sum(map(len, away))],
        "all-gather": [copy * 3 * len(owners)],
        "two-level": [(row + 2) * sum(o % 2 != me % 2 for o in choices),
                      # with an id and a weight of 1
                      (row + 2) * sum(o // 2 != me // 2 for o in choices)],
        "per-node": [copy * sum(len({o for o in one if o % 2 != me % 2}) for one in owners),
                     copy * sum(len({o // 2 for o in one} - {me // 2}) for one in owners)],
    }  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "way", ["all-to-all", "per-rank", "all-gather", "two-level", "per-node"]
)
def test_bytes_and_messages_of_each_dispatcher_are_those_of_its_formula(
    pool: Any, corpus: str, way: str
) -> None:
    values = tree(
        corpus,
        {"layout": "shard=4,ep=4,node=2", "model": "eight experts", "dispatch": way},
    )
    found, width = pool.run(4, sent_in_a_step, values), values["model"]["embed"]
    # Over all ranks: what one sends, another sends back, or on.
    expected = [
        sum(one)
        for one in zip(
            *(expected_numbers(f.chosen, f.me, width)[way] for f in found), strict=True
        )
    ]
    groups = ["mesh_within_2", "mesh_across_2"] if len(expected) == 2 else ["all"]
    assert [sum(f.numbers[group] for f in found) for group in groups] == expected
    assert min(expected) > 0 and {f.said for f in found} == {(8 * sum(expected), 0, 0)}
    # rows, ids and weights
    travels = {"all-to-all": 4, "two-level": 6}.get(way, 7) * len(found[0].chosen)
    assert [found[0].messages[group] for group in groups] == (
        [travels, travels] if len(expected) == 2 else [3 * travels]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        "two experts",
        *(pytest.param(m, marks=pytest.mark.soak) for m in ("eight experts", "qwen3")),
    ],
)
def test_bytes_of_each_option_are_those_that_were_counted(
    pool: Any, corpus: str, model: str
) -> None:
    """Experts on equally many ranks, on unequally many, and cut in their width."""
    values = tree(
        corpus, {"layout": "shard=4,ep=4", "model": model, "dispatch": "adaptive"}
    )
    # two neighbours share their weights and tokens go all ways, or all do
    for option in range(3, 7):
        found = pool.run(4, sent_in_a_step, values, option)
        assert sum(sum(f.numbers.values()) for f in found) == found[0].counted > 0
        assert (
            sum(found[0].said) == 8 * found[0].counted and min(found[0].said[:2]) >= 0
        )
        # weights, and no tokens where all have all
        assert found[0].said[1] and (option == 6) == (not found[0].said[0])


def test_bytes_of_means_are_those_of_the_buckets(pool: Any, corpus: str) -> None:
    values = tree(corpus, {"layout": "shard=4,ep=4,lsh=1", "model": "eight experts"})
    found, width = pool.run(4, sent_in_a_step, values), values["model"]["embed"]
    expected = sum(
        expected_numbers(f.chosen, f.me, width)["all-to-all"][0] for f in found
    )
    assert sum(f.numbers["all"] for f in found) == expected > 0
    tokens = values["train"]["batch"] * values["data"]["seq_len"]
    # layers, choices
    assert sum(len(one) for f in found for one in f.chosen) < 2 * 3 * tokens * 0.9


def difference_of_single_tokens(values: dict[str, Any]) -> Any:
    """With a bucket for each choice."""
    alone = lambda self, x, ids: (torch.arange(ids.numel()), ids.flatten())  # noqa: E731
    with mock.patch.object(Hashed, "_buckets", alone):
        return difference(values)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [
    {"layout": "shard=4,ep=4,lsh=2", "model": "qwen3", "dispatch": "all-gather", "capacity": 0.8},
    {"layout": "shard=2,tp=2,ep=4,lsh=2,lsh_residual=true", "model": "two experts", "dispatch": "per-rank"},
], ids=name)  # fmt: skip
def test_means_of_single_tokens_change_nothing(
    pool: Any, corpus: str, case: Case
) -> None:
    values = tree(corpus, case)
    found = pool.run(4, difference_of_single_tokens, values)[0]
    assert found.ok, found
    shape = ModelShape(**values["model"]).model_copy(update={"vocab": 257})
    assert check_types(shape, Layout(**values["layout"]), Train()) is None


def difference_with_idle_ranks(values: dict[str, Any]) -> Any:
    """All tokens choose the first experts."""

    def first(self: Router, scores: torch.Tensor, by: Any) -> torch.Tensor:
        return torch.arange(self.shape.experts_per_token).expand(len(scores), -1)

    with mock.patch.object(Router, "_best", first):
        return difference(values)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "way", ["all-to-all", "per-rank", "all-gather", "two-level", "per-node", "adaptive"]
)
def test_ranks_with_nothing_but_padding_and_experts_without_tokens(
    pool: Any, corpus: str, way: str
) -> None:
    case = {
        "layout": "shard=4,ep=4",
        "model": "qwen3",
        "dispatch": way,
        "pieces": 2,
        "micro_batch": 1,
    }
    values = tree(corpus, case)
    # three ranks have a row of padding
    values["train"] = values["train"] | {"batch": 1}
    found = pool.run(4, difference_with_idle_ranks, values)[0]
    assert found.ok, found


def difference_of_a_slow_rank(values: dict[str, Any], cache: str) -> Any:
    """Compare with one device where the last of the data ranks has fewer rows, as it is slow. ``cache``: the folder of
    times.
    """
    job = prepare(Recipe(**values))
    layout = job.recipe.layout
    speeds = (*(1.0,) * (layout.world - 1), 0.2)
    mesh = Mesh.create(layout, "cpu", uneven=True)
    with mock.patch.dict(os.environ, WEFT_CACHE=cache):
        trace = run_layout(replace(job, speeds=speeds), mesh, 2)
    return compare_with_one_device(trace, job, mesh)


@pytest.mark.parametrize("dispatch", ["all-gather", "timed"])
def test_slow_ranks_have_fewer_tokens(
    pool: Any, corpus: str, dispatch: str, tmp_path: Path
) -> None:
    """Ranks of which one has few tokens send all to all, and agree on the size of a pass."""
    case = {"layout": "shard=2,ep=2", "dispatch": dispatch, "model": "mixtral"}
    values = tree(corpus, case)
    found = pool.run(2, difference_of_a_slow_rank, values, str(tmp_path))[0]
    assert found.ok, found


def losses_of_steps(values: dict[str, Any], switches: bool) -> list[float]:
    """``switches``: an adaptive dispatcher takes another option in every layer and pass."""
    _, mesh, model, state, loader = start(values)
    turns = itertools.count()
    next_one = (
        {"best": lambda self, numbers: next(turns) * 5 % len(numbers)}
        if switches
        else {}
    )
    with mock.patch.multiple(Adaptive, **next_one) if switches else nullcontext():
        batch = values["train"]["batch"]
        steps = [loader.step(i * batch) or [] for i in range(8)]
        return [
            train_step(model, state, one, mesh, lr=1e-3, clip=1.0).loss for one in steps
        ]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3", "two experts"])
def test_switching_in_every_layer_and_step_changes_no_loss(
    pool: Any, corpus: str, model: str
) -> None:
    values = tree(corpus, {"layout": "shard=4,ep=4", "model": model})
    plain = pool.run(4, losses_of_steps, values, False)[0]
    adaptive = values | {"layout": values["layout"] | {"dispatch": "adaptive"}}
    assert pool.run(4, losses_of_steps, adaptive, True)[0] == pytest.approx(
        plain, rel=1e-12
    )


def timed_steps(
    values: dict[str, Any], late: float, cache: str
) -> tuple[list[float], list[list[int]]]:
    """Losses of steps, and each layer's options, pass by pass.

    What was measured is replaced: option 4 takes a second, every other one more for each number between them, and
    option 4 takes ``late`` seconds more on the last rank.
    """
    _, mesh, model, state, loader = start(values)
    chosen: dict[int, list[int]] = {}
    by, agree = TimedDispatch._by, TimedDispatch.agree

    def noted(self: TimedDispatch, number: int, *given: Any) -> Any:
        chosen.setdefault(id(self), []).append(number)
        return by(self, number, *given)

    def agreed(self: TimedDispatch, trials: OptionTimes, device: torch.device) -> bool:
        for option in trials.left:
            assert 0 < trials.forward[option] + trials.backward[option] < 100
        trials.forward = [1.0 + abs(n - 4) for n in range(len(trials.known))]
        trials.backward = [0.0] * len(trials.known)
        trials.forward[4] += late * (dist.get_rank() == dist.get_world_size() - 1)
        return agree(self, trials, device)

    rare = mock.patch.multiple(
        "weft.techniques.dispatch.timed.trials",
        RISK=1.0,
        KEPT=2,
        WATCHED=2,
        LOOKS=1,
        AGAIN=1,
        SPENT=1e9,
    )
    with (
        rare,
        mock.patch.object(TimedDispatch, "_by", noted),
        mock.patch.object(TimedDispatch, "agree", agreed),
        mock.patch.dict(os.environ, WEFT_CACHE=cache),
    ):
        batch = values["train"]["batch"]
        steps = [loader.step(i * batch) or [] for i in range(20)]
        losses = [
            train_step(model, state, one, mesh, lr=1e-3, clip=1.0).loss for one in steps
        ]
    return losses, list(chosen.values())


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("late", [0.0, pytest.param(100.0, marks=pytest.mark.soak)])
def test_measured_time_chooses_and_changes_no_loss(
    pool: Any, corpus: str, late: float, tmp_path: Path
) -> None:
    """Every option in turn, then the fastest on the slowest rank; the same on all ranks; losses of one device's way. A
    second run begins with what the first has measured.
    """
    values = tree(corpus, {"layout": "shard=4,ep=4", "model": "qwen3"})
    plain = pool.run(4, losses_of_steps, values, False)[0]
    timed = values | {"layout": values["layout"] | {"dispatch": "timed"}}
    given = timed, late, str(tmp_path)
    answers = pool.run(4, timed_steps, *given)
    best = {3} if late else {4}
    assert answers[0][0][:8] == pytest.approx(plain, rel=1e-12)
    for _, chosen in answers:
        assert chosen == answers[0][1]
    for passes in answers[0][1]:
        options = max(passes) + 1
        assert passes[: 2 * options] == [*range(options)] * 2 and options > 5
        assert set(passes[2 * options : 2 * options + 2]) == best
        assert passes[2 * options + 2 : 2 * options + 4] == [0, 1]  # tried again
    again = pool.run(4, timed_steps, *given)
    assert again[0][0][:8] == pytest.approx(plain, rel=1e-12)
    for passes in again[0][1]:
        assert set(passes[:2]) == best and passes[2:4] == [0, 1]


class _Mark(torch.autograd.Function):
    """Notes that backward has come to here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[str]) -> torch.Tensor:
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.seen.append("shared, backward")
        return grad, None


def order_of_events(
    values: dict[str, Any], at_once: bool
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """What a rank does around dispatch and combine in a step, and its parameters after it.

    ``at_once``: what sets out is waited for right away.
    """
    _, mesh, model, state, loader = start(values)
    events: list[str] = []
    moved, land, share = rows._move, rows._Flight.land, FeedForward.share

    def move(rows: torch.Tensor, there: Any, back: Any) -> Any:
        def noted(way: Any) -> Any:
            def issue(x: torch.Tensor) -> Any:
                events.append("issue")
                found, work = way(x)
                if at_once:
                    work.wait()
                return found, mock.Mock() if at_once else work

            return issue

        return moved(rows, noted(there), noted(back))

    def landed(self: Any) -> torch.Tensor:
        events.append("wait")
        return land(self)

    def shared(self: FeedForward, x: torch.Tensor) -> torch.Tensor:
        events.append("shared")
        return share(self, _Mark.apply(x, events))

    with (
        mock.patch.object(rows, "_move", move), mock.patch.object(rows._Flight, "land", landed),
        mock.patch.object(FeedForward, "share", shared),
    ):  # fmt: skip
        train_step(model, state, loader.step(0) or [], mesh, lr=1e-3, clip=1.0)
    return events, {name: part.values.clone() for name, part in state.tensors().items()}


def test_number_of_pieces_follows_from_the_bytes_of_messages() -> None:
    layout = Layout(shard=4, ep=4, pieces=0)

    def count(tokens: int, layout: Layout = layout) -> int:
        ids = torch.empty(tokens, 2, dtype=torch.int64, device="meta")
        return count_pieces(
            layout, torch.empty(tokens, 1024, device="meta"), Choice(ids, ids)
        )

    assert [count(n) for n in (1, 1024, 2048, 10**6)] == [1, 2, 4, 8]
    assert count(2048, Layout(shard=4, ep=4, pieces=3)) == 3
    assert count(2048, Layout(shard=4, ep=4, pieces=0, zero=1, balance="greedy")) == 1
    with torch.no_grad():  # as generation, where ranks have unequal parts of a prompt
        assert count(2048) == 1


def test_shared_experts_run_while_rows_travel(pool: Any, corpus: str) -> None:
    values = tree(
        corpus, {"layout": "shard=2,ep=2", "model": "qwen2", "recompute": "none"}
    )
    found = pool.run(2, order_of_events, values, False)
    # dispatch and combine of a layer
    forward = ["issue", "shared", "wait", "issue", "wait"]
    backward = ["issue", "wait", "issue", "shared, backward", "wait"]
    layers = values["model"]["layers"]
    passes = found[0][0].count("shared") // layers
    assert found[0][0] == (forward * layers + backward * layers) * passes and passes
    in_pieces = pool.run(
        2, order_of_events, values | {"layout": values["layout"] | {"pieces": 2}}, False
    )[0][0]
    # All set out; while one piece is computed with, the next travels, and the one before goes home.
    forward = [
        "issue",
        "issue",
        "shared",
        "wait",
        "issue",
        "wait",
        "issue",
        "wait",
        "wait",
    ]
    backward = [
        "issue",
        "issue",
        "wait",
        "issue",
        "wait",
        "issue",
        "shared, backward",
        "wait",
        "wait",
    ]
    assert in_pieces == (forward * layers + backward * layers) * passes
    for (_, one), (_, other) in zip(
        found, pool.run(2, order_of_events, values, True), strict=True
    ):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [200, pytest.param(1000, marks=pytest.mark.soak)])
def test_adaptive_choice_sends_the_least_in_random_settings(settings: int) -> None:
    """Tokens, choices, ranks, widths and skew at random, counted and by sets."""
    rng, taken = random.Random(3), Counter[str]()
    for _ in range(settings):
        count, each, tokens = (
            rng.choice([2, 2, 4, 4, 8]),
            rng.randint(1, 4),
            rng.randint(1, 12),
        )
        experts, width, hidden = (
            count * each,
            rng.choice([1, 4, 16, 64]),
            rng.choice([1, 4, 16]),
        )
        k, skew = rng.randint(1, min(8, experts)), rng.choice([0.0, 1.2])
        odds = torch.tensor([(e + 1) ** -skew for e in range(experts)])
        ids = [torch.multinomial(odds.expand(tokens, -1), k) for _ in range(count)]
        counted, sizes = dict[tuple[int, str], int](), dict[tuple[int, str], int]()
        stacks = [(each, hidden, width)] * count
        for block in [n for n in range(1, count + 1) if count % n == 0]:
            ways = (
                ("all-to-all", "per-rank", "all-gather")
                if block < count
                else ("weights",)
            )
            numbers, by_set = (
                torch.full((len(ways),), weights_sent(stacks, block)),
                Counter[str](),
            )
            for rank, one in enumerate(ids):
                owner = torch.arange(experts + each * block) // (each * block)
                group = mock.Mock(
                    **{
                        "rank.return_value": rank // block,
                        "size.return_value": count // block,
                    }
                )
                at = mock.Mock(device="cpu")
                members = (
                    Members(at, group, owner[: experts + 1], 0, 0, Counter())
                    if block < count
                    else None
                )
                numbers += numbers_sent(Choice(one.double(), one), width, members)
                owners = [[e // each // block for e in row] for row in one.tolist()]
                by_set["all-to-all"] += (
                    4 * width * sum(o != rank // block for row in owners for o in row)
                )
                by_set["per-rank"] += (4 * width + 3 * k) * sum(
                    len({*row} - {rank // block}) for row in owners
                )
                by_set["all-gather"] += (
                    (4 * width + 3 * k) * (count // block - 1) * tokens
                )
                # three matrices to each neighbour, and their gradients back
                for way in ways:
                    by_set[way] += 3 * 2 * (block - 1) * each * hidden * width
            for way, number in zip(ways, numbers.tolist(), strict=True):
                counted[block, way], sizes[block, way] = number, by_set[way]
        best = min(counted, key=lambda option: counted[option])
        assert sizes[best] == min(sizes.values())
        taken[
            "tokens" if best[0] == 1 else best[1] if best[0] == count else "both"
        ] += 1
    assert min(taken[way] for way in ("tokens", "weights", "both")) > settings // 50, (
        taken
    )


def test_all_gather_pays_where_tokens_have_as_many_experts_as_there_are_ranks() -> None:
    """Rows sent by a rank per token, of ``k`` experts at random among 64: the formulas of the page."""
    ranks, experts = 4, 64
    for k in (1, 2, 4, 6, 8):
        rows = k * (ranks - 1) / ranks
        copies = (ranks - 1) * (
            1 - comb(experts - experts // ranks, k) / comb(experts, k)
        )
        assert copies <= rows and (ranks - 1 <= rows) is (k >= ranks)
