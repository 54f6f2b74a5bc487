"""The machine of the main rank: its hardware and software, and its load during the run."""

import contextlib
import os
import platform
import shlex
import subprocess
import sys
import time

import psutil
import torch

from weft.version import VERSION

Sample = dict[str, float]


def describe_machine() -> dict[str, str]:
    """Return facts about this machine and program by name, as text: host, processor, versions, git state, command."""
    cores = (
        f"{psutil.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB"
    )
    versions = {
        "Weft": VERSION,
        "PyTorch": torch.__version__,
        "Python": platform.python_version(),
    }
    if torch.version.cuda:
        versions["CUDA"] = torch.version.cuda
    return {
        "host": f"{platform.node()}, {platform.system()} {platform.release()}, {platform.machine()}, {cores}",
        "versions": ", ".join(
            f"{name} {version}" for name, version in versions.items()
        ),
        "git": git_state(),
        "command": _command(),
        "folder": os.getcwd(),
    }


def _command() -> str:
    words = ["weft", *sys.argv[1:]]
    if "://" in str(words):
        from weft.recipe.masked import masked_text

        words = [*map(masked_text, words)]
    return shlex.join(words)


def git_state() -> str:
    """Return the commit of the current checkout and whether files differ from it; empty outside a checkout."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = [
            "git",
            "describe",
            "--always",
            "--abbrev=12",
            "--exclude=*",
            "--dirty= with changes",
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()
    return ""


class HardwareLoad:
    """Samples the load of the main rank's machine, at most once in ``interval`` seconds.

    ``device``: the device on which the run trains. The load of the processor is the mean since the previous sample.
    """

    def __init__(self, device: torch.device, interval: float = 5.0) -> None:
        self._device, self._interval, self._sampled = device, interval, time.monotonic()
        psutil.cpu_percent()  # from here on the next call counts

    def sample(self) -> Sample | None:
        """Return the busy shares of CPU and GPU, their memory in use in GiB, and the GPU's watts, by name.

        Returns None if the last sample is more recent than the interval.
        """
        now = time.monotonic()
        if now - self._sampled < self._interval:
            return None
        self._sampled = now
        memory = psutil.virtual_memory()
        load = {
            "cpu": psutil.cpu_percent() / 100,
            "host_gib": (memory.total - memory.available) / 2**30,
        }
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            load["gpu_gib"] = (total - free) / 2**30
            # NVIDIA's library may be missing, or not allowed to tell (its errors have no common base).
            with contextlib.suppress(Exception):
                load["gpu"] = torch.cuda.utilization(self._device) / 100
                load["gpu_watts"] = torch.cuda.power_draw(self._device) / 1000
        return load
