"""The run: everything between ``weft train`` and its last checkpoint, on every rank."""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.profiler import record_function

from weft.checkpoint.lease import Lease
from weft.checkpoint.levels import Level, Thinning, check_hosts, open_levels
from weft.checkpoint.same import check_goes_on, is_of_model, other_differences
from weft.checkpoint.save import Saved, Saver
from weft.checkpoint.state import Progress, load_state, save_state
from weft.checkpoint.storage import Storage
from weft.checkpoint.store import load_newest
from weft.checkpoint.weights import values_of
from weft.errors import WeftError
from weft.layout.mesh import Mesh, from_all
from weft.observe.display import Display
from weft.observe.flops import flops_per_token, memory_gib, parameter_count, peak_flops
from weft.observe.host import Hardware, environment
from weft.observe.metrics import Metrics
from weft.observe.split import Split, profile_step, trace
from weft.parallel.state import State
from weft.train.later import PostValidation
from weft.train.optim import learning_rate
from weft.train.runs import Run, checkpoint_size, open_run
from weft.train.setup import Job, assemble
from weft.train.step import StepResult, evaluate, train_step

T = TypeVar("T")

#: A run whose last so many steps were all skipped, because they were not finite, ends.
FRUITLESS = 5


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``interrupted`` is the signal that stopped it, 0 if it finished."""

    run: Path
    checkpoint: Storage | None
    progress: Progress
    validations: list[float]
    interrupted: int


@dataclass
class _Signals:
    """SIGINT and SIGTERM ask the run to stop after the current step; a second SIGINT ends it at once."""

    received: int = 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    @contextmanager
    def watch(self) -> Iterator[_Signals]:
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def on_main(work: Callable[[], T], main: bool) -> T:
    """What ``work`` returns or raises on rank 0, on all ranks."""
    done: list[T | WeftError | None] = [None]
    if main:
        try:
            done[0] = work()
        except WeftError as error:
            done[0] = error
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(done, src=0)
    if isinstance(done[0], WeftError):
        raise done[0]
    return done[0]  # type: ignore[return-value]


def train(job: Job, mesh: Mesh, out: Path | None = None, resume: str | None = None) -> Outcome:
    """Train to the end of the recipe, of the data, or to a signal; save, and say how it went. Runs on every rank."""
    with Lease() as lease:
        chosen = on_main(lambda: open_run(job.recipe, out, resume, lease, checkpoint_size(job)), mesh.is_main)
        return _train(job, mesh, chosen, lease)


def _train(job: Job, mesh: Mesh, chosen: Run, lease: Lease) -> Outcome:
    recipe, shape = job.recipe, job.shape
    settings = recipe.train
    notes = list(job.notes)
    run, sources, levels = chosen.folder, chosen.sources, chosen.levels
    check_hosts(levels, mesh.layout.world, int(os.environ.get("LOCAL_WORLD_SIZE", mesh.layout.world)))
    values = values_of(recipe.model.weights) if recipe.model.weights and not sources else None
    model, state = assemble(shape, mesh, recipe, values)
    later = PostValidation(model, state, mesh, recipe.optimizer.clip) if recipe.optimizer.post_validation else None
    progress, loads = Progress(), list[dict[str, float]]()
    if sources:
        progress, loads = _resume(chosen, job, state, notes.append)
    loader = job.loader(job.corpus.train, mesh)
    held_out = job.loader(job.corpus.validation, mesh) if job.corpus.validation else None
    about = {
        "recipe": recipe.model_copy(update={"model": shape}).model_dump(mode="json"),
        "layout": str(mesh.layout),
        "world": mesh.layout.world,
        "data": job.corpus.fingerprint,
    }

    metrics = Metrics(run if mesh.is_main else None, recipe.observe.tensorboard, notes.append)
    on_main(lambda: open_levels(levels, run, chosen.fresh), mesh.is_main)
    parameters = parameter_count(shape, shape.vocab)
    per_token = flops_per_token(shape, shape.vocab, recipe.data.seq_len)
    one_peak = peak_flops(mesh.device, getattr(torch, settings.dtype))
    peak = one_peak and one_peak * mesh.layout.world
    metrics.log(
        "run", progress.step, **about, device=_device_name(mesh), parameters=parameters, flops_per_token=per_token,
        peak_flops=peak, started=datetime.datetime.now().isoformat(timespec="seconds"),
        **(environment() if mesh.is_main else {}),
    )  # fmt: skip
    hardware = Hardware(mesh.device)
    for rank, load in enumerate(loads):
        metrics.log("loaded", progress.step, rank=rank, **load)
    title = f"{recipe.name}: {parameters / 1e6:.1f}M parameters on {mesh.layout}, {_device_name(mesh)}"
    tracing = run / f"trace/rank-{os.environ.get('RANK', 0)}.json" if recipe.observe.trace else None
    validations: list[float] = []
    skipped = 0  # steps in a row

    with (
        _Signals().watch() as signals,
        Display(settings.steps, title, enabled=mesh.is_main) as display,
        trace(tracing, recipe.observe.trace) as traced,
        ExitStack() as stack,
    ):

        def event(text: str) -> None:
            display.note(text)
            metrics.log("event", progress.step, message=text)

        metrics.warn = display.note  # of itself it cannot keep a record

        saver = Saver(event, recipe.checkpoint.on_error == "stop", settings.timeout, mesh.step_group)
        saver.prepare(state.tensors())
        stack.callback(saver.close)

        thinning = Thinning(lambda place: is_of_model(place, shape))
        stack.callback(thinning.close)

        def checkpoint(due: Sequence[Level]) -> None:
            """Save to one level after the other: the next waits for the one before."""
            waited = 0.0
            for level in due:
                place = level.new(progress.step)
                waited += save_state(saver, place, state, progress, about, job.corpus.tokenizer)
            metrics.log("checkpoint", progress.step, stall_s=waited)

        def heard(done: list[Saved]) -> None:
            """Tell of the saves that the writer has finished with, and drop old checkpoints after a new one."""
            for saved in done:
                report = saved.report
                metrics.log("saved", saved.step, rank=saved.rank, bytes=report.bytes, **stages(report.seconds))
                if saved.report.committed:
                    event(f"checkpoint {saved.where}")
                    for level in levels:
                        if saved.where == str(level.place / saved.where.rpartition("/")[2]):
                            thinning.start(level)
            for problem in thinning.problems():
                event(problem)
            done.clear()

        def validate() -> None:
            if held_out is not None and recipe.validation.every:
                steps = (held_out.step(i * settings.batch) for i in range(recipe.validation.batches))
                validations.append(evaluate(model, state, (s for s in steps if s), mesh))
                metrics.log("validation", progress.step, loss=validations[-1])
                display.update(progress.step, validation=validations[-1])

        def one_step(lr: float, position: int) -> tuple[StepResult | None, float] | None:
            """The result (with post-validation, that of the step before) and the seconds spent on data."""
            begun = time.perf_counter()
            with record_function("weft:data"):
                batches = loader.step(position)
            waited = time.perf_counter() - begun
            if batches is None:
                return None
            clip, stop = recipe.optimizer.clip, signals.received > 0
            if later is not None:
                return later.step(batches, lr, stop, saver.copied), waited
            ready = saver.copied
            return train_step(model, state, batches, mesh, lr=lr, clip=clip, stop=stop, before_update=ready), waited

        def account(result: StepResult, seconds: float, waited: float, split: Split | None) -> None:
            """Count and show a step that is final."""
            lr = learning_rate(recipe.optimizer, progress.step, settings.steps)
            progress.step += 1
            progress.position += settings.batch
            progress.tokens += result.tokens
            progress.updates += not result.skipped
            nonlocal skipped
            skipped = skipped + 1 if result.skipped else 0
            rate = result.tokens / seconds
            memory = memory_gib(mesh.device)
            seen: dict[str, float | None] = {"loss": result.loss, "grad_norm": result.grad_norm, "lr": lr}
            seen |= {"memory_gib": memory.peak, "memory_now_gib": memory.now}
            if result.skipped:
                event(f"step {progress.step}: loss or gradient norm is not finite; the update was skipped on all ranks")
            if split is not None:  # a profiled step's own speed means nothing
                metrics.log("split", progress.step, **{k: v for k, v in asdict(split).items() if k != "total"})
            else:
                seen |= {"tokens_per_s": rate, "mfu": peak and rate * per_token / peak}
                seen |= {"step_s": seconds, "data_s": waited}
            if mesh.is_main and (load := hardware.sample()):
                metrics.log("hardware", progress.step, **load)
            if progress.step % recipe.observe.every == 0:
                metrics.log("train", progress.step, **seen, tokens=progress.tokens, skipped=int(result.skipped))
            display.update(progress.step, **seen)

        def due(every: int, step: int) -> bool:
            return bool(every) and step % every == 0

        for text in notes:
            event(text)
        if not progress.step:
            validate()
        stopped = False
        begun_steps = progress.step  # with post-validation one more than are final
        begun = time.perf_counter()
        while begun_steps < settings.steps and not stopped and skipped < FRUITLESS:
            lease.check()
            lr = learning_rate(recipe.optimizer, begun_steps, settings.steps)
            position = progress.position + (begun_steps - progress.step) * settings.batch
            every = recipe.observe.split_every
            profiled = bool(every) and begun_steps % every == min(2, every - 1) and not tracing
            if profiled:
                done, split = profile_step(lambda lr=lr, at=position: one_step(lr, at))  # type: ignore[misc]
            else:
                done, split = one_step(lr, position), None
            if done is None:
                event(f"the data ended after {position:,} samples")
                break
            begun_steps += 1
            results = [done[0]] if done[0] is not None else []
            stopped = done[0] is not None and done[0].stop
            to_save = [level for level in levels if level.due(begun_steps)]
            settle = bool(to_save) or due(recipe.validation.every, begun_steps)
            if later is not None and (settle or stopped or begun_steps == settings.steps):
                results += filter(None, [later.finish()])
            if results:
                seconds = (time.perf_counter() - begun) / len(results)
                begun = time.perf_counter()
            for result in results:
                account(result, seconds, done[1], split)
                stopped = stopped or result.stop
            traced()
            saver.poll()
            heard(saver.reports)
            if due(recipe.validation.every, begun_steps):
                validate()
                begun = time.perf_counter()
            if to_save and not stopped and skipped < FRUITLESS:
                checkpoint(to_save)
                begun = time.perf_counter()
        if later is not None:
            if (last := later.finish()) is not None:
                account(last, time.perf_counter() - begun, 0.0, None)
            hint = "; they are clipped too often, raise optimizer.clip" if later.repeated > progress.step / 4 else ""
            event(f"post-validation: {later.repeated} of {progress.step} steps were run again{hint}")
        if stopped:
            event(f"stopped by {signal.Signals(signals.received).name if signals.received else 'another rank'}")
        elif recipe.validation.every and progress.step % recipe.validation.every:
            validate()
        if levels[-1].step != progress.step and skipped < FRUITLESS:  # a broken model must not push a whole one out
            checkpoint(levels[-1:])
        saver.finish()
        heard(saver.reports)
        thinning.close()
        heard([])
        for level in levels:
            if level.in_memory and mesh.is_main and skipped < FRUITLESS:  # what was saved last outlasts the run
                level.place.clear()
    metrics.close()
    if skipped >= FRUITLESS:
        raise WeftError(
            f"loss or gradient norm were not finite in {skipped} steps in a row, which changed nothing; ended at step "
            f"{progress.step}, without saving: lower optimizer.lr, lengthen optimizer.warmup, or look at the "
            "data and the weights it began with"
        )
    ended = (signals.received or signal.SIGTERM) if stopped else 0
    return Outcome(run, levels[-1].last, progress, validations, ended)


def _resume(run: Run, job: Job, state: State, warn: Callable[[str], None]) -> tuple[Progress, list[dict[str, float]]]:
    """Load the newest checkpoint that is whole on all ranks, and tell where every rank's time went.

    ``warn`` hears which one it is, of those that are not whole, and by what the recipe differs from the checkpoint's.
    """
    checkpoint, progress = load_newest(
        run.sources,
        lambda checkpoint: load_state(checkpoint, state),
        warn,
        lambda checkpoint: check_goes_on(checkpoint, job.shape, job.corpus.tokenizer),
    )
    warn(f"resumed from {checkpoint} at step {progress.step}")
    for difference in other_differences(checkpoint, job.recipe, job.corpus.fingerprint):
        warn(f"resumed with {difference}")
    for level in run.levels:
        level.found(checkpoint.storage)
    return progress, from_all({"bytes": checkpoint.bytes_read, **stages(checkpoint.seconds)})


def stages(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds per stage as metrics name them."""
    return {f"{stage}_s": spent for stage, spent in seconds.items()}


def _device_name(mesh: Mesh) -> str:
    kind = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "CPU"
    return f"{mesh.layout.world} x {kind}"
