"""Optimizer state off the GPU, and saves beside training: Weft, FSDP2's CPU offload, ``torch.save`` and PyTorch's DCP.

``weft``, ``host``, ``peer``: steps of the model of ``recipes/gpu-1b.toml`` on one row, eager, bfloat16 with float32
parameters and fused AdamW. Moments or the whole state rest on the host; there the host updates all units, the device
all, or both by turns. The peer is ``transformers``' Llama under FSDP2, with and without ``CPUOffloadPolicy``, from the
same weights on the same tokens. ``save``: how long training of a shorter model of these shapes stands still for a save.

Each group of parts runs in a process of its own, one after the other. A part that fails prints its traceback, and the
next goes on; figures are kept after every part. Seconds of a step are the median of the last three.

    python bench/gpu_offload.py [--json gpu_offload.json] [--seconds 145] [--groups NAME ...] [--ways NAME ...]
    python bench/gpu_offload.py --device cpu --tiny
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from weft.data.batch import Batch
from weft.layout.dims import Box, Logical, extents
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.parallel.state import State
from weft.recipe import Memory, ModelShape, Optimizer, Recipe, Train
from weft.run.rank_processes import rank_process, settle_in
from weft.train.build_step import build_step
from weft.train.setup import build_for_training
from weft.train.step import StepContext

T = torch.Tensor

SHAPE = ModelShape(
    vocab=32768, layers=16, embed=2048, heads=32, kv_heads=8, ffn=8192, tied=True, rope_theta=500000.0,
)  # fmt: skip
TINY = ModelShape(
    vocab=512, layers=3, embed=64, heads=4, kv_heads=2, ffn=128, tied=True
)
SETTINGS = Optimizer(lr=1e-4, weight_decay=0.1, clip=1.0)
#: Blocks of the model whose saves are measured: 0.31 B parameters, 3.7 GB of state.
SAVED_LAYERS = 4
#: Steps of a side, and of one that measures three updates before it chooses a share.
STEPS, CHOOSING = 5, 8
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
#: Seconds that each group is given at most, in the order in which they run.
GROUPS = {"weft": 50.0, "host": 50.0, "peer": 50.0, "save": 75.0}


class Given(NamedTuple):
    """What is measured: ``device``, rows of ``tokens``, losses in pieces of ``chunk``, with ``threads`` on the host."""

    device: torch.device
    shape: ModelShape
    tokens: int
    chunk: int
    threads: int
    folder: Path
    ways: Sequence[str]

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


class Report:
    """The figures of a group, which are written after every part, and the time that is left."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.seconds, self.begun = path, seconds, time.monotonic()
        self.figures: dict[str, Any] = {"parts": {}, "failed": {}, "skipped": []}

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.begun)

    def say(self, line: str) -> None:
        print(f"[{time.monotonic() - self.begun:6.1f} s] {line}", flush=True)

    @contextmanager
    def part(self, name: str) -> Iterator[dict[str, Any]]:
        """What the body adds to the dict are the part's figures."""
        figures: dict[str, Any] = {}
        try:
            yield figures
        except Exception as error:
            self.figures["failed"][name] = f"{type(error).__name__}: {error}"[:500]
            self.say(f"FAILED {name}\n{traceback.format_exc()}")
        if figures:
            self.figures["parts"][name] = figures
            self.say(f"{name}: {short(figures)}")
        self.path.write_text(json.dumps(self.figures, indent=1) + "\n")

    def has_time(self, name: str, seconds: float) -> bool:
        if self.left >= seconds:
            return True
        self.skip(name, "no time")
        return False

    def skip(self, name: str, why: str) -> None:
        self.figures["skipped"].append(f"{name}: {why}")
        self.say(f"skipped, {why}: {name}")


def short(figures: dict[str, Any]) -> str:
    numbers = {k: v for k, v in figures.items() if isinstance(v, (int, float))}
    return ", ".join(f"{k} {v:.4g}" for k, v in numbers.items())


