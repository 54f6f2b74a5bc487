"""Predicts how fast a device generates for many prompts with weights in its host's memory (MoE-Lens, 2504.09345).

Weights, keys and values are in the host's memory. In each pass through all layers the weights that do not fit on the
device cross the link once, the device multiplies, and new tokens attend on the host, beside their keys and values. The
three run at the same time, so a pass takes as long as the slowest. The prediction has two stages. First, the number of
sequences that fit in memory at a time bounds the rate, however many prompts there are. Second, a simulation goes pass
by pass: how prompts enter at that rate beside the new tokens of earlier ones, and how the last ones end.
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
    """A generation job.

    ``prompts``: number of tokens of each prompt, ``[prompts]``. ``new``: number of tokens to generate for each prompt.
    """

    prompts: np.ndarray
    new: int

    @property
    def prompt(self) -> float:
        return float(self.prompts.mean())


def read_workload(text: str) -> Workload:
    """Parse a workload from the text ``PROMPTSxTOKENS+NEW``, such as ``1000x512+128``.

    The numbers are prompts, tokens of each prompt, and tokens to generate for each. Raises :class:`UsageError` for
    another form.
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)\+([1-9]\d*)", text)
    if match is None:
        raise UsageError(
            f"--generate {text!r} is not of the form PROMPTSxTOKENS+NEW, such as 1000x512+128"
        )
    prompts, prompt, new = map(int, match.groups())
    return Workload(np.full(prompts, prompt), new)


@dataclass(frozen=True)
class Throughput:
    """Predicted throughput of a generation job.

    Attributes:
        ``bound``: the highest possible rate, in new tokens per second, however many prompts there are.
        ``rate``: predicted new tokens per second.
        ``together``: the largest number of sequences in progress at a time.
        ``seconds``: seconds of the whole job.
        ``limits``: share of the time in which each of "link", "device" and "host" is the bottleneck, by these names.
    """

    bound: float
    rate: float
    together: float
    seconds: float
    limits: dict[str, float]


def streamed_bytes(shape: Shape, machine: Machine) -> Num:
    """Return the bytes of weights that cross the link to the device in each pass.

    They are the weights that do not fit on the device.
    """
    weights = WIDTH * shape.parameters
    return np.maximum(
        0.0,
        weights - np.maximum(0.0, machine.memory - BUFFERED * weights / shape.layers),
    )


def room(shape: Shape, machine: Machine) -> Num:
    """Return for how many tokens the keys and values fit in the host's memory beside the weights.

    The result is 0 if the weights alone do not fit.
    """
    return (
        np.maximum(0.0, machine.host_memory - WIDTH * shape.parameters)
        / shape.cache_bytes
    )


def together(shape: Shape, machine: Machine, job: Workload) -> Num:
    """Return how many sequences of ``job`` are in progress at a time.

    There are as many as have room for their keys and values in the host's memory, and no more than the job has prompts.
    The cache of a sequence grows with every pass, so its mean size over the passes is counted.
    """
    held = job.prompt + (job.new - 1) / 2 + (PAGE - 1) / 2
    return np.minimum(len(job.prompts), np.floor(room(shape, machine) / held))


def generation_passes(
    shape: Shape, machine: Machine, read: Num, scored: Num, written: Num, attended: Num
) -> dict[str, Num]:
    """Return the seconds that a pass through all layers keeps "link", "device" and "host" busy, by these names.

    The link brings weights that do not fit on the device from the host. The device computes matrix products, and the
    attention of prompts. The host computes the attention of new tokens.

    ``machine``: the device and its host. ``read``: number of prompt tokens in the pass. ``scored``: sum of the squared
    lengths of their prompts. ``written``: number of new tokens that the pass generates. ``attended``: number of tokens
    that a new token attends to, summed over the new tokens.
    """
    inside = 2 * shape.layers * shape.heads * shape.score_dim / machine.peak16
    flops = 2 * shape.active_parameters / (machine.peak * machine.clock)
    return {
        "link": streamed_bytes(shape, machine) / machine.host,
        "device": (read + written) * flops + scored * inside,
        "host": attended * shape.cache_bytes / machine.host_bandwidth,
    }


def generating(shape: Shape, machine: Machine, job: Workload) -> Throughput:
    """Return the predicted throughput of ``machine`` for ``job``, with the weights of the model in the host's memory.

    Raises :class:`UsageError` if the weights and one sequence do not fit in the host's memory.
    """
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
