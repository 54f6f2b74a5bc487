"""The planner's arithmetic against closed forms, published figures and its own limits."""

import json
import math
import re
import sys
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import calibrate as calibrate_script
import evaluate as evaluate_script
import numpy as np
import pytest
import telling
from calibrate import apply, calibrate, held_out
from evaluate import composed, error, fits, regrets
from rows import CONSTANTS, find_shape, parse, read_rows
from script import run

from tests.conftest import Command
from tests.measured import until_true
from weft.errors import UsageError, WeftError
from weft.planner.cost import (
    AxisLink,
    Cost,
    Plan,
    axis_link,
    gather,
    schedule_number,
    step_time,
)
from weft.planner.engine_constants import ENGINES, EngineConstants, stack
from weft.planner.fit import KNOBS, PRIORS, Measurement, fit, predict
from weft.planner.layout_search import USABLE, Pin, SearchResult, search
from weft.planner.machine import (
    CLUSTERS,
    DEVICES,
    Cluster,
    find_device,
    load_cluster,
    machine_of,
)
from weft.planner.memory import in_flight, peak_memory
from weft.planner.planned_model import SECTIONS, SHAPES, load_model
from weft.recipe import Adapter, load_recipe
from weft.schedule.build import build
from weft.schedule.simulate import simulate, uniform_costs
from weft.shapes.config import shape_from_fields
from weft.shapes.shape import shape_of

