"""A rank's life in a run that survives the loss of others: view after view, until the run ends.

In each view it trains as one of the ranks of a layout (:func:`weft.train.loop.train`, which sees a :class:`Survivor` as
its guard). When a rank is lost, all leave what they are in, agree on the next view (:mod:`.membership`), make new
groups and a new model, and go on from copies of the state in memory (:mod:`.snapshots`, :mod:`.recover`).
"""

import gc
import json
import math
import os
import secrets
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import psutil
import torch
import torch.distributed as dist

from weft.checkpoint.lease import Lease
from weft.checkpoint.levels import levels_of
from weft.checkpoint.state import Progress
from weft.data.loader import shares_of
from weft.errors import WeftError
from weft.layout import lost
from weft.layout.hangup import HangUp
from weft.layout.layout import BATCH_AXES, Layout
from weft.layout.lost import PeerLost
from weft.layout.mesh import Mesh, from_all
from weft.layout.placement import Place
from weft.layout.sockets import own_address
from weft.parallel.state import State
from weft.plugins import PluginError
from weft.recipe import Recipe, build_recipe
from weft.resilience import trace
from weft.resilience.layouts import recipe_for
from weft.resilience.members import NEWCOMER, Fatal, LeftOut, Member, TooFew, View
from weft.resilience.membership import Membership
from weft.resilience.recover import FACT, Recovery, newest, restore
from weft.resilience.rescue import save_copies
from weft.resilience.roster import Roster, asked_to_leave, read_roster, write_roster
from weft.resilience.snapshots import Snapshots, why_none
from weft.resilience.watching import Watching
from weft.train.failure import is_secondary, report_failure
from weft.train.guard import Regroup
from weft.train.loop import Outcome, train
from weft.train.ranks import LEFT_OUT, MEMBERS, backend_of, noted_signals, own_device, settle_in, stop_signals
from weft.train.recorder import Recorder
from weft.train.runs import Resumed, Run, open_run
from weft.train.setup import Job, check_memory, device_type, prepare

#: Seconds between two looks of a rank that no layout has a place for.
LOOK_S = 0.1
#: How long a rank tries to reach the store of a view; nothing can end that.
CONNECT = timedelta(seconds=5)
#: How often a step is tried again before the run ends, as whatever fails then is no loss of ranks.
ATTEMPTS = 8
#: Copies of a rank's state on its machine, two of its own and two of another rank's; they may take so much of what is
#: free.
COPIES, ROOM = 4, 0.8
#: How many times as long as others a rank computes that is left out, if the recipe wants that, and by what share of
#: that time it must have changed for the work to be shared out anew.
LEAVE_OUT, UNLIKE = 1.7, 0.3
#: Who is there, but does not come to agree, is not waited for longer than so many steps take, and so many seconds:
#: gloo may have lost the end of a wait, and who is left out by mistake comes back.
ABSENT, ABSENT_S = 3, 15.0
#: The signal by which a scheduler takes a rank away.
LEAVE = signal.SIGUSR2
#: What a rank says that the others have gone on without, when it asks them to let it in again.
ALONE = "the others have gone on without this rank, and cannot be reached any more"
#: What the members are told when a run has ended as it should.
ENDED = "the run has ended"


class RankLeftOut(WeftError):
    """The others go on without this rank."""

    exit_code = LEFT_OUT


def survive(recipe: Recipe, out: Path | None, resume: str | None) -> tuple[Outcome | None, bool]:
    """Be one of the ranks that were started; how the run ended, and whether this is the one to conclude it.

    None if others have brought it to its end.
    """
    with survivor_of(recipe, out, resume) as survivor:
        return survivor.live(survivor.meet())


def join(folder: Path) -> tuple[Recipe, Outcome | None, bool]:
    """Be one more rank of the run in ``folder``; its recipe, and the rest as of :func:`survive`."""
    roster = read_roster(folder)
    recipe = build_recipe(roster.about["recipe"])
    with survivor_of(recipe, folder) as survivor:
        view = survivor.ask_in(roster)
        return recipe, *((None, False) if view is None else survivor.live(view))


@contextmanager
def survivor_of(recipe: Recipe, out: Path | None, resume: str | None = None) -> Iterator["Survivor"]:
    """In here this process is a rank of a run that survives the loss of others."""
    settle_in(device_type(recipe), recipe.train.threads)
    with noted_signals(*stop_signals()) as received:
        survivor = Survivor(recipe, out, resume, received)
        try:
            yield survivor
        finally:
            survivor.close()


