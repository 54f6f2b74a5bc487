"""Robust rules: those of a plain program, in chunks, with the bytes of a sum; and training beside replicas that lie."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from itertools import combinations, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.cases import recipe, start, write_corpus
from weft.layout.mesh import Mesh
from weft.prove.equality import compare_with_one_device, run_layout
from weft.recipe import Recipe, Resilience, build_recipe
from weft.registry import find, names
from weft.sync import robust_aggregation
from weft.sync.robust_aggregation import aggregated
from weft.techniques.aggregators.flag import DIFFERENCES, FLAG_TURNS
from weft.train.build_step import build_step
from weft.train.setup import prepare
from weft.train.step import StepContext

T = torch.Tensor
RULES: dict[str, Any] = {
    name: find("aggregator", name).implementation(Resilience())
    for name in names("aggregator")
}


# Each rule as its paper has it, with all gradients at hand: [replicas, elements] -> [elements].


def plain_scores(g: T, f: int) -> list[float]:
    near = max(1, len(g) - f - 2)
    return [sum(sorted(float((x - y).square().sum()) for j, y in enumerate(g) if j != i)[:near])
            for i, x in enumerate(g)]  # fmt: skip


def plain_krum(g: T, f: int) -> T:
    scores = plain_scores(g, f)
    return g[scores.index(min(scores))]


def plain_multi_krum(g: T, f: int) -> T:
    scores = plain_scores(g, f)
    best = sorted(range(len(g)), key=scores.__getitem__)[: max(1, len(g) - f - 2)]
    return g[best].mean(0)


def plain_bulyan(g: T, f: int) -> T:
    left, chosen = list(g), []
    for _ in range(len(g) - 2 * f):
        scores = plain_scores(torch.stack(left), f) if len(left) > 1 else [0.0]
        chosen.append(left.pop(scores.index(min(scores))))
    found = []
    for column in torch.stack(chosen).T:
        middle = float(column.quantile(0.5))
        near = sorted(column.tolist(), key=lambda x: abs(x - middle))[
            : len(chosen) - 2 * f
        ]
        found.append(sum(near) / len(near))
    return torch.tensor(found, dtype=g.dtype)


def plain_trimmed(g: T, f: int) -> T:
    kept = [sorted(column)[f : len(column) - f] for column in g.T.tolist()]
    return torch.tensor([sum(c) / len(c) for c in kept], dtype=g.dtype)


def plain_median(g: T, f: int) -> T:
    """Newton's way down from Weiszfeld's hundredth turn: it has no turns in common with what is tested."""
    y = g.median(dim=0).values.clone().requires_grad_()
    search = torch.optim.LBFGS([y], max_iter=500, tolerance_grad=1e-14, tolerance_change=1e-16,
                               line_search_fn="strong_wolfe")  # fmt: skip

    def closure() -> T:
        search.zero_grad()
        loss = (g - y).norm(dim=1).sum()
        loss.backward()
        return loss

    for _ in range(20):
        search.step(closure)
    return y.detach()


def plain_flag(g: T, f: int) -> T:
    """With an explicit basis of the subspace, by singular values of all weighted directions and differences."""
    norms = g.norm(dim=1)
    x, p = g / norms[:, None], len(g)
    pairs = list(combinations(range(p), 2))
    apart = torch.stack([(x[i] - x[j]) / (x[i] - x[j]).norm() for i, j in pairs])
    own, both = torch.ones(p, dtype=g.dtype), torch.ones(len(pairs), dtype=g.dtype)
    basis = torch.empty(0)
    for _ in range(FLAG_TURNS):
        # Every difference counts from both ends.
        share = (2 * DIFFERENCES / (p * (p - 1))) ** 0.5
        columns = torch.cat([x * own[:, None], share * apart * both[:, None]])
        basis = torch.linalg.svd(columns.T, full_matrices=False).U[:, : p // 2 + 1]
        own = ((1 - (x @ basis).square().sum(1)).abs() + 1e-7) ** -0.25
        both = ((1 - (apart @ basis).square().sum(1)).abs() + 1e-7) ** -0.25
    return (x @ basis @ basis.T).mean(0) * norms.median()


PLAIN: dict[str, Callable[[T, int], T]] = {
    "flag": plain_flag, "krum": plain_krum, "multi-krum": plain_multi_krum, "bulyan": plain_bulyan,
    "geometric-median": plain_median, "trimmed-mean": plain_trimmed,
}  # fmt: skip
SIZE = 203  # that no number of ranks divides


def votes(ranks: int, faulty: int, dtype: torch.dtype = torch.float64) -> T:
    """Gradients with something in common, and faulty ones: scaled, turned round, noise."""
    noise = torch.Generator().manual_seed(ranks)
    common = torch.randn(SIZE, generator=noise, dtype=torch.float64)
    found = common + 0.7 * torch.randn(
        ranks, SIZE, generator=noise, dtype=torch.float64
    )
    lies = (
        -3 * common,
        1e6 * found[0],
        5 * torch.randn(SIZE, generator=noise, dtype=torch.float64),
    )
    for i in range(faulty):
        found[2 * i] = lies[i % 3]
    return found.to(dtype)


def aggregate_all(
    cases: list[tuple[str, int]], broken: int = 0
) -> list[tuple[T, list[bool], dict[str, Any]]]:
    """On every rank: what comes out for each rule and number of faulty ranks, who counted, and what each call is given.

    The first ``broken`` ranks have a number that is not finite.
    """
    ranks, me = dist.get_world_size(), dist.get_rank()
    found = []
    for rule, faulty in cases:
        mine = votes(ranks, faulty)[me]
        if me < broken:
            mine[7 * me] = math.nan if me else math.inf
        with ExitStack() as stack:
            seen = {
                name: stack.enter_context(
                    mock.patch.object(where, name, wraps=getattr(where, name))
                )
                for where, name in (
                    (dist, "all_to_all_single"),
                    (dist, "all_reduce"),
                    (robust_aggregation, "all_gather"),
                )
            }
            out, counted = aggregated(mine, RULES[rule], faulty, dist.group.WORLD)
        given = {
            name: one.call_args.args[name != "all_reduce"] for name, one in seen.items()
        }
        assert all(one.call_count == 1 for one in seen.values())
        found.append(
            (out, counted, {name: (x.numel(), x.dtype) for name, x in given.items()})
        )
    return found


@pytest.mark.parametrize("ranks", [4, 7])
def test_equal_to_plain_programs_with_the_bytes_of_a_sum(pool: Any, ranks: int) -> None:
    most = {name: (ranks - rule.more) // rule.each for name, rule in RULES.items()}
    cases = [(rule, f) for rule in RULES for f in range(most[rule] + 1)]
    assert ranks < 7 or max(f for _, f in cases) == 3
    found = pool.run(ranks, aggregate_all, cases)
    padded = ranks * -(-SIZE // ranks)
    for i, (rule, f) in enumerate(cases):
        expected = PLAIN[rule](votes(ranks, f), f)
        for out, counted, given in (one[i] for one in found):
            assert torch.equal(out, found[0][i][0]) and all(counted)
            assert (out - expected).norm() <= 1e-6 * expected.norm(), (rule, f)
            # Each rank keeps one of its p chunks and gets as much as it gives, and so again for the outcome: 2 (p-1)/p
            # of the gradient, as in a ring's sum, besides p^2 numbers that are summed.
            sizes = {
                "all_to_all_single": padded,
                "all_gather": padded // ranks,
                "all_reduce": ranks**2,
            }
            assert given == {
                name: (size, torch.float64) for name, size in sizes.items()
            }


@pytest.mark.slow
def test_what_is_not_finite_is_left_out(pool: Any) -> None:
    cases = [(rule, 1) for rule in RULES if rule != "bulyan"]
    for out, counted, _ in (
        one[i]
        for i in range(len(cases))
        for one in pool.run(5, aggregate_all, cases, 2)[:1]
    ):
        assert counted == [False, False, True, True, True] and out.isfinite().all()
    kept = votes(5, 1)[2:]
    for (rule, _), (out, _, _) in zip(
        cases, pool.run(5, aggregate_all, cases, 2)[3], strict=True
    ):
        expected = PLAIN[rule](kept, 0)  # there can be no more faulty ones
        assert (out - expected).norm() <= 1e-6 * expected.norm(), rule
    out, counted, _ = pool.run(3, aggregate_all, [("krum", 0)], 3)[0][0]
    assert not any(counted) and out.isnan().all()


def test_equal_gradients_come_out_as_they_are() -> None:
    one = 1e-3 * torch.randn(
        50, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    same = one.repeat(7, 1)
    for name, rule in RULES.items():
        out = rule.combined(same, same @ same.T, 1)
        assert (out - one).norm() <= 1e-9 * one.norm(), name


#: What faulty replicas send in the place of a gradient.
LIES: dict[str, Callable[[T], T]] = {
    "turned": lambda g: -10 * g,
    "noise": lambda g: 10 * g.norm() * torch.randn_like(g),
    "scaled": lambda g: 1e4 * g,
    "nan": lambda g: g * math.nan,
}


#: Rules beside lies.
FACED = [*product(RULES, LIES)]
REPLICAS, STEPS = 7, 30


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def settings_of(corpus: str, rule: str, faulty: int, **change: Any) -> Recipe:
    change = {
        "layout__dp": REPLICAS,
        "train__batch": 56,
        "train__micro_batch": 8,
        "optimizer__lr": 0.7,
    } | change
    return recipe(corpus, optimizer__kind="sgd", optimizer__clip=0, optimizer__weight_decay=0.0, **change,
                  resilience__aggregate=rule, resilience__faulty=faulty)  # fmt: skip


def losses(cases: list[tuple[dict[str, Any], str, int, int]]) -> list[float]:
    """The mean loss of the last steps of short runs: recipe, how its first ranks lie, how many these are, and steps."""
    found = []
    for tree, lie, liars, steps in cases:
        settings, mesh, model, state, loader = start(tree)
        for parameter in model.parameters() if mesh.rank("dp") < liars else ():
            parameter.register_hook(LIES[lie])
        stepper = build_step(StepContext(model, state, mesh), settings)
        seen = [
            stepper.take(
                loader.step(i * settings.train.batch) or [], settings.optimizer.lr
            )[0]
            for i in range(steps)
        ]
        found.append(
            sum(result.loss for result in seen[-4:]) / 4
            if not seen[-1].skipped
            else math.nan
        )
    return found


@pytest.fixture(scope="module")
def clean(pool: Any, corpus: str) -> float:
    """The loss of a run in which nobody lies: of one device, which computes the mean of all."""
    whole = {"layout__dp": 1, "train__micro_batch": 56}
    tree = settings_of(corpus, "mean", 0, **whole).model_dump(mode="json")
    ((loss,),) = pool.run(1, losses, [(tree, "", 0, STEPS)])
    assert loss < 3.0  # of 5.5 at the beginning
    return loss


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("faced", [[pair] for pair in FACED])
def test_a_run_is_that_without_lies(
    pool: Any, corpus: str, clean: float, faced: list[tuple[str, str]]
) -> None:
    """Within 5 % of the loss of a run in which nobody lies, beside as many liars as each rule allows for."""
    cases = []
    for rule, lie in faced:
        liars = (REPLICAS - RULES[rule].more) // RULES[rule].each
        cases.append(
            (
                settings_of(corpus, rule, liars).model_dump(mode="json"),
                lie,
                min(liars, 2),
                STEPS,
            )
        )
    found, *_ = pool.run(REPLICAS, losses, cases, timeout=240)
    assert all(loss == pytest.approx(clean, rel=0.05) for loss in found), (clean, found)


@pytest.mark.slow
def test_the_mean_is_swayed_by_one(pool: Any, corpus: str) -> None:
    values = settings_of(corpus, "trimmed-mean", 0).model_dump(mode="json")
    for loss in pool.run(
        REPLICAS, losses, [(values, lie, 1, 5) for lie in LIES if lie != "nan"]
    )[0]:
        assert not loss < 5.5, "it has learned"


def prove(tree: dict[str, Any]) -> Any:
    settings = build_recipe(tree)
    mesh, job = Mesh.create(settings.layout, "cpu"), prepare(settings)
    return compare_with_one_device(run_layout(job, mesh, 2), job, mesh)


@pytest.mark.parametrize("rule", ["trimmed-mean", "bulyan"])
def test_a_rule_without_faulty_ones_is_one_device(
    pool: Any, tmp_path: Path, rule: str
) -> None:
    """Where it comes to the mean of all, of replicas with equally many tokens: those of one long document."""
    path = tmp_path / "long.jsonl"
    path.write_text(
        json.dumps({"text": "The cat sat on the mat, and the dog lay. " * 20})
    )
    change = {
        "train__batch": 6,
        "train__micro_batch": 1,
        "data__validation": 0.0,
        "model__experts": 2,
    }
    found = pool.run(
        3,
        prove,
        settings_of(str(path), rule, 0, layout__dp=3, **change).model_dump(mode="json"),
    )[0]
    assert found.ok, found
