"""Servers of reward models that a run of reinforcement learning starts and ends (``[roles.reward]``).

Without them every process that scores answers loads the reward model of its task. With them one server for each model
holds it, on its own device, and the processes ask it over HTTP.
"""

from __future__ import annotations

import re
import secrets
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import TYPE_CHECKING

from weft.errors import WeftError
from weft.layout.mesh import from_all
from weft.net.sockets import own_address
from weft.rl.role_devices import device_environment
from weft.rl.role_places import entry_words
from weft.run.rank_variables import environment_without_ranks

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.recipe import Task
    from weft.recipe.roles_section import RewardRole

#: Seconds that a server gets to end by itself, and seconds between two looks at one that starts.
END_S, LOOK_S = 5.0, 0.2


class RewardServers:
    """Servers of the reward models of ``tasks``. All methods are collective over the ranks of ``mesh``, of which the
    first starts the servers on its host.

    ``tasks``: the tables ``[[tasks]]`` with a reward; those with reward = 'reward-model' and a folder get a server.
    ``role``: the section ``[roles.reward]``. ``timeout``: seconds to wait until the servers have loaded their models.
    ``interrupted``: returns whether this rank is asked to end the run.

    Attributes:
        ``tasks``: the tables, which name the addresses of servers in place of folders.

    Raises :class:`WeftError` if a server does not start, or the run is asked to end meanwhile.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        role: RewardRole,
        mesh: Mesh,
        timeout: float,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="weft-reward-")
        self._processes: dict[str, subprocess.Popen[str]] = {}
        key, addresses, why = secrets.token_hex(16), dict[str, str](), ""
        group = mesh.step_group
        if group is None or group.rank() == 0:
            path = self._key_file(key)
            try:
                for name in dict.fromkeys(filter(None, map(served_folder, tasks))):
                    self._processes[name] = _start(name, role, path)
                for name, process in self._processes.items():
                    addresses[name] = _await_address(
                        name, process, timeout, interrupted
                    )
            except WeftError as error:
                why = str(error)
            except BaseException:
                self.close()
                raise
        (shared, *_) = from_all((key, addresses, why), group)
        key, addresses, why = shared
        if why:
            self.close()
            raise WeftError(why)
        path = self._key_file(key)
        self.tasks = [
            task.model_copy(
                update={"model": addresses[folder], "key": str(path)}
            )
            if (folder := served_folder(task))
            else task
            for task in tasks
        ]  # fmt: skip

    def close(self) -> None:
        """End the servers."""
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + END_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def _key_file(self, key: str) -> Path:
        """Write the servers' API key to a file that only this user can read."""
        path = Path(self._folder.name) / "key"
        path.touch(mode=0o600)
        path.write_text(key + "\n")
        return path


def served_folder(task: Task) -> str:
    """Return the folder of the reward model that scores the answers to ``task``; "" if there is none, or a server has
    it already.
    """
    model: str = getattr(task, "model", "") if task.reward == "reward-model" else ""
    return "" if model.startswith(("http://", "https://")) else model


def _start(name: str, role: RewardRole, key: Path) -> subprocess.Popen[str]:
    """Start the server of the reward model ``name``. ``key``: file with its API key."""
    environment: Mapping[str, str] = environment_without_ranks()
    environment = {**environment, **device_environment(role.device)}
    if role.threads:
        environment = {**environment, "OMP_NUM_THREADS": str(role.threads)}
    words = ["-m", "weft", "serve", "--checkpoint", name]
    words += ["--host", own_address(), "--port", "0", "--api-key", str(key)]
    return subprocess.Popen(
        entry_words(words),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _await_address(
    name: str,
    process: subprocess.Popen[str],
    limit: float,
    interrupted: Callable[[], bool],
) -> str:
    """Return the address at which the server ``process`` of the model ``name`` listens, once it says so."""
    lines: Queue[str] = Queue()
    output = process.stdout
    assert output is not None

    def read() -> None:
        for line in output:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, name="weft-reward-server", daemon=True).start()
    deadline, line = time.monotonic() + limit, "\n"
    while line:
        try:
            line = lines.get(timeout=LOOK_S)
        except Empty:
            _check_wait(name, limit, deadline, interrupted())
            continue
        if where := re.search(r"at (http://\S+)/v1", line):
            return where.group(1)
    raise WeftError(
        f"the server of the reward model {name} (roles.reward) has ended with exit code {process.wait()}; its own "
        "lines say why"
    )


def _check_wait(name: str, limit: float, deadline: float, interrupted: bool) -> None:
    """Raise :class:`WeftError` if the server of the model ``name`` is not to be waited for any longer."""
    server = f"the server of the reward model {name} (roles.reward)"
    if interrupted:
        raise WeftError(f"the run was asked to end before {server} has started")
    if time.monotonic() >= deadline:
        raise WeftError(f"{server} has not started within {limit:g} s")
