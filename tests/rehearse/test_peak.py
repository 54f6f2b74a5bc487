"""What our modules hold, counted on a step without memory, against tensors that have it and against the planner."""

from dataclasses import replace

import pytest

from weft.layout.layout import Layout
from weft.planner.cost import RECOMPUTE, Plan
from weft.planner.engine_constants import ENGINES
from weft.planner.finalists import refine
from weft.planner.layout_search import search
from weft.planner.machine import Cluster
from weft.planner.memory import peak_memory
from weft.recipe import Data, ModelShape, Recipe, Train
from weft.rehearse.peak import peak_of, pipeline_ranks
from weft.shapes.shape import shape_of

MODEL = ModelShape(layers=4, embed=1024, heads=16, kv_heads=8, ffn=3072, vocab=8192)


def recipe_of(
    layout: str,
    recompute: str = "none",
    micro_batch: int = 1,
    passes: int = 2,
    seq: int = 1024,
) -> Recipe:
    where = Layout.parse(layout)
    train = Train(
        batch=where.size("dp", "shard") * micro_batch * passes, micro_batch=micro_batch, dtype="bfloat16",
        recompute=recompute,
    )  # fmt: skip
    return Recipe(model=MODEL, layout=where, data=Data(seq_len=seq), train=train)


@pytest.mark.slow
def test_state_is_what_the_layout_leaves_of_it() -> None:
    whole = peak_of(recipe_of("shard=2"), MODEL)
    cut = peak_of(recipe_of("shard=8"), MODEL)
    assert whole.state == pytest.approx(4 * cut.state, rel=0.01)
    assert cut.peak > cut.state


@pytest.mark.soak
@pytest.mark.slow
def test_nothing_is_allocated_and_more_of_what_is_kept_is_more() -> None:
    """A model of 70 B parameters on this machine: it would need a terabyte."""
    large = MODEL.model_copy(
        update={"embed": 8192, "heads": 64, "ffn": 28672, "head_dim": 128}
    )
    recipe = recipe_of("shard=8").model_copy(update={"model": large})
    kept = [
        peak_of(
            recipe.model_copy(
                update={"train": recipe.train.model_copy(update={"recompute": r})}
            ),
            large,
        ).peak
        for r in RECOMPUTE
    ]
    assert kept[0] > kept[1] >= kept[2] > 2**33


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [{}, {"experts": 4, "experts_per_token": 2, "expert_ffn": 1024}],
    ids=["", "experts"],
)
def test_float32_has_operators_of_its_own_which_need_memory(
    change: dict[str, int],
) -> None:
    model = MODEL.model_copy(update=change)
    short = recipe_of("shard=2").model_copy(update={"model": model})
    wide = short.model_copy(
        update={"train": short.train.model_copy(update={"dtype": "float32"})}
    )
    assert peak_of(wide, model).peak > peak_of(short, model).peak


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "way", ["adaptive", "per-rank", "all-gather", "placement=sharded", "lsh=2"]
)
def test_experts_need_no_numbers_however_their_tokens_travel(way: str) -> None:
    small = ModelShape(layers=1, embed=64, heads=4, vocab=64, experts=4, expert_ffn=32)
    layout = f"shard=2,ep=2,{way if '=' in way else f'dispatch={way}'}"
    found = peak_of(
        recipe_of(layout, seq=64).model_copy(update={"model": small}), small
    )
    assert found.peak > found.state > 0


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("layout", "recompute"),
    [("shard=4", "none"), ("shard=4,zero=1", "none"), ("tp=4,shard=2", "none"), ("cp=2,shard=2,zero=1", "none"),
     ("shard=4", "selective"), ("shard=4,tp=2", "full")],
)  # fmt: skip
def test_the_memory_model_is_near_what_our_modules_hold(
    layout: str, recompute: str
) -> None:
    recipe = recipe_of(layout, recompute, micro_batch=4, passes=2, seq=2048)
    where = recipe.layout
    plan = Plan(
        shard=where.shard, zero=where.zero, tp=where.tp, cp=where.cp, micro_batch=4, batch=recipe.train.batch, seq=2048,
        recompute=RECOMPUTE.index(recompute),
    )  # fmt: skip
    found = peak_memory(
        shape_of(MODEL, 8192), plan, replace(ENGINES["weft"], constant=0.0)
    )
    ratio = float(found.total) / peak_of(recipe, MODEL).peak
    assert 0.95 < ratio < (1.12 if recompute == "none" else 1.4), ratio


@pytest.mark.slow
def test_pipeline_ranks_hold_what_the_simulator_says() -> None:
    recipe = recipe_of("pp=4,shard=2,zero=1,schedule=1f1b", passes=8)
    found = search(
        shape_of(MODEL, 8192),
        Cluster(device="H100-80GB", count=8),
        ENGINES["weft"],
        16,
        1024,
    )
    final = refine(
        found, Plan(pp=4, shard=2, zero=1, batch=16, micro_batch=1, seq=1024), 1.0
    )
    assert final is not None
    for place, rank in enumerate(pipeline_ranks(recipe.layout)):
        predicted = float(final.ranks[place].total - final.ranks[place].constant)
        assert predicted == pytest.approx(
            peak_of(recipe, MODEL, rank).peak, rel=0.15
        ), place
