"""The cost of state on the host or in files: transfers, the update on the host, and the room there.

The update runs where the weights rest, or on the host if that is a file (ZeRO-Offload, Ren et al. 2021, 2101.06840;
ZeRO-Infinity, Rajbhandari et al. 2021, 2104.07857). All microbatches of a unit of a file come one after the other, so
that it is read once for forward and once for backward (GreedySnake, 2512.17570). Activations: what backward needs of a
block (vDNN, Rhu et al. 2016, 1602.08124; SSDTrain, Wu et al. 2024, 2408.10013).

Both directions of a link are used at once where a pipeline runs forward and backward by turns, and the host's memory
then serves both. A disk does one thing at a time. Forward, backward and update each take as long as the longer of what
is computed and what moves, and the time of a file's first unit.
"""

from dataclasses import replace

import numpy as np

from weft.planner.cost import (
    FILE,
    HOST,
    Cost,
    MicrobatchSeconds,
    Plan,
    most_layers,
    passes,
    step_time,
)
from weft.planner.engine_constants import EngineConstants
from weft.planner.machine import Machine
from weft.planner.memory import MOMENTS, in_flight, layer_bytes
from weft.shapes.shape import Num, Shape

#: Bytes of host memory that an update moves per parameter: seven of float32 (gradient, parameter, two moments, the
#: last three also written), and one for the norm.
UPDATE = 32.0
#: Share of the transfers over the link that is never hidden: not measured, so that it is not chosen for a small gain.
EXPOSED = 0.25
#: Bytes per parameter of weights, and of gradients, that move: float32, as FSDP2 sends them.
WIDE = 4.0


def exposed_seconds(moved: Num, computed: Num, units: Num) -> Num:
    """Return the seconds of transfers that compute does not hide.

    They are the sum of two waits. Compute first waits for one of the ``units`` equal transfers. If all transfers
    together take longer than compute, the rest of their time is waited for as well. ``moved``: seconds of all
    transfers. ``computed``: seconds of compute beside them.
    """
    return np.maximum(0.0, moved - computed) + moved / units


def room_away(shape: Shape, plan: Plan, engine: EngineConstants) -> tuple[Num, Num]:
    """Return ``(host, file)``: the bytes that ``plan`` needs in the host's memory and on disk, for the device that
    needs most.

    ``engine``: constants of the training program.
    """
    most = most_layers(shape, plan.pp)
    held = _own(shape, plan, most) / plan.state_ranks
    sizes = {
        "weights": (engine.master - MOMENTS + engine.gradient) * held, "moments": MOMENTS * held,
        "activations": in_flight(plan, 0) * most * layer_bytes(shape, plan, engine)[0],
    }  # fmt: skip
    host, file = (
        sum((getattr(plan, kind) == place) * size for kind, size in sizes.items())
        for place in (HOST, FILE)
    )
    return host, file


def planned_time(
    shape: Shape, machine: Machine, plan: Plan, engine: EngineConstants
) -> Cost:
    """Return the time of one step of ``plan``, including the cost of state and activations on the host or in files.

    ``machine``: the cluster. ``engine``: constants that say how well the training program uses it.
    """
    cost = step_time(shape, machine, plan, engine)
    if not np.any(plan.moves):
        return cost
    microbatch = passes(shape, machine, plan, engine)
    return with_tiers(
        cost, shape, machine, plan, engine, microbatch, most_layers(shape, plan.pp)
    )


def with_tiers(
    cost: Cost,
    shape: Shape,
    machine: Machine,
    plan: Plan,
    engine: EngineConstants,
    microbatch: MicrobatchSeconds,
    layers: Num,
) -> Cost:
    """Return ``cost`` plus the seconds that are lost if state and activations rest on the host or in files.

    Where the host updates the parameters, the device's seconds of the optimizer are replaced by those of the host.
    ``cost``: the seconds of a step in which everything rests on the device. ``machine``: the cluster. ``engine``:
    constants of the training program. ``plan``: the layout, with the places where state and activations rest.
    ``microbatch``: seconds of one microbatch of the plan (:func:`weft.planner.cost.passes`). ``layers``: number of
    layers of the plan's fullest rank.
    """
    state, saved, filed = plan.weights > 0, plan.activations > 0, plan.weights == FILE
    m, apart = plan.microbatches, machine.host_memory > 0  # else the device is the host
    # The memory of the host is read or written by every transfer, of both directions at once.
    link = np.where(apart, np.minimum(machine.host, machine.host_bandwidth / 2), np.inf)
    own = _own(shape, plan, layers) / plan.state_ranks
    kept = m * layers * layer_bytes(shape, plan, engine)[0]

    def phase(sent: Num, read: Num, written: Num, compute: Num) -> Num:
        """Seconds of a phase that so much compute does not hide: bytes over the link, and of files read and written."""
        crossed, moved = (
            sent / link,
            read / machine.disk_read + written / machine.disk_write,
        )
        seen = EXPOSED * crossed + np.maximum(0.0, (1 - EXPOSED) * crossed - compute)
        return np.maximum(seen, exposed_seconds(moved, compute, layers))

    # Stage 3 fetches its shard for every gather, and hands on the gradients of every pass.
    often = np.where(plan.pp > 1, 1, m) * np.where(plan.secondary > 0, 1, 2)
    # tiles and rows come again for each microbatch
    turns = np.where(np.asarray(plan.tiles) > 0, m, 1)
    gathers = np.where(filed, 2 * turns, np.where(plan.zero >= 3, often, 1))
    reduced = np.where((plan.zero >= 2) & (plan.weights != FILE), m, 1)
    wide, moments = WIDE * own, MOMENTS * own
    # of a table whose rows come alone, what a microbatch of all ranks names
    table = shape.table / plan.tp / plan.state_ranks
    named = np.minimum(1.0, plan.micro_batch * plan.seq * plan.data / shape.vocab)
    spared = (np.asarray(plan.embedding) > 0) * (1 - named) * table
    wide, moments = wide - WIDE * spared, moments - MOMENTS * spared
    updated = np.where(
        state & apart, own * UPDATE / machine.host_bandwidth, cost.optimizer
    )
    host = phase(
        state * gathers * wide + saved * kept, filed * turns * wide, (plan.activations == FILE) * kept,
        m * layers * microbatch.forward,
    ) + phase(
        state * reduced * wide + saved * kept, filed * (2 * turns - 1) * wide + (plan.activations == FILE) * kept,
        filed * turns * wide, m * layers * (microbatch.backward + microbatch.again),
    ) + phase(
        (plan.moments > 0) * (plan.weights == 0) * moments, (plan.moments == FILE) * moments + filed * 2 * wide,
        (plan.moments == FILE) * moments + filed * wide, updated,
    )  # fmt: skip
    return replace(cost, host=np.where(plan.moves, host, 0.0), optimizer=updated)


def _own(shape: Shape, plan: Plan, layers: Num) -> Num:
    """Return the parameters of a rank with ``layers`` layers, before ZeRO cuts them."""
    # Experts: also over the ranks that do not cut them.
    body = layers * (shape.dense_weights + shape.expert_weights) / plan.tp
    return body + shape.table / plan.tp * np.where(plan.pp > 1, 1, 2 - shape.tied)
