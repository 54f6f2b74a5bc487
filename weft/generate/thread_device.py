"""The GPU on which a thread launches kernels: for a new thread the first one, whatever its process has chosen."""

import torch


def use_device(device: torch.device) -> None:
    """Make ``device``, on which a model is, the current device of the calling thread, if it is a certain GPU.

    PyTorch's own operators find the GPU by their tensors. Triton's kernels, CUDA graphs and streams take the thread's.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
