"""Images of several sizes in one batch: which size each gets, that the rest counts nowhere, and layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from tests.conftest import Command
from tests.models.test_diffusion_transformer import difference
from tests.pictures import picture_recipe
from weft.data.batch import IGNORE
from weft.data.pictures import read_pictures
from weft.data.size_buckets import ImageSize, nearest_bucket
from weft.diffusion.denoiser import Denoiser
from weft.diffusion.image_loader import ImageLoader
from weft.diffusion.learned_sizes import SIZES_FILE, learned_sizes, sizes_file
from weft.diffusion.noise_process import NoiseProcess
from weft.errors import UsageError
from weft.layout.mesh import Mesh
from weft.models.diffusion_transformer import DiffusionTransformer
from weft.parallel.build import parallelize
from weft.prove.pool import ProcessPool
from weft.recipe import Train, build_recipe
from weft.train.setup import prepare

BUCKETS = [[4, 6], [6, 4], [4, 4]]


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Nine grey images of two classes, wide, high and square in turn."""
    folder = tmp_path_factory.mktemp("several")
    rng = np.random.default_rng(0)
    for i in range(9):
        place = folder / "ab"[i % 2]
        place.mkdir(exist_ok=True)
        size = ((8, 13), (9, 6), (5, 5))[i % 3]
        PIL.Image.fromarray(rng.integers(0, 256, size).astype(np.uint8)).save(
            place / f"{i}.png"
        )
    return str(folder)


def recipe_of(folder: str, settings: dict[str, Any], **change: Any) -> dict[str, Any]:
    data = {"settings": {"buckets": BUCKETS}}
    return picture_recipe(folder, settings, data=data, **change)


def test_an_image_gets_the_size_nearest_to_its_form(several: str) -> None:
    sizes = [ImageSize(*each) for each in (*BUCKETS, (8, 8))]
    for own, bucket in {(80, 130): (4, 6), (300, 200): (6, 4), (5, 5): (4, 4), (7, 7): (8, 8)}.items():  # fmt: skip
        assert nearest_bucket(sizes, ImageSize(*own)) == bucket
    pictures = read_pictures(several, buckets=BUCKETS)
    assert pictures.pixels.shape == (9, 1, 6, 6) and pictures.sizes is not None
    assert np.unique(pictures.sizes, axis=0).tolist() == sorted(BUCKETS)
    for pixels, (height, width) in zip(pictures.pixels, pictures.sizes, strict=True):
        assert not pixels[:, height:].any() and not pixels[:, :, width:].any()
        assert pixels[:, :height, :width].all()


@pytest.mark.parametrize("settings", [{}, {"positions": "rotary"}])
def test_each_image_is_learned_as_if_it_were_alone(
    several: str, settings: dict[str, Any]
) -> None:
    """The loss of a batch is the mean over the real patches of its images, each evaluated in its own size."""
    job = prepare(build_recipe(recipe_of(several, settings)))
    loader: Any = job.loader(job.corpus.train, Mesh.single())
    assert isinstance(loader, ImageLoader) and loader.pictures is not None
    numbers = range(5)
    batch = loader._assemble([numbers], 0, 6)  # a sixth row is of no image
    model = parallelize(job.shape, Mesh.single(), Train(dtype="float64")).model
    assert isinstance(model, DiffusionTransformer)
    assert batch.arrays is not None and {*loader.pictures.sizes.ravel()} == {4, 6}
    empty = torch.zeros(0, dtype=torch.int32)
    loss = model(batch.tokens, batch.positions, empty, learned=batch)
    own, patches = 0.0, 0
    from weft.diffusion.image_loader import drawn_pictures

    settings_of = model.settings
    drawn = drawn_pictures(loader.pictures, loader.order, settings_of, loader.seed, numbers, 5)  # fmt: skip
    process = NoiseProcess.of(settings_of)
    for row, number in enumerate(numbers):
        height, width = loader.pictures.sizes[loader.order.picture(number)].tolist()
        one = [x[row : row + 1] for x in (drawn.image, drawn.noise)]
        image, noise = (x[..., :height, :width].double() for x in one)
        time = drawn.time[row : row + 1]
        denoiser = Denoiser(model).sized((height, width))
        noised = process.noised(image, noise, time)
        predicted = denoiser(noised, time, drawn.condition[row : row + 1])
        error = (predicted - process.target_of(image, noise, time)).square()
        own = own + error.sum() / settings_of.patch_values
        patches += height * width // settings_of.patch**2
    # noised images are kept in float32
    torch.testing.assert_close(loss, own, rtol=1e-5, atol=0)
    assert int((batch.labels != IGNORE).sum()) == patches
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