DATA = Path(__file__).parent / "data" / "measured.csv"
#: A program without launches and memory-bound work: on a machine without latencies, products and bubbles are left.
IDEAL = replace(
    EngineConstants(), elementwise=0.0, inner=0.0, kernels=0.0, step=0.0, jitter=0.0
)
GPT3 = SHAPES["gpt3-175b"]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a script of ``bench/planner`` in this process: exit code, standard output and standard error."""

    def call(script: Any, *words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, words)])
        code = 0
        try:
            run(script.main)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def rows() -> list[Measurement]:
    return read_rows(DATA)[0]


@pytest.fixture
def weft(command: Command) -> Any:
    return partial(command, "plan")


# --- shapes


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt3-175b", 174.6), ("llama3-8b", 8.03), ("llama3-70b", 70.6), ("llama3-405b", 405.9), ("deepseek-v3", 671),
     ("qwen3-30b", 30.5), ("qwen3-235b", 235), ("gpt-oss-120b", 116.8), ("nemotron4-15b", 15.6), ("kimi-k2", 1027),
     ("mixtral-8x7b", 46.7), ("llama3.2-1b", 1.24)],
)  # fmt: skip
def test_built_in_shapes_have_the_published_size(name: str, billions: float) -> None:
    assert float(SHAPES[name].parameters) / 1e9 == pytest.approx(billions, rel=0.015)


def test_a_config_gives_the_built_in_shape(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
              "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model(str(tmp_path)).shape == SHAPES["llama3-8b"]
    with pytest.raises(UsageError, match="vocab_size is missing"):
        shape_from_fields({**config, "vocab_size": None}, "x", planned=True)
    with pytest.raises(
        WeftError, match="num_hidden_layers = '1000000000' is not supported"
    ):
        shape_from_fields({**config, "num_hidden_layers": 10**9}, "x", planned=True)
    with pytest.raises(WeftError, match="did you mean 'llama3-70b'"):
        load_model("llama3-70")


def test_latent_attention_and_experts_from_a_config() -> None:
    config = {"num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
              "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
              "num_experts_per_tok": 8, "first_k_dense_replace": 3, "vocab_size": 129280, "q_lora_rank": 1536,
              "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}  # fmt: skip
    shape = shape_of(shape_from_fields(config, "x", planned=True))
    assert shape.parameters / 1e9 == pytest.approx(671, rel=0.01)


def test_names_in_tables_find_their_shape() -> None:
    assert find_shape("LLAMA3.1_405B") is SHAPES["llama3-405b"]
    assert find_shape("Qwen3_235B_a22B (tokendrop)") is SHAPES["qwen3-235b"]
    assert find_shape("Nemotron_3_Nano") is None


# --- machines


def test_devices_are_found_by_any_spelling() -> None:
    assert find_device("A100-SXM-40GB").name == "A100-40GB"
    assert find_device("h100-sxm-96gb-hbm2e").name == "H100-96GB"
    assert find_device("DGX-A100", 40).name == "A100-40GB"
    assert find_device("GB200-186GB").name == "GB200-186GB"
    assert find_device("B200-SXM-180GB").name == "B200-180GB"
    with pytest.raises(UsageError, match="device = 'TPUv5' is not known"):
        find_device("TPUv5")


def test_a_cluster_file_names_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('device = "H100-80GB"\ncount = 16\nnetwork = 25\n')
    assert load_cluster(str(path)).machine().network == 25e9
    for text, message in [
        ("count = 4", "device is missing; one of: .*H100-80GB"),
        ('device = "H100-80GB"', "count is missing"),
        ('device = "H1O0-80GB"\ncount = 1', "did you mean 'H100-80GB'"),
        (
            'device = "A100-80GB"\ncount = 1\nnetwrk = 3',
            "unknown key 'netwrk'; did you mean 'network'",
        ),
        ('device = "A100-80GB"\ncount = 8\nsite = 4', "between is missing"),
        ('device = "A100-80GB"\ncount = -8', "count = -8"),
    ]:
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            load_cluster(str(path))
    with pytest.raises(WeftError, match="neither a file nor a preset"):
        load_cluster("h1000")
    assert all(load_cluster(name, 8).machine().peak > 0 for name in CLUSTERS)


def test_rings_use_the_slowest_link_they_cross() -> None:
    machine = machine_of(
        DEVICES["H100-80GB"], site=64, between=0.125, between_latency=5000
    )
    engine = replace(EngineConstants(), network=1.0)
    assert axis_link(machine, engine, 1, 8).bandwidth == 450e9
    # eight members of a node, each with its own NIC
    assert axis_link(machine, engine, 1, 16).bandwidth == 8 * 50e9
    assert axis_link(machine, engine, 8, 4).bandwidth == 50e9
    assert axis_link(machine, engine, 64, 2).bandwidth == 0.125e9
    assert axis_link(machine, engine, 64, 2).ring_latency > 5e-3
    assert gather(1, 1e9, axis_link(machine, engine, 1, 1)) == 0
    assert gather(8, 8e9, AxisLink(1e9, 0.0, 0.0)) == pytest.approx(7.0)


# --- time


def test_products_take_the_model_flops_at_full_rate() -> None:
    machine = machine_of(DEVICES["A100-80GB"], hbm=1e9)
    plan = Plan(batch=4, micro_batch=1, seq=2048)
    engine = replace(IDEAL, attention=1e9)
    flops = float(GPT3.flops_per_token(2048, causal=0)) * 4 * 2048
    assert step_time(GPT3, machine, plan, engine).total == pytest.approx(
        flops / (312e12 * machine.clock), rel=0.01
    )
    again = step_time(GPT3, machine, replace(plan, recompute=2), engine)
    head = 2 * 3 * float(GPT3.table) * 4 * 2048 / (312e12 * machine.clock)
    assert again.recompute / (again.compute - head) == pytest.approx(1 / 3, rel=0.01)


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("zb-h2", 1), ("interleaved-1f1b", 3)],
)
@pytest.mark.parametrize("m", [2, 4, 8, 32])
def test_bubbles_equal_the_simulator(schedule: str, virtual: int, m: int) -> None:
    ranks = 8
    if virtual > 1 and m < ranks:
        pytest.skip("the looped schedule wants a microbatch per rank")
    shape = replace(GPT3, layers=96, vocab=1)
    plan = Plan(pp=ranks, batch=m, virtual=virtual, schedule=schedule_number(schedule))
    engine = replace(IDEAL, attention=1e9)
    cost = step_time(
        shape,
        machine_of(
            DEVICES["A100-80GB"],
            hbm=1e9,
            network=1e9,
            link=1e9,
            link_latency=0.0,
            network_latency=0.0,
        ),
        plan,
        engine,
    )
    table = build(schedule, ranks, m, virtual if virtual > 1 else None)
    # forward, input and weight gradient alike
    bubble = simulate(table, uniform_costs(table)).makespan / (3 * m) - 1
    assert float(cost.bubble / cost.compute) == pytest.approx(
        bubble, rel=0.02, abs=0.003
    )


def test_arrays_and_numbers_go_the_same_way(rows: list[Measurement]) -> None:
    columns = [
        stack([getattr(row, name) for row in rows])
        for name in ("shape", "machine", "plan", "engine")
    ]
    together = step_time(*columns)
    memory = peak_memory(columns[0], columns[2], columns[3])
    for i, row in enumerate(rows):
        alone = step_time(row.shape, row.machine, row.plan, row.engine)
        for field in fields(Cost):
            column = np.broadcast_to(getattr(together, field.name), len(rows))
            assert float(column[i]) == pytest.approx(
                float(getattr(alone, field.name)), rel=1e-9, abs=1e-15
            )
        total = float(peak_memory(row.shape, row.plan, row.engine).total)
        assert float(memory.total[i]) == pytest.approx(total, rel=1e-9)


def test_every_part_is_finite_and_not_negative(rows: list[Measurement]) -> None:
    for row in rows:
        for plan in (
            row.plan,
            replace(row.plan, cp=2),
            replace(row.plan, cp=4, context=1),
            replace(row.plan, zero=3),
        ):
            cost = step_time(row.shape, row.machine, plan, row.engine)
            parts = [float(getattr(cost, f.name)) for f in fields(Cost)]
            assert all(math.isfinite(part) and part >= -1e-12 for part in parts), (
                row.id,
                cost,
            )


def test_more_of_what_costs_costs_more() -> None:
    machine, engine, shape = (
        machine_of(DEVICES["H100-80GB"]),
        ENGINES["megatron"],
        SHAPES["llama3-70b"],
    )
    base = Plan(dp=8, tp=8, pp=4, batch=256, seq=8192)

    def total(plan: Plan) -> float:
        return float(step_time(shape, machine, plan, engine).total)

    assert total(replace(base, recompute=2)) > 1.2 * total(base)
    assert total(replace(base, batch=512)) > 1.5 * total(base)
    assert total(replace(base, virtual=4)) < total(base)
    slow = replace(machine, network=machine.network / 100)
    assert (
        step_time(shape, slow, base, engine).dp
        > 10 * step_time(shape, machine, base, engine).dp
    )
    # tensor parallelism across nodes
    assert total(replace(base, tp=16, dp=4)) > total(base)


def test_a_hundred_thousand_candidates_fit_into_a_second() -> None:
    import time

    count = 100_000
    random = np.random.default_rng(0)
    plan = Plan(
        tp=2 ** random.integers(0, 4, count),
        pp=2 ** random.integers(0, 5, count),
        dp=64.0,
        batch=4096.0,
    )

    def took() -> float:
        start = time.process_time()
        total = step_time(
            SHAPES["llama3-405b"],
            machine_of(DEVICES["H100-80GB"]),
            plan,
            ENGINES["megatron"],
        ).total
        assert total.shape == (count,)
        return time.process_time() - start

    until_true(took, lambda seconds: seconds < 2.0)


# --- memory


def test_activations_follow_korthikanti() -> None:
    """Equation 2 of 2205.05198: s b h (10 + 24 / t + 5 a s / (h t)) per layer without sequence parallelism."""
    shape = replace(GPT3, layers=8, vocab=1)
    engine = replace(ENGINES["megatron-2021"], saved=10.0, constant=0.0)
    for tp, sequence in ((1, 0.0), (8, 0.0), (8, 1.0)):
        plan = Plan(tp=tp, batch=1, seq=2048)
        h, a = 12288, 96
        norms = 10 / (tp if sequence else 1)
        expected = 8 * 2048 * h * (norms + 24 / tp + 5 * a * 2048 / (h * tp))
        found = peak_memory(shape, plan, replace(engine, sequence=sequence)).activations
        assert float(found) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_microbatches_in_flight_equal_the_simulator(schedule: str) -> None:
    ranks, m = 8, 24
    table = build(schedule, ranks, m)
    peaks = simulate(table, uniform_costs(table)).peaks
    plan = Plan(pp=ranks, batch=m, schedule=schedule_number(schedule))
    assert float(in_flight(plan, 0)) == peaks[0]


def test_sharding_divides_states() -> None:
    shape, engine = SHAPES["llama3-8b"], ENGINES["fsdp"]
    plain = peak_memory(shape, Plan(dp=8, zero=0, batch=8), engine)
    first = peak_memory(shape, Plan(dp=8, zero=1, batch=8), engine)
    third = peak_memory(shape, Plan(shard=8, zero=3, batch=8), engine)
    assert float(plain.optimizer) == pytest.approx(8 * float(first.optimizer))
    assert float(plain.parameters) == pytest.approx(8 * float(third.parameters))


def test_a_critic_with_layers_of_its_own_is_a_second_model(tmp_path: Path) -> None:
    """Its weights and moments beside the policy's, and a step of its own; neither where it has processes of its own."""
    engine, policy = ENGINES["fsdp"], SHAPES["llama3-8b"]
    plan, machine = Plan(dp=8, batch=8), load_cluster("h100", 8).machine()
    alone, both = (
        (peak_memory(shape, plan, engine), step_time(shape, machine, plan, engine))
        for shape in (policy, replace(policy, critic=1))
    )
    # its output has no table
    second = policy.parameters - policy.table
    states = both[0].optimizer - alone[0].optimizer
    assert float(states) == pytest.approx(engine.master * second / 8, rel=1e-3)
    assert both[0].gradients == alone[0].gradients
    assert both[0].activations == alone[0].activations
    weights = float(both[0].parameters - alone[0].parameters)
    assert weights == pytest.approx(2 * second, rel=1e-3)
    head = 1 - policy.table / (policy.active_weights * policy.layers + policy.table)
    compute = float(both[1].compute / alone[1].compute)
    assert 1 + 0.95 * head < compute < 2
    assert 1.8 * alone[1].dp < both[1].dp < 2 * alone[1].dp or not alone[1].dp
    recipe = tmp_path / "recipe.toml"
    tree = 'model = { layers = 2, embed = 64 }\ntasks = [{ reward = "addition" }]\nrl = { method = "ppo" }\n'
    for words, size in (("", 1.0), (", ranks = 2", 0.0)):
        recipe.write_text(f'{tree}roles = {{ critic = {{ trunk = "own"{words} }} }}\n')
        assert load_model(str(recipe)).shape.critic == size


