"""One rank's life in a run of islands that come and go: it meets the others, or joins them later, and trains."""

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from weft.checkpoint.lease import Lease
from weft.checkpoint.levels import levels_of
from weft.checkpoint.state import Progress
from weft.layout.mesh import Mesh, from_all
from weft.layout.placement import island_ranks
from weft.net.endpoint import PEER, process_endpoint
from weft.net.sockets import own_address
from weft.observe import trace
from weft.parallel.state import State
from weft.recipe import Recipe, build_recipe
from weft.resilience.attendance import Attendance
from weft.resilience.company import Company, IslandLeftOut
from weft.resilience.members import NEWCOMER, Address, Member
from weft.resilience.membership import Membership
from weft.resilience.roster import read_roster, write_roster
from weft.resilience.watching import Watching
from weft.run.failure import cause_of, is_secondary
from weft.run.ranks import MEMBERS, backend_of, own_device, settle_in
from weft.sync.streams import Streams, own_port
from weft.train.islands import take_state
from weft.train.loop import Outcome, train
from weft.train.recorder import Recorder
from weft.train.runs import Resumed, Run
from weft.train.setup import Job, device_type, prepare

#: Seconds within which it turns out why a collective with the ranks of this island has failed.
VERDICT_S = 15.0


def live(recipe: Recipe, out: Path | None, resume: str | None) -> tuple[Outcome, bool]:
    """Train as one of the ranks that were started. Returns the outcome, and whether this rank concludes the run.

    A rank whose island is started again while the store of the first start still runs asks the others to be let in.
    """
    limit = timedelta(seconds=recipe.train.timeout)
    store, rank, _ = next(dist.rendezvous("env://", timeout=limit))
    island, members = island_ranks(recipe.layout, rank)
    again = store.add(f"weft/starts/{rank}", 1)
    token = store.compare_set("weft/islands/token", "", secrets.token_hex(16)).decode()
    inside = dist.PrefixStore(f"weft/island-{island}/{again}", store)
    with Islander(
        recipe, out, resume, island, members.index(rank), token, inside, rank
    ) as islander:
        mine = json.dumps(
            {
                "member": asdict(islander.membership.me),
                "facts": islander.company.attendance.facts(),
            }
        )
        names = [f"{MEMBERS}/{one}" for one in range(recipe.layout.world)]
        if store.check(["weft/islands/met"]):
            others = [
                name
                for one, name in enumerate(names)
                if one not in members and store.check([name])
            ]
            found = [json.loads(store.get(name))["member"] for name in others]
            base = Path(json.loads(store.get("weft/run"))["folder"])
            islander.folder = base / f"island-{island}" if island else base
            islander.contacts = [(one["host"], one["port"]) for one in found]
            store.set(names[rank], mine)
            return islander.train(None)
        store.set(names[rank], mine)
        met = [json.loads(store.get(name)) for name in names]
        everybody = [Member(**one["member"]) for one in met]
        islander.endpoint.check([member.address for member in everybody])
        store.set("weft/islands/met", "")
        about = {"recipe": recipe.model_dump(mode="json"), "islands": True}
        view = islander.membership.begin(everybody, about)
        islander.company.begin_with(view, [one["facts"] for one in met])
        return islander.train(store)


def come_back(folder: Path) -> tuple[Recipe, Outcome, bool]:
    """Join a run again, as a rank of the island of this folder. Returns the recipe, and what :func:`live` does."""
    roster = read_roster(folder)
    recipe = build_recipe(roster.about["recipe"])
    if roster.members[0].host.startswith(PEER):
        from weft.peers.rendezvous import join_peers

        join_peers(recipe.resilience.encrypt)
    store, rank, _ = next(
        dist.rendezvous("env://", timeout=timedelta(seconds=recipe.train.timeout))
    )
    store.set(f"{MEMBERS}/{rank}", "")  # the launcher is to see that this rank is there
    island = int(roster.about["island"])
    inside = dist.PrefixStore("weft/island", store)
    with Islander(
        recipe, folder, None, island, rank, roster.token, inside, NEWCOMER
    ) as islander:
        islander.folder = folder
        islander.contacts = [one.address for one in roster.members]
        return recipe, *islander.train(None)


