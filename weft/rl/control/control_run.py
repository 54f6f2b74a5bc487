"""A control run from ``weft train`` to its last checkpoint, on every rank."""

from __future__ import annotations

import datetime
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

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
from weft.rl.control.control_state import ControlState
from weft.rl.control.method_step import ControlMethod
from weft.rl.control.on_policy import OnPolicy, environment_words, process_count
from weft.rl.control.policy_evaluation import Evaluated, evaluate_policy
from weft.run.signals import noted_signals, requests, stop_signals
from weft.train.progress_recorder import ProgressRecorder
from weft.train.progress_resume import check_facts, resume_newest
from weft.train.runs import Run, open_run
from weft.train.training import Outcome


def control_job(
    recipe: Recipe, mesh: Mesh, out: Path | None = None, resume: str | None = None
) -> Outcome:
    """Train until the recipe's number of transitions is reached or a signal arrives; evaluate and save. Collective.

    ``out``: the folder to create; ``resume``: the run or checkpoint to continue.
    """
    from weft.checkpoint.lease import Lease

    assert recipe.control is not None
    settings = recipe.control
    with ExitStack() as stack:
        lease = stack.enter_context(Lease())
        method = open_method(recipe, mesh)
        stack.callback(method.close)
        state = ControlState(method.tensors, mesh)
        size = sum(t.numel() * t.element_size() for t in method.tensors.values())
        run = mesh.on_main(lambda: open_run(recipe, out, resume, lease, size))
        requests.open_run(run.folder)
        check_hosts(
            run.levels, recipe.layout.world, int(os.environ.get("LOCAL_WORLD_SIZE", recipe.layout.world))
        )  # fmt: skip
        progress, notes = resume_control(run, method, state, mesh)
        method.resume(progress.step, progress.updates)
        mesh.on_main(lambda: open_levels(run.levels, run.folder, run.fresh))
        signals = stack.enter_context(noted_signals(stop_signals()))
        title = (
            f"{recipe.name}: {settings.method} in {settings.environment}, {method.parameters:,} parameters on "
            f"{recipe.layout}"
        )
        own = run.folder if mesh.is_main else None
        recorder = ProgressRecorder(recipe, own, progress, settings.steps, title, stack)
        facts = {
            "recipe": recipe.model_dump(mode="json"),
            "layout": str(recipe.layout),
            "world": recipe.layout.world,
            "steps": settings.steps,
        }
        machine = describe_machine() if mesh.is_main else {}
        started = datetime.datetime.now().isoformat(timespec="seconds")
        recorder.log(
            "run", **facts, **machine, device=f"{recipe.layout.world} x {mesh.device.type.upper()}",
            parameters=method.parameters, started=started,
        )  # fmt: skip
        for note in notes:
            recorder.event(note)
        checkpoints = stack.enter_context(Checkpoints(
            run.levels, state, progress, {**facts, "control": method.facts}, {}, recipe.model, mesh, recorder,
            run.folder, Best(), strict=recipe.checkpoint.on_error == "stop", timeout=recipe.train.timeout,
        ))  # fmt: skip
        stopped, begun_at = False, progress.step
        evaluated = -1
        while progress.step < settings.steps and not stopped:
            begun, spent = time.perf_counter(), time.process_time()
            checkpoints.wait_for_copy()
            step = method.take_step(progress.step)
            progress.step += 1
            progress.position += step.transitions
            progress.updates += step.updates
            seconds = time.perf_counter() - begun
            values = {
                **step.values,
                "transitions": progress.position,
                "updates": progress.updates,
                "transitions_per_s": step.transitions / seconds,
                "step_s": seconds,
                "processor_s": time.process_time() - spent,
            }
            for line in step.lines:
                recorder.event(line)
            if progress.step % recipe.observe.every == 0:
                recorder.log("train", **values)
            shown = ("return", "loss", "lr", "grad_norm", "transitions_per_s")
            recorder.show(**{key: values.get(key) for key in shown})
            stopped = any(from_all(bool(signals), mesh.step_group))
            if settings.evaluate and progress.step % settings.evaluate == 0 and not stopped:  # fmt: skip
                record_evaluation(evaluation_of(recipe, mesh, method, signals), recorder)  # fmt: skip
                evaluated = progress.step
            if due := checkpoints.due(progress.step):
                checkpoints.save(due)
            checkpoints.poll()
        if stopped:
            who = signal.Signals(signals[0]).name if signals else "another rank"
            recorder.event(f"stopped by {who}")
        elif progress.step == begun_at > 0:
            recorder.event(
                f"the run is complete: it has taken {begun_at} steps; raise control.transitions to learn on"
            )
        elif evaluated != progress.step:
            record_evaluation(evaluation_of(recipe, mesh, method, signals), recorder)
        checkpoints.finish(save=True)
        return Outcome(
            run.folder,
            checkpoints.last,
            progress,
            [],
            [signal.SIGTERM, *signals][-1] if stopped else 0,
        )


def open_method(recipe: Recipe, mesh: Mesh) -> ControlMethod:
    """Build the learning method that ``recipe`` names, such as PPO, and start its environments. Collective.

    If the environments cannot be started on one rank, all ranks raise its error.
    """
    assert recipe.control is not None
    if recipe.control.off_policy:
        from weft.rl.control.off_policy import OffPolicy

        return OffPolicy(recipe, mesh)
    method: OnPolicy | None = None
    problem: WeftError | None = None
    try:
        method = OnPolicy(recipe, mesh)
    except WeftError as error:
        problem = error
    problems = from_all(problem, mesh.step_group)
    for failure in problems:
        if failure is not None:
            if method is not None:
                method.close()
            raise failure
    assert method is not None
    return method


def resume_control(
    run: Run, method: ControlMethod, state: ControlState, mesh: Mesh
) -> tuple[Progress, list[str]]:
    """Load the newest whole checkpoint of ``run`` into ``method`` and ``state``; a new run loads none. Collective.

    Returns the progress so far, and lines to print.
    """
    notes: list[str] = []
    if run.fresh:
        return Progress(), notes

    def check(checkpoint: StoredCheckpoint) -> None:
        check_facts(checkpoint, "control", method.facts, "a language model")

    def load(checkpoint: StoredCheckpoint) -> Progress:
        load_parts(checkpoint, state.saved(), mesh.step_group)
        return Progress(**checkpoint.meta["progress"])

    checkpoint, progress = resume_newest(run, load, notes.append, check, mesh)
    notes.append(
        f"resumed from {checkpoint} at step {progress.step}; environments begin new episodes"
    )
    return progress, notes


def evaluation_of(
    recipe: Recipe, mesh: Mesh, method: ControlMethod, signals: list[int]
) -> Evaluated | None:
    """Evaluate the policy of ``method``; None if ``signals`` ask the run to end. Collective."""
    assert recipe.control is not None
    return evaluate_policy(
        method.best,
        recipe.control,
        environment_words(recipe.control),
        mesh,
        process_count(recipe.control, recipe.control.environments),
        recipe.train.seed,
        lambda: bool(signals),
    )


def record_evaluation(result: Evaluated | None, recorder: ProgressRecorder) -> None:
    """Record and print the ``result`` of an evaluation, if there is one."""
    if result is not None:
        values = result._asdict()
        recorder.log("evaluation", **{"return": values.pop("mean")}, **values)
        recorder.event(
            f"evaluation: mean return {result.mean:.1f} (deviation {result.std:.1f}) over {result.episodes} "
            f"episodes of {result.steps:.0f} steps"
        )