def test_frozen_weights_have_no_gradients_and_no_state_but_their_adapters_do() -> None:
    engine, full = ENGINES["fsdp"], SHAPES["llama3-8b"]
    lora, qlora = (
        shape_of(
            SECTIONS["llama3-8b"].model_copy(
                update={"adapter": Adapter(kind=kind, rank=16)}
            )
        )
        for kind in ("lora", "qlora")
    )
    # rank 16 on all projections, as PEFT counts
    assert lora.adapters * lora.layers == 41_943_040
    assert 0.515 < qlora.stored < 0.52
    plan = Plan(dp=8, batch=8)
    parts = {shape: peak_memory(shape, plan, engine) for shape in (full, lora, qlora)}
    learning = lora.adapters * lora.layers
    assert float(parts[lora].optimizer) == pytest.approx(engine.master * learning / 8)
    assert float(parts[lora].parameters - parts[full].parameters) == pytest.approx(
        2 * learning
    )
    saved = (2 - qlora.stored) * full.layers * full.dense_weights
    assert float(parts[lora].parameters - parts[qlora].parameters) == pytest.approx(
        saved
    )
    machine = load_cluster("h100", 8).machine()
    times = [step_time(shape, machine, plan, engine) for shape in (full, lora)]
    # two products of three, attention as before
    assert 0.6 < float(times[1].compute / times[0].compute) < 0.75
    assert float(times[1].optimizer) == 0
    sharded = [
        step_time(shape, machine, replace(plan, dp=1, shard=8, zero=3), engine)
        for shape in (full, lora)
    ]
    # frozen or not, sharded weights are gathered
    assert 0 < float(sharded[1].dp) <= float(sharded[0].dp)


