"""One training step, side by side: tokens per second of Weft, of a hand-written PyTorch loop and of ``transformers``.

On four ranks (``shard=2,tp=2``) the peer is the hand-written model under PyTorch's FSDP2 and ``parallelize_module``; on
four replicas (``dp=4``) it is the hand-written model under ``DistributedDataParallel``.
All sides start from the same weights, see the same rows (one document each, so that all do the same work) and must
report the same losses. They take turns, a few steps at a time, and the ratio is that of the medians.

    python bench/step.py [--rounds 10] [--only single|ranks|replicas] [--json bench/results/step.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from weft.data.batch import Batch
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.memory.heap import keep_heap
from weft.models.rope import angles, frequencies
from weft.observe.flops import measured_flops
from weft.recipe import ModelShape, Optimizer, Recipe, Train
from weft.shapes.parameters import parameter_count
from weft.shapes.shape import flops_per_token
from weft.train.setup import build_for_training
from weft.train.step import train_step

SETTINGS = Optimizer(lr=1e-3, weight_decay=0.1, clip=1.0)
RESULTS = Path(__file__).parent / "results" / "step.json"
TOLERANCE = 1e-4  # of losses between the sides, in float32

#: One optimizer step; returns the mean loss.
Step = Callable[[], float]


class Job(NamedTuple):
    shape: ModelShape
    rows: int  # per step, over all ranks
    length: int


JOBS = {
    "small": Job(
        ModelShape(vocab=4096, layers=6, embed=384, heads=6, kv_heads=2, ffn=1024),
        4,
        512,
    ),
    "quickstart": Job(
        ModelShape(
            vocab=2048,
            layers=4,
            embed=192,
            heads=6,
            kv_heads=2,
            qk_norm=True,
            tied=True,
        ),
        16,
        256,
    ),
    "smoke": Job(ModelShape(vocab=64, layers=1, embed=32, heads=2, kv_heads=2), 2, 16),
}


def tokens_of(job: Job) -> torch.Tensor:
    """``[rows, length + 1]`` random ids, the same on every rank."""
    return torch.randint(
        job.shape.vocab,
        (job.rows, job.length + 1),
        generator=torch.Generator().manual_seed(0),
    )


# --- ours ---


def weft_step(job: Job, mesh: Mesh) -> tuple[Step, dict[str, torch.Tensor]]:
    """Weft's step under ``mesh``, and on one device its initial weights by name."""
    train = Train(dtype="float32", batch=job.rows)
    model, state = build_for_training(
        job.shape, mesh, Recipe(train=train, optimizer=SETTINGS)
    )
    mine = tokens_of(job).chunk(mesh.size("dp", "shard"))[mesh.batch_rank]
    rows = len(mine)
    positions = torch.arange(job.length).repeat(rows, 1)
    cu_seqlens = torch.arange(0, rows * job.length + 1, job.length, dtype=torch.int32)
    batch = Batch(
        mine[:, :-1].contiguous(), mine[:, 1:].contiguous(), positions, cu_seqlens
    )

    def step() -> float:
        return train_step(
            model, state, [batch], mesh, lr=SETTINGS.lr, clip=SETTINGS.clip
        ).loss

    return step, {h.name: h.local.clone() for h in state.held}


# --- the hand-written loop ---


