"""One rank's life in a run of islands that come and go: it meets the other ranks, or joins them later, and trains."""

import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from weft.checkpoint.lease import Lease
from weft.checkpoint.levels import levels_of
from weft.checkpoint.run_state import Progress
from weft.layout.mesh import Mesh, from_all
from weft.layout.placement_groups import island_ranks
from weft.net.endpoint import PEER, process_endpoint
from weft.net.sockets import own_address
from weft.observe import trace
from weft.parallel.state import State
from weft.recipe import Recipe
from weft.resilience.attendance import Attendance
from weft.resilience.company import Company
from weft.resilience.island_party import IslandParty
from weft.resilience.meeting import announce, exchange_addresses
from weft.resilience.membership import Membership
from weft.resilience.roster import Roster, write_roster
from weft.resilience.views import NEWCOMER, LeftOut, Member
from weft.resilience.watching import Watching
from weft.run.failure import cause_of, is_secondary
from weft.run.rank_processes import MEMBERS, backend_of, own_device, settle_in
from weft.sync.presence import Presence
from weft.sync.streams import Streams, own_port
from weft.train.island_state import take_state
from weft.train.recorder import Recorder
from weft.train.runs import Resumed, Run
from weft.train.setup import Job, device_type, prepare
from weft.train.training import Ending, train_job

#: Seconds within which it turns out why a collective with the ranks of this island has failed.
VERDICT_S = 15.0


@dataclass(frozen=True)
class IslandRank:
    """Identity of this process in a run of islands.

    ``recipe``: the run's recipe; ``island``: number of the island; ``place``: number of this rank within the island;
    ``store``: key-value store that the ranks of this start of the island share.
    """

    recipe: Recipe
    island: int
    place: int
    store: dist.Store

    @contextmanager
    def party(
        self, token: str, number: int, shared: dist.Store | None = None
    ) -> Iterator[IslandParty]:
        """Run this rank's agent and its connections to other islands while the context lasts, and end them afterwards.

        ``token``: the run's secret; ``number``: this rank's number as a member; ``shared``: key-value store that all
        islands share, or None if this island joins later. Yields the :class:`IslandParty`, which follows the views
        (sets of members) of the run for this rank.
        """
        recipe, resilience = self.recipe, self.recipe.resilience
        settle_in(device_type(recipe), recipe.train.threads)
        endpoint = process_endpoint(
            own_address(), own_port(self.place), resilience.encrypt
        )
        streams = Streams(
            self.island, recipe.layout.island, self.place, endpoint, token, lambda other: party.addresses.get(other),
            recipe.train.timeout, shared,
        )  # fmt: skip
        life = self.store.compare_set("weft/life", "", secrets.token_hex(8)).decode()
        attendance = Attendance(
            (self.island, life), self.place, recipe.layout.inside.world, recipe.sync
        )
        membership = Membership(
            resilience.detect, token, lambda why: party.on_break(why), endpoint, number
        )
        party = IslandParty(membership, attendance, streams, resilience.detect)
        try:
            yield party
        finally:
            party.close()


def start_island(recipe: Recipe, out: Path | None, resume: str | None) -> Ending:
    """Train as one of the ranks of an island that were started together. Returns how the training has ended.

    ``out``: the run folder, or None for the default; ``resume``: "auto" (the run's newest checkpoint, if it has one), a
    run or a checkpoint to continue from, or None for a new run.

    An island is a group of ranks that trains by itself, and combines its results with other islands. If its ranks are
    started again while the run goes on, they ask to join it. They see this by the key-value store of the run's start,
    which then still exists.
    """
    store, rank, world = next(
        dist.rendezvous("env://", timeout=timedelta(seconds=recipe.train.timeout))
    )
    island, ranks = island_ranks(recipe.layout, rank)
    start = store.add(f"weft/starts/{rank}", 1)
    token = store.compare_set("weft/islands/token", "", secrets.token_hex(16)).decode()
    inside = dist.PrefixStore(f"weft/island-{island}/{start}", store)
    this = IslandRank(recipe, island, ranks.index(rank), inside)
    again = store.check(["weft/islands/met"])
    with this.party(token, rank, None if again else store) as party:
        if again:
            names = [
                f"{MEMBERS}/{other}" for other in range(world) if other not in ranks
            ]
            members = [
                Member(**json.loads(store.get(name))["member"])
                for name in names
                if store.check([name])
            ]
            party.known = [member.address for member in members]
            base = Path(json.loads(store.get("weft/run"))["folder"])
            announce(party.membership, store, rank)
            return _train(
                this,
                party,
                IslandGuard(
                    party, recipe, base / f"island-{island}" if island else base
                ),
            )
        about = {"recipe": recipe.model_dump(mode="json"), "islands": True}
        view = exchange_addresses(
            party.membership, store, rank, world, about, party.attendance.facts()
        )
        store.set("weft/islands/met", "")
        party.begin(view)
        return _train(this, party, IslandGuard(party, recipe, out, resume), store)


def return_island(recipe: Recipe, folder: Path, roster: Roster) -> Ending:
    """Train as a rank of an island that joins its run again. Returns how the training has ended.

    ``folder``: the island's run folder; ``roster``: members of the run, read from that folder.
    """
    if roster.members[0].host.startswith(PEER):
        from weft.peers.rendezvous import join_peers

        join_peers(recipe.resilience.encrypt)
    store, rank, _ = next(
        dist.rendezvous("env://", timeout=timedelta(seconds=recipe.train.timeout))
    )
    store.set(f"{MEMBERS}/{rank}", "")  # the launcher is to see that this rank is there
    this = IslandRank(
        recipe,
        int(roster.about["island"]),
        rank,
        dist.PrefixStore("weft/island", store),
    )
    with this.party(roster.token, NEWCOMER) as party:
        party.known = [member.address for member in roster.members]
        return _train(this, party, IslandGuard(party, recipe, folder))