# --- measured rows


def test_rows_are_read_and_refused_with_reasons() -> None:
    rows, refused = read_rows(DATA)
    assert len(rows) + len(refused) == len(DATA.read_text().strip().splitlines()) - 1
    assert dict(refused) == {
        "2056": "seq_len is not stated",
        "2079": "values of a formula, not a measurement",
    }
    assert all(row.seconds or row.gib or not row.ran for row in rows)


def test_seconds_come_from_whatever_is_stated() -> None:
    base = {"id": "1", "source": "s", "model": "GPT", "layers": "96", "hidden": "12288", "heads": "96",
            "seq_len": "2048", "hardware": "A100-SXM-80GB", "n_gpus": "1024", "global_batch": "1536", "tp": "8",
            "pp": "16", "micro_batch": "1", "vocab": "51200", "framework": "Megatron-LM"}  # fmt: skip
    tokens = 1536 * 2048

    def seconds(**more: str) -> float:
        found = parse({**base, **more}).seconds
        assert found is not None
        return found

    assert seconds(iter_time_s="32") == 32
    assert seconds(tokens_per_s_total=str(tokens / 32)) == pytest.approx(32)
    assert seconds(tokens_per_s_per_gpu=str(tokens / 32 / 1024)) == pytest.approx(32)
    assert seconds(samples_per_s=str(1536 / 32)) == pytest.approx(32)
    assert seconds(samples_per_s_per_gpu=str(1536 / 32 / 1024)) == pytest.approx(32)
    # Narayanan et al. 2021: 96 B s l h^2 (1 + s / 6h + V / 16lh) with recomputation, at 140 TFLOP/s.
    h, layers = 12288, 96
    flops = (
        96 * tokens * layers * h**2 * (1 + 2048 / (6 * h) + 51200 / (16 * layers * h))
    )
    hardware = {
        "tflops_per_gpu": "140",
        "tflops_kind": "hardware(incl. recompute)",
        "recompute": "full",
    }
    assert seconds(**hardware) == pytest.approx(flops / (140e12 * 1024), rel=0.01)
    for wrong, reason in [
        ({"hidden": "x"}, "hidden = 'x' is not a number"), ({"n_gpus": "1000"}, "does not divide"),
        ({"hardware": "Abacus"}, "not known"), ({"tp": "0"}, "a size of zero"), ({}, "neither a time nor a memory"),
    ]:  # fmt: skip
        with pytest.raises((ValueError, UsageError), match=reason):
            parse({**base, **wrong})


