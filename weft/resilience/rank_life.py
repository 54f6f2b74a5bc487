"""A rank of a run that survives the loss of others: in each view it trains as one of the ranks of a layout.

When a rank is lost, all others break off their step, agree on the next view (:mod:`.membership`), create new process
groups and a new model, and continue from copies of the state in memory (:mod:`.snapshots`, :mod:`.recover`).
"""

import gc
import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from weft.errors import WeftError
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.net import lost
from weft.net.endpoint import process_endpoint
from weft.net.groups import keepers
from weft.net.hangup import HangUp
from weft.net.lost import PeerLost
from weft.net.sockets import own_address
from weft.observe import trace
from weft.observe.run_metrics import resume_hint
from weft.recipe import Recipe
from weft.resilience.life import ENDED, Life, LifeMove, ViewEntry, live
from weft.resilience.meeting import exchange_addresses
from weft.resilience.membership import Membership
from weft.resilience.rank_guard import RankGuard
from weft.resilience.recover import FACT, newest_recovery
from weft.resilience.replica_edit import recipe_of_replicas
from weft.resilience.roster import Roster
from weft.resilience.traffic import ordered_view
from weft.resilience.views import NEWCOMER, Address, LeftOut, View
from weft.run.failure import report_failure
from weft.run.rank_processes import MEMBERS, backend_of, own_device, settle_in
from weft.run.signals import noted_signals, stop_signals
from weft.train.guard import Regroup
from weft.train.setup import Job, check_memory, device_type, prepare
from weft.train.training import Ending, train_job

#: Seconds between two looks of a rank for which the layout has no place.
LOOK_S = 0.1
#: How long a rank tries to reach the store of a view; nothing can interrupt that.
CONNECT = timedelta(seconds=5)
#: A rank that is alive, but does not agree on the next view, is left out after the time of so many steps, and after so
#: many seconds: gloo may never return from a collective, and a rank that is left out by mistake comes back.
ABSENT, ABSENT_S = 3, 15.0
#: Seconds in which ranks that have lost no peer come to the end of what they exchange, so that their groups can stay.
DRAIN_S = 0.5
#: The signal by which a scheduler takes a rank away.
LEAVE = signal.SIGUSR2


def start_rank(recipe: Recipe, out: Path | None, resume: str | None) -> Ending:
    """Train as one of the ranks that were started together, in a run that survives the loss of ranks.

    ``recipe``: the run's recipe; ``out``: the run folder, or None for the default; ``resume``: "auto" (the run's newest
    checkpoint, if it has one), a run or a checkpoint to continue from, or None for a new run. Returns how the training
    has ended.
    """
    with noted(recipe) as received:
        limit = timedelta(seconds=recipe.train.timeout)
        store, rank, world = next(dist.rendezvous("env://", timeout=limit))
        if rank == 0:
            store.set("weft/run", secrets.token_hex(16))
        token = store.get("weft/run").decode()
        with rank_party(
            recipe,
            out,
            resume,
            received,
            Life(LifeMove.STAY),
            token,
            own_address(),
            rank,
        ) as party:
            about = {"recipe": recipe.model_dump(mode="json")}
            party.store = store
            party.take(exchange_addresses(party.membership, store, rank, world, about))
            return party.live()


def join_rank(recipe: Recipe, folder: Path, roster: Roster) -> Ending:
    """Train as one more rank of a run that has already begun. Returns how the training has ended.

    ``folder``: the run's folder; ``roster``: members of the run, read from that folder.
    """
    with noted(recipe) as received:
        if "RANK" in os.environ:  # the launcher is to see that this rank is there
            store, rank, _ = next(
                dist.rendezvous(
                    "env://", timeout=timedelta(seconds=recipe.train.timeout)
                )
            )
            store.set(f"{MEMBERS}/{rank}", "")
        host = own_address(roster.members[0].host)
        with rank_party(
            recipe, folder, None, received, Life(LifeMove.JOIN), roster.token, host
        ) as party:
            party.known = [member.address for member in roster.members]
            return party.live()


