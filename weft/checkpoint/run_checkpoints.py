"""Save a run's checkpoints in the background of training, report the saves, and delete old checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from weft.checkpoint.best import Best, write_best
from weft.checkpoint.boxes import ROOT
from weft.checkpoint.levels import LevelStore, Thinning
from weft.checkpoint.save import Saver

if TYPE_CHECKING:
    from weft.checkpoint.run_state import Progress
    from weft.checkpoint.storage import Storage
    from weft.layout.mesh import Mesh
    from weft.parallel.state import State
    from weft.recipe import ModelShape


class Listener(Protocol):
    """Receiver of a run's events (lines of text) and records (named values of one kind)."""

    def event(self, text: str) -> None:
        """Record a line of text."""

    def log(self, kind: str, step: int | None = None, /, **values: Any) -> None:
        """Record ``values`` as a record of ``kind``.

        ``step``: the step that it belongs to, by default the current one.
        """


class Checkpoints:
    """Checkpoints of a run: saves ``state`` and ``progress`` to ``levels``.

    As a context it frees the saver's memory at exit. ``about`` (recipe, layout, data) and ``files`` (the tokenizer) go
    into each checkpoint. Checkpoints of another model than ``shape`` are never deleted. ``folder``: the run's folder;
    ``best``: the run's lowest validation loss so far. With ``strict`` a save that failed in the background ends the run
    at the next save.
    """

    def __init__(
        self,
        levels: Sequence[LevelStore],
        state: State,
        progress: Progress,
        about: Mapping[str, Any],
        files: Mapping[str, bytes],
        shape: ModelShape,
        mesh: Mesh,
        listener: Listener,
        folder: Path,
        best: Best,
        strict: bool,
        timeout: float,
    ) -> None:
        self._levels, self._state, self._progress = levels, state, progress
        self._listener, self._mesh = listener, mesh
        self._about, self._files = about, files

        def is_own(place: Storage) -> bool:
            from weft.checkpoint.resume_check import is_of_model

            return is_of_model(place, shape)

        self._thinning = Thinning(is_own)
        self._folder, self._best, self._coming = folder, best, Best()
        resumed = [
            level.last for level in levels if level.last is not None and mesh.is_main
        ]
        self._committed = {
            _absolute(str(place)) for place in resumed if place.holds(ROOT)
        }
        self._protect()
        self._saver = Saver(
            listener.event, strict, timeout, mesh.step_group, state.tiers.staging
        )
        self._saver.prepare(state.saved())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *problem: object) -> None:
        at_once = kind is not None and issubclass(kind, KeyboardInterrupt)
        self._thinning.close(wait=not at_once)
        self._saver.close(at_once)

    @property
    def last(self) -> Storage | None:
        """Newest checkpoint of the last level, whose checkpoints remain after the run; None if there is none."""
        return self._levels[-1].last

    def wait_for_copy(self) -> None:
        """Wait until the save under way has copied the state. Until then the state must not change."""
        self._saver.wait_for_copy()

    def due(self, step: int) -> list[LevelStore]:
        """Return the levels to which the state after ``step`` must be saved."""
        return [level for level in self._levels if level.due(step)]

    def save(self, levels: Sequence[LevelStore]) -> None:
        """Save the state to each of ``levels``, one after another. Collective."""
        waited, meta = 0.0, {"progress": asdict(self._progress), **self._about}
        for level in levels:
            place = level.next_place(self._progress.step)
            tensors = self._state.saved()
            waited += self._saver.save(
                place, self._progress.step, tensors, meta, self._files, lazy=True
            )
        self._listener.log("checkpoint", stall_s=waited)

    def save_best(self, best: Best) -> None:
        """Save the state to the last level as the checkpoint of the run's best validation loss. Collective.

        ``best``: that loss and its step.
        """
        last = self._levels[-1]
        if last.step != self._progress.step:
            self.save([last])
        self._coming = replace(best, checkpoint=_absolute(str(last.last)))
        self._protect()
        self._name_best()

    def note_best(self, best: Best) -> None:
        """Write ``best`` to the run's folder, for a run that keeps no checkpoint of its best validation loss."""
        if not self._mesh.is_main:
            return
        try:
            write_best(self._folder, best)
        except OSError as error:
            self._listener.event(
                f"cannot write which checkpoint is the best: {error.strerror or error}"
            )

    def _name_best(self) -> None:
        """Call the checkpoint of the lowest loss the best as soon as it is whole."""
        if self._coming.checkpoint in self._committed:
            self._best, self._coming = self._coming, Best()
            self.note_best(self._best)
            self._protect()

    def _protect(self) -> None:
        self._thinning.protected = frozenset(
            _absolute(best.checkpoint, self._folder)
            for best in (self._best, self._coming)
            if best.checkpoint
        )

    def poll(self) -> None:
        """Report finished saves, and start to delete old checkpoints after a new one. Does not wait."""
        self._saver.poll()
        self._report_saves()

    def finish(self, save: bool) -> None:
        """Wait for all saves of the run to end. With ``save``, first save the final state to the last level.

        Collective. With ``save``, checkpoints in memory are no longer needed, and the main rank removes them.
        """
        if save and self._levels[-1].step != self._progress.step:
            self.save(self._levels[-1:])
        self._saver.finish()
        self._report_saves()
        self._thinning.close()
        self._report_saves()
        for level in self._levels:
            if level.in_memory and self._mesh.is_main and save:
                level.place.clear()

    def _report_saves(self) -> None:
        for saved in self._saver.reports:
            report = saved.report
            stages = {f"{stage}_s": spent for stage, spent in report.seconds.items()}
            self._listener.log(
                "saved", saved.step, rank=saved.rank, bytes=report.bytes, **stages
            )
            if report.committed:
                self._listener.event(f"checkpoint {saved.where}")
                self._committed.add(_absolute(saved.where))
                self._name_best()
                for level in self._levels:
                    if saved.where == str(level.place / saved.where.rpartition("/")[2]):
                        self._thinning.start(level)
        self._saver.reports.clear()
        for problem in self._thinning.problems():
            self._listener.event(problem)


def _absolute(place: str, folder: Path = Path()) -> str:
    """Return a place by the one name that is the same wherever it is written; ``folder``: what a path is
    relative to.
    """
    return place if "://" in place else str((folder / place).resolve())
