"""Attention over a cut sequence: every table of tiles side by side, on four gloo ranks.

Forward and backward of one attention layer on one document: time and bytes of each scheme, beside gathering all keys
and values and PyTorch's own ring (``torch.distributed.tensor.experimental``), whose template takes the CPU kernel. Then
the same steps with kernels that sleep as long as their tile is large, as if every rank had a device of its own: what
the critical path of a table costs. Then the memory of a rank as its share of the sequence grows, and that of reading a
long prompt: on one rank with the logits of all positions, with those of the last alone, and cut over four ranks.

    python bench/sequence.py [--rounds 9] [--tokens 4096] [--quick] [--json bench/results/sequence.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from modelled import critical_path, work_per_step
from picture import FONT, INK, LANE, LINE, PAGE, SOFT, photograph, text
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.generate.one_text import OneText
from weft.generate.engine import Engine
from weft.generate.leader import follow_leader, mesh_of_rank
from weft.generate.sampling import GREEDY
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.layout.sequence import chunk_owners, owned_ranges
from weft.models.attention import attend_backward, attend_forward, attention, join
from weft.models.numbers import wide
from weft.models.segments import Segment
from weft.parallel.build import parallelize
from weft.parallel.context.attend import context_attention
from weft.parallel.context.tables import TileTable, tile_table_of
from weft.recipe import ModelShape, Train
from weft.schedule.draw import ticks

ROOT = Path(__file__).parents[1]
RESULTS, PICTURE = (
    Path(__file__).parent / "results/sequence.json",
    ROOT / "docs/measured/sequence-balance.png",
)
RANKS, HEADS, DIM, PROMPT_VOCAB = 4, 8, 64, 32_768
T = torch.Tensor
#: Name -> context and ulysses of the layout.
WEFT = {
    "zigzag": ("zigzag", 1), "ring": ("ring", 1), "lightseq": ("lightseq", 1), "tokenring": ("tokenring", 1),
    "gather": ("gather", 1), "ulysses": ("ulysses", 1), "usp 2x2": ("zigzag", 2), "rsa": ("rsa", 1),
}  # fmt: skip
SLEPT = ("zigzag", "ring", "lightseq", "tokenring", "gather")
COLOURS = {
    "ring": "#dc6803",
    "zigzag": "#2563eb",
    "lightseq": "#15803d",
    "tokenring": "#9333ea",
    "gather": "#64748b",
}


class Bytes(TorchDispatchMode):
    """Bytes that this rank sends: point to point, and in the collectives of the sides."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        size = next(
            (a.numel() * a.element_size() for a in args if isinstance(a, torch.Tensor)),
            0,
        )
        if name == "all_gather_into_tensor":
            self.sent += size * (RANKS - 1)
        elif name == "all_to_all_single":  # PyTorch's ring: one peer gets everything
            self.sent += size
        return func(*args, **(kwargs or {}))

    def counting(self, stack: ExitStack) -> None:
        """What happens inside of operators, which a dispatch mode does not see."""
        post, exchange = dist.P2POp, dist.all_to_all_single
        gather, scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor

        def note(op: Any, tensor: T, *rest: Any, **kwargs: Any) -> Any:
            self.sent += (
                tensor.numel() * tensor.element_size() if op is dist.isend else 0
            )
            return post(op, tensor, *rest, **kwargs)

        def exchanged(
            flat: T, sent: T, sizes: list[int], parts: list[int], group: Any
        ) -> Any:
            self.sent += (
                sent.numel() - parts[dist.get_rank(group)]
            ) * sent.element_size()
            return exchange(flat, sent, sizes, parts, group=group)

        def gathered(whole: T, part: T) -> Any:
            self.sent += part.numel() * part.element_size() * (RANKS - 1)
            return gather(whole, part)

        def scattered(part: T, whole: T) -> Any:
            self.sent += part.numel() * part.element_size() * (RANKS - 1)
            return scatter(part, whole)

        for name, what in (
            ("P2POp", note), ("all_to_all_single", exchanged), ("all_gather_into_tensor", gathered),
            ("reduce_scatter_tensor", scattered),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(dist, name, what))


