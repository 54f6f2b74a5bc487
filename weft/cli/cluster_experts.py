"""``weft experts --clusters``: an expert for each cluster of images, and the router that joins them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from weft.cli.expert_wishes import ExpertWish, NamedOverrides, read_expert
from weft.errors import UsageError

if TYPE_CHECKING:
    from weft.data.picture_part import PictureClusters
    from weft.data.pictures import PictureSet
    from weft.recipe import Recipe
    from weft.shapes.diffusion_shape import DiffusionSettings

CLUSTERS, ROUTER = "clusters.npz", "router.safetensors"


class DividedPictures(NamedTuple):
    """Images that are divided among experts, with the experts that are to be trained on them.

    Attributes:
        ``recipe``: the recipe that all experts share.
        ``pictures``: all images.
        ``settings``: settings of the shared recipe's model.
        ``clusters``: the cluster of each image.
        ``wishes``: the name and recipe of the expert of each cluster.
    """

    recipe: Recipe
    pictures: PictureSet
    settings: DiffusionSettings
    clusters: PictureClusters
    wishes: list[ExpertWish]


def cluster_names(clusters: int) -> list[str]:
    """Return the names of the experts of ``clusters`` clusters, one name for each."""
    return [f"cluster-{number}" for number in range(clusters)]


def divide_images(
    recipe: Path, overrides: Sequence[str], experts: Sequence[str], clusters: int, features: Path | None, out: Path,
) -> DividedPictures:  # fmt: skip
    """Divide the images of the recipe file ``recipe`` among experts, or read from the folder ``out`` how they were
    divided before.

    Nothing is written. ``overrides``: changes to the recipe, as texts ``section.key=value``. ``experts``: values of
    ``--expert``, which may change the recipe of some clusters. ``features``: file with a vector for each image. Raises
    :class:`UsageError` for experts whose predictions could not be combined.
    """
    from weft.curation.picture_clusters import divided_pictures
    from weft.diffusion.image_job import ImageJob
    from weft.recipe import load_recipe
    from weft.shapes.diffusion_shape import settings_of
    from weft.train.setup import prepare

    if clusters < 2:
        raise UsageError(
            f"--clusters {clusters}: one expert is a model of its own, which weft train trains; give at least 2"
        )
    own = _own_overrides(experts, clusters)
    shared = load_recipe(recipe, overrides)
    shared.need_model()
    if shared.model.kind != "diffusion":
        raise UsageError(
            f"--clusters divides images, and {recipe} writes texts; give its experts by --expert"
        )
    job = prepare(shared)
    assert isinstance(job, ImageJob) and job.pictures is not None
    pictures, file = job.pictures, out / CLUSTERS
    settings = settings_of(job.shape)
    if settings.text:
        raise UsageError(
            "--clusters is for images with classes or without; the router reads no texts. Leave out "
            "model.settings.text"
        )
    kept = _kept_clusters(file, pictures, clusters)
    if kept is None or features is not None:
        divided = divided_pictures(pictures, clusters, shared.data.seed, features)
        if kept is not None and kept.features != divided.features:
            raise UsageError(
                f"{file} was divided by other features than --features {features}; leave it out, or choose another "
                "--out"
            )
        kept = kept or divided
    wishes = [
        _cluster_wish(recipe, overrides, own[number], number, file, settings, pictures)
        for number in range(clusters)
    ]
    _check_left(shared, pictures, kept)
    return DividedPictures(shared, pictures, settings, kept, wishes)


def _own_overrides(experts: Sequence[str], clusters: int) -> dict[int, tuple[str, ...]]:
    """Return what the recipe of each cluster's expert differs in, by number."""
    own: dict[int, tuple[str, ...]] = {number: () for number in range(clusters)}
    names = cluster_names(clusters)
    for text in experts:
        each: NamedOverrides = read_expert(text)
        if each.name not in names:
            raise UsageError(
                f"--expert {each.name} is none of the experts {', '.join(names)}"
            )
        own[names.index(each.name)] += each.overrides
    return own


def _kept_clusters(
    file: Path, pictures: PictureSet, clusters: int
) -> PictureClusters | None:
    """Return how an earlier run of the command has divided ``pictures``; None if there was none."""
    from weft.data.picture_part import read_clusters

    if not file.exists():
        return None
    kept = read_clusters(file)
    if kept.fingerprint != pictures.fingerprint:
        raise UsageError(
            f"{file} divides other images than the recipe's; choose another --out"
        )
    if kept.clusters != clusters:
        raise UsageError(
            f"{file} has {kept.clusters} clusters, and --clusters {clusters}; choose another --out"
        )
    return kept


