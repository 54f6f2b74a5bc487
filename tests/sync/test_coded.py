"""Coded gradients: the sum of all from every set of ranks that a code allows for, on paper and over ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import combinations, product
from math import inf
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from tests.cases import recipe, write_corpus
from tests.checkpoint.test_resume import go, series, tree
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.net.lost import PeerLost
from weft.prove.equality import compare_with_one_device, run_layout
from weft.recipe import Resilience, build_recipe
from weft.resilience.layouts import recipe_for
from weft.sync.arrivals import Gathering, Link, Sum, connect_ranks
from weft.sync.coded import Code, GradientCode, code_of
from weft.techniques.codes.m_sgc import Multiplexed
from weft.techniques.codes.sr_sgc import SelectiveRepetition
from weft.train.setup import prepare

SIZE = 5


def decode(
    code: Code, arrived: list[frozenset[int]], values: np.ndarray
) -> dict[int, float]:
    """How far each job that can be decoded is from the sum of its parts' ``values`` ``[jobs, parts, elements]``."""
    results = {}
    for number in range(len(arrived)):
        for rank in range(code.ranks):
            for job, parts, weights in code.tasks(rank, number, arrived[:number]):
                assert (
                    set(parts) <= set(code.parts_of(rank))
                    and (job, rank, number) not in results
                )
                results[job, rank, number] = (
                    np.asarray(weights) @ values[job, list(parts)]
                )
    found = {}
    for job in range(code.jobs):
        weights_of = code.decoding(job, arrived)
        if weights_of is not None:
            assert all(result.rank in arrived[result.round] for result in weights_of)
            total = sum(
                w * results[job, r.rank, r.round] for r, w in weights_of.items()
            )
            found[job] = float(np.abs(total - values[job].sum(0)).max())
    return found


def load_of(code: Code) -> float:
    """The share of a job's samples that a rank computes, for each job."""
    return len(code.parts_of(0)) / code.parts


def values_of(code: Code) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((code.jobs, code.parts, SIZE))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", range(2, 9))
def test_gradient_coding_from_every_set_of_ranks(ranks: int) -> None:
    for late in range(1, ranks):
        code = GradientCode(ranks, late)
        assert {len(code.parts_of(rank)) for rank in range(ranks)} == {late + 1}
        assert load_of(code) == (late + 1) / ranks
        values = values_of(code)
        for missing in (
            some
            for count in range(late + 1)
            for some in combinations(range(ranks), count)
        ):
            arrived = [frozenset(range(ranks)) - set(missing)]
            assert decode(code, arrived, values)[0] < 1e-10, (late, missing)
        if ranks % (late + 1):  # else there are groups, and one rank of each is enough
            assert code.decoding(0, [frozenset(range(ranks - late - 1))]) is None


def is_bursty(
    arrived: Sequence[frozenset[int]], ranks: int, late: int, burst: int, window: int
) -> bool:
    """Whether at most so many different ranks were ``late`` in the last ``window`` rounds, none beyond a ``burst``."""
    recent = list(arrived)[-window:]
    missed = {
        rank: [i for i, some in enumerate(recent) if rank not in some]
        for rank in range(ranks)
    }
    return sum(map(bool, missed.values())) <= late and all(
        m[-1] - m[0] < burst for m in missed.values() if m
    )


def conforms(code: Code, arrived: Sequence[frozenset[int]]) -> bool:
    """Whether ranks have been late, up to the last round, in no other way than a sequential code is made for."""
    assert isinstance(code, (SelectiveRepetition, Multiplexed))
    late = code.ranks_late if isinstance(code, SelectiveRepetition) else code.stragglers
    return is_bursty(arrived, code.ranks, late, code.burst, code.window)


def patterns(code: Code) -> Iterator[list[frozenset[int]]]:
    """All that a code is made for, of the rounds of a step."""
    everybody = frozenset(range(code.ranks))
    some = [
        everybody - set(late)
        for n in range(code.ranks)
        for late in combinations(range(code.ranks), n)
    ]
    found: list[list[frozenset[int]]] = [[]]
    for _ in range(code.jobs + code.delay):
        found = [
            [*before, now]
            for before in found
            for now in some
            if conforms(code, [*before, now])
        ]
    yield from found


