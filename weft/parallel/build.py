"""``parallelize``: the one function that turns a model description and a mesh into a model that runs, and its state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft.layout.axes import DATA_AXES
from weft.memory.on_device import OnDevice
from weft.models.attention import Attend, local_attention
from weft.models.hooks import NO_HOOKS, Hooks
from weft.models.transformer import Block, Transformer, model_class
from weft.models.values import Values, seeded_values, with_adapter
from weft.models.widened import multiplies_slowly
from weft.parallel.state import Held, State, Unit, Updater, by_block
from weft.recipe import Memory, ModelShape, Optimizer, Train
from weft.recipe.conflicts import AskedRecipe, refuse_conflicts
from weft.shapes.parameters import learns

if TYPE_CHECKING:
    from weft.layout.layout import Layout
    from weft.layout.mesh import Mesh


#: Operators of attention and of exchanges, whose results selective recomputation keeps, if their file is imported.
KEPT_OPS = (
    "attention",
    "part_attention",
    "tile_attention",
    "exchange_heads",
    "linear_attention",
    "ring_self_attention",
)


def check_fits(
    shape: ModelShape, layout: Layout, train: Train | None = None, optimizer: Optimizer | None = None,
    memory: Memory | None = None,
) -> None:  # fmt: skip
    """Raise :class:`Conflict` for settings that cannot be combined, by the rules of :mod:`weft.recipe.conflicts`.

    The arguments are sections of a recipe. For a section that is None the defaults are checked. ``shape.vocab`` may be
    0 while the size of the vocabulary is not yet known.
    """
    asked = AskedRecipe(
        layout=layout,
        shape=shape,
        train=train or Train(),
        optimizer=optimizer or Optimizer(),
        memory=memory or Memory(),
    )
    refuse_conflicts(asked)


class Built(NamedTuple):
    """The model that computes on this rank, and its state, as :func:`parallelize` builds them."""

    model: Transformer
    state: State


def parallelize(
    shape: ModelShape, mesh: Mesh, train: Train, values: Values | None = None, seq_len: int = 1024,
    memory: Memory | None = None, lift: Callable[[Transformer], None] | None = None, summed: bool = True,
    hooks: Hooks = NO_HOOKS, report: Callable[[dict[str, Any]], None] = lambda chosen: None,
    optimizer: Updater | None = None, narrow: bool = True,
) -> Built:  # fmt: skip
    """Build the model ``shape`` and its state on this rank of ``mesh``. The name of each step of building is logged.

    ``train``: section of the recipe with data types, recomputation and the patterns of frozen parameters; with an
    adapter, all parameters of the base model are frozen. ``memory``: section of the recipe that says where tensors
    rest, by default on the device. ``seq_len``: tokens of a sequence, by which layers are assigned to pipeline
    stages. ``optimizer``: the update rule; None for a state that is never updated. ``narrow``: whether frozen
    parameters may rest in ``train.dtype``.

    On :meth:`Mesh.single` a model with ``train.dtype`` bfloat16 computes in float32, because its parameters are the
    state themselves. Callers that want bfloat16 there use ``model.to(torch.bfloat16)``.

    ``values``: initial values, by default seeded ones that are the same under every layout. ``hooks``: functions
    that are called during forward and backward. ``summed``: whether the state sums gradients over replicas (``dp``).
    ``lift``: called with the model before memory is allocated, to remove parts for which this rank needs none.
    ``report``: called with a dict about the blocks whose activations leave the device.
    """
    memory = memory or Memory()
    dtype = getattr(torch, train.dtype)
    settings = getattr(optimizer, "settings", None)
    check_fits(shape, mesh.layout, train, settings, memory)

    log("where tensors rest")
    tiers = tiers_of(memory, mesh, train.timeout)

    if memory.offloads_activations:
        log("saved activations")
        from weft.memory.activations import SavedActivations

        file = tiers.activation_file
        saver = SavedActivations(mesh.device, file, memory.blocks, report)
        hooks = replace(hooks, saver=saver)

    pipeline = None
    if mesh.size("pp") > 1 or memory.by_table:
        log("stages")
        from weft.parallel.pipeline import Pipeline

        pipeline = Pipeline(
            shape, mesh, train.loss_chunk, seq_len, train.timeout, hooks
        )
        model = pipeline.model
    else:
        model = whole_model(shape, mesh, train.loss_chunk, hooks)

    log("attention and experts over ranks")
    sharded = pipeline is None and is_sharded(mesh, train, memory, summed)
    replicated = False
    if sharded:
        from weft.parallel.replicated import is_replicated, replicated_state

        replicated = is_replicated(mesh, train, memory, summed)
        sharded = not replicated
    if mesh.layout.weaves:
        from weft.models.weave import weave_layers

        weave_layers(model, whole_blocks=sharded)
    connect(model, mesh, train.recompute)

    if lift is not None:
        log("parts without memory")
        lift(model)

    if train.compile:
        log("compile")
        # before a compiler looks for the answer
        multiplies_slowly(dtype)
        for block in model.blocks.values():
            block.compile()

    log("types, and what learns")
    everywhere = {
        name for name, logical in model.logical_parameters() if logical.everywhere
    }
    freeze(
        model,
        shape,
        train,
        narrow=dtype if sharded and narrow else None,
        kept=everywhere,
    )

    if sharded:
        log("data parallelism")
        from weft.parallel.sharded import shard_data_parallel, sharded_state

        shard_data_parallel(model, mesh, train, memory)

    log("memory")
    place = "cpu" if sharded and memory.offloads_state else mesh.device
    if memory.by_table:
        make_unheld(model, mesh.device, kept=everywhere)
    else:
        # a plugin's module has made its own buffers
        model.to(place) if shape.is_plugin else model.to_empty(device=place)
    model.freq = model.freq.to(mesh.device)
    for name in everywhere:
        model.get_parameter(name).data = model.get_parameter(name).to(mesh.device)

    log("state")
    make = partial(
        State,
        tiers=tiers,
        base_elsewhere=shape.adapter is not None,
        optimizer=optimizer,
    )
    if mesh.layout.placement == "moving":
        from weft.parallel.experts import copies

        layers = copies.moving_layers(model)
        make = partial(make, go_home=partial(copies.bring_experts_home, layers))
    if pipeline is not None:
        state = pipeline.start(dtype, tiers, make, memory)
    elif sharded:
        state = sharded_state(model, mesh, make)
    elif replicated:
        state = replicated_state(model, mesh, make)
    else:
        state = resident_state(model, mesh, make)
    if mesh.layout.placement == "moving":
        copies.let_experts_move(layers, state)

    log("values")
    if values is None:
        values = with_adapter(untrained_values(shape, train.seed), shape, train.seed)
    state.fill(values)
    return Built(model, state)


def log(step: str) -> None:
    """Log, at level debug, the name of the step of :func:`parallelize` that begins."""
    logging.getLogger("weft.parallelize").debug(step)


def freeze(
    model: Transformer,
    shape: ModelShape,
    train: Train,
    narrow: torch.dtype | None,
    kept: Container[str],
) -> None:
    """Set the data types of the model's parameters, and freeze the parameters that do not learn.

    ``shape`` (its adapter) and ``train`` (``train.freeze``) say which parameters do not learn. Parameters are float32,
    or float64 if ``train.dtype`` is. Frozen parameters get the type ``narrow`` instead, unless ``narrow`` is None: they
    have no small updates that a narrow type could lose. ``kept``: names of parameters that never get the type
    ``narrow``.
    """
    model.to(torch.float64 if train.dtype == "float64" else torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(learns(name, shape, train.freeze))
        frozen = not parameter.requires_grad and parameter.is_floating_point()
        if narrow is not None and frozen and name not in kept:
            parameter.data = parameter.to(narrow)


def tiers_of(memory: Memory, mesh: Mesh, timeout: float) -> OnDevice:
    """Return the tiers (device, host or files) in which the state and saved activations rest, as ``memory`` says.

    ``timeout``: seconds to wait for a transfer to or from a tier.
    """
    if not memory.away:
        return OnDevice()
    from weft.memory.resting import Tiers

    room, ahead = memory.buffer << 20, memory.read_ahead
    return Tiers(memory.away, memory.folder, mesh.device, timeout, room, ahead)


def is_sharded(mesh: Mesh, train: Train, memory: Memory, summed: bool = True) -> bool:
    """Return whether the state has tensors of its own, apart from the parameters with which the model computes.

    This is so in four cases: the state is cut over ranks, it is replicated over ``dp``, it has a wider type than
    compute, or it is offloaded. ``summed``: whether the state sums gradients over the replicas of ``dp``. If
    something else sums them, the second case does not count. ``train``, ``memory``: sections of the recipe.
    """
    if mesh.device_mesh is None:
        return False
    replicas = mesh.size("dp") if summed else 1
    shared = replicas * mesh.size("state") > 1
    return shared or train.dtype == "bfloat16" or memory.offloads_state


def whole_model(
    shape: ModelShape, mesh: Mesh, loss_chunk: int = 1024, hooks: Hooks = NO_HOOKS
) -> Transformer:
    """Build a model of ``shape`` with all its layers on this rank, and return it: Weft's transformer, or a plugin's.

    ``loss_chunk``: tokens whose logits are in memory at once; ``hooks``: functions that passes call.
    """
    if not shape.is_plugin:
        return model_class(shape)(shape, mesh, loss_chunk, hooks=hooks)
    if shape.inputs:
        from weft.models.array_model import ArrayModel

        return ArrayModel(shape, mesh, loss_chunk, hooks)
    from weft.models.plugin_model import PluginModel

    return PluginModel(shape, mesh, loss_chunk, hooks)


def untrained_values(shape: ModelShape, seed: int) -> Values:
    """Return the initial values of a model without an adapter: those of a plugin's module, or else seeded ones."""
    if not shape.is_plugin:
        return seeded_values(seed)
    from weft.models.plugin_model import plugin_values

    return plugin_values(shape, seed)


