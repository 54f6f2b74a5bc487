"""Attention of answers that share prompts on a GPU: errors against float64, and times of forward and backward.

Three ways are compared, in one layer: ``shared``, one call for all segments; ``calls``, shared prompts by a call for
each run of equal segments and for each prompt, as on the CPU; ``repeated``, each prompt repeated for every answer.
``--device cpu`` checks this script with a few tokens in float64, where products stand in for the GPU's kernel.

    python bench/gpu_prompts.py [--device cuda|cpu] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from weft.models import gpu_attention, prompt_attention
from weft.models.attention import attention

T = torch.Tensor
#: Relative error that 16 bits may have against float64.
COARSE = 1e-2


class Case(NamedTuple):
    """Groups of answers, and the heads of a layer. ``spread``: by how much answers are shorter or longer than
    ``answer``.
    """

    groups: int
    answers: int
    prompt: int
    answer: int
    spread: int
    heads: int = 9
    kv_heads: int = 3
    width: int = 64


#: The heads are those of SmolLM2-135M.
LARGE = {"equal": Case(8, 8, 200, 256, 0), "mixed": Case(8, 8, 200, 256, 128)}
SMALL = {"equal": Case(2, 3, 5, 4, 0, 6, 3, 8), "mixed": Case(3, 3, 6, 5, 4, 4, 2, 8)}


class Row(NamedTuple):
    """Segments of a row with shared prompts, as :func:`weft.data.shared_prompts.share_prompts` makes them.

    ``edges``, ``parents``: the rows of ``cu_seqlens``; ``repeated``: for each token of the row with repeated prompts,
    which token of this row it is; ``documents``: where that row's documents begin.
    """

    edges: list[int]
    parents: list[int]
    repeated: T
    documents: list[int]


def row_of(case: Case) -> Row:
    """Return a row of prompts, each before its answers; the last segment is padding that nothing sees."""
    drawn = torch.Generator().manual_seed(7)
    lengths, parents = list[int](), list[int]()
    for _ in range(case.groups):
        parent = len(lengths)
        # an answer's segment begins with the prompt's last token
        lengths.append(case.prompt - 1)
        more = torch.randint(
            -case.spread, case.spread + 1, (case.answers,), generator=drawn
        )
        lengths += [case.answer + 1 + n for n in more.tolist()]
        parents += [-1] + [parent] * case.answers
    lengths.append(3)
    parents.append(-1)
    edges = [0, *accumulate(lengths)]
    pieces, documents = list[T](), [0]
    for (a, b), parent in zip(pairwise(edges), parents, strict=True):
        if parent < 0 and b < edges[-1]:
            continue
        own = torch.arange(a, b)
        if parent >= 0:
            own = torch.cat([torch.arange(edges[parent], edges[parent + 1]), own])
        pieces.append(own)
        documents.append(documents[-1] + len(own))
    return Row(edges, [*parents, -1], torch.cat(pieces), documents)


def scores(q: T, k: T) -> T:
    """Return the scores ``[heads, queries, keys]``; the last query sees all keys, each before it one less."""
    wide = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    given = torch.einsum("qhd,khd->hqk", q, wide) * q.shape[-1] ** -0.5
    ahead = torch.ones(given.shape[1:], dtype=torch.bool, device=q.device)
    return given.masked_fill(ahead.triu(len(k) - len(q) + 1), -torch.inf)


def product(q: T, k: T, v: T) -> tuple[T, T]:
    """Return the output and the log-sum-exps of one segment by products."""
    given = scores(q, k)
    wide = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    out = torch.einsum("hqk,khd->qhd", given.softmax(-1), wide)
    return out, given.logsumexp(-1).T


def product_gradients(grad: T, q: T, k: T, v: T, out: T, lse: T) -> tuple[T, ...]:
    """Return the gradients of :func:`product`."""
    group = q.shape[1] // k.shape[1]
    p = (scores(q, k) - lse.T[..., None]).exp()
    d_p = torch.einsum("qhd,khd->hqk", grad, v.repeat_interleave(group, dim=1))
    ds = p * (d_p - (grad * out).sum(-1).T[..., None]) * q.shape[-1] ** -0.5
    dq = torch.einsum("hqk,khd->qhd", ds, k.repeat_interleave(group, dim=1))
    dk, dv = torch.einsum("hqk,qhd->khd", ds, q), torch.einsum("hqk,qhd->khd", p, grad)
    return dq, *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))


def _documents(queries: Any, keys: Any) -> Iterator[tuple[slice, slice]]:
    bounds = (pairwise(x.bounds.tolist()) for x in (queries, keys))
    for (a, b), (c, d) in zip(*bounds, strict=True):
        yield slice(a, b), slice(c, d)


def varlen_products(q: T, k: T, v: T, queries: Any, keys: Any) -> tuple[T, T]:
    """Stand in for :func:`weft.models.gpu_attention.varlen_forward`."""
    results = [product(q[a], k[b], v[b]) for a, b in _documents(queries, keys)]
    out, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
    return out, lse


def varlen_product_gradients(
    grad: T, q: T, k: T, v: T, out: T, lse: T, queries: Any, keys: Any
) -> tuple[T, ...]:
    """Stand in for :func:`weft.models.gpu_attention.varlen_gradients`."""
    results = [
        product_gradients(grad[a], q[a], k[b], v[b], out[a], lse[a])
        for a, b in _documents(queries, keys)
    ]
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


STAND_INS = {
    "varlen_forward": varlen_products,
    "varlen_gradients": varlen_product_gradients,
}


@contextmanager
def way(name: str, device: str) -> Iterator[None]:
    """Compute attention in the way ``name`` inside this context."""
    with ExitStack() as patches:
        for module, patch in (
            (prompt_attention, {"in_one_call": lambda *_: name == "shared"}),
            (gpu_attention, STAND_INS if device == "cpu" else {}),
        ):
            for attribute, new in patch.items():
                patches.enter_context(mock.patch.object(module, attribute, new))
        yield


def layer(q: T, k: T, v: T, grad: T, cu_seqlens: T) -> tuple[T, ...]:
    """Return the output and the gradients of ``q``, ``k`` and ``v`` of a layer's attention."""
    out = attention(q[None], k[None], v[None], cu_seqlens)[0][0]
    return out, *torch.autograd.grad(out, (q, k, v), grad)