@contextmanager
def noted(recipe: Recipe) -> Iterator[list[int]]:
    """Prepare this process to be a training rank, and note signals while the context lasts.

    Yields a list. The number of each received signal that asks the process to stop is appended to it.
    """
    settle_in(device_type(recipe), recipe.train.threads)
    with noted_signals(stop_signals()) as received:
        yield received


@contextmanager
def rank_party(
    recipe: Recipe, out: Path | None, resume: str | None, received: list[int], life: Life, token: str, host: str,
    number: int = NEWCOMER,
) -> Iterator["RankParty"]:  # fmt: skip
    """Run this rank's agent, the thread that watches the other ranks, while the context lasts.

    Yields a :class:`RankParty`, whose method ``live`` trains until this rank's part in the run is over.

    ``out``: the run folder, or None for the default; ``resume``: "auto" (the run's newest checkpoint, if it has one), a
    run or a checkpoint to continue from, or None for a new run; ``received``: signals that have asked the process to
    stop; ``life``: state machine that decides what the rank does next; ``token``: the run's secret; ``host``:
    address at which this process listens; ``number``: this rank's number as a member, if it has one.
    """
    party = RankParty(RankGuard(recipe, out, resume, received, life))
    resilience = recipe.resilience
    endpoint = process_endpoint(host, encrypt=resilience.encrypt)
    membership = Membership(
        resilience.detect, token, party.on_break, endpoint, number, lambda: received
    )
    party.membership = party.guard.membership = membership
    lost.watch.append(lambda: membership.why)
    if party.device == "cpu":  # groups of NCCL are not kept
        keepers.append(party.guard.groups.group)
    # after the present step
    signal.signal(LEAVE, lambda number, frame: membership.leave())
    try:
        yield party
    finally:
        for copies in party.guard.snapshots:
            copies.stop()
        membership.close()