def test_presets_are_near_published_times(rows: list[Measurement]) -> None:
    timed = [row for row in rows if row.seconds]
    measured = np.array([row.seconds for row in timed], dtype=float)
    assert error(apply(None, timed)[0], measured) < 12
    assert np.median(np.abs(apply(None, timed)[0] / measured - 1)) < 0.09


def test_memory_rejects_what_ran_out_and_keeps_what_ran(
    rows: list[Measurement],
) -> None:
    gib = apply(None, rows)[1]
    fit_ = fits(rows, gib)
    assert not any(fit_[i] for i, row in enumerate(rows) if not row.ran)
    assert all(fit_[i] for i, row in enumerate(rows) if row.ran and row.gib)
    known = [i for i, row in enumerate(rows) if row.gib and row.framework in CONSTANTS]
    assert error(gib[known], np.array([rows[i].gib for i in known], dtype=float)) < 12


def test_a_fit_finds_back_a_known_machine(rows: list[Measurement]) -> None:
    """Rows made by the model with other constants are predicted by a fit to them, and stay within bounds."""
    timed = [
        row
        for row in rows
        if row.seconds and row.source.startswith("vTrain measured data (single")
    ]
    made = [
        replace(row, engine=replace(row.engine, matmul=0.8, kernels=60.0))
        for row in timed
    ]
    seconds = apply(None, made)[0]
    told = [
        replace(row, seconds=float(s)) for row, s in zip(timed, seconds, strict=True)
    ]
    theta = fit(told)
    assert error(predict(told, theta), seconds) < 2
    assert error(predict(told, np.zeros(len(KNOBS))), seconds) > 5
    assert all(
        abs(x) <= 3 * PRIORS[k.field] + 1e-9 for k, x in zip(KNOBS, theta, strict=True)
    )