class AllKeys(torch.autograd.Function):
    """The plain way: all-gather keys and values, attend with own queries, reduce-scatter their gradients."""

    @staticmethod
    def forward(ctx: Any, q: T, k: T, v: T) -> T:
        whole = torch.empty(RANKS, 2, *k.shape[1:], dtype=k.dtype)
        dist.all_gather_into_tensor(whole.flatten(0, 1), torch.cat((k, v)))
        k, v = AllKeys.ordered(whole)
        q, out = q[0], torch.empty(q.shape[1:])
        lse = torch.empty(q.shape[:2], dtype=wide(q.dtype))
        for rows, segments in AllKeys.parts(len(k)):
            o, l = (torch.empty(()), torch.empty(()))
            for i, s in enumerate(segments):
                piece = Segment(0, s.q1 - s.q0, 0, s.k1 - s.k0, s.causal)
                found = attend_forward(q[rows], k[s.k0 : s.k1], v[s.k0 : s.k1], [piece])
                if i:
                    join(o, l, *found)
                else:
                    o, l = found
            out[rows], lse[rows] = o, l
        ctx.save_for_backward(q, k, v, out, lse)
        return out[None]

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[T, T, T]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows, segments in AllKeys.parts(len(k)):
            for s in segments:
                cols, piece = (
                    slice(s.k0, s.k1),
                    Segment(0, s.q1 - s.q0, 0, s.k1 - s.k0, s.causal),
                )
                grads = attend_backward(
                    grad[0][rows],
                    q[rows],
                    k[cols],
                    v[cols],
                    out[rows],
                    lse[rows],
                    [piece],
                )
                for total, share, where in zip(
                    (dq, dk, dv), grads, (rows, cols, cols), strict=True
                ):
                    total[where] += share
        chunk = len(k) // (2 * RANKS)
        order = [c for owned in chunk_owners(Layout(cp=RANKS)) for c in owned]
        whole = torch.stack(
            [
                x.unflatten(0, (2 * RANKS, chunk))[order].view(RANKS, -1, *x.shape[1:])
                for x in (dk, dv)
            ],
            1,
        )
        mine = torch.empty(2, *whole.shape[2:])
        dist.reduce_scatter_tensor(mine, whole.flatten(0, 1))
        return dq[None], mine[:1], mine[1:]

    @staticmethod
    def parts(length: int) -> list[tuple[slice, list[Segment]]]:
        """Own rows, each with itself and with all that is before."""
        chunk = length // (2 * RANKS)
        found = []
        for i, c in enumerate(chunk_owners(Layout(cp=RANKS))[dist.get_rank()]):
            at, rows = c * chunk, slice(i * chunk, (i + 1) * chunk)
            before = [Segment(0, chunk, 0, at, False)] if c else []
            found.append((rows, [Segment(0, chunk, at, at + chunk, True), *before]))
        return found

    @staticmethod
    def ordered(whole: T) -> tuple[T, T]:
        """Keys and values of all tokens from what the ranks hold: ``[tokens, kv_heads, head_dim]``."""
        order = [c for owned in chunk_owners(Layout(cp=RANKS)) for c in owned]
        back = [order.index(c) for c in range(2 * RANKS)]
        k, v = (
            whole.transpose(0, 1)
            .unflatten(2, (2, -1))
            .flatten(1, 2)[:, back]
            .flatten(1, 2)
        )
        return k, v


class PyTorchRing(torch.autograd.Function):
    """PyTorch's ring over the CPU's kernels: ``context_parallel`` itself registers the CUDA ones only."""

    @staticmethod
    def forward(ctx: Any, q: T, k: T, v: T, rotate: str) -> T:
        from torch.distributed.tensor.experimental._context_parallel import (
            _attention as ring,
        )

        ring.set_rotate_method(rotate)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        out, lse = ring._templated_ring_attention(
            dist.group.WORLD, 2, kernel, q, k, v, is_causal=True
        )[:2]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rotate = rotate
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[T, T, T, None]:
        from torch.distributed.tensor.experimental._context_parallel import (
            _attention as ring,
        )

        ring.set_rotate_method(ctx.rotate)
        q, k, v, out, lse = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = ring._templated_ring_attention_backward(
            dist.group.WORLD, 2, kernel, grad.transpose(1, 2).contiguous(), "grad_out", q, k, v, out, lse, True,
            dropout_p=0.0,
        )  # fmt: skip
        dq, dk, dv = (x.transpose(1, 2) for x in grads[:3])
        return dq, dk, dv, None


