"""The reference model of reinforcement learning in processes of its own, as the ranks that train use it.

The first rank starts the processes on its host, sends them texts, and gets log-probabilities, while all ranks compute
what else the loss needs. A process that ends or hangs ends the run with a line that names it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from weft.errors import WeftError
from weft.layout.mesh import from_all
from weft.net.endpoint import Endpoint, process_endpoint
from weft.net.sockets import own_address
from weft.net.wire import Frame, SealedConnection
from weft.rl.local_rollouts import RolloutInterrupted
from weft.rl.open_places import open_places
from weft.rl.role_devices import device_environment
from weft.rl.role_places import PlacedProcess
from weft.rl.role_process import ROLES, SECRET
from weft.rl.role_texts import MarkedText, packed_texts, unpacked_numbers
from weft.run.rank_variables import environment_without_ranks

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.recipe.roles_section import Roles
    from weft.rl.rl_phases import RlPhases

#: Seconds between two looks at the processes.
LOOK_S = 0.2
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
    return {
        "shape": (named.shape if named else job.shape).model_dump(mode="json"),
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
        group = mesh.step_group
        self.leads = group is None or group.rank() == 0
        if self.leads:
            self._joined: Queue[SealedConnection] = Queue()
            listens = job.roles.rollout.address
            host = listens[0] if listens else own_address()
            self._endpoint = process_endpoint(host)
            secret = secrets.token_hex(32)
            self._channel = self._endpoint.open(ROLES, secret, self._joined.put)
            self._about = reference_about(job)
            self._processes = start_role_processes(
                job.roles, self._endpoint, secret, self.limit
            )

    def request(self, texts: Sequence[MarkedText]) -> None:
        """Send ``texts`` to the processes, which begin to compute their log-probabilities."""
        self._texts = texts
        if not self.leads or not texts:
            return
        try:
            self._await_ready()
            lengths = [len(ids) for ids, _ in texts]
            payload = packed_texts(texts)
            for rank, link in self._links.items():
                link.send({"lengths": lengths}, payload if rank == 0 else [])
        except (OSError, WeftError, RolloutInterrupted):
            return  # the reply says why there is none
        sent = self.travelled.sent + sum(len(part) for part in payload)
        self.travelled = self.travelled._replace(sent=sent)

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

    def _own_reply(self) -> _Reply:
        try:
            self._await_ready()
            frame = self._received(0)
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
        while len(self._links) < len(self._processes):
            missing = min({*range(len(self._processes))} - self._links.keys())
            self._look(missing, deadline, "has not connected")
            with suppress(Empty):
                link = self._joined.get(timeout=LOOK_S)
                link.send(self._about)
                rank = link.hello["rank"]
                self._links[rank] = link
                if len(self._links) == len(self._processes):
                    for each in self._links:
                        self._received(each)

    def _received(self, rank: int) -> Frame:
        """Wait for a message of the process with the number ``rank``."""
        deadline = time.monotonic() + self.limit
        link = self._links[rank]
        while not link.poll(LOOK_S):
            self._look(rank, deadline, "does not answer")
        try:
            frame = link.receive(limit=self.limit)
        except OSError:
            self._look(rank, deadline, "does not answer")
            raise WeftError(
                f"{process_name(rank)} has ended; its own lines say why"
            ) from None
        if frame.head["kind"] == "error":
            raise WeftError(f"{process_name(rank)}: {frame.head['why']}")
        return frame

    def _look(self, rank: int, deadline: float, what: str) -> None:
        """Raise an error if the run is asked to end, a process has ended, or the time is over."""
        if self.interrupted():
            raise RolloutInterrupted
        for number, process in enumerate(self._processes):
            if (code := process.poll()) not in (None, 0):
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                raise WeftError(f"{process_name(number)} has ended with {how}")
        if time.monotonic() >= deadline:
            raise WeftError(
                f"{process_name(rank)} {what} for {self.limit:g} s, {WAIT:.0%} of train.timeout"
            )


def process_name(rank: int) -> str:
    """Return the name of the process with the number ``rank`` for messages."""
    return f"the process {rank} of roles.reference"


def start_role_processes(
    roles: Roles, endpoint: Endpoint, secret: str, wait: float
) -> list[PlacedProcess]:
    """Start the processes of ``[roles.reference]``.

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
    processes = []
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
        processes.append(place.start(command, variables))
    return processes
