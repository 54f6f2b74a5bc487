"""Where kernels of Triton run, and where they replace several of PyTorch's."""

import os
from functools import cache
from importlib.util import find_spec

import torch

#: Types of the tensors that the kernels take.
TYPES = (torch.bfloat16, torch.float16, torch.float32)


@cache
def _is_installed() -> bool:
    return find_spec("triton") is not None


def interprets_triton() -> bool:
    """Return whether the environment asks for Triton's interpreter, in which kernels run on the CPU, slowly."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_triton(device: torch.device) -> bool:
    """Return whether kernels of Triton run on ``device``: on a GPU, or in Triton's interpreter on the CPU."""
    return (device.type == "cuda" or interprets_triton()) and _is_installed()


def fuses(x: torch.Tensor) -> bool:
    """Return whether fused Triton kernels can compute with ``x`` in place of several PyTorch operators. They can on a
    GPU, in inference mode, for types that the kernels support.
    """
    here = x.is_cuda and torch.is_inference_mode_enabled()
    return here and x.dtype in TYPES and _is_installed()
