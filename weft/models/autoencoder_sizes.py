"""Sizes of an autoencoder, read from and written as diffusers' configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, PositiveInt

from weft.errors import UsageError
from weft.section import Section, validated

#: The class that a configuration names.
CLASS_NAME = "AutoencoderKL"
#: Kinds of blocks that a configuration lists, one for each resolution.
BLOCKS = {"down_block_types": "DownEncoderBlock2D", "up_block_types": "UpDecoderBlock2D"}  # fmt: skip
#: Settings of diffusers' class that have no other value here, or only say what others have been trained with.
FIXED = {"act_fn": "silu", "latents_mean": None, "latents_std": None}


class AutoencoderSettings(Section):
    """Sizes of an autoencoder, which maps images to smaller latents and back. The fields have the names of diffusers'
    ``config.json``.
    """

    in_channels: PositiveInt = Field(
        3, le=1 << 16, description="Number of values (channels) of a pixel of an image."
    )
    latent_channels: PositiveInt = Field(
        4, le=1 << 16, description="Number of values (channels) of a latent."
    )
    block_out_channels: tuple[Annotated[int, Field(ge=1, le=1 << 16)], ...] = Field(
        (64,),
        min_length=1,
        description=(
            "Number of channels at each resolution, the highest resolution first. Each resolution is "
            "half the one before."
        ),
    )
    layers_per_block: PositiveInt = Field(
        1,
        le=64,
        description="Number of residual blocks at each resolution of the encoder; the decoder has one more.",
    )
    norm_num_groups: PositiveInt = Field(
        32, description="Number of groups of channels in each group norm."
    )
    scaling_factor: float = Field(
        0.18215,
        gt=0,
        allow_inf_nan=False,
        description="Factor by which latents are multiplied, after 'shift_factor' was subtracted.",
    )
    shift_factor: float | None = Field(
        None,
        allow_inf_nan=False,
        description="Number that is subtracted from latents before they are scaled; if not set: 0.",
    )
    use_quant_conv: bool = Field(
        True, description="Whether a 1 x 1 convolution follows the encoder."
    )
    use_post_quant_conv: bool = Field(
        True, description="Whether a 1 x 1 convolution precedes the decoder."
    )
    mid_block_add_attention: bool = Field(
        True, description="Whether there is attention at the lowest resolution."
    )

    @property
    def factor(self) -> int:
        """Number of pixels, along each side of an image, that one latent stands for."""
        return 2 ** (len(self.block_out_channels) - 1)


def autoencoder_settings(config: Mapping[str, Any]) -> AutoencoderSettings:
    """Return the sizes of the autoencoder that diffusers' ``config`` describes.

    Raises :class:`UsageError` if ``config`` describes another class or unknown blocks.
    """
    if (name := config.get("_class_name")) != CLASS_NAME:
        raise UsageError(f"config.json is of {name}, and an autoencoder is {CLASS_NAME}")  # fmt: skip
    if config.get("out_channels", config.get("in_channels")) != config.get("in_channels"):  # fmt: skip
        raise UsageError("config.json has other out_channels than in_channels, which must be alike")  # fmt: skip
    for key, block in BLOCKS.items():
        kinds = config.get(key, ())
        kinds = kinds if isinstance(kinds, list | tuple) else [kinds]
        if strange := [kind for kind in kinds if kind != block]:
            raise UsageError(
                f"config.json has blocks {strange[0]!r} in {key}, and only {block} can be opened"
            )
    for key, value in FIXED.items():
        if config.get(key, value) != value:
            raise UsageError(f"config.json has {key} = {config[key]!r}, and only {value!r} can be opened")  # fmt: skip
    fields = AutoencoderSettings.model_fields
    known = {key: value for key, value in config.items() if key in fields}
    settings = validated(AutoencoderSettings, known, "config.json")
    if odd := [w for w in settings.block_out_channels if w % settings.norm_num_groups]:
        raise UsageError(
            f"config.json has {odd[0]} channels, which {settings.norm_num_groups} groups of a norm do not divide"
        )
    return settings


def autoencoder_config(settings: AutoencoderSettings) -> dict[str, Any]:
    """Return the configuration by which diffusers opens an autoencoder with these sizes."""
    stages = len(settings.block_out_channels)
    return {
        "_class_name": CLASS_NAME, **settings.model_dump(mode="json"), "out_channels": settings.in_channels,
        **{key: [block] * stages for key, block in BLOCKS.items()}, "act_fn": "silu",
    }  # fmt: skip
