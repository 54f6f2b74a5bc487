"""``parallelize``: the one function that turns a model description and a mesh into a model that runs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from weft.errors import UsageError
from weft.layout.dims import Box, Logical, ceil_part
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh, check_live
from weft.memory.activations import HostActivations
from weft.models.init import initial_values
from weft.models.transformer import Block, Transformer
from weft.parallel.context import check_context, context_attention
from weft.parallel.data import shard_data_parallel
from weft.parallel.hybrid import check_hybrid, hybrid_attention
from weft.parallel.pipeline import Pipeline, check_pipeline
from weft.recipe import ModelShape, Train

#: Gives the values of a part of a logical parameter.
Values = Callable[[str, Logical, Box], torch.Tensor]


@dataclass(frozen=True)
class LocalPart:
    """One parameter as this rank stores it: ``local`` are the elements ``box`` of the logical tensor.

    ``counted``: this rank's copy is the one that counts where several ranks of the pipeline hold the parameter.
    ``replica`` of ``replicas``: which of the ranks this is that hold these elements.
    """

    name: str
    logical: Logical
    parameter: nn.Parameter
    local: torch.Tensor
    box: Box
    counted: bool = True
    replica: int = 0
    replicas: int = 1

    @property
    def grad(self) -> torch.Tensor | None:
        """The local part of the gradient."""
        grad = self.parameter.grad
        return grad.to_local() if isinstance(grad, DTensor) else grad


def check_fits(shape: ModelShape, layout: Layout) -> None:
    """Refuse, before anything starts, a layout that this model cannot be cut by."""
    check_live(layout)
    for name, count in (("heads", shape.heads), ("ffn", shape.ffn or 0), ("vocab", shape.vocab)):
        if count < layout.tp:
            raise UsageError(f"tp={layout.tp} is more than the model's {count} {name}; use tp <= {count}")
    check_context(layout, shape)
    check_pipeline(shape, layout)


def parallelize(
    shape: ModelShape, mesh: Mesh, train: Train, values: Values | None = None, seq_len: int = 1024
) -> Transformer:
    """Build ``shape`` under ``mesh``: stages, attention across ranks, recompute, compile, data parallelism, values.

    ``values`` default to the seeded initial values, which are the same under every layout; ``seq_len`` weighs attention
    where layers are dealt to stages.
    """
    check_fits(shape, mesh.layout)
    check_hybrid(mesh.layout, shape, train)
    pipeline = None
    if mesh.size("pp") > 1:
        pipeline = Pipeline(shape, mesh, train.loss_chunk, seq_len, train.timeout)
    model = pipeline.model if pipeline else Transformer(shape, mesh, train.loss_chunk)
    attend = hybrid_attention(mesh, context_attention(mesh, shape))
    for block in model.blocks.values():
        assert isinstance(block, Block)
        if block.attention.mixer == "softmax":
            block.attention.attend = attend
        block.recompute = train.recompute
        kept = torch.ops.weft
        block.kept_ops = [
            kept.attention.default, kept.tile_attention.default, kept.exchange_heads.default,
            kept.linear_attention.default, kept.ring_self_attention.default,
        ]  # fmt: skip
        if train.compile:
            block.compile()
    model.to(torch.float64 if train.dtype == "float64" else torch.float32)
    if pipeline is None:
        shard_data_parallel(model, mesh, train)
    sharded = isinstance(model, FSDPModule)
    model.to_empty(device="cpu" if sharded and train.offloads_state else mesh.device)
    model.freq = model.freq.to(mesh.device)
    if pipeline is not None:
        pipeline.start(getattr(torch, train.dtype), train.offloads_state)
        model.pipeline = pipeline
    if train.offloads_activations:
        model.around = HostActivations(mesh.device).block
    fill(model, mesh, values or (lambda name, logical, box: initial_values(name, logical, box, train.seed)))
    return model


def local_parts(model: Transformer, mesh: Mesh) -> list[LocalPart]:
    """Every parameter's local storage and where it lies in the logical tensor."""
    if model.pipeline is not None:
        rank, copies = mesh.rank("pp"), model.pipeline.copies
        held = [h for unit in model.pipeline.units for h in unit.held]
        return [
            LocalPart(
                h.name, h.logical, h.shard, h.shard.detach(), h.logical.rows(*h.rows), copies[h.name][0] == rank,
                *_replica(h.logical, mesh, copies[h.name].index(rank), len(copies[h.name])),
            )
            for h in held
        ]  # fmt: skip
    described = dict(model.logical_parameters())
    state_size, state_rank = mesh.size("state"), mesh.rank("state")
    parts = []
    for name, parameter in model.named_parameters():
        logical = described[name]
        local, box = parameter.detach(), logical.box
        if isinstance(local, DTensor):
            local, box = local.to_local(), logical.rows(*ceil_part(logical.local_shape[0], state_size, state_rank))
        index, count = _replica(logical, mesh)
        parts.append(LocalPart(name, logical, parameter, local, box, replica=index, replicas=count))
    return parts


def _replica(logical: Logical, mesh: Mesh, copy: int = 0, copies: int = 1) -> tuple[int, int]:
    """Which of the ranks this is that hold the same elements of a parameter: of ``dp``, ``tp`` if whole, and copies."""
    tp = mesh.size("tp") if logical.whole else 1
    index = (copy * mesh.size("dp") + mesh.rank("dp")) * tp + (mesh.rank("tp") if logical.whole else 0)
    return index, copies * mesh.size("dp") * tp


@torch.no_grad()
def fill(model: Transformer, mesh: Mesh, values: Values) -> None:
    """Write ``values`` into every local part."""
    for p in local_parts(model, mesh):
        if p.local.numel():
            p.local.copy_(values(p.name, p.logical, p.box))