class RankParty:
    """One rank's part in all views (sets of members) of a run without islands: it trains while a view lasts.

    Attributes:
        ``guard``: hooks around the training steps.
        ``membership``: agent that agrees on views with the other ranks.
        ``limit``: time that a collective or an agreement may take (``timedelta``).
        ``device``: "cpu" or "cuda".
        ``store``: key-value store with which process groups are created. For the first view it is the store of the
            run's start. Later it is a store that this rank offers for the next view.
        ``known``: addresses of other members.
        ``job``: the checked recipe with its opened data; None until the first view begins.
    """

    membership: Membership

    def __init__(self, guard: RankGuard) -> None:
        self.guard, self.recipe, self.limit = guard, guard.recipe, guard.limit
        self.device = device_type(guard.recipe)
        self.store: dist.Store | None = None
        self.known: Sequence[Address] = ()
        self.job: Job | None = None
        self._hang_up: HangUp | None = None

    def live(self) -> Ending:
        """Train from view to view until this rank's part in the run is over. Returns how the training has ended."""
        ending = live(
            self.guard.life, self.membership, self, self.limit.total_seconds()
        )
        return ending or Ending(self.recipe, None, False)

    @property
    def step(self) -> int:
        return self.guard.progress.step

    def start_over(self) -> Sequence[Address]:
        self.guard.snapshots = []
        self.membership.endpoint.check(self.known)
        return self.known

    def facts(self) -> dict[str, Any]:
        own = self.membership.me.host
        store = dist.TCPStore(
            own, 0, is_master=True, timeout=self.limit, wait_for_workers=False
        )
        self.store = store
        copies = [snapshots.held() for snapshots in self.guard.snapshots]
        self.guard.seconds = {"part_s": time.monotonic() - self.guard.since}
        return {
            "store": (own, store.port),
            "slow": self.guard.slow.factors,
            "order": self.guard.slow.order,
            "groups": self.guard.groups.facts(),
            "ahead": self.guard.ahead.sent if self.guard.ahead else 0,
            "not_ahead": self.guard.ahead.problem if self.guard.ahead else "",
            FACT: copies,
        }

    def patience(self) -> float:
        return max(ABSENT_S, ABSENT * self.guard.longest_step)

    def enter(self, view: View) -> ViewEntry:
        guard = self.guard
        guard.seconds["agree_s"] = (
            time.monotonic() - guard.since - guard.seconds["part_s"]
        )
        said = view.facts[0]
        guard.slow.order = [*said["order"]]
        view = ordered_view(view, guard.slow.order, getattr(guard, "view", None))
        self.take(view)
        guard.recovery = newest_recovery(view.facts)
        guard.slow.factors = {
            int(number): factor for number, factor in said["slow"].items()
        }
        differing = guard.recovery.differing if guard.recovery else ()
        if self.rank in differing:
            return ViewEntry(
                f"rank {self.rank} has another state than the others, who go on without it"
            )
        return ViewEntry(again=bool(differing))

    def take(self, view: View) -> None:
        """Make ``view`` the present view, and note the addresses of its other members."""
        self.guard.view = view
        self.known = [
            member.address for member in view.members if member != self.membership.me
        ]

    @property
    def rank(self) -> int:
        """Rank of this process in the present view, from 0."""
        return self.guard.view.members.index(self.membership.me)

    def stay(self) -> Ending:
        """Train in the present view until the run ends. Returns how the training has ended.

        Raises :class:`Regroup` if the view ends on purpose before the run, and :class:`PeerLost` if a rank is lost.
        """
        guard, membership = self.guard, self.membership
        if self.job is None:
            self.job = prepare(self.recipe)
        recipe = self.recipe if guard.view.first else self.recipe_now(self.job)
        world = recipe.layout.world
        if self.rank >= world:
            self.wait_for_place()
        present, guard.wished = guard.view.members[:world], recipe.layout
        layout = guard.slow.layout_for(recipe.layout, present)
        recipe = recipe.model_copy(update={"layout": layout})
        self._hang_up = HangUp(self.end_stuck, guard.groups.connections())
        if membership.why:
            raise PeerLost(membership.why)
        self.join_groups(world, self.device)
        job = replace(
            self.job,
            recipe=recipe,
            given=self.job.recipe,
            speeds=guard.slow.speeds(present),
        )
        uneven = bool(job.batch_speeds(layout))
        mesh = Mesh.create(layout, own_device(self.device), uneven=uneven)
        try:
            outcome = train_job(job, mesh, guard=guard)
        except Regroup:
            guard.hand_over(mesh)
            raise
        guard.end_ahead()
        # nobody that is lost from now on is needed any more
        membership.end(self.limit.total_seconds())
        membership.fatal(ENDED)
        trace.stop(everyone=mesh.is_main)
        return Ending(self.recipe, outcome, mesh.is_main)

    def part(self, broken: bool) -> None:
        """Leave the process groups of the present view.

        ``broken``: whether the view has failed, so that other ranks may never finish their collectives in these groups.
        """
        self.guard.since, self.guard.slow.rebalance = time.monotonic(), False
        hang_up, self._hang_up = self._hang_up, None
        trace.end_tracing()
        if broken:
            # a run that loses no rank imports neither; leaving the groups takes longer
            for module in self._modules_of_recovery():
                Thread(target=import_module, args=(module,), daemon=True).start()
            if hang_up is not None:
                self._break_off(hang_up)
        gc.collect()
        if dist.is_initialized():
            shut = hang_up is not None and hang_up.everything
            self.guard.groups.set_aside(self.membership.lost, shut)
        if hang_up is not None:
            hang_up.close()
        if self.recipe.train.compile:
            # what was compiled knows the groups by names that will be given again
            torch._dynamo.reset()

    # --- the ranks of a view ---

    def recipe_now(self, job: Job) -> Recipe:
        """Return the recipe with a layout for the present number of ranks.

        ``job``: the checked recipe and its model's shape. If the ranks are too few, or have too little memory, save the
        state in their memory as a checkpoint, and raise :class:`WeftError`.
        """
        members, least = self.guard.view.members, self.recipe.resilience.min_ranks
        try:
            if len(members) < least:
                raise WeftError(
                    f"{len(members)} ranks are left, and resilience.min_ranks = {least}"
                )
            recipe = recipe_of_replicas(self.recipe, job.shape, len(members))
            if recipe is None:
                from weft.resilience.layouts import recipe_for

                recipe = recipe_for(self.recipe, job.shape, len(members))
            machine = self.membership.me.machine
            check_memory(
                recipe, job.shape, sum(member.machine == machine for member in members)
            )
            return recipe
        except WeftError as error:
            if self.guard.run is None:
                raise
            saved = self.rescue(job)
            raise WeftError(
                f"{error}; {saved}; where there are more ranks, {resume_hint(self.guard.run.folder)}"
            ) from None

    def rescue(self, job: Job) -> str:
        """Save the state that the ranks hold in memory as a checkpoint, after an error. Returns a text for the user.

        The text says from which state the run can continue: the saved one, or, if no complete state is in memory, the
        last checkpoint. Nothing is saved in the second case. ``job``: the checked recipe with its opened data.
        """
        guard = self.guard
        if guard.recovery is None or guard.run is None:
            return "its last checkpoint is what there is"
        world = len(guard.view.members)
        self._hang_up = HangUp(self.end_stuck)
        self.join_groups(world, "cpu")
        mesh = Mesh.create(Layout(dp=world), "cpu")
        with guard.lease() as lease:
            from weft.resilience.rescue import save_copies

            place = save_copies(
                guard.recovery, guard.snapshots, job, guard.run, lease, mesh
            )
            dist.barrier()
        return (
            f"the state after step {guard.recovery.progress.step} is saved in {place}"
        )

    def join_groups(self, world: int, device: str) -> None:
        """Join the default process group, whose members are the first ``world`` members of the present view.

        ``device``: "cpu" or "cuda".
        """
        view, store, (backend, index) = self.guard.view, self.store, backend_of(device)
        if not view.first:
            host, port = view.facts[0]["store"]
            store = dist.TCPStore(host, port, is_master=False, timeout=CONNECT)
            store.set_timeout(self.limit)
        assert store is not None
        dist.init_process_group(
            backend, store=dist.PrefixStore(f"weft/view-{view.epoch}", store), rank=self.rank, world_size=world,
            timeout=self.limit, device_id=index,
        )  # fmt: skip
        numbers = [member.number for member in view.members]
        said = [facts.get("groups", {}) for facts in view.facts]
        self.guard.groups.enter(
            view.epoch, numbers[:world], dict(zip(numbers, said, strict=True))
        )

    def wait_for_place(self) -> NoReturn:
        """Wait until the present view ends, because its layout has no use for this rank.

        Then raise :class:`PeerLost` or :class:`Regroup`, so that this rank agrees on the next view.
        """
        while not self.membership.why:
            # the others wait for this rank, too, before they let anybody in
            if self.membership.called:
                raise Regroup
            time.sleep(LOOK_S)
        raise PeerLost(self.membership.why)

    def on_break(self, why: str) -> None:
        """Break off collectives and copies, as the present view can do no further step. Called in the agent's thread.

        ``why``: the reason in words.
        """
        if self._hang_up is not None:
            self._break_off(self._hang_up)
        for copies in list(self.guard.snapshots):
            copies.break_off()

    def _modules_of_recovery(self) -> Iterator[str]:
        """Yield the names of modules that the next view will need, as far as its number of ranks is known by now."""
        yield "weft.checkpoint.reshard"
        left = len(self.guard.view.members) - len(self.membership.lost)
        if self.job is None or not recipe_of_replicas(
            self.recipe, self.job.shape, left
        ):
            yield "weft.resilience.layouts"

    def _break_off(self, hang_up: HangUp) -> None:
        """Shut the connections of groups that have lost a rank, and after :data:`DRAIN_S` those of all others."""
        whole = self.guard.groups.connections(self.membership.lost)
        hang_up.hang_up(whole, DRAIN_S)

    def end_stuck(self) -> None:
        """End this process, because its main thread waits in a collective that will never end.

        Called in another thread.
        """
        error = LeftOut(
            f"rank {self.rank} is in a collective that the others have left, and that nothing ends"
        )
        self.membership.close()
        os._exit(report_failure(error))