SEQUENTIAL = [
    *(SelectiveRepetition(ranks, 1, 3, 1, 2, 1) for ranks in (2, 3)),
    SelectiveRepetition(4, 1, 3, 1, 2, 2), SelectiveRepetition(5, 1, 2, 1, 3, 2), SelectiveRepetition(4, 1, 2, 2, 3, 2),
    SelectiveRepetition(8, 1, 2, 1, 2, 1),
    *(Multiplexed(ranks, 1, 2, 1, 2) for ranks in (2, 3, 4, 8)),
    Multiplexed(4, 2, 2, 1, 2), Multiplexed(4, 1, 2, 1, 3), Multiplexed(3, 2, 2, 2, 3), Multiplexed(4, 3, 1, 2, 3),
    SelectiveRepetition(8, 1, 3, 1, 2, 2), Multiplexed(8, 2, 1, 1, 2),
]  # fmt: skip


def name(code: Code) -> str:
    return f"{type(code).__name__}-{'-'.join(map(str, vars(code).values()))}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(c, id=name(c), marks=[pytest.mark.soak] * (i >= 12))
        for i, c in enumerate(SEQUENTIAL)
    ],
)
def test_sequential_codes_from_every_pattern(code: Code) -> None:
    """Every job is known when it is due, and exactly, whatever ranks are late in the way that the code is made for."""
    values, seen = values_of(code), 0
    for arrived in patterns(code):
        for number in range(code.delay, len(arrived)):
            assert (
                code.decoding(number - code.delay, arrived[: number + 1]) is not None
            ), (arrived, number)
        found = decode(code, arrived, values)
        assert found.keys() == set(range(code.jobs)) and max(found.values()) < 1e-10
        seen += 1
    assert seen > code.ranks


@pytest.mark.parametrize("code", SEQUENTIAL[3:6] + SEQUENTIAL[8:13], ids=name)
def test_no_round_ends_that_would_lose_a_job(code: Code) -> None:
    """Whatever ranks are late, and however little patience one has, also in no way that the code is made for."""
    rule, values = Gathering(code, patience=0.0, limit=inf), values_of(code)
    for seed in range(40):
        rng = np.random.default_rng(seed)
        arrived: list[set[int]] = []
        left = set(range(code.jobs))
        while left:
            arrived.append(set())
            for rank in rng.permutation(code.ranks).tolist():
                most = rule.duration(arrived, left, first=1.0)
                if most is None or most < inf:
                    break
                arrived[-1].add(rank)
            left = {job for job in left if code.decoding(job, arrived) is None}
        assert len(arrived) <= code.jobs + code.delay
        found = decode(code, [frozenset(some) for some in arrived], values)
        assert found.keys() == set(range(code.jobs)) and max(found.values()) < 1e-10