# --- what all sides share


def drawn(name: str, size: tuple[int, ...], device: torch.device) -> T:
    """The weights of a name, the same ones for every side."""
    if name.endswith("scale"):
        return torch.ones(size, device=device)
    seeded = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(size, device=device, generator=seeded) * 0.02


def rows_of(given: Given) -> T:
    seeded = torch.Generator().manual_seed(0)
    return torch.randint(given.shape.vocab, (1, given.tokens + 1), generator=seeded)


def batch_of(given: Given) -> Batch:
    rows = rows_of(given)
    positions = torch.arange(given.tokens).repeat(1, 1)
    bounds = torch.tensor([0, given.tokens], dtype=torch.int32)
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    return Batch(tokens, labels, positions, bounds).to(given.device)


def clear(given: Given) -> None:
    """Free what the last side has left, so that the peak of the next is its own."""
    gc.collect()
    if given.cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def timed(
    step: Callable[[], float], steps: int, given: Given, spans: dict[str, list[float]]
) -> dict[str, Any]:
    """The figures of ``steps`` steps of a side; ``spans``: seconds of parts of every step, which steps add to."""
    clear(given)  # so that the peak is that of steps
    losses, times = [], []
    for _ in range(steps):
        given.wait()
        before = time.perf_counter()
        losses.append(step())
        given.wait()
        times.append(time.perf_counter() - before)
    figures: dict[str, Any] = {"seconds": statistics.median(times[-3:])}
    figures |= {
        f"{name}_seconds": statistics.median(every[-3:])
        for name, every in spans.items()
        if every
    }
    if given.cuda:
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    figures["rss_gib"] = psutil.Process().memory_info().rss / 2**30
    figures["used_gib"] = psutil.virtual_memory().used / 2**30
    return figures | {"first_loss": losses[0], "losses": losses, "times": times}


def host_gib(tensors: list[T]) -> float:
    return sum(t.nbytes for t in tensors if t.device.type == "cpu") / 2**30


def pinned_share(tensors: list[T]) -> float:
    """Share of the bytes on the host that CUDA copies without a detour."""
    here = [t for t in tensors if t.device.type == "cpu"]
    pinned = sum(t.nbytes for t in here if t.is_pinned())
    return pinned / max(1, sum(t.nbytes for t in here))


# --- Weft


class Side:
    """A model of Weft and its state, whose steps are composed as those of a run are."""

    def __init__(
        self, given: Given, memory: Memory, settings: Optimizer = SETTINGS, dtype: str = "bfloat16"
    ) -> None:  # fmt: skip
        self.given = given
        train = Train(
            dtype=dtype, batch=1, micro_batch=1, compile=False, loss_chunk=given.chunk
        )  # fmt: skip
        self.recipe = Recipe(train=train, optimizer=settings, memory=memory)
        self.mesh = Mesh.create(Layout(), given.device)

        def values(name: str, logical: Logical, box: Box) -> T:
            return drawn(name, extents(box), given.device)

        built = build_for_training(given.shape, self.mesh, self.recipe, values)
        self.model, self.state = built
        self.batch = batch_of(given)
        self.spans: dict[str, list[float]] = {"update": []}
        self.chosen: dict[str, Any] = {}

    def step(
        self,
        alternate: float | str = 0.0,
        before_update: Callable[[], None] = lambda: None,
    ) -> Callable[[], float]:
        """A step whose update host and device share; gradients are on the host before it begins."""
        agreed = [0.0]

        def before() -> None:
            before_update()
            self.given.wait()  # the sums are read next anyway
            agreed[0] = time.perf_counter()

        def report(kind: str, line: str, values: Any) -> None:
            self.chosen = {"line": line, **values}

        memory = self.recipe.memory
        if alternate != 0.0:
            memory = Memory(weights="host", alternate=alternate)  # type: ignore[arg-type]
        context = StepContext(
            self.model, self.state, self.mesh, before_update=before, report=report
        )
        taken = build_step(context, self.recipe.model_copy(update={"memory": memory}))
        self.spans["update"] = []

        def step() -> float:
            loss = taken.take([self.batch], SETTINGS.lr)[0].loss
            self.spans["update"].append(time.perf_counter() - agreed[0])
            return loss

        return step

    def about(self) -> dict[str, Any]:
        """Bytes of weights and moments on the host, and how much of them is pinned."""
        tensors = [part.values for part in self.state.parts().values()]
        return {
            "host_state_gib": host_gib(tensors),
            "pinned": pinned_share(tensors),
            "parameters": sum(h.local.numel() for h in self.state.held),
        }


