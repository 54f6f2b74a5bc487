"""Rows of other people's measurements: what is read, assumed and refused; releases; facts of models and programs."""

from dataclasses import replace

import numpy as np
import pytest
from calibrate import apply, calibrate, held_out
from rows import TRITON, family_of, find_shape, parse, release_of

from weft.errors import UsageError
from weft.planner.cost import Plan, by_work, step_time
from weft.planner.engine_constants import ENGINES
from weft.planner.fit import Measurement
from weft.planner.machine import DEVICES, machine_of
from weft.planner.memory import peak_memory
from weft.planner.planned_model import SHAPES
from weft.shapes.config import shape_from_fields
from weft.shapes.shape import shape_of

GOOD = {
    "id": "7", "source": "somebody", "source_ref": "a/b@c0ffee2406:bench.md", "model": "GPT 187B", "arch": "dense",
    "params_b": "187", "layers": "80", "hidden": "13824", "heads": "108", "vocab": "250000", "seq_len": "2048",
    "hardware": "A100-SXM-80GB", "gpu_mem_gb": "80", "gpus_per_node": "8", "n_gpus": "320", "tp": "8", "pp": "10",
    "dp": "4", "cp": "1", "micro_batch": "2", "global_batch": "2048", "recompute": "full", "precision": "bf16",
    "framework": "Megatron-DeepSpeed", "iter_time_s": "151.07", "peak_mem": "39", "peak_mem_unit": "GB", "status": "ok",
}  # fmt: skip
EVERY = (
    *GOOD, "kv_heads", "ffn", "gated_mlp", "tied_embeddings", "internode_gbps_per_gpu", "vpp", "ep", "dp_sharding",
    "grad_accum", "attention", "tflops_per_gpu", "tflops_kind", "mfu_pct", "hfu_pct", "tokens_per_s_per_gpu",
    "tokens_per_s_total", "samples_per_s", "samples_per_s_per_gpu", "mem_kind", "notes",
)  # fmt: skip


def read(**changes: str) -> Measurement:
    return parse({**GOOD, **changes})


@pytest.mark.parametrize("column", EVERY)
def test_whatever_a_cell_holds_it_is_read_or_refused_with_a_reason(column: str) -> None:
    for text in (
        "",
        "0",
        "-1",
        "3",
        "x",
        "n/a",
        "none",
        "1e9",
        "nan",
        "inf",
        "1,024",
        "ok\x00",
        "é",
        "9" * 40,
    ):
        try:
            row = read(**{column: text})
        except (ValueError, UsageError) as error:
            assert str(error)
            continue
        seconds, gib = apply(None, [row])
        assert (
            np.isfinite(seconds).all()
            and np.isfinite(gib).all()
            and (seconds > 0).all()
        ), (column, text)


def test_blanks_separators_and_units() -> None:
    plain = read()
    assert read(ep="n/a", vpp="-", cp="?") == plain
    assert read(global_batch="2,048") == plain
    assert plain.gib == pytest.approx(39e9 / 2**30)
    assert read(peak_mem="39000", peak_mem_unit="MB").gib == pytest.approx(plain.gib)
    assert read(peak_mem_unit="").gib == 39
    with pytest.raises(
        ValueError, match=r"peak_mem_unit = 'furlong' is not known; GiB"
    ):
        read(peak_mem_unit="furlong")
    assert not read(status="CUDA out of memory", iter_time_s="").ran


def test_the_depth_of_a_gpt_follows_from_its_size_and_width_and_from_no_size_alone() -> (
    None
):
    row = read(layers="")
    assert row.shape == read().shape and "layers=80" in row.assumed
    with pytest.raises(ValueError, match="'GPT 187B' is neither stated nor built in"):
        read(layers="", hidden="")
    with pytest.raises(
        ValueError, match="no depth of 'GPT 187B' with hidden 30000 and 10 stages"
    ):
        read(layers="", hidden="30000")


