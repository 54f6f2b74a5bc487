"""Hooks around a run's steps for the case that ranks are lost; by default they do nothing."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from weft.checkpoint.lease import Lease
from weft.layout.mesh import Mesh
from weft.parallel.state import State
from weft.recipe import Recipe
from weft.sync.presence import Presence
from weft.sync.streams import Streams, open_streams
from weft.train.ranks import noted_signals, stop_signals
from weft.train.recorder import Recorder
from weft.train.runs import Resumed, Run, open_run, resume_run
from weft.train.setup import Job


class Regroup(Exception):
    """All ranks have ended a step, and come together anew: some leave, or others join."""


class Guard:
    """Opens a run in the folder ``out`` and fills its state, and is told of every step.

    One that keeps a run going when ranks are lost derives from this. ``validations`` are the losses so far.
    """

    #: Whether the state is known when ranks come together anew, without a checkpoint.
    remembers = False
    presence: Presence | None = None

    def __init__(self, out: Path | None = None, resume: str | None = None) -> None:
        self.out, self.resume = out, resume
        self.validations: list[float] = []

    def lease(self) -> Lease:
        """For the places that the run uses."""
        return Lease()

    def open(self, recipe: Recipe, lease: Lease, size: int) -> Run:
        """The run's folder and places, which are in use from now on; ``size``: bytes of a checkpoint. On rank 0."""
        return open_run(recipe, self.out, self.resume, lease, size)

    def signals(self) -> AbstractContextManager[list[int]]:
        """Notes the signals that ask the run to end."""
        return noted_signals(*stop_signals())

    def fill(self, run: Run, job: Job, state: State, mesh: Mesh) -> Resumed:
        """Bring the state to where the run goes on. Collective."""
        return resume_run(run, job, state, mesh)

    def streams(self, mesh: Mesh, limit: float) -> AbstractContextManager[Streams | None]:
        """This rank's streams to other islands; None where there are none. ``limit``: seconds that a message may take.

        ``presence`` then says which islands are there, if that is not always all of them.
        """
        return open_streams(mesh, limit)

    def begin(self, state: State, mesh: Mesh, resumed: Resumed, recorder: Recorder) -> None:
        """The first step is about to be taken."""

    def step(self, number: int) -> AbstractContextManager[None]:
        """In here step ``number`` (from 1) is taken."""
        return nullcontext()

    def due(self, step: int) -> bool:
        """Whether the state after this step must be final when the step ends."""
        return False

    def before_update(self) -> None:
        """Returns when the state may change."""

    def after_step(self) -> None:
        """The state is that after a step, until :meth:`before_update` has returned."""

    @property
    def regroup(self) -> bool:
        """Whether this rank knows of others that want to leave or join."""
        return False
