"""A layout tried out: a few real training steps in ranks of their own, for ``weft plan --probe`` and benchmarks."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.cli.failure import leave, report_failure
from weft.cli.launch import in_ranks, launch, part_ranks, set_threads
from weft.layout.mesh import Mesh
from weft.recipe import Recipe, load_recipe

WARM, ENOUGH = 3, 12
#: Seconds after which no further step is begun, and after which a trial is given up.
LIMIT_S, PATIENCE_S = 15.0, 300.0


@dataclass(frozen=True)
class Measured:
    """``seconds`` of a step (median), peak resident or device bytes of the fullest rank; or why there are none."""

    seconds: float = 0.0
    memory: float = 0.0
    reason: str = ""


def trial(recipe: Path, world: int) -> Measured:
    """Run the recipe of file ``recipe``, whose layout has ``world`` ranks, for some steps on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found"
        command = [sys.executable, "-m", "weft.cli.trial", str(recipe), str(out)]
        if world > 1:
            code = launch([], world, command)
        else:
            try:
                code = subprocess.run(command, timeout=PATIENCE_S).returncode
            except subprocess.TimeoutExpired:
                code = 124
        if code > 128:
            raise KeyboardInterrupt
        if code or not out.exists():
            return Measured(reason=f"a rank ended with code {code}")
        return Measured(**json.loads(out.read_text()))


def steps(recipe: Recipe) -> Iterator[Mesh]:
    """Be a rank: join the others, set up, then train a step before every item."""
    from weft.cli.train import join
    from weft.train.rehearse import batches_of
    from weft.train.setup import assemble, device_type
    from weft.train.step import train_step

    set_threads(recipe.train.threads, recipe.layout.world)
    device = device_type(recipe)
    join(device, recipe.train.timeout)
    mesh = Mesh.create(recipe.layout, device)
    shape, batches = batches_of(recipe)
    model, state = assemble(shape, mesh, recipe)
    for step in range(sys.maxsize):
        train_step(model, state, batches(mesh, step), mesh, lr=recipe.optimizer.lr, clip=1.0)
        yield mesh


def be_rank(recipe: Recipe, out: Path) -> None:
    """Steps until they are enough; rank 0 writes the :class:`Measured` of all."""
    import torch
    import torch.distributed as dist

    from weft.layout.mesh import from_all
    from weft.observe.flops import memory_gib

    taken: list[float] = []
    begun = last = time.perf_counter()
    for mesh in steps(recipe):
        if mesh.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        taken.append(now - last)
        # The first rank says when it is over, as clocks differ.
        over = len(taken) > WARM and (len(taken) >= WARM + ENOUGH or now - begun > LIMIT_S)
        told = torch.tensor(float(over), device=mesh.device)
        if recipe.layout.world > 1:
            dist.broadcast(told, 0)
        if told.item():
            break
        last = time.perf_counter()
    seconds = from_all(statistics.median(taken[WARM:]))
    memory = from_all(2**30 * memory_gib(mesh.device).peak)
    if mesh.is_main:
        out.write_text(json.dumps({"seconds": statistics.mean(seconds), "memory": max(memory)}))
    part_ranks()


def main() -> int:
    in_ranks()
    try:
        be_rank(load_recipe(sys.argv[1]), Path(sys.argv[2]))
    except Exception as error:  # told once, by the launcher
        return report_failure(error)
    leave(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
