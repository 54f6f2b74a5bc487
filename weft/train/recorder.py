"""Recording of a run: metrics, the display in the terminal, profiles and traces."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import record_function

from weft.data.read_so_far import read_so_far
from weft.observe.display import Display
from weft.observe.flops import memory_gib, peak_flops
from weft.observe.host import HardwareLoad, describe_machine
from weft.observe.run_metrics import Metrics
from weft.registry import find
from weft.shapes.parameters import learning_count, parameter_count
from weft.shapes.shape import flops_per_token
from weft.train.step_values import StepResult

if TYPE_CHECKING:
    from weft.checkpoint.run_state import Progress
    from weft.data.tasks import Answered
    from weft.layout.mesh import Mesh
    from weft.observe.time_split import TimeSplit
    from weft.train.setup import Job

Results = list[StepResult]


class Recorder:
    """Records a run: metrics, the display in the terminal, profiles and traces.

    Only the main rank writes and prints. The time between :meth:`restart_clock` and :meth:`lap` is attributed to the
    steps whose results became final in that time. ``job``: the checked recipe with its opened data. ``mesh``: this
    rank's position among the ranks of the run. ``folder``: the run's folder.
    """

    def __init__(self, job: Job, mesh: Mesh, folder: Path) -> None:
        self.folder = folder
        self._job, self._recipe, self._mesh, self._moved = job, job.recipe, mesh, 0
        shape, peak = (
            job.shape,
            peak_flops(mesh.device, getattr(torch, job.recipe.train.dtype)),
        )
        # The tokens of a step are those of this island, or of all islands where their gradients are summed.
        islands = mesh.islands if job.recipe.sync.of_gradients else 1
        self._peak = peak and peak * mesh.layout.world * islands
        # two forward passes, and nothing else
        twice = job.recipe.optimizer.estimate == "zeroth-order"
        self._per_token = (1 + twice) * flops_per_token(
            shape,
            shape.vocab,
            job.recipe.data.seq_len,
            ("*",) if twice else job.recipe.train.freeze,
        )
        self._hardware = HardwareLoad(mesh.device)
        self._tracing = job.recipe.observe.trace > 0
        self._traced: Callable[[], bool] = lambda: False
        self._begun, self._seconds, self._data_s = time.perf_counter(), 0.0, 0.0
        self._split: TimeSplit | None = None  # of the step that has just been taken

    def continue_as(self, job: Job) -> None:
        """Replace the recorded job by ``job``, whose data continue at the position of a checkpoint."""
        self._job = job

    @contextmanager
    def recording(self, progress: Progress) -> Iterator[None]:
        """Return a context in which the run is recorded. Each record reads the current counts from ``progress``."""
        recipe, mesh, shape = self._recipe, self._mesh, self._job.shape
        self._progress = progress
        parameters = parameter_count(shape, shape.vocab)
        learning = learning_count(shape, shape.vocab, recipe.train.freeze)
        cuda = mesh.device.type == "cuda"
        kind = torch.cuda.get_device_name(mesh.device) if cuda else "CPU"
        device = f"{mesh.layout.world} x {kind}"
        size = (
            f"{parameters / 1e6:.1f}M parameters"
            + f" ({learning / 1e6:.2f}M learn)" * (learning != parameters)
        )
        title = f"{recipe.name}: {size} on {recipe.layout}, {device}"
        self._display = Display(self._job.steps(progress), title, enabled=mesh.speaks)
        with ExitStack() as stack:
            stack.enter_context(self._display)
            folder = self.folder if mesh.is_main else None
            self._metrics = Metrics(folder, recipe.observe.trackers, self._display.note)
            stack.callback(self._metrics.close)
            self.log("run", **{
                **self._job.facts(progress), **progress.mixed, "position": progress.position,
                "device": device, "parameters": parameters, "learning": learning,
                "flops_per_token": self._per_token, "peak_flops": self._peak, "epoch_tokens": self._epoch_tokens(),
                "started": datetime.datetime.now().isoformat(timespec="seconds"),
                **(describe_machine() if mesh.is_main else {}),
            })  # fmt: skip
            if self._tracing:
                from weft.observe.time_split import trace

                path = self.folder / f"trace/rank-{os.environ.get('RANK', 0)}.json"
                self._traced = stack.enter_context(trace(path, recipe.observe.trace))
            yield

    def _epoch_tokens(self) -> int | None:
        """Return the number of tokens of all training documents; None if samples do not come from documents."""
        streams = getattr(self._job.corpus.train, "streams", ())
        return sum(stream.tokens for stream in streams) or None

    def event(self, text: str) -> None:
        """Print the line ``text``, and record it as an event of the run."""
        self._display.note(text)
        self.log("event", message=text)

    def forget(self, step: int) -> None:
        """Delete the records of the steps after ``step``, because the run takes these steps again."""
        self._metrics.forget(step)

    def log(self, kind: str, step: int | None = None, /, **values: Any) -> None:
        """Write a record of the kind ``kind`` with ``values`` for ``step``, by default the last final step."""
        self._metrics.log(kind, self._progress.step if step is None else step, **values)

    def validation(self, loss: float) -> None:
        self.log("validation", loss=loss)
        self._display.update(self._progress.step, validation=loss)

    def reading(self) -> None:
        """Record how much of each data source the run has read so far."""
        if sources := read_so_far(self._progress.loader):
            self.log("read", sources=sources)

    def passes(self, done: int, of: int) -> None:
        """Show that ``done`` of a step's ``of`` passes (forward and backward) are done, if the step takes long."""
        self._display.passes(done, of)

    def task(self, name: str, answered: Answered) -> None:
        """Record and print the result ``answered`` of the task ``name``: accuracy, loss and number of questions."""
        said = (
            {} if answered.loss is None else {"loss": answered.loss}
        )  # of answers that the model has written itself there is none
        self.log(
            f"task.{name}",
            accuracy=answered.accuracy,
            questions=answered.questions,
            **said,
        )
        self._display.note(
            f"step {self._progress.step}: {name}: {answered.right} of {answered.questions} right "
            f"({answered.accuracy:.1%})"
            + "".join(f", {key} {value:.3f}" for key, value in said.items())
        )

    def reinforcement(self, phase: int, figures: Mapping[str, Any]) -> None:
        """Record and show ``figures`` of the rollout phase with the number ``phase``: numbers by name, such as
        ``reward``.
        """
        self.log("rollout", phase=phase, **figures)
        self._display.update(self._progress.step, reward=figures["reward"])

    def activations(self, choice: Mapping[str, Any]) -> None:
        """Record and print how many blocks' activations are offloaded.

        ``choice``: a dictionary with the keys ``blocks`` (number of blocks that are offloaded), ``of`` (number of all
        blocks), ``place`` (``host`` or ``file``), and ``write`` and ``read`` (measured rates in bytes per second).
        """
        self.log("activations", **choice)
        self.event(
            f"activations of {choice['blocks']} of {choice['of']} blocks leave for the {choice['place']}: so many that "
            f"nobody waits ({choice['write'] / 1e9:.2g} GB/s, {choice['read'] / 1e9:.2g} back); memory.blocks sets it"
        )

    def report(self, kind: str, line: str, values: Mapping[str, Any]) -> None:
        """Print ``line``, and write a record of the kind ``kind`` with the fields ``values`` for the last final
        step.
        """
        self.log(kind, **values)
        self.event(line)

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Return a context. The time that it lasts is recorded as time to fetch a step's data."""
        begun = time.perf_counter()
        with record_function("weft:data"):
            yield
        self._data_s = time.perf_counter() - begun

    def watch(self, number: int, take_step: Callable[[], Results]) -> Results:
        """Call ``take_step`` for step ``number`` (from 0), and return its results.

        Every ``observe.split_every``-th step runs under a profiler, which splits its time by purpose.
        """
        every = self._recipe.observe.split_every
        if self._tracing or not every or number % every != min(2, every - 1):
            self._split = None
            return take_step()
        from weft.observe.time_split import profile_step

        results, split = profile_step(take_step)
        self._split = split if results else None
        return results

    def restart_clock(self) -> None:
        """Start the clock of the next step. The time since the last step is attributed to no step."""
        self._begun = time.perf_counter()
        self._display.restart_clock()

    def lap(self, results: Sequence[StepResult]) -> None:
        """Divide the time since the clock was started equally among the steps of ``results``; restart the clock.

        Does nothing if ``results`` is empty.
        """
        if results:
            now = time.perf_counter()
            self._seconds, self._begun = (now - self._begun) / len(results), now

    def step(self, result: StepResult, lr: float) -> None:
        """Record the result of a step that has become final. Call it after ``progress`` has counted the step.

        ``result``: the result of the step. ``lr``: the learning rate of the step.
        """
        memory = memory_gib(self._mesh.device)
        seen: dict[str, float | None] = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
        }
        seen |= {"memory_gib": memory.peak, "memory_now_gib": memory.now}
        if result.skipped:
            step = self._progress.step
            self.event(
                f"step {step}: loss or gradient norm is not finite; the update was skipped on all ranks"
            )
        if self._split is not None:  # a profiled step's own speed means nothing
            self.log(
                "split",
                **{k: v for k, v in asdict(self._split).items() if k != "total"},
            )
        else:
            rate = result.tokens / self._seconds
            seen |= {
                "tokens_per_s": rate,
                "mfu": self._peak and rate * self._per_token / self._peak,
            }
            seen |= {"step_s": self._seconds, "data_s": self._data_s}
        if self._mesh.is_main and (load := self._hardware.sample()):
            self.log("hardware", **load)
        if result.loads:
            self._experts(result)
        if self._progress.step % self._recipe.observe.every == 0:
            counted = dict(
                zip(("samples", "marks"), result.samples or (), strict=False)
            )
            if result.undone:
                counted["undone"] = 1
            self.log(
                "train",
                **seen,
                **counted,
                tokens=self._progress.tokens,
                skipped=int(result.skipped),
            )
        self._display.update(self._progress.step, **seen)

    def _experts(self, result: StepResult) -> None:
        """Record the loads of a step's experts, and what was sent for them."""
        from weft.models.router import SENT, by_layer

        sent = dict(zip(SENT, result.sent, strict=True))
        self._moved += sent["moves"]
        if self._progress.step % self._recipe.observe.every:
            return
        loads = by_layer(self._job.shape.mixtures, result.loads)
        most = max(
            max(counts) * len(counts) / max(1, sum(counts)) for counts in loads.values()
        )
        record: dict[str, Any] = {"loads": loads, "most": most}
        if dropped := dict(
            zip(loads, result.loads[sum(map(len, loads.values())) :], strict=False)
        ):
            every = sum(map(sum, loads.values()))
            record |= {
                "dropped": dropped,
                "dropped_share": sum(dropped.values()) / max(1, every),
            }
        layout, sent["moves"], self._moved = self._recipe.layout, self._moved, 0
        dispatcher = find("dispatch", layout.dispatch).implementation
        travels = {
            "tokens": layout.ep > 1,
            "moves": layout.placement == "moving",
            "copies": layout.placement != "static" or dispatcher.copies,
        }
        record |= {f"{what}_mib": sent[what] / 2**20 for what in SENT if travels[what]}
        self.log("experts", **record)

    def end_step(self, news: Sequence[str]) -> None:
        """Print and record the lines ``news`` of a step, and let the profiler's trace begin the next step."""
        for line in news:
            self.event(line)
        self._tracing = self._traced()
