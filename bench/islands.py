"""Two sites with a slow link between them: plain data parallelism beside ways to agree less often, ours and others'.

    pip install torchft==0.2.0                                                # without it its side is left out
    sudo python bench/islands.py [--steps 300] [--rounds 2] [--json FILE] [--picture docs/measured/islands.svg]

Two network namespaces are the sites, with two ranks each. All sides train the same transformer from the same weights,
on the same bytes of the standard library in the same order, by AdamW at the same rates. Over every network each takes
some steps, in turns, for their time and bytes; and each trains once to the end where there is no limit, asked now and
then for its loss on files that none has seen. What it computes does not depend on the network, so that seconds to a
loss are steps to it times seconds per step. The delay is made by a process that holds every frame back, between two
TAP devices in the place of the cable.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from datetime import datetime, timedelta
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from threading import current_thread, main_thread
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "islands.json"
SITES, RANKS = 2, 4
#: Rows per rank and step, their length; steps between two agreements, and of warming up; of evaluation: rows, steps.
ROWS, LENGTH, EVERY, WARM, HELD, ASKED = 2, 64, 20, 20, 256, 20
EMBED, LAYERS = 320, 2
LR, CLIP, DECAY = 3e-3, 1.0, 0.1
LIMIT = 300  # seconds that anything may take


class Side(NamedTuple):
    """``kind``: who runs it; of Weft the ``layout`` and ``sync``. ``steps``: of which time is taken."""

    kind: str
    layout: str = ""
    sync: Mapping[str, Any] = MappingProxyType({})
    steps: int = EVERY


APART = "island=2,dp=2"
PLAIN, TORCHFT = "plain data parallel", "torchft's DiLoCo"
#: Outer rates and momenta as --tune found them best on seed 0, after 1,500 steps together.
NESTEROV = {"update": "nesterov", "lr": 1.0, "momentum": 0.3}
STREAMING = {
    "update": "streaming",
    "fragments": 4,
    "delay": 2,
    "compress": "int8",
    "lr": 1.0,
    "momentum": 0.3,
}
NOLOCO = {"update": "noloco", "lr": 1.0, "momentum": 0.3}
SIDES = {
    PLAIN: Side("weft", "dp=4", steps=6),
    "PyTorch's DDP": Side("ddp", steps=6),
    "PyTorch's PowerSGD": Side("powersgd"),
    "PyTorch's post-local SGD": Side("post-local"),
    TORCHFT: Side("torchft"),
    "DiLoCo": Side("weft", APART, NESTEROV),
    "DiLoCo, int4": Side("weft", APART, {**NESTEROV, "compress": "int4"}),
    "streaming, int8": Side("weft", APART, STREAMING),
    "NoLoCo": Side("weft", APART, NOLOCO),
    "NoLoCo, four islands": Side("weft", "island=4", NOLOCO),
    "CO2": Side("weft", APART, {"update": "co2", "momentum": 0.0}),
}


class Network(NamedTuple):
    """``rate`` of the cable between the sites as tc takes it (as fast as the machine if none), and its delay."""

    rate: str = ""
    delay_s: float = 0.0


FREE = "no limit"
NETWORKS = {
    "100 Mbit/s": Network("100mbit"),
    "10 Mbit/s": Network("10mbit"),
    "100 Mbit/s, 50 ms": Network("100mbit", 0.05),
    FREE: Network(),
}


class Run(NamedTuple):
    """What a rank is told: to take ``steps`` of a run of ``total``, whose first ``skip`` are not measured.

    ``asked`` so often for its loss on what is held out (0: never). ``folder`` has the data and the initial weights.
    """

    side: str
    folder: str
    steps: int
    total: int
    asked: int
    skip: int
    site: int
    local: int
    address: str
    meeting: str
    port: int
    seed: int
    sync: dict[str, Any]

    @property
    def rank(self) -> int:
        return self.site * (RANKS // SITES) + self.local


#: Steps that are not timed: ways are opened, and PyTorch's hooks begin.
SKIP = 2
#: What --tune tries.
GRID: dict[str, list[dict[str, Any]]] = {
    PLAIN: [{}],
    "DiLoCo": [
        {"lr": lr, "momentum": m}
        for lr, m in ((0.7, 0.9), (1.0, 0.6), (1.0, 0.3), (0.7, 0.6))
    ],
    "streaming, int8": [
        {"lr": lr, "momentum": m} for lr, m in ((0.7, 0.9), (1.0, 0.6), (1.0, 0.3))
    ],
    "NoLoCo": [{"lr": lr, "momentum": m} for lr, m in ((0.7, 0.5), (1.0, 0.3))],
    "CO2": [{"lr": lr, "momentum": m} for lr, m in ((1.0, 0.2), (1.0, 0.0))],
}


# --- data -----------------------------------------------------------------------------------------------------------


def prepare(folder: Path, steps: int, seed: int, before: int) -> int:
    """Rows of every step, rows that are held out (of other files), and the initial weights; how many these are.

    The weights have learned ``before`` steps of rows of their own, as one device: local updates are for what
    has been trained a while (DiLoCo's paper begins with a model of 24,000 steps).
    """
    from weft.data.files import source_files
    from weft.layout.mesh import Mesh
    from weft.recipe import Recipe, Source
    from weft.train.setup import build_for_training

    draw = torch.Generator().manual_seed(seed)
    found = source_files(Source(kind="stdlib"))
    out = {
        "held": found[::20],
        "train": [file for i, file in enumerate(found) if i % 20],
    }
    count = {"held": HELD, "train": (before + steps) * RANKS * ROWS}
    for name, paths in out.items():
        text = torch.frombuffer(
            bytearray(b"\n".join(path.read_bytes() for path in paths)),
            dtype=torch.uint8,
        )
        fixed = torch.Generator().manual_seed(0) if name == "held" else draw
        starts = torch.randint(len(text) - LENGTH - 1, (count[name],), generator=fixed)
        torch.save(
            text[starts[:, None] + torch.arange(LENGTH + 1)].clone(), folder / name
        )
    shape, recipe = (
        shape_of(),
        Recipe.model_validate({"train": {"seed": seed, "dtype": "float32"}}),
    )
    _, state = build_for_training(shape, Mesh.single(), recipe)
    torch.save({h.name: h.local.clone() for h in state.held}, folder / "weights")
    if not before:
        return sum(h.local.numel() for h in state.held)
    learning = get_context("fork").Process(target=learn, args=(folder, before))
    learning.start()
    learning.join()
    if learning.exitcode:
        raise SystemExit("the model that all begin with could not be trained")
    return sum(h.local.numel() for h in state.held)


def learn(folder: Path, before: int) -> None:
    """Train the initial weights on the first rows, and leave the others to the sides."""
    from weft.recipe import Optimizer
    from weft.train.rule_optimizer import learning_rate

    rows = torch.load(folder / "train")
    first, rest = rows.split((before * RANKS * ROWS, len(rows) - before * RANKS * ROWS))
    model, optimizer, loss_of = plain(folder)
    for number, batch in enumerate(first.long().split(RANKS * ROWS)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(
                Optimizer(lr=LR, warmup=WARM, schedule="constant"), number, before
            )
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    trained, theirs = model.state_dict(), {"table": "weight", "scale": "weight"}
    names = {name: name.rpartition(".") for name in torch.load(folder / "weights")}
    torch.save(
        {
            name: trained[f"{path}.{theirs.get(leaf, f'{leaf}.weight')}"]
            for name, (path, _, leaf) in names.items()
        },
        folder / "weights",
    )
    torch.save(rest.clone(), folder / "train")


def shape_of() -> Any:
    from weft.recipe import ModelShape

    return ModelShape(
        vocab=256,
        layers=LAYERS,
        embed=EMBED,
        heads=4,
        kv_heads=4,
        qk_norm=True,
        tied=True,
    )


def rows_of(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of every step, ``[steps, rows, length + 1]``, and its part of those that are held out."""
    train = (
        torch.load(Path(run.folder) / "train").long().view(-1, RANKS, ROWS, LENGTH + 1)
    )
    held = torch.load(Path(run.folder) / "held").long()
    return train[:, run.rank], held.chunk(RANKS // SITES)[run.local]


# --- ranks ----------------------------------------------------------------------------------------------------------


def be_rank(run: Run) -> None:
    """Train, with what :class:`Log` writes down."""
    os.environ |= {
        "RANK": f"{run.rank}", "WORLD_SIZE": f"{RANKS}", "LOCAL_RANK": f"{run.local}", "MASTER_ADDR": run.meeting,
        "LOCAL_WORLD_SIZE": f"{RANKS // SITES}", "MASTER_PORT": f"{run.port}", "GLOO_SOCKET_IFNAME": "eth0",
    }  # fmt: skip
    (
        be_torchft
        if SIDES[run.side].kind == "torchft"
        else be_weft
        if SIDES[run.side].kind == "weft"
        else be_torch
    )(run)


class Log:
    """Seconds and processor time of every step of this rank, losses, bytes of the site's cable."""

    def __init__(self, run: Run) -> None:
        self.run, self.path = run, Path(run.folder)
        self.found: dict[str, Any] = {"seconds": [], "cpu": [], "loss": [], "held": {}}

    def meet(self, name: str) -> None:
        """Wait for the other ranks, and not through the network."""
        (self.path / f"{name}{self.run.rank}").touch()
        until = time.monotonic() + LIMIT
        while len(list(self.path.glob(f"{name}[0-9]"))) < RANKS:
            if time.monotonic() > until:
                raise SystemExit(f"rank {self.run.rank} waits in vain to {name}")
            time.sleep(0.01)

    def train(
        self, step: Callable[[int, float], float], held: Callable[[], float], end: Callable[[], object] = lambda: None,
        waited: Callable[[], float] = lambda: 0.0,
    ) -> None:  # fmt: skip
        from weft.recipe import Optimizer
        from weft.train.rule_optimizer import learning_rate

        settings = Optimizer(lr=LR, warmup=WARM, schedule="cosine")
        self.meet("begin")
        sent = wire()
        for number in range(self.run.steps):
            if self.run.skip and number == self.run.skip:
                self.meet("measure")
                sent = wire()
            begun, used = time.perf_counter(), time.process_time()
            self.found["loss"].append(
                step(number, learning_rate(settings, number, self.run.total))
            )
            if number == self.run.steps - 1 and not self.run.skip:
                end()  # which a run has once, and not its steps
            self.found["seconds"].append(time.perf_counter() - begun)
            self.found["cpu"].append(time.process_time() - used)
            self.found["waited"] = waited()
            if self.run.asked and (
                (number + 1) % self.run.asked == 0 or number + 1 == self.run.steps
            ):
                self.meet(f"ask{number}-")
                self.found["held"][number + 1] = held()
                self.meet(f"asked{number}-")
        end()
        self.meet("end")
        self.found["wire"] = wire() - sent if self.run.local == 0 else 0

    def write(self) -> None:
        (self.path / f"{self.run.rank}.json").write_text(json.dumps(self.found))
        self.meet("written")


def wire() -> int:
    """Bytes that have left this site."""
    (line,) = (
        line
        for line in Path("/proc/net/dev").read_text().splitlines()
        if line.strip().startswith("eth0:")
    )
    return int(line.split(":")[1].split()[8])


def be_weft(run: Run) -> None:
    import torch.distributed as dist

    from weft.data.batch import Batch
    from weft.layout.layout import Layout
    from weft.layout.mesh import Mesh
    from weft.recipe import Optimizer, Recipe
    from weft.run.rank_processes import init_ranks
    from weft.sync.presence import Presence
    from weft.sync.streams import open_streams
    from weft.train.build_step import build_step
    from weft.train.setup import build_for_training
    from weft.train.step import StepContext, evaluate

    def batch(rows: torch.Tensor) -> Batch:
        ends = torch.arange(0, len(rows) * LENGTH + 1, LENGTH, dtype=torch.int32)
        positions = torch.arange(LENGTH).repeat(len(rows), 1)
        return Batch(
            rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), positions, ends
        )

    layout, every = (
        Layout.parse(SIDES[run.side].layout),
        {"every": EVERY} if run.sync else {},
    )
    recipe = Recipe.model_validate({
        "train": {"dtype": "float32", "seed": run.seed, "batch": RANKS * ROWS, "steps": max(run.total, EVERY)},
        "layout": layout.model_dump(mode="json"), "sync": every | run.sync,
    })  # fmt: skip
    init_ranks("cpu", LIMIT)
    mesh = Mesh.create(layout, "cpu")
    weights = torch.load(Path(run.folder) / "weights")
    model, state = build_for_training(
        shape_of(),
        mesh,
        recipe,
        lambda name, logical, box: weights[name][tuple(slice(*cut) for cut in box)],
    )
    (rows, unseen), log = rows_of(run), Log(run)
    waits: list[float] = []
    with open_streams(mesh, LIMIT) as streams:
        settings = Optimizer(lr=LR, weight_decay=DECAY, clip=CLIP)
        presence = Presence(streams) if streams else None
        stepper = build_step(
            StepContext(model, state, mesh, presence=presence),
            recipe.model_copy(update={"optimizer": settings}),
        )
        if run.sync:
            count_waits(stepper.after, waits)
        log.train(
            lambda number, lr: stepper.take([batch(rows[number])], lr)[0].loss,
            lambda: evaluate(
                model, state, [[batch(part)] for part in unseen.split(32)], mesh
            ),
            stepper.finish,
            lambda: sum(waits),
        )
        log.found["counted"] = (
            streams.sent + streams.around if streams is not None else None
        )
    log.write()
    dist.destroy_process_group()


def count_waits(apart: Any, waits: list[float]) -> None:
    """Note the seconds that the steps of islands wait for messages: not those of exchanges that go on beside them.

    ``apart``: what works between the steps of islands (:class:`weft.train.islands.Apart`).
    """
    exchange, submit = apart.exchange.run, apart.exchanging.submit

    def timed(what: Callable[..., Any], *words: Any) -> Any:
        begun = time.perf_counter()
        try:
            return what(*words)
        finally:
            if current_thread() is main_thread():
                waits.append(time.perf_counter() - begun)

    def submitted(*words: Any) -> Future[Any]:
        future = submit(*words)
        result = future.result
        future.result = lambda timeout=None: timed(result, timeout)
        return future

    apart.exchange.run = lambda *words: timed(exchange, *words)
    apart.exchanging.submit = submitted


def plain(folder: Path) -> tuple[Any, Any, Callable[..., Any]]:
    """The hand-written model of bench/step.py with our weights, its optimizer, and what computes a step's gradients."""
    from step import Job, adamw, plain_model
    from torch.nn.functional import cross_entropy

    model = plain_model(
        Job(shape_of(), RANKS * ROWS, LENGTH), torch.load(folder / "weights")
    )
    optimizer = adamw(model)

    def loss_of(forward: Any, rows: torch.Tensor) -> Any:
        return cross_entropy(forward(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    return model, optimizer, loss_of


def stepping(
    run: Run,
    log: Log,
    forward: Any,
    model: Any,
    optimizer: Any,
    inner: Any,
    loss_of: Any,
) -> None:
    """Train by ``forward``; ``optimizer`` steps, and has the groups of ``inner``."""
    rows, unseen = rows_of(run)

    def step(number: int, lr: float) -> float:
        for group in inner.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss = loss_of(forward, rows[number])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return float(loss)

    @torch.no_grad()
    def held() -> float:
        parts = unseen.split(32)
        return sum(float(loss_of(model, part)) * len(part) for part in parts) / len(
            unseen
        )

    log.train(step, held)
    log.write()


def be_torch(run: Run) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from weft.run.rank_processes import init_ranks

    init_ranks("cpu", LIMIT)
    model, inner, loss_of = plain(Path(run.folder))
    # In one bucket: PowerSGD begins a second sum when the first is done, which ranks need not see in one order.
    forward, optimizer, kind = (
        DistributedDataParallel(model, bucket_cap_mb=100),
        inner,
        SIDES[run.side].kind,
    )
    if kind == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

        state = power.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=run.skip or WARM
        )
        forward.register_comm_hook(state, power.powerSGD_hook)
    elif kind == "post-local":
        from torch.distributed.algorithms.ddp_comm_hooks import (
            post_localSGD_hook as local,
        )
        from torch.distributed.algorithms.model_averaging.averagers import (
            PeriodicModelAverager,
        )
        from torch.distributed.optim import PostLocalSGDOptimizer

        sites = [dist.new_group([2 * site, 2 * site + 1]) for site in range(SITES)]
        hook = local.PostLocalSGDState(
            None, sites[run.site], start_localSGD_iter=run.skip or WARM
        )
        forward.register_comm_hook(hook, local.post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(
            inner, PeriodicModelAverager(period=EVERY, warmup_steps=run.skip or WARM)
        )
    stepping(run, Log(run), forward, model, optimizer, inner, loss_of)
    dist.destroy_process_group()


def be_torchft(run: Run) -> None:
    """One replica group per site, whose two ranks average gradients in DDP before each of their own steps."""
    import socket

    socket.gethostname = lambda: run.address  # what it tells the others to reach it by
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    limit, ranks = timedelta(seconds=LIMIT), RANKS // SITES
    store = dist.TCPStore(
        run.address, run.port, ranks, is_master=run.local == 0, timeout=limit
    )
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("site", store), rank=run.local, world_size=ranks
    )
    model, inner, loss_of = plain(Path(run.folder))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit), min_replica_size=SITES, replica_id=f"site{run.site}", rank=run.local,
        world_size=ranks, store_addr=run.address, store_port=run.port, lighthouse_addr=f"http://{run.meeting}:29510",
        hostname=run.address, timeout=limit, quorum_timeout=limit, connect_timeout=limit, use_async_quorum=False,
        init_sync=False,  # all begin with the same anyway
        load_state_dict=lambda s: (model.load_state_dict(s["model"]), inner.load_state_dict(s["inner"])),
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
    )  # fmt: skip
    outer = torch.optim.SGD(
        model.parameters(), run.sync["lr"], run.sync["momentum"], nesterov=True
    )
    with DiLoCo(manager, [model], inner, outer, sync_every=EVERY):
        stepping(
            run, Log(run), DistributedDataParallel(model), model, inner, inner, loss_of
        )
    os._exit(0)


