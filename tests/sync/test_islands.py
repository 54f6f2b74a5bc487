"""Islands that agree: exactly as one, in every step; and nothing of a step leaves its island but by streams."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import recipe, write_corpus
from tests.conftest import Command
from weft.checkpoint.boxes import ROOT
from weft.checkpoint.levels import levels_of
from weft.checkpoint.store import committed_checkpoints
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.observe.run_metrics import read_metrics
from weft.prove.equality import Difference, compare_with_one_device, run_layout
from weft.recipe import Checkpoint, Sync, build_recipe
from weft.recipe.conflicts import links_all
from weft.resilience.company import Company
from weft.shapes.parameters import parameters
from weft.sync.compress import build_compressor
from weft.sync.compressor import Compressor
from weft.sync.presence import StopRequest
from weft.sync.rounds import begins, fragment_of, partners, shares
from weft.sync.streams import Streams, open_streams
from weft.train.guard import Guard
from weft.train.island_exchange import IslandExchange
from weft.train.islands import Apart
from weft.train.runs import Run, counterpart_checkpoint
from weft.train.setup import prepare
from weft.train.training import open_loop, train_job

LAYOUTS = [
    "island=2,shard=2",
    "island=2,pp=2",
    pytest.param("island=2,tp=2", marks=pytest.mark.slow),
    pytest.param("island=2,dp=2,cp=2", marks=pytest.mark.slow),
    pytest.param("order=tp island,island=2,tp=2", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def tree(corpus: str, layout: str, **change: Any) -> dict[str, Any]:
    values = recipe(corpus, **change).model_dump(mode="json")
    return values | {"layout": Layout.parse(layout).model_dump(mode="json")}


def difference(values: dict[str, Any], steps: int = 3) -> Difference | None:
    """On every rank: its island, and on the first one what differs most from one device, or from a simulation."""
    asked = build_recipe(values)
    mesh, job = Mesh.create(asked.layout, "cpu"), prepare(asked)
    return compare_with_one_device(run_layout(job, mesh, steps), job, mesh)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_islands_that_agree_in_every_step_are_one_device(
    pool: Any, corpus: str, layout: str
) -> None:
    values = tree(corpus, layout, optimizer__clip=0.1)
    found = pool.run(Layout.parse(layout).world, difference, values, timeout=200)
    assert [one.ok for one in found if one is not None] == [True], found


#: How islands of one rank agree, in threads of this process.
OUTER: list[tuple[int, dict[str, Any]]] = [
    (2, {"every": 1}),  # which is one device
    (3, {"every": 1}),
    (3, {"every": 2, "update": "average"}),
    (3, {"every": 1, "update": "average", "partner": "ring"}),
    (3, {"every": 1, "update": "average", "partner": "pairs"}),
    (
        4,
        {
            "every": 1,
            "update": "average",
            "partner": "graph",
            "graph": [(0, 1), (1, 2), (1, 3), (3, 1)],
        },
    ),
    (2, {"every": 2, "update": "nesterov"}),
    (2, {"every": 3, "update": "streaming", "fragments": 3, "delay": 1}),
    (2, {"every": 2, "update": "streaming", "fragments": 2, "mix": 0.25}),
    (3, {"every": 1, "update": "eager", "momentum": 0.5}),
    (2, {"every": 2, "update": "co2", "penalty": 2.0, "clip": 1e-4}),
    (4, {"every": 1, "update": "noloco"}),
]


def in_threads(values: dict[str, Any], steps: int) -> Difference:
    """The same for islands of one rank each, all in this process."""
    given_recipe, store = build_recipe(values), dist.HashStore()
    job, count = prepare(given_recipe), given_recipe.layout.island
    meshes = [
        replace(Mesh.single(), island=i, islands=count, island_store=store)
        for i in range(count)
    ]
    with ThreadPoolExecutor(count) as threads:
        found = threads.map(
            lambda mesh: compare_with_one_device(
                run_layout(job, mesh, steps), job, mesh
            ),
            meshes,
        )
        return next(one for one in found if one is not None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("count", "sync"),
    OUTER,
    ids=lambda value: str(value).translate({34: None, 39: None}),
)
def test_islands_are_what_one_process_simulates(
    corpus: str, count: int, sync: dict[str, Any]
) -> None:
    found = in_threads(
        tree(corpus, f"island={count}", train__steps=20, optimizer__clip=0.1)
        | {"sync": sync},
        5 * sync["every"],
    )
    assert found.ok, found


#: The same with compressed messages: what keeps everything is exact.
OUTER.append((3, {"every": 1, "update": "nesterov", "compress": "topk:1"}))

#: Bytes that an island sends of every parameter in a round, in float32.
SENT: list[tuple[int, dict[str, Any], float]] = [
    (2, {"every": 2, "update": "nesterov"}, 4),
    (3, {"every": 2, "update": "average"}, 4 * 4 / 3),
    (2, {"every": 2, "update": "streaming", "fragments": 2, "delay": 1}, 4),
    (2, {"every": 2, "update": "eager"}, 4),
    (2, {"every": 2, "update": "co2"}, 4),
    (4, {"every": 2, "update": "noloco"}, 8),
    (3, {"every": 2, "partner": "ring"}, 8),
    (4, {"every": 2, "partner": "pairs"}, 4),
    (2, {"every": 2, "update": "nesterov", "compress": "int8"}, 1 + 2 / 128),
    (
        2,
        {"every": 2, "update": "streaming", "delay": 1, "compress": "int4"},
        0.5 + 2 / 128,
    ),
]


def bytes_sent(
    values: dict[str, Any], steps: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, int, int]:
    """Bytes of messages that an island sends on average, with what is around them, and how many parameters it has."""
    all_streams: list[Streams] = []

    @contextmanager
    def counted(*given: Any) -> Iterator[Streams | None]:
        with open_streams(*given) as streams:
            all_streams.append(streams)
            yield streams

    monkeypatch.setattr("weft.prove.equality.open_streams", counted)
    given_recipe, store = build_recipe(values), dist.HashStore()
    job, count = prepare(given_recipe), given_recipe.layout.island
    meshes = [
        replace(Mesh.single(), island=i, islands=count, island_store=store)
        for i in range(count)
    ]
    with ThreadPoolExecutor(count) as threads:
        traces = list(threads.map(lambda mesh: run_layout(job, mesh, steps), meshes))
    sizes = sum(part.values.numel() for part in traces[0].params.values())
    return (
        sum(s.sent for s in all_streams) / count,
        sum(s.around for s in all_streams) // count,
        sizes,
    )


@pytest.mark.parametrize(
    ("count", "sync", "each"),
    SENT,
    ids=lambda value: str(value).translate({34: None, 39: None}),
)
def test_bytes_on_the_wire_are_those_of_the_formula(
    corpus: str,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    sync: dict[str, Any],
    each: float,
) -> None:
    values = tree(corpus, f"island={count}", train__dtype="float32") | {"sync": sync}
    sent, around, parameters = bytes_sent(values, 4, monkeypatch)
    assert sent == pytest.approx(2 * each * parameters, rel=0.01)
    assert around < 0.01 * 4 * parameters


@pytest.mark.slow
def test_rare_and_small_messages_are_so_many_times_less(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = tree(
        corpus, "island=2", train__dtype="float32", train__steps=20, train__batch=2
    )
    often = bytes_sent(values, 20, monkeypatch)[0]
    rare = bytes_sent(
        values | {"sync": {"every": 20, "update": "nesterov"}}, 20, monkeypatch
    )[0]
    small = {"every": 20, "update": "nesterov", "compress": "int4"}
    assert often / rare == pytest.approx(20, rel=0.01)
    assert often / bytes_sent(values | {"sync": small}, 20, monkeypatch)[0] >= 150


#: A compressor, and how much of the bytes of one setting for all are left at most if L-GreCo chooses.
CHOSEN = [("powersgd:4", 0.95), ("topk:0.05", 0.9), ("randk:0.2", 0.95), ("int6", 1.0)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("word", "share"), CHOSEN)
def test_settings_that_are_chosen_send_less_and_make_one_model(
    corpus: str, monkeypatch: pytest.MonkeyPatch, word: str, share: float
) -> None:
    """L-GreCo in a run: the first island chooses anew in every other round, and all end with the same anchors."""
    change = {
        "train__dtype": "float32",
        "train__steps": 20,
        "model__embed": 32,
        "model__ffn": 64,
    }
    values = tree(corpus, "island=3", **change)
    sync = {"every": 2, "update": "nesterov", "compress": word}
    choices: list[Mapping[str, Compressor]] = []

    def watched(*given: Any) -> Mapping[str, Compressor]:
        choices.append(choose(*given))
        return choices[-1]

    choose = IslandExchange.allocation
    monkeypatch.setattr(IslandExchange, "allocation", watched)
    chosen, _, _ = bytes_sent(values | {"sync": sync | {"allocate": 2}}, 4, monkeypatch)
    # Nobody has a round before all have ended the last.
    rounds = [choices[i : i + 3] for i in range(0, len(choices), 3)]
    assert len(rounds) == 2 and all(one == each[0] for each in rounds for one in each)
    assert len({*rounds[0][0].values()}) > 1
    sizes = {p.name: p.shape for p in parameters(prepare(build_recipe(values)).shape)}
    assert rounds[0][0].keys() == sizes.keys()
    usual = build_compressor(word)
    alike, less = (
        sum(
            setting[name].nbytes((prod(shape),) if "power" not in word else shape)
            for name, shape in sizes.items()
        )
        for setting in (dict.fromkeys(sizes, usual), rounds[0][0])
    )
    assert less <= share * alike
    if "power" not in word:  # whose rings of two have another formula
        # two rounds, there and back
        assert chosen == pytest.approx(2 * 2 * 2 / 3 * less, rel=0.15)


def test_one_setting_chosen_for_all_is_exact_where_nothing_may_be_lost(
    corpus: str,
) -> None:
    """With no error allowed, L-GreCo leaves out nothing but zeros: the run is the one that one process simulates."""
    sync = {"every": 1, "update": "nesterov", "compress": "topk:1", "allocate": 2}
    found = in_threads(
        tree(corpus, "island=3", train__steps=20, optimizer__clip=0.1) | {"sync": sync},
        5,
    )
    assert found.ok, found


CUT = [
    ("island=2,shard=2", {"every": 2, "update": "nesterov", "momentum": 0.5}),
    ("island=2,pp=2", {"every": 2, "update": "streaming", "fragments": 2, "delay": 1}),
    (
        "island=2,dp=2",
        {
            "every": 2,
            "update": "streaming",
            "fragments": 2,
            "delay": 1,
            "compress": "topk:1",
        },
    ),
    ("island=2,dp=2,ep=2", {"every": 2, "update": "co2"}),
]


def sent_by(values: dict[str, Any]) -> tuple[int, int]:
    """On every rank: bytes of messages, and the parameters that it holds."""
    asked, found = build_recipe(values), list[Streams]()
    mesh = Mesh.create(asked.layout, "cpu")

    @contextmanager
    def noted(*given: Any) -> Iterator[Streams | None]:
        with open_streams(*given) as streams:
            found.append(streams)
            yield streams

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.prove.equality.open_streams", noted)
        trace = run_layout(prepare(asked), mesh, 2)
    return found[0].sent, sum(part.values.numel() for part in trace.params.values())


@pytest.mark.parametrize(
    "sync", [{}, {"every": 2, "update": "nesterov", "compress": "int8"}]
)
def test_replicas_of_an_island_send_a_part_each(
    pool: Any, corpus: str, sync: dict[str, Any]
) -> None:
    values = tree(corpus, "island=2,dp=2", train__dtype="float32", train__steps=2) | {
        "sync": sync
    }
    for sent, count in pool.run(4, sent_by, values, timeout=200):
        assert sent == pytest.approx(
            (1 + 2 / 128 if sync else 2 * 4) * count / 2, rel=0.02
        )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("layout", "sync"), CUT)
def test_islands_that_are_cut_are_what_one_process_simulates(
    pool: Any, corpus: str, layout: str, sync: dict[str, Any]
) -> None:
    experts = {"model__experts": 2} if "ep" in layout else {}
    values = tree(corpus, layout, train__steps=20, **experts) | {"sync": sync}
    found = pool.run(Layout.parse(layout).world, difference, values, 4, timeout=200)
    assert [one.ok for one in found if one is not None] == [True], found


def planted(values: dict[str, Any], where: str, off: float) -> Difference | None:
    """On every rank: as :func:`difference`, with a relative error in one kind of what it has for the keys' adapters."""
    asked = build_recipe(values)
    mesh, job = Mesh.create(asked.layout, "cpu"), prepare(asked)
    trace = run_layout(job, mesh, 2)
    for name, part in (
        trace.params if where == "params" else trace.slots[where]
    ).items():
        if name.endswith(("wk.a", "wk.b")):
            # Where a processor's rounding leaves nothing, a little of nothing is nothing.
            part.values.mul_(1 + off) if part.values.any() else part.values.add_(off)
    return compare_with_one_device(trace, job, mesh)