def test_held_out_shapes_have_no_say(rows: list[Measurement]) -> None:
    """Changing the time of a shape must not change what is predicted for that shape."""
    timed = [row for row in rows if row.seconds and row.source.startswith("mosaic")]
    wrong = [
        replace(row, seconds=9 * row.seconds) if row.form == timed[0].form else row
        for row in timed
    ]
    index = [i for i, row in enumerate(timed) if row.form == timed[0].form]
    assert held_out(wrong)[index] == pytest.approx(held_out(timed)[index])


def test_times_that_are_sums_of_layers_are_told_from_runs(
    rows: list[Measurement],
) -> None:
    """Depths lie on a line to the last digit where a program has added layers up, and never where they ran."""
    plans = [replace(rows[0].plan, batch=2**i) for i in range(6)]
    shapes = [replace(rows[0].shape, layers=layers) for layers in (12, 16, 20, 24)]
    deep = [
        replace(
            rows[0],
            shape=shape,
            plan=plan,
            seconds=0.1 + 0.037 * shape.layers * plan.batch,
        )
        for plan in plans
        for shape in shapes
    ]
    assert composed(deep) and not composed(deep[:8])
    noise = np.random.default_rng(0).normal(1, 1e-3, len(deep))
    assert not composed(
        [
            replace(row, seconds=row.seconds * by)
            for row, by in zip(deep, noise, strict=True)
        ]
    )
    assert not composed(rows)


def test_starting_a_collective_takes_its_time_however_many_take_part() -> None:
    machine = machine_of(DEVICES["A100-80GB"])
    _, two, tree = axis_link(machine, IDEAL, 1, 2)
    assert (
        two
        == tree
        == axis_link(machine, IDEAL, 1, 8).ring_latency
        == machine.link_latency
        > 1e-5
    )
    assert (
        axis_link(machine, IDEAL, 1, 1).ring_latency == 0
        and axis_link(machine, IDEAL, 8, 2).ring_latency == machine.network_latency
    )


def test_regret_is_the_price_of_the_choice(rows: list[Measurement]) -> None:
    row = next(row for row in rows if row.seconds)
    jobs = [
        replace(row, plan=replace(row.plan, tp=tp, shard=1, dp=8 / tp), seconds=s)
        for tp, s in ((1, 4.0), (2, 2.0), (4, 3.0), (8, 5.0))
    ]
    assert regrets(jobs, np.array([4.0, 2.0, 3.0, 5.0])) == [(0.0, 0.0)]
    assert regrets(jobs, np.array([1.0, 2.0, 3.0, 5.0])) == [(100.0, 0.0)]


def test_rows_that_others_of_the_source_contradict_tell_nothing(
    rows: list[Measurement],
) -> None:
    row = next(row for row in rows if row.seconds)
    slower = {1: 1.0, 2: 0.94, 4: 0.92, 8: 0.95}
    runs = [
        replace(
            row,
            shape=replace(row.shape, embed=width),
            plan=replace(row.plan, micro_batch=micro),
            seconds=width * by * (1.4 if (width, micro) == (512, 1) else 1.0),
        )
        for width in range(512, 520)
        for micro, by in slower.items()
    ]
    runs.append(replace(runs[-1], seconds=1.02 * float(runs[-1].seconds or 0)))
    found = telling.jobs(runs)
    assert [[p.micro_batch for p in job.odd] for job in found] == [[1], *[[]] * 7]
    # three layouts are too few, and layouts that differ by no more than repeats tell nothing
    assert [job.tells for job in found] == [False, *[True] * 7]
    assert found[1].noise == pytest.approx(0.02)
    assert found[1].gap == pytest.approx(0.945 / 0.92 - 1)
    assert not found[1]._replace(noise=0.03).tells
    predicted = np.array([float(run.plan.micro_batch) for run in runs])
    assert telling.choice(runs, found[1], predicted)[1:] == pytest.approx(
        [100 * (1 / 0.92 - 1)] * 2
    )
    assert telling.choice(runs, found[0], predicted)[1:] == pytest.approx(
        [100 * (0.94 / 0.92 - 1), 100 * (1.4 / 0.92 - 1)]
    )


