"""Captions: rows of words, where images get them from, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.pictures import write_pictures
from weft.data.captions import PIECES, caption_rows, captions_as_rows
from weft.data.clips import ClipForm, read_clips
from weft.data.pictures import read_pictures
from weft.errors import WeftError


def test_words_that_are_alike_share_rows() -> None:
    three, threes, dog = (caption_rows(w, 2, 1 << 20)[0] for w in ("three", "Threes", "dog"))  # fmt: skip
    assert len({*three} & {*threes} - {0}) == 4 and three[0] != threes[0]
    assert not ({*three} & {*dog}) - {0}
    assert captions_as_rows([], 3, 9).shape == (0, 3, PIECES)


def test_rows_are_in_the_table_and_zeros_say_nothing() -> None:
    rows = caption_rows("a very long caption, of many words", 5, 7)
    assert rows.shape == (5, PIECES) and rows.min() >= 0 and rows.max() < 7
    assert (rows[:, 0] > 0).all()  # the comma is the fifth
    assert not caption_rows("", 5, 7).any()
    again = caption_rows("a very", 5, 7)
    np.testing.assert_array_equal(again[:2], rows[:2])
    assert not again[2:].any()


def test_captions_stand_beside_images_or_in_a_list(tmp_path: Path) -> None:
    folder = Path(write_pictures(tmp_path))
    images = sorted(folder.rglob("*.png"))
    for number, image in enumerate(images):
        image.with_suffix(".txt").write_text(f"image {number}\n")
    expected = tuple(f"image {n}" for n in range(9))
    pictures = read_pictures(str(folder))
    assert pictures.captions == pictures.said == expected
    rows = [{"file_name": str(i.relative_to(folder)), "text": f"image {n}"} for n, i in enumerate(images)]  # fmt: skip
    listed = folder / "metadata.jsonl"
    listed.write_text("\n".join(map(json.dumps, rows)))
    again = read_pictures(str(listed))
    assert again.captions == expected
    np.testing.assert_array_equal(again.pixels, pictures.pixels)
    assert not pictures.notes
    (folder / "lost.txt").write_text("an image that is not there")
    (line,) = read_pictures(str(folder)).notes
    assert line.endswith("lost.txt would be a caption, and no image or video has its name; it is not read")  # fmt: skip
    images[3].with_suffix(".txt").unlink()
    with pytest.raises(WeftError, match=r"7\.png has no caption, and others have one") as refused:  # fmt: skip
        read_pictures(str(folder))
    assert "\n" not in str(refused.value)
    listed.write_text('{"text": "no image"}')
    with pytest.raises(WeftError, match="line 1 names no image"):
        read_pictures(str(listed))


def test_names_of_classes_stand_for_captions(tmp_path: Path) -> None:
    pictures = read_pictures(write_pictures(tmp_path))
    assert pictures.captions == () and {*pictures.said} == {"dark", "light"}


def test_captions_of_videos(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.zeros((6, 5, 6), np.uint8))
    (tmp_path / "v.txt").write_text("nothing")
    clips = read_clips(str(tmp_path), ClipForm(frames=3))
    assert clips.captions == ("nothing",) * 2 and not clips.notes
    (tmp_path / "gone.txt").write_text("nothing")
    (line,) = read_clips(str(tmp_path), ClipForm(frames=3)).notes
    assert "gone.txt would be a caption" in line


def test_captions_of_digits_are_true() -> None:
    digits = read_pictures("sklearn:digits")
    assert {c.split()[1] for c in digits.captions} == {"bold", "thin"}
    ink = digits.pixels.mean((1, 2, 3))
    for name, label in (("three", 3), ("seven", 7)):
        of_class = digits.labels == label
        assert of_class.sum() == sum(c.endswith(name) for c in digits.captions)
        bold = np.array([c == f"a bold {name}" for c in digits.captions])
        assert ink[bold].min() > ink[of_class & ~bold].max()
    moving = read_clips("sklearn:moving-digits", ClipForm(frames=2))
    for caption, video in zip(moving.captions[:20], moving.pixels[:20], strict=True):
        shift = {"right": (0, 1), "left": (0, -1), "down": (1, 0), "up": (-1, 0)}
        moved = np.roll(video[0, 0], shift[caption.split()[-1]], (0, 1))
        np.testing.assert_array_equal(moved, video[0, 1])
