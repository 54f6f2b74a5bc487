"""A transformer that makes images or videos of noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.refusal import Rule
from weft.registry import register

if TYPE_CHECKING:
    from weft.models.transformer import Transformer
    from weft.recipe import ModelShape, Recipe
    from weft.shapes.parameters import Parameter
    from weft.shapes.shape import Shape
    from weft.train.setup import Job


@register(
    "architecture",
    "diffusion",
    title="Diffusion transformers",
    paper="Peebles & Xie 2023 (DiT); Lipman et al. 2023 (flow matching)",
    recipe="digits.toml",
    proof="tests/models/test_diffusion_transformer.py",
    figure="loss, gradients and parameters of dp, shard, tp, cp and pp equal to 1e-10 in float64",
    rules=(
        Rule("keys of images in a scheme of tokens", "layout shape",
             lambda a: a.layout.cp > 1 and (a.layout.context != "zigzag" or a.layout.head_ranks > 1),
             "images see all their patches, and layout.context = {0.layout.context!r} with ulysses = "
             "{0.layout.head_ranks} is for texts, which see earlier tokens alone", "leave both out"),
        Rule("images in a plan of documents", "layout shape", lambda a: bool(a.layout.balance),
             "layout.balance = {0.layout.balance!r} places documents, and images are alike", "leave it out"),
        Rule("images in parts of layers", "layout shape",
             lambda a: bool(a.layout.overlap) or a.layout.vocab_barriers > 0 or a.layout.skip > 0,
             "layout.overlap, layout.vocab_barriers and layout.skip know the layers of models of tokens",
             "leave them out"),
        Rule("images in compiled blocks", "train shape", lambda a: a.train.compile,
             "train.compile knows the blocks of models of tokens", "leave it out"),
    ),
)  # fmt: skip
class DiffusionArchitecture:
    """Architecture of diffusion transformers (``model.kind = "diffusion"``): checks of the shape, parameters, sizes,
    class of the model, and job of training.
    """

    @staticmethod
    def check(shape: ModelShape) -> None:
        """Raise :class:`ValueError` if the settings of ``shape``, the section ``[model]``, are wrong."""
        from weft.shapes.diffusion_shape import check_settings

        check_settings(shape)

    @staticmethod
    def parameters(shape: ModelShape) -> list[Parameter]:
        """Return descriptions of all parameters of a model of ``shape``: names, dimensions and initial values."""
        from weft.shapes.diffusion_shape import diffusion_parameters

        return diffusion_parameters(shape)

    @staticmethod
    def numbers(shape: ModelShape) -> Shape:
        """Return the sizes of a model of ``shape`` from which the planner computes time and memory."""
        from weft.shapes.diffusion_shape import diffusion_numbers

        return diffusion_numbers(shape)

    @staticmethod
    def model() -> type[Transformer]:
        """Return the class of the model, a subclass of :class:`Transformer`."""
        from weft.models.diffusion_transformer import DiffusionTransformer

        return DiffusionTransformer

    @staticmethod
    def prepare(recipe: Recipe) -> Job:
        """Open the images or videos of ``recipe``, and check them against the model. Return the job that trains on
        them.
        """
        from weft.diffusion.image_job import prepare_images

        return prepare_images(recipe)
