"""Long videos block by block: seams with and without context, memory, and when the first block is there.

    python bench/video_seams.py [--quick] [--run runs/moving] [--json bench/results/video_seams.json]

Needs the run of `weft train moving`. DualParal samples videos of digits that move by two pixels a frame, in blocks of
four frames. A frame is followed well if it is the frame before, moved in one of the four directions: what is left then,
the mean difference of pixels at the best of the four, is the jump. Seams are the jumps between two blocks, and the
others are inside. Context is counted in frames of the block before, and of the next.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from weft.data.moving_digits import DIRECTIONS
from weft.diffusion.denoiser import open_denoiser
from weft.diffusion.parallel_sample import NamedTable, TableSampling
from weft.diffusion.sample import SampleRequest
from weft.diffusion.sampling_actions import U
from weft.diffusion.sampling_run import SamplingRun
from weft.diffusion.threads_as_ranks import run_as_threads

T = torch.Tensor
FRAMES, SPEED, STEPS = 4, 2, 20


def jumps_of(videos: T) -> T:
    """Return for each frame but the first what its motion leaves, ``[videos, frames - 1]``.

    ``videos``: ``[videos, channels, frames, height, width]``.
    """
    before, after = videos[:, :, :-1], videos[:, :, 1:]
    moved = [
        (before.roll((SPEED * y, SPEED * x), (-2, -1)) - after).abs().mean((1, 3, 4))
        for y, x in DIRECTIONS
    ]
    return torch.stack(moved).amin(0)


def differences_of(videos: T) -> T:
    """Return for each frame but the first how far its pixels are from the frame before, ``[videos, frames - 1]``."""
    return (videos[:, :, 1:] - videos[:, :, :-1]).abs().mean((1, 3, 4))


def sampled(
    denoiser: Any, context: int, blocks: int, count: int, ranks: int, guidance: float
) -> tuple[T, list[SamplingRun]]:
    """Return ``count`` videos of ``blocks`` blocks, and the measurements of all ranks."""
    conditions = torch.arange(count) % denoiser.settings.classes
    request = SampleRequest(conditions, STEPS, guidance=guidance)
    table = NamedTable(f"dualparal:frames={FRAMES},context={context}", ranks)
    frames = FRAMES * blocks + context
    dropped = denoiser.settings.classes
    sampling = TableSampling(denoiser, request, table, frames, dropped)
    measured: list[SamplingRun] = []

    def run(runnable: Any, tokens: Any, solver: Any, source: Any) -> SamplingRun:
        measured.extend(run_as_threads(runnable, tokens.own, solver, source))
        return measured[0]

    images, _ = sampling.batch(0, conditions, run)
    assert images is not None
    return images.float(), measured


def seams(denoiser: Any, blocks: int, count: int, guidance: float) -> list[dict[str, Any]]:  # fmt: skip
    """Jumps at seams and inside blocks by length of the context."""
    rows: list[dict[str, Any]] = []
    for context in range(FRAMES + 1):
        videos, _ = sampled(denoiser, context, blocks, count, 1, guidance)
        row: dict[str, Any] = {"context": context}
        for name, measure in {"jump": jumps_of, "difference": differences_of}.items():
            values = measure(videos)
            # entry i is between the frames i and i + 1; the first block has the context's frames more
            at = torch.arange(values.shape[1]) + 1
            is_seam = (at >= FRAMES + context) & ((at - context) % FRAMES == 0)
            seam, inside = values[:, is_seam].mean(), values[:, ~is_seam].mean()
            row |= {
                f"{name} at seams": round(float(seam), 4), f"{name} inside": round(float(inside), 4),
            }  # fmt: skip
        row["seam over none"] = round(
            row["jump at seams"] / (rows[0] if rows else row)["jump at seams"], 3
        )
        rows.append(row)
        print(row, flush=True)
    return rows


def lengths(denoiser: Any, counts: list[int], context: int) -> list[dict[str, Any]]:
    """Memory, and steps of blocks before the first one was there, by the number of blocks, on one rank and on two."""
    rows = []
    for ranks in (1, 2):
        for blocks in counts:
            _, runs = sampled(denoiser, context, blocks, 1, ranks, 1.0)
            done = next(run for run in runs if run.order)
            block, updates = done.order[0]
            last = next(run for run in runs if run.actions[U])
            row = {
                "ranks": ranks, "blocks": blocks, "peak bytes": [run.peak_bytes for run in runs],
                "first block": block, "updates before it": updates, "updates": last.actions[U],
            }  # fmt: skip
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    """Measure everything, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few and short videos")
    parser.add_argument("--run", default="runs/moving")
    parser.add_argument("--json", default="bench/results/video_seams.json")
    given = parser.parse_args()
    denoiser = open_denoiser(given.run, ema=True)
    blocks, count = (4, 4) if given.quick else (8, 20)
    counts = [STEPS, STEPS + 4] if given.quick else [STEPS, 2 * STEPS, 4 * STEPS]
    results = {
        "run": Path(given.run).name, "frames of a block": FRAMES, "steps": STEPS,
        "seams": seams(denoiser, blocks, count, 2.0), "lengths": lengths(denoiser, counts, 2),
    }  # fmt: skip
    Path(given.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
