"""A model's fingerprint: a hash by which processes know that they compute with the same weights."""

import json
from hashlib import blake2b

import torch

from weft.checkpoint.address import Where, open_storage
from weft.checkpoint.hub import local_path
from weft.checkpoint.store import candidates, open_checkpoint
from weft.checkpoint.weights import (
    Pretrained,
    is_foreign,
    open_pretrained,
    open_trained,
)
from weft.errors import WeftError
from weft.layout.dims import Logical, whole_box
from weft.shapes.parameters import parameters

#: Fields of a model's shape that say where it came from or how it learns, and change nothing of what it computes.
APART = {"origin", "init_std", "balance_loss", "z_loss", "bias_rate", "balance"}


def open_for_reading(where: Where, ema: bool = False) -> Pretrained:
    """Open the model at ``where``, a folder or a place in a storage, to read its weights without building the model.
    ``ema``: read the moving averages of the parameters instead of the parameters.

    Raises :class:`WeftError` for a configuration without weights.
    """
    path = local_path(str(where))
    if ema and not is_foreign(path):
        checkpoint = open_checkpoint(candidates(open_storage(path))[0])
        opened = open_trained(checkpoint, str(where), ema)
    else:
        opened = open_pretrained(where)
    if opened.values is None:
        raise WeftError(
            f"{where} is a configuration without weights; give the folder that has them"
        )
    return opened


def weights_fingerprint(model: Pretrained, weights: str = "float") -> str:
    """Return a hash of the configuration of ``model``, and of the names, shapes and values of all its parameters.

    The hash does not depend on how the model is stored or cut over ranks. ``weights``: name of the type in which the
    weights are used, such as "float" or "int8"; it enters the hash.
    """
    assert model.values is not None
    shape = model.shape.model_dump(mode="json", exclude=APART)
    digest = blake2b(json.dumps([shape, weights], sort_keys=True).encode())
    for row in sorted(parameters(model.shape), key=lambda row: row.name):
        cuts = ((),) * len(row.dims)
        logical = Logical(row.dims, row.std, cuts, whole_box(row.shape))
        tensor = model.values(row.name, logical, logical.box)
        digest.update(f"{row.name} {tuple(tensor.shape)}".encode())
        if tensor.is_floating_point():
            tensor = tensor.to(torch.float32)
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]
