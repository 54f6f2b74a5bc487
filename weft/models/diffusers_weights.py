"""Weights and configurations of diffusers' ``DiTTransformer2DModel`` and ``PixArtTransformer2DModel``, in and out.

Of a DiT, diffusers gives every block an embedding of time and class of its own, all alike in published weights. Here
the blocks share one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weft.errors import UsageError, WeftError
from weft.models.pixart_names import PIXART, pixart_config, pixart_name, shape_of_pixart
from weft.recipe import ModelShape
from weft.shapes.diffusion_shape import settings_of

if TYPE_CHECKING:
    from weft.layout.dims import Box, Logical

T = torch.Tensor

#: The class that a configuration names.
CLASS_NAME = "DiTTransformer2DModel"
#: File of the weights.
WEIGHTS = "diffusion_pytorch_model.safetensors"
#: Names here and there of the parameters of a block, and of those outside of blocks.
OF_BLOCK = {
    "modulation": "norm1.linear.weight",
    "modulation_bias": "norm1.linear.bias",
    **{
        f"attention.{here}{name}": f"attn1.{there}.{kind}"
        for name, there in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"))
        for here, kind in (("w", "weight"), ("b", "bias"))
    },
    "ffn.up": "ff.net.0.proj.weight",
    "ffn.up_bias": "ff.net.0.proj.bias",
    "ffn.down": "ff.net.2.weight",
    "ffn.down_bias": "ff.net.2.bias",
}  # fmt: skip
OF_MODEL = {
    "embedding.patches": "pos_embed.proj.weight",
    "embedding.patches_bias": "pos_embed.proj.bias",
    "head.modulation": "proj_out_1.weight",
    "head.modulation_bias": "proj_out_1.bias",
    "head.output": "proj_out_2.weight",
    "head.output_bias": "proj_out_2.bias",
}
CONDITIONING = {
    "conditioning.time_in": "timestep_embedder.linear_1.weight",
    "conditioning.time_in_bias": "timestep_embedder.linear_1.bias",
    "conditioning.time_out": "timestep_embedder.linear_2.weight",
    "conditioning.time_out_bias": "timestep_embedder.linear_2.bias",
    "conditioning.classes": "class_embedder.embedding_table.weight",
}


def shape_of_diffusers(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of the diffusion transformer (DiT or PixArt) that diffusers' ``config`` describes. The shape
    says that the model predicts noise with DDPM's linear schedule, as published models do. Raises :class:`UsageError`
    for another class, or for settings that no DiT has.
    """
    if (name := config.get("_class_name")) == PIXART:
        return shape_of_pixart(config)
    if name != CLASS_NAME:
        raise UsageError(
            f"config.json is of {name}, and of diffusers' models {CLASS_NAME} and {PIXART} alone can be opened"
        )
    fixed = {
        "norm_type": "ada_norm_zero", "activation_fn": "gelu-approximate", "attention_bias": True,
        "norm_elementwise_affine": False, "upcast_attention": False,
    }  # fmt: skip
    for key, value in fixed.items():
        if config.get(key, value) != value:
            raise UsageError(f"config.json has {key} = {config[key]!r}, and DiT has {value!r}")  # fmt: skip
    heads, width = config["num_attention_heads"], config["attention_head_dim"]
    channels = config["in_channels"]
    side = config["sample_size"]
    return ModelShape(
        kind="diffusion", layers=config["num_layers"], embed=heads * width, heads=heads, head_dim=width,
        ffn=4 * heads * width,
        settings={
            "size": (side, side), "channels": channels, "patch": config["patch_size"],
            "classes": config["num_embeds_ada_norm"], "target": "epsilon", "schedule": "linear",
            "variance": (config["out_channels"] or channels) == 2 * channels,
        },
    )  # fmt: skip


