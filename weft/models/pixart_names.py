"""Configurations and names of ``PixArtTransformer2DModel`` of diffusers, a transformer that reads texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.errors import UsageError
from weft.recipe import ModelShape
from weft.shapes.diffusion_shape import settings_of

#: The class that a configuration names.
PIXART = "PixArtTransformer2DModel"
#: Sides of latents from which on PixArt moves the places of patches together, which is not read here.
FAR_SIDE = 128
#: Beginnings of names here and there.
OF_PIXART = {
    "embedding.patches": "pos_embed.proj.",
    "conditioning.time_in": "adaln_single.emb.timestep_embedder.linear_1.",
    "conditioning.time_out": "adaln_single.emb.timestep_embedder.linear_2.",
    "conditioning.modulation": "adaln_single.linear.",
    "conditioning.text_in": "caption_projection.linear_1.",
    "conditioning.text_out": "caption_projection.linear_2.",
    "head.output": "proj_out.",
}
#: The same inside of blocks.
IN_BLOCK = {"ffn.up": "ff.net.0.proj.", "ffn.down": "ff.net.2."}
SIDES = {"attention": "attn1", "cross_attention": "attn2"}
PRODUCTS = {"q": "to_q.", "k": "to_k.", "v": "to_v.", "o": "to_out.0."}


def pixart_name(name: str) -> str:
    """Return the name in diffusers of a PixArt's parameter ``name``."""
    kind = "bias" if name.endswith("_bias") else "weight"
    stem = name.removesuffix("_bias")
    if name == "head.modulation_table":
        return "scale_shift_table"
    if stem in OF_PIXART:
        return OF_PIXART[stem] + kind
    _, layer, rest = stem.split(".", 2)
    block = f"transformer_blocks.{layer}"
    if rest == "modulation_table":
        return f"{block}.scale_shift_table"
    if rest in IN_BLOCK:
        return f"{block}.{IN_BLOCK[rest]}{kind}"
    side, _, product = rest.partition(".")
    kind = {"w": "weight", "b": "bias"}[product[0]]
    return f"{block}.{SIDES[side]}.{PRODUCTS[product[1]]}{kind}"


def shape_of_pixart(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of the PixArt that diffusers' ``config`` describes. The shape says that the model predicts noise
    with DDPM's linear schedule. Raises :class:`UsageError` for models that read picture sizes as a condition, or that
    interpolate positions.
    """
    side, channels = config["sample_size"], config["in_channels"]
    more = config.get("use_additional_conditions")
    scale = config.get("interpolation_scale") or max(side // 64, 1)
    if more or (more is None and side == FAR_SIDE) or scale != 1:
        raise UsageError(
            f"config.json has sample_size = {side} with places moved together or sizes as a condition; models of up to "
            "512 pixels, without these, can be opened"
        )
    heads, width = config["num_attention_heads"], config["attention_head_dim"]
    return ModelShape(
        kind="diffusion", layers=config["num_layers"], embed=heads * width, heads=heads, head_dim=width,
        ffn=4 * heads * width, norm_eps=config.get("norm_eps", 1e-6),
        settings={
            "size": (side, side), "channels": channels, "patch": config["patch_size"], "form": "pixart",
            "text": config["caption_channels"], "words": 0, "target": "epsilon", "schedule": "linear",
            "variance": (config["out_channels"] or channels) == 2 * channels,
        },
    )  # fmt: skip


def pixart_config(shape: ModelShape) -> dict[str, Any]:
    """Return the configuration by which diffusers opens a PixArt of ``shape``. Raises :class:`UsageError` for settings
    that diffusers' class does not have.
    """
    settings = settings_of(shape)
    head = shape.head_dim or 0
    square = len(settings.size) == 2 and settings.size[0] == settings.size[1]
    missing = {
        "a size that is not square or that no patch divides": not square or settings.size[0] % settings.patch,
        f"a side of {max(settings.size)} pixels": max(settings.size) >= FAR_SIDE,
        "rotary positions": settings.positions != "sines",
        "no text": not settings.text,
        "a table of words": settings.words,
        "norms of queries and keys": shape.qk_norm,
        f"ffn = {shape.ffn}": shape.ffn != 4 * shape.embed,
        "heads that are not as wide as the model": head * shape.heads != shape.embed,
    }  # fmt: skip
    if lacks := next((what for what, wrong in missing.items() if wrong), ""):
        raise UsageError(
            f"diffusers' {PIXART} cannot have {lacks}; train a model without, or sample it with Weft"
        )
    return {
        "_class_name": PIXART, "num_attention_heads": shape.heads, "attention_head_dim": head,
        "in_channels": settings.channels, "out_channels": settings.channels * (1 + settings.variance),
        "num_layers": shape.layers, "cross_attention_dim": shape.embed, "attention_bias": True,
        "sample_size": settings.size[0], "patch_size": settings.patch, "activation_fn": "gelu-approximate",
        "num_embeds_ada_norm": 1000, "norm_type": "ada_norm_single", "norm_elementwise_affine": False,
        "norm_eps": shape.norm_eps, "use_additional_conditions": False, "caption_channels": settings.text,
    }  # fmt: skip
