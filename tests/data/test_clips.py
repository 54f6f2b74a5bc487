"""Clips: the same frames from every kind of file, windows, held-out videos, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

from weft.data.clips import ClipForm, natural_order, read_clips
from weft.data.pictures import PictureSet
from weft.diffusion.animations import write_animation
from weft.errors import UsageError, WeftError

FORM = ClipForm(frames=12)


def frames_of(colours: bool = False) -> np.ndarray:
    """Twelve frames of 5 x 6 pixels, so that names of frames have one digit and two."""
    shape = (12, 5, 6, 3) if colours else (12, 5, 6)
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


def write(path: Path, frames: np.ndarray) -> None:
    """Write ``frames`` in the form that the ending of ``path`` says; without one as a folder of images."""
    images = [PIL.Image.fromarray(frame) for frame in frames]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, frames)
    elif path.suffix == ".npz":
        np.savez(path, frames / 255)
    elif path.suffix:
        images[0].save(path, save_all=True, append_images=images[1:], loop=0)
    else:
        path.mkdir()
        for number, image in enumerate(images):
            image.save(path / f"frame{number}.png")


@pytest.mark.parametrize(
    ("name", "colours"),
    [(n, c) for n in ("v.npy", "v.npz", "v.png", "v") for c in (False, True)]
    + [("v.gif", False)],  # a GIF has 256 colours
)
def test_a_video_is_the_same_from_every_file(
    tmp_path: Path, name: str, colours: bool
) -> None:
    frames = frames_of(colours)
    write(tmp_path / "videos" / "cat" / name, frames)
    write(tmp_path / "videos" / "dog.npy", frames)
    clips = read_clips(str(tmp_path / "videos"), FORM)
    assert clips.classes == ("", "cat") and len(clips) == 2
    expected = frames.reshape(12, 5, 6, -1).transpose(3, 0, 1, 2) / 127.5 - 1
    for number in range(2):
        np.testing.assert_allclose(clips.pixels[number], expected, atol=1e-6)


def test_a_movie_is_read_by_pyav(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    grey = np.linspace(40, 200, 12).astype(np.uint8)
    with av.open(str(tmp_path / "v.mp4"), "w") as movie:
        stream = movie.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        for level in grey:
            picture = np.full((16, 16, 3), level, np.uint8)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            movie.mux(stream.encode(frame))
        movie.mux(stream.encode())
    clips = read_clips(str(tmp_path), ClipForm(frames=12, size=(4, 4), colours=False))
    shown = (clips.pixels[0, 0, :, 2, 2] + 1) * 127.5
    assert np.abs(shown - grey).max() < 8


def test_clips_cover_a_video(tmp_path: Path) -> None:
    write(tmp_path / "v.npy", frames_of())
    whole = read_clips(str(tmp_path), FORM).pixels[0]
    for form, starts in (
        (ClipForm(frames=5), [0, 5, 7]),
        (ClipForm(frames=4, step=8), [0, 8]),
        (ClipForm(frames=3, every=2), [0, 3]),
    ):
        clips = read_clips(str(tmp_path / "v.npy"), form)
        taken = whole[:, :: form.every]
        expected = [taken[:, start : start + form.frames] for start in starts]
        np.testing.assert_array_equal(clips.pixels, np.stack(expected))


def test_clips_of_one_video_are_held_out_together() -> None:
    groups = np.repeat(np.arange(20), 5)
    clips = PictureSet(np.zeros((100, 1, 1, 1, 1)), np.zeros(100), (), groups)
    out = clips.held_out(0.3, 0).reshape(20, 5)
    assert 0 < out.sum() < 100 and (out == out[:, :1]).all()


def test_digits_move_by_one_pixel_and_come_back() -> None:
    clips = read_clips("sklearn:moving-digits", ClipForm(frames=9))
    assert clips.pixels.shape == (1797, 1, 9, 8, 8) and len(clips.classes) == 10
    np.testing.assert_array_equal(clips.pixels[:, :, 0], clips.pixels[:, :, 8])
    moved = [
        [np.array_equal(np.roll(v[0, 3], shift, (0, 1)), v[0, 4]) for shift in ((0, 1), (0, -1), (1, 0), (-1, 0))]
        for v in clips.pixels[:40]
    ]  # fmt: skip
    assert np.array(moved).any(1).all() and np.array(moved).any(0).all()


def test_an_animation_that_is_written_is_a_video(tmp_path: Path) -> None:
    torch.manual_seed(0)
    video = torch.rand(1, 12, 50, 60) * 2 - 1
    write_animation(video, tmp_path / "v.gif")
    clips = read_clips(str(tmp_path), FORM)
    # a frame with all 256 greys may lose one to the transparent colour
    assert np.abs(clips.pixels[0] - video.numpy()).max() < 0.02


@pytest.mark.parametrize(
    ("frames", "form", "said"),
    [
        (frames_of(), ClipForm(frames=13), "has 12 frames, and a clip has 13"),
        (frames_of(), ClipForm(frames=7, every=2), "has 6 frames (every 2), and"),
        (frames_of()[0], FORM, "has the shape [5, 6]"),
        (frames_of().astype(np.int32), FORM, "int32 values from"),
        (np.zeros((0, 5, 6)), FORM, "has the shape [0, 5, 6]"),
    ],
)
def test_what_is_no_video_is_one_line(
    tmp_path: Path, frames: np.ndarray, form: ClipForm, said: str
) -> None:
    np.save(tmp_path / "v.npy", frames)
    with pytest.raises(UsageError) as refused:
        read_clips(str(tmp_path), form)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    for form, said in (({"frames": 0}, "frames = 0"), ({"size": (3,)}, "height and width")):  # fmt: skip
        with pytest.raises(UsageError, match=said):
            ClipForm(**form)  # type: ignore[arg-type]
    for path, said in (("", "is missing"), (str(tmp_path), "has no videos"), ("/none", "does not exist")):  # fmt: skip
        with pytest.raises(UsageError, match=said):
            read_clips(path, FORM)
    write(tmp_path / "a.npy", frames_of())
    write(tmp_path / "b.npy", frames_of()[:, :4])
    with pytest.raises(UsageError, match=r"b\.npy has frames of the shape \[1, 4, 6\]"):
        read_clips(str(tmp_path), FORM)
    for name in ("c.npy", "c.gif", "c.mp4"):
        (tmp_path / name).write_bytes(b"nothing")
        with pytest.raises(WeftError, match="cannot be read as"):
            read_clips(str(tmp_path / name), FORM)


def test_frames_are_in_the_order_of_their_numbers() -> None:
    names = [Path(f"a{n}/f{m}.png") for n in (1, 2, 10) for m in (2, 10)]
    assert sorted(reversed(names), key=natural_order) == names
