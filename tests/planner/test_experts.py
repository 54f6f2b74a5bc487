"""Mixtures in the planner: published sizes, what is exchanged and held, and models with other experts."""

import json
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command
from weft.layout.layout import Layout
from weft.planner.cost import Plan, step_time
from weft.planner.engine_constants import ENGINES
from weft.planner.explain import exchanges
from weft.planner.finalists import finalists, refine
from weft.planner.layout_search import Pin, search
from weft.planner.machine import load_cluster
from weft.planner.memory import peak_memory, rank_memory
from weft.planner.planned_model import SHAPES, load_model
from weft.planner.planned_recipe import layout_tree
from weft.recipe import Data, ModelShape, Recipe, Train, load_recipe
from weft.rehearse.peak import peak_of
from weft.schedule.exchange import Beside
from weft.shapes.config import shape_from_fields
from weft.shapes.shape import shape_of

LLAMA = {"hidden_act": "silu", "tie_word_embeddings": False}
#: What the published config.json say, of what matters here.
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "num_local_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 32000, "rope_theta": 1e6, "sliding_window": None, "rms_norm_eps": 1e-5,
    "output_router_logits": False, "router_aux_loss_coef": 0.02,
}  # fmt: skip
QWEN3 = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "head_dim": 128,
    "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 6144, "mlp_only_layers": [],
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "rope_scaling": None, "sliding_window": None, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False,
    "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
}  # fmt: skip
QWEN2 = QWEN3 | {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "head_dim": None, "num_experts": 60,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
    "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "norm_topk_prob": False,
}  # fmt: skip
TINY = ModelShape(
    vocab=512,
    layers=4,
    embed=256,
    heads=8,
    kv_heads=4,
    ffn=512,
    experts=8,
    expert_ffn=256,
)


@pytest.fixture
def plan(command: Command) -> Any:
    return partial(command, "plan")


@pytest.mark.parametrize(("config", "name", "total", "active", "cache"), [
    (MIXTRAL, "mixtral-8x7b", 46.7, 12.9, 131072), (QWEN3, "qwen3-30b", 30.5, 3.3, 98304),
    # Of a token 576 numbers per layer; 37 B active without the table that is looked up.
    (DEEPSEEK, "deepseek-v3", 671.0, 37.0 + 0.93 / 2, 70272), (QWEN2, None, 14.3, 2.7, 196608),
])  # fmt: skip
def test_sizes_are_those_that_are_published(
    tmp_path: Path,
    config: dict[str, Any],
    name: str | None,
    total: float,
    active: float,
    cache: int,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(str(tmp_path))
    shape = model.shape
    assert not model.untrainable and shape.parameters / 1e9 == pytest.approx(
        total, rel=0.005
    )
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.02)
    assert shape.cache_bytes == cache
    if name:
        assert shape == SHAPES[name]
    # What reads any config, also of architectures that are not known, sees the same but for norms and gates.
    unnamed = {
        key: value
        for key, value in config.items()
        if key not in ("architectures", "model_type")
    }
    other = shape_of(shape_from_fields(unnamed, "here", planned=True))
    for field in (
        "moe_layers",
        "experts",
        "top_k",
        "shared_ffn",
        "expert_ffn",
        "cached",
        "qk",
        "head_dim",
    ):
        assert getattr(other, field) == getattr(shape, field), field
    assert other.parameters == pytest.approx(shape.parameters, rel=1e-4)


def test_layers_without_experts_are_counted() -> None:
    listed = shape_from_fields(QWEN3 | {"mlp_only_layers": [0, 1, 5]}, "here")
    every = shape_from_fields(QWEN3 | {"decoder_sparse_step": 2}, "here")
    assert (len(listed.mixtures), len(every.mixtures)) == (45, 24)


