"""Devices on which the roles of reinforcement learning compute in processes of their own."""

from __future__ import annotations

from weft.errors import UsageError


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