def diffusers_config(shape: ModelShape) -> dict[str, Any]:
    """Return the configuration by which diffusers opens a model of ``shape``. Raises :class:`UsageError` for settings
    that diffusers' class does not have.
    """
    settings = settings_of(shape)
    if settings.form == "pixart":
        return pixart_config(shape)
    head = shape.head_dim or 0
    square = len(settings.size) == 2 and settings.size[0] == settings.size[1]
    missing = {
        "a size that is not square or that no patch divides": not square or settings.size[0] % settings.patch,
        "rotary positions": settings.positions != "sines",
        "no classes": not settings.classes,
        "norms of queries and keys": shape.qk_norm,
        f"ffn = {shape.ffn}": shape.ffn != 4 * shape.embed,
        "heads that are not as wide as the model": head * shape.heads != shape.embed,
    }  # fmt: skip
    if lacks := next((what for what, wrong in missing.items() if wrong), ""):
        raise UsageError(
            f"diffusers' {CLASS_NAME} cannot have {lacks}; train a model without, or sample it with Weft"
        )
    return {
        "_class_name": CLASS_NAME, "num_attention_heads": shape.heads, "attention_head_dim": head,
        "in_channels": settings.channels, "out_channels": settings.channels * (1 + settings.variance),
        "num_layers": shape.layers, "dropout": 0.0, "norm_num_groups": 32, "attention_bias": True,
        "sample_size": settings.size[0], "patch_size": settings.patch, "activation_fn": "gelu-approximate",
        "num_embeds_ada_norm": settings.classes, "upcast_attention": False, "norm_type": "ada_norm_zero",
        "norm_elementwise_affine": False, "norm_eps": 1e-5,
    }  # fmt: skip


def diffusers_names(name: str, layers: int, form: str = "dit") -> list[str]:
    """Return all names that diffusers uses for Weft's parameter ``name``: usually one, but one for each of ``layers``
    blocks if diffusers stores the parameter in every block. ``form``: the setting ``form`` of the model, "dit" or
    "pixart".
    """
    if form == "pixart":
        return [pixart_name(name)]
    if name in OF_MODEL:
        return [OF_MODEL[name]]
    if name in CONDITIONING:
        inside = f"norm1.emb.{CONDITIONING[name]}"
        return [f"transformer_blocks.{i}.{inside}" for i in range(layers)]
    _, layer, rest = name.split(".", 2)
    return [f"transformer_blocks.{layer}.{OF_BLOCK[rest]}"]


def to_diffusers(shape: ModelShape, tensors: Mapping[str, T]) -> Iterator[tuple[str, T]]:  # fmt: skip
    """Yield pairs of the name and the values of every parameter, as diffusers stores it. ``tensors``: the parameters of
    a model of ``shape``, by Weft's names.
    """
    settings = settings_of(shape)
    for name, values in tensors.items():
        if name == "embedding.patches":  # [embed, pixels x channels] -> convolution
            square = values.unflatten(1, (settings.patch, settings.patch, -1))
            values = square.permute(0, 3, 1, 2)
        if name.endswith("modulation_table"):
            values = values.unflatten(0, (-1, shape.embed))
        for there in diffusers_names(name, shape.layers, settings.form):
            yield there, values.contiguous().clone()


def from_diffusers(
    shape: ModelShape, tensors: Mapping[str, T]
) -> Callable[[str, Logical, Box], T]:
    """Return a function that gives the values of a box of any parameter of a model of ``shape``. ``tensors``: the
    parameters by diffusers' names. Raises :class:`WeftError` for a parameter that is missing, and for blocks with
    different embeddings of times, which Weft stores once.
    """

    def values(name: str, logical: Logical, box: Box) -> T:
        from weft.layout.dims import slices

        there = diffusers_names(name, shape.layers, settings_of(shape).form)
        if missing := next((each for each in there if each not in tensors), ""):
            raise WeftError(
                f"the weights have no {missing}, which config.json asks for"
            )
        first = tensors[there[0]]
        if not all(torch.equal(first, tensors[each]) for each in there[1:]):
            raise WeftError(
                f"blocks have different {there[0].split('.', 2)[2]}, and a diffusion transformer here shares them"
            )
        if name == "embedding.patches":
            first = first.permute(0, 2, 3, 1).flatten(1)
        if name.endswith("modulation_table"):
            first = first.flatten()
        return first[slices(box)].float()

    return values


def export_diffusers(shape: ModelShape, tensors: Mapping[str, T], out: Path) -> Path:
    """Write a model of ``shape`` with the parameters ``tensors`` to the new folder ``out``, so that diffusers can open
    it. Return the folder.
    """
    from safetensors.torch import save_file

    from weft.new_folder import new_folder

    config = diffusers_config(shape)
    with new_folder(out) as folder:
        text = json.dumps(config, indent=2)
        (folder / "config.json").write_text(text + "\n")
        save_file(
            dict(to_diffusers(shape, tensors)), folder / WEIGHTS, {"format": "pt"}
        )
    return out


def open_diffusers(folder: Path) -> tuple[ModelShape, Callable[[str, Logical, Box], T]]:
    """Open the model in ``folder`` that diffusers has written. Return its shape, and a function that reads a box of one
    of its parameters.
    """
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError) as error:
        raise WeftError(f"{folder} cannot be read as a model of diffusers: {error}") from None  # fmt: skip
    shape = shape_of_diffusers(config)
    return shape, from_diffusers(shape, tensors)
