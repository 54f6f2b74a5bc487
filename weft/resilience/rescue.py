"""Saves the remaining state in the ranks' memory when they are too few, or have too little memory, to train on."""

from collections.abc import Sequence

import torch

from weft.checkpoint.boxes import replica_share
from weft.checkpoint.lease import Lease
from weft.checkpoint.levels import LevelStore
from weft.checkpoint.reshard import redistribute
from weft.checkpoint.save import Saver
from weft.checkpoint.storage import Storage
from weft.layout.dims import Tensor, extents
from weft.layout.mesh import Mesh, from_all
from weft.layout.parts import TORCH_DTYPES, Part
from weft.resilience.recover import Recovery, parts_to_give
from weft.resilience.snapshots import Snapshots
from weft.shapes.parameters import learns, parameters
from weft.train.runs import Run
from weft.train.setup import Job


def save_copies(
    recovery: Recovery,
    snapshots: Sequence[Snapshots],
    job: Job,
    run: Run,
    lease: Lease,
    mesh: Mesh,
) -> Storage:
    """Save the state of ``recovery``, which is in the ranks' memory, as a checkpoint. Collective over ``mesh``.

    Returns the checkpoint's storage, which is that of the last of the run's checkpoint levels. Each rank saves an equal
    share, and needs no memory beyond that share and its copies. Raises :class:`WeftError` if saving fails.

    ``snapshots``: this rank's copies of the state in memory; ``job``: the checked recipe with its opened data; ``run``:
    the run's folder and storages; ``lease``: this process's lease of them; ``mesh``: all ranks.
    """
    rank, world = mesh.rank("dp"), mesh.size("dp")
    facts = job.facts(recovery.progress)
    parts = list(parts_to_give(recovery, snapshots, rank))
    tensors: dict[str, Tensor] = {}
    for theirs in from_all(
        {name: part.tensor for name, part in parts}, mesh.step_group
    ):
        tensors |= theirs
    if "base" in facts:  # which has what does not learn
        freeze = job.recipe.train.freeze
        for parameter in parameters(job.shape):
            if not learns(parameter.name, job.shape, freeze):
                tensors.pop(f"model.{parameter.name}", None)
    targets = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        box = replica_share(
            tuple((0, size) for size in tensor.shape),
            tensor.itemsize,
            rank,
            world,
            number,
        )
        if box is not None:
            values = torch.empty(extents(box), dtype=TORCH_DTYPES[tensor.dtype])
            targets[name] = Part(values, box, tensor)
    redistribute(
        [(name, part) for name, part in parts if name in tensors],
        targets,
        mesh.step_group,
    )
    level: LevelStore = run.levels[-1]
    mesh.on_main(lambda: lease.take(run.places))
    saver = Saver(
        print, strict=True, timeout=job.recipe.train.timeout, group=mesh.step_group
    )
    try:
        step, meta = (
            recovery.progress.step,
            {"progress": recovery.progress.to_json(), **facts},
        )
        place = level.next_place(step)
        saver.save(place, step, targets, meta, job.files)
        saver.finish()
    finally:
        saver.close()
    return place