#: Relative errors, and whether they are differences.
PLANTED = [
    ("params", 0.0, True),
    ("exp_avg", 1e-8, False),
    ("exp_avg_sq", 1e-8, False),
    ("params", 1e-8, False),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("where", "off", "ok"), PLANTED)
def test_rounding_is_no_difference_of_islands_but_little_more_is(
    pool: Any, corpus: str, where: str, off: float, ok: bool
) -> None:
    """Only keys' adapters learn, and every query sees one key: gradients are rounding, which Adam enlarges."""
    sizes = {"model__layers": 3, "data__seq_len": 1}
    values = tree(
        corpus, "island=2,cp=2", adapter__kind="lora", adapter__targets=["wk"], **sizes
    )
    found = pool.run(
        4, planted, values | {"sync": {"update": "co2"}}, where, off, timeout=200
    )
    assert [one.ok for one in found if one is not None] == [ok], found


def go(values: dict[str, Any], out: str, resume: str | None = None) -> int:
    """Train on this rank; how many ranks can be in any collective of it."""
    asked = build_recipe(values)
    mesh = Mesh.create(asked.layout, "cpu")
    train_job(prepare(asked), mesh, Path(out), resume)
    return dist.get_world_size()


def series(run: Path, name: str = "loss") -> dict[int, float]:
    return {record["step"]: record[name] for record in read_metrics(run)["train"]}


