"""``weft plan RUN --sample``: by which table several devices should sample."""

import json
from dataclasses import asdict
from math import isnan
from typing import TYPE_CHECKING

from weft.cli.console import print_table, warn

if TYPE_CHECKING:
    from weft.diffusion.sampling_costs import SamplingDevice
    from weft.diffusion.sampling_plan import PlannedTable

#: Largest relative error of a table that is chosen.
MOST_ERROR = 0.05
#: Samples that are planned for, and rounds of products by which this machine is timed.
COUNT, ROUNDS, PRODUCT = 16, 5, 512


def plan_sampling(
    run: str, steps: int, cluster: str | None, ranks: int, as_json: bool, guidance: float = 1.0
) -> int:  # fmt: skip
    """Print all sampling tables for the model of ``run``, the fastest first. Returns the exit code.

    ``steps``: denoising steps. ``cluster``: cluster file or preset; None: devices like this machine over 1 Gbit/s.
    ``ranks``: number of devices. ``guidance``: scale of classifier-free guidance; 1: none. With guidance, tables that
    divide it between two halves of the devices are listed too. ``as_json``: print JSON instead of a table.
    """
    from weft.diffusion.denoiser import open_denoiser
    from weft.diffusion.parallel_sample import asked_conditions
    from weft.diffusion.picture_engine import check_guidance
    from weft.diffusion.sample import SampleRequest
    from weft.diffusion.sampling_plan import chosen_table, planned_tables

    denoiser = open_denoiser(run, "cpu", warn)
    device = _device(cluster)
    check_guidance(denoiser, guidance)
    conditions = asked_conditions(denoiser.settings, COUNT)
    request = SampleRequest(conditions, steps, guidance=guidance)
    plans = planned_tables(denoiser, request, ranks, device)
    best = chosen_table(plans, MOST_ERROR)
    if as_json:
        record = {
            "tables": [asdict(plan) for plan in plans],
            "chosen": best and best.word,
            "split_guidance": bool(best and best.split),
        }
        print(json.dumps(record))
        return 0
    print_table(
        ("table", "seconds", "bytes", "memory", "synchronous", "error"),
        [
            (_shown(plan), "-", "-", "-", "-", plan.refused)
            if plan.refused
            else (
                _shown(plan) + (" *" if plan is best else ""),
                f"{plan.seconds:.3g}",
                f"{plan.bytes:,.0f}",
                f"{plan.memory:,.0f}",
                str(plan.synchronous),
                "-" if isnan(plan.error) else f"{plan.error:.3f}",
            )
            for plan in plans
        ],
    )
    if best:
        guided = f" --guidance {guidance:g}" if guidance != 1 else ""
        guided += " --split-guidance" * best.split
        print(
            f"*: the fastest with an error of at most {MOST_ERROR:.0%}: weft sample --checkpoint {run} --layout "
            f"cp={ranks // (1 + best.split)} --table {best.word}{guided}"
        )
    return 0


def _shown(plan: "PlannedTable") -> str:
    """Return the name of a plan in the list."""
    return f"{plan.word}, guidance split" if plan.split else plan.word


def _device(cluster: str | None) -> "SamplingDevice":
    """Return the device of ``cluster``, or one that computes as this machine does."""
    from weft.diffusion.sampling_costs import SamplingDevice

    if cluster is None:
        return SamplingDevice(_flops_here(), 125e6, 1e-4)
    from weft.planner.machine import load_cluster

    machine = load_cluster(cluster).machine()
    return SamplingDevice(
        float(machine.peak) * float(machine.clock), float(machine.link), float(machine.link_latency)
    )  # fmt: skip


def _flops_here() -> float:
    """Return the operations per second of a product of matrices on one core of this machine."""
    import time

    import torch

    x = torch.randn(PRODUCT, PRODUCT)
    seconds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        x @ x
        seconds.append(time.perf_counter() - begun)
    return 2.0 * PRODUCT**3 / min(seconds)
