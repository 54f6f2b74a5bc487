"""Sampling over ranks by tables: published latencies against the simulator, and real ranks over links of 1 Gbit/s.

    sudo python bench/sampling_tables.py [--quick] [--only simulated|errors|tiles|links] [--run runs/digits] \\
        [--json bench/results/sampling_tables.json]

The first part simulates tables with the published sizes of models, speeds of devices and bandwidths of links, and puts
the ratios of latencies beside the published ones. One constant of each system (the seconds of a layer that do not
become fewer with its tokens, or the part of a device's speed that is reached) is set on one published ratio, which is
marked; all others are predicted. A second part samples with the run of `weft train digits` by several tables, and says
how far they are from exact samples. With the same run "tiles" makes images twice as high and wide: how far those by
guidance of the step before are from those by fresh guidance, and how many of them, reduced to the size of real images,
a classifier takes for their class, with guidance and without, beside images of the model's own size. The last
part runs real ranks, each on a host (namespace) of its own whose cable carries 1 Gbit/s, and compares tables with the
exact one (``cp``, age 0). Tables take turns in the same processes.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from weft.diffusion.sampling_check import sampling_table_of
from weft.diffusion.sampling_costs import (
    DenoiserSizes,
    SamplingDevice,
    simulated_sampling,
)
from weft.diffusion.sampling_table import SamplingShape

RATE = "1gbit"

# --- published ratios ------------------------------------------------------------------------------------------------


#: Of A100: bf16 products and NVLink in one direction. Of L40 and RTX 4090: fp16 products with sums in fp32, and PCIe 4.
A100 = SamplingDevice(flops=312e12, bandwidth=300e9, latency=10e-6)
RTX_4090 = SamplingDevice(flops=165e12, bandwidth=16e9, latency=20e-6)


def sdxl(size: int, rows: int) -> tuple[DenoiserSizes, int]:
    """SDXL's U-Net in numbers of a transformer, and its number of units, for an image of ``size`` pixels.

    Its 70 attention layers at two resolutions have the operations of 140 layers of width 1280 over (size / 32)^2
    tokens; the feed-forward is as wide as it takes to have SDXL's other 5.2e12 operations at 1024 pixels.
    """
    return DenoiserSizes(1280, 4520, 16, rows), size // 32


def latency(
    word: str, ranks: int, steps: int, layers: int, units: int, unit: int, sizes: DenoiserSizes, device: SamplingDevice,
    video: bool = False,
) -> float:  # fmt: skip
    """Simulated seconds of a table. Layers are simulated in few groups, as they are all alike.

    A table that cuts the layers over ranks has every layer by itself if they do not come out even: the longest stage
    sets the pace of all.
    """
    by_layers = word.startswith(("pipefusion", "dualparal"))
    groups = layers if by_layers and layers % ranks else max(ranks, 4)
    scale = layers / groups
    table = sampling_table_of(
        word, SamplingShape(ranks, steps, groups, units, unit, video)
    )
    # a group of layers takes as long as its layers, and sends what they send
    whole = SamplingDevice(
        device.flops / scale, device.bandwidth / scale, device.latency, device.overhead * scale, device.half
    )  # fmt: skip
    return simulated_sampling(table, sizes, whole).elapsed


def distrifusion_ratios(steps: int) -> list[dict[str, Any]]:
    """SDXL at 3840 pixels on A100s, guidance over two groups; the constant is set on 8 devices."""
    published = {2: 1.8, 4: 3.4, 8: 6.1}

    def speedup(devices: int, overhead: float) -> float:
        device = half_speed(A100, overhead)
        one, units = sdxl(3840, 2)
        split, _ = sdxl(3840, 1)
        word = f"distrifusion:synchronous={5 * steps // 50}"
        whole = latency("exact", 1, steps, 140, units, units, one, device)
        return whole / latency(word, devices // 2, steps, 140, units, units, split, device)  # fmt: skip

    overhead = bisected(lambda o: speedup(8, o), published[8], 0.0, 4e-3)
    return [
        row_of(f"DistriFusion, {n} A100 over 1", ratio, speedup(n, overhead),
               "distrifuser README: SDXL 3840 x 3840, 50 steps", set_on=n == 8)
        for n, ratio in published.items()
    ]  # fmt: skip


def pcpp_ratios() -> list[dict[str, Any]]:
    """PCPP over DistriFusion: the ends of the published ranges, taken as 4 devices at 1024 and 8 at 2048 pixels.

    The constant is set on DistriFusion's speed-up in the same paper, so PCPP itself is predicted.
    """
    rows = []
    for devices, size, distri, pcpp in ((4, 1024, 2.32, 2.36), (8, 2048, 6.71, 8.02)):

        def latencies(overhead: float, devices: int = devices, size: int = size) -> list[float]:  # fmt: skip
            device = half_speed(A100, overhead)
            one, units = sdxl(size, 2)
            split, _ = sdxl(size, 1)
            words = ("distrifusion:synchronous=5", "pcpp:synchronous=5,part=0.3")
            whole = latency("exact", 1, 20, 140, units, units, one, device)
            where = (devices // 2, 20, 140, units, units, split, device)
            return [whole / latency(word, *where) for word in words]

        overhead = bisected(lambda o, f=latencies: f(o)[0], distri, 0.0, 1e-3)
        got = latencies(overhead)
        source = f"PCPP, abstract: taken as {size} x {size}, part 0.3"
        rows += [
            row_of(f"PCPP, {devices} devices over 1", pcpp, got[1], source),
            row_of(f"PCPP over DistriFusion, {devices} devices", pcpp / distri, got[1] / got[0], source),
        ]  # fmt: skip
    return rows


def pipefusion_ratios() -> list[dict[str, Any]]:
    """PixArt-alpha at 2048 pixels on 8 A100: PipeFusion with 8 patches over exact attention. Nothing is set."""
    sizes = DenoiserSizes(1152, 4608, 16, rows=2, text=120)
    device = half_speed(A100, 0.0)
    pipe, exact = (
        latency(word, 8, 20, 28, 128, 128, sizes, device)
        for word in ("pipefusion:patches=8", "exact")
    )
    source = "xDiT issue 137: 3.37 s and 2.46 s (Ulysses), PixArt 2048 x 2048, 20 steps"
    return [row_of("PipeFusion over exact, 8 A100", 3.37 / 2.46, pipe / exact, source)]


#: Latent frames of 1,025 frames (a first one, and one for four frames each), and tokens of one at 832 x 480 pixels.
LATENT_FRAMES, FRAME_TOKENS = 257, 1560


def dualparal_ratios() -> list[dict[str, Any]]:
    """Wan2.1-1.3B, 480p, 1,025 frames on 8 RTX 4090: exact attention over DualParal. Nothing is set.

    Blocks and contexts are those of the authors' code: its defaults, and a context of 4 frames on either side, which
    the paper calls 8 (its readme: the paper's number counts both sides).
    """
    exact = exact_video()
    rows = []
    for frames, context in ((10, 5), (8, 4)):
        ratio = exact / dualparal_latency(frames, context)
        source = "DualParal, abstract: 1,025 frames, up to 6.54"
        what = f"exact over DualParal, 8 RTX 4090, blocks {frames}, context {context}"
        rows.append(row_of(what, 6.54, ratio, source))
    return rows


def wan() -> tuple[DenoiserSizes, SamplingDevice]:
    """Wan2.1-1.3B with guidance in one batch, and an RTX 4090."""
    sizes = DenoiserSizes(1536, 8960, 64, rows=2, text=512)
    return sizes, half_speed(RTX_4090, 0.0)


def exact_video() -> float:
    """Simulated seconds of exact attention for all frames on 8 devices."""
    return latency("exact", 8, 50, 30, LATENT_FRAMES, FRAME_TOKENS, *wan(), True)


def dualparal_latency(frames: int, context: int) -> float:
    """Simulated seconds of DualParal on 8 devices, with as many whole blocks as it takes."""
    first = frames + context
    units = first + -(-(LATENT_FRAMES - first) // frames) * frames
    word = f"dualparal:frames={frames},context={context}"
    return latency(word, 8, 50, 30, units, FRAME_TOKENS, *wan(), True)


def dualparal_bound(frames: int = 8, context: int = 8) -> dict[str, Any]:
    """The most that DualParal can gain with a long context, on any device and link: the ratio of operations.

    The frames of the block before are computed once more with every block (the code joins them to its input), and all
    of them see the context on both sides. So a block of 8 with 8 frames on either side computes 16 frames with 24 keys,
    in place of 8 with 257, and the published ratio cannot be of this setting.
    """
    sizes, _ = wan()
    whole = LATENT_FRAMES * FRAME_TOKENS
    exact = sizes.projection(whole) + sizes.rest(whole, whole)
    tokens, keys = (FRAME_TOKENS * n for n in (frames + context, frames + 2 * context))
    block = sizes.projection(tokens) + sizes.rest(tokens, keys)
    bound = exact / (block * LATENT_FRAMES / frames)
    simulated = exact_video() / dualparal_latency(frames, context)
    print(f"DualParal, blocks {frames}, context {context}: operations {bound:.2f} times fewer, simulated "
          f"{simulated:.2f}", flush=True)  # fmt: skip
    return {
        "frames": frames,
        "context": context,
        "operations": bound,
        "simulated": simulated,
        "published": 6.54,
    }


def half_speed(device: SamplingDevice, overhead: float) -> SamplingDevice:
    """The device at half of its peak, with ``overhead`` seconds of every layer."""
    return replace(device, flops=device.flops / 2, overhead=overhead)


def bisected(ratio: Callable[[float], float], wanted: float, low: float, high: float) -> float:  # fmt: skip
    """The constant between ``low`` and ``high`` with which ``ratio``, which falls with it, is as ``wanted``."""
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(middle) > wanted else (low, middle)
    return (low + high) / 2


def row_of(
    what: str, published: float, simulated: float, source: str, set_on: bool = False
) -> dict[str, Any]:
    off = simulated / published - 1
    mark = " set" if set_on else ""
    print(
        f"{what:<52} published {published:.3f}, simulated {simulated:.3f} ({off:+.1%}){mark}",
        flush=True,
    )
    return {
        "what": what,
        "published": published,
        "simulated": simulated,
        "off": off,
        "set": set_on,
        "source": source,
    }


# --- errors of age and context ----------------------------------------------------------------------------------------


def errors(run: str, count: int) -> list[dict[str, Any]]:
    """Relative distances of samples by tables from exact ones, of the digits' model in the folder ``run``."""
    import torch

    from weft.diffusion.denoiser import open_denoiser
    from weft.diffusion.parallel_sample import (  # fmt: skip
        NamedTable,
        TableSampling,
        asked_conditions,
    )
    from weft.diffusion.sample import SampleRequest

    torch.set_num_threads(1)
    denoiser = open_denoiser(run, ema=True)
    words = {
        "all others old": "distrifusion", "all others old, 5 synchronous": "distrifusion:synchronous=5",
        "PipeFusion": "pipefusion", "neighbours old": "pcpp:part=1", "half of each neighbour": "pcpp:part=0.5",
        "no exchange": "pcpp:part=0",
    }  # fmt: skip
    rows = []
    for ranks in (2, 4):
        for steps in (10, 50):
            request = SampleRequest(asked_conditions(denoiser.settings, count), steps)  # fmt: skip

            def made_by(word: str, ranks: int, request: SampleRequest = request) -> torch.Tensor:  # fmt: skip
                return TableSampling(denoiser, request, NamedTable(word, ranks)).as_threads()  # fmt: skip

            exact = made_by("exact", 1)
            off = {
                name: float((made_by(word, ranks) - exact).norm() / exact.norm())
                for name, word in words.items()
            }
            rows.append({"steps": steps, "ranks": ranks, **off})
            said = ", ".join(f"{name} {error:.4f}" for name, error in off.items())
            print(f"{steps} steps, {ranks} patches: {said}", flush=True)
    return rows


# --- tiles of larger images -------------------------------------------------------------------------------------------


def tiles(run: str, count: int) -> list[dict[str, Any]]:
    """Errors of age of guided tiles of the digits' model in the folder ``run``, and what a classifier sees in them."""
    import torch

    from weft.diffusion.denoiser import open_denoiser
    from weft.diffusion.parallel_sample import (  # fmt: skip
        NamedTable,
        TableSampling,
        asked_conditions,
    )
    from weft.diffusion.picture_scores import PictureJudge
    from weft.diffusion.sample import SampleRequest
    from weft.techniques.datasets.images import images

    torch.set_num_threads(1)
    denoiser = open_denoiser(run, ema=True)
    judge = PictureJudge(images("sklearn:digits"))
    rows = []
    for steps in (10, 50):
        conditions = asked_conditions(denoiser.settings, count)
        request = SampleRequest(conditions, steps)

        def made_by(word: str, request: SampleRequest = request) -> torch.Tensor:
            return TableSampling(denoiser, request, NamedTable(word, 1)).as_threads()

        for settings in ("structure=0.5", "structure=0.5,overlap=2", "structure=1"):
            word = f"asgdiffusion:{settings}"
            made = {
                "fresh": made_by(f"{word},age=0"),
                "old": made_by(word),
                "no guidance": made_by(f"{word},weight=0"),
                "model's size": made_by("exact"),
            }
            reduced = {name: x[..., ::2, ::2] if name != "model's size" else x for name, x in made.items()}  # fmt: skip
            row = {
                "steps": steps,
                "settings": settings,
                "old": float((made["old"] - made["fresh"]).norm() / made["fresh"].norm()),
                "accuracy": {
                    name: judge.score(x.numpy(), conditions.numpy()).accuracy
                    for name, x in reduced.items()
                },
            }  # fmt: skip
            rows.append(row)
            said = ", ".join(f"{name} {share:.2f}" for name, share in row["accuracy"].items())  # fmt: skip
            print(
                f"{steps} steps, {settings}: error of age {row['old']:.4f}; accuracy {said}",
                flush=True,
            )
    return rows


# --- real links -------------------------------------------------------------------------------------------------------

#: Sizes of the model of the links: a layer's keys travel about as long as the layer computes.
LINKED = {"layers": 8, "embed": 64, "heads": 2, "ffn": 128}
TABLES = ("exact", "distrifusion", "pcpp:part=0.25", "pipefusion:patches=2")
#: Samples of a batch.
SAMPLES = 64


def be_rank(rank: int, ranks: int, address: str, rounds: int, out: str) -> None:
    """Sample by all tables in turn, and write the seconds of each."""
    import os

    import torch
    import torch.distributed as dist

    from weft.diffusion.denoiser import Denoiser
    from weft.diffusion.parallel_sample import NamedTable, TableSampling
    from weft.diffusion.sample import SampleRequest
    from weft.layout.mesh import Mesh
    from weft.parallel.build import parallelize
    from weft.recipe import ModelShape, Train

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
    settings = {"size": (16, 16), "channels": 4, "classes": 4, "zero": False}
    shape = ModelShape(kind="diffusion", **LINKED, settings=settings)
    torch.manual_seed(0)
    denoiser = Denoiser(parallelize(shape, Mesh.single(), Train()).model.eval())  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in denoiser.model.parameters():
            parameter.normal_(0, 0.15)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:29563", rank=rank, world_size=ranks
    )
    request = SampleRequest(torch.arange(SAMPLES) % 4, steps=10)
    samplings = {
        word: TableSampling(denoiser, request, NamedTable(word, ranks))
        for word in TABLES
    }
    seconds: dict[str, list[float]] = {word: [] for word in TABLES}
    images: dict[str, torch.Tensor] = {}
    for number in range(rounds + 1):
        for word, sampling in samplings.items():
            dist.barrier()
            begun = time.perf_counter()
            made = sampling.over_ranks()
            dist.barrier()
            if number:  # the first opens ways
                seconds[word].append(time.perf_counter() - begun)
            if made is not None:
                images[word] = made
    if rank == 0:
        exact = images["exact"]
        answer = {
            word: {
                "seconds": statistics.median(times),
                "bytes": samplings[word].bytes_sent,
                "error": float((images[word] - exact).norm() / exact.norm()),
            }
            for word, times in seconds.items()
        }
        Path(out).write_text(json.dumps(answer))
    dist.destroy_process_group()


