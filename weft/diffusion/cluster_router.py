"""A small network that says of which cluster a noised image is: the router of experts that were trained apart.

It learns from the noised images that the experts learn from, with the same amounts of noise (McAllister et al. 2025,
decentralized diffusion models). What it says about an image, time and condition is the evidence that
:class:`weft.train.expert_join.BayesRouter` joins experts by.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from weft.data.picture_part import PictureClusters
from weft.data.pictures import PictureSet
from weft.diffusion.image_loader import PictureOrder, drawn_pictures
from weft.diffusion.noise_process import NoiseProcess
from weft.errors import WeftError
from weft.models.coarse_pictures import coarse_size, coarse_values
from weft.models.patches import time_waves
from weft.shapes.diffusion_shape import WAVES, DiffusionSettings

T = torch.Tensor

#: Elements of the router's vectors, and its residual layers.
WIDTH, LAYERS = 128, 2
#: Steps of its training, images of a step, the highest learning rate, and the share of the steps in which it rises.
STEPS, BATCH, RATE, WARMUP = 1000, 128, 2e-3, 0.05

#: What reading a file raises that is no router's; ``ValidationError`` of pydantic is a ``ValueError``.
UNREADABLE = (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError)


class RouterLayer(nn.Module):
    """A residual layer of a :class:`ClusterRouter`. Time and condition scale and shift the layer's input.

    ``width``: number of elements of the layer's input and output.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 2 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: T, c: T) -> T:
        """Map ``x`` ``[batch, width]`` to the output of the same shape.

        ``c``: embedding of time and condition, ``[batch, width]``.
        """
        shift, scale = self.modulation(F.silu(c)).chunk(2, -1)
        normed = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        hidden: T = self.down(F.silu(self.up(normed)))
        return x + hidden


class ClusterRouter(nn.Module):
    """Classifier that predicts from which cluster of images a noised image comes, to weigh the clusters' experts.

    It reads the image (large images are averaged to fewer pixels), the time, and the class or that there is none.

    Args:
        ``settings``: settings of the experts' models.
        ``clusters``: number of clusters.
    """

    def __init__(self, settings: DiffusionSettings, clusters: int) -> None:
        super().__init__()
        self.settings, self.clusters = settings, clusters
        shape = (settings.channels, *settings.size)
        values = settings.channels * prod(coarse_size(shape))
        self.pixels, self.time = nn.Linear(values, WIDTH), nn.Linear(WAVES, WIDTH)
        self.classes = nn.Embedding(settings.classes + 1, WIDTH)
        self.layers = nn.ModuleList(RouterLayer(WIDTH) for _ in range(LAYERS))
        self.out = nn.Linear(WIDTH, clusters)

    def forward(self, noised: T, time: T, condition: T) -> T:
        """Return the logits of the clusters for noised images, ``[batch, clusters]``.

        The arguments are those of :class:`weft.diffusion.denoiser.Denoiser`.
        """
        dtype = self.out.weight.dtype
        waves = time_waves(time, WAVES, self.settings).to(dtype)
        c = self.time(waves) + self.classes(condition)
        x = self.pixels(coarse_values(noised.to(dtype))) + c
        for layer in self.layers:
            x = layer(x, c)
        said: T = self.out(F.layer_norm(x, x.shape[-1:]))
        return said


class RouterScores(NamedTuple):
    """How well a router tells clusters apart, on noised images that it was not trained on.

    Attributes:
        ``loss``: mean cross-entropy in nats.
        ``right``: share of the images that it assigns to their cluster.
        ``prior``: cross-entropy of a router that does not see the images and predicts the clusters' shares.
        ``images``: number of images.
    """

    loss: float
    right: float
    prior: float
    images: int


class TrainedClusterRouter(NamedTuple):
    """A trained router.

    ``router``: the network. ``scores``: how well it tells clusters apart on images that it was not trained on.
    """

    router: ClusterRouter
    scores: RouterScores


