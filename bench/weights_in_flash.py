"""Weights that rest on a disk: active neurons alone, against dense layers that are read for each token.

A model whose feed-forwards are nearly all of its weights reads random tokens, one at a time. Weights are drawn, and so is
the sparsity: a direction that all inputs share closes most gates, by another number for each neuron, so that some are
active often and most seldom; embeddings differ in few dimensions. (Trained ReLU models are said to be about as sparse; texts of theirs use
more of the same neurons.) The ways take turns, and read past the page cache:

    dense           every layer is read for every token (--layers-in --window 1)
    half dense      half of the layers have room in memory (--layers-in --window LAYERS / 2 - 1)
    gates           gates in memory, active neurons are read, half of the feed-forwards' bytes in memory (--neurons 0.5)
    predictor       a predictor of rank 64 in place of the gates, half of the bytes in memory (--predictor)

Then the memory of a process is measured for each window over the layers, beside that of the resident model.

    OMP_NUM_THREADS=1 python bench/weights_in_flash.py [--quick] [--folder /tmp] [--json bench/results/weights_in_flash.json]
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.generate.one_text import OneText
from weft.generate.predictor_training import train_predictors
from weft.layout.dims import Box, Logical, slices
from weft.layout.mesh import Mesh
from weft.memory.heap import give_heap_back
from weft.memory.neuron_predictor import gate_hashes, write_predictor
from weft.memory.resting_layers import RestingLayers
from weft.memory.resting_neurons import RestingNeurons
from weft.models.init import initial_values
from weft.models.products import read_only
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train

T = torch.Tensor
SHAPE = {"vocab": 512, "layers": 8, "kv_heads": 2, "activation": "relu"}

#: Windows over the layers of which memory is measured.
WINDOWS = (1, 2, 4, 8)

#: By how many standard deviations of their inputs gates are closed: the mean, and its spread over neurons.
CLOSED, SPREAD = 2.0, 0.6

#: Dimensions in which embeddings differ, but for noise: inputs of trained models lie in few as well.
LATENT = 48


class DrawnWeights:
    """Weights of a model of ``shape`` in bfloat16, drawn once."""

    def __init__(self, shape: dict[str, Any]) -> None:
        self.shape, self.known = shape, dict[str, T]()
        generator = torch.Generator().manual_seed(0)
        direction = torch.randn(shape["embed"], generator=generator)
        self.shared = direction / direction.norm()

    def __call__(self, name: str, logical: Logical, box: Box) -> T:
        """Values of a parameter."""
        if not name.endswith(("gate", "up", "down", "embedding.table")):
            values = initial_values(name, logical, box, 0)
            return values.bfloat16() if values.dim() > 1 else values
        if name not in self.known:
            self.known[name] = self._drawn(name, logical.shape).bfloat16()
        return self.known[name][slices(box)]

    def _drawn(self, name: str, size: tuple[int, ...]) -> T:
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        values = torch.randn(size, generator=generator)
        if name.endswith("table"):
            latent = torch.randn(size[0], LATENT, generator=generator) / LATENT**0.5
            basis = torch.randn(LATENT, size[1], generator=generator)
            return latent @ basis + 0.2 * values + self.shared * size[1] ** 0.5
        values *= 0.02
        if name.endswith("gate"):
            closed = CLOSED + SPREAD * torch.randn(size[0], 1, generator=generator)
            values -= 0.02 * closed * self.shared
        return values * (0.1 if name.endswith("down") else 1)


def built(drawn: DrawnWeights, *resting: Any) -> Transformer:
    def lift(model: Transformer) -> None:
        for each in resting:
            each.lift(model, drawn)

    shape = ModelShape.model_validate(drawn.shape)
    model = parallelize(shape, Mesh.single(), Train(), drawn, lift=lift)[0]
    read_only(model)
    return model


def timed(reader: OneText, ids: list[int]) -> tuple[float, T]:
    """Seconds of a token (the median), and all logits."""
    seconds, logits = list[float](), list[T]()
    for i in ids:
        began = time.perf_counter()
        logits.append(reader.read([i]))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), torch.stack(logits)


def trained_predictor(
    drawn: DrawnWeights, file: Path, tokens: int
) -> list[dict[str, float]]:
    """Train a predictor for the drawn model, and return how it does on each layer."""
    model = parallelize(
        ModelShape.model_validate(drawn.shape), Mesh.single(), Train(), drawn
    )[0]
    random_ids = random.Random(5)
    ids = [random_ids.randrange(drawn.shape["vocab"]) for _ in range(tokens)]
    trained = train_predictors(
        model, ids, 64, 0.95, 2, lambda line: print(line, file=sys.stderr)
    )
    write_predictor(file, trained.layers, gate_hashes(model, drawn))
    return [score._asdict() for score in trained.scores]


@torch.inference_mode()
def compared(
    drawn: DrawnWeights,
    folder: Path,
    rounds: int,
    tokens: int,
    scores: list[dict[str, float]],
) -> dict[str, Any]:
    layers = drawn.shape["layers"]
    ways: dict[str, Any] = {
        "dense": RestingLayers(folder, 1),
        "half dense": RestingLayers(folder, layers // 2 - 1),
        "gates": RestingNeurons(folder, 0.5),
        "predictor": RestingNeurons(folder, 0.5, folder / "predictor"),
    }
    readers = {name: OneText(built(drawn, way)) for name, way in ways.items()}
    drawn.known.clear()
    drawn_ids = random.Random(0)

    def some() -> list[int]:
        return [drawn_ids.randrange(drawn.shape["vocab"]) for _ in range(tokens)]

    first = some()
    for reader in readers.values():  # memory fills
        timed(reader, first)
    before = {name: way.file.bytes["read"] if hasattr(way, "file") else way.staged.kept.file.bytes["read"]
              for name, way in ways.items()}  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in ways}
    differences: dict[str, list[float]] = {name: [] for name in ways}
    alike: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        ids = some()
        logits: dict[str, T] = {}
        for name, reader in readers.items():
            seconds, logits[name] = timed(reader, ids)
            times[name].append(seconds)
        for name, those in logits.items():
            dense = logits["dense"]
            differences[name].append(float((those - dense).norm() / dense.norm()))
            alike[name].append(
                float((those.argmax(-1) == dense.argmax(-1)).float().mean())
            )
    result: dict[str, Any] = {}
    for name, way in ways.items():
        read = (
            way.file.bytes["read"]
            if hasattr(way, "file")
            else way.staged.kept.file.bytes["read"]
        )
        result[name] = {
            "seconds": statistics.median(times[name]),
            "MB read for a token": (read - before[name]) / rounds / tokens / 1e6,
            "difference of logits": statistics.mean(differences[name]),
            "same likeliest token": statistics.mean(alike[name]),
        }
    for name in ("gates", "predictor"):
        for other in ("dense", "half dense"):
            ratios = [a / b for a, b in zip(times[other], times[name], strict=True)]
            result[f"{name} over {other}"] = statistics.median(ratios)
    result["predictor's scores"] = {
        key: statistics.mean(score[key] for score in scores)
        for key in ("active", "recall", "predicted")
    }
    return result


@torch.inference_mode()
def resident_memory(drawn: DrawnWeights, folder: Path, window: int) -> dict[str, Any]:
    """In a process of its own: its memory while tokens are read with a window over the layers."""
    process = psutil.Process()
    empty = process.memory_info().rss
    layers = RestingLayers(folder, window)
    reader = OneText(built(drawn, layers))
    drawn.known.clear()
    give_heap_back()
    most, began = 0, time.perf_counter()
    for i in range(4):
        reader.read([i])
        most = max(most, process.memory_info().rss)
    return {"MB": (most - empty) / 1e6, "layers' MB": layers.resident_bytes / 1e6,
            "seconds": (time.perf_counter() - began) / 4}  # fmt: skip


def memories(folder: Path, embed: int) -> dict[str, Any]:
    """Memory of processes with windows over the layers; the last has all of them."""
    found = {}
    for window in WINDOWS:
        words = [
            sys.executable,
            __file__,
            "--window",
            str(window),
            "--folder",
            str(folder),
            "--embed",
            str(embed),
        ]
        done = subprocess.run(
            words, check=True, capture_output=True, text=True, env=os.environ
        )
        found[str(window)] = json.loads(done.stdout)
    # in float32, in which the resident model computes
    one = (found["2"]["layers' MB"] - found["1"]["layers' MB"]) * 2
    for window in WINDOWS[:-1]:
        about = found[str(window)]
        about["layers' MB over those of window and one"] = about["layers' MB"] / (
            (window + 1) * one
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a small model: seconds, and no disk is the limit",
    )
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument(
        "--embed",
        type=int,
        default=2048,
        help="width; feed-forwards are four times as wide",
    )
    parser.add_argument("--window", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    embed = 256 if given.quick else given.embed
    shape = SHAPE | {"embed": embed, "heads": embed // 64, "ffn": 4 * embed}
    drawn = DrawnWeights(shape)
    if given.window:
        print(json.dumps(resident_memory(drawn, given.folder, given.window)))
        return
    with tempfile.TemporaryDirectory(prefix="weft-flash-", dir=given.folder) as place:
        folder = Path(place)
        rounds = 2 if given.quick else 4
        scores = trained_predictor(drawn, folder / "predictor", 2048)
        result = compared(drawn, folder, rounds, 6, scores)
        result["memory"] = memories(folder, embed)
    result["shape"] = shape
    print(json.dumps(result, indent=1))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
