"""Decoding on a GPU beside transformers' ``generate``: graphs on and off, paged and gathered attention, one process.

Nothing is read: weights of the shapes of SmolLM2-135M and of Llama 3.2 1B are drawn from a seed, and transformers gets
the same ones. First what the paged kernel computes is compared with float64, and the tokens of all sides in float32
with each other. Then the sides take turns. A part that fails prints its traceback, and the next part goes on. A part
for which too little time is left is skipped and named.

    python bench/generate_gpu.py [--json generate_gpu.json] [--seconds 120]
    python bench/generate_gpu.py --models Llama-3.2-1B --speeds --static   # these alone, and a compiled peer
    python bench/generate_gpu.py --device cpu --tiny
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from weft.generate.decode_step import repeat_pass
from weft.generate.engine import Engine
from weft.generate.reader import PagedReader
from weft.generate.sampling import GREEDY
from weft.layout.mesh import Mesh
from weft.models.attention_backend import GATHERED, PAGED, DecodeRows
from weft.models.products import read_only
from weft.models.spans import Span
from weft.models.transformer import Transformer
from weft.models.triton_use import runs_triton
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train

T = torch.Tensor

SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "vocab": 49152, "layers": 30, "embed": 576, "heads": 9, "kv_heads": 3, "ffn": 1536, "tied": True,
        "rope_theta": 1e5,
    },
    "Llama-3.2-1B": {
        "vocab": 128256, "layers": 16, "embed": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "tied": True,
        "rope_theta": 5e5,
    },
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab": 96, "layers": 2, "embed": 96, "heads": 6, "kv_heads": 2, "head_dim": 16, "ffn": 96, "tied": True,
        "rope_theta": 1e4,
    }
}  # fmt: skip

#: Sides of Weft: whether decode steps are recorded, and the attention.
SIDES = {
    "graphs": (True, ""),
    "no graphs": (False, ""),
    "graphs, gathered": (True, "gathered"),
    "no graphs, gathered": (False, "gathered"),
}


class Report:
    """The figures, which are written after every part, and the time that is left."""

    def __init__(self, path: Path | None, seconds: float) -> None:
        self.path, self.seconds, self.begun = path, seconds, time.monotonic()
        self.figures: dict[str, Any] = {"failed": [], "skipped": []}

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.begun)

    def say(self, line: str) -> None:
        print(f"[{time.monotonic() - self.begun:6.1f} s] {line}", flush=True)

    def save(self) -> None:
        if self.path is not None:
            self.path.write_text(json.dumps(self.figures, indent=1) + "\n")

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.say(name)
        try:
            yield
        except Exception:
            self.figures["failed"].append(name)
            self.say(f"FAILED {name}\n{traceback.format_exc()}")
        self.save()

    def has_time(self, name: str, seconds: float) -> bool:
        if self.left >= seconds:
            return True
        self.figures["skipped"].append(name)
        self.say(f"skipped, no time: {name}")
        return False


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def built(shape: dict[str, Any], device: str, dtype: str) -> Transformer:
    """A model with drawn weights, the same ones at every call."""
    drawn = torch.Generator(device).manual_seed(0)

    def values(name: str, logical: Any, box: Any) -> T:
        if name.endswith("scale"):
            return torch.ones([b - a for a, b in box], device=device)
        size = [b - a for a, b in box]
        # blocks say more than the last token does, so that texts do not repeat it
        std = 0.02 if name.startswith("embedding") else 2 * size[-1] ** -0.5
        return torch.randn(size, device=device, generator=drawn) * std

    model = parallelize(
        ModelShape(**shape), Mesh.single(device), Train(), values, summed=False
    )[0]
    return model.to(getattr(torch, dtype))


def theirs(model: Transformer, device: str) -> Any:
    """The same model in transformers. Call it before the weights are joined."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = model.shape
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.embed, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        intermediate_size=shape.ffn, rms_norm_eps=shape.norm_eps, rope_theta=shape.rope_theta,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tied, max_position_embeddings=8192, attn_implementation="sdpa",
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    names = {
        "attention.wq": "self_attn.q_proj.weight", "attention.wk": "self_attn.k_proj.weight",
        "attention.wv": "self_attn.v_proj.weight", "attention.wo": "self_attn.o_proj.weight",
        "ffn.gate": "mlp.gate_proj.weight", "ffn.up": "mlp.up_proj.weight", "ffn.down": "mlp.down_proj.weight",
        "attention_norm.scale": "input_layernorm.weight", "ffn_norm.scale": "post_attention_layernorm.weight",
    }  # fmt: skip
    weights: dict[str, T] = {}
    for name, value in model.named_parameters():
        if name.startswith("blocks."):
            _, layer, rest = name.split(".", 2)
            weights[f"model.layers.{layer}.{names[rest]}"] = value.detach()
        elif name == "embedding.table":
            weights["model.embed_tokens.weight"] = value.detach()
        else:
            weights["model.norm.weight"] = value.detach()
    other = LlamaForCausalLM(config).to(dtype=value.dtype, device=device).eval()
    missing, unexpected = other.load_state_dict(weights, strict=False)
    assert not unexpected and {*missing} <= {"lm_head.weight"}, (missing, unexpected)
    return other


