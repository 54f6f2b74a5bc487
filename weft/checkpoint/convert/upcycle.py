"""Give a dense checkpoint experts that at first compute the same (Komatsuzaki et al. 2022; He et al. 2024).

The dense feed-forward is cut into parts of the experts' width (their number is the granularity), and these are
repeated until there are enough experts. The parts of one repetition share a random row of the router, so that a token
chooses whole copies of the dense layer. ``down`` is scaled so that their weighted sum is the dense layer's output:
exactly for routers whose weights add up to one, else on average.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import torch

from weft.checkpoint.convert.foreign import Foreign
from weft.checkpoint.convert.rules import (
    EXPERTS_RULE,
    NameRule,
    Shard,
    TensorSource,
    replicated,
)
from weft.errors import UsageError, nearest
from weft.layout.dims import Dim
from weft.layout.mesh import Mesh
from weft.models.init import initial_values
from weft.recipe import ModelShape
from weft.section import validated
from weft.shapes.parameters import whole_table

#: The settings of the new experts that ``--upcycle`` takes; the others have the defaults of :class:`ModelShape`.
SETTINGS = (
    "experts", "experts_per_token", "expert_ffn", "first_dense", "moe_every", "router", "router_norm", "router_scale",
    "bias_rate", "balance", "balance_loss", "z_loss",
)  # fmt: skip


def upcycled_shape(dense: ModelShape, text: str) -> ModelShape:
    """Return a copy of the shape ``dense`` that has experts in place of the dense feed-forward layers.

    ``text``: settings of the experts, such as ``experts=8,experts_per_token=2,expert_ffn=512``. Raises
    :class:`UsageError` if ``text`` is malformed or the dense layer cannot be divided into experts of that width.
    """
    settings: dict[str, str] = {}
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise UsageError(
                f"--upcycle: {item!r} is not of the form setting=value, as in experts=8"
            )
        if name not in SETTINGS:
            raise UsageError(
                f"--upcycle: {name!r} is not about experts that can be made; {nearest(name, SETTINGS)}"
            )
        settings[name] = value
    if dense.mixtures or dense.adapter is not None:
        raise UsageError(
            "--upcycle is for dense models, and this one has experts or an adapter"
        )
    shape = validated(
        ModelShape, dense.model_dump(exclude={"expert_ffn"}) | settings, "--upcycle"
    )
    if not shape.mixtures:
        raise UsageError("--upcycle makes no experts; give experts=8, say")
    assert shape.ffn and shape.expert_ffn
    parts, rest = divmod(shape.ffn, shape.expert_ffn)
    if rest or not parts:
        raise UsageError(
            f"--upcycle: expert_ffn = {shape.expert_ffn} does not divide the dense ffn of {shape.ffn}"
        )
    for count in (*shape.mixtures.values(), shape.experts_per_token):
        if count % parts:
            raise UsageError(
                f"--upcycle: {parts} experts of expert_ffn = {shape.expert_ffn} make up a dense layer, and {count} is "
                f"no multiple of that; experts and experts_per_token must be multiples of {parts}"
            )
    return shape


def upcycled(foreign: Foreign, text: str, seed: int = 0) -> Foreign:
    """Return the checkpoint ``foreign`` with experts in place of dense feed-forward layers.

    Optimizer state is left out. ``text``: settings of the experts (:func:`upcycled_shape`); ``seed``: seed of the
    routers' random rows.
    """
    shape = upcycled_shape(foreign.model, text)
    assert shape.ffn and shape.expert_ffn
    parts, width = shape.ffn // shape.expert_ffn, shape.expert_ffn
    # a tensor's experts are made one after the other
    dense = lru_cache(maxsize=1)(foreign.read)
    sources = dict(foreign.sources)
    table = whole_table(shape)

    def source(name: str, shards: list[Shard], rule: NameRule = EXPERTS_RULE) -> None:
        sources[name] = TensorSource(name, shards, rule, 0)

    for layer, count in shape.mixtures.items():
        path = f"blocks.{layer}.ffn"
        for weight in ("gate", "up", "down"):
            name = f"{path}.{weight}"
            size = table[f"{path}.experts.{weight}"].shape[1:]
            scale = down_scale(shape, count) if weight == "down" else None
            read = partial(_piece, partial(dense, name), scale, width)
            shards = [
                Shard(size, foreign.sources[name].dtype, partial(read, expert % parts))
                for expert in range(count)
            ]
            source(f"{path}.experts.{weight}", shards)
            del sources[name]
        for kept in ("table", "bias", "load"):
            if (name := f"{path}.router.{kept}") in table:
                source(
                    name,
                    [_router(name, table[name].shape, count // parts, shape, seed)],
                    ROUTER,
                )
    return replace(foreign, model=shape, sources=sources, moments={}, step=0)


ROUTER = NameRule((), replicated)


def down_scale(shape: ModelShape, count: int) -> float:
    """Return the factor for the experts' ``down`` weights that makes their weighted sum equal the dense layer's output.

    ``shape``: the model with experts; ``count``: number of experts in the layer. The sum is equal exactly if a token's
    router weights add up to 1, otherwise on average.
    """
    assert shape.ffn and shape.expert_ffn
    k = shape.experts_per_token
    if shape.router == "post-softmax" or shape.router_norm:
        weight = 1 / k
    else:  # at first all logits are small
        weight = 1 / count if shape.router == "pre-softmax" else 0.5
    return shape.ffn / shape.expert_ffn / (k * weight * shape.router_scale)


def _piece(
    dense: Callable[[], torch.Tensor],
    scale: float | None,
    width: int,
    part: int,
    lo: int,
    hi: int,
) -> torch.Tensor:
    """Read rows ``lo:hi`` of a part of a dense weight: ``width`` columns times ``scale``, or rows without a scale."""
    first = part * width
    if scale is None:
        return dense()[first + lo : first + hi]
    return dense()[lo:hi, first : first + width] * scale


def _router(
    name: str, size: tuple[int, ...], copies: int, shape: ModelShape, seed: int
) -> Shard:
    """Return a row for each copy of the dense layer, which its parts repeat; biases and loads begin at zero."""

    def read(lo: int, hi: int) -> torch.Tensor:
        if len(size) == 1:
            return torch.zeros(hi - lo)
        rows = Mesh.single().place.logical(
            (Dim("expert", copies), Dim("embed", size[1])), shape.init_std
        )
        return initial_values(name, rows, rows.box, seed).repeat_interleave(
            size[0] // copies, 0
        )[lo:hi]

    return Shard(size, torch.float32, read)
