"""Clusters of images: every image is in one, the same images are held out, and other files are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from weft.curation.picture_clusters import divided_pictures
from weft.data.picture_part import (
    PictureClusters,
    cluster_part,
    read_clusters,
    write_clusters,
)
from weft.data.pictures import PictureSet
from weft.errors import UsageError, WeftError


def pictures(count: int = 30, seed: int = 0) -> PictureSet:
    random = np.random.default_rng(seed)
    pixels = random.normal(0, 0.1, (count, 1, 3, 4)) + (np.arange(count) % 2)[:, None, None, None]  # fmt: skip
    return PictureSet(pixels.astype(np.float32), np.arange(count) % 5, tuple("abcde"))


def test_clusters_divide_images_and_hold_out_the_same(tmp_path: Path) -> None:
    whole = pictures()
    divided = divided_pictures(whole, 2, 0)
    assert sorted(divided.sizes) == [15, 15]
    write_clusters(tmp_path / "clusters.npz", divided)
    kept = read_clusters(tmp_path / "clusters.npz")
    assert np.array_equal(kept.labels, divided.labels) and kept[1:] == divided[1:]
    parts = [cluster_part(whole, kept, number) for number in range(2)]
    numbers = np.concatenate([part.numbers for part in parts])
    assert sorted(numbers.tolist()) == [*range(30)]
    held = whole.held_out(0.3, 7)
    assert held.any()
    for part in parts:
        assert np.array_equal(part.pixels, whole.pixels[part.numbers])
        assert np.array_equal(part.labels, whole.labels[part.numbers])
        assert part.classes == whole.classes  # also those that it has no image of
        assert np.array_equal(part.held_out(0.3, 7), held[part.numbers])
    assert parts[1].part == ", cluster 1 of 2" and whole.part == ""


def test_features_of_ones_own_divide_as_well(tmp_path: Path) -> None:
    file = tmp_path / "features.npy"
    halves = (np.arange(30) < 10).astype(np.float32)
    np.save(file, halves[:, None])
    divided = divided_pictures(pictures(), 2, 0, file)
    assert sorted(divided.sizes) == [10, 20]
    assert len({*divided.labels[:10].tolist()}) == 1
    wrong: dict[str, np.ndarray] = {
        "the shape \\[29, 2\\], and there are 30 images": np.zeros((29, 2)),
        "not finite": np.full((30, 2), np.nan),
        "no array of numbers": np.full((30, 2), "a"),
    }
    for line, values in wrong.items():
        np.save(file, values)
        with pytest.raises(UsageError, match=line):
            divided_pictures(pictures(), 2, 0, file)
    file.write_bytes(b"no array")
    with pytest.raises(WeftError, match="cannot be read as a"):
        divided_pictures(pictures(), 2, 0, file)


def test_what_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--clusters 31 of 30 images"):
        divided_pictures(pictures(), 31, 0)
    alike = PictureSet(np.ones((6, 1, 2, 2), np.float32), np.zeros(6, np.int64), ())
    with pytest.raises(UsageError, match="cluster 1 of 2 has no images"):
        divided_pictures(alike, 2, 0)
    divided = divided_pictures(pictures(), 2, 0)
    with pytest.raises(UsageError, match="these 30 are others"):
        cluster_part(pictures(seed=1), divided, 0)
    with pytest.raises(UsageError, match="cluster = 2 of 2 clusters"):
        cluster_part(pictures(), divided, 2)
    empty = PictureClusters(np.zeros(30, np.int64), 2, divided.fingerprint)
    with pytest.raises(UsageError, match="cluster 1 of 2 has no images"):
        cluster_part(pictures(), empty, 1)
    file = tmp_path / "clusters.npz"
    with pytest.raises(WeftError, match="does not exist"):
        read_clusters(file)
    for content in (b"", b"PK\3\4 nothing", b"labels"):
        file.write_bytes(content)
        with pytest.raises(WeftError, match="does not say which cluster"):
            read_clusters(file)
