"""Peak memory of a rank by purpose. Every argument may hold arrays, as in :mod:`weft.planner.cost`.

Activations follow Korthikanti et al. 2022 (2205.05198, section 4), written for any widths; what a schedule keeps
alive follows the papers of the schedules.
"""

from dataclasses import dataclass, fields, replace

import numpy as np

from weft.planner.cost import (
    FILE,
    Plan,
    Recompute,
    by_schedule,
    copies,
    expert_cut,
    stage_layers,
    stream_cut,
)
from weft.planner.engine_constants import EngineConstants
from weft.shapes.shape import Num, Shape

#: Bytes of both moments of a parameter, in float32, among what the optimizer keeps (``EngineConstants.master``).
MOMENTS = 8.0


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the fullest rank, by purpose.

    ``parameters``, ``gradients``, ``optimizer``: this rank's parts of the parameters, of their gradients, and of the
    optimizer's state. ``activations``: what forward keeps for backward. ``buffers``: temporary tensors, such as
    gathered parameters and the working memory of a layer. ``constant``: memory that no formula explains, as measured:
    context, communication buffers and fragmentation.
    """

    parameters: Num
    gradients: Num
    optimizer: Num
    activations: Num
    buffers: Num
    constant: Num

    @property
    def total(self) -> Num:
        return sum(getattr(self, f.name) for f in fields(self))


def in_flight(plan: Plan, position: Num) -> Num:
    """Return the largest number of microbatches whose activations the pipeline rank with the index ``position`` holds
    at once under ``plan``.

    Where a rank has several stages, a microbatch may be held by some of them only. It then counts as a fraction, such
    as 0.5 if half of the stages hold it. If the weights rest in a file, the result is the number of all microbatches,
    because a layer processes all of them before the next layer begins.
    """
    first = by_schedule(
        plan, lambda builder: builder.in_flight(plan.pp, np.maximum(1, plan.virtual), 0)
    )
    most = first - by_schedule(plan, lambda builder: builder.falls) * position
    return np.where(
        plan.weights == FILE, plan.microbatches, np.minimum(plan.microbatches, most)
    )


def layer_bytes(shape: Shape, plan: Plan, engine: EngineConstants) -> tuple[Num, Num]:
    """Return ``(kept, alive)``: bytes of activations of one layer and one microbatch.

    ``kept`` is what the layer keeps for backward, on the device or elsewhere. :func:`held_bytes` returns only the part
    that stays on the device. ``alive`` is what exists while the layer is computed. ``plan``: the layout. ``engine``:
    constants of the training program.
    """
    tokens = plan.micro_batch * plan.seq / plan.cp
    cut = stream_cut(shape, plan, engine)
    load = shape.busiest(plan.ep)
    ffn, rows = shape.inner_width(load), (1 - shape.dense_share) * shape.top_k * load
    routed = 4 * rows * shape.embed * expert_cut(plan, engine) / plan.tp
    wide = 1 + (plan.bits == 32)  # float32 takes twice the room
    norms = ((engine.saved - engine.gathered) / cut + engine.gathered) * shape.embed
    attention = 2 * (shape.qkv_width + shape.heads * shape.head_dim) / plan.tp
    remade = engine.remade * rows * shape.expert_ffn
    inner = 2 * ((2 + shape.gated + engine.inside) * ffn - remade) / plan.tp
    scores = np.where(engine.flash > 0, 0.0, 5 * shape.heads * plan.seq / plan.tp)
    whole = norms + attention + inner + routed
    # Selective: scores where there are any; under fused attention all but inputs and every other product.
    products = (
        2 * shape.heads * shape.head_dim + shape.qkv_width + (1 + shape.gated) * ffn
    ) / plan.tp
    # a ladder's stream is two tensors
    stream = (1 + shape.ladder) * engine.stream * shape.embed / cut
    attended = stream + 2 * shape.heads * shape.head_dim / plan.tp
    selective = np.where(
        engine.products > 0, 4 * shape.embed / cut + products, attended
    )
    selective = np.where(engine.flash > 0, selective, whole)
    kept = np.select(
        [plan.recompute == Recompute.FULL, plan.recompute == Recompute.SELECTIVE],
        [stream, selective],
        whole + scores,
    )
    return wide * tokens * kept, wide * tokens * (whole + scores)


def held_bytes(shape: Shape, plan: Plan, engine: EngineConstants) -> Num:
    """Return the bytes of activations of one layer and microbatch that stay on the device for backward.

    Activations that ``plan`` keeps on the host or in files are left out. ``engine``: constants of the training program.
    """
    return layer_bytes(shape, plan, engine)[0] * (plan.activations == 0)


def logit_bytes(shape: Shape, plan: Plan, engine: EngineConstants) -> Num:
    """Return the bytes of one microbatch's logits, of the loss's intermediates, and of the output layer's gradient.
    ``plan``: the layout. ``engine``: constants of the training program.
    """
    tokens = np.minimum(plan.micro_batch * plan.seq / plan.cp, engine.chunk)
    return (engine.vocab * tokens + engine.table * shape.embed) * shape.vocab / plan.tp


def rank_memory(
    shape: Shape,
    plan: Plan,
    engine: EngineConstants,
    layers: Num,
    tables: Num,
    activations: Num,
    logits: Num = 0.0,
) -> RankMemory:
    """Return the memory under ``plan`` of a rank with ``layers`` layers and ``tables`` vocabulary tables (embedding,
    output layer).

    ``activations``: bytes of activations at the peak, of which ``logits`` bytes belong to the loss. The loss may
    compute the output layer's gradient at once (``engine.table``). The logits are then freed before backward needs its
    working memory, so that only the larger of the two counts.
    """
    kept, alive = layer_bytes(shape, plan, engine)
    layer = shape.dense_weights / plan.tp
    width_cut = expert_cut(plan, engine)
    expert = shape.expert_weights / np.maximum(plan.ep, 1) / width_cut
    table = shape.table / plan.tp
    inner = plan.state_ranks
    body, experts = layers * layer + tables * table, layers * expert
    # What expert parallelism has cut is shared by the ranks that are left.
    left = np.maximum(inner * plan.tp / width_cut / np.maximum(plan.ep, 1), 1)
    trained, adapters = 1 - shape.frozen, layers * shape.adapters / plan.tp
    # FSDP keeps full precision in the shard (counted as optimizer state) and gathers two layers at a time.
    in_parts = (np.asarray(plan.tiles) > 0) | (np.asarray(plan.embedding) > 0)
    alone = (plan.weights == FILE) | in_parts  # whose units come one by one
    sharded = (plan.zero >= 3) | alone
    # ... unless a pipeline keeps them, and the sums of their gradients, over its microbatches.
    units = np.where(plan.pp > 1, layers, np.minimum(2, layers))
    # of tiles, two are in memory: one computes, the next one comes
    tiled = np.asarray(plan.tiles) > 0
    weight = np.where(tiled, 2 * layer / np.maximum(plan.tiles, 1), units * layer)
    # of a table of embeddings in rows, those of the tokens come
    held = weight + units * expert + (tables - (np.asarray(plan.embedding) > 0)) * table
    gathered = np.where(sharded, 2 * held, 0.0)
    whole_gradients = np.where(sharded, engine.gradient * trained * held, 0.0)
    spread = np.where(plan.zero >= 1, inner, 1.0)
    states = body / spread + experts / np.where(plan.zero >= 1, left, 1.0)
    working = np.where(
        plan.recompute == Recompute.NONE, 0.0, np.maximum(alive - kept, 0)
    )
    # Of activations that rest elsewhere one layer's come back while the next one's are in use.
    working = working + (plan.activations > 0) * 2 * kept
    undone = (
        engine.undone
        * plan.micro_batch
        * plan.seq
        / plan.cp
        * shape.inner_width()
        / plan.tp
    )
    working = working + (plan.recompute == Recompute.NONE) * undone
    # Backward's own needs come when the logits are gone, where the loss makes its gradients at once.
    working = np.where(
        engine.table > 0,
        np.maximum(working + (plan.pp == 1) * whole_gradients - logits, 0),
        working,
    )
    whole_gradients = np.where(
        (engine.table > 0) & (plan.pp == 1), 0.0, whole_gradients
    )
    # A step of one pass need not keep sums of gradients, if each is reduced as soon as it is there.
    once = (plan.pp == 1) & (plan.microbatches == 1) & (engine.single == 0)
    reduced = (plan.zero >= 2) | once | alone
    parameters = (
        shape.stored * layers * layer + 2 * (tables * table + adapters)
    ) / np.where(sharded, inner, 1.0)
    parameters = parameters + shape.stored * experts / np.where(sharded, left, 1.0)
    gradients = (trained * body + adapters) / np.where(reduced, inner, 1.0)
    gradients = engine.gradient * (
        gradients + trained * experts / np.where(reduced, left, 1.0)
    )
    optimizer = engine.master * (trained * states + adapters / spread)
    # With the weights go the shards of parameters, and gradients as soon as they are reduced.
    away = plan.weights > 0
    parameters, gradients = (
        np.where(away & sharded, 0.0, parameters),
        np.where(away & reduced, 0.0, gradients),
    )
    optimizer = np.where(
        away, 0.0, optimizer * (1 - (plan.moments > 0) * MOMENTS / engine.master)
    )
    # blocks stay gathered over a few ranks from forward to backward
    if np.any(plan.secondary):
        near = 2 * layers * (layer + expert) / np.maximum(plan.secondary, 1)
        parameters = parameters + np.where(plan.secondary > 0, near, 0.0)
    if np.any(shape.critic):
        # with an embedding and without an output layer; its gradients and activations are gone before the model's come
        own = replace(shape, critic=0)
        alone = rank_memory(own, plan, engine, layers, np.minimum(tables, 1), 0.0)
        parameters = parameters + shape.critic * alone.parameters
        optimizer = optimizer + shape.critic * alone.optimizer
    return RankMemory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        buffers=working + gathered + whole_gradients,
        constant=engine.constant * 2**30 + 0 * body,
    )


def peak_memory(shape: Shape, plan: Plan, engine: EngineConstants) -> RankMemory:
    """Return the memory of the fullest pipeline rank of ``plan``, which is assumed to be the first, the second or the
    last.

    ``engine``: constants of the training program, such as bytes of gradient per parameter.
    """
    first, most, last, _ = stage_layers(shape, plan, engine)
    kept = held_bytes(shape, plan, engine)
    logits = logit_bytes(shape, plan, engine)

    def at(position: Num, layers: Num, tables: Num, out: Num) -> RankMemory:
        held = in_flight(plan, position) * layers * kept + out * logits
        return rank_memory(
            shape,
            plan,
            engine,
            copies(plan) * layers,
            copies(plan) * tables,
            held,
            out * logits,
        )

    alone = plan.pp == 1
    candidates = [
        at(0, first, np.where(alone, 2 - shape.tied, 1.0), np.where(alone, 1.0, 0.0)),
        at(np.minimum(1, plan.pp - 1), np.where(plan.pp > 2, most, 0), 0.0, 0.0),
        at(plan.pp - 1, np.where(alone, 0, last), 1.0, 1.0),
    ]

    def column(name: str) -> list[Num]:
        return list(
            np.broadcast_arrays(
                *[np.asarray(getattr(c, name), dtype=float) for c in candidates], like
            )
        )[:-1]

    like = np.zeros(
        np.broadcast(plan.pp, plan.batch, shape.layers, engine.constant, plan.tp).shape
    )
    worst = np.stack(column("total")).argmax(0)
    return RankMemory(
        **{f.name: np.choose(worst, column(f.name)) for f in fields(RankMemory)}
    )
