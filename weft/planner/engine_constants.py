"""Constants that say how well a training program uses the machine, each with a physical meaning, by class of
program.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.recipe.toml import read_toml
from weft.shapes.shape import Num


@dataclass(frozen=True)
class EngineConstants:
    """Constants that say how well a class of training programs uses a machine. Each may be an array, one entry per run.

    Attributes (time):
        ``matmul``: share of the device's attainable rate that matrix products reach.
        ``attention``: speed of fused attention as a share of what the device's best kernels reach
            (:attr:`weft.planner.machine.Machine.fused`).
        ``flash``: 1 if attention is fused, 0 if scores are written to memory.
        ``elementwise``: bytes moved per token and unit of width in the forward of a layer, outside attention and
            feed-forward.
        ``inner``: the same inside attention and feed-forward, per unit of their inner widths.
        ``kernels``: kernel launches in the forward of a layer.
        ``exposed_dp``, ``exposed_cp``: share of the communication along ``dp`` and ``cp`` that is never hidden.
        ``network``: share of the network's nominal bandwidth that is reached.
        ``buckets``: gradient scatters per layer under ZeRO-1.
        ``step``: seconds per step of everything else.
        ``jitter``: share of time lost to stragglers per doubling of the ranks beyond 8.
        ``sequence``: 1 if the regions around norms are cut over ``tp`` as well (sequence parallelism), else 0.
        ``moe``: elementwise traffic of routing, in units of ``elementwise``.
        ``dispatch``: launches that routing adds, in units of ``kernels``, with waits for the counts of tokens per
            expert.
        ``rough``: traffic that experts with biases and a clamped gate have beyond that of others, in units of
            ``inner``.
        ``level``: 1 if pipelines are cut into stages of equal work, where the output layer counts in proportion to its
            weights; 0 if into stages of equally many layers.
        ``stops``: 1 if full recomputation of a layer stops at the last tensor that backward needs, and so does not
            repeat the layer's last product; 0 if it repeats the whole layer.
        ``weaves``: 1 if the program can compute half of the tokens while sums of the others travel over ``tp``.
        ``blocks``: 1 if a pipeline rank waits while it sends or receives, as programs with paired calls do; 0 if it
            computes meanwhile.
        ``scores``: bytes that unfused attention moves per score of two bytes, in a third of forward and backward: at
            least 8, for it is made, masked, turned into a share, and used.
        ``logits``: bytes that the loss moves per logit of two bytes in forward and backward, beside products.
        ``update``: bytes that the optimizer moves per parameter that it updates.
        ``flattened``: bytes that are moved per parameter to flatten, cast and scale gradients around their sum over
            replicas.
        ``masks``: 1 if pipeline ranks send the attention mask, in two bytes per pair of positions, with every
            microbatch's activations, each rank of ``tp`` all of it.
        ``whole_gradients``: 1 if in a pipeline each rank of ``tp`` sends all of the activations' gradient, 0 if its
            part.
        ``whole``: 1 if experts are never cut over ``tp``; 0 if they are, unless the ranks of ``tp`` are among those
            over which experts are spread.

    Attributes (memory):
        ``gradient``: bytes of gradient per parameter.
        ``master``: bytes of optimizer state per parameter.
        ``constant``: GiB of context, communication buffers and fragmentation, as measured.
        ``saved``: bytes kept for backward per token and unit of width, outside attention and feed-forward.
        ``vocab``: bytes per logit.
        ``chunk``: largest number of tokens whose logits are in memory at a time.
        ``gathered``: the part of ``saved`` that ``tp`` does not cut, because inputs of products are gathered.
        ``inside``: number of tensors of the feed-forward's inner width that are saved beside gate, up and their
            product.
        ``remade``: number of tensors of an expert's inner width that are not saved, as backward computes them again.
        ``stream``: bytes per token and unit of width of a block's input.
        ``products``: 1 if selective recomputation keeps every other product, 0 if it keeps attention alone.
        ``undone``: bytes per token and unit of inner width that backward needs for the one layer that it works on.
        ``table``: bytes per entry of the output layer's gradient, which lives from loss to backward.
        ``single``: 1 if the gradients of a step with one pass are kept whole, 0 if each is reduced as soon as it is
            computed.
    """

    matmul: Num = 1.0
    attention: Num = 0.85
    flash: Num = 1.0
    elementwise: Num = 16.0
    inner: Num = 11.5
    kernels: Num = 28.0
    exposed_dp: Num = 0.38
    exposed_cp: Num = 0.3
    network: Num = 0.65
    buckets: Num = 0.25
    step: Num = 0.02
    jitter: Num = 0.01
    sequence: Num = 1.0
    moe: Num = 0.7
    dispatch: Num = 3.0
    rough: Num = 8.0
    level: Num = 0.0
    stops: Num = 0.0
    whole: Num = 1.0
    weaves: Num = 0.0
    blocks: Num = 0.0
    scores: Num = 8.0
    logits: Num = 8.0
    update: Num = 24.0
    flattened: Num = 0.0
    masks: Num = 0.0
    whole_gradients: Num = 0.0
    gradient: Num = 4.0
    master: Num = 12.0
    constant: Num = 3.0
    saved: Num = 16.0
    vocab: Num = 10.0
    chunk: Num = 1e12
    gathered: Num = 0.0
    inside: Num = 0.0
    remade: Num = 0.0
    stream: Num = 2.0
    products: Num = 1.0
    undone: Num = 0.0
    table: Num = 0.0
    single: Num = 1.0


def _programs() -> dict[str, EngineConstants]:
    programs = {"": EngineConstants()}
    for name, differs in read_toml(Path(__file__).with_name("programs.toml")).items():
        programs[name] = replace(programs[differs.pop("like", "")], **differs)
    del programs[""]
    return programs


#: Classes of programs (``programs.toml``).
ENGINES = _programs()


def scaled(engine: EngineConstants, factors: dict[str, Num]) -> EngineConstants:
    """Return ``engine`` with its constants multiplied by ``factors``, which maps names of constants to factors.

    The shares ``exposed_dp`` and ``exposed_cp`` stay at most 1.
    """
    new = {name: getattr(engine, name) * factor for name, factor in factors.items()}
    shares = {
        name: np.minimum(value, 1.0)
        for name, value in new.items()
        if name.startswith("exposed")
    }
    return replace(engine, **(new | shares))


def stack(items: list[Any]) -> Any:
    """Stack instances of one dataclass with numbers as fields into one instance whose fields are arrays ``[items]``."""
    return replace(
        items[0],
        **{
            f.name: np.array([float(getattr(i, f.name)) for i in items])
            for f in fields(items[0])
        },
    )
