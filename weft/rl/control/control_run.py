"""A control run from ``weft train`` to its last checkpoint, on every rank."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from weft.errors import WeftError
from weft.layout.mesh import Mesh, from_all
from weft.recipe.recipe import Recipe
from weft.rl.control.control_state import ControlState
from weft.rl.control.method_step import ControlMethod
from weft.rl.control.on_policy import OnPolicy, environment_words, process_count
from weft.rl.control.policy_evaluation import evaluate_policy
from weft.train.progress_run import ProgressRun
from weft.train.training import Outcome


def control_job(
    recipe: Recipe, mesh: Mesh, out: Path | None = None, resume: str | None = None
) -> Outcome:
    """Train a policy for a control task until the recipe's number of transitions is reached or a signal arrives;
    evaluate and save it. Return the outcome of the run. All ranks must call it.

    ``out``: the folder to create; ``resume``: the run or checkpoint to continue.
    """
    assert recipe.control is not None
    settings = recipe.control
    with ExitStack() as stack:
        method = open_method(recipe, mesh)
        stack.callback(method.close)
        state = ControlState(method.tensors, mesh)
        size = sum(t.numel() * t.element_size() for t in method.tensors.values())
        run = ProgressRun(recipe, mesh, out, resume, size, stack)
        checkpoint = run.load(
            state.saved(), "control", method.facts, "a language model"
        )
        progress = run.progress
        if checkpoint is not None:
            run.notes.append(
                f"resumed from {checkpoint} at step {progress.step}; environments begin new episodes"
            )
        method.resume(progress.step, progress.updates)
        title = (
            f"{recipe.name}: {settings.method} in {settings.environment}, {method.parameters:,} parameters on "
            f"{recipe.layout}"
        )
        run.begin(state, title, settings.steps, method.parameters, "control", method.facts)  # fmt: skip
        recorder, stopped, evaluated = run.recorder, False, -1
        while progress.step < settings.steps and not stopped:
            _next_step(recipe, method, run)
            stopped = run.asked_to_stop()
            if settings.evaluate and progress.step % settings.evaluate == 0 and not stopped:  # fmt: skip
                _evaluate(recipe, mesh, method, run)
                evaluated = progress.step
            run.save_if_due()
        if stopped:
            run.say_who_stopped()
        elif run.complete_before:
            recorder.event(
                f"the run is complete: it has taken {progress.step} steps; raise control.transitions to learn on"
            )
        elif evaluated != progress.step:
            _evaluate(recipe, mesh, method, run)
        return run.finish()


def _next_step(recipe: Recipe, method: ControlMethod, run: ProgressRun) -> None:
    """Take a step and record it. Collective."""
    progress, recorder = run.progress, run.recorder
    begun, spent = time.perf_counter(), time.process_time()
    run.checkpoints.wait_for_copy()
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


def _evaluate(
    recipe: Recipe, mesh: Mesh, method: ControlMethod, run: ProgressRun
) -> None:
    """Evaluate the policy of ``method`` and record the result, if no signal asks the run to end before. Collective."""
    assert recipe.control is not None
    result = evaluate_policy(
        method.best,
        recipe.control,
        environment_words(recipe.control),
        mesh,
        process_count(recipe.control, recipe.control.environments),
        recipe.train.seed,
        lambda: run.signalled,
    )
    if result is not None:
        values = result._asdict()
        run.recorder.log("evaluation", **{"return": values.pop("mean")}, **values)
        run.recorder.event(
            f"evaluation: mean return {result.mean:.1f} (deviation {result.std:.1f}) over {result.episodes} "
            f"episodes of {result.steps:.0f} steps"
        )


def open_method(recipe: Recipe, mesh: Mesh) -> ControlMethod:
    """Build and return the learning method that ``recipe`` names, such as PPO, and start its environments. All ranks
    must call it.

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
