"""Broken files of images, videos and captions: one line each, and nothing that was brought is lost without one."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from tests.models.test_diffusion_transformer import model_of
from weft.data.clips import ClipForm, read_clips
from weft.data.pictures import PictureSet, read_pictures
from weft.diffusion.denoiser import Denoiser
from weft.diffusion.parallel_sample import asked_conditions
from weft.diffusion.picture_engine import check_guidance
from weft.diffusion.sample import seeded_noise
from weft.errors import UsageError, WeftError


def encoded(pixels: np.ndarray, form: str = "png") -> bytes:
    """An image file of ``pixels``; of several, ``[frames, height, width]``, an animation."""
    images = [PIL.Image.fromarray(each) for each in (pixels if pixels.ndim > 2 else pixels[None])]  # fmt: skip
    file = io.BytesIO()
    images[0].save(file, form, save_all=len(images) > 1, append_images=images[1:])
    return file.getvalue()


RNG = np.random.default_rng(0)
IMAGE = encoded(RNG.integers(0, 256, (20, 20)).astype(np.uint8))
ANIMATION = encoded(RNG.integers(0, 256, (6, 20, 20)).astype(np.uint8), "gif")


def array(values: np.ndarray, packed: bool = False) -> bytes:
    file = io.BytesIO()
    (np.savez if packed else np.save)(file, values)
    return file.getvalue()


def tar(**members: bytes) -> bytes:
    """A tar file; ``_`` in a member's name stands for a dot."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in members.items():
            about = tarfile.TarInfo(f"./{name.replace('_', '.')}")
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return file.getvalue()


VIDEO = np.zeros((4, 5, 6), np.uint8)


def read(path: Path) -> PictureSet:
    still = path.suffix in (".jsonl", ".tar", ".parquet", ".png")
    place = str(path.parent if path.suffix == ".png" else path)
    return read_pictures(place) if still else read_clips(place, ClipForm(frames=2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.png", IMAGE[:60], "cannot be read as an image"),
        ("a.gif", ANIMATION[: len(ANIMATION) * 9 // 10], "cannot be read as a video"),
        ("a.gif", ANIMATION[:30], "cannot be read as a video"),
        ("a.mp4", b"a text", "cannot be read as a video"),
        ("a.npy", b"", "cannot be read as arrays"),
        ("a.npz", array(VIDEO, packed=True)[:100], "cannot be read as arrays"),
        ("a.npy", array(np.full((4, 5, 6), "a")), "of the type <U1"),
        ("a.npy", array(VIDEO.astype(complex)), "of the type complex128"),
        ("a.npy", array(np.zeros((4, 5, 6, 4), np.uint8)), "1 or 3 values"),
        ("a.jsonl", b"\xff\xfe", "cannot be read as lines of JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1 cannot be read as JSON"),
        ("a.jsonl", b'{"image": "a.png", "text": ["u"]}', "several values of 'text'"),
        ("a.tar", b"a text", "cannot be read as a tar file"),
        ("a.tar", tar(a_b_png=IMAGE), "has a dot inside its name"),
        ("a.tar", tar(a_png=IMAGE, a_json=b"{"), "cannot be read as JSON"),
        ("a.parquet", b"PAR1PAR1PAR1", "cannot be read as Parquet"),
    ],
)
def test_a_broken_file_is_one_line(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(WeftError) as refused:
        read(path)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_caption_that_is_null_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(IMAGE)
    (tmp_path / "a.jsonl").write_text('{"image": "a.png", "text": null, "label": null}')
    assert read(tmp_path / "a.jsonl").said == ()


def test_captions_come_with_a_file_and_in_an_archive(tmp_path: Path) -> None:
    (tmp_path / "v.npy").write_bytes(array(VIDEO))
    (tmp_path / "v.txt").write_text("a video")
    assert read(tmp_path / "v.npy").captions == ("a video",) * 2
    for beside in ({"a_txt": b"an image"}, {"a_json": b'{"caption": "an image"}'}):
        (tmp_path / "a.tar").write_bytes(tar(a_png=IMAGE, a_seg_png=IMAGE, **beside))
        assert read(tmp_path / "a.tar").captions == ("an image",)


def test_sixteen_bits_are_not_cut_off(tmp_path: Path) -> None:
    pixels = np.arange(256, dtype=np.uint16).reshape(16, 16) * 257
    (tmp_path / "a.png").write_bytes(encoded(pixels))
    expected = pixels[None, None] / 257 / 127.5 - 1
    np.testing.assert_allclose(read(tmp_path / "a.png").pixels, expected, atol=1e-6)


def test_sizes_are_a_height_and_a_width(tmp_path: Path) -> None:
    for size in ((0, 5), (5,), (-1, 2)):
        with pytest.raises(UsageError, match="height and width"):
            read_pictures(str(tmp_path), size)
        with pytest.raises(UsageError, match="height and width"):
            ClipForm(size=size)


def test_samples_show_all_that_is_asked_for() -> None:
    model = model_of()
    with pytest.raises(UsageError, match=r"--count 2 leaves some of the 3 classes"):
        asked_conditions(model.settings, 2, "0,1,2")
    texts = model_of(classes=0, text=5, words=2, word_rows=6).settings
    with pytest.raises(UsageError, match=r"--count 1 leaves some of the 2 prompts"):
        asked_conditions(texts, 1, prompts=["a", "b"])
    for guidance in (-1.0, float("inf"), float("nan")):
        with pytest.raises(UsageError, match="guidance"):
            check_guidance(Denoiser(model), guidance)


def test_seeds_below_zero_are_seeds_of_their_own() -> None:
    first, second = (seeded_noise((2, 3), seed, 0) for seed in (-5, -6))
    assert (first != second).all()
