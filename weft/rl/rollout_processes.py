"""Opens rollouts on other processes: those that the first training rank starts on its host, and any that join."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from weft.cluster.engine_processes import EngineProcesses
from weft.cluster.engine_router import EngineRouter
from weft.errors import UsageError, WeftError
from weft.layout.mesh import Mesh, from_all
from weft.net.endpoint import Address, Endpoint, process_endpoint
from weft.net.sockets import own_address
from weft.parallel.state import State
from weft.recipe import ModelShape
from weft.rl.remote_rollouts import FollowingRollouts, RemoteRollouts, RemoteSettings
from weft.rl.role_devices import (
    EngineGpus,
    HostGpu,
    device_environment,
    gpu_of_rank,
    gpus_for_engines,
)
from weft.rl.role_places import RolePlace
from weft.rl.rollout import RolloutSource
from weft.rl.rollout_engine import SECRET
from weft.rl.weight_channel import WeightSender
from weft.run.rank_variables import environment_without_ranks


def rollout_secret() -> str:
    """Return the secret of the channel between a run and its engines.

    It is "" if ``WEFT_SECRET`` protects the channel already. Otherwise it is a new secret, which is given only to the
    engines that the run itself starts.
    """
    return "" if os.environ.get("WEFT_SECRET") else secrets.token_hex(32)


def engine_environment(
    secret: str, threads: int, device: str = ""
) -> Mapping[str, str]:
    """Return the environment variables of an engine that a rank starts.

    ``secret``: secret of the channel. ``threads``: number of threads of each engine; 0: an equal share of the cores.
    ``device``: device on which it computes, as roles.rollout.device names it.
    """
    own = environment_without_ranks() | device_environment(device)
    own.pop("OMP_NUM_THREADS", None)
    if threads:
        own["OMP_NUM_THREADS"] = str(threads)
    return own | {SECRET: secret} if secret else own


def start_rollout_engines(
    count: int,
    endpoint: Endpoint,
    secret: str,
    say: Callable[[str], None],
    threads: int = 0,
    device: str = "",
    places: Sequence[RolePlace] = (),
    used: Collection[HostGpu | None] = (),
) -> EngineProcesses:
    """Start ``count`` engines on this host that write rollouts for the run whose endpoint is ``endpoint``.

    ``secret``: secret of the channel. ``say``: prints a line. ``threads``: threads of each engine; 0: an equal share of
    the cores. ``device``: device on which they compute, as roles.rollout.device names it. ``places``: a place for each;
    none: on this host. ``used``: GPUs of the ranks that train. The caller waits for the engines by
    :meth:`EngineProcesses.await_joined`.
    """
    host, port = endpoint.address
    words = {"": ["--checkpoint=policy:"]}
    environment = engine_environment(secret, threads, device)
    roles = [""] * count

    def start(name: str, command: Sequence[str], variables: Mapping[str, str]) -> Any:
        # the command begins with this host's Python, and another host has its own
        return places[int(name.rpartition("-")[2])].start(command[1:], variables)

    # where Ray places them, it gives them GPUs
    gpus = EngineGpus([]) if places else gpus_for_engines(device, count, used)
    if gpus.line:
        say(gpus.line)
    return EngineProcesses(
        roles,
        f"{host}:{port}",
        words,
        None,  # the run tells each how many tokens to keep
        say,
        gpus=gpus.names,
        environment=environment,
        start=start if places else None,
    )


def open_remote_rollouts(
    mesh: Mesh,
    state: State,
    shape: ModelShape,
    settings: RemoteSettings,
    engines: int,
    say: Callable[[str], None],
    threads: int = 0,
    wait: float = 600.0,
    interrupted: Callable[[], bool] = lambda: False,
    listen: Address | None = None,
    device: str = "",
    open_places: Callable[[str], Sequence[RolePlace]] = lambda host: (),
) -> RolloutSource:
    """Return a source of rollouts that engines in other processes write. Collective over the ranks of ``mesh``.

    Arguments:
        ``mesh``, ``state``, ``shape``: the ranks that train, the training state, and the policy's shape.
        ``engines``: number of engines that the first rank starts on its host. With 0, the run waits until one has
            joined.
        ``say``: prints a line.
        ``threads``: number of threads of each of these engines; 0: an equal share of the cores.
        ``wait``: seconds for which the first :meth:`RolloutSource.take_weights` waits until engines have joined.
        ``interrupted``: returns whether this rank is asked to end the run.
        ``listen``: address of the first rank, with port 0 for any port, at which engines of other hosts reach it: those
            that the run starts there, and with ``WEFT_SECRET`` those that join with ``weft engine --checkpoint
            policy:``. None: only engines of this host can join.
        ``device``: device on which the engines that the run starts compute, as roles.rollout.device names it.
        ``open_places``: returns places for these engines, given the host at which they reach the run; none: on the
            first rank's host.
    """
    group = mesh.step_group
    rank = 0 if group is None else group.rank()
    endpoint = rollout_endpoint(rank, listen)
    everyone = from_all((rollout_secret(), gpu_of_rank(mesh.device)), group)
    secret, _ = everyone[0]
    sender = WeightSender(
        mesh, state, endpoint, secret, settings.weights, settings.delta
    )
    if rank:
        return FollowingRollouts(sender)
    host, port = endpoint.address
    if not secret:
        say(f"rollouts: weft engine --checkpoint policy: --join {host}:{port}")
    processes = None
    places: Sequence[RolePlace] = ()
    if engines:
        places = open_places(host)
        processes = start_rollout_engines(
            engines, endpoint, secret, say, threads, device, places, [gpu for _, gpu in everyone],
        )  # fmt: skip

    def started(router: EngineRouter) -> None:
        if processes is not None:
            processes.await_joined(lambda: len(router.links), wait)
        await_engine(router, wait)

    def ended(names: Collection[str]) -> None:
        for place in places:
            place.close()
        if processes is not None:
            processes.close(names)

    return RemoteRollouts(
        endpoint, secret, shape, sender, settings, say, started, ended, interrupted
    )


def rollout_endpoint(rank: int, listen: Address | None) -> Endpoint:
    """Return the endpoint at which engines reach the training rank ``rank``.

    ``listen``: address for the first rank, with port 0 for any port; None: one that its host alone reaches. Other ranks
    listen on the same host if they run there, and otherwise where the ranks of the run reach them. Raises
    :class:`UsageError` if the first rank cannot listen there.
    """
    if listen is None:
        return process_endpoint(own_address())
    if rank == 0:
        return Endpoint(*listen)
    try:
        return Endpoint(listen[0])
    except UsageError:
        return process_endpoint(own_address())


def await_engine(router: EngineRouter, wait: float) -> None:
    """Wait until an engine has joined ``router``. Raises :class:`WeftError` after ``wait`` seconds."""
    deadline = time.monotonic() + wait
    while not router.links:
        if time.monotonic() >= deadline:
            raise WeftError(
                f"no engine for rollouts has joined for {wait:g} s; start one (weft engine --checkpoint policy:)"
            )
        time.sleep(0.05)