@pytest.mark.parametrize(
    ("experts", "k", "ranks"), [(6, 2, 3), (8, 3, 4), (8, 8, 2), (4, 1, 4), (3, 2, 6)]
)
def test_rows_of_dispatchers_are_those_of_all_choices(
    experts: int, k: int, ranks: int
) -> None:
    """The mean over every choice of ``k`` experts, of ranks that hold equally many (or, here 3 of 6, a half of one)."""
    pieces = max(1, ranks // experts)
    each = experts * pieces // ranks
    choices = [
        [e * pieces + p for e in chosen for p in range(pieces)]
        for chosen in combinations(range(experts), k)
    ]
    rows = sum(map(len, choices)) / len(choices)
    copies = sum(len({slot // each for slot in slots}) for slots in choices) / len(
        choices
    )
    shape = shape_of(
        ModelShape(
            vocab=100, layers=2, embed=10**9, heads=8, head_dim=8, ffn=8,
            experts=experts, experts_per_token=k,
        )
    )  # fmt: skip
    found = shape.rows_sent(ranks)
    assert found["all-to-all"] == rows and found["all-gather"] == pytest.approx(ranks)
    assert found["per-rank"] == pytest.approx(copies, rel=1e-6 if pieces == 1 else 0.15)


@pytest.mark.parametrize(("ranks", "load"), [(1, 1.0), (8, 3.0), (4, (3 + 5 / 7) / 2)])
def test_the_busiest_rank_has_the_hottest_expert(ranks: int, load: float) -> None:
    assert replace(shape_of(TINY), hottest=3.0).busiest(ranks) == pytest.approx(load)


@pytest.mark.parametrize("ep", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("shard", "tp"), [(8, 1), (8, 2), (4, 4)])
def test_state_of_all_ranks_is_that_of_the_model(shard: int, tp: int, ep: int) -> None:
    """Under ZeRO-3 every parameter is held once, however experts are spread: 2 bytes, 4 of gradients, 12 of moments."""
    if not Layout(shard=shard, tp=tp).folds(ep) and not (
        ep % tp == 0 and Layout(shard=shard, tp=tp).folds(ep // tp)
    ):
        pytest.skip("does not fold")
    shape = shape_of(TINY.model_copy(update={"experts": 16}))
    held = rank_memory(shape, Plan(shard=shard, zero=3, tp=tp, ep=ep, pp=2, batch=shard * 4), ENGINES["weft"],
                       4, 2.0, 0.0)  # fmt: skip
    weights = shape.parameters - (2 * 4 + 1) * shape.embed  # norms are not counted
    for part, each in ((held.parameters, 2), (held.gradients, 4), (held.optimizer, 12)):
        assert float(part) * shard * tp == pytest.approx(each * weights, rel=1e-6)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "layout",
    [
        "shard=4",
        "shard=4,tp=2",
        "shard=4,ep=4",
        "shard=4,tp=2,ep=2",
        "shard=2,tp=2,ep=4",
    ],
)
def test_mixtures_hold_what_our_modules_hold(layout: str) -> None:
    model = ModelShape(
        vocab=4096,
        layers=3,
        embed=512,
        heads=8,
        kv_heads=4,
        ffn=1024,
        experts=8,
        expert_ffn=1024,
    )
    where = Layout.parse(layout)
    train = Train(batch=4 * where.shard, micro_batch=2, dtype="bfloat16")
    recipe = Recipe(model=model, layout=where, data=Data(seq_len=1024), train=train)
    asked = Plan(
        shard=where.shard,
        zero=3,
        tp=where.tp,
        ep=where.ep,
        micro_batch=2,
        batch=train.batch,
        seq=1024,
    )
    found = peak_memory(
        shape_of(model, 4096), asked, replace(ENGINES["weft"], constant=0.0)
    )
    real = peak_of(recipe, model)
    state = (
        found.parameters + found.optimizer
        if where.size("shard") == 1
        else found.optimizer
    )
    assert float(state) == pytest.approx(real.state, rel=0.05)
    assert float(found.total) == pytest.approx(real.peak, rel=0.25)


def test_an_expert_that_is_chosen_more_often_costs_time_and_memory() -> None:
    machine, weft = load_cluster("h100", 64).machine(), ENGINES["weft"]
    plans = [Plan(shard=64, ep=ep, batch=64, seq=4096) for ep in (1, 8)]
    alike, hot = SHAPES["qwen3-30b"], replace(SHAPES["qwen3-30b"], hottest=8.0)
    slower = [
        step_time(hot, machine, p, weft).total
        / step_time(alike, machine, p, weft).total
        for p in plans
    ]
    more = [
        peak_memory(hot, p, weft).activations - peak_memory(alike, p, weft).activations
        for p in plans
    ]
    assert slower[0] == 1 and slower[1] > 1.02 and more[0] == 0 < more[1]


def test_deepseek_v3_on_256_gpus_is_planned_with_reasons() -> None:
    pins = [Pin.parse("schedule=dualpipe-v"), Pin.parse("pp=16")]
    found = search(
        SHAPES["deepseek-v3"],
        load_cluster("h100", 256),
        ENGINES["weft"],
        512,
        4096,
        pins=pins,
    )
    final = finalists(found, 1)[0]
    told = exchanges(found, final)
    assert final.plan.ep > 1 and final.fits and told["beside"] == "other pass"
    assert 0.02 < told["save"] < float(final.cost.ep) / final.seconds
    ranks, tokens = (
        final.plan.ep,
        final.plan.micro_batch * 4096 / final.plan.cp / final.plan.tp,
    )
    assert told["sent"]["all-to-all"] == pytest.approx(
        8 * 7168 * 2 * tokens * (ranks - 1) / ranks
    )
    assert (
        next(iter(told["sent"]))
        == min(told["sent"], key=told["sent"].get)
        == "per-rank"
    )
    # Its ranks stand on two nodes, so that what is planned for, a token to a node once, is what the recipe says.
    layout = Layout.model_validate(layout_tree(final))
    assert (layout.ep, layout.dispatch, layout.node) == (16, "per-node", 8) and told[
        "dispatch"
    ] == "per-node"


def test_passes_of_a_kind_take_turns_without_a_pipeline() -> None:
    pins = [Pin.parse(text) for text in ("pp=1", "ep=16", "tp=1", "micro_batch=1")]
    found = search(
        SHAPES["qwen3-30b"],
        load_cluster("h100", 32),
        ENGINES["weft"],
        256,
        4096,
        pins=pins,
    )
    final = finalists(found, 1)[0]
    told = exchanges(found, final)
    assert told["beside"] == "same pass" and final.plan.microbatches == 8
    assert (
        0.3 * float(final.cost.ep)
        < told["save"] * final.seconds
        < 1.05 * float(final.cost.ep)
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "dualpipe-v"])
def test_exchanges_as_actions_take_as_long_as_inside_of_others(schedule: str) -> None:
    pins = [
        Pin.parse(text)
        for text in (f"schedule={schedule}", "pp=4", "ep=8", "recompute=full", "cp=1")
    ]
    found = search(
        SHAPES["qwen3-30b"],
        load_cluster("h100", 64),
        ENGINES["weft"],
        256,
        4096,
        pins=pins,
    )
    final = finalists(found, 1)[0]
    apart = refine(found, final.plan, final.closed, beside=Beside.NOTHING)
    assert apart is not None and apart.seconds == pytest.approx(final.seconds, rel=0.01)
    assert (
        apart.cost.ep == pytest.approx(final.cost.ep, rel=0.1)
        and final.cost.ep > 0.01 * final.seconds
    )


def test_a_plan_says_what_experts_exchange(plan: Any, tmp_path: Path) -> None:
    words = (
        "qwen3-30b",
        "--cluster",
        "h100",
        "--gpus",
        16,
        "--batch",
        64,
        "--seq",
        4096,
        "--pin",
        "ep=8",
    )
    code, text, _ = plan(*words, "--hottest", 2, "--recipe", tmp_path / "plan.toml")
    assert (
        code == 0
        and "(30.5 B parameters, 3.35 B active, 96 KiB per token cached)" in text
    )
    line = next(
        line for line in text.splitlines() if line.startswith("experts 1 sends")
    )
    assert (
        "by per-rank, " in line
        and "by all-gather MiB" in line
        and "busiest rank 1.0" in line
    )
    assert load_recipe(tmp_path / "plan.toml").layout.dispatch == "per-rank"
    assert json.loads(plan(*words, "--json")[1])["experts"]["load"] == 1
    dense = ("llama3-8b", "--cluster", "h100", "--gpus", 8, "--batch", 8, "--seq", 2048)
    assert (
        json.loads(plan(*dense, "--json")[1])["experts"] is None
        and "experts 1" not in plan(*dense)[1]
    )


def test_models_with_other_experts_are_swept(plan: Any, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        "[model]\nlayers = 4\nembed = 256\nexperts = 8\n[train]\nbatch = 64\n[data]\nseq_len = 1024\n"
    )
    words = (
        own,
        "--cluster",
        "h100",
        "--gpus",
        8,
        "--sweep",
        "experts=8,16",
        "--sweep",
        "experts_per_token=1,9",
    )
    rows = json.loads(plan(*words[:-1], "experts_per_token=1,2", "--json")[1])["models"]
    assert [row["model"] for row in rows] == [
        {"experts": e, "experts_per_token": k}
        for e, k in product(("8", "16"), ("1", "2"))
    ]
    assert (
        rows[0]["active"]
        < rows[1]["active"]
        < rows[1]["parameters"]
        < rows[2]["parameters"]
    )
    assert all(row["seconds"] > 0 for row in rows)
    code, text, _ = plan(*words[:5], *words[5:7])
    assert code == 0 and "experts=16" in text and "MFU" in text
    for wrong, message in [("experts_per_token=9", "more than the 8 experts"), ("expert=4", "did you mean 'experts'"),
                           ("experts", "not of the form")]:  # fmt: skip
        code, _, err = plan(*words[:5], "--sweep", wrong)
        assert code == 2 and message in err, err
    code, _, err = plan(
        *words[:5], "--sweep", "experts=8", "--recipe", tmp_path / "plan.toml"
    )
    assert code == 2 and "--sweep compares models" in err
    for wrong in ("9", "0.5", "nan"):
        code, _, err = plan(*words[:5], "--hottest", wrong)
        assert code == 2 and "--hottest" in err, err
    code, _, err = plan(
        "gpt-22b", *words[1:5], "--batch", 8, "--seq", 1024, "--sweep", "experts=2"
    )
    assert code == 2 and "that Weft can train" in err
