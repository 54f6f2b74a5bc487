"""Scores of images, files of them, and the images that a run makes meanwhile."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from tests.pictures import picture_recipe, write_pictures
from weft import train
from weft.cli.sample_command import sample_command
from weft.data.pictures import PictureSet, read_pictures
from weft.diffusion.image_files import image_grid, png_bytes
from weft.diffusion.picture_scores import PictureJudge, frechet_distance
from weft.errors import UsageError
from weft.recipe import build_recipe


def test_the_frechet_distance_of_gaussians_is_known() -> None:
    rng = np.random.default_rng(0)
    first = rng.standard_normal((20_000, 3))
    second = rng.standard_normal((20_000, 3)) * 2 + np.array([1, 0, 0])
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(first, second) == pytest.approx(1 + 3 * 1, rel=0.03)


def test_the_judge_knows_classes_and_noise() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    pixels = (rng.standard_normal((60, 1, 4, 4)) * 0.2).astype(np.float32)
    pixels[np.arange(60), 0, labels, labels] += 1
    judge = PictureJudge(PictureSet(pixels, labels, ("a", "b", "c")))
    assert judge.score(pixels, labels).accuracy > 0.95
    wrong = judge.score(pixels, (labels + 1) % 3)
    noise = judge.score(rng.standard_normal(pixels.shape).astype(np.float32), labels)
    assert wrong.accuracy < 0.05 and noise.frechet > 5 > wrong.frechet


def test_the_judge_knows_a_thing_wherever_it_is() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 2
    videos = np.zeros((60, 1, 3, 6, 6), np.float32)
    videos[:, 0, :, 2, 2:4] = 1
    videos[labels == 1, 0, :, 3, 2:4] = 1
    for number in range(60):
        shift = rng.integers(0, 6, 2)
        videos[number] = np.roll(videos[number], shift, (-2, -1))
    judge = PictureJudge(PictureSet(videos[:30], labels[:30], ("bar", "square")))
    assert judge.score(videos[30:], labels[30:]).accuracy == 1.0


def test_files_are_png(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for channels in (1, 3):
        images = rng.uniform(-1, 1, (5, channels, 6, 4)).astype(np.float32)
        grid = image_grid(images, columns=3)
        with PIL.Image.open(io.BytesIO(png_bytes(grid))) as image:
            assert image.size == (grid.shape[1], grid.shape[0])
            assert np.array_equal(np.asarray(image), grid)
    videos = rng.uniform(-1, 1, (2, 1, 3, 6, 4)).astype(np.float32)
    assert image_grid(videos).ndim == 2


def test_sizes_and_colours_are_made_alike(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    pixels = read_pictures(str(tmp_path), size=(4, 4), colours=True).pixels
    assert pixels.shape == (9, 3, 4, 4) and np.abs(pixels).max() <= 1


@pytest.mark.slow(4)
def test_a_run_scores_its_images_and_weft_sample_makes_some(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    folder = write_pictures(tmp_path / "in")
    recipe = build_recipe(picture_recipe(folder, train={"steps": 2}, validation={"every": 2}))  # fmt: skip
    train(recipe, out=tmp_path / "run")
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    scores = [r for r in map(json.loads, lines) if r["kind"] == "pictures"]
    assert [r["step"] for r in scores] == [0, 2] and scores[0]["frechet"] > 0
    out, run = tmp_path / "images", str(tmp_path / "run")
    assert sample_command(run, out, count=3, steps=2, classes="1") == 0
    assert {"grid.png", "0000.png", "0002.png"} <= {p.name for p in out.iterdir()}
    with pytest.raises(UsageError, match="--class 7: there is no class '7'"):
        sample_command(run, tmp_path / "more", count=3, steps=2, classes="7")