def weft_group(report: Report, given: Given) -> None:
    with rank_process(given.device.type, 60, given.threads):
        with report.part("rates") as figures:
            figures |= rates(given)
        places = {
            "weft": Memory(),
            "weft, again": Memory(),  # how far two runs of one setting part
            "weft, moments on the host": Memory(moments="host"),
        }
        for name, memory in places.items():
            if not report.has_time(name, 8):
                continue
            clear(given)
            with report.part(name) as figures:
                side = Side(given, memory)
                figures |= timed(side.step(), STEPS, given, side.spans) | side.about()
            side = None  # type: ignore[assignment]
        clear(given)
        if report.has_time("equal", 6):
            with report.part("equal") as figures:
                figures |= differences(given)


def host_group(report: Report, given: Given) -> None:
    """State on the host, updated there, on the device and by turns; sides go on from where the last one ended."""
    shares: dict[str, float | str] = {
        "weft, all on the host": 0.0,
        "weft, by turns, chosen": "auto",
        "weft, by turns, all on the device": 1.0,
    }
    with rank_process(given.device.type, 60, given.threads):
        clear(given)
        side = None
        with report.part("building") as figures:
            begun = time.perf_counter()
            side = Side(given, Memory(weights="host"))
            figures["building_seconds"] = time.perf_counter() - begun
        for name, share in shares.items() if side is not None else ():
            if not report.has_time(name, 8):
                continue
            clear(given)
            with report.part(name) as figures:
                steps = CHOOSING if share == "auto" else STEPS
                figures |= timed(side.step(share), steps, given, side.spans)
                figures |= side.about()
                if share == "auto":
                    figures["chosen"] = side.chosen


def differences(given: Given) -> dict[str, Any]:
    """How far losses and state of a tiny model differ from those with everything on the device, after four steps.

    AdamW divides by the size of a gradient, so that its rounding shows where gradients are next to zero. A larger
    epsilon keeps that out of the comparison. In bfloat16 a weight's last digit in float32 decides now and then how it
    is rounded, which moves gradients by a 256th; in float64 nothing hides a fault.
    """
    return {
        f"{dtype}, {name}": value
        for dtype in ("float64", "bfloat16")
        for name, value in differences_in(dtype, given).items()
    }


def differences_in(dtype: str, given: Given) -> dict[str, float]:
    """Return the differences of :func:`differences` where ``dtype`` is computed in."""
    tiny = given._replace(shape=TINY, tokens=128, chunk=64)
    ways: dict[str, tuple[Memory, float]] = {
        "device": (Memory(), 0.0),
        "moments on the host": (Memory(moments="host"), 0.0),
        "all on the host": (Memory(weights="host"), 0.0),
        "by turns, half": (Memory(weights="host"), 0.5),
        "by turns, all": (Memory(weights="host"), 1.0),
    }
    wanted: dict[str, T] = {}
    figures: dict[str, float] = {}
    for name, (memory, share) in ways.items():
        side = Side(tiny, memory, SETTINGS.model_copy(update={"eps": 1e-4}), dtype)
        step = side.step(share)
        losses = [step() for _ in range(4)]
        state = {n: p.values.double().cpu() for n, p in side.state.tensors().items()}
        wanted = wanted or state
        off = max(
            float((state[n] - w).norm() / w.norm().clamp_min(1e-30))
            for n, w in wanted.items()
        )
        figures[f"{name}, state"] = off
        figures[f"{name}, last loss"] = losses[-1]
    return figures


