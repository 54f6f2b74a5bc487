"""Images as latents of an autoencoder: encoded for training, decoded after sampling. And a small one is trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import gcd, isfinite
from pathlib import Path

import numpy as np
import torch
import xxhash

from weft.cache import build_once, cache_root, digest
from weft.data.pictures import PictureSet
from weft.errors import UsageError, WeftError
from weft.models.autoencoder import Autoencoder
from weft.models.autoencoder_files import AUTOENCODER_FILE, WEIGHTS, open_autoencoder
from weft.models.autoencoder_sizes import AutoencoderSettings, autoencoder_settings
from weft.paths import home_path

T = torch.Tensor

#: Most values of a batch of images that is encoded or decoded at once.
MOST_VALUES = 1 << 22
#: Weight of the divergence of latents from a normal distribution, and images of a batch, in training.
DIVERGENCE, BATCH = 1e-6, 64


def autoencoder_digest(folder: str | Path) -> str:
    """Return a digest of the weights of the autoencoder in ``folder``, as hexadecimal text."""
    content = (home_path(folder) / WEIGHTS).read_bytes()
    return xxhash.xxh3_128(content).hexdigest()


def in_batches(function: Callable[[T], T], x: T) -> T:
    """Apply ``function`` to ``x`` ``[images, ...]`` in batches, without gradients, and return the joined results."""
    count = max(1, MOST_VALUES // max(1, x[0].numel()) // 16)
    with torch.inference_mode():
        return torch.cat([function(part) for part in x.split(count)])


def encoded_pictures(pictures: PictureSet, folder: str) -> PictureSet:
    """Return ``pictures`` as latents of the autoencoder in ``folder``, which are kept in the cache.

    Raises :class:`UsageError` for images that it cannot encode.
    """
    model = open_autoencoder(folder)
    settings = model.settings
    channels, *size = pictures.pixels.shape[1:]
    if len(size) != 2:
        raise UsageError(
            f"{folder} is an autoencoder of images, and the data are videos; leave data.settings.encoder out"
        )
    if channels != settings.in_channels:
        raise UsageError(
            f"{folder} encodes images of {settings.in_channels} values per pixel, and these have {channels}; set "
            f"data.settings.colours = {str(settings.in_channels == 3).lower()}"
        )
    if any(side % settings.factor for side in size):
        raise UsageError(
            f"{folder} halves height and width to 1/{settings.factor}, and images have {size}; set data.settings.size "
            f"to multiples of {settings.factor}"
        )
    weights = autoencoder_digest(folder)
    config = settings.model_dump(mode="json")
    name = digest("latents", pictures.fingerprint, weights, config)

    def build(place: Path) -> None:
        latents = in_batches(model.encoded, torch.from_numpy(pictures.pixels))
        np.save(place / "latents.npy", latents.numpy())

    place = build_once(cache_root() / name, build)
    latents = np.load(place / "latents.npy")
    return replace(pictures, pixels=latents, encoder=str(home_path(folder).absolute()))  # fmt: skip


def autoencoder_file(folder: str) -> dict[str, bytes]:
    """Return the file in which a checkpoint records the autoencoder in ``folder``, as contents by file name.

    The file has the path of the folder and a digest of the weights. The result is empty if ``folder`` is "".
    """
    if not folder:
        return {}
    settings = open_autoencoder(folder).settings.model_dump(mode="json")
    about = {"folder": folder, "weights": autoencoder_digest(folder), "settings": settings}  # fmt: skip
    return {AUTOENCODER_FILE: json.dumps(about).encode()}


def remembered_autoencoder(
    files: Mapping[str, bytes], folder: str = ""
) -> Autoencoder | None:
    """Open the autoencoder whose latents the model of a checkpoint makes; return None if the model makes pixels.

    ``files``: contents of the checkpoint's files by name. ``folder``: folder of the autoencoder; empty: the folder that
    the checkpoint records. Raises :class:`WeftError` if the folder has no autoencoder or another one, and
    :class:`UsageError` if ``folder`` is given for a model of pixels.
    """
    if AUTOENCODER_FILE not in files:
        if folder:
            raise UsageError(f"--autoencoder {folder}: this model makes pixels; leave it out")  # fmt: skip
        return None
    about = json.loads(files[AUTOENCODER_FILE])
    where = folder or about["folder"]
    if not (home_path(where) / WEIGHTS).is_file():
        raise WeftError(
            f"the model makes latents of the autoencoder in {where}, which is not there; put it there, or say where "
            "it is with weft sample --autoencoder FOLDER"
        )
    if autoencoder_digest(where) != about["weights"]:
        raise WeftError(
            f"{where} has another autoencoder than the one whose latents the model has learned; give that one"
        )
    model = open_autoencoder(where)
    settings = model.settings.model_dump(mode="json")
    # scale and shift of the latents are in config.json alone
    for key, value in about.get("settings", {}).items():
        if settings.get(key) != value:
            raise WeftError(
                f"{where}: its config.json has {key} = {settings.get(key)}, and had {value} when the model learned its "
                "latents; put that back"
            )
    return model


def small_autoencoder(
    pictures: PictureSet, latents: int, widths: tuple[int, ...], seed: int = 0
) -> Autoencoder:
    """Return an untrained autoencoder of images like ``pictures``.

    ``latents``: number of values of a latent pixel. ``widths``: number of channels at each resolution; height and width
    are halved from each resolution to the next. ``seed``: seed of the weights.
    """
    if not widths:
        raise UsageError("--widths has no channels; give those of each resolution, such as 16,32")  # fmt: skip
    config = {
        "_class_name": "AutoencoderKL", "in_channels": pictures.pixels.shape[1], "latent_channels": latents,
        "block_out_channels": widths, "norm_num_groups": gcd(8, *widths), "scaling_factor": 1.0, "shift_factor": 0.0,
    }  # fmt: skip
    settings = autoencoder_settings(config)
    sides = pictures.pixels.shape[2:]
    if len(sides) != 2 or any(side % settings.factor for side in sides):
        raise UsageError(
            f"images of {[*sides]} cannot be halved {len(widths) - 1} times; give fewer --widths"
        )
    torch.manual_seed(seed)
    return Autoencoder(settings)


def train_autoencoder(
    model: Autoencoder, pictures: PictureSet, steps: int, rate: float = 5e-3, seed: int = 0,
    passed: Callable[[int, float], None] | None = None,
) -> AutoencoderSettings:  # fmt: skip
    """Train ``model`` to reconstruct ``pictures`` from draws of their latents (Kingma & Welling 2014).

    Afterwards its latents have the mean 0 and the variance 1, by scale and shift. ``steps``: optimizer steps with
    :data:`BATCH` images each; ``rate``: the highest learning rate of AdamW, which falls by a cosine; ``seed``: seed of
    order and draws; ``passed``: called with step and squared error. Returns the settings with scale and shift. Raises
    :class:`WeftError` if the error is no finite number.
    """
    draws = torch.Generator().manual_seed(seed)
    pixels = torch.from_numpy(pictures.pixels)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    for step in range(steps):
        batch = pixels[torch.randint(len(pixels), (BATCH,), generator=draws)]
        mean, log_variance = model.moments(batch).chunk(2, 1)
        log_variance = log_variance.clamp(-30, 20)
        noise = torch.randn(mean.shape, generator=draws)
        error = (model.decoded(mean + (log_variance / 2).exp() * noise) - batch).square().mean()  # fmt: skip
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).mean() / 2
        optimizer.zero_grad()
        (error + DIVERGENCE * divergence).backward()
        optimizer.step()
        schedule.step()
        if not isfinite(now := error.item()):
            raise WeftError(
                f"the squared error was {now} in step {step + 1}: nothing was written; give a --rate below {rate:g}"
            )
        if passed is not None:
            passed(step + 1, now)
    means = in_batches(lambda x: model.moments(x).chunk(2, 1)[0], pixels)
    update = {"shift_factor": float(means.mean()), "scaling_factor": 1 / max(1e-6, float(means.std()))}  # fmt: skip
    model.settings = model.settings.model_copy(update=update)
    return model.settings
