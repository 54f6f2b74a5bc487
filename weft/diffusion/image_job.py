"""From a recipe with ``model.kind = "diffusion"`` to a job whose samples are noised images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.cache import digest
from weft.data.loader import Corpus
from weft.data.pictures import PictureSet
from weft.data.tokenizer import load_tokenizer
from weft.diffusion.class_words import class_file
from weft.diffusion.image_loader import ImageLoader, PictureOrder
from weft.diffusion.learned_sizes import sizes_file
from weft.errors import UsageError
from weft.plugins import call
from weft.registry import find
from weft.shapes.diffusion_shape import completed_shape, settings_of
from weft.train.setup import Job, completed_job

if TYPE_CHECKING:
    from weft.data.order import Order, RowList
    from weft.data.tokenizer import Tokenizer
    from weft.layout.mesh import Mesh
    from weft.parallel.build import Built
    from weft.recipe import Recipe
    from weft.shapes.diffusion_shape import DiffusionSettings
    from weft.train.step_loader import RunRecords

#: Sections that mean nothing in a run whose samples are images.
NOT_BESIDE_IMAGES = ("tasks", "rl", "roles", "generate", "control", "stream", "loss")


@dataclass(frozen=True)
class ImageJob(Job):
    """A checked recipe of a diffusion transformer that is trained on images.

    Attributes:
        ``pictures``: the images of the data.
    """

    pictures: PictureSet | None = None

    def loader(self, order: Order | RowList, mesh: Mesh) -> ImageLoader:
        """Return this rank's loader of the samples in ``order``, the order of training or validation data."""
        assert self.pictures is not None
        plain = super().loader(order, mesh)
        settings, seed = settings_of(self.shape), self.recipe.data.seed
        return ImageLoader.of(plain, self.pictures, settings, seed)

    def training_loader(
        self, mesh: Mesh, built: Built, recorder: RunRecords, interrupted: Callable[[], bool], stack: ExitStack,
        kept: dict[str, Any],
    ) -> ImageLoader:  # fmt: skip
        """Return the loader of the training images.

        If one rank holds the whole model and the images have classes, the model also samples images at each validation,
        and the loader scores them. The arguments are those of :meth:`Job.training_loader`.
        """
        loader, every = (
            self.loader(self.corpus.train, mesh),
            self.recipe.validation.every,
        )
        assert self.pictures is not None
        whole = holds_all(mesh) and built.model.pipeline is None
        if self.pictures.sizes is not None or not (every and whole and self.pictures.classes):  # fmt: skip
            return loader
        from weft.diffusion.picture_questions import picture_questions

        model: Any = built.model
        asked = picture_questions(model, self.pictures, recorder, every)
        return replace(loader, asked=asked)


def holds_all(mesh: Mesh) -> bool:
    """Return whether this rank is the only one and holds the whole model, so that it can sample images by itself."""
    return mesh.layout.world == 1 and mesh.islands == 1


def opened_pictures(recipe: Recipe) -> PictureSet:
    """Read the images that section ``[data]`` names. Raises :class:`UsageError` if it names none."""
    if len(recipe.data.sources) > 1:
        raise UsageError(
            "model.kind = 'diffusion' learns from one source, and data.sources has several; put the images into one "
            "folder"
        )
    (source,) = recipe.data.sources
    pictures: Any = None
    try:
        technique = find("dataset", source.kind)
    except UsageError:
        technique = None
    if technique is not None:
        pictures = call(technique, source.settings)(source.path)
    if not isinstance(pictures, PictureSet):
        raise UsageError(
            f"model.kind = 'diffusion' learns from images, and data.kind = {source.kind!r} has texts; set data.kind = "
            "'images' and data.path = 'sklearn:digits' or a folder, or data.kind = 'videos'"
        )
    return pictures


def check_beside_images(recipe: Recipe) -> None:
    """Raise :class:`UsageError` if the recipe has a section that does not apply to a run on images."""
    for name in NOT_BESIDE_IMAGES:
        if getattr(recipe, name) != type(recipe).model_fields[name].default:
            raise UsageError(
                f"[{name}] is of models that write texts, and model.kind = 'diffusion' makes images; leave it out"
            )
    if recipe.model.origin is not None:
        raise UsageError(
            f"model.from = {recipe.model.origin!r} with model.kind: the weights say which model they are of; leave "
            "model.kind out"
        )
    if isinstance(recipe.data.validation, str):
        raise UsageError(
            f"data.validation = {recipe.data.validation!r} is a file, and images are held out as a share; set "
            "data.validation = 0.1"
        )


