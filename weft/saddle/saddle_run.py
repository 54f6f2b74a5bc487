"""A search for a saddle point from ``weft train`` to its last checkpoint, on every rank."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from weft.errors import WeftError
from weft.layout.mesh import Mesh
from weft.recipe.recipe import Recipe
from weft.registry import find
from weft.saddle.device_exchange import DeviceExchange
from weft.saddle.saddle_method import SaddleMethod
from weft.saddle.saddle_state import SaddleState
from weft.train.progress_recorder import ProgressRecorder
from weft.train.progress_run import ProgressRun
from weft.train.training import Outcome


def open_saddle(recipe: Recipe, mesh: Mesh) -> SaddleMethod:
    """Build the method that searches for the saddle point of the recipe's problem. The problem has ``saddle.devices``
    simulated devices, each with an objective of its own. They are divided equally over the data parallel ranks of
    ``mesh``, each of which computes the objectives of its devices.
    """
    settings = recipe.saddle
    assert settings is not None
    dtype = {"float32": torch.float32, "float64": torch.float64}[recipe.train.dtype]
    problem = find("saddle-problem", settings.problem).implementation(
        settings, recipe.train.seed, dtype, mesh.device
    )
    exchange = DeviceExchange(mesh, settings.devices, recipe.train.seed)
    method: SaddleMethod = find("saddle-method", settings.method).implementation(
        problem, exchange, settings
    )
    return method


def saddle_facts(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that must not change when a run is continued. They are the settings of ``[saddle]`` without
    the number of rounds, the interval of evaluations and the learning rate. Seed and type of ``[train]`` are added.
    """
    assert recipe.saddle is not None
    facts: dict[str, Any] = recipe.saddle.model_dump(mode="json")
    for key in ("rounds", "evaluate", "lr"):
        facts.pop(key)
    return facts | {"train.seed": recipe.train.seed, "train.dtype": recipe.train.dtype}


def saddle_job(
    recipe: Recipe, mesh: Mesh, out: Path | None = None, resume: str | None = None
) -> Outcome:
    """Search for a saddle point of the recipe's min-max problem, measure the result, and save. All ranks must call it.

    The search ends when the recipe's rounds are over or a signal arrives.

    ``out``: the folder to create; ``resume``: the run or checkpoint to continue. Raises :class:`WeftError` if the
    parameters are no longer finite.
    """
    settings = recipe.saddle
    assert settings is not None
    with ExitStack() as stack:
        method = open_saddle(recipe, mesh)
        run = ProgressRun(recipe, mesh, out, resume, method.size, stack)
        state = SaddleState(method, mesh)
        facts = saddle_facts(recipe)
        checkpoint = run.load(state.saved(), "saddle", facts, "another kind of run")
        if checkpoint is not None:
            method.resume(run.progress.updates)
            run.notes.append(f"resumed from {checkpoint} at round {run.progress.step}")
        parameters = sum(t.numel() for t in method.values.values())
        title = (
            f"{recipe.name}: {settings.method} on {settings.problem} over {settings.devices} devices, {parameters:,} "
            f"parameters on {recipe.layout}"
        )
        run.begin(state, title, settings.rounds, parameters, "saddle", facts)
        progress, recorder, stopped = run.progress, run.recorder, False
        while progress.step < settings.rounds and not stopped:
            _next_round(recipe, method, run)
            stopped = run.asked_to_stop()
            if settings.evaluate and progress.step % settings.evaluate == 0:
                _measure(method, recorder, mesh)
            run.save_if_due()
        if stopped:
            run.say_who_stopped()
        elif run.complete_before:
            recorder.event(
                f"the run is complete: it has taken {progress.step} rounds; raise saddle.rounds to go on"
            )
        else:
            if not settings.evaluate or progress.step % settings.evaluate:
                _measure(method, recorder, mesh)
            if mesh.is_main:
                method.problem.write_results(method.values, run.stored.folder)
        return run.finish()


def _next_round(recipe: Recipe, method: SaddleMethod, run: ProgressRun) -> None:
    """Take one round and record it. Collective. Raises :class:`WeftError` if parameters are no longer finite."""
    settings, progress, recorder = recipe.saddle, run.progress, run.recorder
    assert settings is not None
    begun, spent = time.perf_counter(), time.process_time()
    run.checkpoints.wait_for_copy()
    changes = method.take_round(progress.step)
    progress.step += 1
    progress.updates = method.wholes
    change = math.sqrt(sum(float(t.square().sum()) for t in changes.values()))
    if not math.isfinite(change):
        # all ranks have the same values and leave together
        other = ", or choose method = 'masha1' or 'masha2'"
        raise WeftError(
            f"saddle.method = {settings.method!r} has left all bounds in round {progress.step}: lower saddle.lr = "
            f"{settings.lr:g}{'' if settings.method.startswith('masha') else other}"
        )
    sent, received = method.traffic(progress.step)
    if progress.step % recipe.observe.every == 0:
        recorder.log(
            "train", change=change, lr=settings.lr, sent=sent, received=received, whole=method.wholes,
            step_s=time.perf_counter() - begun, processor_s=time.process_time() - spent,
        )  # fmt: skip
    recorder.show(grad_norm=change / settings.lr, lr=settings.lr)


def _measure(method: SaddleMethod, recorder: ProgressRecorder, mesh: Mesh) -> None:
    """Measure, record and print how good the parameters are. Collective."""
    values = mesh.on_main(lambda: method.problem.measures(method.values))
    recorder.log("saddle", **values)
    shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    recorder.event(f"measured: {shown}")
