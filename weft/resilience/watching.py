"""A run that names its slow ranks: the hooks around its steps."""

from contextlib import AbstractContextManager

from weft.layout.mesh import Mesh
from weft.observe import trace
from weft.observe.rank_delays import DelayWatch
from weft.parallel.state import State
from weft.train.guard import Guard
from weft.train.recorder import Recorder
from weft.train.runs import Resumed, Run
from weft.train.setup import Job


class Watching(Guard):
    """Hooks around the steps of a run that trace collectives, and record which ranks are slow.

    ``watch``: judges which ranks are slow; None while ranks are not watched.
    """

    watch: DelayWatch | None = None

    def fill(self, run: Run, job: Job, state: State, mesh: Mesh) -> Resumed:
        self.folder = run.folder
        return super().fill(run, job, state, mesh)

    def begin(
        self, state: State, mesh: Mesh, resumed: Resumed, recorder: Recorder
    ) -> None:
        self.watch_ranks(mesh, recorder)

    def watch_ranks(self, mesh: Mesh, recorder: Recorder, epoch: int = 0) -> None:
        """Begin to trace the collectives in the process groups of ``mesh``. A single rank is not watched.

        ``recorder``: receives reports about slow ranks; ``epoch``: number of the view whose ranks the mesh has.
        """
        self.watch = None
        if mesh.step_group is not None and mesh.layout.world > 1:
            ring = trace.start_tracing(self.folder, mesh.step_group.rank(), epoch)
            self.recorder, self.watch = (
                recorder,
                DelayWatch(ring, mesh.step_group, mesh.device),
            )

    def step(self, number: int) -> AbstractContextManager[None]:
        return trace.step(number)

    def after_step(self) -> None:
        if self.watch is not None and self.watch.look():
            for news in self.watch.news:
                self.recorder.event(news)
            self.recorder.log("delays", **self.watch.record())
