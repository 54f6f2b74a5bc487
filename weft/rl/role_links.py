"""The processes of a role of reinforcement learning, as the first rank sees them: it starts them, and talks with each.

What a process sends is taken whenever the first rank looks. A process that fails, ends or hangs is an error that names
it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Queue
from subprocess import TimeoutExpired
from typing import TYPE_CHECKING, NamedTuple

from weft.cluster.engine_processes import ending
from weft.errors import WeftError
from weft.layout.mesh import from_all
from weft.net.endpoint import Endpoint, process_endpoint
from weft.net.wire import Frame, Head, SealedConnection, WireBroken
from weft.rl.local_rollouts import RolloutInterrupted
from weft.rl.open_places import open_places, run_host
from weft.rl.role_devices import device_environment
from weft.rl.role_places import PlacedProcess
from weft.rl.role_process import SECRET, role_channel
from weft.run.rank_variables import environment_without_ranks

if TYPE_CHECKING:
    import numpy as np

    from weft.layout.mesh import Mesh
    from weft.recipe.roles_section import Roles

#: Seconds between two looks at the processes, and seconds that one may take to end after its connection.
LOOK_S, END_S = 0.2, 2.0
#: Share of ``train.timeout`` for which the first rank waits for a process; less than other ranks wait for the first, so
#: that the line names who is late.
WAIT = 0.75


class Travelled(NamedTuple):
    """Bytes that have travelled between a run and a role in other processes, without the heads of messages.

    ``sent``: bytes that the run has sent; ``received``: bytes that it has got. ``seconds``: time for which the role has
    computed.
    """

    sent: int = 0
    received: int = 0
    seconds: float = 0.0


class RoleReply(NamedTuple):
    """What the first rank has got of a role: numbers of the tokens of each text, or why there are none.

    ``numbers``: for each text float64 ``[n]``; None: there are none. ``why``: the error's line. ``interrupted``:
    whether there are none because the run is asked to end.
    """

    numbers: list[np.ndarray] | None
    why: str = ""
    interrupted: bool = False


def shared_numbers(own: RoleReply, mesh: Mesh) -> list[np.ndarray]:
    """Return the numbers that the first rank of ``mesh`` has got, on all ranks. Collective.

    ``own``: what this rank has got; that of the first one counts. Raises :class:`WeftError` or
    :class:`RolloutInterrupted` on all ranks if it has none.
    """
    (reply, *_) = from_all(own, mesh.step_group)
    if reply.interrupted:
        raise RolloutInterrupted
    if reply.numbers is None:
        raise WeftError(reply.why)
    return reply.numbers


class RoleLinks:
    """The processes of one role, and the first rank's connections with them. The constructor starts the processes.

    Arguments:
        ``name``: name of the role in the recipe, such as "reference".
        ``roles``: the recipe's section ``[roles]``.
        ``about``: JSON values that each process learns first, such as the model to build.
        ``limit``: seconds that a process may take until its next message, while one is awaited.
        ``interrupted``: returns whether this rank is asked to end the run.
        ``take``: called with the number of a process and each of its messages but the first one.

    Attributes:
        ``processes``: the processes, by number.
        ``ready``: what each process has said when its model was built, by the process's number.
    """

    def __init__(
        self,
        name: str,
        roles: Roles,
        about: Head,
        limit: float,
        interrupted: Callable[[], bool],
        take: Callable[[int, Frame], None],
    ) -> None:
        self.name, self.limit, self.interrupted = name, limit, interrupted
        self.processes: list[PlacedProcess] = []
        self.ready: dict[int, Frame] = {}
        self._about, self._take_message, self._heard = about, take, 0
        self._links: dict[int, SealedConnection] = {}
        self._joined: Queue[SealedConnection] = Queue()
        host = run_host(roles)
        endpoint = process_endpoint(host)
        self._own_endpoint: Endpoint | None = None
        if endpoint.address[0] != host:  # which others have opened before
            endpoint = self._own_endpoint = Endpoint(host)
        secret = secrets.token_hex(32)
        self._channel = endpoint.open(role_channel(name), secret, self._welcome)
        try:
            for process in start_role_processes(name, roles, endpoint, secret, limit):
                self.processes.append(process)
        except BaseException:
            self.close()
            raise

    def await_ready(self, until: float | None = None) -> None:
        """Wait until all processes have connected and built their model.

        ``until``: the time, of :func:`time.monotonic`, at which waiting ends with an error; None: in ``limit`` seconds.
        """
        deadline = time.monotonic() + self.limit if until is None else until
        self.look()
        while missing := {*range(len(self.processes))} - self.ready.keys():
            late = min(missing)
            built = late in self._links
            what = "has not built its model" if built else "has not connected"
            self._check_time(late, deadline, what)
            time.sleep(LOOK_S)
            self.look()

    def send(
        self, head: Head, payload: Sequence[memoryview] = (), to: int | None = None
    ) -> None:
        """Send a message to the process with the number ``to``; None: to all, of which only the first one gets the
        payload.
        """
        for rank, link in sorted(self._links.items()):
            if to not in (None, rank):
                continue
            try:
                link.send(head, payload if to is not None or rank == 0 else ())
            except WireBroken as error:
                self.look(heeds=False)
                raise WeftError(f"{self.title(rank)} takes nothing: {error}") from None
            except OSError:
                # for the cause, which another may have told
                self.look(heeds=False)
                raise self._ended(rank) from None

    def wait(
        self,
        done: Callable[[], bool],
        late: Callable[[], int] = lambda: 0,
        heeds: bool = True,
        until: float | None = None,
    ) -> None:
        """Take messages until ``done`` returns True.

        ``late``: returns the number of a process that is waited for. ``heeds``: whether waiting ends with
        :class:`RolloutInterrupted` when the run is asked to end. ``until``: the time, of
        :func:`time.monotonic`, at which waiting ends however many messages come; None: there is none.

        Raises :class:`WeftError` then, or if there is no such time and no message comes for ``limit`` seconds.
        """
        deadline = time.monotonic() + self.limit if until is None else until
        while not done():
            heard = self._heard
            self._links[late()].poll(LOOK_S)
            self.look(heeds)
            if until is None and self._heard != heard:
                deadline = time.monotonic() + self.limit
            elif not done():
                self._check_time(late(), deadline, "does not answer")

    def look(self, heeds: bool = True) -> None:
        """Take what the processes have sent. Raise an error if a process has failed or ended.

        ``heeds``: whether :class:`RolloutInterrupted` is raised if the run is asked to end.
        """
        if heeds and self.interrupted():
            raise RolloutInterrupted
        # before their last words are read, so that these are not missed
        codes = [each.poll() for each in self.processes]
        ended = [rank for rank, code in enumerate(codes) if code is not None]
        if killed := [rank for rank in ended if (codes[rank] or 0) < 0]:
            raise self._ended(killed[0])  # the others only tell that they miss it
        while not self._joined.empty():
            link = self._joined.get()
            self._links[link.hello["rank"]] = link
        for rank, link in self._links.items():
            while link.poll():
                self._take(rank, link)
        if ended:
            raise self._ended(ended[0])

    def title(self, rank: int) -> str:
        """Return the name of the process with the number ``rank`` for messages."""
        return f"the process {rank} of roles.{self.name}"

    def close(self) -> None:
        """End the processes."""
        self._channel.close()
        if self._own_endpoint is not None and not self._own_endpoint.closed:
            self._own_endpoint.close()
        for process in self.processes:
            process.kill()
            process.wait()

    def _welcome(self, link: SealedConnection) -> None:
        """Tell a process that has connected what to build; called in a thread of the channel."""
        link.stall = self.limit
        self._joined.put(link)
        with suppress(OSError):  # the next look at the processes finds out
            link.send(self._about)

    def _take(self, rank: int, link: SealedConnection) -> None:
        """Take a message of the process with the number ``rank``. Raise an error if it says that it has failed."""
        try:
            frame = link.receive(limit=self.limit)
        except OSError:
            raise self._ended(rank) from None
        self._heard += 1
        kind = frame.head["kind"]
        if kind == "error":
            raise WeftError(f"{self.title(rank)}: {frame.head['why']}")
        if kind == "ready":
            self.ready[rank] = frame
        else:
            self._take_message(rank, frame)

    def _ended(self, rank: int) -> WeftError:
        """Return the error that says how the process with the number ``rank`` has ended."""
        try:
            code = self.processes[rank].wait(END_S)
        except TimeoutExpired:
            return WeftError(f"{self.title(rank)} has closed its connection")
        how = ending(self.processes[rank], code)
        return WeftError(
            f"{self.title(rank)} has ended with {how}; its own lines say why"
        )

    def _check_time(self, rank: int, deadline: float, what: str) -> None:
        """Raise an error if ``deadline`` is over. ``what``: what the process with the number ``rank`` does."""
        if time.monotonic() >= deadline:
            raise WeftError(
                f"{self.title(rank)} {what} for {self.limit:g} s, {WAIT:.0%} of train.timeout"
            )


def start_role_processes(
    name: str, roles: Roles, endpoint: Endpoint, secret: str, wait: float
) -> Iterator[PlacedProcess]:
    """Start the processes of the role ``name``, such as "reference", and yield each as it runs.

    ``roles``: the recipe's section ``[roles]``. ``endpoint``: endpoint of the run, with which they connect. ``secret``:
    secret of the channel. ``wait``: seconds to wait until there is a place for each.
    """
    role, (host, port) = getattr(roles, name), endpoint.address
    command = ["-m", "weft.rl.role_process", host, str(port), name]
    shared = environment_without_ranks() | {SECRET: secret}
    if roles.placement == "local" or role.device == "cpu":
        shared |= device_environment(role.device)
    if role.threads:
        shared["OMP_NUM_THREADS"] = str(role.threads)
    places = open_places(roles, host, role.ranks, role.device, role.threads, wait)
    meeting = places[0].meeting()
    for rank, place in enumerate(places):
        own = {
            "WORLD_SIZE": str(role.ranks),
            "LOCAL_WORLD_SIZE": str(role.ranks),
            "MASTER_ADDR": meeting.host,
            "MASTER_PORT": str(meeting.port),
            "RANK": str(rank),
            # Ray shows each process its own GPU only
            "LOCAL_RANK": str(rank if roles.placement == "local" else 0),
        }
        variables = shared | (own if role.ranks > 1 else {})
        yield place.start(command, variables)