def links(rounds: int) -> dict[str, Any]:
    """Seconds of each table on two hosts, and how much faster than the exact one."""
    import tempfile

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from bench.hosts import hosts

    with tempfile.TemporaryDirectory() as folder, hosts(2, rate=RATE) as both:
        out = Path(folder) / "seconds.json"
        started = [
            subprocess.Popen(
                host.command([sys.executable, __file__, "--rank", f"{rank},2,{both[0].address},{rounds},{out}"])
            )
            for rank, host in enumerate(both)
        ]  # fmt: skip
        for process in started:
            if process.wait(timeout=900):
                raise SystemExit("a rank has failed")
        answer: dict[str, Any] = json.loads(out.read_text())
    for word, row in answer.items():
        row["faster"] = answer["exact"]["seconds"] / row["seconds"]
        print(f"{word:<24} {row['seconds']:.2f} s, {row['faster']:.2f} times the exact one's speed, rank 0 sends "
              f"{row['bytes']:,} bytes, error {row['error']:.3f}", flush=True)  # fmt: skip
    return answer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("simulated", "errors", "tiles", "links"))
    parser.add_argument(
        "--run", help="folder of a run of recipes/digits.toml, for errors and tiles"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        rank, ranks, address, rounds, out = asked.rank.split(",")
        be_rank(int(rank), int(ranks), address, int(rounds), out)
        return
    there = (
        json.loads(asked.json.read_text()) if asked.json and asked.json.exists() else {}
    )
    there |= {
        "date": datetime.now().isoformat(timespec="seconds"),
        "machine": platform.processor(),
        "rate": RATE,
    }
    if asked.only in (None, "simulated"):
        there["simulated"] = distrifusion_ratios(10 if asked.quick else 50)
        there["simulated"] += [
            *pcpp_ratios(),
            *pipefusion_ratios(),
            *([] if asked.quick else dualparal_ratios()),
        ]
        if not asked.quick:
            there["dualparal_bound"] = dualparal_bound()
    if asked.only == "errors" or (asked.only is None and asked.run):
        if not asked.run:
            raise SystemExit("--run is missing: weft train digits makes one")
        there["errors"] = errors(asked.run, 20 if asked.quick else 100)
    if asked.only == "tiles" or (asked.only is None and asked.run):
        if not asked.run:
            raise SystemExit("--run is missing: weft train digits makes one")
        there["tiles"] = tiles(asked.run, 20 if asked.quick else 100)
    if asked.only in (None, "links"):
        there["links"] = links(2 if asked.quick else 9)
    if asked.json:
        asked.json.write_text(json.dumps(there, indent=1) + "\n")


if __name__ == "__main__":
    main()
