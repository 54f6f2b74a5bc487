"""Data parallelism on FSDP2: replicas (``dp``), sharded state (``shard`` and ``cp``), ZeRO stages as a table."""

from typing import NamedTuple

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.parallel.near import near_groups
from weft.recipe import Train


class Stage(NamedTuple):
    """What a ZeRO stage (Rajbhandari et al. 2020) keeps whole between its uses."""

    keep_parameters: bool  # gather once per step instead of once per forward and backward of every pass
    keep_gradients: bool  # reduce once per step instead of once per pass


STAGES: dict[int, Stage] = {1: Stage(True, True), 2: Stage(True, False), 3: Stage(False, False)}


def shard_data_parallel(model: Transformer, mesh: Mesh, train: Train) -> None:
    """Hand parameters, gradients and their reduction over the data axes to FSDP2, one group per block.

    Gradients become *sums* over ``dp``, ``shard`` and ``cp`` (the loss is already divided by the global token count).
    With ``bfloat16`` the groups also compute in bf16 from fp32 parameters and reduce in fp32. If the state is
    offloaded, each gather fetches parameters from the host, and gradients go there as soon as they are reduced.
    """
    dtype = train.dtype
    alone = mesh.size("dp", "shard", "cp") == 1 and dtype != "bfloat16" and not train.offloads_state
    if mesh.data_mesh is None or alone:
        return
    data_mesh = mesh.data_mesh["replica", "state"] if mesh.size("dp") > 1 else mesh.data_mesh["state"]
    policy = MixedPrecisionPolicy()
    if dtype == "bfloat16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    away = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if train.offloads_state else OffloadPolicy()
    after: bool | int = mesh.layout.secondary or not STAGES[mesh.layout.zero].keep_parameters
    with near_groups(mesh):
        for block in model.blocks.values():
            fully_shard(block, mesh=data_mesh, reshard_after_forward=after, mp_policy=policy, offload_policy=away)
    # The root group (embedding, norm, head) is needed at both ends of a pass: it stays gathered in between.
    fully_shard(model, mesh=data_mesh, reshard_after_forward=False, mp_policy=policy, offload_policy=away)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # a plain sum, which gloo knows as well


def begin_pass(model: Transformer, mesh: Mesh, last: bool) -> None:
    """Tell FSDP2 what the coming pass of a step may postpone."""
    if not isinstance(model, FSDPModule):
        return
    stage = STAGES[mesh.layout.zero]
    model.set_requires_gradient_sync(last or not stage.keep_gradients)
    model.set_requires_all_reduce(last)
    model.set_reshard_after_backward(last or not stage.keep_parameters)
    model.set_is_last_backward(last)


def end_evaluation(model: Transformer, mesh: Mesh) -> None:
    """Forget the copies that ``layout.secondary`` has kept for a backward that did not come: values may change."""
    for module in model.modules() if mesh.near_mesh is not None else ():
        if isinstance(module, FSDPModule):
            module.reshard()