def test_loads_are_those_of_the_papers() -> None:
    for ranks, burst, window, late in product((8, 16), (1, 2), (3, 5), (1, 4)):
        words = {"stragglers": late, "burst": burst, "window": window, "jobs": 3}
        repeated = code_of(Resilience(code="sr-sgc", **words), ranks)
        multiplexed = code_of(Resilience(code="m-sgc", **words), ranks)
        assert repeated is not None and multiplexed is not None
        assert (repeated.delay, multiplexed.delay) == (burst, window - 2 + burst)
        assert (
            load_of(repeated) == (-(-burst * late // (window - 1 + burst)) + 1) / ranks
        )
        slots = window - 1 + burst
        assert load_of(multiplexed) == pytest.approx(
            (late + 1) * slots / (ranks * (burst + (window - 1) * (late + 1)))
        )
        # What a rank computes, round by round, once all rounds have tasks of all jobs: as much in each.
        everybody = [frozenset(range(ranks))] * multiplexed.delay
        code = Multiplexed(ranks, late, multiplexed.delay + 1, burst, window)
        tasks = code.tasks(0, code.delay, everybody)
        assert sum(len(task.parts) for task in tasks) == pytest.approx(
            load_of(code) * code.parts
        )
    assert load_of(Multiplexed(16, 4, 1, 1, 3)) == pytest.approx(15 / 176)
    assert load_of(GradientCode(16, 4)) == 5 / 16


def test_bursts() -> None:
    late = [frozenset({0, 1, 2}) - {i} for i in (0, 0, 3, 1)]
    assert is_bursty(late[:2], 3, 1, 2, 3) and not is_bursty(late[:2], 3, 1, 1, 3)
    assert (
        is_bursty(late[:3], 3, 1, 2, 3)
        and not is_bursty(late, 3, 1, 2, 3)
        and is_bursty(late, 3, 2, 2, 3)
    )
    # two bursts in a window
    assert not is_bursty([late[0], late[2], late[0]], 3, 1, 2, 3)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def wait_for_the_end(link: Link, *rest: Any) -> Any:
    """In the place of a rank's own work on a round: it is late, however slow the others are."""
    while not link.connection.poll():
        time.sleep(0.002)
    return computed(link, *rest)


computed = Link._sums


def proof(
    tree: dict[str, Any], patterns: list[tuple[int, ...]], sleep: float, steps: int
) -> tuple[Any, float]:
    """How a recipe's gradients differ from one device's, and at most from those with late ranks, relative to the norm.

    Ranks that are late sleep before every pass, or if ``sleep`` is 0 miss every round.
    """
    settings = build_recipe(tree)
    mesh, job = Mesh.create(settings.layout, "cpu"), prepare(settings)
    plain = run_layout(job, mesh, steps)
    worst = 0.0
    for late in patterns:

        def watch(model: Any, state: Any, late: bool = mesh.rank("dp") in late) -> None:
            model.register_forward_pre_hook(lambda *_: time.sleep(sleep * late))

        with ExitStack() as stack:
            if not sleep and mesh.rank("dp") in late:
                stack.enter_context(mock.patch.object(Link, "_sums", wait_for_the_end))
            trace = run_layout(job, mesh, steps, watch)
        for step, norm in enumerate(plain.norms):
            for key, part in plain.grads[step].items():
                apart = float((trace.grads[step][key].values - part.values).norm())
                worst = max(
                    worst, apart / norm, abs(trace.losses[step] - plain.losses[step])
                )
    return compare_with_one_device(plain, job, mesh), worst


WORDS: dict[str, dict[str, Any]] = {
    "gradient": {"stragglers": 2},
    "m-sgc": {"stragglers": 1, "jobs": 2},
}
#: Words of a code, who is late in turn, and how: in any round, or by so many seconds in a pass.
CASES: list[tuple[str, dict[str, Any], list[tuple[int, ...]], float]] = [
    ("gradient", {"stragglers": 2}, [(0, 1), (3,)], 0),
    ("sr-sgc", {"stragglers": 2, "jobs": 3}, [(1,)], 0.05),
    ("m-sgc", {"stragglers": 1, "jobs": 2}, [(2,)], 0.05),
    ("gradient", {"stragglers": 1}, [(rank,) for rank in range(4)], 0),
    (
        "gradient",
        {"stragglers": 2, "jobs": 2},
        [*combinations(range(4), 2), *combinations(range(4), 1)],
        0,
    ),
    (
        "gradient",
        {"stragglers": 3},
        [*combinations(range(4), 3), *combinations(range(4), 2)],
        0,
    ),
    (
        "sr-sgc",
        {"stragglers": 2, "jobs": 2, "window": 3, "burst": 2},
        [(rank,) for rank in range(4)],
        0.05,
    ),
    (
        "m-sgc",
        {"stragglers": 2, "jobs": 3, "window": 3},
        [(0, 1), (1, 2), (3, 0)],
        0.05,
    ),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.slow] * (i >= 3)) for i, c in enumerate(CASES)],
)
def test_steps_over_ranks_are_those_of_one_device(
    pool: Any, corpus: str, case: Any
) -> None:
    """Whoever is late: gradients, norm, loss and parameters, of a batch that no number of parts divides."""
    kind, words, late, sleep = case
    words = {f"resilience__{key}": value for key, value in words.items()}
    settings = recipe(
        corpus,
        layout__dp=4,
        train__batch=13,
        train__micro_batch=2,
        resilience__code=kind,
        **words,
    )
    (difference, _), *_ = found = pool.run(
        4, proof, settings.model_dump(mode="json"), late, sleep, 2, timeout=120
    )
    assert difference.ok, difference
    assert all(worst < 1e-10 for _, worst in found)


