"""One rank's life in a run that survives the loss of others: view after view, until the run ends.

In each view it trains as one of the ranks of a layout (:func:`weft.train.loop.train`, whose guard is a
:class:`Survivor`). When a rank is lost, all others break off their step, agree on the next view (:mod:`.membership`),
make new process groups and a new model, and go on from copies of the state in memory (:mod:`.snapshots`,
:mod:`.recover`).
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
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import NoReturn

import psutil
import torch
import torch.distributed as dist

from weft.checkpoint.lease import Lease
from weft.checkpoint.levels import levels_of
from weft.checkpoint.state import Progress
from weft.data.loader import shares_of
from weft.errors import WeftError
from weft.layout.axes import BATCH_AXES
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh, from_all
from weft.layout.placement import Place
from weft.net import lost
from weft.net.endpoint import process_endpoint
from weft.net.hangup import HangUp
from weft.net.lost import PeerLost
from weft.net.sockets import own_address
from weft.observe import trace
from weft.parallel.state import State
from weft.recipe import Recipe, build_recipe
from weft.resilience.members import NEWCOMER, Fatal, LeftOut, Member, TooFew, View
from weft.resilience.membership import Membership
from weft.resilience.recover import FACT, Recovery, newest, restore
from weft.resilience.roster import Roster, asked_to_leave, read_roster, write_roster
from weft.resilience.snapshots import Snapshots, why_none
from weft.resilience.watching import Watching
from weft.run.failure import cause_of, is_secondary, report_failure
from weft.run.ranks import LEFT_OUT, MEMBERS, backend_of, own_device, settle_in
from weft.run.signals import noted_signals, stop_signals
from weft.train.guard import Regroup
from weft.train.loop import Outcome, train
from weft.train.recorder import Recorder
from weft.train.runs import Resumed, Run, open_run
from weft.train.setup import Job, check_memory, device_type, prepare

#: Seconds between two looks of a rank for which the layout has no place.
LOOK_S = 0.1
#: How long a rank tries to reach the store of a view; nothing can interrupt that.
CONNECT = timedelta(seconds=5)
#: How often a step is tried before the run ends, as what fails so often is not the loss of ranks.
ATTEMPTS = 8
#: Copies of a rank's state on its machine (two of its own and two of another rank's), and the share of the free memory
#: that they may take.
COPIES, ROOM = 4, 0.8
#: A rank that computes so many times as long as others is left out, if the recipe wants that; and the work is shared
#: out anew if that factor has changed by such a share.
LEAVE_OUT, UNLIKE = 1.7, 0.3
#: A rank that is alive, but does not agree on the next view, is left out after the time of so many steps, and after so
#: many seconds: gloo may never return from a collective, and a rank that is left out by mistake comes back.
ABSENT, ABSENT_S = 3, 15.0
#: The signal by which a scheduler takes a rank away.
LEAVE = signal.SIGUSR2
#: The error of a rank that was left out and cannot reach the others to ask them to let it in again.
ALONE = "the others have gone on without this rank, and cannot be reached any more"
#: What is said where a rank is lost together with all copies of its state, before the first checkpoint.
FROM_START = (
    "back to the beginning, as no rank's memory has all of the state, and there is no checkpoint; checkpoint.every "
    "makes some"
)
#: What members are told (:meth:`Membership.fatal`) when a run has come to its regular end.
ENDED = "the run has ended"


class RankLeftOut(WeftError):
    """The others go on without this rank."""

    exit_code = LEFT_OUT


def survive(
    recipe: Recipe, out: Path | None, resume: str | None
) -> tuple[Outcome | None, bool]:
    """Train as one of the ranks that were started. Returns the outcome, and whether this rank is to conclude the run.

    The outcome is None if others have brought the run to its end.
    """
    with survivor_of(recipe, out, resume) as survivor:
        return survivor.live(survivor.meet())


def join(folder: Path) -> tuple[Recipe, Outcome | None, bool]:
    """Join the run in ``folder`` as one more rank. Returns its recipe, and what :func:`survive` does."""
    roster = read_roster(folder)
    recipe = build_recipe(roster.about["recipe"])
    with survivor_of(recipe, folder) as survivor:
        view = survivor.ask_in(roster)
        return recipe, *((None, False) if view is None else survivor.live(view))


@contextmanager
def survivor_of(
    recipe: Recipe, out: Path | None, resume: str | None = None
) -> Iterator["Survivor"]:
    """In here this process is a rank of a run that survives the loss of others."""
    settle_in(device_type(recipe), recipe.train.threads)
    with noted_signals(stop_signals()) as received:
        survivor = Survivor(recipe, out, resume, received)
        try:
            yield survivor
        finally:
            survivor.close()


class Survivor(Watching):
    """One rank, through all views that it is in.

    Kept from view to view are ``run`` (the folder), ``job`` (the open data) and ``snapshots``, copies of the state:
    those of the view before are kept until the present one has its own. ``recovery``: what the present view goes on
    from; None for a checkpoint or the beginning. ``seconds``: what each part of the way into this view has taken.
    """

    def __init__(
        self, recipe: Recipe, out: Path | None, resume: str | None, received: list[int]
    ) -> None:
        super().__init__(out, resume)
        self.recipe, self.received, self.device = recipe, received, device_type(recipe)
        self.limit = timedelta(seconds=recipe.train.timeout)
        self.membership: Membership
        self.view: View
        # of the first view; of later ones that which this rank serves
        self.store: dist.Store | None = None
        self.job: Job | None = None
        self.run: Run | None = None
        self.snapshots: list[Snapshots] = []
        self.recovery: Recovery | None = None
        self.seconds: dict[str, float] = {}
        self._known: set[int] = set()  # all members so far
        # how many times as long as others slow members compute, by their number
        self.slow: dict[int, float] = {}
        self._rebalance = False  # the work is to be shared out anew
        # at the latest step, and tries of the one after it
        self.progress, self.attempts, self._last = Progress(), 0, 0
        # seconds of the longest step, and when the last one ended
        self._longest, self._stepped = 0.0, math.inf
        self._digests: object = None  # that :meth:`act` has judged
        self._seen: dict[int, float] = {}  # as ``slow``, at the last judgement
        self._looked = 0.0  # when this rank last looked who is asked to leave
        self._hang_up: HangUp | None = None
        self._since = time.monotonic()

    # --- from view to view ---

    def meet(self) -> View:
        """Return the first view: all ranks that were started exchange their addresses."""
        self.store, rank, world = next(dist.rendezvous("env://", timeout=self.limit))
        if rank == 0:
            self.store.set("weft/run", secrets.token_hex(16))
        self.appear(self.store.get("weft/run").decode(), own_address(), rank)
        self.store.set(f"{MEMBERS}/{rank}", json.dumps(asdict(self.membership.me)))
        members = [
            Member(**json.loads(self.store.get(f"{MEMBERS}/{one}")))
            for one in range(world)
        ]
        self.endpoint.check([member.address for member in members])
        return self.membership.begin(
            members, {"recipe": self.recipe.model_dump(mode="json")}
        )

    def appear(self, token: str, host: str, number: int = NEWCOMER) -> None:
        """Start this rank's agent, which watches the others and is watched by them."""
        self.token, encrypt = token, self.recipe.resilience.encrypt
        self.endpoint = process_endpoint(host, encrypt=encrypt)
        detect = self.recipe.resilience.detect
        self.membership = Membership(
            detect, token, self.on_break, self.endpoint, number, lambda: self.received
        )
        lost.watch.append(lambda: self.membership.why)
        # after the present step
        signal.signal(LEAVE, lambda number, frame: self.membership.leave())

    def ask_in(self, roster: Roster) -> View | None:
        """Return the first view of a rank that joins later; None if the run has ended meanwhile."""
        if "RANK" in os.environ:  # the launcher is to see that this rank is there
            store, rank, _ = next(dist.rendezvous("env://", timeout=self.limit))
            store.set(f"{MEMBERS}/{rank}", "")
        self.appear(roster.token, own_address(roster.members[0].host))
        contacts = [member.address for member in roster.members]
        self.endpoint.check(contacts)
        self.membership.join(contacts, self.limit.total_seconds())
        return self.next_view()

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
        """Do not count attempts that ended with the loss of ranks: the run may go back far then, and fail often."""
        if view.lost:
            self.attempts = self._last = 0

    def attempt(self) -> tuple[Outcome, bool]:
        """Train in the present view, to the end of the run. Raises whatever ends the view before that."""
        if self.job is None:
            self.job = prepare(self.recipe)
        rank, first = (
            self.view.members.index(self.membership.me),
            not self.view.facts[0],
        )
        recipe = self.recipe if first else self.recipe_now()
        if rank >= recipe.layout.world:
            self.wait_for_place()
        self._hang_up = HangUp(self.end_stuck)
        if self.membership.why:
            raise PeerLost(self.membership.why)
        self.join_groups(rank, recipe.layout.world, self.device)
        mesh = Mesh.create(recipe.layout, own_device(self.device))
        try:
            outcome = train(
                replace(
                    self.job, recipe=recipe, speeds=self.speeds(recipe.layout.world)
                ),
                mesh,
                guard=self,
            )
        except Regroup:
            self.hand_over(mesh)
            raise
        # nobody that is lost from now on is needed any more
        self.membership.end(self.limit.total_seconds())
        self.membership.fatal(ENDED)
        trace.stop(everyone=mesh.is_main)
        return outcome, mesh.is_main

    def recipe_now(self) -> Recipe:
        """The recipe for as many ranks as there are; if they are too few, save their state and raise the error."""
        from weft.resilience.layouts import recipe_for

        assert self.job is not None
        count, least = len(self.view.members), self.recipe.resilience.min_ranks
        try:
            if count < least:
                raise WeftError(
                    f"{count} ranks are left, and resilience.min_ranks = {least}"
                )
            recipe = recipe_for(self.recipe, self.job.shape, count)
            here = sum(
                member.machine == self.membership.me.machine
                for member in self.view.members
            )
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
        """Save the state that the ranks have in memory; returns words that say where the run can go on from."""
        assert self.job is not None and self.run is not None
        if self.recovery is None:
            return "its last checkpoint is what there is"
        mine, world = (
            self.view.members.index(self.membership.me),
            len(self.view.members),
        )
        self._hang_up = HangUp(self.end_stuck)
        self.join_groups(mine, world, "cpu")
        mesh = Mesh.create(Layout(dp=world), "cpu")
        with self.lease() as lease:
            from weft.resilience.rescue import save_copies

            place = save_copies(
                self.recovery, self.snapshots, self.job, self.run, lease, mesh
            )
            dist.barrier()
        return f"the state after step {self.recovery.progress.step} is saved in {place}"

    def speeds(self, world: int) -> tuple[float, ...]:
        """The relative speeds of the first ``world`` ranks of this view, as its first rank knew them."""
        return tuple(
            1 / self.slow.get(member.number, 1.0)
            for member in self.view.members[:world]
        )

    def shares(self, layout: Layout) -> dict[int, float]:
        """The share of the work of each rank, relative to the mean; {} where all have as much."""
        assert self.job is not None
        speeds = replace(self.job, speeds=self.speeds(layout.world)).batch_speeds(
            layout
        )
        if not speeds:
            return {}
        counts = shares_of(self.recipe.train.batch, speeds)
        places = (
            Place.of(layout, rank).along(*BATCH_AXES) for rank in range(layout.world)
        )
        return {
            rank: counts[at] * len(counts) / sum(counts)
            for rank, at in enumerate(places)
        }

    def act(self) -> None:
        """Do about slow ranks what the recipe says, if two judgements name them; all ranks decide alike."""
        assert self.watch is not None
        members, actions = self.view.members, self.recipe.resilience.actions
        slow = {
            members[v.ranks[0]].number: v.factor
            for v in self.watch.verdicts
            if v.kind == "computer"
        }
        before, self._seen = self._seen, slow
        if actions == "say" or slow.keys() != before.keys():
            return
        for number, factor in slow.items():
            if actions == "leave-out" and factor >= LEAVE_OUT:
                self.membership.remove(number)
        known = {
            number: factor
            for number, factor in self.slow.items()
            if number in {one.number for one in members}
        }
        if slow.keys() != known.keys() or any(
            abs(slow[n] / known[n] - 1) > UNLIKE for n in known
        ):
            self.slow, self._rebalance = slow, True

    def hand_over(self, mesh: Mesh) -> None:
        """Make a copy of the present state, all of it held by ranks that stay. Collective."""
        goes = from_all(self.membership.leaving, mesh.step_group)
        if self.snapshots and any(goes):
            before, after = (
                self.snapshots[-1],
                self.copies_of(mesh, [rank for rank, one in enumerate(goes) if one]),
            )
            after.begin(self.progress)
            after.complete()
            before.stop()
        elif self.snapshots:
            self.snapshots[-1].begin(self.progress, now=True)
            self.snapshots[-1].complete()
        dist.barrier(group=mesh.step_group)

    def why_no_room(self, mesh: Mesh) -> str:
        """Why this machine, or another, has no room for copies of its ranks' state; empty if all have. Collective."""
        here = sum(
            member.machine == self.membership.me.machine
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
        """New copies of the state, which are made after steps from now on. Collective."""
        machines = [member.machine for member in self.view.members[: mesh.layout.world]]
        self.snapshots.append(Snapshots(
            self.state, machines, self.endpoint, self.token, 2 * self.view.epoch + bool(leaving),
            self.recipe.resilience.snapshot_every, self.limit.total_seconds(), mesh.step_group, leaving,
        ))  # fmt: skip
        if self.membership.why:  # this has not been told to them
            self.snapshots[-1].break_off()
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
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world,
            timeout=self.limit,
            device_id=index,
        )

    def wait_for_place(self) -> NoReturn:
        """Wait for another view, as the layout has no place for this rank."""
        while not self.membership.why:
            time.sleep(LOOK_S)
        raise PeerLost(self.membership.why)

    def on_break(self, why: str) -> None:
        """In the agent's thread: the view can do no further step."""
        if self._hang_up is not None:
            self._hang_up.hang_up()
        for copies in list(self.snapshots):
            copies.break_off()

    def end_stuck(self) -> None:
        """Called in another thread: end the process, as the main thread waits in a collective that does not end."""
        mine = self.view.members.index(self.membership.me)
        error = RankLeftOut(
            f"rank {mine} is in a collective that the others have left, and that nothing ends"
        )
        self.membership.close()
        os._exit(report_failure(error))

    def take_as_loss(self, error: Exception) -> None:
        """Treat ``error`` as a loss of others. If it is this rank's own error, raises it and ends the run for all."""
        self._since = time.monotonic()
        cause = cause_of(error)
        own = isinstance(error, WeftError) or isinstance(cause, SystemExit)
        if own or not (self.membership.why or is_secondary(cause)):
            self.membership.fatal(f"{type(error).__name__}: {error}")
            raise error
        self.attempts += 1
        if self.attempts > ATTEMPTS:
            self.membership.fatal(
                f"step {self.progress.step + 1} has failed {ATTEMPTS} times: {error}"
            )
            raise error
        if not self.membership.why:
            self.membership.report(str(cause))
        # they hold the model and its gradients
        for one in (error, error.__cause__, error.__context__):
            if one is not None:
                traceback.clear_frames(one.__traceback__)
                one.__traceback__ = None

    def part(self, broken: bool) -> None:
        """Leave the process groups; ``broken``: others may never finish what they do in them."""
        hang_up, self._hang_up = self._hang_up, None
        trace.end()
        if (
            broken
        ):  # a run that loses no rank imports neither; leaving the groups takes longer
            for module in ("weft.resilience.layouts", "weft.checkpoint.reshard"):
                Thread(target=import_module, args=(module,), daemon=True).start()
        if broken and hang_up is not None:
            hang_up.hang_up()
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        if hang_up is not None:
            hang_up.close()
        if self.recipe.train.compile:
            # what was compiled knows the groups by names that will be given again
            torch._dynamo.reset()

    def next_view(self) -> View | None:
        """Agree on the next view and on the state that it goes on from; None if the run ends without this rank."""
        self._rebalance, out = False, False
        for copies in self.snapshots:
            copies.stop()
        while True:
            self.store = dist.TCPStore(
                self.membership.me.host,
                0,
                is_master=True,
                timeout=self.limit,
                wait_for_workers=False,
            )
            place = self.membership.me.host, self.store.port
            facts = {
                "store": place,
                "slow": self.slow,
                FACT: [copies.held() for copies in self.snapshots],
            }
            self.seconds = {"part_s": time.monotonic() - self._since}
            try:
                view = self.membership.next(
                    facts,
                    self.limit.total_seconds(),
                    max(ABSENT_S, ABSENT * self._longest),
                )
            except Fatal as error:
                if str(error) == ENDED:
                    return None
                raise
            except LeftOut as left:
                if left.asked:
                    return None
                self.snapshots, out = [], True
                others = [
                    member.address
                    for member in self.view.members
                    if member != self.membership.me
                ]
                try:
                    self.membership.join(others, self.limit.total_seconds())
                except TooFew:
                    raise RankLeftOut(ALONE) from None
                continue
            except TooFew:
                if out:
                    raise RankLeftOut(ALONE) from None
                raise
            self.seconds["agree_s"] = (
                time.monotonic() - self._since - self.seconds["part_s"]
            )
            self.recovery = newest(view.facts)
            self.slow = {
                int(number): factor for number, factor in view.facts[0]["slow"].items()
            }
            mine = view.members.index(self.membership.me)
            if self.recovery is None or not self.recovery.odd:
                return view
            if mine in self.recovery.odd:
                self.membership.leave()
                raise RankLeftOut(
                    f"rank {mine} has another state than the others, who go on without it"
                )
            self.view = view

    def close(self) -> None:
        for copies in self.snapshots:
            copies.stop()
        if hasattr(self, "membership"):
            self.membership.close()
            self.endpoint.close()

    # --- what the loop asks and says ---

    def lease(self) -> Lease:
        return Lease(run=self.token)

    def open(self, recipe: Recipe, lease: Lease, size: int) -> Run:
        # a folder that was asked for may have been made by one who is lost
        if self.run is None:
            again = (
                bool(self.view.facts[0])
                and self.out is not None
                and self.resume is None
            )
            return open_run(
                recipe, self.out, "auto" if again else self.resume, lease, size
            )
        if self.recovery is None:
            return open_run(recipe, self.run.folder, "auto", lease, size)
        run = Run(
            self.run.folder,
            [str(self.run.folder)],
            levels_of(recipe.checkpoint, self.run.folder),
            True,
        )
        lease.take(run.places)
        return run

    @contextmanager
    def signals(self) -> Iterator[list[int]]:
        yield self.received

    def fill(self, run: Run, job: Job, state: State, mesh: Mesh) -> Resumed:
        self.run, begun = run, time.monotonic()
        self.seconds["rebuild_s"] = begun - self._since - sum(self.seconds.values())
        if self.recovery is None:
            resumed = super().fill(run, job, state, mesh)
            if run.fresh and self.view.facts[0]:
                resumed.notes.append(FROM_START)
            return resumed
        self.seconds["bytes"] = restore(
            self.recovery, self.snapshots, state, mesh.step_group
        )
        self.seconds["recover_s"] = time.monotonic() - begun
        return Resumed(replace(self.recovery.progress), [str(self.recovery)])

    def begin(
        self, state: State, mesh: Mesh, resumed: Resumed, recorder: Recorder
    ) -> None:
        assert self.run is not None
        self.state, self.progress, view, self._stepped = (
            state,
            resumed.progress,
            self.view,
            time.monotonic(),
        )
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
        lost = [
            {"number": one.member.number, "rank": one.rank, "why": one.why}
            for one in view.lost
        ]
        joined = [one.number for one in view.members if one.number not in self._known]
        for one in lost:
            recorder.event(f"rank {one['rank']} {one['why']}")
        if joined and self._known:
            recorder.event(
                f"{len(joined)} ranks have joined"
                if len(joined) > 1
                else "1 rank has joined"
            )
        recorder.log(
            "view", epoch=view.epoch, ranks=len(view.members), layout=str(mesh.layout), lost=lost, joined=joined,
            **self.seconds,
        )  # fmt: skip
        self._known |= {one.number for one in view.members}

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
        if (
            self.run is not None
            and self.view.members[0] == self.membership.me
            and time.monotonic() > self._looked + 1
        ):
            self._looked = time.monotonic()
            for number in asked_to_leave(self.run.folder):
                self.membership.remove(number)
        return self._rebalance or self.membership.wishes()
