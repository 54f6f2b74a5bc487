"""Pipelines equal one device, whatever the schedule, and use the memory that the simulator says."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from tests.cases import recipe, write_corpus
from weft.data.batch import Batch
from weft.data.loader import Loader
from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.parallel.build import check_fits, parallelize
from weft.prove.equality import Difference, compare_with_one_device, run_layout
from weft.recipe import ModelShape, build_recipe
from weft.schedule.build import builders
from weft.schedule.simulate import simulate, uniform_costs
from weft.techniques.phases.post_validation.late_norm import PostValidation
from weft.train.build_step import build_step
from weft.train.setup import Job, build_for_training, prepare
from weft.train.step import StepContext, evaluate, reduced_gradients


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def tree(corpus: str, layout: str, batch: int, **change: Any) -> dict[str, Any]:
    base = {
        "model__layers": 8,
        "train__micro_batch": 1,
        "train__batch": batch,
        "model__embed": 16,
        "model__ffn": 21,
    }
    settings = recipe(corpus, **base | change)
    return settings.model_copy(update={"layout": Layout.parse(layout)}).model_dump(
        mode="json"
    )


class Uneven(Loader):
    """Microbatches of different lengths: each keeps another number of the first tokens of its row."""

    def step(self, position: int) -> list[Batch] | None:
        batches = super().step(position)
        assert batches is not None
        return [cut(b, 18 - 2 * (i % 5)) for i, b in enumerate(batches)]


def cut(batch: Batch, length: int) -> Batch:
    bounds = [0, *(c for c in batch.cu_seqlens.tolist() if 0 < c < length), length]
    kept = (x[:, :length] for x in (batch.tokens, batch.labels, batch.positions))
    return Batch(*kept, torch.tensor(bounds, dtype=torch.int32))


class UnevenJob(Job):
    def loader(self, order: Any, mesh: Mesh) -> Loader:
        return Uneven(**vars(super().loader(order, mesh)))


def differences(
    trees: list[dict[str, Any]], uneven: bool = False
) -> list[tuple[Difference | None, bool]]:
    """On every rank: each job against one device, and whether counted and simulated peak of activations agree."""
    found = []
    for values in trees:
        settings = build_recipe(values)
        mesh = Mesh.create(settings.layout, "cpu")
        job = prepare(settings)
        if uneven:
            job = UnevenJob(**vars(job))
        pipelines: list[Any] = []
        mine = run_layout(
            job,
            mesh,
            steps=3,
            watch=lambda model, state, seen=pipelines: seen.append(model.pipeline),
        )
        proof = compare_with_one_device(mine, job, mesh)
        pipeline = pipelines[0]
        microbatches = [m for m, forward_only in pipeline.tables if not forward_only]
        table = pipeline.place.table(microbatches[-1])
        expected = (
            simulate(table, uniform_costs(table)).peaks[pipeline.here.rank]
            * table.stages
            / len(table.ranks)
        )
        found.append((proof, pipeline.last.peak == expected))
    return found


def check(found: list[list[tuple[Difference | None, bool]]]) -> None:
    for difference, _ in found[0]:
        assert difference is not None and difference.ok, difference
    assert all(same for rank in found for _, same in rank)


def mostly_slow(*quick: str) -> list[Any]:
    """All schedules as parameters; those that are not ``quick`` are slow."""
    return [
        pytest.param(name, marks=[] if name in quick else [pytest.mark.slow])
        for name in builders()
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "schedule", mostly_slow("gpipe", "1f1b", "interleaved-1f1b", "zb-v", "dualpipe")
)
def test_every_schedule(pool: Any, corpus: str, schedule: str, ranks: int) -> None:
    """With one microbatch, fewer than ranks or more and no multiple of them, and twice as many."""
    counts = [1, ranks - 1, 2 * ranks] if ranks > 2 else [1, 3, 4]
    # Two layers per stage where a rank has two stages, else up to four.
    trees = [
        tree(corpus, f"pp={ranks},schedule={schedule}", count, model__layers=2 * ranks)
        for count in counts
    ]
    check(pool.run(ranks, differences, trees))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", mostly_slow("zb-h1"))
def test_microbatches_of_different_lengths(
    pool: Any, corpus: str, schedule: str
) -> None:
    check(
        pool.run(4, differences, [tree(corpus, f"pp=4,schedule={schedule}", 7)], True)
    )


#: Whether a case is for every day.
WHERE = {True: pytest.mark.slow, False: pytest.mark.soak}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("schedule", "beside"), [
    pytest.param(schedule, beside, marks=[] if j == 2 and schedule == "v-half" else WHERE[i % 2 == j])
    for i, schedule in enumerate(builders())
    for j, beside in enumerate(["shard=2", "tp=2", "shard=2,tp=2"])
    if (schedule == "v-half") <= (j == 2)
])  # fmt: skip
def test_composed_with_shard_and_tp(
    pool: Any, corpus: str, schedule: str, beside: str
) -> None:
    """Each under one of the two, and one of them under both; :func:`test_composed` has all axes beside each other."""
    layout = Layout.parse(f"pp=2,{beside},schedule={schedule}")
    change = {"model__tied": schedule < "h", "model__layers": 4}
    check(pool.run(layout.world, differences, [tree(corpus, str(layout), 5, **change)]))


COMPOSED = [
    ("pp=2,dp=2,shard=2,zero=1,schedule=zb-v", "none"),
    ("pp=2,dp=2,shard=2,zero=2,schedule=1f1b", "selective"),
    ("pp=2,cp=2,dp=2,schedule=zb-h1", "full"),
    ("pp=4,cp=2,context=ulysses,schedule=dualpipe", "selective"),
    ("pp=3,tp=2,schedule=interleaved-1f1b", "none"),
    ("pp=2,virtual=3,schedule=interleaved-1f1b", "full"),
    ("pp=4,vocab_barriers=1,schedule=1f1b", "none"),
    ("pp=4,vocab_barriers=2,schedule=1f1b", "selective"),
    ("pp=2,vocab_barriers=1,shard=2,tp=2,schedule=zb-v", "full"),
    ("pp=2,vocab_barriers=2,shard=2,zero=2,schedule=zb-h1", "selective"),
    ("pp=2,vocab_barriers=1,cp=2,schedule=dualpipe", "none"),
    ("pp=2,vocab_barriers=2,tp=2,schedule=interleaved-1f1b", "full"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        pytest.param(*c, marks=[pytest.mark.slow] * (i % 2))
        for i, c in enumerate(COMPOSED)
    ],
)
def test_composed(pool: Any, corpus: str, layout: str, recompute: str) -> None:
    world = Layout.parse(layout).world
    change = {
        "train__recompute": recompute,
        "model__tied": "shard" in layout,
        "model__qkv_bias": True,
    }
    found = pool.run(
        world, differences, [tree(corpus, layout, 5, model__qk_norm=True, **change)]
    )
    assert found[0][0][0].ok, found[0][0][0]


@pytest.mark.parametrize(
    "layout",
    [
        "pp=4,skip=0.25",
        *(
            pytest.param(layout, marks=pytest.mark.soak)
            for layout in (
                "pp=4,skip=0.25,tp=2",
                "pp=4,dp=2,skip=0.25,vocab_barriers=1",
            )
        ),
    ],
)
def test_partial_pipeline_equals_one_device_that_skips_the_same(
    pool: Any, corpus: str, layout: str
) -> None:
    found = pool.run(Layout.parse(layout).world, differences, [tree(corpus, layout, 8)])
    assert found[0][0][0].ok, found[0][0][0]


def evaluated(values: dict[str, Any]) -> float:
    settings = build_recipe(values)
    mesh, job = Mesh.create(settings.layout, "cpu"), prepare(settings)
    model, state = parallelize(job.shape, mesh, settings.train)
    loader = job.loader(job.corpus.validation, mesh)
    steps = [loader.step(0), loader.step(settings.train.batch)]
    return evaluate(model, state, [s for s in steps if s], mesh)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "layout",
    ["pp=2,schedule=zb-v", "pp=2,schedule=dualpipe", "pp=2,vocab_barriers=1,tp=2"],
)
def test_evaluation_is_that_of_one_device(pool: Any, corpus: str, layout: str) -> None:
    found = pool.run(Layout.parse(layout).world, evaluated, tree(corpus, layout, 4))
    alone = pool.run(1, evaluated, tree(corpus, "", 4))
    assert all(loss == pytest.approx(alone[0], rel=1e-12) for loss in found)


def bfloat16_norms(values: dict[str, Any]) -> tuple[float, float]:
    settings = build_recipe(values)
    mesh, job = Mesh.create(settings.layout, "cpu"), prepare(settings)
    model, state = parallelize(job.shape, mesh, settings.train)
    batches = job.loader(job.corpus.train, mesh).step(0)
    assert batches is not None
    _, sums = reduced_gradients(model, state, batches, mesh)
    return sums[0].item(), sums[1].item() ** 0.5


def test_bfloat16_keeps_state_in_float32(pool: Any, corpus: str) -> None:
    values = tree(corpus, "pp=2,shard=2,schedule=zb-h1", 4, train__dtype="bfloat16")
    loss, norm = pool.run(4, bfloat16_norms, values)[0]
    exact_loss, exact_norm = pool.run(
        1, bfloat16_norms, tree(corpus, "", 4, train__dtype="float32")
    )[0]
    assert loss == pytest.approx(exact_loss, rel=0.01)
    assert norm == pytest.approx(exact_norm, rel=0.05)


def counted(values: dict[str, Any]) -> list[tuple[int, int]]:
    """What a rank says of its passes in the second step."""
    settings = build_recipe(values)
    mesh, job = Mesh.create(settings.layout, "cpu"), prepare(settings)
    loader, said = job.loader(job.corpus.train, mesh), list[tuple[int, int]]()
    model, state = build_for_training(
        job.shape, mesh, settings, passed=lambda done, of: said.append((done, of))
    )
    for position in (0, settings.train.batch):
        said.clear()
        reduced_gradients(model, state, loader.step(position) or [], mesh)
    return said


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "layout", ["", "pp=2", "pp=2,schedule=zb-v", "pp=2,vocab_barriers=1"]
)
def test_passes_are_counted_up_to_the_last(pool: Any, corpus: str, layout: str) -> None:
    values = tree(corpus, layout, 6)
    for said in pool.run(2, counted, values) if layout else [counted(values)]:
        done = [done for done, _ in said]
        assert (
            done == sorted(done)
            and set(range(1, 7)) <= set(done)
            and {of for _, of in said} == {6}
        )


def test_too_many_stages_is_refused() -> None:
    with pytest.raises(UsageError, match="needs 6"):
        check_fits(ModelShape(layers=4, vocab=257), Layout(pp=4, schedule="zb-v"))
    with pytest.raises(UsageError, match="1f1b"):
        check_fits(ModelShape(layers=4, vocab=257), Layout(pp=4, schedule="1f1c"))


def later_and_at_once(values: dict[str, Any], clip: float) -> tuple[bool, int, int]:
    """Three runs of eight steps: whether post-validation gives the same to the last bit, its repeats, the clips."""
    settings = build_recipe(values)
    mesh, job = Mesh.create(settings.layout, "cpu"), prepare(settings)
    runs = []
    repeated = 0
    for post in (False, True):
        model, state = build_for_training(job.shape, mesh, settings)
        optimizer = settings.optimizer.model_copy(
            update={"post_validation": post, "clip": clip}
        )
        asked = settings.model_copy(update={"optimizer": optimizer})
        stepper = build_step(StepContext(model, state, mesh), asked)
        loader, results = job.loader(job.corpus.train, mesh), []
        for step in range(8):
            batches = loader.step(step * settings.train.batch)
            assert batches is not None
            results += stepper.take(batches, 1e-2)
        runs.append((results + stepper.finish(), [h.local.clone() for h in state.held]))
        validated = stepper.agree
        repeated = validated.repeated if isinstance(validated, PostValidation) else 0
    same = runs[0][0] == runs[1][0] and all(
        torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True)
    )
    return same, repeated, sum(r.grad_norm > clip for r in runs[0][0])


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "pp=2,schedule=zb-h2",
        pytest.param("pp=2,dp=2,schedule=zb-v", marks=pytest.mark.slow),
    ],
)
def test_post_validation_is_exact_and_repeats_what_must_be_clipped(
    pool: Any, corpus: str, layout: str
) -> None:
    world = Layout.parse(layout).world
    values = tree(corpus, layout, 6)
    never = pool.run(world, later_and_at_once, values, 1e9)
    assert never == [(True, 0, 0)] * world
    same, repeated, clips = pool.run(world, later_and_at_once, values, 2.0)[0]
    assert same
    assert 0 < clips < 8, "the test wants steps of both kinds"
    # the last step's correction has no step after it
    assert repeated in (clips, clips - 1)


def forgotten(values: dict[str, Any]) -> int:
    """How many tensors saved by a step's forwards outlive it, without help of the garbage collector."""
    settings = build_recipe(values)
    mesh, job = Mesh.create(settings.layout, "cpu"), prepare(settings)
    model, state = parallelize(job.shape, mesh, settings.train)
    seen: list[weakref.ref[Any]] = []
    for block in model.blocks.values():
        block.register_forward_hook(
            lambda module, args, out: seen.append(weakref.ref(out))
        )
    batches = job.loader(job.corpus.train, mesh).step(0)
    assert batches is not None
    gc.disable()
    try:
        reduced_gradients(model, state, batches, mesh)
    finally:
        gc.enable()
    assert seen
    return sum(ref() is not None for ref in seen)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_are_gone_after_the_step(
    pool: Any, corpus: str, schedule: str, recompute: str
) -> None:
    values = tree(corpus, f"pp=2,schedule={schedule}", 4, train__recompute=recompute)
    assert pool.run(2, forgotten, values) == [0, 0]
