"""Two diffusion experts of half the flops each, trained apart on clusters of digits, beside one model of all flops.

    python bench/diffusion_experts.py [--steps 700] [--count 1000] [--quick] [--random] [--out FOLDER]
        [--json bench/results/diffusion_experts.json]

``weft train digits`` makes the one, ``weft experts digits --clusters 2`` the two, each with as many steps of half as
many images. ``half the steps``: experts of half as many steps, of as many images each. Of all samples the share is
counted that a logistic regression on the real digits takes for their class. With ``--out``, runs that are there are
not made again. ``--random``:
also experts of two halves of the images that were drawn at random. Identity: the same join with exact experts and an
exact router (a finite data set has both in closed form) beside the exact prediction of the whole.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step import machine

from weft.data.pictures import DIGITS, read_pictures
from weft.diffusion.denoiser import open_denoiser
from weft.diffusion.noise_process import NoiseProcess
from weft.diffusion.picture_experts import open_picture_experts
from weft.diffusion.picture_scores import PictureJudge
from weft.diffusion.sample import SampleRequest, sample
from weft.train.expert_join import BayesRouter, joined_outputs

RESULTS = Path(__file__).parent / "results" / "diffusion_experts.json"
T = torch.Tensor


def exact_prediction(
    images: T, noised: T, time_: T, process: NoiseProcess
) -> tuple[T, T]:
    """The best prediction of ``noised`` ``[n, values]`` if ``images`` ``[m, values]`` are all there are, and the
    logarithm of how dense their noised images are there, but for what all clusters share."""
    signal, noise = (x[:, None] for x in process.amounts(time_))
    apart = noised[:, None] - signal[..., None] * images  # [n, m, values]
    logs = -apart.square().sum(-1) / (2 * noise**2)
    means = logs.softmax(-1) @ images
    of_noise = (noised - signal * means) / noise
    return process.target_of(means, of_noise, time_), logs.logsumexp(-1)


def identity(clusters: np.ndarray) -> dict[str, float]:
    """The largest difference of the join of exact experts from the exact whole, by target."""
    images = torch.from_numpy(read_pictures(DIGITS).pixels).double().flatten(1)[:600]
    labels = torch.from_numpy(clusters)[:600]
    random = torch.Generator().manual_seed(0)
    errors = {}
    for target in ("flow", "epsilon", "v", "x"):
        process = NoiseProcess(target)
        time_ = torch.rand(80, generator=random, dtype=torch.float64) * 0.9 + 0.05
        noise = torch.randn(80, 64, generator=random, dtype=torch.float64)
        noised = process.noised(images[:80], noise, time_)
        parts = [images[labels == number] for number in range(int(labels.max()) + 1)]
        exact = [exact_prediction(part, noised, time_, process) for part in parts]
        predicted, logs = zip(*exact, strict=True)
        router = BayesRouter((1.0,) * len(parts))
        weights = router.log_weights(torch.stack(logs, -1)).exp()
        whole, _ = exact_prediction(images, noised, time_, process)
        errors[target] = float((joined_outputs(predicted, weights) - whole).abs().max())
    return errors


def weft(*words: str) -> float:
    """Run a command of Weft's; the seconds that it took."""
    begun = time.perf_counter()
    ended = subprocess.run([sys.executable, "-m", "weft", *words], stdout=sys.stderr)
    if ended.returncode:
        raise SystemExit(ended.returncode)
    return time.perf_counter() - begun


def scored(denoiser: Any, count: int, batch: int = 100) -> dict[str, float]:
    """Accuracy and Frechet distance of ``count`` samples, all classes in turn, 20 steps of Euler's method."""
    pictures = read_pictures(DIGITS)
    conditions = torch.arange(count) % len(pictures.classes)
    request = SampleRequest(conditions, 20, batch=batch)
    images = sample(
        denoiser, denoiser.process, denoiser.shape, request, len(pictures.classes)
    )
    scores = PictureJudge(pictures).score(images.float().numpy(), conditions.numpy())
    return {"accuracy": scores.accuracy, "frechet": scores.frechet}


def settings(steps: int, batch: int = 128) -> list[str]:
    """What runs of so many ``steps`` of ``batch`` images set."""
    values = (
        f"train.steps={steps}",
        f"train.batch={batch}",
        f"train.micro_batch={batch}",
        f"optimizer.warmup={max(1, steps // 7)}",
        "validation.every=0",
    )
    return [word for value in values for word in ("--set", value)]


def experts(
    folder: Path, name: str, count: int, given: list[str], *more: str
) -> dict[str, Any]:
    """Train two experts whose runs set ``given``, and score their samples by all and by the likelier one."""
    out = folder / name
    words = "experts", "digits", "--clusters", "2", *given, *more, "--out", str(out)
    result: dict[str, Any] = {}
    if not (out / "experts.json").exists():
        result["seconds"] = weft(*words)
    for top in (0, 1):
        joined = open_picture_experts(out, ema=True, top=top)
        assert joined is not None
        key = f"top {top}" if top else "all"
        result[key] = scored(joined, count) | {"computed": sum(joined.computed)}
    print(name, json.dumps(result), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument(
        "--quick", action="store_true", help="a few steps: whether it runs"
    )
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    steps, count = (8, 20) if given.quick else (given.steps, given.count)
    torch.set_num_threads(1)
    results: dict[str, Any] = {"machine": machine(), "steps": steps, "count": count}
    with tempfile.TemporaryDirectory() as name:
        folder = given.out or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        halves = settings(steps, 64)
        results["clusters"] = experts(folder, "clusters", count, halves)
        with np.load(folder / "clusters" / "clusters.npz") as values:
            results["identity"] = identity(values["labels"])
        if not (folder / "single" / "checkpoints").exists():
            weft("train", "digits", *settings(steps), "--out", str(folder / "single"))
        single = open_denoiser(folder / "single", ema=True)
        results["single"] = scored(single, count)
        print("single", json.dumps(results["single"]), flush=True)
        for key in ("all", "top 1"):
            gained = (
                results["clusters"][key]["accuracy"] - results["single"]["accuracy"]
            )
            results[f"points, {key}"] = round(100 * gained, 1)
        given.json.write_text(json.dumps(results, indent=1) + "\n")
        fewer = settings(steps // 2)
        results["half the steps"] = experts(folder, "half", count, fewer)
        given.json.write_text(json.dumps(results, indent=1) + "\n")
        if given.random:
            features = folder / "random.npy"
            drawn = np.random.default_rng(0).standard_normal((1797, 2))
            np.save(features, drawn.astype(np.float32))
            more = "--features", str(features)
            results["random"] = experts(folder, "random", count, halves, *more)
            given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