def sides(kv_heads: int) -> dict[str, tuple[Layout, Callable[[T, T, T, T], T]]]:
    """Name -> the layout of its tokens and the attention."""
    found: dict[str, tuple[Layout, Callable[[T, T, T, T], T]]] = {}
    for name, (context, ulysses) in WEFT.items():
        layout = Layout(cp=RANKS, context=context, ulysses=ulysses)
        found[name] = (
            layout,
            context_attention(
                Mesh.create(layout, "cpu"), ModelShape(heads=HEADS, kv_heads=kv_heads)
            ),
        )
    found["all-gather, plain"] = (
        Layout(cp=RANKS),
        lambda q, k, v, cu: AllKeys.apply(q, k, v),
    )
    for rotate in ("allgather", "alltoall"):
        found[f"PyTorch, {rotate}"] = (
            Layout(cp=RANKS),
            lambda q, k, v, cu, r=rotate: PyTorchRing.apply(q, k, v, r),
        )
    return found


def whole(tokens: int, kv_heads: int) -> list[T]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, tokens, n, DIM, generator=generator)
        for n in (HEADS, kv_heads, kv_heads, HEADS)
    ]


def own(x: T, layout: Layout) -> T:
    return torch.cat(
        [x[:, a:b] for a, b in owned_ranges(x.shape[1], layout, dist.get_rank())], 1
    )


def one_step(attend: Callable[[T, T, T, T], T], given: Sequence[T], cu: T) -> list[T]:
    q, k, v = (x.detach().requires_grad_() for x in given[:3])
    out = attend(q, k, v, cu)
    out.backward(given[3])
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return [out.detach(), q.grad, k.grad, v.grad]


def timed(call: Callable[[], object]) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    begun = time.perf_counter()
    call()
    took = torch.tensor(time.perf_counter() - begun)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def steps(tokens: int, kv_heads: int, rounds: int) -> dict[str, Any]:
    """Time, bytes and error of every side; they take turns."""
    cu, tensors = torch.tensor([0, tokens], dtype=torch.int32), whole(tokens, kv_heads)
    expected = one_step(lambda *a: attention(*a)[0], tensors, cu)
    todo, found = {}, {}
    for name, (layout, attend) in sides(kv_heads).items():
        given = [own(x, layout) for x in tensors]
        todo[name] = partial(one_step, attend, given, cu)
        error = max(
            (a - own(b, layout)).abs().max().item()
            for a, b in zip(todo[name](), expected, strict=True)
        )
        with Bytes() as count, ExitStack() as stack:
            count.counting(stack)
            todo[name]()
        numbers = torch.tensor(
            [count.sent, count.sent / RANKS, error], dtype=torch.float64
        )
        dist.all_reduce(numbers[:1], dist.ReduceOp.MAX)
        dist.all_reduce(numbers[1:2])
        dist.all_reduce(numbers[2:], dist.ReduceOp.MAX)
        found[name] = {
            "bytes_max": numbers[0].item(),
            "bytes_mean": numbers[1].item(),
            "error": numbers[2].item(),
        }
    times: dict[str, list[float]] = {name: [] for name in todo}
    for _ in range(rounds):
        for name, call in todo.items():
            times[name].append(timed(call))
    for name, took in times.items():
        ratios = [a / b for a, b in zip(took, times["zigzag"], strict=True)]
        found[name] |= {"ms": 1e3 * statistics.median(took), "ratio": statistics.median(ratios),
                        "quartiles": statistics.quantiles(ratios, n=4)[::2]}  # fmt: skip
    return found


