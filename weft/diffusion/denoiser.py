"""A diffusion transformer as samplers call it: whole, or embedding, blocks and last layer one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import warn

import torch

from weft.data.size_buckets import ImageSize
from weft.diffusion.class_words import class_names
from weft.diffusion.learned_sizes import learned_sizes
from weft.diffusion.noise_process import NoiseProcess
from weft.errors import UsageError
from weft.models.autoencoder_files import AUTOENCODER_FILE
from weft.models.diffusion_transformer import DiffusionBlock, DiffusionTransformer
from weft.models.patches import patchify, unpatchify

if TYPE_CHECKING:
    from weft.models.autoencoder import Autoencoder
    from weft.models.diffusion_transformer import Signals
    from weft.models.patch_attention import AttendPatches

T = torch.Tensor


class DenoisingBlock:
    """One transformer block of a diffusion model as a callable, whose attention can be replaced for a call.

    Samplers that spread a sample over ranks use it to attend to keys of other ranks. ``block``: the model's block.
    """

    def __init__(self, block: DiffusionBlock) -> None:
        self.block = block

    def __call__(self, x: T, signals: Signals, attend: AttendPatches | None = None) -> T:  # fmt: skip
        """Return the output for ``x`` ``[batch, patches, embed]``, of the same shape.

        ``signals``: what :meth:`Denoiser.signals` returns for the same patches. ``attend``: attention in place of the
        model's own, called with the layer's index and queries, keys and values of the patches in ``x``, each
        ``[batch, heads, patches, head_dim]``; it may look at keys of other patches that it has kept.
        """
        with seeing_by([self.block], attend):
            return self.block.body(x, signals, x)


class Denoiser:
    """A diffusion transformer on one device, as samplers call it.

    Attributes:
        ``model``: the model.
        ``settings``: its settings: size of the images, patches, classes.
        ``process``: the noise process with which the model was trained.
        ``blocks``: the model's blocks as callables, in order.
        ``class_names``: names of its classes; empty if they are not known.
        ``autoencoder``: the autoencoder whose latents the model makes; None: the model makes pixels.
        ``learned``: sizes of images in pixels that it has learned, that of most images first; empty if it has learned
            its own size alone.
    """

    def __init__(
        self,
        model: DiffusionTransformer,
        class_names: Sequence[str] = (),
        autoencoder: Autoencoder | None = None,
        learned: Sequence[ImageSize] = (),
    ) -> None:
        self.autoencoder, self.learned = autoencoder, tuple(learned)
        self.model, self.settings = model, model.settings
        self.class_names = tuple(class_names)
        self.process = NoiseProcess.of(self.settings)
        blocks: list[Any] = [*model.blocks.values()]
        self.blocks = [DenoisingBlock(block) for block in blocks]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what the model makes, pixels or latents: channels, frames if it is a video, height, width."""
        return (self.settings.channels, *self.settings.size)

    @property
    def factor(self) -> int:
        """Number of image pixels, along each side, for one pixel of the latents that the model makes; 1 without an
        autoencoder.
        """
        return self.autoencoder.settings.factor if self.autoencoder else 1

    @property
    def pixel_size(self) -> tuple[int, ...]:
        """Height and width of an image, or frames, height and width of a video, in pixels."""
        return tuple(side * self.factor for side in self.settings.size)

    def pixels(self, images: T) -> T:
        """Return the pixels of sampled ``images`` ``[images, channels, (frames,) height, width]`` on the CPU; latents
        are decoded.
        """
        whole = images.float().cpu()
        if self.autoencoder is None:
            return whole
        from weft.diffusion.latent_pictures import in_batches

        return in_batches(self.autoencoder.decoded, whole)

    @property
    def dropped(self) -> int:
        """Class number that stands for "no condition", as in classifier-free guidance: the number of the model's
        classes.
        """
        return self.settings.classes

    @property
    def dtype(self) -> torch.dtype:
        """Type of the tensors in which the model computes."""
        return self.model.conditioning.time_in.dtype

    def __call__(
        self, noised: T, time: T, condition: T, attend: AttendPatches | None = None
    ) -> T:
        """Return the prediction for ``noised``, of the same shape.

        ``noised``: ``[batch, channels, (frames,) height, width]``; ``time``: ``[batch]``, from 0 (noise) to 1;
        ``condition``: numbers of classes ``[batch]`` (``settings.classes`` stands for no class), or text states
        ``[batch, words, text]``. ``attend``: see :class:`DenoisingBlock`.
        """
        x, signals = self.embed(noised), self.signals(time, condition)
        with seeing_by([each.block for each in self.blocks], attend):
            for each in self.blocks:
                x = each.block.body(x, signals, x)
        return self.final(x, signals)

    def sized(self, size: Sequence[int]) -> Denoiser:
        """Return the same denoiser for images of another size. ``size``: height and width in pixels.

        Raises :class:`UsageError` for a side that is larger than in training, or that patches do not divide.
        """
        factor = self.factor
        most = [side * factor for side in self.model.settings.size]
        patch = self.settings.patch * factor
        if len(size) != 2 or len(most) != 2:
            raise UsageError(
                f"--size {','.join(map(str, size))} should be height and width of an image, such as 8,6"
            )
        if any(
            side > limit or side < 1 or (side % patch and side != limit)
            for side, limit in zip(size, most, strict=True)
        ):
            raise UsageError(
                f"--size {size[0]},{size[1]}: this model makes images of up to {most[0]},{most[1]} pixels, in patches "
                f"of {patch}"
            )
        other = Denoiser(self.model, self.class_names, self.autoencoder, self.learned)
        sides = tuple(side // factor for side in size)
        other.settings = self.settings.model_copy(update={"size": sides})
        return other

    def positions(self, batch: int, patches: Sequence[int] | None = None) -> T:
        """Return the indices of all patches, or of ``patches``, for each image: ``[batch, patches]``.

        The indices are those of patches at the same row and column of an image of the largest size. The model computes
        positions from these indices.
        """
        numbers = range(self.settings.patches) if patches is None else patches
        device = self.model.conditioning.time_in.device
        # rows of an image that is narrower than those of training are apart
        width, most = self.settings.grid[-1], self.model.settings.grid[-1]
        there = [number // width * most + number % width for number in numbers]
        return torch.tensor(there, device=device).expand(batch, -1)

    def embed(self, noised: T, patches: Sequence[int] | None = None) -> T:
        """Return the input of the first block, ``[batch, patches, embed]``, for ``noised`` images.

        ``patches``: indices of the patches to embed; None: all.
        """
        values = patchify(noised, self.settings)
        if patches is not None:
            values = values[:, [*patches]]
        return self.model.embedded(values, self.positions(len(noised), patches))

    def signals(
        self, time: T, condition: T, patches: Sequence[int] | None = None
    ) -> Signals:
        """Return the conditioning inputs of all blocks and of the last layer: embedded time and condition, and
        rotations.

        ``time`` ``[batch]``; ``condition``: class numbers ``[batch]`` or text states. ``patches``: indices of the
        patches; None: all.
        """
        positions = self.positions(len(time), patches)
        signals = self.model.signals(positions, time, condition, self.dtype)
        return self.model.conditioned(signals)

    def final(self, x: T, signals: Signals) -> T:
        """Return the prediction ``[batch, channels, (frames,) height, width]`` from ``x``, the last block's output.

        ``signals``: the conditioning inputs from :meth:`signals`.
        """
        return unpatchify(self.model.ended(x, signals), self.settings)


@contextmanager
def seeing_by(
    blocks: Sequence[DiffusionBlock], attend: AttendPatches | None
) -> Iterator[None]:
    """Return a context in which a given function computes the self-attention of ``blocks``.

    ``attend``: function that computes it; None: the model's own attention.
    """
    if attend is None:
        yield
        return
    attentions: list[Any] = [block.attention for block in blocks]
    for attention in attentions:
        attention.attend_with = attend
    try:
        yield
    finally:
        for attention in attentions:
            attention.attend_with = None


def open_denoiser(
    where: str | Path,
    device: str = "cpu",
    say: Callable[[str], None] = warn,
    ema: bool = False,
    autoencoder: str = "",
) -> Denoiser:
    """Open the diffusion transformer that a run has trained.

    ``where``: the run's folder or a checkpoint. ``device``: device on which it computes. ``say``: called with a line
    for each damaged checkpoint that is skipped for an older one. ``ema``: whether to take the moving averages of the
    parameters. ``autoencoder``: folder of the autoencoder whose latents the model makes; empty: where it was in
    training. A model that has learned several sizes makes images of the size that most of its training images had.
    Raises :class:`UsageError` if the model is not a diffusion transformer.
    """
    from weft.checkpoint.model import open_model

    opened = open_model(str(where), device, say, ema)
    model = opened.model
    if not isinstance(model, DiffusionTransformer):
        raise UsageError(
            f"{where} is no diffusion transformer, and weft sample makes images; weft generate writes texts"
        )
    names = class_names(opened.files, model.settings.classes)
    behind = None
    if autoencoder or AUTOENCODER_FILE in opened.files:
        from weft.diffusion.latent_pictures import remembered_autoencoder

        behind = remembered_autoencoder(opened.files, autoencoder)
    learned = learned_sizes(opened.files)
    denoiser = Denoiser(model.eval(), names, behind, learned)
    return denoiser.sized(learned[0]) if learned else denoiser
