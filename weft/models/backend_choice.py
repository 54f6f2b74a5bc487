"""Chooses the attention backend of an engine by its name and device."""

import torch

from weft.errors import UsageError
from weft.models.attention_backend import (
    BACKENDS,
    FIXED,
    GATHERED,
    MEASURED,
    NATIVE,
    PAGED,
    REMEASURED,
    AttentionBackend,
    check_attention,
)
from weft.models.measured_attention import measured_here
from weft.models.triton_use import runs_triton


def choose_backend(name: str, device: torch.device) -> AttentionBackend:
    """Return the backend called ``name``; "": the fastest one on ``device``.

    Raises :class:`UsageError` if there is no such backend, or if it does not run on ``device``.
    """
    check_attention(name, False, False)
    if name == PAGED.name and not runs_triton(device):
        raise UsageError("paged attention needs a GPU and the package triton; leave it out")  # fmt: skip
    if name == FIXED.name and device.type != "cpu" and not runs_triton(device):
        raise UsageError(
            "fixed attention needs the package triton on a GPU; leave it out"
        )
    if name in (MEASURED, REMEASURED):
        usual = choose_backend("", device)
        able = dict.fromkeys((usual, GATHERED, FIXED))
        return measured_here([*able], device, name == REMEASURED)
    if name == NATIVE.name and device.type != "cpu":
        raise UsageError("native attention is for the CPU; leave it out")
    if name:
        return BACKENDS[name]
    if device.type == "cpu":
        return NATIVE
    return PAGED if device.type == "cuda" and runs_triton(device) else GATHERED