def slept(rounds: int, unit: float) -> dict[str, Any]:
    """Steps whose kernels sleep ``unit`` seconds per tile of (tokens / ranks)^2, and twice that in backward."""
    from weft.parallel.context import tile_attention

    tokens, found = 256, {}
    tile = (tokens / RANKS) ** 2

    def sleep(segments: Sequence[Segment], times: float) -> None:
        area = sum(
            (s.q1 - s.q0) * (s.k1 - s.k0) / (2 if s.causal else 1) for s in segments
        )
        time.sleep(times * unit * area / tile)

    def forward(q: T, k: T, v: T, segments: Sequence[Segment]) -> tuple[T, T]:
        sleep(segments, 1)
        return torch.zeros_like(q), torch.zeros(q.shape[:2])

    def backward(
        grad: T, q: T, k: T, v: T, out: T, lse: T, segments: Sequence[Segment]
    ) -> tuple[T, T, T]:
        sleep(segments, 2)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    cu, tensors = torch.tensor([0, tokens], dtype=torch.int32), whole(tokens, HEADS)
    for name in SLEPT:
        layout = Layout(cp=RANKS, context=name)
        attend = context_attention(Mesh.create(layout, "cpu"), ModelShape(heads=HEADS))
        given = [own(x, layout) for x in tensors]
        with (
            mock.patch.object(tile_attention, "attend_forward", forward),
            mock.patch.object(tile_attention, "attend_backward", backward),
        ):
            took = statistics.median(
                timed(partial(one_step, attend, given, cu)) for _ in range(rounds)
            )
        path = critical_path(tile_table_of(name, RANKS))
        found[name] = {"ms": 1e3 * took, "tiles": took / (3 * unit), "path": path}
    return found


def memory(local: Sequence[int]) -> dict[str, list[float]]:
    """MiB that a step needs beside its inputs, most of any rank, per local length: the process' high-water mark."""
    found: dict[str, list[float]] = {}
    for name in ("zigzag", "tokenring", "gather", "rsa"):
        layout = Layout(cp=RANKS, context=name)
        attend = context_attention(Mesh.create(layout, "cpu"), ModelShape(heads=HEADS))
        found[name] = []
        # The first length only touches what stays; whole rows of scores are too much for this machine at the longest.
        for length in (16, *(local[:2] if name == "rsa" else local)):
            cu = torch.tensor([0, length * RANKS], dtype=torch.int32)
            given = [torch.randn(1, length, HEADS, DIM) for _ in range(4)]
            found[name].append(grown(partial(one_step, attend, given, cu)))
        del found[name][0]
    return found


def grown(call: Callable[[], object]) -> float:
    """MiB that a call needs at most, on the rank that needs most."""
    dist.barrier()
    before = _resident("VmRSS")
    # the high-water mark starts again from here
    Path("/proc/self/clear_refs").write_text("5")
    call()
    most = torch.tensor(_resident("VmHWM") - before)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


@torch.inference_mode()
def prompts(lengths: Sequence[int]) -> dict[str, dict[str, list[float]]]:
    """Seconds and MiB to read a prompt, cache and logits included; alone means that the other ranks wait."""
    shape = ModelShape(vocab=PROMPT_VOCAB, layers=2, embed=256, heads=HEADS, kv_heads=2)
    model, _ = parallelize(shape, Mesh.single(), Train())
    cut, _ = parallelize(
        shape, mesh_of_rank(Layout(cp=RANKS), "cpu"), Train(), summed=False
    )

    def over_ranks(ids: list[int]) -> None:
        if dist.get_rank():
            return follow_leader(cut)
        engine = Engine(cut, budget=2048 * RANKS, ranks=True)  # as weft generate has it
        engine.submit(ids, 1, GREEDY)
        engine.run()
        engine.close()

    def whole(ids: list[int]) -> T:
        """What reading took before: logits of every position, of which the last is used."""
        n = len(ids)
        return model(torch.tensor([ids]), torch.arange(n)[None], torch.tensor([0, n]))[
            0, -1
        ]

    ways: dict[str, tuple[int, Callable[[], Callable[[list[int]], object]]]] = {
        "one rank, all logits": (1, lambda: whole),
        "one rank": (1, lambda: OneText(model).read),
        f"cp={RANKS}": (RANKS, lambda: over_ranks),
    }
    found: dict[str, dict[str, list[float]]] = {
        name: {"s": [], "MiB": []} for name in ways
    }
    for length in (64, *lengths):
        ids = [i % shape.vocab for i in range(length)]
        for name, (ranks, make) in ways.items():
            read = partial(make(), ids) if dist.get_rank() < ranks else (lambda: None)
            took: list[float] = []
            found[name]["MiB"].append(
                grown(lambda read=read, took=took: took.append(timed(read)))
            )
            found[name]["s"].append(took[0])
    return {
        name: {what: values[1:] for what, values in row.items()}
        for name, row in found.items()
    }


