"""Diffusion transformers: every layout trains as one device does, and what the model's parts compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pictures import OF_VIDEOS, picture_recipe, write_pictures, write_videos
from weft.errors import UsageError
from weft.layout.mesh import Mesh
from weft.models.diffusion_transformer import DiffusionTransformer
from weft.models.patches import patchify, unpatchify
from weft.parallel.build import parallelize
from weft.prove.equality import Difference, compare_with_one_device, run_layout
from weft.prove.pool import ProcessPool
from weft.recipe import ModelShape, Train, build_recipe
from weft.shapes.diffusion_shape import DiffusionSettings
from weft.shapes.foreign_names import projection_name
from weft.shapes.parameters import is_target, parameter_count, parameters
from weft.train.setup import prepare


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_videos(tmp_path_factory.mktemp("videos"))


def difference(values: dict[str, Any]) -> Difference | None:
    """On every rank: the layout; on rank 0 what differs from one device."""
    recipe = build_recipe(values)
    mesh, job = Mesh.create(recipe.layout, "cpu"), prepare(recipe)
    return compare_with_one_device(run_layout(job, mesh, steps=2), job, mesh)


SLOW = pytest.mark.soak
#: Names of classes are read as texts, by a table whose rows they share.
OF_TEXT = {"text": 5, "words": 2, "word_rows": 6}
#: The same, read by blocks that share one product with the time.
PIXART = {"form": "pixart", **OF_TEXT}
#: Layouts, with settings of the model.
CASES: list[Any] = [
    ({"dp": 2}, {"target": "v"}),
    ({"shard": 2}, {"positions": "rotary"}),
    ({"tp": 2}, {"target": "epsilon", "schedule": "linear", **OF_TEXT}),
    ({"cp": 2}, {"times": "logit-normal", **PIXART}),
    ({"pp": 2}, OF_TEXT),
    ({"cp": 2, "tp": 2}, {"positions": "rotary"}),
    pytest.param({"pp": 2, "schedule": "zb-h1", "tp": 2}, {}, marks=SLOW),
    pytest.param({"pp": 2, "cp": 2, "dp": 2}, {"target": "x"}, marks=SLOW),
    pytest.param({"dp": 2, "shard": 2, "tp": 2}, {}, marks=SLOW),
    pytest.param({"shard": 2, "cp": 2, "zero": 1}, {"patch": 3}, marks=SLOW),
    pytest.param({"cp": 2, "tp": 2}, OF_TEXT, marks=SLOW),
    pytest.param({"dp": 2, "shard": 2}, OF_TEXT, marks=SLOW),
    pytest.param({"tp": 2}, PIXART, marks=SLOW),
    pytest.param({"pp": 2}, PIXART, marks=SLOW),
    pytest.param({"dp": 2, "shard": 2}, {"positions": "rotary", **PIXART}, marks=SLOW),
    pytest.param({"pp": 2, "cp": 2, "tp": 2}, PIXART, marks=SLOW),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("layout", "settings"), CASES)
def test_a_layout_trains_as_one_device_does(
    pool: ProcessPool, pictures: str, layout: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Nine patches, of which some reach beyond the image; heads and widths that ranks do not divide."""
    values = picture_recipe(pictures, settings, layout=layout)
    world = build_recipe(values).layout.world
    proof = pool.run(world, difference, values)[0]
    assert proof is not None and proof.ok, proof


@pytest.mark.soak
@pytest.mark.parametrize("layout", [{"tp": 2}, {"zero": 3, "dp": 3}])
def test_adapters_of_both_attentions_train_as_on_one_device(
    pool: ProcessPool, pictures: str, layout: dict[str, Any]
) -> None:
    values = picture_recipe(
        pictures, {"zero": False, **OF_TEXT}, layout=layout, adapter={"rank": 3}
    )
    world = build_recipe(values).layout.world
    proof = pool.run(world, difference, values)[0]
    assert proof is not None and proof.ok, proof