@pytest.mark.slow
def test_scripts_round_trip(bench: Any, tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    assert bench(calibrate_script, DATA, "--out", out)[0] == 0
    plain, given = (
        json.loads(bench(evaluate_script, DATA, "--json", *more)[1])
        for more in ([], ["--calibration", out])
    )
    keys = {
        "id",
        "source",
        "measured_s",
        "predicted_s",
        "measured_gib",
        "predicted_gib",
        "fits",
    }
    assert all(keys <= row.keys() for row in plain["rows"])
    assert len(plain["refused"]) == 2

    def wrong(record: dict[str, Any]) -> float:
        timed = [row for row in record["rows"] if row["measured_s"]]
        return float(
            np.mean([abs(row["predicted_s"] / row["measured_s"] - 1) for row in timed])
        )

    assert wrong(given) < 0.6 * wrong(plain)
    code, text, _ = bench(evaluate_script, DATA)
    assert (
        code == 0 and "constant MFU" in text and "seq_len is not stated: 2056" in text
    )


def test_mistakes_cost_one_line(bench: Any, tmp_path: Path) -> None:
    code, _, err = bench(evaluate_script, tmp_path / "none.csv")
    assert code == 1 and "does not exist" in err and len(err.strip().splitlines()) == 1
    (tmp_path / "short.csv").write_text("id,source\n1,a\n")
    code, _, err = bench(evaluate_script, tmp_path / "short.csv")
    assert code == 2 and "column 'model' is missing" in err
    (tmp_path / "bad.json").write_text("{}")
    code, _, err = bench(evaluate_script, DATA, "--calibration", tmp_path / "bad.json")
    assert code == 2 and "is not a calibration" in err


def test_calibrations_know_their_sources(rows: list[Measurement]) -> None:
    found = calibrate(rows)
    stranger = [replace(row, source="elsewhere") for row in rows if row.seconds]
    assert "elsewhere" not in found["sources"]
    assert np.isfinite(apply(found, stranger)[0]).all()


# --- search


def test_search_is_exhaustive_and_ordered() -> None:
    found = search(
        SHAPES["llama3-8b"], load_cluster("h100", 16), ENGINES["weft"], 64, 8192
    )
    times = np.asarray(found.cost.total)[found.order]
    assert (np.diff(times) >= 0).all() and found.count > 1000
    assert (np.asarray(found.plans.world) == 16).all()
    assert (
        np.asarray(found.memory.total)[found.order] <= found.machine.memory * USABLE
    ).all()
    for i in found.order[:50]:
        plan = found.plan(int(i))
        alone = step_time(found.shape, found.machine, plan, ENGINES["weft"])
        assert float(alone.total) == pytest.approx(found.seconds(int(i)))


def test_pins_hold_and_say_when_they_cannot() -> None:
    def run(*pins: str) -> SearchResult:
        pinned = [Pin.parse(pin) for pin in pins]
        return search(
            SHAPES["llama3-70b"],
            load_cluster("h100", 64),
            ENGINES["weft"],
            64,
            8192,
            pins=pinned,
        )

    found = run("tp at most 4", "pp=4", "recompute=full", "schedule=1f1b")
    assert (
        (found.plans.tp <= 4).all()
        and (found.plans.pp == 4).all()
        and (found.plans.recompute == 2).all()
    )
    for pins, message in [
        (
            ["tp=3"],
            "pin tp = 3 rules out every layout that is left; tp can be 1, 2, 4, 8",
        ),
        (["recomputed=4"], "unknown field 'recomputed'; did you mean 'recompute'"),
        (["schedule=1f2b"], "schedule cannot be '1f2b'; did you mean '1f1b'"),
        (["tp~3"], "is not of the form"),
    ]:
        with pytest.raises(UsageError, match=re.escape(message)):
            run(*pins)
    with pytest.raises(
        UsageError,
        match=r"memory rules out all \d+ layouts: the leanest .* of 69 GiB per rank",
    ):
        search(SHAPES["llama3-405b"], load_cluster("h100", 1), ENGINES["weft"], 8, 8192)


def test_what_does_not_fit_gets_the_nearest_fix() -> None:
    found = search(
        SHAPES["llama3-70b"], load_cluster("h100", 64), ENGINES["weft"], 256, 8192
    )
    lines = [str(line) for line in found.rejected(3)]
    assert len(lines) == 3
    assert all(
        re.search(r"needs \d+ of 69 GiB: \w+ \d+; .*: \d+ GiB, [+-]\d+% time$", line)
        for line in lines
    ), lines


def test_llama_405b_on_16384_gpus_in_a_second() -> None:
    import time

    def took() -> float:
        start = time.process_time()
        found = search(
            SHAPES["llama3-405b"],
            load_cluster("h100", 16384),
            ENGINES["megatron"],
            2048,
            8192,
        )
        assert len(found.order) > 1000
        return time.process_time() - start

    until_true(took, lambda seconds: seconds < 1.0)


def test_plan_writes_a_recipe_that_loads(weft: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    demands = ["--cluster", "h100", "--gpus", 16, "--batch", 32, "--seq", 8192]
    code, out, _ = weft(
        "llama3-8b",
        *demands,
        "--pin",
        "pp=2",
        "--pin",
        "cp=2",
        "--recipe",
        path,
        "--json",
    )
    first = json.loads(out)["layouts"][0]
    recipe = load_recipe(path)
    assert (
        code == 0
        and recipe.layout.world == 16
        and recipe.layout.pp == 2
        and recipe.layout.cp == 2
    )
    assert (
        recipe.train.micro_batch == first["layout"]["micro_batch"]
        and recipe.layout.tp == first["layout"]["tp"]
    )
    assert sum(first["time"].values()) == pytest.approx(first["seconds"])
    assert sum(first["memory"].values()) == pytest.approx(first["gib"])
    own = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
    assert (
        weft(
            own,
            "--cluster",
            "cpu",
            "--gpus",
            4,
            "--pin",
            "pp=2",
            "--precision",
            "fp32",
            "--recipe",
            path,
        )[0]
        == 0
    )
    planned, given = load_recipe(path), load_recipe(own)
    assert (
        planned.layout.world == 4
        and planned.layout.pp == 2
        and planned.train.batch == given.train.batch
    )
    kept = ("model", "data", "optimizer", "validation", "checkpoint", "generate")
    assert all(getattr(planned, name) == getattr(given, name) for name in kept)
    code, out, _ = weft("llama3-8b", *demands, "--top", 3)
    assert code == 0 and "shard=" in out and "margin  presets" in out
    code, _, err = weft(
        "gpt3-175b",
        "--cluster",
        "h100",
        "--gpus",
        256,
        "--batch",
        256,
        "--seq",
        2048,
        "--recipe",
        path,
    )
    assert code == 2 and "SwiGLU only" in err
    code, _, err = weft("llama3-8b", "--cluster", "h100", "--batch", 32, "--seq", 8192)
    assert code == 2 and "give --gpus" in err


def test_of_two_sites_the_cheaper_axis_crosses_the_slow_link() -> None:
    """Long steps and a small model: gradients cross once. Large and short: activations do."""
    two = Cluster(
        device="H100-80GB", count=128, site=64, between=0.125, between_latency=2000
    )
    weft = ENGINES["weft"]
    small = search(
        SHAPES["llama3-8b"], two, weft, 4096, 4096, pins=[Pin.parse("pp>=2")]
    )
    first = small.plan(int(small.order[0]))
    assert (first.outer, first.dp) == (1, 2)
    inward = replace(first, outer=0.0)
    shape, machine = small.shape, small.machine
    assert (
        step_time(shape, machine, inward, weft).total
        > 1.2 * step_time(shape, machine, first, weft).total
    )
    large = search(SHAPES["llama3-70b"], two, weft, 512, 4096)
    assert (large.plan(int(large.order[0])).pp, large.plan(int(large.order[0])).dp) == (
        2,
        1,
    )
    one = Cluster(device="H100-80GB", count=128)
    assert not np.any(search(SHAPES["llama3-8b"], one, weft, 4096, 4096).plans.outer)
