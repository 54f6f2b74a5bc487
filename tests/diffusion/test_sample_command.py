"""``weft sample``: files, ranks, tables, and what it refuses in one line."""

from __future__ import annotations

import base64
import io
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import PIL.Image
import pytest
import torch

from tests.conftest import Command
from tests.pictures import OF_VIDEOS, picture_recipe, write_pictures, write_videos
from tests.started import Started
from weft.diffusion.image_files import image_grid
from weft.layout.mesh import Mesh
from weft.recipe import build_recipe
from weft.train.setup import prepare
from weft.train.training import train_job


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has made steps with images of 5 x 6 pixels, so that patches reach beyond them."""
    folder = tmp_path_factory.mktemp("pictures")
    values = picture_recipe(write_pictures(folder), train={"steps": 2})
    values["checkpoint"] = {"every": 0}
    train_job(prepare(build_recipe(values)), Mesh.single(), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def video_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has made steps with videos of three frames."""
    folder = tmp_path_factory.mktemp("videos")
    settings = {"positions": "rotary"}
    values = picture_recipe(
        write_videos(folder), settings, data=OF_VIDEOS, train={"steps": 2}
    )
    values["checkpoint"] = {"every": 0}
    train_job(prepare(build_recipe(values)), Mesh.single(), folder / "run")
    return folder / "run"


def samples(folder: Path) -> torch.Tensor:
    whole = torch.load(folder / "samples.pt")
    assert isinstance(whole, torch.Tensor)
    return whole


def test_samples_are_files(command: Command, run_folder: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "out", tmp_path / "table.html"
    ask = ["sample", "--checkpoint", run_folder, "--count", 3, "--steps", 2, "--guidance", 2]  # fmt: skip
    code, _, said = command(*ask, "--out", out, "--svg", page)
    assert code == 0 and "3 samples in " in said
    assert "ranks" not in said and str(out / "grid.png") in said
    assert sorted(file.name for file in out.iterdir()) == [
        "0000.png", "0001.png", "0002.png", "grid.png", "samples.pt"
    ]  # fmt: skip
    assert samples(out).shape == (3, 1, 5, 6)
    assert "queries, keys and values" in page.read_text()
    # the third of three is the third of a smaller batch's
    code, _, _ = command(*ask, "--out", tmp_path / "again", "--batch", 2)
    torch.testing.assert_close(samples(tmp_path / "again"), samples(out))


def test_videos_are_animations_of_any_length(
    command: Command, video_run: Path, tmp_path: Path
) -> None:
    import PIL.Image

    ask = ["sample", "--checkpoint", video_run, "--count", 2, "--steps", 2]
    code, _, said = command(*ask, "--out", tmp_path / "short")
    assert code == 0, said
    assert samples(tmp_path / "short").shape == (2, 1, 3, 5, 6)
    words = ["--frames", 6, "--table", "dualparal:frames=1,context=1"]
    code, _, said = command(*ask, "--out", tmp_path / "long", *words)
    assert code == 0, said
    assert samples(tmp_path / "long").shape == (2, 1, 6, 5, 6)
    for name, frames in {"short": 3, "long": 6}.items():
        with PIL.Image.open(tmp_path / name / "0001.gif") as animation:
            assert animation.n_frames == frames
    code, _, said = command(*ask, "--out", tmp_path / "none", "--frames", 6)
    assert code == 2 and "trained on 3" in said and said.count("\n") == 1


def test_samples_are_of_what_is_said(command: Command, tmp_path: Path) -> None:
    settings = {"text": 8, "words": 3}
    values = picture_recipe(write_pictures(tmp_path), settings, train={"steps": 2})
    values["checkpoint"] = {"every": 0}
    train_job(prepare(build_recipe(values)), Mesh.single(), tmp_path / "run")
    ask = ["sample", "--checkpoint", tmp_path / "run", "--count", 2, "--steps", 2]
    said = {
        "dark": ["dark"], "light": ["light"], "both": ["dark", "light"], "none": [],
    }  # fmt: skip
    made = {}
    for name, prompts in said.items():
        words = [word for prompt in prompts for word in ("--prompt", prompt)]
        code, _, err = command(
            *ask, "--out", tmp_path / f"of-{name}", "--guidance", 3, *words
        )
        assert code == 0, err
        made[name] = samples(tmp_path / f"of-{name}")
    assert not torch.allclose(made["dark"], made["light"])
    assert not torch.allclose(made["dark"], made["none"])
    torch.testing.assert_close(made["both"][0], made["dark"][0])
    torch.testing.assert_close(made["both"][1], made["light"][1])
    for wrong, line in (
        (["--class", 1], "reads texts and knows no classes"),
        (["--prompt", "much too long a text"], "has 5 words, and this model reads 3"),
    ):
        code, _, err = command(*ask, "--out", tmp_path / "x", *wrong)
        assert code == 2 and line in err and err.count("\n") == 1


@pytest.mark.slow(8)
def test_ranks_sample_what_one_device_does(
    command: Command, launched: Command, run_folder: Path, tmp_path: Path
) -> None:
    ask = ["sample", "--checkpoint", run_folder, "--count", 2, "--steps", 3]
    assert command(*ask, "--out", tmp_path / "one")[0] == 0
    for name, layout in {"cp": ["cp=2"], "pp": ["pp=2"], "old": ["cp=2", "--stale", 1]}.items():  # fmt: skip
        code, _, said = launched(*ask, "--out", tmp_path / name, "--layout", *layout)
        assert code == 0 and "on 2 ranks" in said, said
    whole = samples(tmp_path / "one")
    for name in ("cp", "pp"):
        torch.testing.assert_close(samples(tmp_path / name), whole, rtol=0, atol=1e-6)
    old = (samples(tmp_path / "old") - whole).abs().max()
    assert 1e-5 < old < 0.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layout", "tp=2"], "cp (bands of the image) or by pp"),
        (["--layout", "cp=2", "--stale", -1], "below 0"),
        (["--table", "distrifusing"], "did you mean 'distrifusion'?"),
        (["--table", "pcpp:part=2"], "part"),
        (["--table", "pipefusion:patches=9"], "3 rows of patches cannot be cut into 9"),
        (
            ["--class", "0,7"],
            "--class 0,7: there is no class '7'; the model's classes are dark, light, and none",
        ),
        (["--frames", 8], "makes images"),
        (["--prompt", "three"], "reads no texts; give --class, of 0 to 1"),
        (["--sampler", "eular"], "sampler"),
    ],
)
def test_what_cannot_be_sampled_is_one_line(
    command: Command, run_folder: Path, tmp_path: Path, words: list[object], said: str
) -> None:
    ask = ["sample", "--checkpoint", run_folder, "--count", 1, "--out", tmp_path / "x"]
    code, _, err = command(*ask, *words)
    assert code == 2 and said in err and err.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_what_writes_texts_refuses_a_model_of_images(
    command: Command, run_folder: Path
) -> None:
    code, _, err = command("generate", "--prompt", "3", "--checkpoint", run_folder)
    assert code == 2 and "weft sample --checkpoint" in err, err
    assert err.splitlines()[-1].startswith("weft: error: this model makes images")
    for words in (["--draft", "text"], ["--layout", "tp=2"], ["--tokens", 3], ["--engines", 2]):  # fmt: skip
        code, _, err = command("serve", "--checkpoint", run_folder, *words)
        assert code == 2 and err.count("\n") == 1, err
        assert f"{words[0]} is of models that write texts" in err


