"""A search for a saddle point from ``weft train`` to its last checkpoint, on every rank."""

from __future__ import annotations

import datetime
import math
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.best import Best
from weft.checkpoint.levels import check_hosts, open_levels
from weft.checkpoint.load import StoredCheckpoint
from weft.checkpoint.reshard import load_parts
from weft.checkpoint.run_checkpoints import Checkpoints
from weft.checkpoint.run_state import Progress
from weft.errors import WeftError
from weft.layout.mesh import Mesh, from_all
from weft.observe.host import describe_machine
from weft.recipe.recipe import Recipe
from weft.registry import find
from weft.run.signals import noted_signals, requests, stop_signals
from weft.saddle.device_exchange import DeviceExchange
from weft.saddle.saddle_method import SaddleMethod
from weft.saddle.saddle_state import SaddleState
from weft.train.progress_recorder import ProgressRecorder
from weft.train.progress_resume import check_facts, resume_newest
from weft.train.runs import Run, open_run
from weft.train.training import Outcome


def open_saddle(recipe: Recipe, mesh: Mesh) -> SaddleMethod:
    """Build the saddle method of ``recipe`` with its problem. Its devices are divided over the ranks of ``mesh``."""
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
    """Return the settings that must not change when a run is continued: all of ``[saddle]`` except the number of
    rounds, the interval of evaluations and the learning rate, and the seed and type of ``[train]``.
    """
    assert recipe.saddle is not None
    facts: dict[str, Any] = recipe.saddle.model_dump(mode="json")
    for key in ("rounds", "evaluate", "lr"):
        facts.pop(key)
    return facts | {"train.seed": recipe.train.seed, "train.dtype": recipe.train.dtype}


def saddle_job(
    recipe: Recipe, mesh: Mesh, out: Path | None = None, resume: str | None = None
) -> Outcome:
    """Search until the recipe's rounds are over or a signal arrives, measure the result, and save. Collective.

    ``out``: the folder to create; ``resume``: the run or checkpoint to continue. Raises :class:`WeftError` if the
    parameters are no longer finite.
    """
    from weft.checkpoint.lease import Lease

    settings = recipe.saddle
    assert settings is not None
    with ExitStack() as stack:
        lease = stack.enter_context(Lease())
        method = open_saddle(recipe, mesh)
        run = mesh.on_main(lambda: open_run(recipe, out, resume, lease, method.size))
        requests.open_run(run.folder)
        check_hosts(
            run.levels, recipe.layout.world, int(os.environ.get("LOCAL_WORLD_SIZE", recipe.layout.world))
        )  # fmt: skip
        state = SaddleState(method, mesh)
        facts = saddle_facts(recipe)
        progress, notes = _resumed(run, method, state, facts, mesh)
        mesh.on_main(lambda: open_levels(run.levels, run.folder, run.fresh))
        signals = stack.enter_context(noted_signals(stop_signals()))
        parameters = sum(t.numel() for t in method.values.values())
        title = (
            f"{recipe.name}: {settings.method} on {settings.problem} over {settings.devices} devices, {parameters:,} "
            f"parameters on {recipe.layout}"
        )
        own = run.folder if mesh.is_main else None
        recorder = ProgressRecorder(recipe, own, progress, settings.rounds, title, stack)  # fmt: skip
        about = {
            "recipe": recipe.model_dump(mode="json"),
            "layout": str(recipe.layout),
            "world": recipe.layout.world,
            "steps": settings.rounds,
        }
        recorder.log(
            "run", **about, **(describe_machine() if mesh.is_main else {}),
            device=f"{recipe.layout.world} x {mesh.device.type.upper()}", parameters=parameters,
            started=datetime.datetime.now().isoformat(timespec="seconds"),
        )  # fmt: skip
        for note in notes:
            recorder.event(note)
        checkpoints = stack.enter_context(Checkpoints(
            run.levels, state, progress, {**about, "saddle": facts}, {}, recipe.model, mesh, recorder, run.folder,
            Best(), strict=recipe.checkpoint.on_error == "stop", timeout=recipe.train.timeout,
        ))  # fmt: skip
        begun_at, stopped = progress.step, False
        while progress.step < settings.rounds and not stopped:
            _next_round(recipe, method, progress, checkpoints, recorder)
            stopped = any(from_all(bool(signals), mesh.step_group))
            if settings.evaluate and progress.step % settings.evaluate == 0:
                _measure(method, recorder, mesh)
            if due := checkpoints.due(progress.step):
                checkpoints.save(due)
            checkpoints.poll()
        if stopped:
            who = signal.Signals(signals[0]).name if signals else "another rank"
            recorder.event(f"stopped by {who}")
        elif progress.step == begun_at > 0:
            recorder.event(
                f"the run is complete: it has taken {begun_at} rounds; raise saddle.rounds to go on"
            )
        else:
            if not settings.evaluate or progress.step % settings.evaluate:
                _measure(method, recorder, mesh)
            if mesh.is_main:
                method.problem.write_results(method.values, run.folder)
        checkpoints.finish(save=True)
        code = [signal.SIGTERM, *signals][-1] if stopped else 0
        return Outcome(run.folder, checkpoints.last, progress, [], code)


def _next_round(
    recipe: Recipe,
    method: SaddleMethod,
    progress: Progress,
    checkpoints: Checkpoints,
    recorder: ProgressRecorder,
) -> None:
    """Take one round and record it. Collective. Raises :class:`WeftError` if parameters are no longer finite."""
    settings = recipe.saddle
    assert settings is not None
    begun, spent = time.perf_counter(), time.process_time()
    checkpoints.wait_for_copy()
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


def _resumed(
    run: Run,
    method: SaddleMethod,
    state: SaddleState,
    facts: dict[str, Any],
    mesh: Mesh,
) -> tuple[Progress, list[str]]:
    """Load the newest whole checkpoint of ``run``; a new run loads none. Collective.

    ``facts``: what must be the same as in the checkpoint. Returns the progress, and lines to print.
    """
    notes: list[str] = []
    if run.fresh:
        return Progress(), notes

    def check(checkpoint: StoredCheckpoint) -> None:
        check_facts(checkpoint, "saddle", facts, "another kind of run")

    def load(checkpoint: StoredCheckpoint) -> Progress:
        load_parts(checkpoint, state.saved(), mesh.step_group)
        return Progress(**checkpoint.meta["progress"])

    checkpoint, progress = resume_newest(run, load, notes.append, check, mesh)
    method.resume(progress.updates)
    notes.append(f"resumed from {checkpoint} at round {progress.step}")
    return progress, notes
