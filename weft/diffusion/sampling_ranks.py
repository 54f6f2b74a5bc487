"""A sampling table over the ranks of a process group."""

import torch.distributed as dist

from weft.diffusion.sampling_check import RunnableTable
from weft.diffusion.sampling_run import (
    SampleSource,
    SamplingRun,
    TokenDenoiser,
    TokenSampler,
    run_sampling,
    value_specs,
)
from weft.schedule.lower import links
from weft.schedule.pipeline_wire import Wire


def run_over_ranks(
    runnable: RunnableTable,
    denoiser: TokenDenoiser,
    sampler: TokenSampler,
    source: SampleSource,
    timeout: float = 600,
    group: dist.ProcessGroup | None = None,
) -> SamplingRun:
    """Run this rank's part of the sampling table ``runnable``; all ranks of ``group``, or of the default one, call it.

    Every transfer is a send and a receive between two ranks, in the order of the table. There are no collectives, in
    which a rank could wait for another that never gets there. ``denoiser``, ``sampler``: the model and the sampler of
    this rank. ``source``: gives the noise, and gets finished samples. ``timeout``: seconds that a rank waits for a
    value. Raises :class:`weft.net.lost.PeerLost`, which names a rank that does not deliver.
    """
    if runnable.source.ranks == 1:
        return run_sampling(runnable, 0, denoiser, sampler, source)
    group = group or dist.group.WORLD
    assert group is not None
    specs = value_specs(runnable, denoiser, source)
    wire = Wire(group, source.device, timeout, specs)
    wire.connect(links(runnable.lowered))
    return run_sampling(runnable, group.rank(), denoiser, sampler, source, wire)
