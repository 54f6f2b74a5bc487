"""Which table several devices should sample by: simulated time, bytes that travel, and the error, measured here."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from weft.diffusion.parallel_sample import NamedTable, TableSampling
from weft.diffusion.sampling_check import EXACT
from weft.diffusion.sampling_costs import (
    SamplingDevice,
    bytes_between,
    denoised_tokens,
    simulated_sampling,
)
from weft.diffusion.sampling_pictures import sampled_sizes
from weft.errors import UsageError
from weft.registry import names

if TYPE_CHECKING:
    from weft.diffusion.denoiser import Denoiser
    from weft.diffusion.sample import SampleRequest

#: Samples by which the error of a table is measured.
MEASURED = 4


@dataclass(frozen=True)
class PlannedTable:
    """A sampling table with its simulated cost and its measured error.

    Attributes:
        ``word``: name and settings of the table.
        ``seconds``: simulated time to sample.
        ``bytes``: bytes sent by all ranks together.
        ``memory``: largest number of bytes of latents, activations and keys on a rank, without weights.
        ``synchronous``: number of steps without stale keys.
        ``error``: relative distance of its samples from those of one device.
        ``refused``: why the table is not possible; empty if it is.
        ``split``: whether two halves of the ranks divide classifier-free guidance, each with a table of its own.
    """

    word: str
    seconds: float = 0.0
    bytes: float = 0.0
    memory: float = 0.0
    synchronous: int = 0
    error: float = 0.0
    refused: str = ""
    split: bool = False


def planned_tables(
    denoiser: Denoiser,
    request: SampleRequest,
    ranks: int,
    device: SamplingDevice,
    frames: int = 0,
    words: tuple[str, ...] = (),
) -> list[PlannedTable]:
    """Return the sampling tables for ``request``, the fastest first and impossible ones last.

    ``denoiser``: the model. ``ranks``: number of devices. ``device``: their speed, for the simulation. ``frames``:
    frames of a video; 0: as many as the model was trained on. ``words``: the tables to compare; empty: "exact" and all
    schemes, with default settings. The error is measured by sampling with all ranks as threads of this process. If
    ``request`` has guidance and the ranks are even, each table is listed with guidance spread over two halves as well.
    """
    dropped = denoiser.settings.classes
    ways = (False, True) if request.guidance != 1 and ranks % 2 == 0 else (False,)
    few = replace(request, conditions=request.conditions[:MEASURED])
    # a video that is longer than those of training is not possible on one device
    exact = None
    with suppress(UsageError):
        reference = TableSampling(denoiser, few, NamedTable(EXACT, 1), frames, dropped)
        exact = reference.as_threads()
    plans = []
    asked = product(words or (EXACT, *names("sampling-table")), ways)
    for word, split in asked:
        named = NamedTable(word, ranks // (1 + split))
        try:
            whole = TableSampling(denoiser, request, named, frames, dropped, split)
        except UsageError as error:
            plans.append(PlannedTable(word, refused=str(error), split=split))
            continue
        if whole.mix is not None:
            larger = " x ".join(map(str, whole.mix.size))
            line = f"makes other images, of {larger} pixels; ask for it by name"
            plans.append(PlannedTable(word, refused=line, split=split))
            continue
        between = exchanged_bytes(whole) if split else 0.0
        simulation = simulated_sampling(whole.runnable, sampled_sizes(whole), device)
        lost = float("nan")
        if exact is not None:
            samples = TableSampling(denoiser, few, named, frames, dropped).as_threads()
            lost = float((samples - exact).norm() / exact.norm())
        plans.append(
            PlannedTable(
                word,
                simulation.elapsed + split * exchange_seconds(whole, device),
                sum(bytes_between(whole.runnable, sampled_sizes(whole)).values())
                * (1 + split)
                + 2 * between,
                max(simulation.peaks),
                whole.runnable.source.synchronous(),
                lost,
                split=split,
            )
        )
    return sorted(plans, key=lambda plan: (bool(plan.refused), plan.seconds))


def exchanged_bytes(sampling: TableSampling) -> float:
    """Return the bytes of predictions that the ranks of one half of classifier-free guidance send to those of the other
    half, in all steps. ``sampling``: the samples and the table.
    """
    sizes = sampled_sizes(sampling)
    source = sampling.runnable.source
    last = [row for row in source.rows if row.layers.end == source.layers]
    tokens = sum(denoised_tokens(sampling.runnable, row) for row in last)
    return float(tokens * sizes.values * sizes.rows * sizes.bytes)


def exchange_seconds(sampling: TableSampling, device: SamplingDevice) -> float:
    """Return the seconds that a rank waits, over all steps, for predictions of the ranks with the other half of
    guidance.

    In each step a rank needs them before it can update its latents. The ranks of a half send at the same time, each its
    own predictions. ``sampling``: the samples and the table. ``device``: speed of the link between ranks.
    """
    last = [r for r in sampling.runnable.source.rows if r.layers.end == sampling.runnable.source.layers]  # fmt: skip
    senders = len({row.rank for row in last})
    sent = exchanged_bytes(sampling) / senders
    return len(last) / senders * device.latency + sent / device.bandwidth


def chosen_table(plans: list[PlannedTable], most: float) -> PlannedTable | None:
    """Return the fastest of ``plans`` whose error is at most ``most``; None if there is none."""
    return next((p for p in plans if not p.refused and not p.error > most), None)
