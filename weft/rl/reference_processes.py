"""The reference model of reinforcement learning in processes of its own, as the ranks that train use it.

The first rank starts the processes on its host, sends them texts, and gets log-probabilities, while all ranks compute
what else the loss needs. A process that ends or hangs ends the run with a line that names it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Queue
from subprocess import TimeoutExpired
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from weft.cluster.engine_processes import ending
from weft.errors import WeftError
from weft.layout.mesh import from_all
from weft.net.endpoint import Endpoint, process_endpoint
from weft.net.wire import Frame, SealedConnection
from weft.rl.local_rollouts import RolloutInterrupted
from weft.rl.open_places import open_places, run_host
from weft.rl.recorded_loader import shares_prompts
from weft.rl.role_devices import device_environment
from weft.rl.role_places import PlacedProcess
from weft.rl.role_process import ROLES, SECRET
from weft.rl.role_texts import MarkedText, packed_texts, unpacked_numbers
from weft.run.rank_variables import environment_without_ranks

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.recipe.roles_section import Roles
    from weft.rl.rl_phases import RlPhases

#: Seconds between two looks at the processes, and seconds that one may take to end after its connection.
LOOK_S, END_S = 0.2, 2.0
#: Share of ``train.timeout`` for which the first rank waits for a process.
WAIT = 0.75


class Travelled(NamedTuple):
    """Bytes that have travelled between a run and a role in other processes, without the heads of messages.

    ``sent``: bytes that the run has sent; ``received``: bytes that it has got. ``seconds``: time for which the role has
    computed.
    """

    sent: int = 0
    received: int = 0
    seconds: float = 0.0


class _Reply(NamedTuple):
    """What the first rank has got: log-probabilities, or why there are none."""

    numbers: list[np.ndarray] | None
    why: str = ""
    interrupted: bool = False


def reference_about(job: RlPhases) -> dict[str, Any]:
    """Return JSON values that tell a process which reference model to build, and how texts are computed."""
    recipe, role = job.recipe, job.roles.reference
    named = job.named_reference
    rows, passes = recipe.rows_per_pass(role.process_layout)
    shape = named.shape if named else job.shape
    return {
        "shape": shape.model_dump(mode="json"),
        "model": role.model or recipe.model.origin or "",
        "train": recipe.train.model_dump(mode="json"),
        "layout": role.process_layout.model_dump(mode="json"),
        "device": role.device.partition(":")[0],
        "threads": role.threads,
        "timeout": recipe.train.timeout,
        "rows": rows,
        "passes": passes,
        "room": recipe.data.seq_len,
        "temperature": job.rl.temperature,
        "share": shares_prompts(job, role.process_layout, shape),
    }


class ReferenceProcesses:
    """Log-probabilities under a reference model in other processes. All methods are collective over the ranks of
    ``mesh``; the first rank starts the processes and talks with them.

    ``job``: the checked recipe. ``interrupted``: returns whether this rank is asked to end the run. ``travelled``: the
    bytes that texts and log-probabilities had since the last figures; zeros on all ranks but the first.
    """

    def __init__(
        self, job: RlPhases, mesh: Mesh, interrupted: Callable[[], bool]
    ) -> None:
        self.mesh, self.interrupted = mesh, interrupted
        # less than other ranks wait for the first, so that the line names who is late
        self.limit = WAIT * job.recipe.train.timeout
        self.travelled = Travelled()
        self._texts: Sequence[MarkedText] = ()
        self._processes: list[PlacedProcess] = []
        self._links: dict[int, SealedConnection] = {}
        self._ready = set[int]()
        self._numbers: Frame | None = None
        self._failure: Exception | None = None
        group = mesh.step_group
        self.leads = group is None or group.rank() == 0
        if self.leads:
            self._joined: Queue[SealedConnection] = Queue()
            host = run_host(job.roles)
            self._endpoint = process_endpoint(host)
            if self._endpoint.address[0] != host:  # which others have opened before
                self._endpoint = Endpoint(host)
            secret = secrets.token_hex(32)
            self._about = reference_about(job)
            self._channel = self._endpoint.open(ROLES, secret, self._welcome)
            try:
                for process in start_role_processes(
                    job.roles, self._endpoint, secret, self.limit
                ):
                    self._processes.append(process)
            except BaseException:
                self.close()
                raise

    def request(self, texts: Sequence[MarkedText]) -> None:
        """Send ``texts`` to the processes, which begin to compute their log-probabilities."""
        self._texts = texts
        if not self.leads or not texts:
            return
        self._numbers = None
        try:
            self._await_ready()
            self._send(texts)
        except (WeftError, RolloutInterrupted) as error:
            self._failure = error  # all ranks hear of it with the reply

    def log_probabilities(self) -> list[np.ndarray]:
        """Wait for the log-probabilities of the requested texts, and return for each text float64 ``[n]``, with 0 at
        tokens that are not marked.

        Raises :class:`WeftError` if a process has ended or does not answer in time.
        """
        own = _Reply([]) if not self.leads or not self._texts else self._own_reply()
        (reply, *_) = from_all(own, self.mesh.step_group)
        if reply.interrupted:
            raise RolloutInterrupted
        if reply.numbers is None:
            raise WeftError(reply.why)
        return reply.numbers

    def take_figures(self) -> dict[str, float]:
        """Return the bytes that have travelled since the last call, and the seconds for which the processes have
        computed, by the names of a phase's records.
        """
        (now, *_) = from_all(self.travelled, self.mesh.step_group)
        self.travelled = Travelled()
        return {
            "reference_sent_bytes": now.sent,
            "reference_received_bytes": now.received,
            "reference_s": now.seconds,
        }

    def close(self) -> None:
        """End the processes."""
        if self.leads:
            self._channel.close()
        for process in self._processes:
            process.kill()
            process.wait()

    # --- the first rank ---

    def _welcome(self, link: SealedConnection) -> None:
        """Tell a process that has connected what to build; called in a thread of the channel."""
        self._joined.put(link)
        with suppress(OSError):  # the next look at the processes finds out
            link.send(self._about)

    def _send(self, texts: Sequence[MarkedText]) -> None:
        lengths, payload = [len(ids) for ids, _ in texts], packed_texts(texts)
        for rank, link in self._links.items():
            try:
                link.send({"lengths": lengths}, payload if rank == 0 else [])
            except OSError:
                self._look()  # for the cause, which another may have told
                raise self._ended(rank) from None
        sent = self.travelled.sent + sum(len(part) for part in payload)
        self.travelled = self.travelled._replace(sent=sent)

    def _own_reply(self) -> _Reply:
        try:
            if self._failure is not None:
                raise self._failure
            frame = self._received()
            numbers = unpacked_numbers(frame.payload, self._texts)
        except RolloutInterrupted:
            return _Reply(None, interrupted=True)
        except WeftError as error:
            return _Reply(None, str(error))
        before = self.travelled
        self.travelled = before._replace(
            received=before.received + len(frame.payload),
            seconds=before.seconds + frame.head["seconds"],
        )
        return _Reply(numbers)

    def _await_ready(self) -> None:
        """Wait until all processes have connected and built their model."""
        deadline = time.monotonic() + self.limit
        self._look()
        while missing := {*range(len(self._processes))} - self._ready:
            late = min(missing)
            built = late in self._links
            what = "has not built its model" if built else "has not connected"
            self._check_time(late, deadline, what)
            time.sleep(LOOK_S)
            self._look()

    def _received(self) -> Frame:
        """Wait for the log-probabilities, which the process 0 sends."""
        deadline = time.monotonic() + self.limit
        while self._numbers is None:
            self._links[0].poll(LOOK_S)
            self._look()
            if self._numbers is None:
                self._check_time(0, deadline, "does not answer")
        return self._numbers

    def _look(self) -> None:
        """Take what the processes have sent. Raise an error if the run is asked to end, or a process has failed or
        ended.
        """
        if self.interrupted():
            raise RolloutInterrupted
        # before their last words are read, so that these are not missed
        codes = [each.poll() for each in self._processes]
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

    def _take(self, rank: int, link: SealedConnection) -> None:
        """Take a message of the process with the number ``rank``. Raise an error if it says that it has failed."""
        try:
            frame = link.receive(limit=self.limit)
        except OSError:
            raise self._ended(rank) from None
        kind = frame.head["kind"]
        if kind == "error":
            raise WeftError(f"{process_name(rank)}: {frame.head['why']}")
        if kind == "ready":
            self._ready.add(rank)
        else:
            self._numbers = frame

    def _ended(self, rank: int) -> WeftError:
        """Return the error that says how the process with the number ``rank`` has ended."""
        try:
            code = self._processes[rank].wait(END_S)
        except TimeoutExpired:
            return WeftError(f"{process_name(rank)} has closed its connection")
        how = ending(self._processes[rank], code)
        return WeftError(
            f"{process_name(rank)} has ended with {how}; its own lines say why"
        )

    def _check_time(self, rank: int, deadline: float, what: str) -> None:
        """Raise an error if ``deadline`` is over. ``what``: what the process with the number ``rank`` does."""
        if time.monotonic() >= deadline:
            raise WeftError(
                f"{process_name(rank)} {what} for {self.limit:g} s, {WAIT:.0%} of train.timeout"
            )


def process_name(rank: int) -> str:
    """Return the name of the process with the number ``rank`` for messages."""
    return f"the process {rank} of roles.reference"


def start_role_processes(
    roles: Roles, endpoint: Endpoint, secret: str, wait: float
) -> Iterator[PlacedProcess]:
    """Start the processes of ``[roles.reference]``, and yield each as it runs.

    ``endpoint``: endpoint of the run, with which they connect. ``secret``: secret of the channel. ``wait``: seconds to
    wait until there is a place for each.
    """
    role, (host, port) = roles.reference, endpoint.address
    command = ["-m", "weft.rl.role_process", host, str(port)]
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
