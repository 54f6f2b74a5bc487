"""An autoencoder as diffusers writes it, images as its latents, and commands that train, sample and refuse with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import Command
from weft.data.picture_part import PictureClusters, cluster_part
from weft.data.pictures import PictureSet
from weft.diffusion.denoiser import Denoiser
from weft.diffusion.latent_pictures import (
    autoencoder_file,
    encoded_pictures,
    remembered_autoencoder,
    small_autoencoder,
    train_autoencoder,
)
from weft.errors import UsageError, WeftError
from weft.layout.mesh import Mesh
from weft.models.autoencoder_files import WEIGHTS, open_autoencoder, save_autoencoder
from weft.models.autoencoder_sizes import autoencoder_settings
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train

RECORDED = Path(__file__).parents[2] / "bench/results/diffusers_peer.json"


def pictures(count: int = 6, side: int = 4) -> PictureSet:
    draws = np.random.Generator(np.random.Philox(3))
    labels = np.arange(count) % 2
    shades = draws.uniform(-1, 1, (count, 1, 1, 1)).astype(np.float32)
    return PictureSet(shades.repeat(side, 2).repeat(side, 3), labels, ("a", "b"))


def test_latents_and_pixels_are_those_of_diffusers() -> None:
    recorded = json.loads(RECORDED.read_text())["autoencoder"]
    for part in ("latents", "pixels", "gradient"):
        assert recorded[part] <= 1e-5 * max(1, recorded["largest"])
    assert recorded["back"] == 0


def test_a_folder_comes_back_with_old_names(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = small_autoencoder(pictures(), 2, (4, 8))
    folder = save_autoencoder(model, tmp_path / "new")
    values = load_file(folder / WEIGHTS)
    x = torch.randn(2, 1, 4, 4)
    expected = model.decoded(model.encoded(x))
    torch.testing.assert_close(open_autoencoder(folder).decoded(model.encoded(x)), expected)  # fmt: skip
    names = {n: n.replace("to_q", "query").replace("to_out.0", "proj_attn") for n in values}  # fmt: skip
    older = {names[name]: value for name, value in values.items()}
    assert older.keys() != values.keys()
    save_file(older, folder / WEIGHTS)
    torch.testing.assert_close(open_autoencoder(folder).encoded(x), model.encoded(x))
    older.popitem()
    save_file(older, folder / WEIGHTS)
    with pytest.raises(WeftError, match="do not fit its config"):
        open_autoencoder(folder)


@pytest.mark.soak
def test_training_reconstructs_and_latents_are_of_one_size() -> None:
    images = pictures(64)
    model = small_autoencoder(images, 2, (4, 8))
    errors: list[float] = []
    train_autoencoder(model, images, 40, 2e-2, passed=lambda step, error: errors.append(error))  # fmt: skip
    assert errors[-1] < 0.5 * errors[0]
    latents = model.encoded(torch.from_numpy(images.pixels)).detach()
    assert latents.shape == (64, 2, 2, 2)
    assert abs(float(latents.mean())) < 1e-4 and abs(float(latents.std()) - 1) < 1e-3


def test_images_that_cannot_be_encoded_are_one_line(tmp_path: Path) -> None:
    folder = str(save_autoencoder(small_autoencoder(pictures(), 2, (4, 8)), tmp_path / "v"))  # fmt: skip
    with pytest.raises(UsageError, match="multiples of 2"):
        encoded_pictures(pictures(side=5), folder)
    colours = PictureSet(np.zeros((2, 3, 4, 4), np.float32), np.zeros(2, np.int64), ())
    with pytest.raises(UsageError, match=r"data\.settings\.colours = false"):
        encoded_pictures(colours, folder)
    with pytest.raises(UsageError, match="videos"):
        videos = np.zeros((2, 1, 2, 4, 4), np.float32)
        encoded_pictures(PictureSet(videos, np.zeros(2, np.int64), ()), folder)
    with pytest.raises(WeftError, match="cannot be read as an autoencoder"):
        encoded_pictures(pictures(), str(tmp_path))
    with pytest.raises(UsageError, match="an autoencoder is AutoencoderKL"):
        autoencoder_settings({"_class_name": "AutoencoderDC"})
    for key, value in {
        "block_out_channels": [1 << 30], "down_block_types": 5,
        "up_block_types": [["x"]], "scaling_factor": 0, "shift_factor": float("nan"),
    }.items():  # fmt: skip
        with pytest.raises(UsageError, match=f"config.json.*{key}"):
            autoencoder_settings({"_class_name": "AutoencoderKL", key: value})
    # weights that are none, a configuration that is none, and sizes for which there is no memory
    config, weights = Path(folder) / "config.json", Path(folder) / WEIGHTS
    whole = json.loads(config.read_text())
    config.write_text(json.dumps(whole | {"block_out_channels": [1 << 12, 1 << 16]}))
    with pytest.raises(WeftError, match="do not fit its config"):
        open_autoencoder(folder)
    config.write_text("[]")
    with pytest.raises(WeftError, match="cannot be read as an autoencoder"):
        open_autoencoder(folder)
    config.write_text(json.dumps(whole))
    weights.write_bytes(b"no weights at all")
    with pytest.raises(WeftError, match="cannot be read as an autoencoder"):
        open_autoencoder(folder)


def test_another_scale_is_another_autoencoder(tmp_path: Path) -> None:
    """Scale and shift are in the configuration alone, so that a digest of the weights does not tell them."""
    folder = save_autoencoder(small_autoencoder(pictures(), 2, (4, 8)), tmp_path / "v")
    files = autoencoder_file(str(folder))
    assert remembered_autoencoder(files) is not None
    config = folder / "config.json"
    text = config.read_text().replace('"scaling_factor": 1.0', '"scaling_factor": 2.0')
    config.write_text(text)
    with pytest.raises(WeftError, match=r"scaling_factor = 2.0, and had 1.0"):
        remembered_autoencoder(files)


def test_a_cluster_of_latents_keeps_its_autoencoder(tmp_path: Path) -> None:
    """Else its expert would write latents as if they were pixels."""
    folder = str(save_autoencoder(small_autoencoder(pictures(), 2, (4, 8)), tmp_path / "v"))  # fmt: skip
    latents = encoded_pictures(pictures(), folder)
    clusters = PictureClusters(np.arange(6) % 2, 2, latents.fingerprint)
    assert cluster_part(latents, clusters, 1).encoder == latents.encoder == folder


def test_an_autoencoder_without_widths_is_one_line() -> None:
    with pytest.raises(UsageError, match="--widths has no channels"):
        small_autoencoder(pictures(), 2, ())


@pytest.mark.soak
def test_training_that_cannot_go_on_is_one_line() -> None:
    model = small_autoencoder(pictures(), 2, (12, 8))  # which 8 groups do not divide
    with pytest.raises(WeftError, match="give a --rate below"):
        train_autoencoder(model, pictures(), 20, 1e30)


def test_a_size_of_images_behind_an_autoencoder_is_in_pixels(tmp_path: Path) -> None:
    settings = {"size": [4, 4], "channels": 2, "patch": 2, "classes": 2}
    shape = ModelShape(kind="diffusion", layers=1, embed=8, heads=1, ffn=8, settings=settings)  # fmt: skip
    model: Any = parallelize(shape, Mesh.single(), Train()).model
    behind = small_autoencoder(pictures(), 2, (4, 8))
    denoiser = Denoiser(model, autoencoder=behind).sized((8, 4))
    assert denoiser.settings.size == (4, 2) and denoiser.pixel_size == (8, 4)
    with pytest.raises(UsageError, match="of up to 8,8 pixels, in patches of 4"):
        denoiser = Denoiser(model, autoencoder=behind).sized((8, 6))


RECIPE = """
[model]
kind = "diffusion"
layers = 1
embed = 8
heads = 1
ffn = 8
[data]
kind = "images"
path = "sklearn:digits"
validation = 0.1
settings = {{ encoder = "{encoder}" }}
[train]
steps = 2
batch = 4
micro_batch = 4
"""


@pytest.mark.soak
def test_a_model_learns_and_samples_behind_it(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    encoder, run = tmp_path / "encoder", tmp_path / "run"
    ask = ["data", "autoencoder", "sklearn:digits", "--widths", "4,8", "--latents", "2"]
    code, out, err = command(*ask, "--steps", 3, "--out", encoder)
    assert code == 0 and "latents of 2 x 4 x 4" in out, err
    recipe = tmp_path / "latents.toml"
    recipe.write_text(RECIPE.format(encoder=encoder))
    code, out, err = command("train", recipe, "--out", run)
    assert code == 0, err
    sample = ["sample", "--checkpoint", run, "--count", 2, "--steps", 2]
    code, _, err = command(*sample, "--out", tmp_path / "drawn")
    assert code == 0, err
    assert torch.load(tmp_path / "drawn/samples.pt").shape == (2, 1, 8, 8)
    # moved, and told; then another one in its place
    shutil.move(encoder, tmp_path / "moved")
    code, _, err = command(*sample, "--out", tmp_path / "no")
    assert code == 1 and "--autoencoder FOLDER" in err and err.count("\n") == 1, err
    moved = ["--autoencoder", tmp_path / "moved"]
    code, _, err = command(*sample, *moved, "--out", tmp_path / "again")
    assert code == 0, err
    for name in ("drawn", "again"):
        assert (tmp_path / name / "grid.png").read_bytes() == (tmp_path / "drawn/grid.png").read_bytes()  # fmt: skip
    save_autoencoder(small_autoencoder(pictures(), 2, (4, 8)), tmp_path / "other")
    code, _, err = command(*sample, "--autoencoder", tmp_path / "other", "--out", tmp_path / "no")  # fmt: skip
    assert code == 1 and "another autoencoder" in err, err
