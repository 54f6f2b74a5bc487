"""Hooks around the steps of a run that survives the loss of ranks: copies of the state, records, slow ranks."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch.distributed as dist

from weft.checkpoint.lease import Lease
from weft.checkpoint.levels import levels_of
from weft.checkpoint.run_state import Progress
from weft.layout.mesh import Mesh, from_all
from weft.net.kept_groups import KeptGroups
from weft.observe import trace
from weft.parallel.build import Built
from weft.parallel.state import State
from weft.recipe import Recipe
from weft.resilience.life import Life
from weft.resilience.membership import Membership
from weft.resilience.recover import Recovery, restore
from weft.resilience.replica_edit import KeptModel, kept_model
from weft.resilience.roster import asked_to_leave, write_roster
from weft.resilience.slow_ranks import SlowRanks
from weft.resilience.snapshots import Snapshots, why_none
from weft.resilience.views import View
from weft.resilience.watching import Watching
from weft.train.recorder import Recorder
from weft.train.runs import Resumed, Run, open_run
from weft.train.setup import Job

if TYPE_CHECKING:
    from weft.resilience.layers_ahead import LayersAhead

#: Copies of a rank's state on its machine (two of its own and two of another rank's), and the share of the free memory
#: that they may take.
COPIES, ROOM = 4, 0.8
#: What is said where a rank is lost together with all copies of its state, before the first checkpoint.
FROM_START = (
    "back to the beginning, as no rank's memory has all of the state, and there is no checkpoint; checkpoint.every "
    "makes some"
)


class RankGuard(Watching):
    """Hooks that the training loop of one rank calls, so that the run goes on when ranks are lost, leave or join.

    The object lives as long as the rank, and keeps data from view to view (set of members).

    Attributes:
        ``view``: present view.
        ``membership``: agent that agrees on views with the other ranks.
        ``recipe``: the run's recipe.
        ``out``: the run folder, or None for the default.
        ``resume``: "auto" (the run's newest checkpoint, if it has one), a run or a checkpoint to continue from, or None
            for a new run.
        ``received``: signals that have asked this process to stop.
        ``life``: state machine that decides what the rank does next.
        ``run``: the run's folder and storages; None before it is opened.
        ``snapshots``: copies of the state in memory. Those of the previous view are kept until the present view has its
            own.
        ``layout``: layout of the present view.
        ``groups``: the process groups that this rank has made.
        ``kept``: model and state of the last view that built them, if the next view can go on with them; else None.
        ``edited``: whether the present view goes on with the model and state in ``kept``.
        ``recovery``: copies in memory from which the present view continues; None if the view continues from a
            checkpoint, or begins the run.
        ``slow``: slow ranks and the reaction to them.
        ``wished``: layout of the present view without regard to slow ranks.
        ``ahead``: copies layers to other ranks while training goes on; None if no layers are on their way.
        ``progress``: progress through steps and data.
        ``seconds``: duration of each stage of the change to the present view.
        ``since``: time (``time.monotonic``) at which the previous view ended.
        ``longest_step``: seconds of the longest step so far.
    """

    view: View
    membership: Membership

    def __init__(
        self,
        recipe: Recipe,
        out: Path | None,
        resume: str | None,
        received: list[int],
        life: Life,
    ) -> None:
        super().__init__(out, resume)
        self.recipe, self.received, self.life = recipe, received, life
        self.groups = KeptGroups()
        self.limit = timedelta(seconds=recipe.train.timeout)
        self.run: Run | None = None
        self.snapshots: list[Snapshots] = []
        self.recovery: Recovery | None = None
        self.slow = SlowRanks(recipe.resilience.actions)
        self.progress = Progress()
        self.seconds: dict[str, float] = {}
        self.since = time.monotonic()
        self.longest_step = 0.0  # seconds
        self.layout = self.wished = recipe.layout
        self.ahead: LayersAhead | None = None
        self.kept: KeptModel | None = None
        self.edited = False
        self._known: set[int] = set()  # all members so far
        self._looked = 0.0  # when this rank last looked who is asked to leave

    # --- copies of the state ---

    def hand_over(self, mesh: Mesh) -> None:
        """Copy the present state in memory, so that the ranks that stay in the run hold all of it.

        Collective over ``mesh``.
        """
        if self.ahead is not None:
            self.ahead.finish(self.progress.step, lambda: self.membership.why)
        leaves = from_all(self.membership.leaving, mesh.step_group)
        if self.snapshots:
            before = self.snapshots[-1]
            copies = (
                self.copies_of(mesh, [rank for rank, goes in enumerate(leaves) if goes])
                if any(leaves)
                else before
            )
            copies.begin(self.progress, now=True)
            copies.complete()
            if copies is not before:
                before.stop()
        dist.barrier(group=mesh.step_group)

    def why_no_room(self, mesh: Mesh) -> str:
        """Return in words why a machine lacks the memory for copies of its ranks' state; "" if no machine does.

        Collective over ``mesh``.
        """
        machine = self.membership.me.machine
        here = sum(
            member.machine == machine
            for member in self.view.members[: mesh.layout.world]
        )
        need = (
            here
            * COPIES
            * sum(part.values.nbytes for part in self.state.parts().values())
        )
        free = psutil.virtual_memory().available
        why = (
            f"they need {need / 2**30:.1f} GiB of the {free / 2**30:.1f} that are free"
            if need > ROOM * free
            else ""
        )
        return next(filter(None, from_all(why, mesh.step_group)), "")

    def copies_of(self, mesh: Mesh, leaving: Sequence[int] = ()) -> Snapshots:
        """Return new copies in memory of the state of the ranks of ``mesh``, into which nothing is copied yet.

        Collective over ``mesh``. ``leaving``: ranks that are about to leave. The parts of the state that only they hold
        will be copied to ranks that stay.
        """
        machines = [member.machine for member in self.view.members[: mesh.layout.world]]
        self.snapshots.append(Snapshots(
            self.state, machines, self.membership.endpoint, self.membership.token,
            2 * self.view.epoch + bool(leaving), self.recipe.resilience.snapshot_every, self.limit.total_seconds(),
            mesh.step_group, leaving,
        ))  # fmt: skip
        if self.membership.why:  # these copies did not exist when the view broke
            self.snapshots[-1].break_off()
        return self.snapshots[-1]

    # --- what the loop asks and says ---

    def lease(self) -> Lease:
        return Lease(run=self.membership.token)

    def open(self, recipe: Recipe, lease: Lease, size: int) -> Run:
        # a folder that was asked for may have been made by one who is lost
        if self.run is None:
            again = not self.view.first and self.out is not None and self.resume is None
            return open_run(
                recipe, self.out, "auto" if again else self.resume, lease, size
            )
        folder = self.run.folder
        if self.recovery is None:
            return open_run(recipe, folder, "auto", lease, size)
        run = Run(folder, [str(folder)], levels_of(recipe.checkpoint, folder), True)
        lease.take(run.places)
        return run

    @contextmanager
    def signals(self) -> Iterator[list[int]]:
        yield self.received

    def fill(self, run: Run, job: Job, state: State, mesh: Mesh) -> Resumed:
        self.run, self.job, begun = run, job, time.monotonic()
        self.seconds["rebuild_s"] = begun - self.since - sum(self.seconds.values())
        ahead = self.end_ahead()
        if self.recovery is None:
            resumed = super().fill(run, job, state, mesh)
            if run.fresh and not self.view.first:
                resumed.notes.append(FROM_START)
            return resumed
        came = ahead.parts(self.recovery.progress.step) if ahead is not None else ()
        self.seconds["bytes"] = restore(
            self.recovery, self.snapshots, state, mesh.step_group, came
        )
        self.seconds["recover_s"] = time.monotonic() - begun
        return Resumed(replace(self.recovery.progress), [str(self.recovery)])

    def build(
        self, job: Job, mesh: Mesh, recorder: Recorder, make: Callable[[], Built]
    ) -> Built:
        kept = self.kept
        self.edited = (
            kept is not None
            and self.recovery is not None
            and kept.fits(job.recipe, mesh)
        )
        if kept is not None and self.edited:
            return kept.edit(job.recipe, mesh, recorder)
        self.kept = None  # before there is memory for another
        built = make()
        self.kept = kept_model(job, mesh, built)
        return built

    def begin(
        self, state: State, mesh: Mesh, resumed: Resumed, recorder: Recorder
    ) -> None:
        assert self.run is not None
        self.state, self.progress, self._stepped = (
            state,
            resumed.progress,
            time.monotonic(),
        )
        if self.recipe.resilience.snapshot_every:
            if why := why_none(self.recipe) or self.why_no_room(mesh):
                recorder.event(
                    f"no copies of the state in memory: {why}; a lost rank costs the steps since the last checkpoint"
                )
            else:
                self.copies_of(mesh).begin(self.progress)
        self.folder, self.layout = self.run.folder, mesh.layout
        self.watch_ranks(mesh, recorder, self.view.epoch)
        if self.watch is not None:
            self.watch.shares = self.slow.shares(
                self.job, self.view.members[: mesh.layout.world], mesh.layout
            )
            self.slow.begin(self.watch)
        if mesh.is_main:
            write_roster(self.folder, self.view, self.membership.token)
        if not self.view.first:
            recorder.forget(self.progress.step)
        self._record_view(recorder, mesh)

    def _record_view(self, recorder: Recorder, mesh: Mesh) -> None:
        view = self.view
        numbers = [member.number for member in view.members]
        joined = [number for number in numbers if number not in self._known]
        for gone in view.lost:
            recorder.event(f"rank {gone.rank} {gone.why}")
        if joined and self._known:
            recorder.event(
                f"{len(joined)} ranks have joined"
                if len(joined) > 1
                else "1 rank has joined"
            )
        for said in view.facts:
            if why := said.get("not_ahead"):
                recorder.event(f"layers moved after the steps, not beside them: {why}")
        speeds = mesh.layout.stage_speeds
        if speeds and not view.first:
            texts = ", ".join(f"{speed:.2g}" for speed in speeds)
            recorder.event(f"stages get layers by their speeds, {texts}")
        if self.slow.order and not view.first:
            recorder.event(
                f"ranks are numbered by the speeds of links, members {self.slow.order}"
            )
        lost = [
            {"number": gone.member.number, "rank": gone.rank, "why": gone.why}
            for gone in view.lost
        ]
        recorder.log(
            "view", epoch=view.epoch, ranks=len(numbers), layout=str(mesh.layout), lost=lost, joined=joined,
            edited=self.edited, stage_speeds=speeds, groups_made=[str(key) for key in self.groups.created],
            groups_kept=len(self.groups.reused), bytes_ahead=sum(said.get("ahead", 0) for said in view.facts),
            **self.seconds,
        )  # fmt: skip
        self._known |= set(numbers)

    def due(self, step: int) -> bool:
        return (
            bool(self.snapshots) and step % self.recipe.resilience.snapshot_every == 0
        )

    def before_update(self) -> None:
        if self.snapshots:
            with trace.waiting():
                self.snapshots[-1].complete()

    def after_step(self) -> None:
        now = time.monotonic()
        self.longest_step, self._stepped = (
            max(self.longest_step, now - self._stepped),
            now,
        )
        self.life.advance(self.progress.step)
        if self.snapshots:
            del self.snapshots[:-1]  # all ranks have copies in this view
            self.snapshots[-1].begin(self.progress)
        super().after_step()
        if self.watch is not None:
            self.slow.act(
                self.watch, self.view.members, self.layout, self.membership.remove
            )
        if self.slow.rebalance and self.layout.pp > 1 and self.snapshots:
            self._copy_layers_ahead()

    def _copy_layers_ahead(self) -> None:
        """Begin to copy the layers that will have another rank, if they are not under way; say so once all are there.

        All ranks decide this after the same step.
        """
        from weft.resilience.layers_ahead import LayersAhead, can_copy_ahead

        view, membership = self.view, self.membership
        if self.ahead is None:
            present = view.members[: self.layout.world]
            after = self.slow.layout_for(self.wished, present)
            if after == self.layout:
                return
            if not can_copy_ahead(self.job, self.state):
                membership.publish(layers=view.epoch)  # others need not wait for it
                return
            self.ahead = LayersAhead(
                self.state, self.job, after, present.index(membership.me), present, membership.endpoint,
                membership.token, view.epoch, self.limit.total_seconds(),
            )  # fmt: skip
        if self.ahead.there:
            membership.publish(layers=view.epoch)

    def end_ahead(self) -> "LayersAhead | None":
        """Stop copying layers to other ranks while training goes on.

        Returns the object that has copied them, from which received layers can be read; None if no layers were copied.
        """
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            ahead.close()
        return ahead

    @property
    def layers_are_there(self) -> bool:
        """Whether all ranks have received the layers that move to them, so that the new layout can begin.

        Also true if no layers are on their way, and if a copy has failed: the layers then move when the layout changes.
        """
        said = self.membership.published
        others = [
            m.number
            for m in self.view.members[: self.layout.world]
            if m != self.membership.me
        ]
        return self.ahead is None or (
            self.ahead.there
            and all(said.get(n, {}).get("layers") == self.view.epoch for n in others)
        )

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return bool(self.snapshots)

    @property
    def regroup(self) -> bool:
        leads = self.run is not None and self.view.members[0] == self.membership.me
        if leads and self.run is not None and time.monotonic() > self._looked + 1:
            self._looked = time.monotonic()
            for number in asked_to_leave(self.run.folder):
                self.membership.remove(number)
        return (self.slow.rebalance and self.layers_are_there) or self.membership.called
