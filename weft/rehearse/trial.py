"""Tries a layout: a few real training steps in ranks of their own, for ``weft plan --probe`` and benchmarks.

These ranks run ``python -m weft.rehearse.trial RECIPE OUT``.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.errors import UsageError, WeftError
from weft.layout.mesh import Mesh
from weft.planner.explain import title
from weft.planner.finalists import Final
from weft.planner.planned_model import PlannedModel
from weft.planner.planned_recipe import recipe_tree
from weft.recipe import Recipe, load_recipe
from weft.recipe.toml import write_toml
from weft.rehearse.local_choice import correct_by_measured, to_try
from weft.run.failure import leave, report_failure, show
from weft.run.launch import run_ranks
from weft.run.rank_processes import in_ranks, rank_process
from weft.run.signals import requests, take_ctrl_c

WARM, ENOUGH = 3, 12
#: Seconds after which no further step is begun, and after which a trial of one rank is given up.
LIMIT_S, PATIENCE_S = 15.0, 300.0


@dataclass(frozen=True)
class Measured:
    """Measurements of a trial, in which a layout runs for some steps.

    ``seconds``: median seconds of a step. ``memory``: peak bytes on the fullest rank, resident ones on a CPU and those
    of the device on a GPU. If the trial failed, ``reason`` says why, and the numbers are 0.
    """

    seconds: float = 0.0
    memory: float = 0.0
    reason: str = ""


def trial(recipe: Path, world: int) -> Measured:
    """Run some steps of the recipe in the file ``recipe`` on this machine, and return their time and memory.

    ``world``: number of ranks of the recipe's layout.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found"
        command = [sys.executable, "-m", "weft.rehearse.trial", str(recipe), str(out)]
        if world > 1:
            ended = run_ranks(command, world)
            if ended.code > 128:
                raise KeyboardInterrupt
            if ended.cause is not None:
                show(ended.cause)
            code = ended.code
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


def run_trials(
    finals: Sequence[Final],
    model: PlannedModel,
    count: int,
    devices: int,
    say: Callable[[str], None],
) -> tuple[list[Final], list[tuple[Final, Measured]]]:
    """Run at least ``count`` of the planned layouts ``finals`` of ``model`` here, and correct the predictions.

    Returns two lists. The first has all of ``finals`` with corrected times, fastest first, without layouts that failed.
    The second has a pair for each trial: the layout with its predicted time, and the measurement.

    The best layout for every number of ranks is tried first. If a layout that has not run then comes first by the
    corrected times, it is tried as well. ``devices``: number of ranks that this machine can hold. ``say``: called with
    lines about progress. Raises :class:`WeftError` if no layout ran, and :class:`UsageError` for a layout that needs
    more ranks.
    """
    waiting, ranked = to_try(finals, count), list(finals)
    if large := next((final for final in waiting if final.plan.world > devices), None):
        raise UsageError(
            f"--probe runs layouts on this machine, which can hold {devices} ranks; {title(large)} has "
            f"{large.plan.world:.0f}: leave it out, or give --gpus {devices}"
        )
    trials: list[tuple[Final, Measured]] = []
    with tempfile.TemporaryDirectory() as folder:
        while waiting:
            final = waiting.pop(0)
            say(
                f"running {title(final)} ({len(trials) + 1} of {len(trials) + 1 + len(waiting)})"
            )
            path = Path(folder) / f"{len(trials)}.toml"
            path.write_text(write_toml(recipe_tree(final, model)))
            trials.append((final, trial(path, int(final.plan.world))))
            failed = [f for f, done in trials if not done.seconds]
            kept = [f for f in finals if all(f is not x for x in failed)]
            ranked = correct_by_measured(
                kept, [(f, done.seconds) for f, done in trials if done.seconds]
            )
            # what comes first now is to have run, too
            if not waiting and ranked and len(trials) < 2 * count:
                first = next(
                    (
                        f
                        for f in kept
                        if f.plan == ranked[0].plan and f.order == ranked[0].order
                    ),
                    None,
                )
                waiting = (
                    [first]
                    if first is not None and all(first is not f for f, _ in trials)
                    else []
                )
    if not ranked:
        raise WeftError(
            f"none of the {len(trials)} layouts that were tried ran: {trials[0][1].reason}"
        )
    return ranked, trials


def steps(recipe: Recipe) -> Iterator[Mesh]:
    """Join the run of ``recipe`` as one of its ranks, and yield the mesh after each training step."""
    from weft.rehearse.rehearsed_step import batches_of
    from weft.train.setup import build_for_training, device_type
    from weft.train.step import train_step

    mesh = Mesh.create(recipe.layout, device_type(recipe))
    shape, batches = batches_of(recipe)
    model, state = build_for_training(shape, mesh, recipe)
    for step in range(sys.maxsize):
        train_step(
            model, state, batches(mesh, step), mesh, lr=recipe.optimizer.lr, clip=1.0
        )
        yield mesh


def measure_steps(recipe: Recipe, out: Path) -> None:
    """Train for enough steps as one of the ranks of ``recipe``.

    At the end rank 0 writes the :class:`Measured` of all ranks to the file ``out``.
    """
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
        over = len(taken) > WARM and (
            len(taken) >= WARM + ENOUGH or now - begun > LIMIT_S
        )
        ended = torch.tensor(float(over), device=mesh.device)
        if recipe.layout.world > 1:
            dist.broadcast(ended, 0)
        if ended.item():
            break
        last = time.perf_counter()
    seconds = from_all(statistics.median(taken[WARM:]))
    memory = from_all(2**30 * memory_gib(mesh.device).peak)
    if mesh.is_main:
        out.write_text(
            json.dumps({"seconds": statistics.mean(seconds), "memory": max(memory)})
        )


def run_trial() -> int:
    """Run as one rank of a trial, in a process that :func:`trial` has started; return the exit code."""
    from weft.train.setup import device_type

    in_ranks()
    requests.watch()
    take_ctrl_c()
    try:
        recipe = load_recipe(sys.argv[1])
        with rank_process(
            device_type(recipe), recipe.train.timeout, recipe.train.threads
        ):
            measure_steps(recipe, Path(sys.argv[2]))
    except Exception as error:  # the launcher prints it, once for all ranks
        return report_failure(error)
    except KeyboardInterrupt:
        leave(requests.code)
        return requests.code
    leave(0)
    return 0


if __name__ == "__main__":
    sys.exit(run_trial())