def public() -> str:
    """PyTorch's documented interface, ``context_parallel`` around ``scaled_dot_product_attention``: does it run?"""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    q, k, v = (torch.randn(1, HEADS, 256, DIM) for _ in range(3))
    try:
        with context_parallel(
            init_device_mesh("cpu", (RANKS,)),
            buffers=[q, k, v],
            buffer_seq_dims=[2, 2, 2],
        ):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    except Exception as error:  # whatever it is, it is what a user sees
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "runs"


def _resident(what: str) -> float:
    line = next(
        x
        for x in Path("/proc/self/status").read_text().splitlines()
        if x.startswith(what)
    )
    return int(line.split()[1]) / 1024


def work(rank: int, folder: str, options: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore", r".*is deprecated", FutureWarning)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store-{options.part}",
        rank=rank,
        world_size=RANKS,
    )
    found: dict[str, Any] = {}
    if options.part == "memory":
        found["memory"] = {"local": options.local, **memory(options.local)}
        found["prompts"] = {
            "lengths": options.prompts,
            "ways": prompts(options.prompts),
        }
    else:
        found["steps"] = {
            f"{n} key/value heads": steps(options.tokens, n, options.rounds)
            for n in (HEADS, 2)
        }
        found["slept"] = slept(options.rounds, options.tile)
        # last: where it fails it leaves patches behind
        found["context_parallel"] = public()
    if rank == 0:
        (Path(folder) / f"{options.part}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


# --- the picture ---


def lanes(
    table: TileTable, x: float, y: float, width: float, height: float, longest: float
) -> list[str]:
    """A lane per rank: work in its colour, waiting for the slowest rank of a step in grey."""
    scale, lane = width / longest, height / table.ranks
    out, start = [], 0.0
    for step in work_per_step(table):
        for rank, amount in enumerate(step):
            top, left = y + rank * lane, x + start * scale
            out.append(f'<rect x="{left:.1f}" y="{top + 1:.1f}" width="{max(step) * scale - 1.5:.1f}" '
                       f'height="{lane - 2:.1f}" fill="{LINE}"/>')  # fmt: skip
            out.append(f'<rect x="{left:.1f}" y="{top + 1:.1f}" width="{max(0.0, amount * scale - 1.5):.1f}" '
                       f'height="{lane - 2:.1f}" fill="{COLOURS[table.name]}"/>')  # fmt: skip
        start += max(step)
    return out


def drawn(found: dict[str, Any]) -> str:
    """Above: what each rank does in every step; below: paths over P, measured steps, memory over local length."""
    width, height = 1500, 1040
    soft, bold = f'fill="{SOFT}"', f'font-weight="600" fill="{INK}"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="{FONT}">'
        f'<rect width="{width}" height="{height}" fill="{PAGE}"/>',
        text(32, 50, "Who computes when: causal attention over P ranks", 28, f'font-weight="700" fill="{INK}"'),
        text(32, 80, "One lane per rank, one column per step; grey: waiting for the busiest rank. Unit: a tile of "
             "(tokens / P) squared. Dashed: an even share.", 16, soft),
    ]  # fmt: skip
    for column, scheme in enumerate(("ring", "zigzag", "lightseq")):
        left = 84 + column * 480
        out.append(
            text(
                left,
                120,
                {"ring": "contiguous ring", "zigzag": "zigzag ring"}.get(
                    scheme, scheme
                ),
                18,
                bold,
            )
        )
        for row, ranks in enumerate((4, 7, 8)):
            table, top = tile_table_of(scheme, ranks), 152 + row * 162
            scale = 380 / (ranks - 0.5)
            if not column:
                out.append(text(32, top + 60, f"P = {ranks}", 15, bold))
            out.append(
                f'<rect x="{left}" y="{top}" width="380" height="112" fill="{LANE}"/>'
            )
            out += lanes(table, left, top, 380, 112, ranks - 0.5)
            ideal = left + ranks / 2 * scale
            out.append(
                f'<path d="M{ideal:.1f} {top - 5}v122" stroke="{INK}" stroke-width="1.6" stroke-dasharray="5 4"/>'
            )
            path = critical_path(table)
            out.append(
                text(
                    left,
                    top + 130,
                    f"{path:g} tiles on the critical path, {2 * path / ranks:.2f}x ideal",
                    14,
                    soft,
                )
            )
    top, tall = 690, 300
    out.append(text(84, top - 22, "Critical path over the ideal, by ranks", 17, bold))
    x, y = (
        (lambda p: 84 + 380 * (p - 2) / 14),
        (lambda ratio: top + tall * (1 - (ratio - 1) / 1)),
    )
    for ratio in (1, 1.25, 1.5, 1.75, 2):
        out.append(f'<path d="M84 {y(ratio):.1f}h380" stroke="{LINE}"/>')
        out.append(
            text(76, y(ratio) + 5, f"{ratio:g}", 13, f'text-anchor="end" {soft}')
        )
    for p in range(2, 17, 2):
        out.append(
            text(x(p), top + tall + 22, str(p), 13, f'text-anchor="middle" {soft}')
        )
    for i, scheme in enumerate(("ring", "lightseq", "zigzag")):
        points = [
            (x(p), y(2 * critical_path(tile_table_of(scheme, p)) / p))
            for p in range(2, 17)
        ]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        out.append(
            f'<polyline points="{line}" fill="none" stroke="{COLOURS[scheme]}" stroke-width="2.6"/>'
        )
        out += [
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.6" fill="{COLOURS[scheme]}"/>'
            for a, b in points
        ]
        name = {
            "zigzag": "zigzag, tokenring, gather: ideal",
            "lightseq": "lightseq: ideal at odd P",
        }.get(scheme, scheme)
        out.append(
            text(
                190,
                top + 104 + 24 * i,
                name,
                15,
                f'fill="{COLOURS[scheme]}" font-weight="600"',
            )
        )
    out.append(
        text(564, top - 22, f"Measured on {RANKS} ranks, kernels that sleep", 17, bold)
    )
    unit = 340 / (
        3.9 if not found else max(3.9, *(f["tiles"] for f in found["slept"].values()))
    )
    for i, (name, f) in enumerate(found["slept"].items()):
        at = top + 14 + i * 58
        out.append(
            text(
                564,
                at,
                f"{name}: {f['tiles']:.2f} tiles, table says {f['path']:g}",
                14,
                f'fill="{INK}"',
            )
        )
        out.append(
            f'<rect x="564" y="{at + 8}" width="{f["tiles"] * unit:.1f}" height="20" fill="{COLOURS[name]}"/>'
        )
        out.append(
            f'<path d="M{564 + f["path"] * unit:.1f} {at + 4}v28" stroke="{INK}" stroke-width="2.4"/>'
        )
    out.append(
        text(1044, top - 22, "Memory of a step, MiB, by tokens per rank", 17, bold)
    )
    local, rows = found["memory"]["local"], found["memory"]["rsa"]
    curves = {
        name: v for name, v in found["memory"].items() if name not in ("local", "rsa")
    }
    most = max(max(v) for v in curves.values()) * 1.05
    marks = ticks(most)[::2]
    a, b = (
        (lambda n: 1044 + 380 * n / local[-1]),
        (lambda m: top + tall * (1 - m / most)),
    )
    for mark in marks:
        out.append(f'<path d="M1044 {b(mark):.1f}h380" stroke="{LINE}"/>')
        out.append(
            text(1036, b(mark) + 5, f"{mark:g}", 13, f'text-anchor="end" {soft}')
        )
    for n in local:
        out.append(
            text(a(n), top + tall + 22, f"{n:,}", 13, f'text-anchor="middle" {soft}')
        )
    for i, (name, grown) in enumerate(curves.items()):
        points = " ".join(
            f"{a(n):.1f},{b(m):.1f}" for n, m in zip(local, grown, strict=True)
        )
        out.append(
            f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="2.6"/>'
        )
        out += [f'<circle cx="{a(n):.1f}" cy="{b(m):.1f}" r="4" fill="{COLOURS[name]}"/>'
                for n, m in zip(local, grown, strict=True)]  # fmt: skip
        out.append(
            text(
                1064,
                top + 22 + 22 * i,
                name,
                15,
                f'fill="{COLOURS[name]}" font-weight="600"',
            )
        )
    for i, (n, m) in enumerate(zip(local, rows, strict=False)):  # off the scale
        out.append(
            text(
                1064,
                top + 22 + 22 * (len(curves) + i),
                f"rsa: {m:,.0f} at {n:,}",
                15,
                soft,
            )
        )
    return "\n".join([*out, "</svg>"])


