"""The batches of a training on images: noised patches, and what the model is to predict of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from weft.data.batch import IGNORE, Batch
from weft.data.captions import PIECES, caption_rows
from weft.data.loader import Loader
from weft.data.order import Order, permutation
from weft.data.pictures import PictureSet
from weft.data.size_buckets import real_pixels
from weft.diffusion.noise_process import NoiseProcess
from weft.layout.sequence import owned_ranges, padded_length
from weft.models.patches import patchify
from weft.shapes.diffusion_shape import DiffusionSettings
from weft.train.step_loader import AskedQuestions

#: First key of the permutations of epochs, and of the random numbers of a sample.
_ROWS, _NOISE = 0x1A6E, 0x4015E


@dataclass(frozen=True)
class PictureOrder(Order):
    """Order of the images of a set: shuffled again in every epoch, endless if ``epochs`` is 0.

    Attributes:
        ``indices``: indices in the set of the images that are in the order, int64 ``[n]``.
        ``fixed``: whether the images come in the order of their indices (for validation) instead of shuffled.
    """

    indices: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    fixed: bool = False

    @cached_property
    def total(self) -> int | None:
        """Number of samples of the whole order; None if the order never ends."""
        return len(self.indices) * self.epochs or None

    def picture(self, sample: int) -> int:
        """Return the index in the set of the image that is sample number ``sample``."""
        epoch, at = divmod(sample, len(self.indices))
        return int(self.indices[at if self.fixed else self._shuffled(epoch)[at]])

    @cached_property
    def _shuffled(self) -> Any:
        return lru_cache(maxsize=2)(
            lambda epoch: permutation(len(self.indices), _ROWS, self.seed, epoch)
        )


def drawn_times(settings: DiffusionSettings, numbers: np.random.Generator) -> float:
    """Return a random time, between 0 (noise) and 1 (image), at which a training sample is noised.

    ``settings.times``: distribution of the time. ``numbers``: random generator.
    """
    if settings.times == "logit-normal":
        return float(1 / (1 + np.exp(-numbers.standard_normal())))
    return float(numbers.random())


class DrawnPictures(NamedTuple):
    """Images of a batch, with the random noise, time and dropped conditions of each for training.

    Attributes:
        ``image``, ``noise``: float32 ``[rows, channels, (frames,) height, width]``.
        ``time``: times at which they are noised, float64 ``[rows]``.
        ``condition``: class numbers, int64 ``[rows]``, where the number of classes means that the class was dropped; or
            rows of captions, int64 ``[rows, words, pieces]``, where zeros mean that the caption was dropped.
    """

    image: torch.Tensor
    noise: torch.Tensor
    time: torch.Tensor
    condition: torch.Tensor


def drawn_pictures(
    pictures: PictureSet, order: PictureOrder, settings: DiffusionSettings, seed: int, samples: range,
    count: int,
) -> DrawnPictures:  # fmt: skip
    """Return the images of a range of samples for training, followed by blank rows up to ``count`` rows.

    ``pictures``: all images. ``order``: the order of samples. ``samples``: numbers of the wanted samples in this order.
    ``settings``: settings of the model that is trained. ``seed``: seed of noise, times and dropped conditions.
    """
    shape = (count, settings.channels, *settings.size)
    image, noise = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    time = np.full(count, 0.5)
    # of a text all zeros say nothing
    said = (settings.words, PIECES) if settings.text else ()
    condition = np.full((count, *said), settings.classes, np.int64)
    for row, sample in enumerate(samples):
        index = order.picture(sample)
        # validation has numbers of its own
        key = [seed % 2**64, (_NOISE + order.fixed << 40) + sample]
        drawn = np.random.Generator(np.random.Philox(key=key))
        time[row] = drawn_times(settings, drawn)
        dropped = drawn.random() < settings.drop
        if not dropped and settings.text:
            condition[row] = caption_rows(
                pictures.said[index], settings.words, settings.word_rows
            )
        elif settings.classes and not dropped:
            condition[row] = pictures.labels[index]
        noise[row] = drawn.standard_normal(shape[1:], np.float32)
        image[row] = pictures.pixels[index]
        if pictures.sizes is not None:
            noise[row] *= real_pixels(shape[1:], pictures.sizes[index])
    return DrawnPictures(*map(torch.from_numpy, (image, noise, time, condition)))


@dataclass(frozen=True)
class ImageLoader(Loader):
    """Makes the batches of one rank from images. Samples are divided among ranks as samples of text are.

    A sample's noise, its time and whether its class is dropped depend only on the seed and the sample's number.
    Training is therefore the same under every layout.

    Attributes:
        ``pictures``: all images.
        ``settings``: settings of the model.
        ``seed``: seed of the random numbers.
        ``asked``: functions by name that evaluate the model during training, such as one that samples images.
    """

    pictures: PictureSet | None = None
    settings: DiffusionSettings = field(default_factory=DiffusionSettings)
    seed: int = 0
    asked: Mapping[str, AskedQuestions] = field(default_factory=dict)

    @classmethod
    def of(
        cls, plain: Loader, pictures: PictureSet, settings: DiffusionSettings, seed: int
    ) -> ImageLoader:
        """Return a loader of images that divides samples as ``plain`` does.

        The other arguments are attributes of this class.
        """
        given = {each.name: getattr(plain, each.name) for each in fields(plain)}
        return cls(**given, pictures=pictures, settings=settings, seed=seed)

    def questions(self) -> dict[str, AskedQuestions]:
        """Return the evaluations that this loader brings, by name: that of sampled images, or none."""
        return dict(self.asked)

    def _assemble(self, ranges: list[range], place: int, count: int) -> Batch:
        """Return the batch of one ``place`` in a pass, of ``count`` rows. ``ranges``: sample numbers of every place."""
        numbers, patches = ranges[place], self.settings.patches
        length = padded_length(patches, self.layout)
        columns = np.concatenate(
            [
                np.arange(*owned)
                for owned in owned_ranges(length, self.layout, self.cp_rank)
            ]
        )
        arrays = self._arrays(numbers, count)
        for name in ("noised", "target"):
            padded = torch.zeros(count, length, arrays[name].shape[-1])
            padded[:, :patches] = arrays[name]
            arrays[name] = padded[:, columns]
        real = torch.zeros(count, length, dtype=torch.bool)
        real[: len(numbers), :patches] = True
        if "real" in arrays:
            real[:, :patches] &= arrays["real"]
        labels = torch.full((count, length), IGNORE).masked_fill(real, 0)
        rows = torch.arange(count)[:, None].expand(-1, length)
        documents = rows.masked_fill(~real, -1)
        positions = torch.from_numpy(columns).expand(count, -1)
        return Batch(
            torch.zeros(count, len(columns), dtype=torch.int64),
            labels[:, columns],
            positions.clone(),
            torch.arange(count + 1, dtype=torch.int32) * length,
            documents=documents[:, columns],
            samples=() if self.cp_rank else tuple(numbers),
            arrays=arrays,
        )

    def _arrays(self, samples: range, count: int) -> dict[str, torch.Tensor]:
        """Return the arrays of ``samples``, with rows of zeros up to ``count``.

        ``noised`` and ``target``: ``[rows, patches, values]``; ``time``: float64 ``[rows]``; ``condition``: int64
        ``[rows]``, the number of classes standing for a class that was dropped, or a caption's rows ``[rows, words,
        pieces]``, zeros for one that was; ``real``, of images of several sizes: which patches are of the image, bool
        ``[rows, patches]``.
        """
        assert self.pictures is not None and isinstance(self.order, PictureOrder)
        drawn = drawn_pictures(
            self.pictures, self.order, self.settings, self.seed, samples, count
        )
        process = NoiseProcess.of(self.settings)
        sized = {} if self.pictures.sizes is None else {"real": self._real(samples, count)}  # fmt: skip
        whole = drawn.image, drawn.noise, drawn.time
        return {
            "noised": patchify(process.noised(*whole), self.settings),
            "target": patchify(process.target_of(*whole), self.settings),
            "time": drawn.time,
            "condition": drawn.condition,
            **sized,
        }

    def _real(self, samples: range, count: int) -> torch.Tensor:
        """Return which patches are of the images ``samples``, bool ``[count, patches]``; all in rows of none."""
        assert self.pictures is not None and isinstance(self.order, PictureOrder)
        assert self.pictures.sizes is not None
        shape = (1, *self.settings.size)
        real = np.ones((count, *shape), bool)
        for row, sample in enumerate(samples):
            size = self.pictures.sizes[self.order.picture(sample)]
            real[row] = real_pixels(shape, size)
        one_channel = self.settings.model_copy(update={"channels": 1})
        return patchify(torch.from_numpy(real).float(), one_channel).amax(-1) > 0
