"""Places for the processes of roles on the hosts of a Ray cluster (``roles.placement = "ray"``; extra ``ray``).

Ray chooses the host and holds the processor's cores or the GPU. A small actor there starts the process, says how it
ended, and ends it. The process connects with the run by Weft's own channels: no tensor goes through Ray.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from weft.errors import UsageError, WeftError
from weft.net.sockets import own_address
from weft.rl.role_places import Meeting, PlacedProcess, entry_words, weft_variables

#: Seconds that an actor may take to answer, seconds between two looks whether there is a place, and bytes of Ray's own
#: store of objects, which stays empty.
ANSWER_S, LOOK_S, STORE = 30.0, 0.2, 80 << 20
#: Exit code of a process whose host is lost.
LOST = -9


class ProcessHost:
    """What runs as a Ray actor: starts one process of Weft on its host, and watches it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def meeting(self) -> tuple[str, int]:
        """Return the host's address, and a port at which nobody listens."""
        import ray

        from weft.net.sockets import listen

        host = ray.util.get_node_ip_address()
        with listen(host, 0, 1) as probe:
            return host, probe.getsockname()[1]

    def start(self, command: Sequence[str], variables: Mapping[str, str]) -> int:
        """Start a process, and return its number. ``variables``: environment variables beside those of this host."""
        if self.process is not None:  # which its run no longer knows of
            self.kill()
        self.process = subprocess.Popen(
            entry_words(command),
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            start_new_session=True,
        )
        return self.process.pid

    def poll(self) -> int | None:
        """Return the exit code of the process; None while it runs."""
        assert self.process is not None
        return self.process.poll()

    def kill(self) -> int:
        """End the process at once, and return its exit code."""
        assert self.process is not None
        self.process.kill()
        return self.process.wait()


class RayProcess:
    """A process that runs under an actor. ``actor``: handle of a :class:`ProcessHost`; ``pid``: number of the process
    on its host; ``host``: address of that host. ``lost`` (attribute): how the process was lost with its host, for a
    line that says so; "" if it was not.
    """

    def __init__(self, actor: Any, pid: int, host: str) -> None:
        self._actor, self.pid, self.host, self.lost = actor, pid, host, ""
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._ask(self._actor.poll)
        return self._code

    def kill(self) -> None:
        if self._code is None:
            self._code = self._ask(self._actor.kill)

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            time.sleep(0.1)
        return code

    def _ask(self, method: Any) -> int | None:
        import ray

        try:
            code: int | None = ray.get(method.remote(), timeout=ANSWER_S)
            return code
        except ray.exceptions.RayError:  # its host or its actor is lost
            self.lost = f"the loss of its Ray actor on the host {self.host}"
            return LOST


class RayPlace:
    """A place on a host that Ray has chosen. ``options``: options of the actor; ``wait``: seconds to wait for it."""

    def __init__(self, options: Mapping[str, Any], wait: float) -> None:
        self._options, self._wait = options, wait
        self._actor: Any = None
        self._closed = threading.Event()
        self._open()

    def _open(self) -> None:
        import ray

        self._actor = ray.remote(ProcessHost).options(**self._options).remote()
        try:
            self._meeting = Meeting(*self._awaited(self._actor.meeting.remote()))
        except ray.exceptions.GetTimeoutError:
            raise WeftError(
                f"Ray has found no place within {self._wait:g} s for a process with {self._options}; roles.placement = "
                "'ray' needs a cluster with so much free"
            ) from None
        except ray.exceptions.RayError as error:
            raise self._refused(error) from None

    def _awaited(self, asked: Any) -> tuple[str, int]:
        """Wait for what an actor has been asked, until this place is closed."""
        import ray

        deadline = time.monotonic() + self._wait
        while True:
            try:
                answer: tuple[str, int] = ray.get(asked, timeout=LOOK_S)
                return answer
            except ray.exceptions.GetTimeoutError:
                if self._closed.is_set() or time.monotonic() >= deadline:
                    raise

    def meeting(self) -> Meeting:
        return self._meeting

    def close(self) -> None:
        self._closed.set()

    def start(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> PlacedProcess:
        """Start a process there, or where Ray finds another place if this one is lost. Raises :class:`WeftError` if Ray
        does not start it.
        """
        import ray

        variables = weft_variables(environment)
        if self._options.get("num_gpus"):  # Ray says which
            variables.pop("CUDA_VISIBLE_DEVICES", None)
        try:
            try:
                pid = self._started(command, variables)
            except ray.exceptions.RayActorError:  # its host was lost
                self._open()
                pid = self._started(command, variables)
        except ray.exceptions.RayError as error:
            ray.kill(self._actor)  # else it may start the process later, for nobody
            raise self._refused(error) from None
        return RayProcess(self._actor, pid, self._meeting.host)

    def _started(self, command: Sequence[str], variables: Mapping[str, str]) -> int:
        import ray

        started = self._actor.start.remote([*command], variables)
        pid: int = ray.get(started, timeout=ANSWER_S)
        return pid

    def _refused(self, error: Exception) -> WeftError:
        line = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        return WeftError(f"Ray cannot start a process of Weft: {line}")


def open_ray_places(
    host: str, count: int, device: str, threads: int, wait: float
) -> list[Any]:
    """Return ``count`` places on hosts that Ray chooses. The arguments are those of
    :func:`weft.rl.role_places.open_places`.

    Without ``RAY_ADDRESS`` in the environment, Ray is started on this host alone. Raises :class:`UsageError` if the
    package is missing, or if other hosts of the cluster could not reach the run.
    """
    ray = _joined_ray()
    alive = [node for node in ray.nodes() if node["Alive"]]
    if len(alive) > 1 and host in ("127.0.0.1", "::1", "localhost"):
        raise UsageError(
            f"Ray has {len(alive)} hosts, and this run listens at {host}, which only its own host reaches; start Ray "
            "with --node-ip-address, or set roles.rollout.listen = HOST:PORT, with an address that all reach"
        )
    options: dict[str, Any] = {
        "num_cpus": threads,
        "num_gpus": int(device.startswith("cuda")),
        "scheduling_strategy": "SPREAD",
    }
    return [RayPlace(options, wait) for _ in range(count)]


def ray_host() -> str:
    """Return the address of this host in the cluster of ``RAY_ADDRESS``, or where other processes of this host reach
    it, if Ray is started on it alone.
    """
    ray = _joined_ray()
    if os.environ.get("RAY_ADDRESS", "local") == "local":
        return own_address()
    host: str = ray.util.get_node_ip_address()
    return host


def _joined_ray() -> Any:
    """Return the package ray, which has joined the cluster."""
    check_ray()
    import ray

    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS", "local")
        own = {"object_store_memory": STORE, "include_dashboard": False}
        try:
            ray.init(
                address=address,
                logging_level="error",
                log_to_driver=True,
                **(own if address == "local" else {}),
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            line = (str(error).splitlines() or [""])[0]
            raise WeftError(f"Ray cannot be reached at {address}: {line}") from None
    return ray


def close_ray() -> None:
    """Leave the cluster, which ends all processes that this process has started there."""
    import ray

    ray.shutdown()


def check_ray() -> None:
    """Raise :class:`UsageError` if the package ray is not installed."""
    try:
        import ray  # noqa: F401
    except ImportError:
        raise UsageError(
            "roles.placement = 'ray' needs the package ray: pip install 'weft[ray]'"
        ) from None