def rates(given: Given) -> dict[str, Any]:
    """GB/s of copies between host and GPU, and of the host's AdamW, which reads and writes 28 bytes of an element."""
    size = (1 << 28) if given.cuda else (1 << 20)
    figures: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }
    parameter = torch.nn.Parameter(torch.ones(size // 4))
    parameter.grad = torch.ones(size // 4)
    update = torch.optim.AdamW([parameter], fused=True).step
    figures["host_adamw_gb_s"] = 7 * size / fastest(update, given) / 1e9
    if not given.cuda:
        return figures
    there = torch.empty(size, dtype=torch.uint8, device=given.device)
    for kind in ("pinned", "pageable"):
        here = torch.zeros(size, dtype=torch.uint8, pin_memory=kind == "pinned")
        down = fastest(lambda: here.copy_(there), given)  # noqa: B023
        up = fastest(lambda: there.copy_(here), given)  # noqa: B023
        figures |= {
            f"{kind}_to_gpu_gb_s": size / up / 1e9,
            f"{kind}_to_host_gb_s": size / down / 1e9,
        }
    return figures


def fastest(work: Callable[[], Any], given: Given) -> float:
    times = []
    for _ in range(4):
        given.wait()
        before = time.perf_counter()
        work()
        given.wait()
        times.append(time.perf_counter() - before)
    return min(times)


# --- the peer

NAMES = {
    "self_attn.q_proj.weight": "attention.wq", "self_attn.k_proj.weight": "attention.wk",
    "self_attn.v_proj.weight": "attention.wv", "self_attn.o_proj.weight": "attention.wo",
    "mlp.gate_proj.weight": "ffn.gate", "mlp.up_proj.weight": "ffn.up", "mlp.down_proj.weight": "ffn.down",
    "input_layernorm.weight": "attention_norm.scale", "post_attention_layernorm.weight": "ffn_norm.scale",
}  # fmt: skip


def weft_name(name: str) -> str:
    """Weft's name of a parameter of ``transformers``."""
    _, _, inner = name.partition("llama.model.")
    if inner.startswith("layers."):
        _, layer, rest = inner.split(".", 2)
        return f"blocks.{layer}.{NAMES[rest]}"
    return "norm.scale" if inner == "norm.weight" else "embedding.table"


def llama(given: Given) -> torch.nn.Module:
    """``transformers``' Llama with its loss in pieces that are computed again, as a row's logits take gigabytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = given.shape
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.embed, intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, rms_norm_eps=shape.norm_eps, tie_word_embeddings=shape.tied,
        rope_theta=shape.rope_theta, rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        max_position_embeddings=max(8192, given.tokens), use_cache=False, attn_implementation="sdpa",
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip

    class Peer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.llama = LlamaForCausalLM(config)

        def summed(self, hidden: T, labels: T) -> T:
            logits = self.llama.lm_head(hidden).float()
            return F.cross_entropy(logits, labels, reduction="sum")

        def forward(self, tokens: T, labels: T) -> T:
            from torch.utils.checkpoint import checkpoint

            hidden = self.llama.model(input_ids=tokens, use_cache=False)[0].flatten(0, 1)  # fmt: skip
            pieces = zip(
                hidden.split(given.chunk), labels.split(given.chunk), strict=True
            )
            losses = [
                checkpoint(self.summed, *piece, use_reentrant=False) for piece in pieces
            ]
            return torch.stack(losses).sum() / labels.numel()

    with given.device:
        return Peer().float().train()


class PeerSide:
    """The peer under FSDP2 in a world of one rank; ``away``: with parameters, gradients and moments on the host."""

    def __init__(self, given: Given, away: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        model: Any = llama(given)
        policy = CPUOffloadPolicy(pin_memory=given.cuda) if away else OffloadPolicy()
        settings: dict[str, Any] = {
            "mesh": init_device_mesh(given.device.type, (1,)),
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
            "offload_policy": policy,
        }
        for layer in model.llama.model.layers:
            fully_shard(layer, **settings)
        fully_shard(model, reshard_after_forward=False, **settings)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                local = parameter.to_local()
                size = tuple(local.shape)
                local.copy_(drawn(weft_name(name), size, given.device))
        self.model = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps, weight_decay=0.1, fused=True,
        )  # fmt: skip
        rows = rows_of(given).to(given.device)
        self.tokens = rows[:, :-1].contiguous()
        self.labels = rows[:, 1:].contiguous().flatten()
        self.given = given
        self.spans: dict[str, list[float]] = {"clip": [], "update": []}

    def step(self) -> float:
        loss = self.model(self.tokens, self.labels)
        loss.backward()
        value = float(loss.item())
        begun = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), SETTINGS.clip)
        self.given.wait()
        clipped = time.perf_counter()
        self.optimizer.step()
        self.given.wait()
        self.spans["clip"].append(clipped - begun)
        self.spans["update"].append(time.perf_counter() - clipped)
        self.optimizer.zero_grad()
        return value

    def about(self) -> dict[str, Any]:
        own = [p.to_local().detach() for p in self.model.parameters()]
        slots = [
            t.to_local() if hasattr(t, "to_local") else t
            for slots in self.optimizer.state.values()
            for t in slots.values()
        ]
        return {
            "host_state_gib": host_gib(own + slots),
            "pinned": pinned_share(own + slots),
            "parameters": sum(t.numel() for t in own),
        }


def peer_group(report: Report, given: Given) -> None:
    with joined(given):
        for name, away in (("FSDP2, CPU offload", True), ("FSDP2", False)):
            if not report.has_time(name, 8):
                continue
            clear(given)
            with report.part(name) as figures:
                side = PeerSide(given, away)
                figures |= timed(side.step, STEPS, given, side.spans) | side.about()
            side = None  # type: ignore[assignment]


@contextmanager
def joined(given: Given) -> Iterator[None]:
    """A process group of one rank for tensors of the GPU and of the host, which clipping and DCP ask for."""
    settle_in(given.device.type, given.threads)
    backend = "cpu:gloo,cuda:nccl" if given.cuda else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# --- saves


class Save(NamedTuple):
    """A save under way. ``copied``: waits until the state may change; ``done``: whether it is on disk."""

    copied: Callable[[], None]
    done: Callable[[], bool]


class Way:
    """A way to save. Subclasses keep what later saves use again."""

    def __init__(self, given: Given, state: State) -> None:
        self.given, self.state = given, state

    def tensors(self) -> dict[str, T]:
        # as a model's state_dict() has them
        return {n: part.values.detach() for n, part in self.state.parts().items()}

    def begin(self, folder: Path) -> Save:
        raise NotImplementedError

    def close(self) -> None:
        """Free what saves have used."""


class WeftSave(Way):
    """Copies into pinned memory beside the next passes; a process of its own hashes and writes."""

    def __init__(self, given: Given, state: State) -> None:
        super().__init__(given, state)
        from weft.checkpoint.save import Saver

        self.saver = Saver(lambda text: None, strict=True)
        self.saver.prepare(state.saved())

    def begin(self, folder: Path) -> Save:
        from weft.checkpoint.storage import LocalStorage

        saver, before = self.saver, len(self.saver.reports)
        place, meta = LocalStorage(folder), {"layout": "one"}
        saver.save(place, 1, self.state.saved(), meta, {}, lazy=True)

        def done() -> bool:
            saver.poll()
            late = saver.reports[before:]
            problems = [saved.report.problem for saved in late if saved.report.problem]
            if problems:
                raise RuntimeError(problems[0])
            return any(saved.report.committed for saved in late)

        return Save(saver.wait_for_copy, done)

    def close(self) -> None:
        self.saver.finish()
        self.saver.close()


class TorchSave(Way):
    """``torch.save``, and a sync: training stands still all the time."""

    def begin(self, folder: Path) -> Save:
        with (folder / "state.pt").open("wb") as file:
            torch.save(self.tensors(), file)
            file.flush()
            os.fsync(file.fileno())
        return Save(lambda: None, lambda: True)


class DcpSave(Way):
    """``torch.distributed.checkpoint.async_save``; ``pinned``: with a stager that copies beside training."""

    pinned = process = False

    def __init__(self, given: Given, state: State) -> None:
        super().__init__(given, state)
        # imported here, which is not the time of a save
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self.dcp, self.types = dcp, AsyncCheckpointerType
        self.stager: Any = None
        self.new_stager: Callable[[], Any] | None = None
        if self.pinned:
            from torch.distributed.checkpoint.staging import (
                DefaultStager,
                StagingOptions,
            )

            # tensors of shared memory begin at pages of their own, which can be pinned one by one
            room = psutil.disk_usage("/dev/shm").free
            shared = room > 1.5 * sum(t.nbytes for t in self.tensors().values())
            if self.process and not shared:
                raise RuntimeError(f"/dev/shm has {room / 1e9:.1f} GB only")
            options = StagingOptions(
                use_pinned_memory=True, use_shared_memory=shared, use_async_staging=True, use_non_blocking_copy=True,
            )  # fmt: skip
            self.new_stager = partial(DefaultStager, options)

    def begin(self, folder: Path) -> Save:
        how: dict[str, Any] = {}
        # in PyTorch 2.11 one fails at its second save, as if it were closed then
        if self.new_stager is not None and (self.stager is None or TORCH < (2, 14)):
            self.stager = self.new_stager()
        if self.process:
            how["async_checkpointer_type"] = self.types.PROCESS
        if self.stager is not None:
            how["async_stager"] = self.stager
        begun: Any = self.dcp.async_save(
            self.tensors(), checkpoint_id=str(folder), **how
        )
        upload = getattr(begun, "upload_completion", begun)
        staged = getattr(begun, "staging_completion", None)

        def done() -> bool:
            if upload.done():
                upload.result()  # raises what went wrong
            return bool(upload.done())

        return Save(lambda: staged and staged.result(), done)

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()


class PinnedThread(DcpSave):
    pinned = True


class PinnedProcess(DcpSave):
    pinned = process = True


#: Ways, and how many saves each makes: those that keep memory for later ones have a first save that makes it.
WAYS: dict[str, tuple[type[Way], int]] = {
    "save: weft": (WeftSave, 2),
    "save: torch.save": (TorchSave, 1),
    "save: DCP async": (DcpSave, 1),
    "save: DCP async, pinned, thread": (PinnedThread, 2),
    "save: DCP async, pinned, process": (PinnedProcess, 2),
}


def save_group(report: Report, given: Given) -> None:
    layers = min(SAVED_LAYERS, given.shape.layers)
    given = given._replace(shape=given.shape.model_copy(update={"layers": layers}))
    with joined(given):
        side = Side(given, Memory())
        waiting: list[Callable[[], None]] = []

        def before_update() -> None:
            while waiting:
                waiting.pop()()

        step = side.step(before_update=before_update)

        def seconds() -> float:
            given.wait()
            before = time.perf_counter()
            step()
            given.wait()
            return time.perf_counter() - before

        quiet = statistics.median([seconds() for _ in range(6)][-4:])
        with report.part("save: the state") as figures:
            tensors = [part.values for part in side.state.parts().values()]
            figures["gb"] = sum(t.nbytes for t in tensors) / 1e9
            figures["quiet_step_seconds"] = quiet
        for name, (kind, saves) in WAYS.items():
            if name not in given.ways:
                continue
            if getattr(kind, "pinned", False) and not given.cuda:
                report.skip(name, "needs CUDA")
            elif report.has_time(name, 9):
                with report.part(name) as figures:
                    way = kind(given, side.state)
                    one_way(way, saves, report, figures, seconds, waiting, quiet)


def one_way(
    way: Way, saves: int, report: Report, figures: dict[str, Any], seconds: Callable[[], float],
    waiting: list[Callable[[], None]], quiet: float,
) -> None:  # fmt: skip
    """Save some times while training goes on; of the last save the figures bear no number."""
    try:
        for number in range(saves):
            if number and report.left < 7:
                return
            folder = Path(tempfile.mkdtemp(prefix="weft-save-", dir=way.given.folder))
            try:
                one = one_save(way, folder, seconds, waiting, quiet)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            if number == 0 and saves > 1:
                figures |= {f"first_{k}": v for k, v in one.items()}
            figures |= one
    finally:
        waiting.clear()
        way.close()


def one_save(
    way: Way, folder: Path, seconds: Callable[[], float], waiting: list[Callable[[], None]], quiet: float
) -> dict[str, Any]:  # fmt: skip
    """Seconds that training stands still: the call, and what the step beside it takes longer; and until it is on disk.

    ``later``: what the steps after that, until the save is on disk, take longer altogether.
    """
    way.given.wait()
    begun = time.perf_counter()
    save = way.begin(folder)
    call = time.perf_counter() - begun
    waiting.append(save.copied)
    beside, on_disk = [], call
    while not beside or not save.done():
        if time.perf_counter() - begun > 25:
            raise TimeoutError("not on disk after 25 s")
        beside.append(seconds() - quiet)
        on_disk = time.perf_counter() - begun
    # done before a step was taken
    if isinstance(way, TorchSave):
        on_disk = call
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    return {
        "stands_still_seconds": call + max(0.0, beside[0]), "call_seconds": call, "on_disk_seconds": on_disk,
        "steps_beside": len(beside), "later_seconds": sum(beside[1:]), "file_gb": size / 1e9,
    }  # fmt: skip


# --- all groups

WORK: dict[str, Callable[[Report, Given], None]] = {
    "weft": weft_group,
    "host": host_group,
    "peer": peer_group,
    "save": save_group,
}


def inside(args: argparse.Namespace) -> None:
    """Run one group in this process."""
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    tokens, chunk = (128, 64) if args.tiny else (args.tokens, 4096)
    shape = TINY if args.tiny else SHAPE
    if args.layers:
        shape = shape.model_copy(update={"layers": args.layers})
    given = Given(device, shape, tokens, chunk, args.threads, args.folder, args.ways)
    report = Report(args.json, args.seconds)
    report.figures["about"] = {
        "torch": torch.__version__, "threads": args.threads, "tokens": tokens, "layers": shape.layers,
        "device": torch.cuda.get_device_name() if given.cuda else "CPU",
    }  # fmt: skip
    with report.part("a whole group"):
        WORK[args.groups[0]](report, given)
    sys.stdout.flush()
    # at once: giving back pinned memory takes seconds that the next group needs
    os._exit(0)


def started(group: str, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Run a group in a process of its own, and return the figures that it has left."""
    path = args.json.with_name(f"{args.json.stem}.{group}.json")
    path.unlink(missing_ok=True)
    # a little before it would be ended, so that it can say what it leaves out
    command = [
        sys.executable, __file__, "--inside", "--groups", group, "--device", args.device, "--json", str(path),
        "--seconds", str(seconds - 4), "--tokens", str(args.tokens), "--threads", str(args.threads), "--layers",
        str(args.layers), "--folder", str(args.folder), "--ways", *args.ways, *["--tiny"] * args.tiny,
    ]  # fmt: skip
    # the process that writes Weft's checkpoints imports it as well
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    alone = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    # a session of its own, as it starts processes that would outlive it
    process = subprocess.Popen(command, env=os.environ | alone, start_new_session=True)
    late = False
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        late = True
    with_children(process.pid)
    process.wait()
    figures = json.loads(path.read_text()) if path.exists() else {"failed": {}}
    if late:
        figures["failed"][f"{group}: the rest"] = f"ended after {seconds:.0f} s"
    elif process.returncode:
        figures["failed"][f"{group}: the rest"] = f"exit code {process.returncode}"
    return figures


def with_children(pid: int) -> None:
    """End what is left of a group's session."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def table(figures: dict[str, Any]) -> None:
    parts = figures["parts"]
    base = parts.get("weft", {}).get("seconds")
    heads = f"{'s':>8}{'x weft':>8}{'update':>8}{'GPU GiB':>9}{'host':>7}{'pinned':>8}"
    print(f"\n{'step':<36}{heads}{'loss':>10}")
    for name, part in parts.items():
        if "seconds" in part:
            ratio = f"{part['seconds'] / base:8.2f}" if base else f"{'':8}"
            print(
                f"{name:<36}{part['seconds']:8.3f}{ratio}{part.get('update_seconds', 0):8.3f}"
                f"{part.get('peak_gib', 0):9.2f}{part.get('host_state_gib', 0):7.2f}{part.get('pinned', 0):8.2f}"
                f"{part['first_loss']:10.5f}"
            )
    print(
        f"\n{'save':<36}{'still s':>9}{'first':>9}{'on disk':>9}{'later':>8}{'GB':>7}"
    )
    for name, part in parts.items():
        if "stands_still_seconds" in part:
            first = part.get("first_stands_still_seconds", part["stands_still_seconds"])
            print(
                f"{name:<36}{part['stands_still_seconds']:9.3f}{first:9.3f}{part['on_disk_seconds']:9.2f}"
                f"{part['later_seconds']:8.2f}{part['file_gb']:7.2f}"
            )
    for name in ("rates", "equal"):
        if name in parts:
            print(f"\n{name}: {short(parts[name])}")
    line = parts.get("weft, by turns, chosen", {}).get("chosen", {}).get("line")
    print(f"chosen: {line}\nfailed: {figures['failed'] or 'nothing'}")
    print(f"skipped: {figures['skipped'] or 'nothing'}", flush=True)


def main() -> None:
    out = Path(os.environ.get("OUT", Path(__file__).parent / "results"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS))  # fmt: skip
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="of saving")  # fmt: skip
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=0, help="0: those of gpu-1b")
    parser.add_argument("--threads", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=145, help="limit of all groups")  # fmt: skip
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="for saves")
    parser.add_argument("--json", type=Path, default=out / "gpu_offload.json")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside(args)
        return
    begun = time.monotonic()
    figures: dict[str, Any] = {
        "command": " ".join(sys.argv), "parts": {}, "failed": {}, "skipped": [], "about": {}, "wall_seconds": {},
    }  # fmt: skip
    for group in args.groups:
        left = args.seconds - (time.monotonic() - begun)
        if left < 12:
            figures["skipped"].append(f"{group}: no time")
            continue
        before = time.monotonic()
        given = started(group, args, min(left, GROUPS[group]))
        for key in ("parts", "failed"):
            figures[key] |= given.get(key, {})
        figures["skipped"] += given.get("skipped", [])
        figures["about"] |= given.get("about", {})
        figures["wall_seconds"][group] = round(time.monotonic() - before, 1)
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    table(figures)
    print(f"wall: {figures['wall_seconds']}")


if __name__ == "__main__":
    main()
