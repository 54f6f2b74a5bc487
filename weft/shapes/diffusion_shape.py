"""A diffusion transformer in numbers: its settings, the grid of its patches, and the table of its parameters."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from weft.errors import UsageError
from weft.recipe import ModelShape
from weft.section import Section, validated
from weft.shapes.dim import Dim
from weft.shapes.parameters import Parameter, ParameterRows, Table

if TYPE_CHECKING:
    from weft.shapes.shape import Shape

#: Waves (sines and cosines) that a time becomes before the first product.
WAVES = 256
#: Vectors that condition a block: shift, scale and gate of attention and of the feed-forward; and the last layer's.
OF_BLOCK, OF_HEAD = 6, 2


class DiffusionSettings(Section):
    """Settings of ``[model] kind = "diffusion"``: a transformer that generates images or videos from noise."""

    size: tuple[PositiveInt, ...] = Field(
        (),
        max_length=3,
        description=(
            "Height and width of an image, or frames, height and width of a video. If not set, the sizes "
            "are those of the data."
        ),
    )
    channels: NonNegativeInt = Field(
        0,
        description="Values of a pixel: 1 for grey, 3 for colours. 0: as many as the data have.",
    )
    classes: NonNegativeInt = Field(
        0,
        description="Number of classes of images, one of which the user can ask for. 0: as many as the data have.",
    )
    patch: PositiveInt = Field(
        2, description="Height and width of a patch in pixels. A patch is a token."
    )
    patch_frames: PositiveInt = Field(
        1, description="Number of frames in a patch of a video."
    )
    text: NonNegativeInt = Field(
        0,
        description=(
            "Width of the text vectors that the blocks read by cross-attention. 0: the model reads no text."
        ),
    )
    words: NonNegativeInt = Field(
        16,
        description=(
            "Number of words of a caption that the model reads, by a table that is trained with it, if 'text' "
            "is set. 0: the text vectors come from another program's text encoder."
        ),
    )
    word_rows: int = Field(
        4096,
        ge=2,
        description=(
            "Rows of the trained table of words; a hash of a word and of its pieces selects its rows, so that "
            "words may share rows."
        ),
    )
    positions: Literal["sines", "rotary"] = Field(
        "sines",
        description=(
            "How blocks know where a patch is. 'sines': sines of row and column are added to the patches (DiT); "
            "'rotary': queries and keys are rotated by row, column and frame."
        ),
    )
    form: Literal["dit", "pixart"] = Field(
        "dit",
        description=(
            "How time, class and text enter a block. 'dit': each block projects time and class by a weight of "
            "its own; 'pixart': all blocks share one projection of the time, to which each adds a table of "
            "its own, and text vectors pass two layers before cross-attention (PixArt)."
        ),
    )
    target: Literal["flow", "epsilon", "v", "x"] = Field(
        "flow",
        description=(
            "What the model predicts. 'flow': the velocity on the straight line from noise to image (flow "
            "matching). With the noise levels of 'schedule': 'epsilon', the noise; 'x', the image; 'v', the "
            "combination of both of Salimans & Ho 2022."
        ),
    )
    schedule: Literal["cosine", "linear"] = Field(
        "cosine",
        description=(
            "Noise level as a function of time, for the targets 'epsilon', 'v' and 'x': 'cosine' (Nichol & "
            "Dhariwal 2021) or 'linear' (Ho et al. 2020). The target 'flow' does not use it."
        ),
    )
    times: Literal["uniform", "logit-normal"] = Field(
        "uniform",
        description=(
            "How training draws the time of each image: 'uniform' between 0 and 1, or 'logit-normal', which "
            "draws middle times more often (Esser et al. 2024)."
        ),
    )
    drop: float = Field(
        0.1,
        ge=0,
        le=1,
        description=(
            "Share of the training images whose class or text is left out, so that the model also learns to "
            "work without one, as classifier-free guidance needs."
        ),
    )
    variance: bool = Field(
        False,
        description=(
            "Give the model a second output, a predicted variance, which training and samplers do not use. It "
            "is needed to load published weights that have one."
        ),
    )
    zero: bool = Field(
        True,
        description=(
            "Initialise the gates of the blocks and the output layer with zeros, so that every block is the "
            "identity at first (adaLN-Zero). False: with random values."
        ),
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if len(self.size) == 1:
            raise ValueError("size has height and width, and frames before them")
        if self.patch_frames > 1 and len(self.size) == 2:
            raise ValueError("patch_frames is of videos, and size has no frames")
        if self.text and self.classes:
            raise ValueError(
                "text and classes are two ways to say what to make; leave one out"
            )
        if self.form == "pixart" and self.classes:
            raise ValueError(
                "form 'pixart' reads texts; set 'text' in place of classes"
            )
        return self

    @property
    def of_video(self) -> bool:
        """Whether the model makes videos."""
        return len(self.size) == 3

    @property
    def patch_size(self) -> tuple[int, ...]:
        """Sizes of a patch: height and width in pixels; for a video, the number of frames comes before them."""
        return (self.patch_frames,) * self.of_video + (self.patch, self.patch)

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of patches along each axis. Patches at the end may reach beyond the image."""
        return tuple(
            -(-n // p) for n, p in zip(self.size, self.patch_size, strict=True)
        )

    @property
    def patches(self) -> int:
        """Number of patches of an image or a video."""
        return prod(self.grid)

    @property
    def patch_values(self) -> int:
        """Number of values in a patch: its pixels, of all its frames, times the channels."""
        return self.channels * prod(self.patch_size)

    @property
    def output_values(self) -> int:
        """Number of values that the last layer computes per patch: those of the patch, twice if it predicts a
        variance.
        """
        return self.patch_values * (1 + self.variance)


def settings_of(shape: ModelShape) -> DiffusionSettings:
    """Return the checked settings of a model of kind "diffusion". Raises :class:`UsageError` for wrong ones."""
    return validated(DiffusionSettings, dict(shape.settings), "model.settings")


#: Settings of ``[model]`` that a diffusion transformer reads.
READ = {
    "kind", "settings", "vocab", "layers", "embed", "heads", "kv_heads", "head_dim", "ffn", "qk_norm", "norm_eps",
    "rope_theta", "init_std", "adapter",
}  # fmt: skip


def check_settings(shape: ModelShape) -> None:
    """Check the settings of a model of kind "diffusion", and refuse settings that only models of tokens have.

    Raises :class:`ValueError` with a line that names the setting.
    """
    fields = type(shape).model_fields
    for name in sorted(shape.model_fields_set - READ):
        if getattr(shape, name) != fields[name].default:
            raise ValueError(
                f"model.{name} is of models of tokens, and kind = 'diffusion' has patches; leave it out "
                "(docs/how-to/images.md lists what it reads)"
            )
    if shape.kv_heads != shape.heads:
        raise ValueError(
            f"model.kv_heads = {shape.kv_heads}, and every head of a diffusion transformer has its own keys; leave it "
            "out"
        )
    try:
        settings = settings_of(shape)
    except UsageError as error:
        raise ValueError(str(error)) from None
    axes = 3 if settings.of_video else 2
    if settings.positions == "rotary" and (shape.head_dim or 0) < 2 * axes:
        raise ValueError(
            f"model.head_dim = {shape.head_dim} has no pair to rotate for each of {axes} axes; raise it, or set "
            "settings.positions = 'sines'"
        )


def completed_shape(shape: ModelShape, of_data: Mapping[str, Any]) -> ModelShape:
    """Return ``shape`` with the settings that it leaves to the data: ``size``, ``channels`` and ``classes``.

    ``of_data``: the values of these settings in the data. Settings that ``shape`` has stay. With text conditions
    there are no classes.
    """
    settings = settings_of(shape)
    values = {k: v for k, v in of_data.items() if not getattr(settings, k)}
    if settings.text:
        values.pop("classes", None)
    whole = settings.model_copy(update=values).model_dump(mode="json")
    return shape.model_copy(update={"settings": whole})


class _DiffusionRows(ParameterRows):
    """Collects the rows of a diffusion transformer."""

    def linear(self, path: str, out: Dim, into: Dim, std: float | None = None) -> None:
        """Add a weight ``[out, in]`` that each image, not each patch, is multiplied with, and its bias."""
        std = self.std if std is None else std
        self.add(path, out, into, std=std, products=0)
        self.add(f"{path}_bias", out, std=0)

    def diffusion_block(self, layer: int, settings: DiffusionSettings) -> None:
        """Add the rows of the block with index ``layer``."""
        model, path = self.model, f"blocks.{layer}"
        width, hidden = model.head_dim or 0, Dim("ffn", model.ffn or 0)
        heads = Dim("heads", model.heads, width)
        conditions = Dim("conditions", OF_BLOCK * model.embed)
        self.modulation(path, conditions, settings)
        sides = {"attention": self.embed}
        if settings.text:
            pixart = settings.form == "pixart"
            text = self.embed if pixart else Dim("text", settings.text)
            sides["cross_attention"] = text
        for side, into in sides.items():
            inside = f"{path}.{side}"
            self.projected(inside, {"wq": heads}, self.embed, model.adapter)
            self.projected(inside, {"wk": heads, "wv": heads}, into, model.adapter)
            for name in ("bq", "bk", "bv"):
                self.add(f"{inside}.{name}", heads, std=0)
            if model.qk_norm:
                for name in ("q_norm", "k_norm"):
                    self.norm(f"{inside}.{name}", Dim("head_dim", width))
            self.projected(inside, {"wo": self.embed}, heads, model.adapter)
            self.add(f"{inside}.bo", self.embed, std=0)
        self.projected(f"{path}.ffn", {"up": hidden}, self.embed, model.adapter)
        self.add(f"{path}.ffn.up_bias", hidden, std=0)
        self.projected(f"{path}.ffn", {"down": self.embed}, hidden, model.adapter)
        self.add(f"{path}.ffn.down_bias", self.embed, std=0)

    def modulation(
        self, path: str, conditions: Dim, settings: DiffusionSettings
    ) -> None:
        """Add what makes the shifts, scales and gates ``conditions`` of a block or the last layer at ``path``."""
        if settings.form == "pixart":
            self.add(f"{path}.modulation_table", conditions, std=self.zeroed(settings))
            return
        self.linear(f"{path}.modulation", conditions, self.embed, self.zeroed(settings))

    def zeroed(self, settings: DiffusionSettings) -> float:
        """Return the standard deviation of the initial values of weights that adaLN-Zero sets to zero at first.

        It is 0 if ``settings.zero`` is set, else that of other weights.
        """
        return 0.0 if settings.zero else self.std


def diffusion_parameters(shape: ModelShape) -> list[Parameter]:
    """Return the rows of the parameter table of a diffusion transformer.

    If the size of the images is not known yet, the table is for images of one pixel.
    """
    settings = settings_of(shape)
    if not (settings.size and settings.channels):
        size = settings.size or (1, 1)
        update = {"size": size, "channels": settings.channels or 1}
        settings = settings.model_copy(update=update)
    rows = _DiffusionRows(shape)
    rows.linear("embedding.patches", rows.embed, Dim("patch", settings.patch_values))
    rows.linear("conditioning.time_in", rows.embed, Dim("waves", WAVES))
    rows.linear("conditioning.time_out", rows.embed, rows.embed)
    if settings.classes:
        classes = Dim("classes", settings.classes + 1)
        about: dict[str, Any] = {"std": rows.std, "products": 0}
        rows.add("conditioning.classes", classes, rows.embed, **about)
    if settings.form == "pixart":
        shared = Dim("conditions", OF_BLOCK * shape.embed)
        rows.linear(
            "conditioning.modulation", shared, rows.embed, rows.zeroed(settings)
        )
        if settings.text:
            rows.linear("conditioning.text_in", rows.embed, Dim("text", settings.text))
            rows.linear("conditioning.text_out", rows.embed, rows.embed)
    if settings.text and settings.words:
        table = Dim("word_rows", settings.word_rows)
        width = Dim("text", settings.text)
        about = {"std": rows.std, "products": 0}
        rows.add("conditioning.words", table, width, **about)
        rows.add("conditioning.places", Dim("words", settings.words), width, **about)
    for layer in range(shape.layers):
        rows.diffusion_block(layer, settings)
    zeroed = rows.zeroed(settings)
    conditions = Dim("conditions", OF_HEAD * shape.embed)
    rows.modulation("head", conditions, settings)
    rows.linear("head.output", Dim("patch", settings.output_values), rows.embed, zeroed)
    return [
        row._replace(products=row.numel) if row.name in EACH_PATCH else row
        for row in rows.rows
    ]


def diffusion_layer(shape: ModelShape, layer: int) -> Table:
    """Return the rows of the parameter table for the block with index ``layer``, by name."""
    rows = _DiffusionRows(shape)
    rows.diffusion_block(layer, settings_of(shape))
    return {row.name: row for row in rows.rows}


#: Weights outside of blocks with which each patch is multiplied.
EACH_PATCH = ("embedding.patches", "head.output")


def diffusion_numbers(shape: ModelShape) -> "Shape":
    """Return the sizes of a diffusion transformer from which the planner computes time and memory.

    They are the sizes of a decoder of tokens with equal layers. The values of a patch take the place of its
    vocabulary.
    """
    # with NumPy, which a command that only reads a recipe does without
    from weft.shapes.shape import shape_of

    settings = settings_of(shape)
    rows = diffusion_parameters(shape)
    inside = [row for row in rows if row.name.startswith("blocks.")]
    plain = ModelShape(
        layers=shape.layers,
        embed=shape.embed,
        heads=shape.heads,
        head_dim=shape.head_dim,
        ffn=shape.ffn,
        vocab=max(1, settings.output_values),
    )
    return replace(
        shape_of(plain),
        dense_weights=sum(row.products for row in inside) / shape.layers,
        extras=sum(row.numel for row in inside if not row.products) / shape.layers,
        gated=0,
    )
