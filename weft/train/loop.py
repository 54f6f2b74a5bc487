"""The run: everything between ``weft train`` and its last checkpoint, on every rank."""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import psutil
import torch
import torch.distributed as dist
from torch.profiler import record_function

from weft.checkpoint.format import DamagedCheckpoint
from weft.checkpoint.save import Saver
from weft.checkpoint.state import Progress, check_same_data, load_state, local_state, save_state
from weft.checkpoint.store import agree, prune, whole
from weft.checkpoint.writer import Report
from weft.errors import UsageError, WeftError
from weft.layout.mesh import Mesh
from weft.observe.display import Display
from weft.observe.flops import flops_per_token, memory_gib, parameter_count, peak_flops
from weft.observe.metrics import Metrics
from weft.observe.split import Split, profile_step, trace
from weft.parallel.build import LocalPart, local_parts, parallelize
from weft.train.later import PostValidation
from weft.train.optim import build_optimizer, learning_rate
from weft.train.setup import Job
from weft.train.step import StepResult, evaluate, train_step


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``interrupted`` is the signal that stopped it, 0 if it finished."""

    run: Path
    checkpoint: Path | None
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


def choose_run(name: str, out: Path | None, resume: str | None, main: bool) -> tuple[Path, Path | None]:
    """The run folder, and the checkpoint path to resume from if any. The same on all ranks: rank 0 decides."""
    chosen: list[tuple[Path, Path | None] | WeftError | None] = [None]
    if main:
        try:
            chosen[0] = _choose(name, out, resume)
        except WeftError as error:
            chosen[0] = error
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(chosen, src=0)
    if isinstance(chosen[0], WeftError):
        raise chosen[0]
    assert chosen[0] is not None
    return chosen[0]


def _choose(name: str, out: Path | None, resume: str | None) -> tuple[Path, Path | None]:
    if resume and resume != "auto":
        path = Path(resume)
        if not path.exists():
            raise WeftError(f"--resume {resume} does not exist; give a run folder, a checkpoint or 'auto'")
        inside = path.parent.parent if path.parent.name == "checkpoints" else path
        return out or inside, path
    if resume == "auto":
        saved = [p for p in Path("runs").glob(f"{name}*") if (p / "checkpoints").is_dir()]
        run = out or max(saved, key=lambda p: p.stat().st_mtime, default=Path("runs") / name)
        return run, run if (run / "checkpoints").is_dir() else None
    if out is not None:
        if out.exists() and any(out.iterdir()):
            raise UsageError(f"--out {out} already holds something; choose another folder or add --resume auto")
        return out, None
    run, number = Path("runs") / name, 1
    while run.exists():
        number += 1
        run = Path("runs") / f"{name}-{number}"
    return run, None


def train(job: Job, mesh: Mesh, out: Path | None = None, resume: str | None = None) -> Outcome:
    """Train to the end of the recipe, of the data, or to a signal; save, and say how it went. Runs on every rank."""
    recipe, shape = job.recipe, job.shape
    settings = recipe.train
    notes: list[str] = []
    run, source = choose_run(recipe.name, out, resume, mesh.is_main)
    values = None
    if recipe.model.weights and not source:
        from weft.models.hf import hf_values

        values = hf_values(recipe.model.weights)
    model = parallelize(shape, mesh, settings, values, recipe.data.seq_len)
    parts = local_parts(model, mesh)
    optimizer = build_optimizer(parts, recipe.optimizer)
    later = (
        PostValidation(model, parts, optimizer, mesh, recipe.optimizer.clip)
        if recipe.optimizer.post_validation
        else None
    )
    progress = Progress()
    if source:
        progress = _resume(source, job, parts, optimizer, notes.append)
    loader = job.loader(job.corpus.train, mesh)
    held_out = job.loader(job.corpus.validation, mesh) if job.corpus.validation else None
    root = run / "checkpoints"
    about = {
        "recipe": recipe.model_copy(update={"model": shape}).model_dump(mode="json"),
        "layout": str(mesh.layout),
        "world": mesh.layout.world,
        "data": job.corpus.fingerprint,
    }

    metrics = Metrics(run if mesh.is_main else None, recipe.observe.tensorboard)
    parameters = parameter_count(shape, shape.vocab)
    per_token = flops_per_token(shape, shape.vocab, recipe.data.seq_len)
    peak = _peak(mesh, getattr(torch, settings.dtype))
    metrics.log(
        "run", progress.step, **about, device=_device_name(mesh), parameters=parameters, flops_per_token=per_token,
        peak_flops=peak, started=datetime.datetime.now().isoformat(timespec="seconds"),
    )  # fmt: skip
    title = f"{recipe.name}: {parameters / 1e6:.1f}M parameters on {mesh.layout}, {_device_name(mesh)}"
    tracing = run / f"trace/rank-{os.environ.get('RANK', 0)}.json" if recipe.observe.trace else None
    saved: Path | None = None
    validations: list[float] = []

    with (
        _Signals().watch() as signals,
        Display(settings.steps, title, enabled=mesh.is_main) as display,
        trace(tracing, recipe.observe.trace) as traced,
        ExitStack() as stack,
    ):

        def event(text: str) -> None:
            display.note(text)
            metrics.log("event", progress.step, message=text)

        saver = Saver(event, strict=recipe.checkpoint.on_error == "stop", timeout=settings.timeout)
        saver.prepare(local_state(parts, optimizer))
        stack.callback(saver.close)

        def checkpoint() -> Path:
            path, waited = save_state(saver, root, parts, optimizer, progress, about, job.corpus.tokenizer)
            metrics.log("checkpoint", progress.step, stall_s=waited)
            return path

        def heard(done: list[tuple[int, str, Report]]) -> None:
            """Tell of the saves that the writer has finished with, and drop old checkpoints after a new one."""
            for step, where, report in done:
                stages = {f"{stage}_s": seconds for stage, seconds in report.seconds.items()}
                metrics.log("saved", step, bytes=report.bytes, **stages)
                if report.committed:
                    event(f"checkpoint {where}")
                    prune(root, recipe.checkpoint.keep)
            done.clear()

        def validate() -> None:
            if held_out is not None and recipe.validation.every:
                steps = (held_out.step(i * settings.batch) for i in range(recipe.validation.batches))
                validations.append(evaluate(model, (s for s in steps if s), mesh))
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
                return later.step(batches, lr, stop), waited
            return train_step(model, parts, batches, optimizer, mesh, lr=lr, clip=clip, stop=stop), waited

        def account(result: StepResult, seconds: float, waited: float, split: Split | None) -> None:
            """Count and show a step that is final."""
            lr = learning_rate(recipe.optimizer, progress.step, settings.steps)
            progress.step += 1
            progress.position += settings.batch
            progress.tokens += result.tokens
            progress.updates += not result.skipped
            rate = result.tokens / seconds
            seen = {"loss": result.loss, "grad_norm": result.grad_norm, "lr": lr, "memory_gib": memory_gib(mesh.device)}
            if result.skipped:
                event(f"step {progress.step}: loss or gradient norm is not finite; the update was skipped on all ranks")
            if split is not None:  # a profiled step's own speed means nothing
                metrics.log("split", progress.step, **{k: v for k, v in asdict(split).items() if k != "total"})
            else:
                seen |= {"tokens_per_s": rate, "mfu": rate * per_token / peak, "step_s": seconds, "data_s": waited}
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
        while begun_steps < settings.steps and not stopped:
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
            settle = any(due(n, begun_steps) for n in (recipe.validation.every, recipe.checkpoint.every))
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
            if due(recipe.checkpoint.every, begun_steps) and not stopped:
                saved = checkpoint()
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
        if saved is None or not saved.name.startswith(f"step-{progress.step:06d}"):
            saved = checkpoint()
        saver.finish()
        heard(saver.reports)
    metrics.close()
    return Outcome(run, saved, progress, validations, (signals.received or signal.SIGTERM) if stopped else 0)


def _resume(
    source: Path, job: Job, parts: Sequence[LocalPart], optimizer: torch.optim.Optimizer, warn: Callable[[str], None]
) -> Progress:
    """Load the last checkpoint that is whole on all ranks; ``warn`` hears which, and of those that are not."""
    for folder, meta in whole(source, warn):
        check_same_data(meta, job.corpus.fingerprint, folder)
        problem, progress = "", Progress()
        try:
            progress = load_state(folder, meta, parts, optimizer)
        except DamagedCheckpoint as error:
            problem = str(error)
        if not (problem := agree(problem)):
            warn(f"resumed from {folder} at step {progress.step}")
            return progress
        if folder == source:
            raise WeftError(problem)
        warn(f"{problem}; trying the one before")
    raise AssertionError("whole() raises after the last")


def _peak(mesh: Mesh, dtype: torch.dtype) -> float:
    """Peak flop/s of all ranks together; ranks that share a CPU's cores do not add up beyond them."""
    share = 1.0
    if mesh.device.type == "cpu":
        here = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.layout.world))
        share = min(1.0, psutil.cpu_count() / (here * torch.get_num_threads()))
    return peak_flops(mesh.device, dtype) * mesh.layout.world * share


def _device_name(mesh: Mesh) -> str:
    kind = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "CPU"
    return f"{mesh.layout.world} x {kind}"
