"""What a GPU computes against what the CPU computes, and layouts of several ranks on one card against one rank.

``alone``: each recipe takes the same steps on the CPU and on the GPU, from the same weights; losses, gradients, norm,
parameters and optimizer state are compared as ``weft verify`` compares them. ``ranks``: layouts over gloo, whose ranks
share the one card (NCCL refuses several on a card), against one rank on it. ``engine``: options of the generation
engine (``bench/gpu_engine.py``). What fails is named, and the rest goes on.

    python bench/gpu_check.py alone|ranks|engine [--device cuda] [--steps 3] [--only NAME ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from weft.layout.mesh import Mesh
from weft.prove.equality import (
    Difference,
    compare_with_one_device,
    difference,
    run_layout,
)
from weft.recipe import Recipe, load_recipe
from weft.run.rank_processes import settle_in
from weft.train.setup import prepare

ROOT = Path(__file__).parents[1]
SMALL = ("data.tokenizer=bytes", "data.seq_len=64", "train.batch=8")


class Case(NamedTuple):
    """A recipe, its layout (None: its own), and what is set in it."""

    name: str
    recipe: str
    layout: str | None
    settings: tuple[str, ...] = ()


ALONE = (
    Case("plain", "quickstart", ""),
    Case("float32", "quickstart", "", ("train.dtype=float32",)),
    Case("compiled", "quickstart", "", ("train.compile=true",)),
    Case("recomputed", "quickstart", "", ("train.recompute=full",)),
    Case("micro", "quickstart", "", ("train.micro_batch=1",)),
    Case("chunked-loss", "quickstart", "", ("train.loss_chunk=48",)),
    Case("offload", "offload", ""),
    Case("file", "offload", "", ("memory.moments=file",)),
    Case("experts", "experts", ""),
    Case("experts32", "experts", "", ("train.dtype=float32",)),
    Case("retention", "retention", ""),
    Case("lora", "lora", ""),
    Case("preference", "preference", "", ("data.seq_len=512",)),
    Case("optimizers", "optimizers", ""),
    Case(
        "in-backward",
        "quickstart",
        "",
        ("optimizer.in_backward=true", "optimizer.clip=0"),
    ),
)
RANKS = (
    *(
        Case(n, "quickstart", n)
        for n in (
            "dp=2",
            "shard=2",
            "tp=2",
            "cp=2",
            "pp=2",
            "shard=2,tp=2",
            "pp=2,cp=2",
        )
    ),
    Case("ulysses", "ulysses", None),
    Case("ring", "ring", None),
    Case("zigzag", "zigzag", None),
    Case("lightseq", "lightseq", None),
    Case("ep=2", "experts", "shard=2,ep=2"),
    Case("lasp2", "lasp2", None),
    Case("zero-bubble", "zero-bubble", None),
    Case("dualpipe", "dualpipe", None),
    Case("islands", "islands", None, ("sync.compress=none",)),
    Case("zero", "zero", None),
    Case("offload", "offload", "shard=2"),
)
LIMIT_S = 60


def recipe_of(case: Case, device: str) -> Recipe:
    """Return a case's recipe with short rows."""
    path = ROOT / "recipes" / f"{case.recipe}.toml"
    own = [f"train.device={device}", "train.threads=1", f"train.timeout={LIMIT_S}"]
    dtype = [] if any("dtype" in s for s in case.settings) else ["train.dtype=float64"]
    given = load_recipe(
        path, overrides=[*SMALL, *dtype, *case.settings, *own], layout=case.layout
    )
    return given


def alone(case: Case, device: str, steps: int) -> Difference:
    """Compare ``device`` with the CPU over the same steps; the GPU's parameters follow the CPU's gradients."""
    recipe = recipe_of(case, device)
    plain = recipe.model_copy(
        update={"train": recipe.train.model_copy(update={"compile": False})}
    )
    here = prepare(plain)
    cpu = run_layout(here, Mesh.single(torch.device("cpu")), steps)
    follow = [{n: p.values for n, p in grads.items()} for grads in cpu.grads]
    there = dataclasses.replace(here, recipe=recipe)
    gpu = run_layout(there, Mesh.single(torch.device(device)), steps, follow=follow)
    return difference([gpu], cpu, recipe.train.dtype)


