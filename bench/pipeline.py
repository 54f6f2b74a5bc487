"""Pipelines side by side: steps per second of Weft and of ``torch.distributed.pipelining`` on four ranks.

Both sides run Weft's transformer, cut into the same stages on the same ranks, over the same microbatches, with the same
clipping and optimizer, and must report the same losses and gradient norms: only the pipeline differs. They take turns.
Schedules that split backward get two peers: PyTorch's runtime with Weft's split modules, through its ``dw_builder``,
and with PyTorch's own way to split, by walking the graph of plain linear layers.

Then, on stages that sleep instead of computing (as if every rank had a device of its own), what a step takes, in Weft
and in PyTorch, against what the simulator says.

    python bench/pipeline.py [--rounds 8] [--quick] [--only steps|simulated] [--json bench/results/pipeline.json]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from modelled import sleeping
from step import SETTINGS, TOLERANCE, Job, adamw, machine, on_ranks, tokens_of, write
from torch import nn
from torch.distributed import pipelining as torch_pipelining

from weft.data.batch import Batch
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models.fused import Tape, deferred
from weft.models.loss import SummedLoss
from weft.models.rope import angles
from weft.models.transformer import Transformer
from weft.parallel.state import State
from weft.recipe import Data, ModelShape, Recipe, Train
from weft.schedule.actions import Action
from weft.schedule.build import build, builders
from weft.schedule.execute import execute
from weft.schedule.lower import lower
from weft.schedule.pipeline_wire import Wire
from weft.schedule.simulate import Costs, simulate
from weft.schedule.stages import Stage
from weft.shapes.parameters import parameter_count
from weft.train.setup import build_for_training
from weft.train.step import train_step

RANKS = 4
RESULTS = Path(__file__).parent / "results" / "pipeline.json"

#: One optimizer step; returns the mean loss and the norm of the gradient.
Step = Callable[[], tuple[float, float]]


class Work(NamedTuple):
    job: Job  # ``rows`` are those of a step
    microbatches: int


WORK = Work(
    Job(ModelShape(vocab=1024, layers=8, embed=256, heads=4, kv_heads=2), 8, 128), 8
)
QUICK = Work(
    Job(ModelShape(vocab=64, layers=8, embed=32, heads=2, kv_heads=2), 8, 16), 8
)

#: PyTorch's class for a schedule of ours.
PEERS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "breadth-first": "ScheduleLoopedBFS",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}

#: Seconds of one action on the stages that sleep.
SLEEPS = {"F": 0.012, "I": 0.014, "W": 0.010, "B": 0.024}


# --- ours ---


def weft_step(work: Work, schedule: str) -> Step:
    model, state, mesh = staged_model(work, schedule)
    rows, length = work.job.rows // work.microbatches, work.job.length
    positions = torch.arange(length).repeat(rows, 1)
    cu_seqlens = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
    batches = [
        Batch(
            mine[:, :-1].contiguous(), mine[:, 1:].contiguous(), positions, cu_seqlens
        )
        for mine in tokens_of(work.job).split(rows)
    ]

    def step() -> tuple[float, float]:
        done = train_step(
            model, state, batches, mesh, lr=SETTINGS.lr, clip=SETTINGS.clip
        )
        return done.loss, done.grad_norm

    return step


def staged_model(work: Work, schedule: str) -> tuple[Transformer, State, Mesh]:
    """This rank's stages of the model as ``schedule`` places them."""
    mesh = Mesh.create(Layout(pp=RANKS, schedule=schedule), "cpu")
    train = Train(dtype="float32", batch=work.job.rows)
    recipe = Recipe(train=train, optimizer=SETTINGS, data=Data(seq_len=work.job.length))
    return *build_for_training(work.job.shape, mesh, recipe), mesh


# --- PyTorch's ---


