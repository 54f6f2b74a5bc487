"""Devices on which the roles of reinforcement learning compute in processes of their own."""

from __future__ import annotations

import platform
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from weft.errors import UsageError

if TYPE_CHECKING:
    import torch


class HostGpu(NamedTuple):
    """A GPU of some host: the ``host``'s name, and the GPU's ``name`` as in ``CUDA_VISIBLE_DEVICES`` there."""

    host: str
    name: str


class EngineGpus(NamedTuple):
    """GPUs of this host that engines get in turn: their ``names`` as in ``CUDA_VISIBLE_DEVICES``, none: every engine
    chooses for itself. ``line``: a line that says which engine gets which; "" if there is nothing to say.
    """

    names: list[str]
    line: str = ""


def gpu_of_rank(device: torch.device) -> HostGpu | None:
    """Return the GPU of this host that ``device`` is; None if it is no GPU."""
    if device.type != "cuda":
        return None
    from weft.cluster.engine_processes import visible_gpus

    return HostGpu(platform.node(), visible_gpus()[device.index or 0])


def gpus_for_engines(
    device: str, count: int, used: Collection[HostGpu | None]
) -> EngineGpus:
    """Return the GPUs on which ``count`` engines of this host compute.

    ``device``: as roles.rollout.device names it: "cuda" is all GPUs that this process may use, and "" those of them
    that no rank of training computes on. If all of them are in use, "" is all, too. ``used``: GPUs of the ranks that
    train, on all hosts; None for ranks without one.
    """
    from weft.cluster.engine_processes import gpus_of_engines, visible_gpus

    if device not in ("", "cuda"):
        return EngineGpus([])
    every = visible_gpus()
    if device or not every:
        return EngineGpus(every)
    host = platform.node()
    free = [name for name in every if HostGpu(host, name) not in used]
    given = gpus_of_engines(count, 1, free or every)
    places = ", ".join(f"engine-{i} on GPU {name}" for i, name in enumerate(given))
    why = "which the policy does not use" if free else "as the policy uses all GPUs"
    return EngineGpus(free or every, f"rollouts: {places}, {why}")


def device_environment(device: str) -> dict[str, str]:
    """Return the environment variables with which a process computes on ``device``: "cpu", "cuda" or "cuda:N".

    Returns {} for "" and "cuda", with which a process sees all devices. N counts the GPUs that this process may use.
    """
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    if not number:
        return {}
    from weft.cluster.engine_processes import visible_gpus

    return {"CUDA_VISIBLE_DEVICES": visible_gpus()[int(number)]}


def check_device(setting: str, device: str, ranks: int) -> None:
    """Raise :class:`UsageError` if ``ranks`` processes of this host cannot compute on ``device``.

    ``setting``: name of the setting in the recipe, such as ``roles.reference.device``.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return
    import torch

    gpus = torch.cuda.device_count()
    if int(number or 0) >= gpus:
        here = f"{gpus} GPU{'s' * (gpus != 1)}" if gpus else "no GPU"
        raise UsageError(
            f"{setting} = {device!r}, and this machine has {here}; use 'cpu', or another host"
        )
    if ranks > gpus:
        raise UsageError(
            f"{setting} = {device!r}, and {ranks} processes each need a GPU of this machine, which has {gpus}; use "
            f"'cpu', or ranks = {gpus}"
        )
    if number and ranks > 1:
        raise UsageError(
            f"{setting} = {device!r} is one GPU, and {ranks} processes each need one; use 'cuda', or ranks = 1"
        )