def shown(
    name: str, outcome: Difference | BaseException, began: float
) -> dict[str, Any]:
    took = time.perf_counter() - began
    if isinstance(outcome, BaseException):
        last = traceback.extract_tb(outcome.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        text = f"FAILED {type(outcome).__name__} at {where}: {str(outcome)[:300]}"
        row = {"case": name, "ok": False, "error": text}
    else:
        d = outcome
        text = (
            f"{'equal' if d.ok else 'DIFFERENT'} loss {d.loss:.1e} grad {d.grad:.1e} ({d.worst_grad}) "
            f"norm {d.grad_norm:.1e} param {d.param:.1e} optimizer {d.slot:.1e}"
        )
        row = {"case": name, **dataclasses.asdict(d)}
    print(f"{name:<18}{took:6.1f} s  {text}", flush=True)
    return row | {"seconds": round(took, 2)}


class Landing:
    """Work of gloo on a copy on the host of ``tensor``, into which what was received is copied."""

    def __init__(
        self, work: Any, host: torch.Tensor, tensor: torch.Tensor | None
    ) -> None:
        self.work, self.host, self.tensor = work, host, tensor

    def wait(self, *limit: Any) -> bool:
        done = bool(self.work.wait(*limit))
        if self.tensor is not None:
            self.tensor.copy_(self.host)
            self.tensor = None
        return done

    def is_completed(self) -> bool:
        return bool(self.work.is_completed()) and self.wait()


def on_the_host(collective: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Return ``collective``, which computes with a copy on the host and waits for its result."""

    def call(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        result = collective(tensor.cpu(), *given, **named)
        if isinstance(result, functional.AsyncCollectiveTensor):
            result = result.wait()
        return result.to(tensor.device)

    return call


def by_the_host() -> None:
    """Let gloo send and receive tensors of a GPU, which it knows for collectives only, as copies on the host; so those
    collectives that return their result, in which it ends the process (PyTorch's issue 152645).
    """
    for name in ("all_gather_tensor", "reduce_scatter_tensor", "all_reduce"):
        setattr(functional, name, on_the_host(getattr(functional, name)))
    c10d: Any = dist.distributed_c10d
    isend, irecv = c10d.isend, c10d.irecv

    def send(tensor: torch.Tensor, *where: Any, **named: Any) -> Landing:
        host = tensor.cpu()
        return Landing(isend(host, *where, **named), host, None)

    def receive(tensor: torch.Tensor, *where: Any, **named: Any) -> Landing:
        host = tensor.cpu()
        return Landing(irecv(host, *where, **named), host, tensor)

    def now(tensor: torch.Tensor, *where: Any, **named: Any) -> None:
        receive(tensor, *where, **named).wait()

    def batch(ops: Sequence[Any]) -> list[Landing]:
        return [op.op(op.tensor, op.peer, group=op.group, tag=op.tag) for op in ops]

    for module in (c10d, dist):
        module.isend, module.irecv = send, receive
        module.recv, module.batch_isend_irecv = now, batch


def rank_main(names: Sequence[str], device: str, steps: int, file: Path) -> None:
    """One rank: proves each case in turn, in a default group of its own over gloo."""
    faulthandler.enable()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cases = {case.name: case for case in RANKS}
    settle_in(device, 1)
    if device == "cuda":
        torch.cuda.set_device(0)
    by_the_host()
    for number, name in enumerate(names):
        began = time.perf_counter()
        faulthandler.dump_traceback_later(LIMIT_S - 20)
        store = dist.FileStore(f"{file}.{names[0]}.{number}.store", world)
        outcome: Difference | BaseException | None
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world,
            timeout=timedelta(seconds=LIMIT_S),
        )  # fmt: skip
        try:
            recipe = recipe_of(cases[name], device)
            mesh, job = Mesh.create(recipe.layout, device), prepare(recipe)
            outcome = compare_with_one_device(run_layout(job, mesh, steps), job, mesh)
        except Exception as error:
            traceback.print_exc()
            outcome = error
        if outcome is not None:
            row = shown(
                f"{name} [{rank}]" if isinstance(outcome, Exception) else name,
                outcome,
                began,
            )
            with file.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
        if isinstance(outcome, Exception):
            os._exit(1)  # the others wait for this rank
        with contextlib.suppress(Exception):
            dist.barrier()
        dist.destroy_process_group()


def world_of(case: Case) -> int:
    return int(recipe_of(case, "cpu").layout.world)


def start(name: str, world: int, device: str, steps: int, file: Path) -> list[Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        __file__,
        "rank",
        "--device",
        device,
        "--steps",
        str(steps),
        "--json",
        str(file),
        "--only",
        name,
    ]
    log = (file.parent / f"ranks-{name.replace('=', '').replace(',', '-')}.log").open(
        "w"
    )
    return [
        subprocess.Popen(
            command, stdout=None if r == 0 else log, stderr=log,
            env=os.environ | {"RANK": str(r), "WORLD_SIZE": str(world), "LOCAL_RANK": str(r),
                              "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        )
        for r in range(world)
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["alone", "ranks", "rank", "engine"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--json", type=Path, default=Path("/tmp/gpu_check.jsonl"))
    args = parser.parse_args()
    os.chdir(ROOT)
    args.json = args.json.resolve()
    if args.part == "engine":
        from gpu_engine import engine_part  # beside this file

        return engine_part(args.only, args.device, args.seconds or 75, args.json)
    args.seconds = args.seconds or 150
    if args.part == "rank":
        return rank_main(args.only, args.device, args.steps, args.json)
    if args.part == "alone":
        for case in ALONE:
            if args.only and case.name not in args.only:
                continue
            began = time.perf_counter()
            try:
                outcome: Any = alone(case, args.device, args.steps)
            except Exception as error:
                traceback.print_exc()
                outcome = error
            with args.json.open("a") as lines:
                lines.write(json.dumps(shown(case.name, outcome, began)) + "\n")
        return None
    waiting = [c for c in RANKS if not args.only or c[0] in args.only]
    running: list[tuple[float, str, list[Any]]] = []
    ends = time.monotonic() + args.seconds
    while waiting or running:
        if waiting and len(running) < args.at_once and time.monotonic() < ends:
            case = waiting.pop(0)
            processes = start(
                case.name, world_of(case), args.device, args.steps, args.json
            )
            running.append((time.monotonic(), case.name, processes))
            continue
        for entry in list(running):
            began, name, processes = entry
            late = time.monotonic() > min(ends, began + LIMIT_S + 10)
            failed = any(p.poll() not in (None, 0) for p in processes)
            if all(p.poll() is not None for p in processes) or late or failed:
                if failed and not late:
                    time.sleep(2)
                    codes = [p.poll() for p in processes]
                    print(f"{name:<18} its ranks ended with {codes}", flush=True)
                for p in processes:
                    p.kill()
                running.remove(entry)
                if late:
                    print(
                        f"{name:<18} LATE: no end after {time.monotonic() - began:.0f} s",
                        flush=True,
                    )
        if time.monotonic() > ends:
            for case in waiting:
                print(f"{case.name:<18} not begun", flush=True)
            waiting = []
        time.sleep(0.2)
    return None


if __name__ == "__main__":
    main()
