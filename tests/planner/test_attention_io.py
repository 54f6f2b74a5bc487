"""Attention in the planner: bytes by block, the least possible, and speeds of kernels that others measured."""

from dataclasses import replace

import numpy as np
import pytest

from weft.planner.attention_io import (
    attention_traffic,
    fused_bytes,
    least_bytes,
    query_block,
)
from weft.planner.cost import CONTEXT, Plan, Roofline, step_time
from weft.planner.engine_constants import ENGINES
from weft.planner.machine import DEVICES, machine_of
from weft.planner.planned_model import SHAPES

#: TFLOP/s of FlashAttention-2, forward and backward, causal, by head width, for 512, 1,024, ..., 16,384 tokens, as read
#: from figures 4 and 7 of Dao 2023 (2307.08691).
MEASURED = {
    ("A100-80GB", 64): (88, 119, 140, 158, 165, 171),
    ("A100-80GB", 128): (99, 131, 155, 182, 189, 189),
    ("H100-80GB", 64): (141, 192, 232, 257, 273, 284),
    ("H100-80GB", 128): (163, 221, 265, 294, 308, 328),
}


def simulated_bytes(tokens: int, head: int, block: int) -> int:
    """Count what a kernel moves, block by block: queries and results once, keys and values up to the block's end."""
    rows = 2 * tokens
    for start in range(0, tokens, block):
        rows += 2 * min(start + block, tokens)
    return 2 * head * rows


@pytest.mark.parametrize(
    ("tokens", "block"), [(512, 128), (1000, 128), (96, 128), (7, 2), (640, 1)]
)
def test_fused_attention_moves_the_bytes_of_its_blocks(tokens: int, block: int) -> None:
    counted = simulated_bytes(tokens, 64, block)
    assert fused_bytes(tokens, 64, block) == pytest.approx(
        counted, rel=2 * block / tokens
    )
    if tokens % block == 0:
        assert fused_bytes(tokens, 64, block) == counted


def test_blocks_fill_fast_memory_and_kernels_take_no_more() -> None:
    assert query_block(163e3, 128) == 128  # there would be room for 159
    assert query_block(96e3, 128) == 93
    assert query_block(16, 128) == 1


def test_no_attention_moves_less_than_the_bound_and_blocks_are_near_it() -> None:
    for tokens in (512, 4096, 65536):
        for head in (64, 128, 256):
            for fast in (48e3, 163e3, 227e3, 4e6):
                traffic = attention_traffic(tokens, head, fast)
                assert traffic.bound <= traffic.fused
                if traffic.block > head / 2:
                    assert traffic.fused < traffic.written
                if query_block(fast, head) < 128:  # it is room that limits the block
                    # a quarter of the room for queries, and the mask on both: 16 times N²d²/(2M)
                    assert traffic.fused < 17 * traffic.bound
    # room for less than a head's width squared: a product of matrices in blocks, not FlashAttention, is the bound
    assert least_bytes(65536, 256, 8e3) < 2 * 65536**2 * 256**2 / 4e3 / 2


@pytest.mark.parametrize("kernel", MEASURED)
def test_speeds_are_those_of_measured_kernels(kernel: tuple[str, int]) -> None:
    device, head = kernel
    shape = replace(SHAPES["gpt3-175b"], heads=2048 / head, head_dim=head, qk=0)
    machine = machine_of(DEVICES[device])
    for tokens, speed in zip(2 ** np.arange(9, 15), MEASURED[kernel], strict=True):
        plan = Plan(micro_batch=16384 / tokens, seq=tokens)
        seconds = Roofline(
            shape, machine, plan, replace(ENGINES["fsdp"], attention=1.0)
        ).attention()
        flops = 2 * 16384 * tokens * 2048
        # the kernels of H100 have become a fifth faster since
        later = 1.2 if device == "H100-80GB" else 1.0
        assert flops / seconds / 1e12 == pytest.approx(later * speed, rel=0.12), tokens


def test_a_ring_sees_the_keys_of_one_rank_and_ulysses_those_of_all() -> None:
    shape, machine = SHAPES["llama3-8b"], machine_of(DEVICES["H100-80GB"])
    ring = Plan(seq=65536, cp=16)
    ulysses = replace(ring, context=CONTEXT.index("ulysses"))
    slow, fast = (
        float(Roofline(shape, machine, plan, ENGINES["weft"]).attention())
        for plan in (ring, ulysses)
    )
    assert slow / fast == pytest.approx((1 + 520 / 4096) / (1 + 520 / 65536), rel=1e-3)


def test_recomputation_stops_before_the_last_product_where_checkpoints_do() -> None:
    shape, machine = SHAPES["gpt3-175b"], machine_of(DEVICES["A100-80GB"], hbm=1e9)
    plan = Plan(batch=4, seq=2048, recompute=2)
    engine = replace(
        ENGINES["fsdp"],
        attention=1e9,
        elementwise=0.0,
        inner=0.0,
        kernels=0.0,
        step=0.0,
    )
    stops, repeats = (
        float(step_time(shape, machine, plan, replace(engine, stops=kind)).recompute)
        for kind in (1.0, 0.0)
    )
    assert stops / repeats == pytest.approx(
        2 / 3, rel=0.01
    )  # the down projection is a third


def test_attention_waits_for_memory_where_fast_memory_is_tiny() -> None:
    shape, plan = SHAPES["llama3-8b"], Plan(seq=32768)
    machine = machine_of(DEVICES["H100-80GB"])
    starved = replace(machine, fast=2048.0)
    usual, slow = (
        float(Roofline(shape, each, plan, ENGINES["weft"]).attention())
        for each in (machine, starved)
    )
    moved = shape.heads * fused_bytes(
        32768, shape.score_dim, query_block(2048.0, shape.score_dim)
    )
    assert slow == pytest.approx(float(moved / machine.hbm)) and slow > 2 * usual
