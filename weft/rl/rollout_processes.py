"""Engines for rollouts as processes of the host of the first training rank, which the run starts and ends."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Mapping

from weft.cluster.engine_processes import EngineProcesses
from weft.net.endpoint import Endpoint
from weft.rl.rollout_engine import SECRET

#: Variables by which launchers tell a process that it is a rank, which an engine is not.
RANK_VARIABLES = re.compile(
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|WEFT_LAUNCHED|GROUP_RANK|ROLE_.*"
    r"|TORCHELASTIC_.*|SLURM_.*)"
)


def rollout_secret() -> str:
    """Return the secret of the channel between a run and its engines: "" if ``WEFT_SECRET`` protects it, else a new
    one, which only engines know that the run starts itself.
    """
    return "" if os.environ.get("WEFT_SECRET") else secrets.token_hex(32)


def engine_environment(secret: str, threads: int) -> Mapping[str, str]:
    """Return the environment variables of an engine that a rank starts. ``secret``: of the channel. ``threads``: of
    each engine; 0: an equal share of the cores.
    """
    own = {
        name: value
        for name, value in os.environ.items()
        if not RANK_VARIABLES.fullmatch(name) and name != "OMP_NUM_THREADS"
    }
    if threads:
        own["OMP_NUM_THREADS"] = str(threads)
    return own | {SECRET: secret} if secret else own


def start_rollout_engines(
    count: int,
    endpoint: Endpoint,
    secret: str,
    say: Callable[[str], None],
    threads: int = 0,
) -> EngineProcesses:
    """Start ``count`` engines that write rollouts for the run whose endpoint is ``endpoint``.

    ``secret``: of the channel. ``threads``: threads of each engine; 0: an equal share of the cores. ``say`` prints a
    line. :meth:`EngineProcesses.await_joined` waits for them.
    """
    host, port = endpoint.address
    words = {"": ["--checkpoint=policy:"]}
    environment = engine_environment(secret, threads)
    roles = [""] * count
    return EngineProcesses(
        roles, f"{host}:{port}", words, 0.4, say, environment=environment
    )