class Islander(Watching):
    """One rank of an island. If it joins later, ``contacts`` are others' addresses, and ``folder`` is its island's."""

    presence: Company | None = None

    def __init__(
        self, recipe: Recipe, out: Path | None, resume: str | None, island: int, place: int, token: str,
        inside: dist.Store, number: int,
    ) -> None:  # fmt: skip
        super().__init__(out, resume)
        self.recipe, self.island, self.place, self.token, self.inside = (
            recipe,
            island,
            place,
            token,
            inside,
        )
        self.contacts: Sequence[Address] = ()
        self.folder = Path()
        self.device, limit = device_type(recipe), recipe.train.timeout
        settle_in(self.device, recipe.train.threads)
        ranks, detect = recipe.layout.inside.world, recipe.resilience.detect
        self.endpoint = process_endpoint(
            own_address(), own_port(place), recipe.resilience.encrypt
        )
        self.own_streams = Streams(
            island,
            recipe.layout.island,
            place,
            self.endpoint,
            token,
            lambda other: self.company.addresses.get(other),
            limit,
        )
        life = inside.compare_set("weft/life", "", secrets.token_hex(8)).decode()
        attendance = Attendance((island, life), place, ranks, recipe.sync)
        self.membership = Membership(
            detect, token, lambda why: self.company.on_break(why), self.endpoint, number
        )
        self.company = Company(self.membership, attendance, self.own_streams, detect)

    def __enter__(self) -> "Islander":
        return self

    def __exit__(self, *problem: Any) -> None:
        self.company.close()
        self.endpoint.close()

    def train(self, island_store: dist.Store | None) -> tuple[Outcome, bool]:
        """Train to the end. ``island_store``: the store by which all islands have met; None: this one joins later."""
        recipe, limit = self.recipe, timedelta(seconds=self.recipe.train.timeout)
        layout = recipe.layout.inside
        backend, index = backend_of(self.device)
        dist.init_process_group(
            backend, store=dist.PrefixStore("group", self.inside), rank=self.place, world_size=layout.world,
            timeout=limit, device_id=index,
        )  # fmt: skip
        mesh = replace(
            Mesh.create(layout, own_device(self.device)),
            island=self.island,
            islands=recipe.layout.island,
            island_store=island_store,
        )
        try:
            outcome = train(prepare(recipe), mesh, guard=self)
            # asked while the others wait for this one's end
            concludes = mesh.is_main and self.company.first
            self.company.end()
            trace.stop(everyone=mesh.is_main)
            if dist.get_world_size() > 1:
                dist.barrier()
        except Exception as error:
            self.take_as_loss(error)
            raise
        dist.destroy_process_group()
        return outcome, concludes

    def take_as_loss(self, error: Exception) -> None:
        """Raise :class:`IslandLeftOut` if ``error`` comes from the loss of a rank of this island."""
        cause = cause_of(error)
        if isinstance(error, IslandLeftOut):
            time.sleep(VERDICT_S)  # the process is about to be ended
        if not is_secondary(cause):
            return
        deadline = time.monotonic() + VERDICT_S
        while self.company.fatal is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.company.fatal is not None:
            time.sleep(VERDICT_S)
        raise IslandLeftOut(
            f"island {self.island} ends, as a rank of it is lost ({cause}); the other islands go on"
        ) from error

    # --- what the loop asks and says ---

    def open(self, recipe: Recipe, lease: Lease, size: int) -> Run:
        if not self.contacts:
            return super().open(recipe, lease, size)
        name = f"island-{self.island}" if self.island else ""
        levels = levels_of(recipe.checkpoint, self.folder, *([name] if name else []))
        run = Run(self.folder, [str(self.folder)], levels, in_memory=True)
        lease.take(run.places)
        return run

    @contextmanager
    def streams(self, mesh: Mesh, recipe: Recipe) -> Iterator[Streams | None]:
        self.presence, self.own_streams.shared = self.company, mesh.island_store
        yield self.own_streams

    def fill(self, run: Run, job: Job, state: State, mesh: Mesh) -> Resumed:
        base = run.folder.parent if self.island else run.folder
        self.company.folder, self.folder = str(base), run.folder
        if not self.contacts:
            return super().fill(run, job, state, mesh)
        self.endpoint.check(self.contacts)
        self.company.come(self.contacts, self.recipe.train.timeout)

        def take(giver: int, number: int) -> list[int]:
            return take_state(state, self.recipe.sync, self.own_streams, giver, number)

        number, tokens = self.company.come_in(
            take, lambda said: from_all(said, mesh.step_group)
        )
        step = number * self.recipe.sync.every
        progress = Progress(step, step * self.recipe.train.batch, tokens, step)
        return Resumed(
            progress,
            [
                f"took the state after step {step} from island {self.company.attendance.giver}"
            ],
        )

    def begin(
        self, state: State, mesh: Mesh, resumed: Resumed, recorder: Recorder
    ) -> None:
        super().begin(state, mesh, resumed, recorder)
        self.company.progress, self.recorder = resumed.progress, recorder
        if self.contacts:
            recorder.forget(resumed.progress.step)
            recorder.log("came", giver=self.company.attendance.giver)
        self.written = -1
        self.write(mesh.is_main)

    def write(self, main: bool) -> None:
        """Keep the members' addresses in the run's folder, by which this island finds them when it is started again."""
        view = self.company.view
        if main and view is not None and view.epoch != self.written:
            write_roster(
                self.folder,
                replace(view, about=view.about | {"island": self.island}),
                self.token,
            )
            self.written = view.epoch

    def after_step(self) -> None:
        super().after_step()
        for kind, values in self.company.take_events():
            self.recorder.log(kind, **values)
        self.write(not self.place)