class PlainAttention(nn.Module):
    def __init__(self, s: ModelShape) -> None:
        super().__init__()
        self.head_dim = s.head_dim
        self.wq = nn.Linear(s.embed, s.heads * s.head_dim, bias=False)
        self.wk = nn.Linear(s.embed, s.kv_heads * s.head_dim, bias=False)
        self.wv = nn.Linear(s.embed, s.kv_heads * s.head_dim, bias=False)
        self.wo = nn.Linear(s.heads * s.head_dim, s.embed, bias=False)
        self.q_norm = nn.RMSNorm(s.head_dim, s.norm_eps) if s.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(s.head_dim, s.norm_eps) if s.qk_norm else nn.Identity()

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv)
        )
        q, k = rotated(self.q_norm(q), cos, sin), rotated(self.k_norm(k), cos, sin)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(-2))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class PlainFeedForward(nn.Module):
    def __init__(self, s: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(s.embed, s.ffn, bias=False)
        self.up = nn.Linear(s.embed, s.ffn, bias=False)
        self.down = nn.Linear(s.ffn, s.embed, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class PlainBlock(nn.Module):
    def __init__(self, s: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(s.embed, s.norm_eps)
        self.attention = PlainAttention(s)
        self.ffn_norm = nn.RMSNorm(s.embed, s.norm_eps)
        self.ffn = PlainFeedForward(s)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class PlainModel(nn.Module):
    """Llama (or Qwen 3, with ``qk_norm``) as one would write it by hand for one device."""

    def __init__(self, s: ModelShape, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(s.vocab, s.embed)
        self.blocks = nn.ModuleList(PlainBlock(s) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.embed, s.norm_eps)
        self.head = nn.Linear(s.embed, s.vocab, bias=False)
        if s.tied:
            self.head.weight = self.embedding.weight
        self.cos, self.sin = (
            x[0]
            for x in angles(torch.arange(length)[None], frequencies(s), torch.float32)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def plain_model(job: Job, weights: dict[str, torch.Tensor]) -> PlainModel:
    model = PlainModel(job.shape, job.length)
    # our parameters that are a module of their own there
    modules = {"table": "weight", "scale": "weight"}
    renamed = {}
    for name, value in weights.items():
        *path, leaf = name.split(".")
        renamed[".".join([*path, modules.get(leaf, f"{leaf}.weight")])] = value
    if job.shape.tied:
        renamed["head.weight"] = renamed["embedding.weight"]
    model.load_state_dict(renamed)
    return model


def adamw(model: nn.Module) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": SETTINGS.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps, fused=True
    )


def plain_step(
    job: Job, model: nn.Module, logits: Callable[[torch.Tensor], torch.Tensor]
) -> Step:
    """The loop everybody writes first. ``logits`` calls the model."""
    rows, optimizer = tokens_of(job), adamw(model)
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous().flatten()

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(logits(tokens).flatten(0, 1), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip)
        optimizer.step()
        return loss.item()

    return step


def transformers_model(job: Job, plain: PlainModel) -> nn.Module:
    """``transformers``' Llama (Qwen 3 for shapes with qk-norm) with the weights of ``plain``."""
    import transformers

    s = job.shape
    family = "Qwen3" if s.qk_norm else "Llama"
    config = getattr(transformers, f"{family}Config")(
        vocab_size=s.vocab, hidden_size=s.embed, intermediate_size=s.ffn, num_hidden_layers=s.layers,
        num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, head_dim=s.head_dim, rms_norm_eps=s.norm_eps,
        tie_word_embeddings=s.tied, max_position_embeddings=job.length, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    theirs = {
        "embedding": "model.embed_tokens",
        "blocks": "model.layers",
        "norm": "model.norm",
        "head": "lm_head",
    }
    inner = {
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attention": "self_attn",
    }
    inner |= {
        "ffn": "mlp",
        "wq": "q_proj",
        "wk": "k_proj",
        "wv": "v_proj",
        "wo": "o_proj",
    }
    inner |= {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    renamed = {}
    for name, value in plain.state_dict().items():
        first, *path = name.split(".")
        renamed[".".join([theirs[first], *(inner.get(p, p) for p in path)])] = value
    model.load_state_dict(renamed)
    return model.train()


# --- PyTorch's own parallelism ---


def torch_parallel_step(job: Job, model: PlainModel) -> Step:
    """The hand-written model under ``parallelize_module`` (the plan of torchtitan's Llama and Qwen 3) and FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    mesh._flatten("world")  # lets DTensor reduce over both dimensions at once
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1)
        ),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh["tp"], plan)
    if job.shape.tied:  # parallelize_module has replaced both
        model.head.weight = model.embedding.weight
    norms = {
        f"attention.{n}_norm": SequenceParallel(sequence_dim=2, use_local_output=True)
        for n in "qk"
    }
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "ffn.gate": ColwiseParallel(),
            "ffn.up": ColwiseParallel(),
            "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
            **(norms if job.shape.qk_norm else {}),
        })  # fmt: skip
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"], reshard_after_forward=False)
    optimizer = adamw(model)
    rows = tokens_of(job).chunk(2)[mesh.get_local_rank("shard")]
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous().flatten()

    def step() -> float:
        optimizer.zero_grad()
        with loss_parallel():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels)
            loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        nn.utils.clip_grads_with_norm_(
            model.parameters(), SETTINGS.clip, norm.full_tensor()
        )  # type: ignore[attr-defined]
        optimizer.step()
        local = loss.full_tensor() if isinstance(loss, DTensor) else loss
        mean = local.detach().clone() / 2
        dist.all_reduce(mean, group=mesh.get_group("shard"))
        return mean.item()

    return step


def ddp_step(job: Job, model: PlainModel) -> Step:
    """The hand-written model under ``DistributedDataParallel``, with gradients as views of its buckets."""
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    ranks = dist.get_world_size()
    rows, optimizer = tokens_of(job).chunk(ranks)[dist.get_rank()], adamw(model)
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous().flatten()

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(parallel(tokens).flatten(0, 1), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip)
        optimizer.step()
        mean = loss.detach().clone() / ranks
        dist.all_reduce(mean)
        return mean.item()

    return step


# --- measuring ---


def race(sides: dict[str, Step], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step of each side in each round; the sides take turns and the order turns round every time."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds):
        for name in list(sides)[:: 1 if i % 2 else -1]:
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                sides[name]()
            seconds[name].append((time.perf_counter() - start) / steps)
    return seconds


def measure(
    job: Job,
    sides: dict[str, Step],
    rounds: int,
    steps: int,
    peak: float,
    trials: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Check that the sides compute the same, let them race, and put speeds and ratios of medians into a table.

    ``trials``: the steps that a side takes before the race to find out what is fast.
    """
    # which also warms them up
    losses = {name: [step() for _ in range(3)] for name, step in sides.items()}
    for name, theirs in losses.items():
        if (
            max(abs(a - b) / b for a, b in zip(losses["weft"], theirs, strict=True))
            > TOLERANCE
        ):
            raise SystemExit(
                f"{name} and weft compute different losses: {theirs} and {losses['weft']}"
            )
    for name, count in (trials or {}).items():
        for _ in range(count):
            sides[name]()
    seconds = race(sides, rounds, steps)
    tokens = job.rows * job.length
    flops = tokens * flops_per_token(job.shape, job.shape.vocab, job.length)
    ours = statistics.median(seconds["weft"])
    table: dict[str, Any] = {}
    for name, times in seconds.items():
        middle = statistics.median(times)
        table[name] = {
            "tokens_per_s": round(tokens / middle),
            "flops_utilisation": round(flops / middle / peak, 3),
        }
        if name != "weft":
            paired = [
                theirs / mine
                for mine, theirs in zip(seconds["weft"], times, strict=True)
            ]
            low, _, high = statistics.quantiles(paired, n=4)
            table[name] |= {
                "ratio": round(middle / ours, 3),
                "ratio_quartiles": [round(low, 3), round(high, 3)],
            }
    return table


def weft_alone(job: Job) -> Step:
    keep_heap()  # as every rank of Weft does
    return weft_step(job, Mesh.single())[0]


def hand_written_alone(job: Job) -> Step:
    plain = plain_model(job, weft_step(job, Mesh.single())[1])
    return plain_step(job, plain, plain)


def transformers_alone(job: Job) -> Step:
    theirs = transformers_model(job, plain_model(job, weft_step(job, Mesh.single())[1]))
    return plain_step(job, theirs, lambda tokens: theirs(tokens).logits)


def in_process(make: Callable[[Job], Step], job: Job) -> Step:
    """The step that ``make`` gives, in a process of its own: how each uses its memory is part of how fast it is."""
    context = mp.get_context("spawn")
    pipe, end = context.Pipe()
    context.Process(target=_serve, args=(end, make, job), daemon=True).start()

    def step() -> float:
        pipe.send(None)
        return pipe.recv()

    return step


def _serve(pipe: Any, make: Callable[[Job], Step], job: Job) -> None:
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    step = make(job)
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        pipe.send(step())


def single(
    job: Job,
    makes: dict[str, Callable[[Job], Step]],
    rounds: int,
    steps: int,
    peak: float,
) -> dict[str, Any]:
    """Each side in one process, in turns."""
    sides = {name: in_process(make, job) for name, make in makes.items()}
    return measure(job, sides, rounds, steps, min(2, os.cpu_count() or 1) * peak)


#: What runs in one process.
ALONE = {
    "weft": weft_alone,
    "hand-written": hand_written_alone,
    "transformers": transformers_alone,
}


def on_rank(
    rank: int, job: Job, rounds: int, steps: int, peak: float
) -> dict[str, Any]:
    """One of four ranks: Weft's ``shard=2,tp=2`` and PyTorch's own, in the same processes."""
    plain = plain_model(job, weft_step(job, Mesh.single())[1])
    sides = {
        "weft": weft_step(job, Mesh.create(Layout(shard=2, tp=2), "cpu"))[0],
        "FSDP2 + parallelize_module": torch_parallel_step(job, plain),
    }
    return measure(job, sides, rounds, steps, min(4, os.cpu_count() or 1) * peak)


def on_replica(
    rank: int, job: Job, rounds: int, steps: int, peak: float
) -> dict[str, Any]:
    """One of four replicas: Weft's ``dp=4`` and PyTorch's DDP, in the same processes."""
    plain = plain_model(job, weft_step(job, Mesh.single())[1])
    sides = {
        "weft": weft_step(job, Mesh.create(Layout(dp=4), "cpu"))[0],
        "DistributedDataParallel": ddp_step(job, plain),
    }
    return measure(job, sides, rounds, steps, min(4, os.cpu_count() or 1) * peak)


def on_ranks(
    count: int, target: Callable[..., dict[str, Any]], *given: Any
) -> dict[str, Any]:
    """What ``target(rank, *given)`` returns on the first of so many ranks of a group, of one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        # Forked from one process that imports for all of them what takes each of them seconds.
        imported = [
            "torch",
            "torch._dynamo",
            "torch.distributed.tensor",
            "weft.train.setup",
        ]
        mp.get_context("forkserver").set_forkserver_preload(imported)
        given = (count, folder, target, given)
        mp.start_processes(_begin_and_end, given, count, start_method="forkserver")  # type: ignore[no-untyped-call]
        found: dict[str, Any] = json.loads(Path(folder, "table.json").read_text())
        return found


def _begin_and_end(
    rank: int,
    count: int,
    folder: str,
    target: Callable[..., dict[str, Any]],
    given: Any,
) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count
    )
    table = target(rank, *given)
    if rank == 0:
        Path(folder, "table.json").write_text(json.dumps(table))
    dist.barrier()
    dist.destroy_process_group()


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        cpu = names[0] if names else cpu
    return {
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
        "torch": torch.__version__,
        "cpu": cpu,
        "cores": os.cpu_count(),
        # what others keep busy: should be well below one core
        "load_before": round(os.getloadavg()[0], 1),
    }


def write(results: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nwritten to {path}")


def show(title: str, table: dict[str, Any]) -> None:
    print(
        f"\n{title}\n  {'':28}{'tokens/s':>10}{'of peak':>9}{'weft is':>10}   quartiles"
    )
    for name, row in table.items():
        line = f"  {name:28}{row['tokens_per_s']:>10,}{row['flops_utilisation']:>9.0%}"
        if "ratio" in row:
            low, high = row["ratio_quartiles"]
            line += f"{row['ratio']:>9.2f}x   {low:.2f} - {high:.2f}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--rounds", type=int, default=10, help="turns of every side")
    parser.add_argument("--steps", type=int, default=1, help="steps per turn")
    parser.add_argument("--only", choices=["single", "ranks", "replicas"])
    parser.add_argument(
        "--job", choices=list(JOBS), help="default: small and quickstart"
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    results: dict[str, Any] = {
        "machine": machine(),
        "rounds": options.rounds,
        "steps_per_round": options.steps,
        "jobs": {},
    }
    torch.set_num_threads(1)
    peak = measured_flops(torch.device("cpu"), torch.float32)  # of one core
    for name in [options.job] if options.job else ["small", "quickstart"]:
        job = JOBS[name]
        s = job.shape
        found = results["jobs"][name] = {
            "shape": s.model_dump(exclude_defaults=True),
            "rows": job.rows,
            "length": job.length,
        }
        parameters = parameter_count(s, s.vocab) / 1e6
        title = f"{name}: {parameters:.1f}M parameters, {job.rows} x {job.length} tokens per step, float32"
        if options.only in (None, "single"):
            found["single"] = single(job, ALONE, options.rounds, options.steps, peak)
            show(f"{title}, one process", found["single"])
        if options.only in (None, "ranks"):
            found["ranks"] = on_ranks(
                4, on_rank, job, options.rounds, options.steps, peak
            )
            show(f"{title}, 4 ranks shard=2,tp=2", found["ranks"])
        if options.only in (None, "replicas"):
            found["replicas"] = on_ranks(
                4, on_replica, job, options.rounds, options.steps, peak
            )
            show(f"{title}, 4 replicas dp=4", found["replicas"])
    write(results, options.json)


if __name__ == "__main__":
    main()