def test_projections_of_cross_attention_are_called_as_those_of_attention() -> None:
    paths = [f"blocks.3.{side}.wq" for side in ("attention", "cross_attention")]
    assert [projection_name(path) for path in paths] == ["q_proj"] * 2
    assert is_target("q_proj", paths[1]) and is_target("wq", paths[1])
    assert projection_name("blocks.3.modulation.table") == "table"


@pytest.mark.parametrize(
    "layout",
    [
        {"cp": 2},
        pytest.param({"tp": 2}, marks=SLOW),
        pytest.param({"pp": 2, "shard": 2}, marks=SLOW),
        pytest.param({"dp": 2, "cp": 2, "tp": 2}, marks=SLOW),
    ],
)
def test_a_layout_trains_on_videos_as_one_device_does(
    pool: ProcessPool, videos: str, layout: dict[str, Any]
) -> None:
    """Two patches of frames, of which the second reaches beyond the video; heads of three pairs for three axes."""
    settings = {"positions": "rotary", "patch_frames": 2}
    values = picture_recipe(videos, settings, layout=layout, data=OF_VIDEOS)
    world = build_recipe(values).layout.world
    proof = pool.run(world, difference, values)[0]
    assert proof is not None and proof.ok, proof


def model_of(**settings: Any) -> DiffusionTransformer:
    shape = ModelShape(
        kind="diffusion", layers=2, embed=16, heads=2, ffn=32, init_std=0.1,
        settings={"size": (4, 6), "channels": 2, "classes": 3, "zero": False, **settings},
    )  # fmt: skip
    model = parallelize(shape, Mesh.single(), Train(dtype="float64")).model
    assert isinstance(model, DiffusionTransformer)
    return model


def test_patches_come_back_as_pixels() -> None:
    for size, patch in (((5, 6), 2), ((3, 5, 7), 3)):
        settings = DiffusionSettings(size=size, channels=2, patch=patch)
        pixels = torch.randn(2, 2, *size)
        patches = patchify(pixels, settings)
        assert patches.shape == (2, settings.patches, settings.patch_values)
        torch.testing.assert_close(unpatchify(patches, settings), pixels)


def test_parameters_are_those_of_the_notes() -> None:
    shape = ModelShape(
        kind="diffusion", layers=4, embed=64, heads=4, ffn=256,
        settings={"size": (8, 8), "channels": 1, "classes": 10},
    )  # fmt: skip
    assert parameter_count(shape, 0) == sum(row.numel for row in parameters(shape))
    assert parameter_count(shape, 0) == 4 * (4 * 64 * 65 + 6 * 64 * 65 + 64 * 256 * 2 + 320) + (
        64 * 5 + 64 * 257 + 64 * 65 + 11 * 64 + 128 * 65 + 4 * 65
    )  # fmt: skip


def test_a_setting_of_tokens_is_refused() -> None:
    for values, said in (
        ({"window": 3}, "model.window"),
        ({"settings": {"patches": 2}}, "patches"),
        ({"kv_heads": 1, "heads": 2}, "kv_heads"),
    ):
        with pytest.raises(UsageError, match=said) as refused:
            build_recipe({"model": {"kind": "diffusion", **values}})
        assert "\n" not in str(refused.value)


def test_texts_are_no_images_and_images_no_texts(pictures: str) -> None:
    values = picture_recipe(pictures)
    with pytest.raises(UsageError, match=r"set data\.kind = 'images'"):
        prepare(build_recipe(values | {"data": {"kind": "text", "path": pictures}}))
    with pytest.raises(UsageError, match=r"set model\.kind = 'diffusion'"):
        prepare(build_recipe({"data": values["data"] | {"tokenizer": "bytes"}}))


def test_sizes_that_no_patch_divides_are_said(pictures: str) -> None:
    job = prepare(build_recipe(picture_recipe(pictures)))
    assert any("padded to [6, 6]" in note for note in job.notes)
    assert job.recipe.data.seq_len == 9


def test_a_missing_folder_is_a_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        prepare(build_recipe(picture_recipe(str(tmp_path / "none"))))