def _cluster_wish(
    recipe: Path, overrides: Sequence[str], own: Sequence[str], number: int, file: Path, settings: DiffusionSettings,
    pictures: PictureSet,
) -> ExpertWish:  # fmt: skip
    """Return the expert of cluster ``number``, whose recipe is checked against the shared ``settings``."""
    from weft.diffusion.image_job import about
    from weft.diffusion.picture_experts import check_joinable
    from weft.recipe import load_recipe
    from weft.shapes.diffusion_shape import completed_shape, settings_of

    name = f"cluster-{number}"
    part = f"data.settings.clusters={file}", f"data.settings.cluster={number}"
    loaded = load_recipe(recipe, [*overrides, *own, *part])
    loaded.need_model()
    if loaded.model.kind != "diffusion":
        raise UsageError(
            f"--expert {name} has model.kind = {loaded.model.kind!r}; experts of images are of kind 'diffusion'"
        )
    completed = completed_shape(loaded.model, about(pictures))
    check_joinable(f"--expert {name}", settings_of(completed), "the recipe", settings)
    return ExpertWish(name, (*own, *part), loaded)


def _check_left(
    recipe: Recipe, pictures: PictureSet, clusters: PictureClusters
) -> None:
    """Raise :class:`UsageError` for a cluster all of whose images are held out."""
    learned = ~pictures.held_out(recipe.data.held_out, recipe.data.seed)
    for number in range(clusters.clusters):
        if not learned[clusters.labels == number].any():
            raise UsageError(
                f"cluster {number} of {clusters.clusters} has no images to learn from ({clusters.sizes[number]} are "
                "held out); give fewer --clusters"
            )


def write_division(divided: DividedPictures, out: Path) -> None:
    """Write the division ``divided`` of images among experts into a file in the folder ``out``, unless the folder has
    that file already.
    """
    from weft.data.picture_part import write_clusters

    if not (out / CLUSTERS).exists():
        write_clusters(out / CLUSTERS, divided.clusters)
    sizes = ", ".join(f"{size:,}" for size in divided.clusters.sizes)
    typer.echo(f"{len(divided.pictures):,} images in clusters of {sizes}", err=True)


def join_images(
    divided: DividedPictures, out: Path, top: int, lost: Sequence[str], steps: int
) -> None:
    """Train the router of the experts of ``divided``, unless ``out`` has one already, and write the set of experts into
    the folder ``out``.

    ``top``: number of experts that are computed for an image in a step; 0: all. ``lost``: names of experts that are
    left out. ``steps``: number of the router's training steps.
    """
    from weft.cache import digest
    from weft.diffusion.cluster_router import (
        open_router,
        train_cluster_router,
        write_router,
    )
    from weft.train.expert_set import write_expert_set

    recipe, file = divided.recipe, out / ROUTER
    seed, share = recipe.data.seed, recipe.data.held_out
    identity = digest(
        divided.pictures.fingerprint, divided.clusters.labels.tolist(), divided.settings.model_dump(mode="json"),
        seed, share, steps,
    )  # fmt: skip
    stored = open_router(file) if file.exists() else None
    if stored is None or stored.identity != identity:
        held = divided.pictures.held_out(share, seed)
        trained = train_cluster_router(
            divided.pictures, divided.clusters, divided.settings, held, seed, steps, _show_progress(steps),
        )  # fmt: skip
        write_router(file, trained, identity)
        scores = trained.scores
    else:
        scores = stored.scores
    typer.echo(
        f"router: takes {scores.right:.1%} of {scores.images} noised images for their cluster; cross-entropy "
        f"{scores.loss:.3f}, {scores.prior:.3f} without looking",
        err=True,
    )
    names = [wish.name for wish in divided.wishes]
    prior = [0.0 if name in lost else 1.0 for name in names]
    write_expert_set(out, names, prior, top, ROUTER)


def _show_progress(steps: int) -> Callable[[int], None]:
    """Return what says on a terminal how many of the router's ``steps`` are done."""
    shown = sys.stderr.isatty()

    def show(step: int) -> None:
        if shown and (step == steps or step % 50 == 0):
            end = "\n" if step == steps else ""
            print(f"\rrouter {step}/{steps}", end=end, file=sys.stderr, flush=True)

    return show
