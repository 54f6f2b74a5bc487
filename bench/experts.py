"""One training step of a mixture of experts: Weft beside ``transformers``, and ways to spread its experts over ranks.

In one process the peer is ``transformers``' Qwen3-MoE in the same hand-written loop as in ``bench/step.py``. On four
ranks all sides are Weft's: experts only cut in their state (``shard=4``) beside ``ep=4`` with each way to move tokens.
All sides start from the same weights, see the same rows and must report the same losses. They take turns.

    python bench/experts.py [--rounds 8] [--only single|ranks] [--json bench/results/experts.json]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import warnings
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from step import Job, Step, machine, measure, plain_step, show, weft_step
from torch import nn

from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.model_parameters import parameters
from weft.models.hf import export
from weft.observe.flops import measured_flops
from weft.recipe import ModelShape

RESULTS = Path(__file__).parent / "results" / "experts.json"
QWEN: dict[str, Any] = {"qk_norm": True, "router": "pre-softmax", "router_norm": True}
JOBS = {
    # 16 experts of which each token goes through 4: the products of one of them have few rows, as in large models.
    "tiny": Job(
        ModelShape(
            vocab=2048, layers=4, embed=256, heads=8, kv_heads=2, experts=16, experts_per_token=4, expert_ffn=128,
            **QWEN,
        ), 8, 256,
    ),
    "smoke": Job(
        ModelShape(
            vocab=64, layers=1, embed=32, heads=2, kv_heads=2, experts=4, experts_per_token=2, expert_ffn=16, **QWEN
        ), 4, 16,
    ),
}  # fmt: skip
DISPATCH = [way for way in get_args(Layout.model_fields["dispatch"].annotation) if way != "none"]


def transformers_model(job: Job, weights: dict[str, torch.Tensor]) -> nn.Module:
    """``transformers``' model of the same family, from an export of these ``weights``."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        export(weights, job.shape, Path(folder) / "model")
        model = AutoModelForCausalLM.from_pretrained(Path(folder) / "model", dtype=torch.float32)
    model.config.use_cache = False
    return model.train()


def single(job: Job, rounds: int, peak: float) -> dict[str, Any]:
    """One process: Weft and ``transformers``."""
    threads = min(2, os.cpu_count() or 1)
    torch.set_num_threads(threads)
    step, weights = weft_step(job, Mesh.single())
    theirs = transformers_model(job, weights)
    sides = {"weft": step, "transformers": plain_step(job, theirs, lambda tokens: theirs(tokens).logits)}
    return measure(job, sides, rounds, 1, threads * peak)


def on_rank(rank: int, port: int, job: Job, rounds: int, peak: float, path: str) -> None:
    """One of four ranks. ``weft``, to which all are compared, is that whose experts stay where their tokens are."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    layouts = {"weft": Layout(shard=4)} | {way: Layout(shard=4, ep=4, dispatch=way) for way in DISPATCH}
    sides: dict[str, Step] = {name: weft_step(job, Mesh.create(one, "cpu"))[0] for name, one in layouts.items()}
    table = measure(job, sides, rounds, 1, min(4, os.cpu_count() or 1) * peak)
    if rank == 0:
        Path(path).write_text(json.dumps(table))
    dist.barrier()
    dist.destroy_process_group()


def four_ranks(job: Job, rounds: int, peak: float) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/table.json"
        mp.spawn(on_rank, (port, job, rounds, peak, path), nprocs=4)  # type: ignore[no-untyped-call]
        return json.loads(Path(path).read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=8, help="turns of every side")
    parser.add_argument("--only", choices=["single", "ranks"])
    parser.add_argument("--job", choices=list(JOBS), default="tiny")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    job = JOBS[options.job]
    size = sum(p.numel for p in parameters(job.shape, job.shape.vocab)) / 1e6
    title = f"{options.job}: {size:.1f}M parameters, {job.rows} x {job.length} tokens per step, float32"
    results: dict[str, Any] = {
        "machine": machine(), "rounds": options.rounds, "shape": job.shape.model_dump(exclude_defaults=True),
        "rows": job.rows, "length": job.length,
    }  # fmt: skip
    torch.set_num_threads(1)
    peak = measured_flops(torch.device("cpu"), torch.float32)  # of one core
    if options.only != "ranks":
        results["single"] = single(job, options.rounds, peak)
        show(f"{title}, one process", results["single"])
    if options.only != "single":
        results["ranks"] = four_ranks(job, options.rounds, peak)
        show(f"{title}, 4 ranks; weft: shard=4, the others: shard=4,ep=4", results["ranks"])
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nwritten to {options.json}")


if __name__ == "__main__":
    main()
