"""Fully sharded experts beside static ones under skewed routing, on ranks that sleep as long as experts would compute.

Every rank's tokens choose by Zipf's law (power 1.2), the same in every step. For each row of an expert a rank sleeps a
fixed time forward and twice that backward; for each expert that it borrows or gives back, as long as the link would
take. So the ranks of this machine do not take each other's cores, and everything but the sleep is Weft's real step.
The defaults are Qwen3-30B-A3B's experts (2048 x 768, 8 of 128 chosen) at 400 TFLOP/s and 50 GB/s, 65,536 rows on each
rank, in slow motion.

    python bench/placement.py [--rounds 6] [--json bench/results/placement.json]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from step import TOLERANCE, Job, machine, on_ranks, race, weft_step, write

from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models.experts import Experts
from weft.models.router import Router
from weft.parallel.experts.copies import Copies
from weft.recipe import ModelShape

RESULTS = Path(__file__).parent / "results" / "placement.json"
T = torch.Tensor
JOB = Job(
    ModelShape(vocab=64, layers=2, embed=16, heads=2, kv_heads=2, experts=32, experts_per_token=2, expert_ffn=16),
    16, 256,
)  # fmt: skip
ROWS = 65_536  # of experts that a rank has in each layer
ROW_S = 6 * 2048 * 768 / 400e12  # forward
EXPERT_S = 3 * 2048 * 768 * 2 / 50e9  # over a link, in bfloat16


class _Asleep(torch.autograd.Function):
    """Rows as they are; sleeps forward, and backward for ``factor`` times as long."""

    @staticmethod
    def forward(ctx: Any, x: T, seconds: float, factor: float) -> T:
        ctx.seconds = factor * seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: T) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], None, None


def zipf_choices(experts: int, k: int, tokens: int, rank: int, layer: int) -> T:
    """``k`` different experts for each token, ``[tokens, k]``; which are hot is the same on all ranks."""
    odds = torch.arange(1, experts + 1).double() ** -1.2
    odds = odds[torch.randperm(experts, generator=torch.Generator().manual_seed(layer))]
    return torch.multinomial(odds.expand(tokens, -1), k, generator=torch.Generator().manual_seed(99 * rank + layer))


def on_rank(rank: int, ranks: int, rounds: int, slow: float) -> dict[str, Any]:
    """Both sides on one of the ranks."""
    shape, tokens = JOB.shape, JOB.rows * JOB.length // ranks
    row_s, expert_s = slow * ROW_S * ROWS / (tokens * shape.experts_per_token), slow * EXPERT_S
    made, borrowed = Experts._made, Copies.borrowed
    seen = {"rows": 0, "borrowed": 0}

    def choose(self: Router, scores: T, by: int) -> T:
        return zipf_choices(self.count, shape.experts_per_token, len(scores), rank, self.layer)

    def compute(self: Experts, rows: T, *others: T) -> T:
        seen["rows"] += len(rows)
        return made(self, _Asleep.apply(rows, len(rows) * row_s, 2.0), *others)

    def borrow(self: Copies, gate: T, *others: T) -> tuple[T, ...]:
        sent, received = sum(self.plan.sent), sum(self.plan.received)
        seen["borrowed"] += received
        return borrowed(self, _Asleep.apply(gate, max(sent, received) * expert_s, 1.0), *others)

    with (
        mock.patch.object(Router, "_best", choose), mock.patch.object(Experts, "_made", compute),
        mock.patch.object(Copies, "borrowed", borrow),
    ):  # fmt: skip
        one = Layout(shard=ranks, ep=ranks)
        layouts = {"static": one, "sharded": one.model_copy(update={"placement": "sharded"})}
        steps = {name: weft_step(JOB, Mesh.create(layout, "cpu"))[0] for name, layout in layouts.items()}
        losses = {name: [step() for _ in range(3)] for name, step in steps.items()}
        if max(abs(a - b) / b for a, b in zip(*losses.values(), strict=True)) > TOLERANCE:
            raise SystemExit(f"the sides compute different losses: {losses}")
        table: dict[str, Any] = {}
        for name, step in steps.items():
            seen.update(rows=0, borrowed=0)
            step()
            everyones: list[Any] = [None] * ranks
            dist.all_gather_object(everyones, dict(seen))
            rows = [one["rows"] for one in everyones]
            table[name] = {
                "max_over_mean": round(max(rows) / statistics.mean(rows), 3),
                "copies_per_layer": sum(one["borrowed"] for one in everyones) / shape.layers,
            }
        seconds = race(steps, rounds, 1)
    for name, times in seconds.items():
        table[name]["step_s"] = round(statistics.median(times), 3)
    ratios = [static / sharded for static, sharded in zip(*seconds.values(), strict=True)]
    return table | {"ratio": round(statistics.median(ratios), 3), "ratios": [round(r, 3) for r in ratios]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=6, help="turns of both sides")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--slow", type=float, default=60.0, help="how many times slower than the real thing")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    results: dict[str, Any] = {
        "machine": machine(), "rounds": options.rounds, "shape": JOB.shape.model_dump(exclude_defaults=True),
        "slow_motion": options.slow, "row_s": ROW_S, "expert_s": EXPERT_S,
    }  # fmt: skip
    for ranks in options.ranks:
        found = results[f"{ranks} ranks"] = on_ranks(ranks, on_rank, ranks, options.rounds, options.slow)
        print(
            f"{ranks} ranks: {found['ratio']:.2f}x", {name: found[name] for name in ("static", "sharded")}, flush=True
        )
    write(results, options.json)


if __name__ == "__main__":
    main()
