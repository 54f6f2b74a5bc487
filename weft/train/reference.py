"""Log-probabilities of answers under the reference model of preference losses, computed once before training.

The reference model does not change during training. It runs once over every pair, under the layout of the run, and the
results are cached, so that no training step runs it.
"""

import dataclasses
import gc
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from weft.cache import build_once, cache_root, digest
from weft.checkpoint.resume_check import model_fingerprint
from weft.data.batch import Batch, Pairs
from weft.data.order import Order, Stream
from weft.errors import WeftError
from weft.layout.axes import MODEL_AXES
from weft.layout.mesh import Mesh
from weft.models.hooks import Hooks
from weft.models.preference import needs_reference
from weft.models.values import Values
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Recipe
from weft.train.setup import Job, reference_model
from weft.train.step import evaluate

FILE = "log_probabilities.npy"


def with_cached_reference(job: Job, mesh: Mesh) -> tuple[Job, list[str]]:
    """Return ``job`` with the reference model's log-probabilities if its loss needs them, and lines to print.

    The log-probabilities are read from the cache; if they are not there or damaged, they are computed and cached.
    Collective.
    """
    if not needs_reference(job.recipe.loss):
        return job, []
    pairs, notes = _pairs_of(job), list[str]()
    folder = mesh.on_main(lambda: _folder(job))
    table, damage = mesh.on_main(lambda: _read(folder, pairs))
    if damage:
        notes.append(f"{damage}; computed again")
    if table is None:
        if mesh.speaks:
            print(
                f"log-probabilities of {pairs:,} pairs by the reference model, once",
                flush=True,
            )
        shape, values = _reference(job)
        table = log_probabilities(job, mesh, shape, values, _all_steps(job, mesh))
        mesh.on_main(lambda: _write(folder, table))
    return _with(job, table), [
        *notes,
        f"the reference model's log-probabilities are in {folder}",
    ]


def with_computed_reference(job: Job, mesh: Mesh, values: Values, steps: int) -> Job:
    """Return ``job`` with the reference log-probabilities of its first ``steps`` steps, if its loss needs any.

    ``values``: parameter values of the reference model, whose shape is that of the job's model. Nothing is cached.
    Collective.
    """
    if not needs_reference(job.recipe.loss):
        return job
    loader, batch = job.loader(job.corpus.train, mesh), job.recipe.train.batch
    batches = filter(None, (loader.step(i * batch) for i in range(steps)))
    return _with(job, log_probabilities(job, mesh, job.shape, values, batches))


def log_probabilities(
    job: Job,
    mesh: Mesh,
    shape: ModelShape,
    values: Values | None,
    steps: Iterable[Sequence[Batch]],
) -> np.ndarray:
    """Compute the log-probabilities of both answers of every pair under a reference model. Collective.

    ``shape`` and ``values``: shape and parameter values of the reference model. ``steps``: the batches of each step.
    The result is an array ``[pairs, 2]`` for all pairs of the job, with 0 for pairs that are not in ``steps``. Raises
    :class:`WeftError` if a log-probability is not finite.
    """
    # both answers, and how often they were counted
    table = torch.zeros(_pairs_of(job), 3, dtype=torch.float64)
    # Ranks that share the work on the same tokens have the same sums.
    recorded = not any(mesh.rank(axis) for axis in (*MODEL_AXES, "cp"))

    def record(sums: torch.Tensor, lengths: torch.Tensor, pairs: Pairs) -> torch.Tensor:
        if recorded:
            table[torch.from_numpy(pairs.number)] = F.pad(
                sums.detach().cpu(), (0, 1), value=1.0
            )
        return 0 * sums.sum(1)

    model, state = parallelize(
        shape,
        mesh,
        job.recipe.train,
        values,
        job.recipe.data.seq_len,
        job.recipe.memory,
        hooks=Hooks(objective=record),
    )
    evaluate(model, state, steps, mesh)
    if mesh.layout.world > 1:
        table = table.to(mesh.device)
        dist.all_reduce(table, group=mesh.step_group)
    del model, state
    gc.collect()
    table = table[:, :2] / table[:, 2:].clamp(min=1)
    if not torch.isfinite(table).all():
        raise WeftError(
            "the reference model gives answers no finite probability; look at its weights (loss.reference)"
        )
    return table.cpu().numpy()


def _streams(job: Job) -> list[Stream]:
    validation = job.corpus.validation
    return [*job.corpus.train.streams, *(validation.streams if validation else ())]


def _pairs_of(job: Job) -> int:
    return sum(len(stream.pairs or ()) for stream in _streams(job))


def _all_steps(job: Job, mesh: Mesh) -> Iterator[Sequence[Batch]]:
    """Yield batches that contain every pair of a job once."""
    for stream in _streams(job):
        order = Order((stream,), (1.0,), seed=0, epochs=1)
        loader = job.loader(order, mesh)
        for position in range(0, order.total or 0, job.recipe.train.batch):
            yield loader.step(position) or []


def _with(job: Job, table: np.ndarray) -> Job:
    """Return ``job`` with the log-probabilities of ``table`` in the pairs of its data."""

    def known(order: Order) -> Order:
        streams = []
        for stream in order.streams:
            assert stream.pairs is not None
            pairs = dataclasses.replace(
                stream.pairs, reference=table[stream.pairs.number]
            )
            streams.append(dataclasses.replace(stream, pairs=pairs))
        return dataclasses.replace(order, streams=tuple(streams))

    validation = job.corpus.validation and known(job.corpus.validation)
    corpus = dataclasses.replace(
        job.corpus, train=known(job.corpus.train), validation=validation
    )
    return dataclasses.replace(job, corpus=corpus)


def _reference(job: Job) -> tuple[ModelShape, Values | None]:
    """Return the reference model: the one that the recipe names, or else the one from which the run starts."""
    from weft.checkpoint.weights import starting_values

    named = reference_model(job.recipe, job.corpus.tokenizer)
    return (
        (named.shape, named.values)
        if named
        else (job.shape, starting_values(job.recipe, job.shape))
    )


def _folder(job: Job) -> Path:
    """Return the cache folder of the log-probabilities; its name is a digest of model, data and precision."""
    recipe, shape = job.recipe, job.shape.model_dump(mode="json", exclude={"origin"})
    key = digest(
        1,
        job.corpus.fingerprint,
        _identity(recipe),
        recipe.loss.reference or shape,
        recipe.train.dtype,
    )
    return cache_root(recipe.data.cache) / f"reference-{key}"


def _identity(recipe: Recipe) -> str | int:
    name = recipe.loss.reference or recipe.model.origin
    return (
        recipe.train.seed
        if name is None or name.endswith(".json")
        else model_fingerprint(name)
    )


def _read(folder: Path, pairs: int) -> tuple[np.ndarray | None, str]:
    """Return the cached table if it is complete, and a line on the damage if it is not."""
    if not folder.exists():
        return None, ""
    try:
        table = np.load(folder / FILE)
        if (
            table.shape != (pairs, 2)
            or table.dtype != np.float64
            or not np.isfinite(table).all()
        ):
            raise ValueError(f"not the numbers of {pairs} pairs")
        return table, ""
    except (OSError, ValueError, EOFError) as error:
        return (
            None,
            f"{folder / FILE} is damaged ({getattr(error, 'strerror', None) or error})",
        )


def _write(folder: Path, table: np.ndarray) -> None:
    # damaged, or another run's, which is the same
    shutil.rmtree(folder, ignore_errors=True)
    build_once(folder, lambda making: np.save(making / FILE, table))