def train_cluster_router(
    pictures: PictureSet, clusters: PictureClusters, settings: DiffusionSettings, held: np.ndarray, seed: int = 0,
    steps: int = STEPS, passed: Callable[[int], None] | None = None,
) -> TrainedClusterRouter:  # fmt: skip
    """Train a router by cross-entropy on noised images.

    ``pictures``: all images. ``clusters``: the cluster of each. ``settings``: settings of the experts' models, which
    define how images are noised. ``held``: images that are held out to score the router, bool ``[images]``. ``seed``:
    seed of weights and noise. ``steps``: number of training steps. ``passed``: called with the number of steps so far.
    """
    labels = torch.from_numpy(clusters.labels)
    order = PictureOrder((), (), seed, 0, indices=np.flatnonzero(~held))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        router = ClusterRouter(settings, clusters.clusters)
    optimizer = torch.optim.AdamW(router.parameters(), RATE, weight_decay=1e-2)
    warmup = max(1, round(WARMUP * steps))
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, (1 + np.cos(np.pi * step / steps)) / 2),
    )
    for step in range(steps):
        samples = range(step * BATCH, (step + 1) * BATCH)
        said, right = _answers(router, pictures, order, labels, seed, samples)
        F.cross_entropy(said, right).backward()
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        if passed is not None:
            passed(step + 1)
    kept = np.flatnonzero(held) if held.any() else order.indices
    shown = PictureOrder((), (), seed, 1, indices=kept, fixed=True)
    return TrainedClusterRouter(
        router.eval().requires_grad_(False),
        _scored(router, pictures, shown, labels, seed),
    )


def _answers(
    router: ClusterRouter, pictures: PictureSet, order: PictureOrder, labels: T, seed: int, samples: range
) -> tuple[T, T]:  # fmt: skip
    """Return what ``router`` says of the noised images ``samples`` of ``order``, and the right clusters."""
    drawn = drawn_pictures(
        pictures, order, router.settings, seed, samples, len(samples)
    )
    process = NoiseProcess.of(router.settings)
    noised = process.noised(drawn.image, drawn.noise, drawn.time)
    right = labels[[order.picture(sample) for sample in samples]]
    return router(noised, drawn.time, drawn.condition), right


@torch.inference_mode()
def _scored(
    router: ClusterRouter,
    pictures: PictureSet,
    order: PictureOrder,
    labels: T,
    seed: int,
) -> RouterScores:
    """Return how well ``router`` does on the images of ``order``, each noised once."""
    total = len(order.indices)
    loss = hits = 0.0
    for start in range(0, total, BATCH):
        samples = range(start, min(start + BATCH, total))
        said, right = _answers(router, pictures, order, labels, seed, samples)
        loss += float(F.cross_entropy(said, right, reduction="sum"))
        hits += float((said.argmax(-1) == right).sum())
    shares = np.bincount(labels.numpy(), minlength=router.clusters) / len(labels)
    right_shares = shares[labels[order.indices].numpy()]
    prior = float(-np.log(right_shares).mean())
    return RouterScores(loss / total, hits / total, prior, total)


def write_router(file: Path, trained: TrainedClusterRouter, identity: str) -> None:
    """Write the router ``trained`` and its scores to ``file`` (safetensors) atomically.

    ``identity``: digest of the data and settings of its training, by which a caller sees whether it must be trained
    again.
    """
    router = trained.router
    about = {
        "settings": router.settings.model_dump_json(),
        "clusters": str(router.clusters),
        "identity": identity,
        "scores": " ".join(map(str, trained.scores)),
    }
    draft = file.with_name(f".{os.getpid()}-{file.name}")
    save_file({k: v.contiguous() for k, v in router.state_dict().items()}, draft, about)
    draft.replace(file)


class StoredRouter(NamedTuple):
    """A router that was read from a file. ``scores``: how well it tells clusters apart on images that it was not
    trained on.

    ``identity``: text that identifies the router's training (see :func:`write_router`).
    """

    router: ClusterRouter
    scores: RouterScores
    identity: str


def open_router(file: Path, device: str = "cpu") -> StoredRouter:
    """Read a router from ``file``, which :func:`write_router` wrote, onto ``device``. Raises :class:`WeftError` for any
    other file.
    """
    try:
        with safe_open(file, "pt") as stored:
            about = stored.metadata()
            weights = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        settings = DiffusionSettings.model_validate_json(about["settings"])
        router = ClusterRouter(settings, int(about["clusters"]))
        router.load_state_dict(weights)
        loss, right, prior, images = about["scores"].split()
        scores = RouterScores(float(loss), float(right), float(prior), int(images))
        identity = about["identity"]
    except UNREADABLE as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeftError(
            f"{file} is no router of images ({why}); remove it, and run weft experts --clusters again, which trains one"
        ) from None
    return StoredRouter(router.to(device).eval().requires_grad_(False), scores, identity)  # fmt: skip