class StageModule(nn.Module):
    """One stage of Weft's model as a module from tokens or activations to activations.

    ``tape``: where projections leave their weights' gradients in backward; ``plain``: they are ``F.linear``, whose
    backward PyTorch can divide.
    """

    def __init__(
        self,
        model: Transformer,
        stage: Stage,
        job: Job,
        rows: int,
        tape: Tape | None,
        plain: bool,
    ) -> None:
        super().__init__()
        self.embedding = model.embedding if stage.embedding else None
        self.blocks = nn.ModuleList(model.blocks[str(i)] for i in stage.layers)
        self.norm = model.norm if stage.head else None
        self.head = model.head if stage.head else None
        self.tape, self.plain = tape, plain
        self.rope = angles(
            torch.arange(job.length).repeat(rows, 1), model.freq, torch.float32
        )
        self.cu_seqlens = torch.arange(
            0, rows * job.length + 1, job.length, dtype=torch.int32
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with deferred(self.tape):
            if self.embedding is not None:
                x = self.embedding(x)
            for block in self.blocks:
                if self.plain:
                    with patch("weft.models.adapters.project", plain_project):
                        x = block(x, self.rope, self.cu_seqlens)
                else:
                    x = block(x, self.rope, self.cu_seqlens)
            return x if self.norm is None else self.norm(x)


def plain_project(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(F.linear(x, w) for w in weights)


def take(tape: Tape) -> Callable[[], None]:
    """What PyTorch calls after a backward: the weight gradients that it left, to be computed when called."""
    mine = tape[:]
    tape.clear()

    def run() -> None:
        for add in mine:
            add()

    return run


def torch_schedule(
    schedule: str,
    stages: list[torch_pipelining.PipelineStage],
    microbatches: int,
    loss: Callable[..., torch.Tensor],
) -> Any:
    kind = getattr(torch_pipelining, PEERS[schedule])
    single = schedule in ("gpipe", "1f1b")
    return kind(
        stages[0] if single else stages,
        n_microbatches=microbatches,
        loss_fn=loss,
        scale_grads=False,
    )


def torch_step(work: Work, schedule: str, placed: str, split: str) -> Step:
    """``placed``: the schedule of ours that puts the stages where this one wants them.

    ``split``: who divides backward: ``none``, ``tape`` (Weft's modules) or ``graph`` (PyTorch).
    """
    model, _, mesh = staged_model(work, placed)
    pipeline, job, rows = model.pipeline, work.job, work.job.rows // work.microbatches
    tokens, labels = (
        tokens_of(job)[:, :-1].contiguous(),
        tokens_of(job)[:, 1:].contiguous(),
    )
    hidden = torch.empty(rows, job.length, job.shape.embed, requires_grad=True)
    stages = []
    for s in pipeline.place.held:
        tape: Tape | None = [] if split == "tape" else None
        stages.append(
            torch_pipelining.PipelineStage(
                StageModule(
                    model,
                    pipeline.place.stages[s],
                    job,
                    rows,
                    tape,
                    plain=split == "graph",
                ),
                s,
                len(pipeline.place.stages),
                mesh.device,
                # with shapes given, it has no need to find them out
                input_args=hidden if s else tokens[:rows],
                output_args=hidden,
                group=mesh.group("pp"),
                dw_builder=None if tape is None else partial(take, tape),
            )
        )
    count = labels.numel()
    positions = torch.arange(job.length).repeat(rows, 1)
    cu_seqlens = torch.arange(0, rows * job.length + 1, job.length, dtype=torch.int32)

    def loss(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (
            model.loss(out, Batch(tokens[:rows], labels, positions, cu_seqlens)) / count
        )

    run = torch_schedule(schedule, stages, work.microbatches, loss)
    optimizer = adamw(model)
    first, last = (
        0 in pipeline.place.held,
        len(pipeline.place.stages) - 1 in pipeline.place.held,
    )

    def step() -> tuple[float, float]:
        losses: list[torch.Tensor] = []
        given = {"target": labels, "losses": losses} if last else {}
        # by the graph the loss's backward runs twice, for inputs and for weights
        with repeatable_loss() if split == "graph" else nullcontext():
            run.step(*([tokens] if first else []), return_outputs=False, **given)
        with torch.no_grad():
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            loss = (
                torch.stack(losses).sum().double()
                if last
                else torch.zeros((), dtype=torch.float64)
            )
            sums = torch.stack([loss, nn.utils.get_total_norm(grads).double().square()])
            dist.all_reduce(sums)
            mean, square = sums.tolist()
            norm = square**0.5
            if norm > SETTINGS.clip:
                torch._foreach_mul_(grads, SETTINGS.clip / (norm + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
        return mean, norm

    return step


def repeatable_loss() -> AbstractContextManager[Any]:
    """Let the loss scale copies of its gradients, and not these themselves, so that its backward may run again."""

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        scaled = [None if d is None else d * grad for d in ctx.saved_tensors]
        assert ctx.rows is None
        return *scaled, *[None] * (len(ctx.needs_input_grad) - 2)

    return patch.object(SummedLoss, "backward", staticmethod(backward))


# --- measuring ---


def sides_of(work: Work, schedule: str) -> dict[str, Step]:
    sides = {"weft": weft_step(work, schedule)}
    if not builders()[schedule].splits:
        return sides | {"PyTorch": torch_step(work, schedule, schedule, "none")}
    sides["PyTorch"] = torch_step(work, schedule, schedule, "tape")
    if schedule == "zb-h1":  # which its class for it is made to interleave
        sides["PyTorch, 2 chunks"] = torch_step(
            work, schedule, "interleaved-1f1b", "tape"
        )
    return sides | {"PyTorch, own split": torch_step(work, schedule, schedule, "graph")}


def race(
    sides: dict[str, Step], rounds: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds per step of each side in each round, and the median of the processor time that all ranks spend on one.

    The latter hardly depends on what else the machine does, and says nothing of waiting.
    """
    wall: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds):
        for name in list(sides)[:: 1 if i % 2 else -1]:
            dist.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            sides[name]()
            wall[name].append(time.perf_counter() - start)
            spent = torch.tensor(time.process_time() - start_cpu, dtype=torch.float64)
            dist.all_reduce(spent)
            cpu[name].append(spent.item())
    return wall, {name: statistics.median(times) for name, times in cpu.items()}


def measure_steps(work: Work, schedule: str, rounds: int) -> dict[str, Any]:
    """Check that the sides compute the same, let them race, and put speeds and ratios of medians into a table."""
    sides = sides_of(work, schedule)
    # which also warms them up
    seen = {name: [step() for _ in range(3)] for name, step in sides.items()}
    for name, theirs in seen.items():
        pairs = zip(sum(seen["weft"], ()), sum(theirs, ()), strict=True)
        if max(abs(a - b) / abs(b) for a, b in pairs) > TOLERANCE:
            raise SystemExit(
                f"{schedule}: {name} and weft compute different (loss, norm): {theirs}, {seen['weft']}"
            )
    wall, cpu = race(sides, rounds)
    ours, table = statistics.median(wall["weft"]), {}
    for name, times in wall.items():
        table[name] = {
            "steps_per_s": round(1 / statistics.median(times), 3),
            "cpu_s": round(cpu[name], 4),
        }
        if name != "weft":
            paired = [
                theirs / mine for mine, theirs in zip(wall["weft"], times, strict=True)
            ]
            low, _, high = statistics.quantiles(paired, n=4)
            table[name] |= {
                "ratio": round(statistics.median(times) / ours, 3),
                "ratio_quartiles": [round(low, 3), round(high, 3)],
                "cpu_ratio": round(cpu[name] / cpu["weft"], 3),
            }
    return table


# --- stages that sleep ---


class Sleep(torch.autograd.Function):
    """A stage for PyTorch's schedules that takes the modelled time. ``log``: the ends of everything it did."""

    @staticmethod
    def forward(ctx, x, weight, tape, log):  # type: ignore[no-untyped-def]
        ctx.tape, ctx.log = tape, log
        logged(log, "F")
        return x + weight

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        if ctx.tape is None:
            logged(ctx.log, "B")
        else:
            logged(ctx.log, "I")
            ctx.tape.append(partial(logged, ctx.log, "W"))
        return grad, grad, None, None


def logged(log: list[float], kind: str) -> None:
    log.append(time.perf_counter())
    time.sleep(SLEEPS[kind])
    log.append(time.perf_counter())


class SleepingStage(nn.Module):
    def __init__(self, tape: Tape | None, log: list[float]) -> None:
        super().__init__()
        self.weight, self.tape, self.log = nn.Parameter(torch.zeros(1)), tape, log

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x, self.weight, self.tape, self.log)


def torch_sleeping(schedule: str, microbatches: int) -> Callable[[], list[float]]:
    """A rehearsal under PyTorch; every call returns the starts and ends of this rank's actions."""
    table = build(schedule, RANKS, microbatches)
    log: list[float] = []
    stages = []
    for s in table.held(dist.get_rank()):
        tape: Tape | None = [] if builders()[schedule].splits else None
        x, y = (
            torch.empty(1, 1, requires_grad=s > 0),
            torch.empty(1, 1, requires_grad=True),
        )
        build_later = None if tape is None else partial(take, tape)
        stages.append(
            torch_pipelining.PipelineStage(
                SleepingStage(tape, log),
                s,
                table.stages,
                torch.device("cpu"),
                x,
                y,
                dw_builder=build_later,
            )
        )
    run = torch_schedule(schedule, stages, microbatches, lambda out, target: out.sum())
    first, last = (
        any(stage.stage_index == s for stage in stages) for s in (0, table.stages - 1)
    )

    def rehearse() -> list[float]:
        log.clear()
        inputs = [torch.zeros(microbatches, 1)] if first else []
        run.step(
            *inputs,
            target=torch.zeros(microbatches, 1) if last else None,
            return_outputs=False,
        )
        return log[:]

    return rehearse


def weft_sleeping(
    schedule: str, microbatches: int, seen: dict[Any, list[float]]
) -> Callable[[], list[float]]:
    """The same under Weft. ``seen``: what this rank's actions took, by key."""
    table = lower(build(schedule, RANKS, microbatches))
    wire = Wire(
        dist.group.WORLD,
        torch.device("cpu"),
        spec=lambda value: [((1,), torch.float32)],
    )
    ops = sleeping(lambda a: SLEEPS[a.kind])

    def rehearse() -> list[float]:
        times = execute(table, dist.get_rank(), ops, wire).times
        for a, start, end in times:
            seen.setdefault(a.key, []).append(end - start)
        return [t for _, *ends in times for t in ends]

    return rehearse


def measure_sleeping(schedule: str, microbatches: int, rounds: int) -> dict[str, float]:
    """Milliseconds from the first action's start on any rank to the last one's end (the ranks share one clock).

    ``slept_ms`` is simulated with what the sleeps really took: on a busy machine they last longer than asked.
    """
    table = build(schedule, RANKS, microbatches)
    seen: dict[Any, list[float]] = {}
    sides = {
        "weft": weft_sleeping(schedule, microbatches, seen),
        "PyTorch": torch_sleeping(schedule, microbatches),
    }
    elapsed: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds + 1):
        for name, rehearse in sides.items():
            dist.barrier()
            times = rehearse()
            ends = torch.tensor([-min(times), max(times)], dtype=torch.float64)
            dist.all_reduce(ends, dist.ReduceOp.MAX)
            if i:  # the first one makes connections
                elapsed[name].append(ends.sum().item() * 1e3)
    everywhere: list[Any] = [None] * RANKS
    dist.all_gather_object(
        everywhere, {key: statistics.median(taken[1:]) for key, taken in seen.items()}
    )
    took = {key: seconds for rank in everywhere for key, seconds in rank.items()}

    def simulated(cost: Callable[[Action], float]) -> float:
        return simulate(table, Costs(cost)).elapsed * 1e3

    found = {
        "simulated_ms": simulated(lambda a: SLEEPS[a.kind]),
        "slept_ms": simulated(lambda a: took[a.key]),
    }
    found |= {
        "weft_ms": statistics.median(elapsed["weft"]),
        "pytorch_ms": statistics.median(elapsed["PyTorch"]),
    }
    deviations = {
        "deviation": found["weft_ms"] / found["simulated_ms"] - 1,
        "deviation_from_slept": found["weft_ms"] / found["slept_ms"] - 1,
        "ratio": found["pytorch_ms"] / found["weft_ms"],
    }
    return {key: round(value, 2) for key, value in found.items()} | {
        k: round(v, 4) for k, v in deviations.items()
    }


# --- running ---


def on_rank(rank: int, work: Work, rounds: tuple[int, int]) -> dict[str, Any]:
    warnings.filterwarnings("ignore")  # PyTorch's pipelines have many to give
    results: dict[str, Any] = {"steps": {}, "simulated": {}}
    for schedule in PEERS if rounds[0] else ():
        table = results["steps"][schedule] = measure_steps(work, schedule, rounds[0])
        if rank == 0:
            show_steps(schedule, table)
    for schedule in ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v") if rounds[1] else ():
        found = results["simulated"][schedule] = measure_sleeping(
            schedule, work.microbatches, rounds[1]
        )
        if rank == 0:
            show_sleeping(schedule, found)
    return results


def show_steps(schedule: str, table: dict[str, Any]) -> None:
    if schedule == next(iter(PEERS)):
        head = f"  {'schedule':18}{'weft/s':>8}{'peer/s':>8}{'weft is':>10}   quartiles    {'CPU time':>9}   peer"
        print(f"{head}\n{'':65}(peer over weft)")
    ours = table["weft"]["steps_per_s"]
    for name, row in table.items():
        if name != "weft":
            low, high = row["ratio_quartiles"]
            line = f"  {schedule:18}{ours:8.2f}{row['steps_per_s']:8.2f}{row['ratio']:9.2f}x   {low:.2f} - {high:.2f}"
            print(f"{line}{row['cpu_ratio']:12.2f}x   {name}", flush=True)


def show_sleeping(schedule: str, found: dict[str, float]) -> None:
    if schedule == "1f1b":
        times = ", ".join(
            f"{kind} {seconds * 1e3:.0f}" for kind, seconds in SLEEPS.items()
        )
        print(
            f"\nexecuted and simulated, in ms, on stages that sleep ({times} ms per stage)"
        )
        head = f"  {'schedule':18}{'simulated':>10}{'weft':>9}{'off by':>9}"
        print(f"{head}{'without oversleeping':>22}{'PyTorch':>10}{'weft is':>10}")
    line = f"  {schedule:18}{found['simulated_ms']:10.1f}{found['weft_ms']:9.1f}{found['deviation']:9.2%}"
    print(
        f"{line}{found['deviation_from_slept']:22.2%}{found['pytorch_ms']:10.1f}{found['ratio']:9.2f}x",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument(
        "--rounds", type=int, default=8, help="turns of every side, of one step each"
    )
    parser.add_argument("--only", choices=["steps", "simulated"])
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, to see that everything runs"
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    work = QUICK if options.quick else WORK
    turns = (2, 1) if options.quick else (options.rounds, 5)
    rounds = (
        turns[0] * (options.only != "simulated"),
        turns[1] * (options.only != "steps"),
    )
    s, facts = work.job.shape, machine()
    print(
        f"{parameter_count(s, s.vocab) / 1e6:.1f}M parameters, {work.microbatches} microbatches of "
        f"{work.job.rows // work.microbatches} x {work.job.length} tokens, float32, {RANKS} ranks of one thread on "
        f"{facts['cores']} cores (load before: {facts['load_before']})"
    )
    found = on_ranks(RANKS, on_rank, work, rounds)
    facts |= {"load_after": round(os.getloadavg()[0], 1)}  # about 4 of it ours
    job = work.job._asdict() | {
        "shape": s.model_dump(exclude_defaults=True),
        "microbatches": work.microbatches,
    }
    write({"machine": facts, "rounds": rounds[0], "job": job} | found, options.json)


if __name__ == "__main__":
    main()