def be_lighthouse() -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="[::]:29510",
        min_replicas=SITES,
        join_timeout_ms=1000,
        quorum_tick_ms=100,
        heartbeat_timeout_ms=5000,
    )
    print(server.address(), flush=True)
    time.sleep(3600)


# --- the cable ------------------------------------------------------------------------------------------------------


def network(which: Network) -> AbstractContextManager[Any]:
    """Two hosts on this network."""
    from hosts import hosts

    return hosts(SITES, f"weft-islands-{os.getpid()}", which.rate, which.delay_s)


# --- the sides ------------------------------------------------------------------------------------------------------


class Bench:
    """Runs sides over a network that is up; ports are used once."""

    def __init__(self, seed: int, steps: int, most: int, before: int) -> None:
        self.seed, self.steps, self.port = seed, steps, 29600
        self.folder = tempfile.TemporaryDirectory()
        self.data = Path(self.folder.name)
        self.parameters = prepare(self.data, most, seed, before)

    def run(
        self,
        made: Any,
        name: str,
        steps: int,
        asked: int = 0,
        skip: int = 0,
        sync: dict[str, Any] | None = None,
    ) -> Any:
        """What the ranks of a side say of so many steps, as :class:`Run` has it; ``sync`` is changed so."""
        side, ranks, self.port = SIDES[name], [], self.port + 1
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            for path in self.data.iterdir():
                (folder / path.name).symlink_to(path)
            others = []
            try:
                if side.kind == "torchft":
                    others.append(forked(be_lighthouse, made[0], folder / "lighthouse"))
                    time.sleep(2)
                for rank in range(RANKS):
                    site, local = divmod(rank, RANKS // SITES)
                    run = Run(
                        name, text, steps, steps if asked else self.steps, asked, skip, site, local, made[site].address,
                        made[0].address, self.port, self.seed, outer({**side.sync, **(sync or {})}, side.kind),
                    )  # fmt: skip
                    ranks.append(
                        forked(
                            partial(be_rank, run), made[site], folder / f"{rank}.err"
                        )
                    )
                wait(ranks, folder, name)
            finally:
                for pid in (*ranks, *others):
                    with suppress(ProcessLookupError, ChildProcessError):
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
            return summed(
                [
                    json.loads((folder / f"{rank}.json").read_text())
                    for rank in range(RANKS)
                ],
                skip,
            )


def forked(what: Callable[[], None], host: Any, said: Path) -> int:
    """The process id of a copy of this process that does this on a host; what it says goes to a file.

    A copy, so that not each of hundreds of ranks imports all of PyTorch first.
    """
    if pid := os.fork():
        return pid
    code = 1
    try:
        with said.open("w") as file, open(f"/run/netns/{host.name}") as space:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            # CLONE_NEWNET
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), 0x40000000):
                raise OSError(ctypes.get_errno(), f"no way into {host.name}")
            # PR_SET_PDEATHSIG: not to outlive the bench
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            what()
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait(ranks: list[int], folder: Path, name: str) -> None:
    """Until all have ended; raises the error of the first that has not ended well."""
    until, left = time.monotonic() + 6 * LIMIT, dict(enumerate(ranks))
    while left:
        for rank, pid in list(left.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del left[rank], ranks[ranks.index(pid)]
            if (found and status) or time.monotonic() > until:
                said = (folder / f"{rank}.err").read_text().strip()[-2000:]
                raise RuntimeError(
                    f"{name}: rank {rank} {'failed' if found else 'did not end'}: {said}"
                )
        time.sleep(0.02)


def outer(sync: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Of torchft what our DiLoCo has."""
    from weft.recipe import Sync
    from weft.sync.outer import OuterSettings

    how = Sync(**SIDES["DiLoCo"].sync).own(OuterSettings)
    return (
        {"lr": how.lr, "momentum": how.momentum, **sync}
        if kind == "torchft"
        else dict(sync)
    )


def summed(ranks: list[dict[str, Any]], skip: int) -> dict[str, Any]:
    """What the ranks' logs say together, of a step where nothing else is said; seconds are the first rank's."""
    first, steps = ranks[0], len(ranks[0]["seconds"]) - skip
    found = {
        "seconds": first["seconds"][skip:], "cpu_s": sum(sum(r["cpu"][skip:]) for r in ranks) / RANKS / steps,
        "loss": [statistics.mean(r["loss"][i] for r in ranks) for i in range(skip + steps)],
        "held": {step: statistics.mean(r["held"][step] for r in ranks) for step in first["held"]},
        "wire": sum(r["wire"] for r in ranks) / steps,
    }  # fmt: skip
    if first.get("counted") is not None:
        found["counted"] = sum(r["counted"] for r in ranks) / (skip + steps)
        found["waited"] = statistics.mean(r["waited"] for r in ranks) / sum(
            first["seconds"]
        )
    return found


def whole(run: dict[str, Any]) -> dict[str, Any]:
    """Of a run from beginning to end, not what each step took."""
    return {
        key: sum(value) if key == "seconds" else value
        for key, value in run.items()
        if key not in ("cpu", "loss")
    }


def timed(
    bench: Bench, names: list[str], which: Network, rounds: int, quick: bool
) -> dict[str, Any]:
    """Steps of every side over a network, in turns: means over all rounds, and what lies between two agreements."""
    runs: dict[str, list[Any]] = {name: [] for name in names}
    with network(which) as made:
        for _ in range(rounds):
            for name in names:
                runs[name].append(
                    bench.run(
                        made,
                        name,
                        SKIP + (2 if quick else SIDES[name].steps),
                        skip=SKIP,
                    )
                )
    return {
        name: {
            "step_s": statistics.mean(s for run in found for s in run["seconds"]),
            "rounds_s": [statistics.mean(run["seconds"]) for run in found],
            "between_s": statistics.median(s for run in found for s in run["seconds"]),
            **{
                key: statistics.mean(run[key] for run in found)
                for key in ("cpu_s", "wire", "counted", "waited") if key in found[0]
            },
        }
        for name, found in runs.items()
    }  # fmt: skip


# --- what follows ---------------------------------------------------------------------------------------------------


def reached(curve: dict[Any, float], target: float) -> float | None:
    """After how many steps the held-out loss was ``target``, by straight lines between those that asked for it."""
    before = (0, math.inf)
    for step, loss in ((int(step), loss) for step, loss in curve.items()):
        if loss <= target:
            share = (
                (before[1] - target) / (before[1] - loss)
                if before[1] < math.inf
                else 1.0
            )
            return before[0] + share * (step - before[0])
        before = (step, loss)
    return None


def last(one: dict[str, Any]) -> float:
    """The loss on what is held out at the end."""
    return float(list(one["held"].values())[-1])


def judge(found: dict[str, Any]) -> list[list[str]]:
    """Add what follows from losses by step and times of steps, and return it as a table.

    ``apart``: the last loss beside that of plain data parallelism, at equal tokens. By network ``to_tokens_s``, and
    ``to_loss_s``, to plain data parallelism's last loss, in the run of as many steps or else in the longer one, and how
    many times faster that is (None: not reached). ``exposed``: the share of a step that the side does not take where
    the cable has no limit; of ours, ``waited`` is the share that its steps were seen waiting for messages.
    """
    trained, rows, target = found["trained"], [], last(found["trained"][PLAIN])
    for one in trained.values():
        one["apart"] = last(one) / target - 1
    free = found["timed"].get(FREE, {})
    for which, table in found["timed"].items():
        for name, row in table.items():
            row["to_tokens_s"] = row["step_s"] * found["steps"]
            row["exposed"] = (
                max(0.0, 1 - free[name]["step_s"] / row["step_s"])
                if name in free
                else None
            )
            one = trained.get(name)
            steps = one and reached(one["held"], target)
            if steps is None and name in found["longer"]:
                steps = reached(found["longer"][name]["held"], target)
            row["to_loss_s"] = steps and steps * row["step_s"]
            row["faster"] = steps and table[PLAIN]["to_tokens_s"] / row["to_loss_s"]
            rows.append([
                which, name, f"{row['step_s']:.2f} ({row['cpu_s']:.3f})", f"{row['wire'] / 1e6:.3g}",
                f"{row['to_tokens_s']:.0f} ({table[PLAIN]['step_s'] / row['step_s']:.1f}x)",
                f"{last(one):.4f} ({100 * one['apart']:+.2f} %)" if one else "",
                f"{row['to_loss_s']:.0f} ({row['faster']:.1f}x)" if steps else "not reached" if one else "",
                "" if row["exposed"] is None else f"{100 * row['exposed']:.0f} %",
                f"{100 * row['waited']:.1f} %" if "waited" in row and SIDES[name].sync else "",
            ])  # fmt: skip
    return rows


HEADS = (
    "Network", "Side", "s per step (of processor)", "MB per step on the cable", "s to equal tokens", "Held-out loss",
    "s to plain's loss", "Exposed", "Seen waiting",
)  # fmt: skip


def tune(bench: Bench) -> dict[str, list[Any]]:
    """The last loss on what is held out by outer settings, without a limit."""
    found: dict[str, list[Any]] = {}
    with network(NETWORKS[FREE]) as made:
        for name, tried in GRID.items():
            for sync in tried:
                loss = last(bench.run(made, name, bench.steps, bench.steps, sync=sync))
                found.setdefault(name, []).append([sync, loss])
                print(f"{name:28}{loss:8.4f}  {sync}", flush=True)
    return found


#: Colors of the sides' lines.
COLORS = (
    "#16191f", "#98a2b3", "#d97706", "#b45309", "#9333ea", "#2563eb", "#0ea5e9", "#059669", "#84cc16", "#dc2626",
    "#db2777",
)  # fmt: skip


def draw(found: dict[str, Any]) -> str:
    """Loss on what is held out over the seconds of the first network, in logarithms: an SVG."""
    from picture import FONT, INK, LINE, PAGE, SOFT, text

    which = next(iter(found["timed"]))
    curves = {
        name: [
            (int(step) * found["timed"][which][name]["step_s"], loss)
            for step, loss in one["held"].items()
        ]
        for name, one in found["trained"].items()
    }
    points = [point for curve in curves.values() for point in curve]
    left, right = (
        math.log(min(s for s, _ in points)),
        math.log(max(s for s, _ in points)),
    )
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)

    def at(seconds: float, loss: float) -> tuple[float, float]:
        return 70 + 560 * (math.log(seconds) - left) / (right - left), 40 + 320 * (
            high - loss
        ) / (high - low)

    parts = [
        text(
            70,
            24,
            f"Loss on held-out text over seconds, {which} between two sites",
            14,
            'font-weight="600"',
        )
    ]
    for n in range(5):
        loss = low + n * (high - low) / 4
        y = at(math.exp(left), loss)[1]
        parts.append(f'<path d="M70 {y:.1f}H630" stroke="{LINE}"/>')
        parts.append(
            text(62, y + 4, f"{loss:.2f}", 11, f'text-anchor="end" fill="{SOFT}"')
        )
    for seconds in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000):
        if left <= math.log(seconds) <= right:
            parts.append(
                text(
                    at(seconds, low)[0],
                    380,
                    f"{seconds} s",
                    11,
                    f'text-anchor="middle" fill="{SOFT}"',
                )
            )
    for n, (name, curve) in enumerate(curves.items()):
        color = COLORS[n % len(COLORS)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in curve))
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>'
        )
        parts.append(
            f'<path d="M650 {52 + 20 * n}h18" stroke="{color}" stroke-width="3"/>'
        )
        parts.append(text(674, 56 + 20 * n, name, 12))
    inside = "".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 400" font-family="{FONT}" fill="{INK}">'
        f'<rect width="860" height="400" fill="{PAGE}"/>{inside}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--before",
        type=int,
        default=300,
        help="steps that the weights have seen when sides begin",
    )
    parser.add_argument(
        "--longer",
        type=float,
        default=1.25,
        help="so many times as far for who misses plain's loss",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        help="how often every side is timed on every network",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", nargs="+", choices=list(SIDES), default=list(SIDES), metavar="SIDE"
    )
    parser.add_argument(
        "--networks",
        nargs="+",
        choices=list(NETWORKS),
        default=list(NETWORKS),
        metavar="NETWORK",
    )
    parser.add_argument("--untimed", action="store_true", help="only train to the end")
    parser.add_argument(
        "--untrained", action="store_true", help="only take times of steps"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few steps of every side, one network"
    )
    parser.add_argument(
        "--tune", action="store_true", help="only try outer rates and momenta"
    )
    parser.add_argument(
        "--add",
        action="store_true",
        help="keep what the file has of other sides and networks",
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, help="loss over time as an SVG")
    options = parser.parse_args()
    from hosts import unavailable

    if why := unavailable():
        raise SystemExit(why)
    # hosts are taken down on the way out
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if options.quick:
        options.steps, options.before, options.longer, options.networks = (
            4,
            4,
            0,
            options.networks[:1],
        )
    names = [PLAIN, *(name for name in options.only if name != PLAIN)]
    if TORCHFT in names and not find_spec("torchft"):
        print(f"without {TORCHFT}: it is not installed here")
        names.remove(TORCHFT)
    torch.set_num_threads(1)  # and so no threads that a copy of this process would lack
    import step  # noqa: F401  what ranks need is imported once

    import weft.sync.streams
    import weft.train.build_step  # noqa: F401

    bench = Bench(
        options.seed,
        options.steps,
        math.ceil(options.steps * max(1, options.longer)),
        options.before,
    )
    found: dict[str, Any] = (
        json.loads(options.json.read_text()) if options.json.exists() else {}
    )
    if options.tune:
        found["tuned"] = {
            "seed": options.seed,
            "steps": options.steps,
            "losses": tune(bench),
        }
    else:
        now = {
            "date": datetime.now().isoformat(timespec="seconds"), "cores": os.cpu_count(), "load": os.getloadavg()[0],
        }  # fmt: skip
        settings = {
            "parameters": bench.parameters, "before": options.before, "steps": options.steps, "seed": options.seed,
            "every": EVERY, "rows": ROWS * RANKS, "length": LENGTH, "learning_rate": LR,
            "sync": {name: dict(side.sync) for name, side in SIDES.items()},
        }  # fmt: skip
        if options.add and options.untrained:
            found["timed again"] = now | {"sides": names, "networks": options.networks}
        else:
            found |= now | settings
        if not options.add:
            found |= {"trained": {}, "longer": {}, "timed": {}}
        measure(bench, found, names, options)
    write(found, options.json)
    print(f"written to {options.json}")
    if options.picture:
        options.picture.write_text(draw(found))


def write(found: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def measure(
    bench: Bench, found: dict[str, Any], names: list[str], options: argparse.Namespace
) -> None:
    """Train every side to the end, time its steps on every network, and print."""
    for which in () if options.untimed else options.networks:
        rows = timed(bench, names, NETWORKS[which], options.rounds, options.quick)
        found["timed"].setdefault(which, {}).update(rows)
        print(
            which,
            {name: round(row["step_s"], 3) for name, row in rows.items()},
            flush=True,
        )
        write(found, options.json)
    asked = min(ASKED, options.steps)
    with network(NETWORKS[FREE]) as made:
        for name in names:
            if options.untrained or name in found["trained"]:
                continue
            one = found["trained"][name] = whole(
                bench.run(made, name, options.steps, asked)
            )
            if options.longer > 1 and last(one) > last(found["trained"][PLAIN]):
                found["longer"][name] = whole(
                    bench.run(made, name, round(options.steps * options.longer), asked)
                )
            print(
                f"{name:28}{one['seconds']:8.1f} s, held out {last(one):.4f}",
                flush=True,
            )
            write(found, options.json)
    if PLAIN not in found["trained"]:
        return
    print(" | ".join(HEADS))
    for row in judge(found):
        print(" | ".join(row))


if __name__ == "__main__":
    main()
