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
    """Time constants, then memory constants. Each may be an array with one entry per row.

    ``matmul``: share of the device's attainable product rate; ``attention``: share of the 16-bit peak that fused
    attention reaches; ``flash``: 1 if attention is fused, 0 if scores are written to memory; ``elementwise``: bytes
    moved per token and unit of width in the forward of a layer, outside attention and feed-forward, ``inner`` inside
    (per element of their widths); ``kernels``: launches in the forward of a layer; ``exposed_dp``, ``exposed_cp``:
    share of that communication that is never hidden; ``network``: share of its nominal bandwidth; ``buckets``:
    gradient scatters per layer under ZeRO-1; ``step``: seconds per step of everything else; ``jitter``: share of time
    lost per doubling of ranks beyond a node; ``sequence``: 1 if norm regions are cut over tp as well;
    ``moe``: elementwise traffic of routing, in units of ``elementwise``; ``dispatch``: launches that routing adds, in
    units of ``kernels`` (with waits for the counts of tokens per expert); ``rough``: traffic of experts with biases and
    a clamped gate beyond that of others, in units of ``inner``; ``level``: 1 if pipelines are cut by work, the output
    layer as the layers that weigh as much, 0 if by layers; ``whole``: 1 if experts are never cut over tp, 0 if they
    are unless tp's ranks are among those that they are spread over.

    ``gradient``: bytes per parameter; ``master``: bytes of optimizer state per parameter; ``constant``: GiB of
    context, communication buffers and fragmentation (measured, one number per class); ``saved``: bytes kept per
    token and unit of width outside attention and feed-forward; ``vocab``: bytes per logit, of at most ``chunk`` tokens
    at a time; ``gathered``: of ``saved``, bytes that tensor parallelism does not cut (inputs of products, gathered);
    ``inside``: tensors of the feed-forward's inner width that are saved beyond gate, up and their product; ``remade``:
    of those of experts, how many backward makes again instead;
    ``stream``: bytes per token and unit of width of a block's input; ``products``: 1 if selective recomputation keeps
    every other product, 0 if it keeps attention alone; ``undone``: bytes per token and inner width of what backward is
    at; ``table``: bytes per entry of the output layer's gradient, from loss to backward; ``single``: 1 if gradients of
    a step's only pass are whole, 0 if each is reduced as it is made.
    """

    matmul: Num = 1.0
    attention: Num = 0.3
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
    whole: Num = 1.0
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
    """Return the engine with its constants multiplied by ``factors``, by name; exposed shares stay at most 1."""
    new = {name: getattr(engine, name) * factor for name, factor in factors.items()}
    shares = {
        name: np.minimum(value, 1.0)
        for name, value in new.items()
        if name.startswith("exposed")
    }
    return replace(engine, **(new | shares))


def stack(items: list[Any]) -> Any:
    """Stack a list of dataclass instances with numbers into one instance whose fields are arrays."""
    return replace(
        items[0],
        **{
            f.name: np.array([float(getattr(i, f.name)) for i in items])
            for f in fields(items[0])
        },
    )