@pytest.mark.slow
def test_a_run_of_islands_that_agree_in_every_step_is_one_of_replicas(
    pool: Any, corpus: str, tmp_path: Path
) -> None:
    change = {"validation__every": 3, "checkpoint__every": 3}
    pool.run(2, go, tree(corpus, "dp=2", **change), str(tmp_path / "replicas"))
    assert pool.run(
        2, go, tree(corpus, "island=2", **change), str(tmp_path / "run")
    ) == [1, 1]
    whole = series(tmp_path / "replicas")
    # each island has records and checkpoints
    for run in (tmp_path / "run", tmp_path / "run" / "island-1"):
        assert series(run) == pytest.approx(whole, rel=1e-10)
        assert series(run, "tokens") == series(tmp_path / "replicas", "tokens")
        assert [p.name for p in committed_checkpoints(run / "checkpoints")] == [
            "step-000003",
            "step-000006",
        ]


GOING_ON: list[dict[str, Any]] = [
    {"every": 2, "update": "nesterov"},
    {"every": 3, "update": "streaming", "fragments": 3, "delay": 2, "compress": "int8"},
    {"every": 2, "update": "co2", "compress": "topk:0.1"},
]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("sync", GOING_ON, ids=lambda sync: sync["update"])
def test_islands_go_on_as_if_they_had_not_stopped(
    pool: Any, corpus: str, tmp_path: Path, sync: dict[str, Any]
) -> None:
    """Between two rounds: islands have parameters of their own, messages owe something, answers are awaited."""
    values = tree(corpus, "island=2", checkpoint__every=3) | {"sync": sync}
    pool.run(2, go, values, str(tmp_path / "run"))
    runs = [tmp_path / "run", tmp_path / "run" / "island-1"]
    whole = [series(run) for run in runs]
    assert whole[0] != whole[1]
    for run in runs:
        shutil.rmtree(run / "checkpoints/step-000006")
    pool.run(2, go, values, str(tmp_path / "run"), "auto")
    assert [series(run) for run in runs] == whole
    # More islands: a new one begins with what the first has.
    values |= {"layout": {"island": 3}, "train": values["train"] | {"steps": 8}}
    pool.run(3, go, values, str(tmp_path / "run"), "auto")
    assert [max(series(run)) for run in (*runs, tmp_path / "run" / "island-2")] == [
        8,
        8,
        8,
    ]