def told(found: dict[str, Any]) -> None:
    for kind, rows in found["steps"].items():
        print(
            f"\n{HEADS} heads, {kind}, {found['tokens']:,} tokens on {RANKS} ranks, forward and backward of attention"
        )
        print(
            f"  {'':20}{'ms':>8}{'of zigzag':>11}{'quartiles':>15}{'MiB sent':>10}{'most':>7}{'error':>10}"
        )
        for name, r in rows.items():
            low, high = r["quartiles"]
            print(f"  {name:20}{r['ms']:8.0f}{r['ratio']:10.2f}x{low:9.2f} - {high:.2f}{r['bytes_mean'] / 2**20:10.2f}"
                  f"{r['bytes_max'] / 2**20:7.2f}{r['error']:10.1e}")  # fmt: skip
    print(
        f"\nPyTorch's context_parallel around F.scaled_dot_product_attention here: {found['context_parallel']}"
    )
    print("\nKernels that sleep: tiles that a step took, and the table's critical path")
    for name, r in found["slept"].items():
        print(f"  {name:20}{r['tiles']:8.2f}{r['path']:8.2f}")
    local, *curves = found["memory"].items()
    print(
        "\nMemory of a step, MiB, at tokens per rank "
        + ", ".join(f"{n:,}" for n in local[1])
    )
    for name, grown in curves:
        per = [m / n * 1024 for m, n in zip(grown, local[1], strict=False)]
        print(
            f"  {name:20}"
            + "".join(f"{m:8.0f}" for m in grown)
            + "   KiB per token:"
            + "".join(f"{p:7.1f}" for p in per)
        )
    lengths = found["prompts"]["lengths"]
    print(
        "\nReading a prompt of "
        + ", ".join(f"{n:,}" for n in lengths)
        + " tokens: MiB on a rank, and seconds"
    )
    for name, row in found["prompts"]["ways"].items():
        print(
            f"  {name:20}"
            + "".join(f"{m:8.0f}" for m in row["MiB"])
            + "".join(f"{s:8.2f} s" for s in row["s"])
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument(
        "--quick", action="store_true", help="small and short, no picture: does it run?"
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args()
    options.local, options.tile, options.prompts = (
        [512, 1024, 2048, 4096],
        0.08,
        [4096, 8192, 16_384],
    )
    if options.quick:
        options.rounds, options.tokens, options.local, options.tile = (
            2,
            256,
            [32, 64],
            0.005,
        )
        options.prompts = [128]
    load, found = os.getloadavg()[0], dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        for part in ("time", "memory"):
            # what is freed goes back to the system, so that the next peak can be seen
            if part == "memory":
                os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ[
                    "MALLOC_TRIM_THRESHOLD_"
                ] = "65536"
            options.part = part
            mp.spawn(work, (folder, options), RANKS)
            found |= json.loads((Path(folder) / f"{part}.json").read_text())
    found |= {"tokens": options.tokens, "paths": {
        s: {p: [critical_path(tile_table_of(s, p)), p / 2] for p in (3, 4, 7, 8)} for s in SLEPT}}  # fmt: skip
    found["machine"] = {"date": f"{datetime.now():%Y-%m-%d %H:%M}", "torch": torch.__version__, "cores": os.cpu_count(),
                        "cpu": platform.processor() or platform.machine(), "load_before": load}  # fmt: skip
    told(found)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1))
    if not options.quick:
        photograph(drawn(found), PICTURE, options.chromium, "1500,1040")


if __name__ == "__main__":
    main()
