"""How fast a device generates for many prompts with weights in its host's memory (MoE-Lens, 2504.09345).

Weights, keys and values are in the host's memory. In a pass through all layers each weight that the device has no room
for crosses the link once, the device multiplies, and new tokens attend on the host, beside their keys and values; all
three at the same time, so that a pass takes as long as the slowest. Two stages answer what that makes of a machine.
First, how many sequences memory lets be under way, which bounds the rate however many prompts there are. Second, pass
after pass, how prompts come in at that rate, beside the new tokens of those before, and how the last ones run out.
"""

import re
from dataclasses import dataclass

import numpy as np

from weft.errors import UsageError
from weft.planner.machine import Machine
from weft.shapes.shape import Num, Shape

#: Tokens whose keys and values are kept together: on average half of the last page of a sequence is empty.
PAGE = 16
#: Layers whose weights the device has room for beside those that stay: two compute, a half of the tokens each, as one
#: half attends on the host meanwhile, and the next one arrives.
BUFFERED = 3
#: Bytes of a weight.
WIDTH = 2


@dataclass(frozen=True)
class Workload:
    """Prompts of so many tokens each, in their order, and ``new`` ones that are written for each of them."""

    prompts: np.ndarray
    new: int

    @property
    def prompt(self) -> float:
        return float(self.prompts.mean())


def read_workload(text: str) -> Workload:
    """From ``PROMPTSxTOKENS+NEW``."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)\+([1-9]\d*)", text)
    if match is None:
        raise UsageError(
            f"--generate {text!r} is not of the form PROMPTSxTOKENS+NEW, such as 1000x512+128"
        )
    prompts, prompt, new = map(int, match.groups())
    return Workload(np.full(prompts, prompt), new)


@dataclass(frozen=True)
class Throughput:
    """New tokens per second, at most (``bound``) and for this job; ``together``: sequences under way at most.

    ``limits``: the share of the time in which link, device and host are what the others wait for.
    """

    bound: float
    rate: float
    together: float
    seconds: float
    limits: dict[str, float]


def streamed_bytes(shape: Shape, machine: Machine) -> Num:
    """Return the bytes of weights that cross the link in each pass."""
    weights = WIDTH * shape.parameters
    return np.maximum(
        0.0,
        weights - np.maximum(0.0, machine.memory - BUFFERED * weights / shape.layers),
    )


def room(shape: Shape, machine: Machine) -> Num:
    """Tokens whose keys and values the host has room for, beside the weights; 0 if these alone are too large."""
    return (
        np.maximum(0.0, machine.host_memory - WIDTH * shape.parameters)
        / shape.cache_bytes
    )


def together(shape: Shape, machine: Machine, job: Workload) -> Num:
    """Whole sequences under way at a time, each as long as it is on average from its first pass to its last."""
    held = job.prompt + (job.new - 1) / 2 + (PAGE - 1) / 2
    return np.minimum(len(job.prompts), np.floor(room(shape, machine) / held))


def generation_passes(
    shape: Shape, machine: Machine, read: Num, scored: Num, written: Num, attended: Num
) -> dict[str, Num]:
    """Return the seconds of link, device and host in passes in which so many tokens of prompts are ``read`` and new
    ones ``written``, which see ``attended`` tokens.

    Prompts attend on the device; ``scored`` are the squares of their lengths, added up.
    """
    inside = 2 * shape.layers * shape.heads * shape.score_dim / machine.peak16
    flops = 2 * shape.active_parameters / (machine.peak * machine.clock)
    return {
        "link": streamed_bytes(shape, machine) / machine.host,
        "device": (read + written) * flops + scored * inside,
        "host": attended * shape.cache_bytes / machine.host_bandwidth,
    }


def generating(shape: Shape, machine: Machine, job: Workload) -> Throughput:
    """What a machine makes of a job."""
    most = float(together(shape, machine, job))
    if most < 1:
        raise UsageError(
            f"{WIDTH * float(shape.parameters) / 1e9:,.0f} GB of weights and one text of {job.prompt + job.new:,.0f} "
            f"tokens do not fit the {float(machine.host_memory) / 1e9:,.0f} GB of the host; give it more (host_memory)"
        )
    # passes of a sequence after its first, which reads it
    later, count = np.arange(1, job.new), len(job.prompts)
    begun = most / job.new  # sequences per pass, as many as end
    lengths = begun * float((job.prompt + later).sum())
    pairs = float((job.prompts**2).mean())
    steady = generation_passes(
        shape, machine, begun * job.prompt, begun * pairs, begun * len(later), lengths
    )
    # Whole sequences, until all have begun; then those that are under way, which see their prompt and what they wrote.
    ends = np.minimum(
        count, np.floor(begun * np.arange(1, np.ceil(count / begun) + 1) + 1e-9)
    ).astype(int)
    begins, read, scored = (
        np.diff(np.r_[0, np.cumsum(each)][ends], prepend=0)
        for each in (job.prompts**0, job.prompts, job.prompts**2)
    )
    stay = np.r_[0, np.ones(len(later))]
    under_way = np.convolve(begins, stay)
    seen = np.convolve(read, stay) + np.convolve(begins, np.r_[0, later])
    read, scored = (np.pad(column, (0, len(later))) for column in (read, scored))
    parts = generation_passes(shape, machine, read, scored, under_way, seen)
    each = np.stack(np.broadcast_arrays(*parts.values()))
    longest, slowest = each.max(0), each.argmax(0)
    # before the first layer computes
    seconds = float(longest.sum()) + float(parts["link"] / shape.layers)
    limits = {
        name: float(longest[slowest == i].sum()) / seconds
        for i, name in enumerate(parts)
    }
    return Throughput(
        most / float(max(steady.values())),
        count * job.new / seconds,
        most,
        seconds,
        limits,
    )
