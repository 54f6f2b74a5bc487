"""What offloading to the host costs: transfers, the update on the host's processor, and room in its memory.

State: parameters, gradients and moments of the optimizer are on the host, and its update runs there (ZeRO-Offload, Ren
et al. 2021, 2101.06840). Activations: what backward needs of a block waits on the host in between (vDNN, Rhu et al.
2016, 1602.08124). Both directions of a link are used at once where a pipeline runs forward and backward by turns, and
the host's memory then serves both.
"""

from dataclasses import replace

import numpy as np

from weft.model_shape import Num, Shape
from weft.planner.cost import Cost, Passes, Plan, most_layers
from weft.planner.engine import Engine
from weft.planner.machine import Machine
from weft.planner.memory import in_flight, layer_bytes

#: Bytes of host memory that an update moves per parameter: seven of float32 (gradient, parameter, two moments, the
#: last three also written), and one for the norm.
UPDATE = 32.0
#: Share of the transfers that is never hidden: not measured, so that offloading is not chosen for a small gain.
EXPOSED = 0.25
#: Bytes per parameter that cross the link: gradients and parameters are float32, as FSDP2 sends them.
WIDE = 4.0


def host_bytes(shape: Shape, plan: Plan, engine: Engine) -> Num:
    """Bytes of host memory that the fullest device of ``plan`` takes."""
    state, saved = plan.offloads_state, plan.offloads_activations
    most = most_layers(shape, plan.pp)
    held = _own(shape, plan, most) / plan.state_ranks
    kept = in_flight(plan, 0) * most * layer_bytes(shape, plan, engine)[0]
    return state * (engine.master + engine.gradient) * held + saved * kept


def with_host(cost: Cost, shape: Shape, machine: Machine, plan: Plan, engine: Engine, one: Passes, layers: Num) -> Cost:
    """``cost`` of a plan whose fullest rank has so many ``layers``, with what its ``offload`` adds and saves.

    ``one``: of the plan (:func:`weft.planner.cost.passes`).
    """
    state, saved = plan.offloads_state, plan.offloads_activations
    m = plan.microbatches
    # The memory of the host is read or written by every transfer, of both directions at once.
    link = np.minimum(machine.host, machine.host_bandwidth / 2)
    ahead, back = m * layers * one.forward, m * layers * (one.backward + one.again)

    def exposed(size: Num, cover: Num) -> Num:
        """Seconds of ``size`` bytes that so much compute does not hide."""
        spent = size / link
        return EXPOSED * spent + np.maximum(0.0, (1 - EXPOSED) * spent - cover)

    own = WIDE * _own(shape, plan, layers) / plan.state_ranks
    # Stage 3 fetches its shard for every gather, and hands on the gradients of every pass.
    fetched = np.where(plan.zero >= 3, np.where(plan.pp > 1, 1, m) * np.where(plan.secondary > 0, 1, 2), 1)
    reduced = np.where(plan.zero >= 2, m, 1)
    kept = m * layers * layer_bytes(shape, plan, engine)[0]
    host = exposed(state * fetched * own + saved * kept, ahead) + exposed(state * reduced * own + saved * kept, back)
    updated = own / WIDE * UPDATE / machine.host_bandwidth
    return replace(cost, host=np.where(plan.offload > 0, host, 0.0), optimizer=np.where(state, updated, cost.optimizer))


def _own(shape: Shape, plan: Plan, layers: Num) -> Num:
    """Parameters of a rank with so many layers, whole."""
    # Experts: also over the ranks that do not cut them.
    body = layers * (shape.dense_weights + shape.expert_weights) / plan.tp
    return body + shape.table / plan.tp * np.where(plan.pp > 1, 1, 2 - shape.tied)