@pytest.mark.parametrize(
    ("model", "arch", "reason"),
    [("Nemotron_3_Nano", "moe/hybrid", "not modelled"), ("DeepSeekV4 Flash", "", "not modelled"),
     ("Qwen3_Next_80B_a3b", "", "not modelled"), ("Foo-8x7B", "moe", "experts of 'Foo-8x7B' are not built in")],
)  # fmt: skip
def test_models_that_would_be_read_wrongly_are_refused(
    model: str, arch: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        read(model=model, arch=arch)


def test_names_of_models() -> None:
    assert find_shape("meta-llama/Llama-3.1-70B-Instruct") is SHAPES["llama3-70b"]
    assert (
        find_shape("Llama 3.2 1B") is SHAPES["llama3.2-1b"]
        and find_shape("Qwen3 8B") is SHAPES["qwen3-8b"]
    )
    assert (
        find_shape("Qwen2.5-72B") is SHAPES["qwen2.5-72b"]
        and find_shape("Qwen3_Next_80B_a3b") is None
    )


@pytest.mark.parametrize(
    ("framework", "reference", "release"),
    [("Megatron-Bridge 26.04.01 NeMo Container", "x_202512_y", (26, 4, 1)), ("nanotron v0.5", "", (0, 5)),
     ("torchtitan+compile", "benchmarks/llama3-8b_h200_202506_trainy.md", (2025, 6)), ("NeMo", "a@2a202406f:b", ()),
     ("Megatron-LM fork ZB-2p", "text-index id 45548154975", ()), ("", "", ())],
)  # fmt: skip
def test_releases(framework: str, reference: str, release: tuple[int, ...]) -> None:
    assert release_of(framework, reference) == release


def progress() -> list[Measurement]:
    """Three models with experts under three releases that need 1.4, 1.2 and 1.0 times what the model says."""
    rows = []
    for model in ("Qwen3_30B_a3B", "Qwen3_235B_a22B", "GPT OSS 120B"):
        for release, more in (("25.09", 1.4), ("25.11", 1.2), ("26.02", 1.0)):
            row = parse({
                **{k: "" for k in GOOD}, "id": f"{model} {release}", "source": "bridge", "model": model,
                "seq_len": "4096", "hardware": "B200", "n_gpus": "64", "tp": "1", "pp": "1", "micro_batch": "4",
                "ep": "8", "global_batch": "1024", "precision": "bf16", "framework": f"Megatron-Bridge {release}",
                "iter_time_s": "1",
            })  # fmt: skip
            seconds = float(
                step_time(row.shape, row.machine, row.plan, row.engine).total
            )
            rows.append(replace(row, seconds=more * seconds))
    return rows


def test_a_release_is_part_of_the_system_and_learned_from_other_shapes() -> None:
    rows = progress()
    measured = np.array([row.seconds for row in rows])
    with_it = np.abs(held_out(rows) / measured - 1)
    without = np.abs(
        held_out([replace(row, release=()) for row in rows]) / measured - 1
    )
    assert with_it.mean() < 0.5 * without.mean()
    file = calibrate(rows)
    assert {item["for"] for item in file["sources"]["bridge (experts)"]["factors"]} == {
        "",
        "from 25.11",
        "from 26.2",
    }
    assert np.abs(apply(file, rows)[0] / measured - 1).mean() < 0.05
    # A newer release than any that was seen is as fast as the newest.
    newest, newer = (
        apply(file, [replace(rows[2], release=r)])[0][0] for r in ((26, 2), (27, 1))
    )
    assert newer == newest < apply(file, [rows[0]])[0][0]
    # releases of different programs do not compare
    assert {item["for"] for item in file["all"]["factors"]} == {""}


@pytest.mark.parametrize(
    ("model", "giga"),
    [
        ("deepseek-v3", 249.4),
        ("qwen3-30b", 23.0),
        ("qwen3-235b", 148.0),
        ("gpt-oss-120b", 32.6),
    ],
)
def test_flops_of_models_with_experts_are_those_of_the_vendor(
    model: str, giga: float
) -> None:
    """TFLOP/s over tokens/s of Megatron-Bridge's tables (4,096 tokens; DeepSeek-V3 without its extra layer)."""
    assert SHAPES[model].flops_per_token(4096) / 1e9 == pytest.approx(giga, rel=0.01)


def test_windows_and_widths_of_latent_attention_come_from_a_config() -> None:
    config = {
        "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 1000, "head_dim": 64,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_local_experts": 8,
        "num_experts_per_tok": 2, "intermediate_size": 512, "swiglu_limit": 7.0,
    }  # fmt: skip
    shape = shape_of(shape_from_fields(config, "here", planned=True))
    assert (shape.window, shape.windowed, shape.clamped) == (128, 0.5, 1)
    assert shape.reach(4096) == (4096 + 256) / 2 and shape.reach(64) == 64
    exaone = {**config, "model_type": "exaone4", "sliding_window_pattern": "LLLG"}
    assert shape_of(shape_from_fields(exaone, "here", planned=True)).window == 128
    latent = {
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    shape = shape_of(shape_from_fields({**config, **latent}, "here", planned=True))
    assert shape.qk == 192 and shape.score_dim == 160


def placed(costs: list[float], stages: int) -> list[int]:
    """Blocks of each stage where a stage ends with the block that fills its share, as nanotron places them."""
    found, total, done = [0] * stages, sum(costs), 0.0
    stage = 0
    for cost in costs:
        found[stage] += 1
        done += cost
        stage += done >= total * (stage + 1) / stages and stage < stages - 1
    return found


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("model", ["llama3-8b", "llama3.2-1b", "llama2-13b"])
def test_pipelines_cut_by_work(model: str, stages: int) -> None:
    shape = SHAPES[model]
    stack = [float(shape.active_weights)] * int(shape.layers) + [float(shape.table)]
    first, final = by_work(shape, Plan(pp=stages))
    counts = placed(stack, stages)
    assert (first, final) == (counts[0], counts[-1] - 1)
    plan = Plan(pp=stages, batch=64, micro_batch=1, seq=4096)
    even = replace(
        ENGINES["eager"], elementwise=0.0, inner=0.0, kernels=0.0
    )  # work by weights is all the work there is
    level = replace(even, level=1.0)
    machine = machine_of(DEVICES["H100-80GB"])
    # a large output layer no longer comes on top of the last stage
    if model == "llama3.2-1b" and stages != 3:
        assert (
            step_time(shape, machine, plan, level).compute
            < step_time(shape, machine, plan, even).compute
        )
    assert peak_memory(shape, plan, level).total > 0


def test_routing_that_waits_for_counts_launches_more() -> None:
    row = {
        **{k: "" for k in GOOD}, "id": "1", "source": "bridge", "seq_len": "4096", "hardware": "B200", "n_gpus": "8",
        "tp": "1", "pp": "1", "ep": "8", "micro_batch": "1", "global_batch": "512", "iter_time_s": "1",
        "framework": "Megatron-Bridge 25.09", "precision": "fp8", "gpus_per_node": "8",
    }  # fmt: skip
    kept, dropped = (
        parse({**row, "model": name})
        for name in ("Qwen3_30B_a3B", "Qwen3_30B_a3B (tokendrop)")
    )
    assert (
        dropped.shape == kept.shape and dropped.engine.dispatch < kept.engine.dispatch
    )
    assert apply(None, [dropped])[0] < apply(None, [kept])[0]
    rack = parse(
        {**row, "model": "Qwen3_30B_a3B", "hardware": "GB200", "gpus_per_node": "4"}
    )
    assert rack.machine.domain == 72 and rack.engine.dispatch == dropped.engine.dispatch


def test_rows_that_do_not_state_recomputation_need_only_fit_with_some() -> None:
    base = {"layers": "32", "hidden": "4096", "heads": "32", "vocab": "32000", "model": "GPT 6.7B", "params_b": "6.7",
            "n_gpus": "8", "tp": "1", "pp": "1", "dp": "8", "micro_batch": "16", "global_batch": "128",
            "framework": "NeMo", "dp_sharding": "ZeRO-1", "peak_mem": ""}  # fmt: skip
    silent, stated = read(**base, recompute=""), read(**base, recompute="none")
    (less,), (more,) = apply(None, [silent])[1], apply(None, [stated])[1]
    assert less <= float(silent.machine.memory) / 2**30 < more
    assert apply(None, [silent])[0] == apply(None, [stated])[0]
    small = {**base, "micro_batch": "1"}
    assert (
        apply(None, [read(**small, recompute="")])[1]
        == apply(None, [read(**small, recompute="none")])[1]
    )


@pytest.mark.parametrize(
    ("framework", "sharding", "attention", "family"),
    [("MLPerf v4.0 (somebody)", "", "", "megatron"), ("NeMo", "", "", "megatron"),
     ("llm-foundry/FSDP1", "", "", "fsdp"),
     ("some trainer", "FSDP", "", "fsdp"), ("some trainer", "", "", "torch"), ("nanotron v0.5", "ZeRO-1", "", "eager"),
     ("levanter", "FSDP", "", "xla"), ("nanoGPT", "", "", "compiled"),
     ("Megatron-DeepSpeed", "ZeRO-1", "", "megatron-2021"),
     ("Megatron-LM", "", "", "megatron-2021"), ("Megatron-LM", "", "flash", "megatron")],
)  # fmt: skip
def test_classes_of_programs(
    framework: str, sharding: str, attention: str, family: str
) -> None:
    assert family_of(framework, sharding, 312e12, attention) == family


@pytest.mark.parametrize(
    ("model", "notes", "frozen"),
    [("Llama 2 70B LoRA", "", 1), ("llama2_70b_lora", "", 1), ("Llama 3 70B", "task=LoRA Performance", 1),
     ("Llama 3 70B", "exploration", 0), ("Llama 3 70B", "QLoRA", 1)],
)  # fmt: skip
def test_adapters_are_seen_in_the_model_and_in_the_notes(
    model: str, notes: str, frozen: int
) -> None:
    assert read(model=model, notes=notes).shape.frozen == frozen


def test_the_first_flash_attention_and_its_triton_kernel_are_slower() -> None:
    rows = {
        text: read(
            framework="Megatron-LM", attention=text, seq_len="16384", recompute="none"
        )
        for text in ("flash-attention v1", "triton", "flash-attention v2", "flash")
    }
    speeds = {text: row.engine.attention for text, row in rows.items()}
    assert speeds["flash-attention v1"] == speeds["triton"] == TRITON
    assert (
        speeds["flash-attention v2"] == speeds["flash"] == ENGINES["megatron"].attention
    )
