"""The guard of a run: it opens the run and is called at every step. This one does not survive the loss of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from weft.checkpoint.lease import Lease
from weft.run.signals import noted_signals, stop_signals
from weft.train.runs import Resumed, Run, open_run, resume_run

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.parallel.build import Built
    from weft.parallel.state import State
    from weft.recipe import Recipe
    from weft.sync.presence import Presence
    from weft.train.recorder import Recorder
    from weft.train.setup import Job


class Regroup(Exception):
    """Ends the training loop on all ranks, because ranks leave or join and new process groups must be formed."""


class Guard:
    """Opens a run, fills its state from a checkpoint, and is called by the training loop at every step.

    In this class the methods that are called at every step do nothing. :mod:`weft.resilience` derives guards that keep
    a run going when ranks are lost. ``out``: the folder to create. ``resume``: the run or checkpoint to continue.
    ``validations``: the validation losses of the run so far.
    """

    #: Whether the state survives in the ranks' memory when they form new groups, so that no checkpoint is needed.
    remembers = False

    def __init__(self, out: Path | None = None, resume: str | None = None) -> None:
        self.out, self.resume = out, resume
        self.validations: list[float] = []

    def lease(self) -> Lease:
        """Return a lease, not yet taken, that keeps other runs from writing to this run's folders."""
        return Lease()

    def open(self, recipe: Recipe, lease: Lease, size: int) -> Run:
        """Choose and lease the run's folder and the storage of its checkpoints. Called on the main rank only.

        ``lease``: the lease that is taken, so that no other run writes there. ``size``: estimated bytes of a
        checkpoint.
        """
        return open_run(recipe, self.out, self.resume, lease, size)

    def signals(self) -> AbstractContextManager[list[int]]:
        """Return a context manager that yields a list of signal numbers. Each signal that asks the run to end is added
        to it.
        """
        return noted_signals(stop_signals())

    def fill(self, run: Run, job: Job, state: State, mesh: Mesh) -> Resumed:
        """Load into ``state`` the checkpoint from which the run continues; a new run loads none. Collective.

        Returns the steps and samples at which the run continues, and lines to print.
        """
        return resume_run(run, job, state, mesh)

    def build(
        self, job: Job, mesh: Mesh, recorder: Recorder, make: Callable[[], Built]
    ) -> Built:
        """Return the model and its state, as built by ``make``.

        A derived guard may reuse the model and state that this rank had before ranks left or joined. ``recorder``:
        writes the run's records.
        """
        return make()

    @contextmanager
    def presence(self, mesh: Mesh, recipe: Recipe) -> Iterator[Presence | None]:
        """Connect this rank to the other islands of the run for the duration of the context.

        Yields an object that knows which islands take part, or None if the run has no other islands.
        """
        if mesh.island_store is None:
            yield None
            return
        from weft.sync.presence import Presence
        from weft.sync.streams import open_streams

        with open_streams(
            mesh, recipe.train.timeout, recipe.resilience.encrypt
        ) as streams:
            yield Presence(streams) if streams else None

    def begin(
        self, state: State, mesh: Mesh, resumed: Resumed, recorder: Recorder
    ) -> None:
        """Prepare for the first step that the run takes with the process groups of ``mesh``.

        Called once the state is filled. ``resumed``: result of :meth:`fill`, such as the steps so far. ``recorder``:
        object that writes the run's records.
        """

    def step(self, number: int) -> AbstractContextManager[None]:
        """Return a context manager inside which step ``number`` (from 1) runs; a derived guard traces the step in
        it.
        """
        return nullcontext()

    def due(self, step: int) -> bool:
        """Return whether the update of ``step`` (from 1) must be complete when the step ends, for example because the
        guard then copies the state.
        """
        return False

    def before_update(self) -> None:
        """Wait until parameters and optimizer state may change. Called before each change."""

    def after_step(self) -> None:
        """Do the guard's work after a step, such as copying the state.

        The caller changes the state only after the next :meth:`before_update` has returned.
        """

    @property
    def regroup(self) -> bool:
        """Whether this rank knows that ranks are about to leave or join, so that new process groups must be formed."""
        return False
