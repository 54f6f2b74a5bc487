"""A base and its fine-tunes in one process: bytes in memory, time to switch, and tokens per second of mixed requests.

The models have random weights in the shape of a small model; each fine-tune changes two layers. Switching is compared
with loading the whole checkpoint as ``weft serve`` does, and with reading its tensors without making a model of them;
the ways take turns, and all files are in the system's cache. Mixed requests, one to each model, are written by one
engine with shared blocks, and by an engine for each model in turn.

    OMP_NUM_THREADS=1 python bench/many_models.py [--only PART] [--folder /tmp] [--json bench/results/many_models.json]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from weft.checkpoint.model import open_model
from weft.checkpoint.model_family import FamilyMember, ModelFamily
from weft.generate.engine import Engine
from weft.generate.sampling import GREEDY
from weft.layout.mesh import Mesh
from weft.memory.heap import give_heap_back
from weft.models.hugging_face import export
from weft.models.products import read_only
from weft.models.shared_weights import part_of
from weft.models.transformer import Transformer
from weft.recipe import ModelShape

SHAPE = {"vocab": 8192, "layers": 30, "embed": 576, "heads": 9, "kv_heads": 3, "ffn": 1536}  # fmt: skip
TINY = {"vocab": 64, "layers": 4, "embed": 32, "heads": 4, "kv_heads": 2, "ffn": 48}


def written_models(folder: Path, shape: ModelShape, count: int) -> list[Path]:
    """The base and ``count`` fine-tunes of it, each with two layers of its own."""
    drawn = torch.Generator().manual_seed(0)
    parameters = Transformer(shape, Mesh.single()).named_parameters()
    base = {
        name: torch.randn(p.shape, generator=drawn) * 0.02 + (p.dim() == 1)
        for name, p in parameters
    }
    paths = []
    for number in range(count + 1):
        own = [f"blocks.{(2 * number + i) % shape.layers}" for i in range(2)]
        weights = {
            name: w + 0.02 * torch.randn(w.shape, generator=drawn)
            if number and part_of(name) in own
            else w
            for name, w in base.items()
        }
        paths.append(folder / f"model-{number}")
        export(weights, shape, paths[-1], torch.bfloat16)
    return paths


def timed(action: Callable[[], object]) -> float:
    gc.collect()
    begun = time.perf_counter()
    kept = action()
    seconds = time.perf_counter() - begun
    del kept
    return seconds


def read_tensors(file: Path) -> list[torch.Tensor]:
    return [tensor.float() for tensor in load_file(file).values()]


def opened(path: Path) -> Transformer:
    model = open_model(path, "cpu", print).model
    read_only(model)
    return model


def memory(paths: list[Path]) -> dict[str, Any]:
    """Bytes of weights, and of the process, with the base alone and with all fine-tunes.

    The process's are counted twice: all that is resident (rss), and without the share of others in what it maps (pss).
    """
    gc.collect()
    at_first = resident()
    family = ModelFamily(opened_plain(paths[0]))
    gc.collect()
    base = resident()
    members = [family.member(path, None) for path in paths[1:]]
    models = [family.open(member) for member in members]
    gc.collect()
    every = resident()
    share = statistics.mean(member.own for member in members) / family.nbytes
    return {
        "fine-tunes": len(models),
        "base bytes": family.nbytes,
        "all bytes": family.shared.nbytes,
        "ratio": family.shared.nbytes / family.nbytes,
        "share that differs": share,
        "allowed ratio": 1 + len(models) * share,
        **{
            f"process ratio, {kind}": (every[kind] - first) / (base[kind] - first)
            for kind, first in at_first.items()
        },
    }


def resident() -> dict[str, int]:
    """Bytes of this process in memory, without what its heap keeps for later."""
    give_heap_back()
    about = psutil.Process().memory_full_info()
    return {"rss": about.rss, "pss": about.pss}


def opened_plain(path: Path) -> Transformer:
    return open_model(path, "cpu", print).model


def switching(paths: list[Path], rounds: int) -> dict[str, Any]:
    """Seconds until each of six models is ready, when another has been in memory."""
    family = ModelFamily(opened_plain(paths[0]))
    members: list[FamilyMember] = [family.member(path, None) for path in paths[1:7]]
    first = [timed(lambda m=member: family.open(m)) for member in members]
    times: dict[str, list[float]] = {"switch": [], "load": [], "tensors alone": []}
    for _ in range(rounds):
        for member in members:
            times["switch"].append(timed(lambda m=member: family.open(m)))
            times["load"].append(timed(lambda m=member: opened(m.where)))
            file = member.where / "model.safetensors"
            times["tensors alone"].append(timed(lambda f=file: read_tensors(f)))
    ratios = [b / a for a, b in zip(times["switch"], times["load"], strict=True)]
    medians = {f"{name} s": statistics.median(each) for name, each in times.items()}
    return {
        "models": len(members),
        "first time s": statistics.median(first),
        **medians,
        "load over switch": statistics.median(ratios),
        "least ratio": min(ratios),
    }


def mixed(paths: list[Path], tokens: int) -> dict[str, Any]:
    """Tokens per second of a request to each model, in one engine and in an engine for each in turn."""
    family = ModelFamily(opened_plain(paths[0]))
    models = {path.name: family.open(family.member(path, None)) for path in paths[1:]}
    together = Engine(family.base)
    for name, model in models.items():
        together.add_model(name, model)
    texts: dict[str, list[list[int]]] = {"together": [], "in turn": []}
    seconds: dict[str, list[float]] = {"together": [], "in turn": []}
    for _ in range(3):
        begun = time.perf_counter()
        asked = [together.submit([1, 2, 3], tokens, GREEDY, adapter=n) for n in models]
        together.run()
        seconds["together"].append(time.perf_counter() - begun)
        texts["together"] = [request.written for (request,) in asked]
        begun, texts["in turn"] = time.perf_counter(), []
        for model in models.values():
            alone = Engine(model)
            (request,) = alone.submit([1, 2, 3], tokens, GREEDY)
            alone.run()
            texts["in turn"].append(request.written)
        seconds["in turn"].append(time.perf_counter() - begun)
    assert texts["together"] == texts["in turn"]
    rates = {
        name: len(models) * tokens / statistics.median(each)
        for name, each in seconds.items()
    }
    return {
        "models": len(models),
        **{f"{name} tokens/s": rate for name, rate in rates.items()},
        "ratio": rates["together"] / rates["in turn"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--tiny", action="store_true", help="a model of no size")
    parser.add_argument("--only", choices=("memory", "switching", "mixed"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    shape = ModelShape(**(TINY if given.tiny else SHAPE))
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        paths = written_models(Path(folder), shape, 10)
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "memory": lambda: memory(paths),
            "switching": lambda: switching(paths, given.rounds),
            "mixed": lambda: mixed(paths, given.tokens),
        }
        known = given.json and given.json.exists()
        found: dict[str, Any] = json.loads(given.json.read_text()) if known else {}
        for name, measure in parts.items():
            if given.only in (None, name):
                found[name] = measure()
                print(json.dumps({name: found[name]}, indent=1), flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