def _train(
    this: IslandRank,
    party: IslandParty,
    guard: "IslandGuard",
    island_store: dist.Store | None = None,
) -> Ending:
    """Train to the end. ``island_store``: the store at which all islands have met; None if this island joins later."""
    recipe, device = this.recipe, device_type(this.recipe)
    layout, (backend, index) = recipe.layout.inside, backend_of(device)
    dist.init_process_group(
        backend, store=dist.PrefixStore("group", this.store), rank=this.place, world_size=layout.world,
        timeout=timedelta(seconds=recipe.train.timeout), device_id=index,
    )  # fmt: skip
    inside = Mesh.create(layout, own_device(device))
    mesh = replace(
        inside,
        island=this.island,
        islands=recipe.layout.island,
        island_store=island_store,
    )
    try:
        outcome = train_job(prepare(recipe), mesh, guard=guard)
        # asked while the others wait for this one's end
        concludes = mesh.is_main and guard.company.first
        party.end()
        trace.stop(everyone=mesh.is_main)
        if layout.world > 1:
            dist.barrier()
    except Exception as error:
        _await_verdict(error, party)
        raise
    dist.destroy_process_group()
    return Ending(recipe, outcome, concludes)


def _await_verdict(error: Exception, party: IslandParty) -> None:
    """Raise :class:`LeftOut` if ``error`` comes from the loss of a rank of this island."""
    cause = cause_of(error)
    if error is party.fatal:
        time.sleep(VERDICT_S)  # the process is about to be ended
    if not is_secondary(cause):
        return
    deadline = time.monotonic() + VERDICT_S
    while party.fatal is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if party.fatal is not None:
        time.sleep(VERDICT_S)
    raise LeftOut(
        f"island {party.island} ends, as a rank of it is lost ({cause}); the other islands go on"
    ) from error


class IslandGuard(Watching):
    """Hooks that the training loop of one rank of an island calls, so that the run goes on when islands come and go.

    They open the run's folder, fill the state (from another island, if this one joins later), and tell which islands
    take part. ``party``: this rank's part in the views (sets of members) of the run; ``folder``: the run folder of the
    rank's island, or None for the default; ``resume``: "auto" (the run's newest checkpoint, if it has one), a run or a
    checkpoint to continue from, or None for a new run.
    """

    def __init__(
        self,
        party: IslandParty,
        recipe: Recipe,
        folder: Path | None,
        resume: str | None = None,
    ) -> None:
        super().__init__(folder, resume)
        self.party, self.recipe, self.company = party, recipe, Company(party)
        self._written = -1  # the view in the run's folder

    @property
    def _joins(self) -> bool:
        return bool(self.party.known)

    def open(self, recipe: Recipe, lease: Lease, size: int) -> Run:
        if not self._joins:
            return super().open(recipe, lease, size)
        assert self.out is not None
        name = [f"island-{self.party.island}"] if self.party.island else []
        run = Run(
            self.out,
            [str(self.out)],
            levels_of(recipe.checkpoint, self.out, *name),
            in_memory=True,
        )
        lease.take(run.places)
        return run

    @contextmanager
    def presence(self, mesh: Mesh, recipe: Recipe) -> Iterator[Presence | None]:
        yield self.company

    def fill(self, run: Run, job: Job, state: State, mesh: Mesh) -> Resumed:
        party, company = self.party, self.company
        party.news.folder, self.folder = (
            str(run.folder.parent if party.island else run.folder),
            run.folder,
        )
        if not self._joins:
            return super().fill(run, job, state, mesh)
        company.membership.endpoint.check(party.known)
        party.come()

        def take(giver: int, number: int) -> list[int]:
            return take_state(state, self.recipe.sync, party.streams, giver, number)

        handover = company.come_in(take, lambda said: from_all(said, mesh.step_group))
        step = handover.round * self.recipe.sync.every
        progress = Progress(step, step * self.recipe.train.batch, handover.tokens, step)
        return Resumed(
            progress,
            [f"took the state after step {step} from island {party.attendance.giver}"],
        )

    def begin(
        self, state: State, mesh: Mesh, resumed: Resumed, recorder: Recorder
    ) -> None:
        super().begin(state, mesh, resumed, recorder)
        self.company.progress, self.recorder = resumed.progress, recorder
        if self._joins:
            recorder.forget(resumed.progress.step)
            recorder.log("came", giver=self.party.attendance.giver)
        self._write_roster()

    def after_step(self) -> None:
        super().after_step()
        with self.party.changed:
            events = self.party.news.take_events()
        for event in events:
            self.recorder.log(event.kind, **event.values)
        self._write_roster()

    def _write_roster(self) -> None:
        """Write the members' addresses into the run's folder, where a restarted island finds them."""
        view, party = self.party.view, self.party
        if (
            not party.attendance.place
            and view is not None
            and view.epoch != self._written
        ):
            own = replace(view, about=view.about | {"island": party.island})
            write_roster(self.folder, own, party.membership.token)
            self._written = view.epoch