def prepare_images(recipe: Recipe) -> ImageJob:
    """Open the images of a recipe, complete the model's shape, and check that both fit together.

    Raises :class:`UsageError` or :class:`weft.errors.WeftError` if they do not fit, or the images cannot be read.
    """
    check_beside_images(recipe)
    pictures = opened_pictures(recipe)
    shape = completed_shape(recipe.model, about(pictures))
    settings = settings_of(shape)
    for name, value in about(pictures).items():
        if getattr(settings, name) != value and not (
            name == "classes" and (settings.text or settings.classes >= value)
        ):
            raise UsageError(
                f"model.settings.{name} = {getattr(settings, name)}, and the images have {value}; leave it out"
            )
    notes = (*pictures.notes, *caption_notes(pictures, settings))
    notes = (*notes, *bucket_notes(pictures, settings))
    data = recipe.data.model_copy(update={"seq_len": settings.patches})
    recipe = recipe.model_copy(update={"model": shape, "data": data})
    job = completed_job(recipe, partial(_corpus, recipe, pictures), ImageJob)
    beyond = [g * p for g, p in zip(settings.grid, settings.patch_size, strict=True)]
    if beyond != [*settings.size]:
        note = (
            f"images of {list(settings.size)} are padded to {beyond}, which patches of "
            f"{list(settings.patch_size)} divide; the loss does not count what was added"
        )
        notes = (*notes, note)
    files = {**job.files, **class_file(pictures.classes), **encoder_file(pictures)}
    files |= sizes_file(pictures.sizes)
    notes = (*job.notes, *notes)
    return replace(job, pictures=pictures, files=files, notes=notes)


def bucket_notes(pictures: PictureSet, settings: DiffusionSettings) -> tuple[str, ...]:
    """Return a line for the user that says how many of ``pictures`` have each size; no line if all have one size.
    ``settings``: settings of the model.

    Raises :class:`UsageError` for a size that is no multiple of the patch size.
    """
    if pictures.sizes is None:
        return ()
    from weft.data.size_buckets import bucket_line

    if (pictures.sizes % settings.patch).any():
        raise UsageError(
            f"data.settings.buckets has sides that are no multiples of model.settings.patch = {settings.patch}; "
            "set others"
        )
    return (
        f"images of several sizes, {bucket_line(pictures.sizes)}; loss and attention leave out what is beyond each",
    )


def encoder_file(pictures: PictureSet) -> Mapping[str, bytes]:
    """Return the file in which a checkpoint records the autoencoder of ``pictures``, as contents by file name.

    The result is empty if ``pictures`` are pixels and not latents.
    """
    if not pictures.encoder:
        return {}
    from weft.diffusion.latent_pictures import autoencoder_file

    return autoencoder_file(pictures.encoder)


def caption_notes(pictures: PictureSet, settings: DiffusionSettings) -> tuple[str, ...]:
    """Return lines for the user if some captions of ``pictures`` are longer than the model with these ``settings``
    reads.

    Raises :class:`UsageError` if the model reads texts and the images have none, or if its settings allow no words.
    """
    from weft.data.captions import caption_words

    if not settings.text:
        return ()
    if not settings.words:
        raise UsageError(
            "model.settings.words = 0 reads states of an encoder of others, and captions are words; set words = 16"
        )
    if not pictures.said:
        raise UsageError(
            "model.settings.text is set, and the images have neither captions (a .txt file beside each) nor classes; "
            "leave it out, or write some"
        )
    counts = [len(caption_words(caption)) for caption in pictures.said]
    longer = sum(count > settings.words for count in counts)
    if not longer:
        return ()
    return (
        f"{longer:,} of {len(counts):,} captions have more than {settings.words} words, of which the first are read; "
        f"set model.settings.words = {max(counts)} to read all",
    )


def about(pictures: PictureSet) -> Mapping[str, Any]:
    """Return the model settings that follow from ``pictures``: size, channels and number of classes."""
    _, channels, *size = pictures.pixels.shape
    return {
        "size": tuple(size), "channels": channels, "classes": len(pictures.classes),
    }  # fmt: skip


def _corpus(recipe: Recipe, pictures: PictureSet, own: Tokenizer | None) -> Corpus:
    """Return a corpus without documents, whose orders are of images."""
    data = recipe.data
    (source,) = data.sources
    out = pictures.held_out(data.held_out, data.seed)
    if out.all():
        raise UsageError(
            f"{source.shown}{pictures.part}: no image is left to learn from ({len(pictures)} are held out); give fewer "
            "clusters, or a smaller data.validation"
        )
    both = [
        PictureOrder((), (), data.seed, epochs, indices=np.flatnonzero(side), fixed=fixed)
        for side, epochs, fixed in ((~out, data.epochs, False), (out, 1, True))
    ]  # fmt: skip
    identity = digest(pictures.fingerprint, data.seed, data.held_out)
    classes = f" of {len(pictures.classes)} classes" if pictures.classes else ""
    size = " x ".join(map(str, pictures.pixels.shape[1:]))
    what = "clips" if pictures.pixels.ndim == 5 else "images"
    line = f"{source.shown}{pictures.part}: {len(pictures):,} {what}{classes} ({out.sum():,} for validation), {size}"
    return Corpus(
        load_tokenizer("bytes", (), data.cache),
        both[0],
        both[1] if out.any() else None,
        line,
        identity,
        validated=identity,
    )