def straggle(rounds: list[int | None]) -> tuple[list[float], list[list[int]]]:
    """Steps of one part per rank, one of which is late: the sums, and who was in time."""
    group = dist.group.WORLD
    code = GradientCode(group.size(), 1)
    link = connect_ranks(code, group, 20.0, 1.0)
    sums, arrived = [], []
    for step, late in enumerate(rounds):

        def compute(
            task: Any, over: Any, step: int = step, late: int | None = late
        ) -> Sum:
            while link.rank == late and not over():
                time.sleep(0.002)
            time.sleep(0.1 * (link.rank == late))  # others are steps ahead
            value = sum(
                w * 10.0**part
                for part, w in zip(task.parts, task.coefficients, strict=True)
            )
            return Sum(np.array([value * (step + 1)]), np.zeros(1))

        last = link.take_step(code, compute, flag=step == 2 and link.rank == 1)
        assert last.total is not None and last.flag <= (step >= 2)
        sums.append(float(last.total.vector[0]))
        arrived.append(sorted(last.arrived))
    dist.barrier()
    return sums, arrived


def test_late_results_are_dropped(pool: Any) -> None:
    """A rank that comes with a result when its round is over, or several are, changes nothing."""
    found = pool.run(3, straggle, [None, 2, None, None, None, 0, 0, 1])
    assert [sums for sums, _ in found] == [found[0][0]] * 3 and [
        a for _, a in found
    ] == [found[0][1]] * 3
    assert found[0][0] == pytest.approx([111.0 * (step + 1) for step in range(8)])
    assert [found[0][1][i] for i in (1, 5, 6, 7)] == [[0, 1], [1, 2], [1, 2], [0, 2]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["gradient", pytest.param("m-sgc", marks=pytest.mark.soak)]
)
def test_a_run_with_a_late_rank_is_that_without(
    pool: Any, corpus: str, tmp_path: Path, kind: str
) -> None:
    """All of a run, with its ledger of samples, checkpoints and validations; another layout goes on with it."""
    words = {f"resilience__{key}": value for key, value in WORDS[kind].items()}
    coded = tree(corpus, {"dp": 4}, resilience__code=kind, **words)
    assert pool.run(4, late_run, coded, str(tmp_path / "coded")) == [(6, 30)] * 4
    pool.run(1, go, tree(corpus, {}), str(tmp_path / "plain"))
    assert series(tmp_path / "coded") == pytest.approx(
        series(tmp_path / "plain"), rel=1e-10
    )
    assert series(tmp_path / "coded", "validation") == pytest.approx(
        series(tmp_path / "plain", "validation")
    )
    there = str(tmp_path / "coded/checkpoints/step-000003")
    pool.run(2, go, tree(corpus, {"shard": 2}), str(tmp_path / "on"), there)
    again = {
        step: loss for step, loss in series(tmp_path / "plain").items() if step > 3
    }
    assert series(tmp_path / "on") == pytest.approx(again, rel=1e-10)


def late_run(values: dict[str, Any], out: str) -> tuple[int, int]:
    if dist.get_rank() != 1:
        return go(values, out)

    def sleepy(link: Link, *rest: Any) -> Any:
        time.sleep(0.05)
        return computed(link, *rest)

    with mock.patch.object(Link, "_sums", sleepy):
        return go(values, out)


def test_fewer_ranks_are_fewer_replicas(corpus: str) -> None:
    """A code goes with whole replicas alone, and a rank that is left by itself needs none."""
    settings = recipe(
        corpus, layout__dp=4, resilience__code="gradient", resilience__stragglers=1
    )
    found = [recipe_for(settings, settings.model, ranks).layout for ranks in (3, 2, 1)]
    assert [str(layout) for layout in found] == [
        str(Layout(dp=ranks)) for ranks in (3, 2, 1)
    ]


def leave(wait: float) -> str:
    link = connect_ranks(GradientCode(3, 1), dist.group.WORLD, wait, 1.0)
    if link.rank:
        if wait > 1:
            del link
            dist.barrier()
        else:
            dist.barrier()
            del link
        return ""
    with pytest.raises(PeerLost) as error:
        link.take_step(
            GradientCode(3, 1), lambda task, over: Sum(np.zeros(1), np.zeros(1)), False
        )
    dist.barrier()
    return str(error.value)


@pytest.mark.parametrize(
    ("wait", "why"),
    [
        (20.0, "rank 1 and 2 is gone, and a gradient"),
        (0.3, "rank 1 and 2 has sent no coded gradient of step 1"),
    ],
)
def test_too_few_ranks_end_the_run(pool: Any, wait: float, why: str) -> None:
    assert why in pool.run(3, leave, wait)[0]