SLOW = pytest.mark.soak


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ({"cp": 2}, {"positions": "rotary"}),
        ({"dp": 2}, {}),
        pytest.param({"shard": 2}, {}, marks=SLOW),
        pytest.param({"tp": 2}, {}, marks=SLOW),
        pytest.param({"pp": 2}, {}, marks=SLOW),
        pytest.param({"pp": 2, "cp": 2}, {"text": 5, "words": 2, "word_rows": 6}, marks=SLOW),
    ],
)  # fmt: skip
def test_a_layout_trains_on_several_sizes_as_one_device_does(
    pool: ProcessPool, several: str, layout: dict[str, Any], settings: dict[str, Any]
) -> None:
    values = recipe_of(several, settings, layout=layout)
    world = build_recipe(values).layout.world
    proof = pool.run(world, difference, values)[0]
    assert proof is not None and proof.ok, proof


def test_a_size_that_no_image_gets_is_said(several: str) -> None:
    (note,) = read_pictures(several, buckets=[*BUCKETS, [64, 2]]).notes
    assert "no image gets the size 64 x 2," in note
    assert not read_pictures(several, buckets=BUCKETS).notes


def test_a_checkpoint_knows_the_learned_sizes_the_commonest_first(several: str) -> None:
    pictures = read_pictures(several, buckets=[[4, 6], [6, 4], [64, 2]])
    assert learned_sizes(sizes_file(pictures.sizes)) == ((4, 6), (6, 4))
    assert [tuple(s) for s in pictures.sizes.tolist() if s == [4, 6]] == [(4, 6)] * 6
    assert sizes_file(None) == {} and learned_sizes({}) == ()
    assert learned_sizes({SIZES_FILE: b"[[1]]"}) == ()


def test_wrong_buckets_are_one_line(several: str) -> None:
    wrong: Any
    for wrong in ([[4]], [4, 4], 5, "4,4", [["4", 4]], [[4, 0]], [[4.5, 4]], [None]):
        with pytest.raises(UsageError, match="should be heights and widths"):
            read_pictures(several, buckets=wrong)
    with pytest.raises(UsageError, match="leave one out"):
        read_pictures(several, size=(4, 4), buckets=BUCKETS)
    with pytest.raises(UsageError, match="the digits have one"):
        read_pictures("sklearn:digits", buckets=BUCKETS)
    with pytest.raises(UsageError, match=r"no multiples of model\.settings\.patch = 3"):
        prepare(build_recipe(recipe_of(several, {"patch": 3})))


@pytest.mark.soak
def test_samples_are_of_the_size_that_is_asked_for(
    command: Command, several: str, tmp_path: Path
) -> None:
    recipe, run = tmp_path / "several.toml", tmp_path / "run"
    recipe.write_text(f"""
[model]
kind = "diffusion"
layers = 1
embed = 8
heads = 1
ffn = 8
[data]
kind = "images"
path = "{several}"
settings = {{ buckets = {BUCKETS} }}
[train]
steps = 2
batch = 4
micro_batch = 4
""")
    code, out, err = command("train", recipe, "--out", run)
    assert code == 0 and "images of several sizes" in out + err, err
    sample = ["sample", "--checkpoint", run, "--count", 2, "--steps", 2]
    for table in ([], ["--table", "pipefusion:patches=2"]):
        drawn = tmp_path / f"drawn{len(table)}"
        code, _, err = command(*sample, "--size", "6,4", *table, "--out", drawn)
        assert code == 0, err
        assert torch.load(drawn / "samples.pt").shape == (2, 1, 6, 4)
    drawn = tmp_path / "usual"
    assert command(*sample, "--out", drawn)[0] == 0
    assert [*torch.load(drawn / "samples.pt").shape[2:]] in BUCKETS  # and not 6 x 6
    code, _, err = command(*sample, "--size", "6,6", "--out", tmp_path / "unlearned")
    assert code == 0 and "has learned " in err and "not this size" in err
    wrong = {
        "7,4": "of up to 6,6",
        "8,8": "of up to 6,6",
        "x": "whole numbers",
        "6": "height and",
    }
    for size, words in wrong.items():
        code, _, err = command(*sample, "--size", size, "--out", tmp_path / "no")
        assert code == 2 and words in err and err.count("\n") == 1, err