@pytest.mark.parametrize("name", ["step-000003", "step-000003-2"])
def test_an_island_resumes_from_its_own_checkpoint_of_another_folder(
    tmp_path: Path, name: str
) -> None:
    """Whatever folder the run goes on in, and however often the step was reached there."""
    for run in (tmp_path / "a", tmp_path / "a" / "island-1"):
        for each in ("step-000003", "step-000003-2", "step-000006"):
            (run / "checkpoints" / each).mkdir(parents=True)
            (run / "checkpoints" / each / ROOT).touch()
    store = dist.HashStore()
    first = tmp_path / "a" / "checkpoints" / name
    store.set("weft/resumed", str(first))
    for folder in (tmp_path / "a", tmp_path / "b"):
        run = Run(folder, [str(first)], levels_of(Checkpoint(), folder / "island-1"))
        own = counterpart_checkpoint(run, "island-1", store)
        assert own == str(tmp_path / "a" / "island-1" / "checkpoints" / name)
    run = Run(tmp_path / "b", [str(first)], levels_of(Checkpoint(), tmp_path / "c"))
    assert counterpart_checkpoint(run, "island-2", store) == str(first)


def ended(values: dict[str, Any], out: str) -> dict[str, torch.Tensor]:
    """Train on this rank; its parameters at the end, and as a method keeps them beside."""
    asked = build_recipe(values)
    mesh, kept = Mesh.create(asked.layout, "cpu"), dict[str, torch.Tensor]()
    with ExitStack() as stack:
        loop = open_loop(prepare(asked), mesh, Guard(Path(out), None), stack)
        loop.run()
        for h in loop.step.state.learning:
            kept[h.name] = h.local.detach().clone()
            for slot in asked.sync.method.following:
                kept[f"{h.name} {slot}"] = h.slots[slot].values.clone()
    return kept


