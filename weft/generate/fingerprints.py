"""Names for what the contents of cache blocks depend on, which other processes compute alike."""

import json
from hashlib import blake2b

import torch

from weft.models.row_adapters import HostAdapter
from weft.models.transformer import Transformer

T = torch.Tensor

#: Changes when blocks of an earlier Weft no longer mean the same.
FORMAT = 1


def fingerprint(model: Transformer, *settings: object) -> str:
    """Return a name for what the contents of cache blocks depend on: the weights of ``model`` and ``settings``.

    It reads all weights of this rank once, so that it must be called before they are packed or quantised.
    """
    digest = blake2b(digest_size=16)
    digest.update(json.dumps([FORMAT, *map(str, settings)]).encode())
    tensors: dict[str, T] = model.state_dict()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_raw(tensor))
    return digest.hexdigest()


def adapter_digest(adapter: HostAdapter) -> bytes:
    """Return a hash of all numbers of an adapter, and of where they belong."""
    digest = blake2b(repr(adapter.forms).encode(), digest_size=16)
    for values in adapter.values:
        digest.update(_raw(values))
    return digest.digest()


def _raw(tensor: T) -> memoryview:
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return flat.numpy().data