def test_classes_are_asked_for_by_their_folders_names(
    command: Command, run_folder: Path, tmp_path: Path
) -> None:
    ask = ["sample", "--checkpoint", run_folder, "--count", 2, "--steps", 2]
    for name, asked in {"names": "light,none", "numbers": "1,none"}.items():
        code, _, err = command(*ask, "--class", asked, "--out", tmp_path / name)
        assert code == 0, err
    torch.testing.assert_close(
        samples(tmp_path / "names"), samples(tmp_path / "numbers"), rtol=0, atol=0
    )


@pytest.mark.slow(5)
def test_the_command_serves_what_it_samples(
    command: Command, run_folder: Path, tmp_path: Path, request: Any
) -> None:
    words = ["serve", "--checkpoint", run_folder, "--port", 0, "--name", "tiny"]
    words += ["--requests", 2, "--waiting", 1]
    process = Started(*words)
    request.addfinalizer(process.kill)
    assert process.stdout is not None
    line = process.stdout.readline()
    said = r"tiny at (http://127\.0\.0\.1:\d+)/v1, with POST /v1/images/generations, 2 images of 6x5 in a batch"
    (address,) = re.findall(said, line)
    asked = {"prompt": "light", "n": 2, "seed": 4, "steps": 3, "guidance": 2}
    answer = httpx.post(f"{address}/v1/images/generations", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    ask = ["--count", 2, "--class", "light", "--seed", 4, "--steps", 3, "--guidance", 2]
    code, _, err = command("sample", "--checkpoint", run_folder, *ask, "--out", tmp_path / "out")  # fmt: skip
    assert code == 0, err
    for number, image in enumerate(answer.json()["data"]):
        written = np.asarray(PIL.Image.open(tmp_path / "out" / f"{number:04}.png"))
        encoded = io.BytesIO(base64.b64decode(image["b64_json"]))
        served = np.asarray(PIL.Image.open(encoded))
        assert np.abs(served.astype(int) - written).max() <= 1
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


@pytest.mark.parametrize("where", [["--here"], ["--cluster", "a100", "--gpus", 4]])
def test_plans_refuse_images_in_one_line(command: Command, where: list[object]) -> None:  # fmt: skip
    code, _, err = command("plan", "digits", *where)
    assert code == 2 and "makes images" in err and err.count("\n") == 1


def test_a_folder_that_exists_is_kept(command: Command, run_folder: Path) -> None:
    code, _, err = command("sample", "--checkpoint", run_folder, "--out", run_folder)
    assert code == 1 and "exists already" in err


def test_frames_of_a_video_stand_side_by_side() -> None:
    video = np.full((2, 1, 3, 4, 4), -1.0, np.float32)
    video[1, 0, 2] = 1.0
    grid = image_grid(video)
    # a strip of three frames of 4 pixels with gaps of 2, each pixel 12 times: one row for each video
    assert grid.shape == (2 * 48 + 2, 12 * (3 * 4 + 2 * 2))
    assert (grid[-48:, -48:] == 255).all() and (grid[-48:, :48] == 0).all()
    assert grid[:48].max() == 96