def make_unheld(model: Transformer, device: torch.device, kept: Container[str]) -> None:
    """Move a model's parameters from the meta device to ``device``; allocate memory only for those named in ``kept``.

    ``kept``: names of parameters. Modules are moved one by one, as a model whose state rests in files may not fit in
    memory even for a moment.
    """
    for prefix, module in model.named_modules():
        module.to_empty(device=device, recurse=False)
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if name not in kept:
                parameter.untyped_storage().resize_(0)


def connect(model: Transformer, mesh: Mesh, recompute: str) -> None:
    """Install the attention and expert communication of ``mesh`` in ``model``, and set what its blocks recompute.

    Attention then runs over the ranks of ``cp``, and experts over those of ``ep``. ``recompute``: the mode of
    activation recomputation, as ``train.recompute`` names it.
    """
    if mesh.layout.ep > 1:
        from weft.parallel.experts.connect import connect_experts

        connect_experts(model, mesh)
    attend, known = attention_over(mesh, model.shape), torch.ops.weft
    kept = [getattr(known, op).default for op in KEPT_OPS if hasattr(known, op)]
    for block in model.blocks.values():
        assert isinstance(block, Block)
        if block.attention.mixer == "softmax":
            block.attention.attend = attend
        block.recompute, block.kept_ops = recompute, kept


def attention_over(mesh: Mesh, shape: ModelShape) -> Attend:
    """Return the attention function that softmax layers call, which computes over the ranks of ``mesh``. Collective."""
    attend: Attend = local_attention
    if mesh.size("cp") > 1:
        from weft.parallel.context.attend import context_attention

        attend = context_attention(mesh, shape)
    if mesh.layout.balance and mesh.size(*DATA_AXES) > 1:
        from weft.parallel.hybrid import HybridAttention

        attend = HybridAttention(mesh, attend)
    return attend


def resident_state(
    model: Transformer, mesh: Mesh, make: Callable[..., State] = State
) -> State:
    """Build the state of a model whose parameters are all whole on this rank.

    The model's parameters are themselves the state: no other copy is kept. ``make`` creates the state from units.
    Each block is a unit. All parameters outside of blocks together are another unit.
    """
    described = dict(model.logical_parameters())
    held = {}
    for name, parameter in model.named_parameters():
        placement = mesh.place.hold(described[name])
        local = parameter.detach()
        held[name] = Held(name, described[name], placement, local, parameter)
    return make(Unit(of_block) for of_block in by_block(held).values())