ONE_MODEL: list[dict[str, Any]] = [
    {"update": "dadao"},
    {"every": 2, "update": "noloco"},
    {"every": 2, "update": "average", "partner": "pairs"},
    {"every": 2, "update": "nesterov"},
    {"every": 2, "update": "streaming", "fragments": 2, "delay": 1},
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sync", ONE_MODEL, ids=lambda sync: sync["update"])
def test_a_run_of_islands_ends_with_their_mean(
    pool: Any, corpus: str, tmp_path: Path, sync: dict[str, Any]
) -> None:
    """After three steps, also in the middle of a round; what a method keeps of parameters moves with them."""
    values = tree(corpus, "island=2", train__steps=3, validation__every=0)
    own, mean = (
        pool.run(
            2,
            ended,
            values | {"sync": {**sync, "at_end": end}},
            str(tmp_path / end),
            timeout=200,
        )
        for end in ("own", "mean")
    )
    assert any(not torch.equal(own[0][key], own[1][key]) for key in own[0])
    for key in own[0]:
        name = key.partition(" ")[0]
        middle = (own[0][name] + own[1][name]) / 2
        for apart, joined in zip(own, mean, strict=True):
            wanted = apart[key] + (middle - apart[name])
            torch.testing.assert_close(joined[key], wanted, rtol=0, atol=1e-12)


def ended_by_island(values: dict[str, Any], out: str) -> tuple[int, str, torch.Tensor]:
    """Train on this rank while the second island asks for the end; steps, why the run ended, and parameters."""
    asked = build_recipe(values)
    mesh = Mesh.create(asked.layout, "cpu")
    with ExitStack() as stack:
        loop = open_loop(prepare(asked), mesh, Guard(Path(out), None), stack)
        if mesh.island == 1 and asked.sync.of_gradients:
            loop.callbacks.running.stop("enough")
        elif mesh.island == 1:
            loop.lowest.why_enough = lambda step: "as low as asked for"  # type: ignore[method-assign]
        loop.run()
        flat = [h.local.detach().flatten().clone() for h in loop.step.state.learning]
    return loop.progress.step, loop.enough, torch.cat(flat)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sync", [
    {"every": 2, "update": "streaming", "fragments": 2, "delay": 1},
    {"every": 1},
    {"update": "dadao"},
], ids=lambda sync: sync.get("update", "summed"))  # fmt: skip
def test_an_island_that_has_enough_ends_all_as_a_complete_run(
    pool: Any, corpus: str, tmp_path: Path, sync: dict[str, Any]
) -> None:
    """By its validation loss or a callback: after the same step everywhere, with one model."""
    values = tree(corpus, "island=2", train__steps=40, validation__every=0)
    first, second = pool.run(
        2, ended_by_island, values | {"sync": sync}, str(tmp_path / "run"), timeout=200
    )
    assert first[0] == second[0] < 40
    assert first[1] == second[1] != ""
    torch.testing.assert_close(first[2], second[2], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("asked", "together"), [(None, True), (4, True), (3, False)])
