"""Training on one GPU: tokens per second, share of the peak and memory of Weft, and of ``transformers``' Llama.

The model is that of ``recipes/gpu-1b.toml``. Each variant trains a few steps on random tokens in a process of its own,
under bfloat16 with float32 parameters and a fused AdamW;
the peer under ``torch.autocast``. A figure is the median step.

    python bench/gpu_step.py [--variants NAME ...] [--steps 6] [--json FILE] [--tiny --device cpu]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from weft.data.batch import Batch
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.observe.flops import peak_flops
from weft.recipe import ModelShape, Optimizer, Recipe, Train
from weft.run.rank_processes import rank_process
from weft.shapes.shape import flops_per_token
from weft.train.setup import build_for_training
from weft.train.step import train_step

ROOT = Path(__file__).parents[1]
SHAPE = ModelShape(
    vocab=32768, layers=16, embed=2048, heads=32, kv_heads=8, ffn=8192, tied=True, rope_theta=500000.0,
)  # fmt: skip
TINY = ModelShape(
    vocab=512, layers=2, embed=64, heads=4, kv_heads=2, ffn=128, tied=True
)
SETTINGS = Optimizer(lr=1e-4, weight_decay=0.1, clip=1.0)


class Variant(NamedTuple):
    """``side``: weft, or transformers with one of its ways of attention; ``rows`` of ``length`` tokens a pass."""

    side: str
    rows: int = 2
    compiled: bool = True
    passes: int = 1
    length: int = 8192
    chunk: int = 4096
    recompute: str = "none"


VARIANTS = {
    "weft-eager": Variant("weft", compiled=False),
    "weft": Variant("weft"),
    "weft-1": Variant("weft", rows=1),
    "weft-4": Variant("weft", rows=4),
    "weft-2x4": Variant("weft", passes=4),
    "weft-chunk2k": Variant("weft", chunk=2048),
    "weft-chunk16k": Variant("weft", chunk=16384),
    "weft-full": Variant("weft", rows=4, recompute="full"),
    "weft-2k": Variant("weft", rows=8, length=2048),
    "sdpa-eager": Variant("sdpa", compiled=False),
    "sdpa": Variant("sdpa"),
    "sdpa-1": Variant("sdpa", rows=1),
    "sdpa-2k": Variant("sdpa", rows=8, length=2048),
}


def weft_step(
    v: Variant, shape: ModelShape, device: torch.device
) -> Callable[[], float]:
    train = Train(
        dtype="bfloat16", batch=v.rows * v.passes, micro_batch=v.rows, compile=v.compiled, loss_chunk=v.chunk,
        recompute=v.recompute,
    )  # fmt: skip
    mesh = Mesh.create(Layout(), device.type)
    model, state = build_for_training(
        shape, mesh, Recipe(train=train, optimizer=SETTINGS)
    )
    batches = []
    for number in range(v.passes):
        tokens = tokens_of(v, shape, number)
        positions = torch.arange(v.length).repeat(v.rows, 1)
        bounds = torch.arange(0, v.rows * v.length + 1, v.length, dtype=torch.int32)
        batch = Batch(
            tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, bounds
        )
        batches.append(batch.to(device))

    def step() -> float:
        return train_step(
            model, state, batches, mesh, lr=SETTINGS.lr, clip=SETTINGS.clip
        ).loss

    return step


def transformers_step(
    v: Variant, shape: ModelShape, device: torch.device
) -> Callable[[], float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.embed, intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied, max_position_embeddings=v.length, use_cache=False, attn_implementation=v.side,
    )  # fmt: skip
    with device:
        model = LlamaForCausalLM(config).train()
    if v.compiled:
        for layer in model.model.layers:
            layer.compile()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=SETTINGS.lr,
        betas=SETTINGS.betas,
        weight_decay=0.1,
        fused=True,
    )
    rows = tokens_of(v, shape, 0).to(device)
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous().flatten()

    def loss_of(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.lm_head(hidden).float(), labels, reduction="sum")

    def step() -> float:
        with torch.autocast(device.type, torch.bfloat16):
            hidden = model.model(input_ids=tokens, use_cache=False)[0].flatten(0, 1)
            # the loss in pieces that are computed again, as a whole row's logits take gigabytes
            parts = zip(hidden.split(v.chunk), labels.split(v.chunk), strict=True)
            losses = [
                torch.utils.checkpoint.checkpoint(loss_of, *part, use_reentrant=False)
                for part in parts
            ]
            loss = torch.stack(losses).sum() / labels.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


def tokens_of(v: Variant, shape: ModelShape, number: int) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(number)
    return torch.randint(shape.vocab, (v.rows, v.length + 1), generator=seeded)


def measure(
    name: str, steps: int, device: torch.device, tiny: bool, trace: str
) -> dict[str, Any]:
    v = VARIANTS[name]
    shape = TINY if tiny else SHAPE
    if tiny:
        v = v._replace(length=128, chunk=64)
    cuda = device.type == "cuda"
    torch.set_float32_matmul_precision("high")
    began = time.perf_counter()
    step = (weft_step if v.side == "weft" else transformers_step)(v, shape, device)
    loss = step()
    step()
    warm = time.perf_counter() - began
    times = []
    for _ in range(steps):
        if cuda:
            torch.cuda.synchronize()
        before = time.perf_counter()
        loss = step()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - before)
    if trace and cuda:
        from torch.profiler import ProfilerActivity, profile

        with profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]
        ) as profiler:
            step()
            torch.cuda.synchronize()
        table = profiler.key_averages().table(
            sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=90
        )
        Path(trace).write_text(table)
    seconds = statistics.median(times)
    tokens = v.rows * v.passes * v.length
    flops = flops_per_token(shape, shape.vocab, v.length) * tokens
    peak = peak_flops(device, torch.bfloat16)
    row = {
        "variant": name, **v._asdict(), "seconds": seconds, "spread": [min(times), max(times)], "loss": loss,
        "tokens_per_second": tokens / seconds, "tflops": flops / seconds / 1e12,
        "mfu": flops / seconds / peak if peak else None, "warm_seconds": warm,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "device": torch.cuda.get_device_name() if cuda else "CPU", "torch": torch.__version__,
    }  # fmt: skip
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS)
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--seconds", type=float, default=100, help="limit of one variant"
    )
    parser.add_argument(
        "--json", type=Path, default=ROOT / "bench" / "results" / "gpu_step.jsonl"
    )
    parser.add_argument(
        "--trace", default="", help="folder for a table of kernels of each variant"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        name = args.variants[0]
        trace = str(Path(args.trace) / f"{name}.txt") if args.trace else ""
        device = torch.device(args.device)
        with rank_process(device.type, 60):
            row = measure(name, args.steps, device, args.tiny, trace)
        with args.json.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        mfu = f"{100 * row['mfu']:.1f} % of peak" if row["mfu"] else ""
        print(
            f"{name:<14}{row['tokens_per_second']:10.0f} tokens/s {row['tflops']:7.1f} TFLOP/s {mfu} "
            f"{row['peak_gib'] or 0:6.1f} GiB  loss {row['loss']:.4f}  ({row['warm_seconds']:.0f} s to warm up)",
            flush=True,
        )
        return
    for name in args.variants:
        command = [sys.executable, __file__, "--inside", "--variants", name, "--steps", str(args.steps),
                   "--device", args.device, "--json", str(args.json), "--trace", args.trace]  # fmt: skip
        command += ["--tiny"] * args.tiny
        try:
            done = subprocess.run(
                command,
                timeout=args.seconds,
                env=os.environ,
                stderr=subprocess.PIPE,
                text=True,
            )
            if done.returncode:
                print(f"{name:<14} FAILED: {done.stderr.strip()[-700:]}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"{name:<14} LATE: over {args.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