def right(row: Row, q: T, k: T, v: T, grad: T) -> tuple[T, ...]:
    """Return what :func:`layer` should, in float64, segment by segment."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    sizes = [b - a for a, b in pairwise(row.edges)]
    qs, ks, vs = (x.split(sizes) for x in leaves)
    outs = list[T]()
    for i, parent in enumerate(row.parents[:-1]):
        seen = [i] if parent < 0 else [parent, i]
        keys, values = (torch.cat([x[at] for at in seen]) for x in (ks, vs))
        outs.append(product(qs[i], keys, values)[0])
    out = torch.cat(outs)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.double())


def drawn(case: Case, tokens: int, device: str) -> list[T]:
    """Return queries, keys, values and the gradient of the output."""
    torch.manual_seed(11)
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    given = [torch.randn(tokens, h, case.width).to(device, dtype) for h in heads]
    return [x.requires_grad_() for x in given[:3]] + given[3:]


def errors(case: Case, device: str) -> dict[str, dict[str, float]]:
    """Return the relative errors of output and gradients against float64, of both ways to share prompts."""
    row = row_of(case)
    given = drawn(case, row.edges[-1], device)
    cu_seqlens = torch.tensor([row.edges, row.parents], dtype=torch.int32)
    expected = right(row, *given)
    differences = dict[str, dict[str, float]]()
    for name in ("shared", "calls"):
        with way(name, device):
            ours = [x.detach() for x in layer(*given, cu_seqlens)]
        differences[name] = {
            n: float((x.double() - y).norm() / y.norm())
            for n, x, y in zip(("out", "dq", "dk", "dv"), ours, expected, strict=True)
        }
    return differences


def launches(once: Callable[[], Any]) -> dict[str, float]:
    """Return how many kernels a pass runs on the GPU, how many copies, and the time of all of them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        once()
        torch.cuda.synchronize()
    events = [e for e in seen.events() if "CUDA" in str(e.device_type)]
    copies = sum(e.name.startswith(("Memcpy", "Memset")) for e in events)
    spent = sum(e.time_range.elapsed_us() for e in events) / 1e3
    return {"kernels": len(events) - copies, "copies": copies, "device_ms": spent}


def milliseconds(once: Callable[[], Any], device: str, passes: int) -> float:
    """Return the time of a pass when several follow each other."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    for _ in range(passes):
        once()
    wait()
    return (time.perf_counter() - began) * 1e3 / passes


def times(case: Case, device: str) -> dict[str, dict[str, float]]:
    """Return tokens, milliseconds of a layer's forward and backward, and launches, of each way."""
    row = row_of(case)
    shared = torch.tensor([row.edges, row.parents], dtype=torch.int32)
    repeated = torch.tensor(row.documents, dtype=torch.int32)
    ways = {"shared": shared, "calls": shared, "repeated": repeated}
    rounds, passes = (7, 10) if device == "cuda" else (1, 1)
    runs = {
        name: partial(layer, *drawn(case, int(cu.max()), device), cu)
        for name, cu in ways.items()
    }
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, once in runs.items():
            with way(name, device):
                took = milliseconds(once, device, passes)
            if number or rounds == 1:  # the first round warms up
                spent[name].append(took)
    table = dict[str, dict[str, float]]()
    for name, once in runs.items():
        table[name] = {
            "tokens": int(ways[name].max()),
            "ms": statistics.median(spent[name]),
            "least_ms": min(spent[name]),
            "most_ms": max(spent[name]),
        }
        if device == "cuda":
            with way(name, device):
                table[name] |= launches(once)
    return table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began, rows, ok = time.perf_counter(), list[dict[str, Any]](), True
    bound = COARSE if args.device == "cuda" else 1e-10
    for name, case in (LARGE if args.device == "cuda" else SMALL).items():
        row: dict[str, Any] = {"case": name, **case._asdict()}
        try:
            row["errors"] = errors(case, args.device)
            worst = max(max(each.values()) for each in row["errors"].values())
            row["ok"] = worst < bound
            row["ways"] = times(case, args.device)
        except Exception as error:
            traceback.print_exc()
            row |= {"ok": False, "failed": str(error)[:300]}
        ok = ok and row["ok"]
        rows.append(row)
        print(json.dumps(row), flush=True)
    about = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    seconds = time.perf_counter() - began
    print(f"{'ok' if ok else 'FAILED'} on {about}, {seconds:.1f} s", flush=True)
    if args.json:
        results = {
            "device": about,
            "torch": torch.__version__,
            "bound": bound,
            "seconds": round(seconds, 1),
            "rows": rows,
        }
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    raise SystemExit(not ok)


if __name__ == "__main__":
    main()
