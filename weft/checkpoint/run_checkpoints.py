"""Save a run's checkpoints in the background of training, report the saves, and delete old checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from weft.checkpoint.best import Best, write_best
from weft.checkpoint.boxes import ROOT
from weft.checkpoint.levels import LevelStore, Thinning
from weft.checkpoint.save import Saver
from weft.paths import real_path

if TYPE_CHECKING:
    from weft.checkpoint.run_state import Progress
    from weft.checkpoint.storage import Storage
    from weft.layout.mesh import Mesh
    from weft.layout.parts import Part
    from weft.recipe import ModelShape


class Listener(Protocol):
    """Interface of the receiver of a run's reports: events (lines of text) and records (named values of one kind)."""

    def event(self, text: str) -> None:
        """Record ``text``, a line for the user, as an event of the run."""

    def log(self, kind: str, step: int | None = None, /, **values: Any) -> None:
        """Record named ``values`` of one kind of record, such as ``checkpoint`` or ``saved``.

        ``kind``: the kind; ``step``: the step that the record belongs to, by default the current step.
        """


class StagedTiers(Protocol):
    """Interface of the tiers of a state (the kinds of memory in which the state is kept), as :class:`Checkpoints` uses
    it.
    """

    @property
    def staging(self) -> Path | None:
        """Folder for the file with the copy of the state that a save makes; None: the copy is in main memory."""


class SavedState(Protocol):
    """Interface of a state that :class:`Checkpoints` saves, such as :class:`weft.parallel.state.State`."""

    @property
    def tiers(self) -> StagedTiers:
        """Tiers of the state: the kinds of memory in which it is kept."""

    def saved(self) -> Mapping[str, Part]:
        """Return this rank's parts of the tensors to save, by name."""


class Checkpoints:
    """Checkpoints of a run: saves its state at each level in the background, and deletes old checkpoints.

    Use it as a context manager, which frees the memory of background saves at exit.

    Args:
        ``levels``: levels of the run, the fastest storage first.
        ``state``: state to save (parameters and optimizer).
        ``progress``: progress through steps and data, saved with the state.
        ``about``: further contents of each root file (recipe, layout, digest of the data).
        ``files``: further files of each checkpoint (the tokenizer's), by name.
        ``shape``: shape of the run's model. Checkpoints of another model are never deleted.
        ``mesh``: ranks of the run.
        ``listener``: receiver of reports about saves.
        ``folder``: the run's folder, in which ``best.json`` is written.
        ``best``: the run's lowest validation loss so far.
        ``strict``: whether a save that failed in the background ends the run at the next save.
        ``timeout``: seconds that the commit of a save waits for other ranks.
        ``keeps_best``: whether the state is saved whenever the validation loss is the lowest so far. If not, and if no
            level saves during the run, the only save is the last one, which then needs no copy of the state.
    """

    def __init__(
        self,
        levels: Sequence[LevelStore],
        state: SavedState,
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
        keeps_best: bool = False,
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
        at_end = not keeps_best and not any(level.every for level in levels)
        self._saver = Saver(
            listener.event,
            strict,
            timeout,
            mesh.step_group,
            state.tiers.staging,
            in_place=at_end,
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
        """Storage of the newest checkpoint of the last level; None if there is none.

        Checkpoints of the last level remain after the run.
        """
        return self._levels[-1].last

    def wait_for_copy(self) -> None:
        """Wait until the save under way, if any, has copied the state.

        Call it before every update of the parameters, because no parameter may change during the copy.
        """
        self._saver.wait_for_copy()

    def due(self, step: int) -> list[LevelStore]:
        """Return the levels at which the state after step number ``step`` must be saved."""
        return [level for level in self._levels if level.due(step)]

    def save(self, levels: Sequence[LevelStore]) -> None:
        """Save the state at each of ``levels``, one after another. Collective.

        Returns as soon as the last save has begun to copy the state in the background. The state must not change until
        :meth:`wait_for_copy` has returned.
        """
        waited, meta = 0.0, {"progress": self._progress.to_json(), **self._about}
        for level in levels:
            place = level.next_place(self._progress.step)
            tensors = self._state.saved()
            waited += self._saver.save(
                place, self._progress.step, tensors, meta, self._files, lazy=True
            )
        self._listener.log("checkpoint", stall_s=waited)

    def save_best(self, best: Best) -> None:
        """Save the state at the last level as the checkpoint with the run's lowest validation loss. Collective.

        ``best``: that loss and its step. If the last level has a checkpoint of this step already, that one is used.
        """
        last = self._levels[-1]
        if last.step != self._progress.step:
            self.save([last])
        self._coming = replace(best, checkpoint=_absolute(str(last.last)))
        self._protect()
        self._name_best()

    def note_best(self, best: Best) -> None:
        """Write the lowest validation loss ``best`` to the run's folder, on the main rank only.

        A run that keeps no checkpoint of its lowest loss calls this method instead of :meth:`save_best`. A failure is
        reported as an event.
        """
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
        """Report the saves that have ended. After a committed save start to delete old checkpoints. Does not wait."""
        self._saver.poll()
        self._report_saves()

    def finish(self, save: bool) -> None:
        """Wait until all saves and deletions of the run have ended. Collective.

        With ``save`` the final state is saved at the last level first, and the main rank removes the checkpoints in
        memory, which are no longer needed.
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
    return place if "://" in place else str(real_path(folder / place))
