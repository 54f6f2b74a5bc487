"""The router of clusters learns from noised images, is the same on every call, and comes back from its file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from weft.data.picture_part import PictureClusters
from weft.data.pictures import PictureSet
from weft.diffusion.cluster_router import (
    open_router,
    train_cluster_router,
    write_router,
)
from weft.shapes.diffusion_shape import DiffusionSettings

SETTINGS = DiffusionSettings(size=(4, 4), channels=1, classes=2)


def pictures() -> PictureSet:
    """Dark and light images, and of each half one class."""
    random = np.random.default_rng(0)
    light = np.arange(60) % 3 == 0
    pixels = random.normal(0, 0.1, (60, 1, 4, 4)) + np.where(light, 0.5, -0.5)[:, None, None, None]  # fmt: skip
    return PictureSet(
        pixels.astype(np.float32), (np.arange(60) % 2).astype(np.int64), ("a", "b")
    )


def divided() -> PictureClusters:
    labels = (np.arange(60) % 3 == 0).astype(np.int64)
    return PictureClusters(labels, 2, pictures().fingerprint)


def test_it_knows_clean_images_and_only_frequencies_of_noise(tmp_path: Path) -> None:
    held = np.arange(60) % 5 == 0
    trained = train_cluster_router(pictures(), divided(), SETTINGS, held, steps=40)
    scores = trained.scores
    assert scores.images == 12 and scores.loss < 0.7 * scores.prior
    assert scores.right > 0.8
    images = torch.from_numpy(pictures().pixels)
    noise = torch.randn(60, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    none = torch.full((60,), 2)
    at = torch.full((60,), 0.95)
    said = trained.router(0.95 * images + 0.05 * noise, at, none).softmax(-1)
    labels = torch.from_numpy(divided().labels)
    assert (said.argmax(-1) == labels).all()
    of_noise = trained.router(noise, torch.zeros(60), none).softmax(-1)
    assert abs(float(of_noise[:, 1].mean()) - 1 / 3) < 0.1
    write_router(tmp_path / "router.safetensors", trained, "as trained")
    stored = open_router(tmp_path / "router.safetensors")
    assert stored.identity == "as trained" and stored.scores == scores
    again = stored.router(noise, torch.zeros(60), none).softmax(-1)
    assert torch.equal(again, of_noise)
    assert [file.name for file in tmp_path.iterdir()] == ["router.safetensors"]


def test_it_is_the_same_on_every_call() -> None:
    nobody = np.zeros(60, bool)
    torch.manual_seed(5)
    first = train_cluster_router(pictures(), divided(), SETTINGS, nobody, steps=2)
    torch.manual_seed(6)
    again = train_cluster_router(pictures(), divided(), SETTINGS, nobody, steps=2)
    other = train_cluster_router(
        pictures(), divided(), SETTINGS, nobody, seed=1, steps=2
    )
    assert first.scores == again.scores != other.scores
    assert first.scores.prior == pytest.approx(0.6365, abs=1e-3)
