"""One copy of a model's weights for two processes: both compute with tensors in an arena that they share.

The weights keep their order in memory, as kernels' own orders cannot be shared. Weights that multiply the same input
are joined, as for one process (:mod:`weft.models.products`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.errors import UsageError
from weft.generate.shared_arena import SharedArena, arena_bytes
from weft.layout.mesh import Mesh
from weft.models.products import OUTPUT, Packed, read_only
from weft.models.transformer import Transformer
from weft.parallel.build import connect
from weft.recipe import ModelShape

T = torch.Tensor

#: The parameter that is the output layer's weight too, where embedding and output layer are tied.
TABLE = "embedding.table"


class SharedModel(NamedTuple):
    """Description and memory with which another process computes with the same weights. ``about``: description of the
    model, a JSON object. ``arena``: shared memory with the weights.
    """

    about: dict[str, Any]
    arena: SharedArena


def share_model(model: Transformer) -> SharedModel:
    """Move the weights of ``model``, which must not be converted yet, into memory that other processes can see. The
    model computes with them from now on. Return what another process needs for :func:`attach_model`.

    Raises :class:`UsageError` for a model that cannot be rebuilt from its shape and its weights.
    """
    shape = model.shape
    if model.mesh.device.type != "cpu" or model.mesh.layout.world > 1:
        raise UsageError(
            "--phases split is for a model on one rank on the CPU; leave it out"
        )
    if shape.kind or shape.adapter is not None:
        what = "a plugin's model" if shape.kind else "a model with an adapter"
        raise UsageError(
            f"--phases split shares weights, which {what} does not; leave it out, or export the merged model"
        )
    arena = SharedArena(arena_bytes(model.parameters()))
    if shape.tied:
        model.embedding.table.data = arena.keep(TABLE, model.embedding.table.data)

    def sharing(word: str, names: Sequence[str], weight: T) -> Packed:
        name = product_name(names)
        if shape.tied and names == [OUTPUT]:
            return Packed(arena.alias(name, TABLE), pack=False)
        return Packed(arena.keep(name, weight), pack=False)

    read_only(model, "float", sharing)
    for name, parameter in model.named_parameters():
        if name not in arena.tensors:
            parameter.data = arena.keep(name, parameter.data)
    dtype = str(model.norm.scale.dtype).removeprefix("torch.")
    given = shape.model_dump(mode="json", exclude_unset=True)
    return SharedModel({"shape": given, "dtype": dtype}, arena)


def attach_model(shared: SharedModel) -> Transformer:
    """Return the model that another process has shared by :func:`share_model`. Its weights are views of the shared
    memory; nothing is copied.
    """
    about, arena = shared
    model = Transformer(ModelShape(**about["shape"]), Mesh.single("cpu"))
    connect(model, model.mesh, "none")
    model.to(getattr(torch, about["dtype"]))

    def shared_weight(word: str, names: Sequence[str], weight: T) -> Packed:
        return Packed(arena[product_name(names)], pack=False)

    read_only(model, "float", shared_weight)
    for name, _ in [*model.named_parameters()]:
        path, _, leaf = name.rpartition(".")
        weight = nn.Parameter(arena[name], requires_grad=False)
        model.get_submodule(path)._parameters[leaf] = weight
    return model


def product_name(names: Sequence[str]) -> str:
    """Return the name under which processes that share a model's memory keep the weights ``names``, joined to one
    matrix that is multiplied at once.
    """
    return "+".join(names) + " product"