class Survivor(Watching):
    """One rank, through all views that it is in.

    ``run``, ``job`` and ``snapshots`` are kept from view to view: the folder, the open data, and copies of the state,
    also those of the view before until the present one has its own. ``recovery`` is what the present view goes on from,
    None if that is a checkpoint or the beginning. ``seconds`` has what the way into the view took.
    """

    def __init__(self, recipe: Recipe, out: Path | None, resume: str | None, received: list[int]) -> None:
        super().__init__(out, resume)
        self.recipe, self.received, self.device = recipe, received, device_type(recipe)
        self.limit = timedelta(seconds=recipe.train.timeout)
        self.membership: Membership
        self.view: View
        self.store: dist.Store | None = None  # of the first view; of later ones that which this rank serves
        self.job: Job | None = None
        self.run: Run | None = None
        self.snapshots: list[Snapshots] = []
        self.recovery: Recovery | None = None
        self.seconds: dict[str, float] = {}
        self._known: set[int] = set()  # members so far
        self.slow: dict[int, float] = {}  # how many times as long as others members compute, where that counts
        self._rebalance = False
        self.progress, self.attempts, self._last = Progress(), 0, 0
        self._longest, self._stepped = 0.0, math.inf  # step so far, and when the last one ended
        self._digests: object = None
        self._seen: dict[int, float] = {}
        self._looked = 0.0
        self._hang_up: HangUp | None = None
        self._since = time.monotonic()

    # --- from view to view ---

    def meet(self) -> View:
        """The first view: all ranks that were started tell each other where they are."""
        self.store, rank, world = next(dist.rendezvous("env://", timeout=self.limit))
        if rank == 0:
            self.store.set("weft/run", secrets.token_hex(16))
        self.appear(self.store.get("weft/run").decode(), own_address(), rank)
        self.store.set(f"{MEMBERS}/{rank}", json.dumps(asdict(self.membership.me)))
        members = [Member(**json.loads(self.store.get(f"{MEMBERS}/{one}"))) for one in range(world)]
        return self.membership.begin(members, {"recipe": self.recipe.model_dump(mode="json")})

    def appear(self, token: str, host: str, number: int = NEWCOMER) -> None:
        """Have an agent, which watches the others and is watched by them."""
        self.token = token
        detect = self.recipe.resilience.detect
        self.membership = Membership(detect, token, self.on_break, host, number, lambda: self.received)
        lost.watch.append(lambda: self.membership.why)
        signal.signal(LEAVE, lambda number, frame: self.leave())

    def ask_in(self, roster: Roster) -> View | None:
        """The first view of one who comes later; None if the run has ended meanwhile."""
        if "RANK" in os.environ:  # the launcher is to see that this rank is there
            store, rank, _ = next(dist.rendezvous("env://", timeout=self.limit))
            store.set(f"{MEMBERS}/{rank}", "")
        self.appear(roster.token, own_address(roster.members[0].host))
        self.membership.join([member.address for member in roster.members], self.limit.total_seconds())
        return self.next_view()

    def leave(self) -> None:
        """Go away after the present step, once the others have what this rank holds."""
        self.membership.leave()

    def live(self, view: View) -> tuple[Outcome | None, bool]:
        """Train through all views, as :func:`survive` says."""
        while True:
            self.view, ended = view, False
            try:
                outcome = self.attempt()
                ended = True
                return outcome
            except Regroup:
                self._since = time.monotonic()
            except Exception as error:
                self.take_as_loss(error)
            finally:
                self.part(broken=not ended)
            found = self.next_view()
            if found is None:
                return None, False
            view = found
            self.excuse(view)

    def excuse(self, view: View) -> None:
        """Not count attempts that ended with the loss of ranks: the run may go back far then, and fail often."""
        if view.lost:
            self.attempts = self._last = 0

    def attempt(self) -> tuple[Outcome, bool]:
        """Train in the present view, to the end of the run or of the view."""
        if self.job is None:
            self.job = prepare(self.recipe)
        rank, first = self.view.members.index(self.membership.me), not self.view.facts[0]
        recipe = self.recipe if first else self.recipe_now()
        if rank >= recipe.layout.world:
            self.wait_for_place()
        self._hang_up = HangUp(self.end_stuck)
        if self.membership.why:
            raise PeerLost(self.membership.why)
        self.join_groups(rank, recipe.layout.world, self.device)
        mesh = Mesh.create(recipe.layout, own_device(self.device))
        try:
            outcome = train(replace(self.job, recipe=recipe, speeds=self.speeds(recipe.layout.world)), mesh, guard=self)
        except Regroup:
            self.hand_over(mesh)
            raise
        self.membership.end(self.limit.total_seconds())  # who has come here has nothing more to do, whoever is lost
        self.membership.fatal(ENDED)
        trace.stop(everyone=mesh.is_main)
        return outcome, mesh.is_main

    def recipe_now(self) -> Recipe:
        """The recipe for as many ranks as there are; if they are too few, save what they have and end the run."""
        assert self.job is not None
        count, least = len(self.view.members), self.recipe.resilience.min_ranks
        try:
            if count < least:
                raise WeftError(f"{count} ranks are left, and resilience.min_ranks = {least}")
            recipe = recipe_for(self.recipe, self.job.shape, count)
            here = sum(member.machine == self.membership.me.machine for member in self.view.members)
            check_memory(recipe, self.job.shape, here)
            return recipe
        except WeftError as error:
            if self.run is None:
                raise
            saved = self.rescue()
            raise WeftError(
                f"{error}; {saved}: go on with weft train and --resume {self.run.folder}, where there are more"
            ) from None

    def rescue(self) -> str:
        """Save the state that the ranks have in memory; in words, where the run can go on from."""
        assert self.job is not None and self.run is not None
        if self.recovery is None:
            return "its last checkpoint is what there is"
        mine, world = self.view.members.index(self.membership.me), len(self.view.members)
        self._hang_up = HangUp(self.end_stuck)
        self.join_groups(mine, world, "cpu")
        mesh = Mesh.create(Layout(dp=world), "cpu")
        with self.lease() as lease:
            place = save_copies(self.recovery, self.snapshots, self.job, self.run, lease, mesh)
            dist.barrier()
        return f"the state after step {self.recovery.progress.step} is saved in {place}"

    def speeds(self, world: int) -> tuple[float, ...]:
        """How fast the ranks of this view are, by what its first one knew of them."""
        return tuple(1 / self.slow.get(member.number, 1.0) for member in self.view.members[:world])

    def shares(self, layout: Layout) -> dict[int, float]:
        """How much of the work each rank has, where not all have as much."""
        assert self.job is not None
        speeds = replace(self.job, speeds=self.speeds(layout.world)).batch_speeds(layout)
        if not speeds:
            return {}
        counts = shares_of(self.recipe.train.batch, speeds)
        places = (Place.of(layout, rank).along(*BATCH_AXES) for rank in range(layout.world))
        return {rank: counts[at] * len(counts) / sum(counts) for rank, at in enumerate(places)}

    def act(self) -> None:
        """Do about slow ranks what the recipe says, if they have been slow twice; all ranks come to the same."""
        assert self.watch is not None
        members, actions = self.view.members, self.recipe.resilience.actions
        slow = {members[v.ranks[0]].number: v.factor for v in self.watch.verdicts if v.kind == "computer"}
        before, self._seen = self._seen, slow
        if actions == "say" or slow.keys() != before.keys():
            return
        for number, factor in slow.items():
            if actions == "leave-out" and factor >= LEAVE_OUT:
                self.membership.remove(number)
        known = {number: factor for number, factor in self.slow.items() if number in {one.number for one in members}}
        if slow.keys() != known.keys() or any(abs(slow[n] / known[n] - 1) > UNLIKE for n in known):
            self.slow, self._rebalance = slow, True

    def hand_over(self, mesh: Mesh) -> None:
        """Have a copy of the state of which those who leave keep nothing. Collective."""
        goes = from_all(self.membership.leaving, mesh.step_group)
        if self.snapshots and any(goes):
            before, after = self.snapshots[-1], self.copies_of(mesh, [rank for rank, one in enumerate(goes) if one])
            after.begin(self.progress)
            after.complete()
            before.stop()
        elif self.snapshots:
            self.snapshots[-1].begin(self.progress, now=True)
            self.snapshots[-1].complete()
        dist.barrier(group=mesh.step_group)

    def why_no_room(self, mesh: Mesh) -> str:
        """Why this machine, or another, has no room for copies of its ranks' state; empty if all have. Collective."""
        here = sum(member.machine == self.membership.me.machine for member in self.view.members[: mesh.layout.world])
        need = here * COPIES * sum(part.values.nbytes for part in self.state.parts().values())
        free = psutil.virtual_memory().available
        why = f"they need {need / 2**30:.1f} GiB of the {free / 2**30:.1f} that are free" if need > ROOM * free else ""
        return next(filter(None, from_all(why, mesh.step_group)), "")

    def copies_of(self, mesh: Mesh, leaving: Sequence[int] = ()) -> Snapshots:
        """Copies of the state, from now on those that are made; collective."""
        machines = [member.machine for member in self.view.members[: mesh.layout.world]]
        self.snapshots.append(Snapshots(
            self.state, machines, self.membership.me.host, self.token, 2 * self.view.epoch + bool(leaving),
            self.recipe.resilience.snapshot_every, self.limit.total_seconds(), mesh.step_group, leaving,
        ))  # fmt: skip
        return self.snapshots[-1]

    def join_groups(self, rank: int, world: int, device: str) -> None:
        """Join the default process group of the present view, as one of its first ``world`` members."""
        store, (backend, index) = self.store, backend_of(device)
        if self.view.facts[0]:  # not the first view
            host, port = self.view.facts[0]["store"]
            store = dist.TCPStore(host, port, is_master=False, timeout=CONNECT)
            store.set_timeout(self.limit)
        assert store is not None
        store = dist.PrefixStore(f"weft/view-{self.view.epoch}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=self.limit, device_id=index)

    def wait_for_place(self) -> NoReturn:
        """Wait for another view, as the layout has no place for this rank."""
        while not self.membership.why:
            time.sleep(LOOK_S)
        raise PeerLost(self.membership.why)

    def on_break(self, why: str) -> None:
        """In the agent's thread: the view can do no further step."""
        if self._hang_up is not None:
            self._hang_up.hang_up()

    def end_stuck(self) -> None:
        """In another thread: end the process, as the wait that the main thread is in does not end."""
        mine = self.view.members.index(self.membership.me)
        error = RankLeftOut(f"rank {mine} is in a collective that the others have left, and that nothing ends")
        self.membership.close()
        os._exit(report_failure(error))

    def take_as_loss(self, error: Exception) -> None:
        """Take ``error`` to come from the loss of others; raises what is this rank's own error, and ends the run."""
        self._since = time.monotonic()
        cause = error.__cause__ if isinstance(error, PluginError) and error.__cause__ is not None else error
        own = isinstance(error, WeftError) or isinstance(cause, SystemExit)
        if own or not (self.membership.why or is_secondary(cause)):
            self.membership.fatal(f"{type(error).__name__}: {error}")
            raise error
        self.attempts += 1
        if self.attempts > ATTEMPTS:
            self.membership.fatal(f"step {self.progress.step + 1} has failed {ATTEMPTS} times: {error}")
            raise error
        if not self.membership.why:
            self.membership.report(str(cause))
        for one in (error, error.__cause__, error.__context__):  # they hold the model and its gradients
            if one is not None:
                traceback.clear_frames(one.__traceback__)
                one.__traceback__ = None

    def part(self, broken: bool) -> None:
        """Leave the process groups; ``broken``: others may never come to the end of what they do in them."""
        hang_up, self._hang_up = self._hang_up, None
        trace.end()
        if broken and hang_up is not None:
            hang_up.hang_up()
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        if hang_up is not None:
            hang_up.close()
        if self.recipe.train.compile:
            torch._dynamo.reset()  # what was compiled knows the groups by names that will be given again

    def next_view(self) -> View | None:
        """Agree on the next view, and on what it goes on from. None if the run has ended without this rank."""
        self._rebalance, out = False, False
        for copies in self.snapshots:
            copies.stop()
        while True:
            self.store = dist.TCPStore(
                self.membership.me.host, 0, is_master=True, timeout=self.limit, wait_for_workers=False
            )
            place = self.membership.me.host, self.store.port
            facts = {"store": place, "slow": self.slow, FACT: [copies.held() for copies in self.snapshots]}
            self.seconds = {"part_s": time.monotonic() - self._since}
            try:
                view = self.membership.next(facts, self.limit.total_seconds(), max(ABSENT_S, ABSENT * self._longest))
            except Fatal as error:
                if str(error) == ENDED:
                    return None
                raise
            except LeftOut as left:
                if left.asked:
                    return None
                self.snapshots, out = [], True
                others = [member.address for member in self.view.members if member != self.membership.me]
                try:
                    self.membership.join(others, self.limit.total_seconds())
                except TooFew:
                    raise RankLeftOut(ALONE) from None
                continue
            except TooFew:
                if out:
                    raise RankLeftOut(ALONE) from None
                raise
            self.seconds["agree_s"] = time.monotonic() - self._since - self.seconds["part_s"]
            self.recovery = newest(view.facts)
            self.slow = {int(number): factor for number, factor in view.facts[0]["slow"].items()}
            mine = view.members.index(self.membership.me)
            if self.recovery is None or not self.recovery.odd:
                return view
            if mine in self.recovery.odd:
                self.membership.leave()
                raise RankLeftOut(f"rank {mine} has another state than the others, who go on without it")
            self.view = view

    def close(self) -> None:
        for copies in self.snapshots:
            copies.stop()
        if hasattr(self, "membership"):
            self.membership.close()

    # --- what the loop asks and says ---

    def lease(self) -> Lease:
        return Lease(run=self.token)

    def open(self, recipe: Recipe, lease: Lease, size: int) -> Run:
        if self.run is None:  # a folder that was asked for may have been made by one who is lost
            again = bool(self.view.facts[0]) and self.out is not None and self.resume is None
            return open_run(recipe, self.out, "auto" if again else self.resume, lease, size)
        if self.recovery is None:
            return open_run(recipe, self.run.folder, "auto", lease, size)
        run = Run(self.run.folder, [str(self.run.folder)], levels_of(recipe.checkpoint, self.run.folder), True)
        lease.take(run.places)
        return run

    @contextmanager
    def signals(self) -> Iterator[list[int]]:
        yield self.received

    def fill(self, run: Run, job: Job, state: State, mesh: Mesh) -> Resumed:
        self.run, begun = run, time.monotonic()
        self.seconds["rebuild_s"] = begun - self._since - sum(self.seconds.values())
        if self.recovery is None:
            return super().fill(run, job, state, mesh)
        self.seconds["bytes"] = restore(self.recovery, self.snapshots, state, mesh.step_group)
        self.seconds["recover_s"] = time.monotonic() - begun
        return Resumed(replace(self.recovery.progress), [str(self.recovery)])

    def begin(self, state: State, mesh: Mesh, resumed: Resumed, recorder: Recorder) -> None:
        assert self.run is not None
        self.state, self.progress, view, self._stepped = state, resumed.progress, self.view, time.monotonic()
        if self.recipe.resilience.snapshot_every:
            if why := why_none(self.recipe) or self.why_no_room(mesh):
                recorder.event(
                    f"no copies of the state in memory: {why}; a lost rank costs the steps since the last checkpoint"
                )
            else:
                self.copies_of(mesh).begin(self.progress)
        self.folder = self.run.folder
        self.watch_ranks(mesh, recorder, view.epoch)
        if self.watch is not None and self.job is not None:
            self.watch.shares = self.shares(mesh.layout)
            self._digests = self.watch.digests
        if mesh.is_main:
            write_roster(self.run.folder, view, self.token)
        if self.view.facts[0]:
            recorder.forget(self.progress.step)
        lost = [{"number": one.member.number, "rank": one.rank, "why": one.why} for one in view.lost]
        joined = [one.number for one in view.members if one.number not in self._known]
        for one in lost:
            recorder.event(f"rank {one['rank']} {one['why']}")
        if joined and self._known:
            recorder.event(f"{len(joined)} ranks have joined")
        recorder.log(
            "view", epoch=view.epoch, ranks=len(view.members), layout=str(mesh.layout), lost=lost, joined=joined,
            **self.seconds,
        )  # fmt: skip
        self._known |= {one.number for one in view.members}

    def due(self, step: int) -> bool:
        return bool(self.snapshots) and step % self.recipe.resilience.snapshot_every == 0

    def before_update(self) -> None:
        if self.snapshots:
            with trace.waiting():
                self.snapshots[-1].complete()

    def after_step(self) -> None:
        now = time.monotonic()
        self._longest, self._stepped = max(self._longest, now - self._stepped), now
        if self.progress.step > self._last:
            self.attempts, self._last = 0, self.progress.step
        if self.snapshots:
            del self.snapshots[:-1]  # all ranks have copies in this view
            self.snapshots[-1].begin(self.progress)
        super().after_step()
        if self.watch is not None and self.watch.digests is not self._digests:
            self._digests = self.watch.digests
            self.act()

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return bool(self.snapshots)

    @property
    def regroup(self) -> bool:
        if self.run is not None and self.view.members[0] == self.membership.me and time.monotonic() > self._looked + 1:
            self._looked = time.monotonic()
            for number in asked_to_leave(self.run.folder):
                self.membership.remove(number)
        return self._rebalance or self.membership.wishes()