def test_a_stop_in_the_last_round_lets_nobody_wait_for_who_ends_alone(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, together: bool
) -> None:
    """Of pairs some may not have heard of it: they would take the mean, and wait for islands that have ended."""
    ends = list[object]()
    monkeypatch.setattr(
        "weft.train.one_model.end_with_mean", lambda *of: ends.append(of) or "mean"
    )
    apart = object.__new__(Apart)
    apart.how = Sync(every=2, update="average", partner="pairs")
    apart.steps, apart.method, apart.under_way = 6, apart.how.method, {}
    apart.mesh, apart.context = Mesh.single(), Mock()
    apart.presence = Mock(stop_request=lambda: asked and StopRequest(asked, []))
    apart.conclude()
    assert bool(ends) == together and apart.ending


@pytest.mark.parametrize(("partner", "heard"), [("pairs", True), ("all", False)])
def test_a_stop_is_heard_of_an_island_that_has_gone(partner: str, heard: bool) -> None:
    """Of pairs one may have waited for that island meanwhile; all others have heard of it in an exchange."""
    company = object.__new__(Company)
    company.changed, company.party = threading.Condition(), Mock()
    company.attendance = Mock(how=Sync(every=2, update="average", partner=partner))
    company.attendance.members = {1: {0: 1}}
    company.membership = Mock(published={0: {"stop": [3, []]}, 1: {}})
    assert company.stop_request() == (StopRequest(3, []) if heard else None)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 6), st.integers(0, 40))
def test_every_parameter_has_one_round_in_so_many_steps(
    blocks: int, every: int, fragments: int, begun: int
) -> None:
    """Of whatever fragments, after whatever step."""
    how = Sync(every=every, update="streaming", fragments=fragments)
    for name in [
        "embedding",
        "norm.scale",
        *(f"blocks.{i}.ffn.up" for i in range(blocks)),
    ]:
        f = fragment_of(name, fragments)
        assert 0 <= f < fragments
        assert (
            sum(begins(step, f, how) for step in range(begun + 1, begun + every + 1))
            == 1
        )


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 33), st.integers(0, 500), st.sampled_from(["all", "pairs", "ring"])
)
def test_partners_have_each_other(islands: int, number: int, partner: str) -> None:
    found = [
        partners(i, range(islands), Sync(partner=partner), number)
        for i in range(islands)
    ]
    assert all(i in group for i, group in enumerate(found))
    assert all(i in found[j] for i, group in enumerate(found) for j in group)
    if partner == "pairs":
        assert sorted(map(len, found)) == [1] * (islands % 2) + [2] * (
            islands - islands % 2
        )


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_neighbours_in_a_graph_keep_the_mean(data: st.DataObject) -> None:
    """Each island's shares are one together, and what all take of one is one: also with some of them away."""
    count = data.draw(st.integers(2, 9))
    links = {(data.draw(st.integers(0, i - 1)), i) for i in range(1, count)}
    how = Sync(
        partner="graph",
        graph=tuple(links | {(b, a) for a, b in links if data.draw(st.booleans())}),
    )
    assert links_all(how.graph, count) and not links_all(how.graph, count + 1)
    here = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    taken = torch.zeros(count, count, dtype=torch.float64)
    for i in here:
        group = [one for one in partners(i, range(count), how, 0) if one in here]
        taken[i, group] = torch.tensor(shares(i, group, how), dtype=torch.float64)
    mine = torch.tensor([float(i in here) for i in range(count)], dtype=torch.float64)
    assert taken.min() >= 0 and all(
        torch.allclose(taken.sum(dim), mine) for dim in (0, 1)
    )


def test_a_rank_above_the_matrix_and_an_unknown_compressor_are_one_line(
    command: Command,
) -> None:
    for sync, said in [
        ("compress=powersgd:100", "has a rank above the "),
        ("compress=int9", "there is no compressor 'int9'; did you mean 'int"),
        ("update=diloco", "DiLoCo is update = 'nesterov'"),
        ("every=1000", "sync.every = 1000 is beyond the run's train.steps = 40"),
    ]:
        for words in (["train"], ["verify"]):
            code, _, err = command(
                *words, "islands", "--layout", "island=2", "--set", f"sync.{sync}"
            )
            assert code == 2 and said in err and len(err.strip().splitlines()) <= 3, err
