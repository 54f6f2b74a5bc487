"""Runs that take steps of their own, beside the loop that trains language models, with record and checkpoints."""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.checkpoint.best import Best
from weft.checkpoint.lease import Lease
from weft.checkpoint.levels import check_hosts, open_levels
from weft.checkpoint.reshard import load_parts
from weft.checkpoint.run_checkpoints import Checkpoints
from weft.checkpoint.run_state import Progress
from weft.layout.mesh import from_all
from weft.observe.host import describe_machine
from weft.run.signals import noted_signals, requests, stop_signals
from weft.train.progress_recorder import ProgressRecorder
from weft.train.progress_resume import check_facts, resume_newest
from weft.train.runs import open_run
from weft.train.training import Outcome

if TYPE_CHECKING:
    from weft.checkpoint.load import StoredCheckpoint
    from weft.layout.mesh import Mesh
    from weft.recipe import Recipe


class ProgressRun:
    """Folder, record and checkpoints of a run that does not use the training loop for language models, such as a run
    with ``[control]`` or ``[saddle]``. Every rank has such an object.

    Load the newest checkpoint with :meth:`load`, then call :meth:`begin`. After each step ask :meth:`asked_to_stop` and
    call :meth:`save_if_due`; :meth:`finish` saves the last checkpoint.

    Attributes:
        ``stored``: the run's folder and the storage of its checkpoints.
        ``progress``: counts of the run, which its steps increase.
        ``notes``: lines to print when the run begins.
        ``recorder``, ``checkpoints``: the run's record and checkpoints, from :meth:`begin` on.
    """

    recorder: ProgressRecorder
    checkpoints: Checkpoints

    def __init__(
        self, recipe: Recipe, mesh: Mesh, out: Path | None, resume: str | None, size: int, stack: ExitStack
    ) -> None:  # fmt: skip
        """Open the folder of the run. Collective.

        ``out``: the folder to create; ``resume``: the run or checkpoint to continue. ``size``: bytes of a checkpoint.
        ``stack``: closes the run.
        """
        self._recipe, self._mesh, self._stack = recipe, mesh, stack
        lease = stack.enter_context(Lease())
        self.stored = mesh.on_main(lambda: open_run(recipe, out, resume, lease, size))
        requests.open_run(self.stored.folder)
        world = recipe.layout.world
        check_hosts(self.stored.levels, world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))  # fmt: skip
        self.progress = Progress()
        self.notes: list[str] = []
        self._begun_at, self._stopped = 0, False

    def load(
        self, saved: Mapping[str, Any], section: str, facts: Mapping[str, Any], other: str
    ) -> StoredCheckpoint | None:  # fmt: skip
        """Load tensors and progress of the newest whole checkpoint. Collective. A new run loads nothing.

        ``saved``: this rank's parts of the tensors to fill, by name. ``section``, ``facts``, ``other``: arguments of
        :func:`check_facts`. Returns the checkpoint; None for a new run. Raises :class:`WeftError` if this recipe cannot
        continue from it.
        """
        if self.stored.fresh:
            return None

        def check(checkpoint: StoredCheckpoint) -> None:
            check_facts(checkpoint, section, facts, other)

        def load(checkpoint: StoredCheckpoint) -> Progress:
            load_parts(checkpoint, saved, self._mesh.step_group)
            return Progress(**checkpoint.meta["progress"])

        checkpoint, self.progress = resume_newest(
            self.stored, load, self.notes.append, check, self._mesh
        )
        return checkpoint

    def begin(
        self, state: Any, title: str, steps: int, parameters: int, section: str, facts: Mapping[str, Any],
        files: dict[str, bytes] | None = None, **more: Any,
    ) -> None:  # fmt: skip
        """Open the run's record and checkpoints, and write the run's first record. Collective.

        ``state``: has a method ``saved`` that returns what a checkpoint holds. ``title``: the first line of the
        display. ``steps``: number of steps; ``parameters``: number of parameters. ``facts``: settings of the recipe's
        ``section`` that checkpoints keep, and that a resumed run must share (:func:`check_facts`). ``files``: further
        files that each checkpoint holds, by name; the caller may change them. ``more``: further values of the first
        record.
        """
        recipe, mesh, run = self._recipe, self._mesh, self.stored
        mesh.on_main(lambda: open_levels(run.levels, run.folder, run.fresh))
        self._signals = self._stack.enter_context(noted_signals(stop_signals()))
        own = run.folder if mesh.is_main else None
        self.recorder = ProgressRecorder(recipe, own, self.progress, steps, title, self._stack)  # fmt: skip
        about = {
            "recipe": recipe.recorded(),
            "given": recipe.recorded(given=True),
            "layout": str(recipe.layout),
            "world": recipe.layout.world,
            "steps": steps,
        }
        self.recorder.log(
            "run", **about, **(describe_machine() if mesh.is_main else {}),
            device=f"{recipe.layout.world} x {mesh.device.type.upper()}", parameters=parameters,
            started=datetime.datetime.now().isoformat(timespec="seconds"), **more,
        )  # fmt: skip
        for note in self.notes:
            self.recorder.event(note)
        self.checkpoints = self._stack.enter_context(Checkpoints(
            run.levels, state, self.progress, {**about, section: dict(facts)}, {} if files is None else files,
            recipe.model, mesh, self.recorder, run.folder, Best(), strict=recipe.checkpoint.on_error == "stop",
            timeout=recipe.train.timeout,
        ))  # fmt: skip
        self._begun_at = self.progress.step

    @property
    def complete_before(self) -> bool:
        """Whether the run was already complete when it was resumed, so that this process has taken no step."""
        return self.progress.step == self._begun_at > 0

    def asked_to_stop(self) -> bool:
        """Return whether a signal asks any rank to stop. Collective."""
        self._stopped = any(from_all(bool(self._signals), self._mesh.step_group))
        return self._stopped

    @property
    def signalled(self) -> bool:
        """Whether a signal has asked this rank to stop."""
        return bool(self._signals)

    def save_if_due(self, prepare: Callable[[], None] | None = None) -> None:
        """Save a checkpoint if the step is one after which the recipe asks for one. Collective.

        ``prepare``: brings the state up to date before it is saved, once the copy of the last save is complete.
        """
        if due := self.checkpoints.due(self.progress.step):
            if prepare is not None:
                self.checkpoints.wait_for_copy()
                prepare()
            self.checkpoints.save(due)
        self.checkpoints.poll()

    def say_who_stopped(self) -> None:
        """Print and record by which signal the run was stopped."""
        who = signal.Signals(self._signals[0]).name if self._signals else "another rank"
        self.recorder.event(f"stopped by {who}")

    def finish(self) -> Outcome:
        """Save the last checkpoint and return how the run ended. Collective."""
        self.checkpoints.finish(save=True)
        code = [signal.SIGTERM, *self._signals][-1] if self._stopped else 0
        return Outcome(
            self.stored.folder, self.checkpoints.last, self.progress, [], code
        )