def engine_of(
    model: Transformer, side: str, device: str, tokens: int, limit: int = 32
) -> Engine:
    """An engine of a side. On a CPU recorded steps are computed again instead of replayed."""
    graphs, attention = SIDES[side]
    if device == "cpu" and not attention and runs_triton(torch.device("cpu")):
        attention = "paged"
    engine = Engine(model, tokens, 8192, limit, attention=attention, graphs=graphs)
    if graphs and device == "cpu":
        assert isinstance(engine.reader, PagedReader)
        assert not engine.reader.record_decoding(repeat_pass)
    return engine


def prompts_of(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count, length), generator=drawn).tolist()


def relative(out: T, expected: T) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def kernel_errors(report: Report, device: str) -> None:
    """The paged kernel against attention in float64, on prompts, chunks, drafts and single tokens."""
    rows = []
    cases = [
        (torch.bfloat16, 64, 3, 0), (torch.bfloat16, 128, 4, 0), (torch.bfloat16, 80, 1, 200),
        (torch.float16, 64, 4, 0), (torch.float32, 64, 3, 0), (torch.float32, 128, 4, 100),
    ]  # fmt: skip
    lengths = ((1, 700), (1, 0), (1, 63), (5, 130), (200, 0), (100, 333))
    if device == "cpu":
        cases, lengths = [(torch.float32, 64, 3, 0)], ((1, 70), (5, 13), (20, 3))
    drawn = torch.Generator(device).manual_seed(1)
    for dtype, width, group, window in cases:
        spans, row, free = list[Span](), 0, torch.randperm(400).tolist()
        for count, past in lengths:
            table = [free.pop() for _ in range(-(-(count + past) // 16))]
            spans.append(Span(row, row + count, past, table))
            row += count
        store = torch.randn(2, 400, 16, 2, width, device=device, generator=drawn)
        q = torch.randn(row, 2 * group, width, device=device, generator=drawn)
        store, q = store.to(dtype), q.to(dtype)
        out = torch.full_like(q, torch.nan)
        for piece in PAGED.group(spans, store, window, q):
            PAGED.attend(q, store, piece, window, out)
        exact = q.cpu().double(), store.cpu().double()
        expected = torch.empty_like(exact[0])
        for piece in GATHERED.group(spans, exact[1], window, exact[0]):
            GATHERED.attend(*exact, piece, window, expected)
        error = relative(out.cpu(), expected)
        near = 3e-6 if dtype == torch.float32 else 1e-2
        name = f"{dtype} width {width} group {group} window {window}"
        rows.append({"case": name, "error": error, "right": error < near})
        report.say(f"  {name}: relative error {error:.1e}{'' if error < near else ' WRONG'}")  # fmt: skip
    report.figures["kernel against float64"] = rows


def kernel_speed(report: Report, device: str) -> None:
    """Decode attention of one layer: time and bytes of keys and values per second, paged and gathered."""
    cases = [("32 texts of 640", 32, 640, 8, 4, 128), ("32 texts of 4096", 32, 4096, 8, 4, 128),
             ("1 text of 32768", 1, 32768, 8, 4, 128), ("32 texts of 640, width 64", 32, 640, 3, 3, 64)]  # fmt: skip
    if device == "cpu":
        cases = [("2 texts of 64", 2, 64, 2, 3, 16)]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows = []
    for name, texts, length, kv_heads, group, width in cases:
        blocks = -(-length // 16)
        order = torch.randperm(texts * blocks)
        tables = order.int().view(texts, blocks).to(device)
        places = torch.full((texts,), length - 1, dtype=torch.int32, device=device)
        store = torch.randn(2, texts * blocks, 16, kv_heads, width, device=device).to(dtype)  # fmt: skip
        q = torch.randn(texts, kv_heads * group, width, device=device).to(dtype)
        out = torch.empty_like(q)
        figures: dict[str, Any] = {"case": name}
        for backend in (PAGED, GATHERED):
            piece = backend.group_rows(DecodeRows(tables, places), store, 0, q)
            call = lambda b=backend, p=piece, s=store, x=q, o=out: b.attend(x, s, p, 0, o)  # noqa: E731  # fmt: skip
            seconds = seconds_of(call, device)
            figures[backend.name] = {
                "us": seconds * 1e6,
                "GB/s": store.nbytes / seconds / 1e9,
            }
            report.say(
                f"  {name} {backend.name}: {seconds * 1e6:.0f} us, "
                f"{store.nbytes / seconds / 1e9:.0f} GB/s"
            )
        rows.append(figures)
    report.figures["decode attention"] = rows


def seconds_of(call: Callable[[], object], device: str) -> float:
    """The median of repeated calls, on a GPU within a graph, so that launches do not count."""
    call()
    if device == "cpu":
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun
    torch.cuda.synchronize()
    graph, count = torch.cuda.CUDAGraph(), 10
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    times = []
    for _ in range(7):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3 / count)
    return statistics.median(times)


def same_tokens(report: Report, shape: dict[str, Any], device: str) -> None:
    """Texts of several lengths at once in float32: the tokens of every side, and of transformers."""
    model = built(shape, device, "float32")
    other = theirs(model, device)
    read_only(model)
    lengths = (1, 7, 64, 300, 33) if device == "cuda" else (1, 7, 40)
    prompts = [prompts_of(1, length, shape["vocab"], length)[0] for length in lengths]
    count = 32 if device == "cuda" else 8
    written: dict[str, list[list[int]]] = {}
    for side in SIDES:
        engine = engine_of(model, side, device, 4096, 8)
        texts = [engine.submit(prompt, count, GREEDY)[0] for prompt in prompts]
        engine.run()
        written[side] = [text.written for text in texts]
    with torch.inference_mode():
        written["transformers"] = [
            other.generate(
                torch.tensor([prompt], device=device), max_new_tokens=count, do_sample=False,
                attention_mask=torch.ones(1, len(prompt), device=device, dtype=torch.long),
            )[0, len(prompt) :].tolist()
            for prompt in prompts
        ]  # fmt: skip
    first = written["no graphs, gathered"]
    same = {
        side: sum(a == b for a, b in zip(ids, first, strict=True))
        for side, ids in written.items()
    }
    distinct = len({token for ids in first for token in ids})
    report.figures["same tokens"] = {"texts": len(prompts), "tokens": count, "distinct": distinct, **same}  # fmt: skip
    report.say(
        f"  of {len(prompts)} texts the same as gathered without graphs: {same}; "
        f"{distinct} distinct tokens"
    )


def host_waits(report: Report, shape: dict[str, Any], device: str) -> None:
    """Whether the host waits for the GPU within a forward pass: PyTorch raises where it would."""
    model = built(shape, device, "bfloat16" if device == "cuda" else "float32")
    read_only(model)
    found: dict[str, str] = {}
    for side in SIDES:
        engine = engine_of(model, side, device, 8192)
        start = engine.reader.start

        def strict(*given: Any, side: str = side, start: Any = start) -> Any:
            try:
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("error")
                return start(*given)
            except RuntimeError as error:
                found[side] = str(error).splitlines()[0]
                torch.cuda.set_sync_debug_mode("default")
                return start(*given)
            finally:
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")

        for strictly in (False, True):  # the first time graphs are recorded
            if strictly:
                engine.reader.start = strict  # type: ignore[method-assign]
            for prompt in prompts_of(3, 40, shape["vocab"], int(strictly)):
                engine.submit(prompt, 8, GREEDY)
            engine.run()
    report.figures["host waits in a pass"] = found
    report.say(f"  {found or 'none'}")


def run_side(
    engine: Engine, batch: int, length: int, count: int, seed: int, device: str
) -> tuple[float, float]:
    """Prompt tokens per second until all texts have a token, and tokens per second after that."""
    vocab = engine.model.shape.vocab
    prompts = prompts_of(batch, length, vocab, seed)
    wait(device)
    begun = time.perf_counter()
    texts = [engine.submit(prompt, count, GREEDY)[0] for prompt in prompts]
    while not all(text.written for text in texts):
        engine.step()
    middle = time.perf_counter()
    early = sum(len(text.written) for text in texts)
    engine.run()
    ended = time.perf_counter()
    written = sum(len(text.written) for text in texts)
    assert written == batch * count
    return batch * length / (middle - begun), (written - early) / (ended - middle)


def run_theirs(
    model: Any, batch: int, length: int, count: int, seed: int, device: str, **options: Any
) -> tuple[float, float]:  # fmt: skip
    """The same of transformers: the time of the first token is that of a call for one."""
    ids = torch.tensor(
        prompts_of(batch, length, model.config.vocab_size, seed), device=device
    )
    mask, seconds = torch.ones_like(ids), []
    with torch.inference_mode():
        for new in (1, count):
            wait(device)
            begun = time.perf_counter()
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False,
                **options,
            )  # fmt: skip
            wait(device)
            seconds.append(time.perf_counter() - begun)
            assert out.shape[1] == length + new
    first, whole = seconds
    return batch * length / first, batch * (count - 1) / (whole - first)


def speeds(
    report: Report,
    name: str,
    shape: dict[str, Any],
    device: str,
    given: argparse.Namespace,
) -> None:
    """All sides in turn, at one text and at many."""
    model = built(shape, device, "bfloat16" if device == "cuda" else "float32")
    other = None
    with report.part(f"{name} in transformers"):
        other = theirs(model, device)
    read_only(model)
    weights = sum(p.nbytes for p in model.parameters())
    tokens = given.batches[-1] * (given.prompt + given.new + 32)
    engines = {side: engine_of(model, side, device, tokens, given.batches[-1]) for side in given.sides}  # fmt: skip
    rows: dict[str, dict[str, dict[str, list[float]]]] = {}
    report.figures.setdefault("speeds", {})[name] = rows
    report.figures["speeds"].setdefault("kept parameters' bytes", {})[name] = weights
    runs: dict[str, Callable[[int, int, int], tuple[float, float]]] = {
        side: lambda batch, count, seed, e=engine: run_side(e, batch, given.prompt, count, seed, device)
        for side, engine in engines.items()
    }  # fmt: skip
    if other is not None:
        runs["transformers"] = lambda batch, count, seed: run_theirs(
            other, batch, given.prompt, count, seed, device
        )
    for side in [*runs]:
        with report.part(f"{name} {side}: warm up"):
            for batch in given.batches:
                runs[side](batch, 4, 1000 + batch)
            continue
        if report.figures["failed"] and report.figures["failed"][-1].startswith(f"{name} {side}"):  # fmt: skip
            del runs[side]
    slowest = 0.0
    for turn in range(given.turns):
        for batch in given.batches:
            for side, run in runs.items():
                label = f"{name} {side} at {batch}, turn {turn + 1}"
                if not report.has_time(label, 2 + 1.5 * slowest):
                    continue
                begun = time.monotonic()
                with report.part(label):
                    prefill, decode = run(batch, given.new, 100 * turn + batch)
                    row = rows.setdefault(str(batch), {}).setdefault(
                        side, {"prefill tokens/s": [], "decode tokens/s": []}
                    )
                    row["prefill tokens/s"].append(round(prefill, 1))
                    row["decode tokens/s"].append(round(decode, 1))
                    report.say(f"  prefill {prefill:,.0f}, decode {decode:,.0f} tokens/s")  # fmt: skip
                slowest = max(slowest, time.monotonic() - begun)
    if device == "cuda":
        report.figures["speeds"].setdefault("peak GB", {})[name] = torch.cuda.max_memory_allocated() / 1e9  # fmt: skip
    for batch in given.batches if given.static and other is not None else ():
        static = f"{name} transformers, static cache, compiled, at {batch}"
        if not report.has_time(static, 60):
            continue
        with report.part(static):
            options = {"cache_implementation": "static"}
            # the same lengths, as a static cache of another length is compiled again
            run_theirs(other, batch, given.prompt, given.new, 1, device, **options)
            prefill, decode = run_theirs(other, batch, given.prompt, given.new, 2, device, **options)  # fmt: skip
            rows[str(batch)]["transformers, static"] = {
                "prefill tokens/s": [round(prefill, 1)],
                "decode tokens/s": [round(decode, 1)],
            }
            report.say(f"  decode {decode:,.0f} tokens/s")


def step_shares(report: Report, shape: dict[str, Any], device: str) -> None:
    """Where the time of a recorded decode step goes at 32 texts: replay alone, and the host's work beside it."""
    model = built(shape, device, "bfloat16" if device == "cuda" else "float32")
    read_only(model)
    batch = 32 if device == "cuda" else 2
    engine = engine_of(model, "graphs", device, 32 * 700, batch)
    for prompt in prompts_of(batch, 64, shape["vocab"], 5):
        engine.submit(prompt, 40, GREEDY)
    for _ in range(10):
        engine.step()
    wait(device)
    begun = time.perf_counter()
    for _ in range(20):
        engine.step()
    wait(device)
    whole = (time.perf_counter() - begun) / 20
    assert isinstance(engine.reader, PagedReader) and engine.reader.decoding
    step = next(iter(engine.reader.decoding.steps.values()))
    with torch.inference_mode():
        begun = time.perf_counter()
        for _ in range(20):
            step.replay()
        wait(device)
    replay = (time.perf_counter() - begun) / 20
    report.figures["recorded step"] = {"texts": batch, "step ms": whole * 1e3, "replay ms": replay * 1e3}  # fmt: skip
    report.say(f"  a step {whole * 1e3:.2f} ms, its replay {replay * 1e3:.2f} ms")
    if device == "cuda" and report.left > 8:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as trace, torch.inference_mode():  # fmt: skip
            step.replay()
            wait(device)
        kernels = sorted(trace.key_averages(), key=lambda e: -e.device_time_total)
        top = {k.key[:80]: [k.count, round(k.device_time_total)] for k in kernels[:14]}
        report.figures["kernels of a replay"] = top
        for key, (count, us) in top.items():
            report.say(f"  {count:5} x {us:7} us in all  {key}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=115)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--static", action="store_true", help="also a compiled peer")
    parser.add_argument("--models", nargs="+", choices=[*SHAPES])
    parser.add_argument("--sides", nargs="+", choices=[*SIDES], default=[*SIDES])
    parser.add_argument("--speeds", action="store_true", help="measure these alone")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    out = os.environ.get("OUT")
    path = given.json or (Path(out) / "generate_gpu.json" if out else None)
    given.batches, given.prompt, given.new = ([1, 3], 20, 6) if given.tiny else ([1, 32], 512, 128)  # fmt: skip
    shapes = TINY if given.tiny else SHAPES
    if given.models:
        shapes = {name: SHAPES[name] for name in given.models}
    device, report = given.device, Report(path, given.seconds)
    torch.backends.cuda.matmul.allow_tf32 = False
    name, small = next(iter(shapes.items()))
    with report.part("the machine"):
        about: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0]}  # fmt: skip
        if device == "cuda":
            about |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}  # fmt: skip
        try:
            import triton

            about["triton"] = triton.__version__
        except ImportError:
            report.say("no triton: attention is gathered")
        report.figures["about"] = about
        report.say(str(about))
    if runs_triton(torch.device(device)) and not given.speeds:
        with report.part("the kernel against float64"):
            kernel_errors(report, device)
    if not given.speeds:
        with report.part("the same tokens in float32"):
            same_tokens(report, small, device)
    for each, shape in shapes.items():
        gc.collect()
        with report.part(f"speeds of {each}"):
            speeds(report, each, shape, device, given)
        if each == name and not given.speeds:
            with report.part("a recorded step"):
                step_shares(report, shape, device)
            with report.part("whether the host waits within a pass"):
                host_waits(report, shape, device)
            if runs_triton(torch.device(device)):
                with report.part("decode attention of one layer"):
                    kernel_speed(report, device)
    report.say(f"failed: {report.figures['failed'] or 'nothing'}")
    report.say(f"skipped: {report.figures['skipped'] or 'nothing'}")
    print(json.dumps(report.figures), flush=True)
    report.save()


if __name__ == "__main__":
    main()
