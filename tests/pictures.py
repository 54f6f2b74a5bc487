"""Small images and a recipe that learns to make them, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image


def write_pictures(folder: Path, height: int = 5, width: int = 6) -> str:
    """Nine grey images of two classes, whose height no patch of two pixels divides."""
    rng = np.random.default_rng(0)
    for i in range(9):
        place = folder / ("dark" if i % 2 else "light")
        place.mkdir(exist_ok=True)
        pixels = rng.integers(0, 128, (height, width)) + 100 * (i % 2 == 0)
        PIL.Image.fromarray(pixels.astype(np.uint8)).save(place / f"{i}.png")
    return str(folder)


def write_videos(folder: Path) -> str:
    """Nine grey videos of two classes, whose frames no patch of two divides, and no patch their height."""
    rng = np.random.default_rng(0)
    for i in range(9):
        place = folder / "ab"[i % 2]
        place.mkdir(exist_ok=True)
        np.save(place / f"{i}.npy", rng.integers(0, 256, (3, 5, 6)).astype(np.uint8))
    return str(folder)


#: What a recipe of these videos has in ``[data]``.
OF_VIDEOS = {"kind": "videos", "settings": {"frames": 3}}


def picture_recipe(
    folder: str, settings: dict[str, Any] | None = None, **change: Any
) -> dict[str, Any]:
    """A tiny recipe: odd sizes, a batch that no number of ranks divides, gates that are open from the beginning."""
    tree: dict[str, Any] = {
        "model": {
            "kind": "diffusion", "layers": 2, "embed": 20, "heads": 3, "head_dim": 6, "ffn": 33, "init_std": 0.1,
            "settings": {"zero": False, "drop": 0.3, **(settings or {})},
        },
        "data": {"kind": "images", "path": folder, "validation": 0.2},
        "train": {"batch": 5, "dtype": "float64", "steps": 4},
        "optimizer": {"lr": 3e-3, "warmup": 2},
        "validation": {"every": 0},
    }  # fmt: skip
    for section, values in change.items():
        tree[section] = tree.get(section, {}) | values
    return tree
