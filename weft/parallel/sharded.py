"""State that hooks of autograd gather and reduce, by FSDP2; no other file uses FSDP2.

FSDP2 gathers parameters and reduces gradients from hooks of autograd, over replicas (``dp``) and the ranks that share
in holding the state (``shard`` and ``cp``). A table says what each ZeRO stage keeps whole between uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from weft.errors import WeftError
from weft.layout.axes import FOLDED
from weft.layout.placement import expert_table, rank_table
from weft.parallel.state import Held, State, Unit, by_block

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.models.transformer import Transformer
    from weft.recipe import Memory, Train


class Kept(NamedTuple):
    """Tensors that a ZeRO stage (Rajbhandari et al. 2020) keeps whole on every rank, instead of only this rank's
    shard.

    ``parameters``: whether parameters stay whole for a step. If so, they are gathered once per step; if not, in
    forward and again in backward of every pass. ``gradients``: whether gradients stay whole for a step. If so, they
    are reduced once per step; if not, after every pass.
    """

    # gather once per step instead of once per forward and backward of every pass
    parameters: bool
    gradients: bool  # reduce once per step instead of once per pass


STAGES: dict[int, Kept] = {
    1: Kept(True, True),
    2: Kept(True, False),
    3: Kept(False, False),
}


@dataclass(eq=False)
class HookUnit(Unit):
    """A unit that FSDP2 gathers and reduces from hooks of autograd: the parameters of one FSDP2 module.

    The module is a block, or the root with embedding, norm and head. ``kept``: the tensors that stay whole between
    uses. It decides whether FSDP2 reduces gradients after each pass or only after the last pass of a step.
    """

    module: FSDPModule
    kept: Kept

    def gather(self) -> None:
        self.module.unshard()

    def release(self, drop: bool) -> None:
        self.module.reshard()

    def begin_pass(self, last: bool) -> None:
        self.module.set_requires_gradient_sync(
            last or not self.kept.gradients, recurse=False
        )
        self.module.set_requires_all_reduce(last, recurse=False)
        self.module.set_reshard_after_backward(
            last or not self.kept.parameters, recurse=False
        )
        self.module.set_is_last_backward(last)


def shard_data_parallel(
    model: Transformer, mesh: Mesh, train: Train, memory: Memory
) -> None:
    """Hand the model's parameters and gradients to FSDP2, which shards them over the data axes, a group per block.

    Gradients become *sums* over ``dp``, ``shard`` and ``cp`` (the loss is already divided by the global token count).
    If ``train.dtype`` is bfloat16, groups compute in bf16 from fp32 parameters and reduce in fp32. If ``memory``
    offloads the state, each gather fetches parameters from the host, and gradients go there as soon as they are
    reduced.
    """
    data_mesh = _data_mesh(mesh)
    policy = MixedPrecisionPolicy()
    if train.dtype == "bfloat16":
        policy = MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, cast_forward_inputs=False
        )
    away = OffloadPolicy()
    if memory.offloads_state:
        away = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
    drops = not STAGES[mesh.layout.zero].parameters
    described = dict(model.logical_parameters())
    everywhere = {
        p for name, p in model.named_parameters() if described[name].everywhere
    }
    placement = _expert_placement(model, mesh) if mesh.size(FOLDED) > 1 else None
    if torch.__version__ < "2.13" and not all(
        p.is_floating_point() for p in model.parameters()
    ):
        _let_bytes_be_sharded()
    with _near_groups(mesh):
        for block, has_backward in _with_backward(model):
            after = mesh.layout.secondary if has_backward else 0
            fully_shard(
                block, mesh=data_mesh, reshard_after_forward=after or drops, mp_policy=policy, offload_policy=away,
                ignored_params=everywhere, shard_placement_fn=placement,
            )  # fmt: skip
    # The root group (embedding, norm, head) is needed at both ends of a pass: it stays gathered in between.
    fully_shard(
        model, mesh=data_mesh, reshard_after_forward=False, mp_policy=policy, offload_policy=away,
        ignored_params=everywhere,
    )  # fmt: skip
    for module in _modules(model):
        module.set_gradient_divide_factor(1.0)
        # a plain sum, which gloo knows as well
        module.set_force_sum_reduction_for_comms(True)


def _with_backward(model: Transformer) -> Iterator[tuple[nn.Module, bool]]:
    """Yield every block, and whether backward goes through it: whether anything up to its end learns.

    FSDP2 would prefetch the others in backward from the nearest ranks, and take what arrives for all ranks' parts.
    """
    inputs = getattr(model, "embedding", model)  # a plugin's model has its own parts
    reached = any(p.requires_grad for p in inputs.parameters())
    for block in model.blocks.values():
        reached = reached or any(p.requires_grad for p in block.parameters())
        yield block, reached


def _data_mesh(mesh: Mesh) -> DeviceMesh:
    """Return the mesh of ranks with the same part of the model: replicas of the state, if any, by sharers of it."""
    if mesh.size("dp") == 1:
        return DeviceMesh.from_group(
            mesh.group("state"), mesh.device.type, mesh_dim_names=("state",)
        )
    ranks = torch.tensor(mesh.data_ranks).view(mesh.size("dp"), -1).sort(dim=1).values
    return DeviceMesh.from_group(
        [mesh.group("dp"), mesh.group("state")],
        mesh.device.type,
        mesh=ranks,
        mesh_dim_names=("replica", "state"),
    )


def _expert_placement(model: Transformer, mesh: Mesh) -> Callable[[nn.Parameter], Any]:
    """Return the placement of a block's parameters: experts are sharded over the ranks with the same experts.

    PyTorch has this for mixtures of experts since 2.13, without a public name for the result. Before 2.13, experts need
    an FSDP2 module of their own, whose hooks do not fit experts that run in several pieces: weights are freed after the
    backward of one piece.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import (
            FSDPMeshInfo,
            HSDPMeshInfo,
            ShardPlacementResult,
        )
    except ImportError:
        raise WeftError(
            "layout.ep needs PyTorch 2.13 where pp = 1 and weights are in memory, and this "
            f"is {torch.__version__}; set layout.pp = 2 or memory.weights = 'file', or leave layout.ep out"
        ) from None
    groups = [mesh.group("expert_dp"), mesh.group("expert_state")]
    if mesh.size("expert_dp") == 1:
        names: tuple[str, ...] = ("expert_state",)
        sharing = DeviceMesh.from_group(
            groups[1], mesh.device.type, mesh_dim_names=names
        )
        info = FSDPMeshInfo(sharing, shard_mesh_dim=0)
    else:
        table = expert_table(mesh.layout, rank_table(mesh.layout))
        at = (
            mesh.rank("pp"),
            slice(None),
            slice(None),
            mesh.rank(FOLDED),
            mesh.rank("tp"),
        )
        here = torch.from_numpy(table[0][at].copy())
        names = ("replica", "expert_state")
        sharing = DeviceMesh.from_group(
            groups, mesh.device.type, mesh=here, mesh_dim_names=names
        )
        info = HSDPMeshInfo(sharing, shard_mesh_dim=1, replicate_mesh_dim=0)
    described = dict(model.logical_parameters())
    spread = {
        p for name, p in model.named_parameters() if described[name].cut_by(FOLDED)
    }
    placement = ShardPlacementResult(None, info)
    return lambda parameter: placement if parameter in spread else None


def sharded_state(
    model: Transformer, mesh: Mesh, make: Callable[..., State] = State
) -> State:
    """Build the state of a model that :func:`shard_data_parallel` has sharded; ``make`` creates it from units.

    The model's parameters must be allocated.
    """
    described = dict(model.logical_parameters())
    held: dict[str, Held] = {}
    whole = []
    for name, parameter in model.named_parameters():
        logical, local = described[name], parameter.detach()
        placement = mesh.place.hold(logical)
        if logical.everywhere:
            whole.append(Held(name, logical, placement, local, parameter))
            continue
        assert isinstance(local, DTensor)
        own = local.to_local()
        held[name] = Held(name, logical, placement, own, parameter, _local_gradient)
    modules = dict(model.blocks.named_children())
    units: list[Unit] = [Unit(whole)] if whole else []
    for block, of_block in by_block(held).items():
        module = modules.get(block, model)
        assert isinstance(module, FSDPModule)
        units.append(HookUnit(of_block, module, STAGES[mesh.layout.zero]))
    return make(units)


def _local_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


@contextmanager
def _near_groups(mesh: Mesh) -> Iterator[None]:
    """Make FSDP2 keep parameters over the group ``near`` of ``mesh`` where it is given a number of ranks.

    By itself FSDP2 makes new process groups for every block, of the ranks of one data mesh only: ranks of ``tp`` and
    ``pp`` would not agree on them. So it gets the group that all ranks have made together, which takes a private
    function. Tested with PyTorch 2.11 and 2.13.
    """
    if not mesh.size("near"):
        yield
        return
    state, near = mesh.group("state"), mesh.group("near")
    # FSDP2 wants a second axis beside that of the neighbours, and does not use its group.
    ranks = torch.tensor(dist.get_process_group_ranks(state)).view(
        -1, mesh.size("near")
    )
    both = DeviceMesh.from_group(
        [state, near], mesh.device.type, mesh=ranks, mesh_dim_names=("apart", "near")
    )
    try:
        from torch.distributed.fsdp._fully_shard import _fully_shard as fsdp
        from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

        info = HSDPMeshInfo(both, shard_mesh_dim=1, replicate_mesh_dim=0)
        usual = fsdp._get_post_forward_mesh_info
        patch = mock.patch.object(
            fsdp,
            "_get_post_forward_mesh_info",
            lambda after, over: usual(after, over) if after is True else info,
        )
        patch.start()
    except (ImportError, AttributeError, TypeError) as error:
        raise WeftError(
            f"layout.secondary does not work with this PyTorch ({error}); leave it out"
        ) from None
    try:
        yield
    finally:
        patch.stop()


@cache
def _let_bytes_be_sharded() -> None:
    """Let FSDP2 shard parameters of bytes, such as QLoRA's codes, as FSDP2 does by itself since PyTorch 2.13.

    Before 2.13, FSDP2 asks each new shard for a gradient before FSDP2 looks whether the parameter learns, and PyTorch
    refuses that of bytes. FSDP2 also gathers bytes in the type of mixed precision. There is no public way round either,
    so that two private names are replaced, for good: a shard of floating-point numbers is made as before. Tested with
    PyTorch 2.11.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp

    def parameter(
        data: torch.Tensor, requires_grad: bool | None = None
    ) -> nn.Parameter:
        learns = data.is_floating_point() if requires_grad is None else requires_grad
        return nn.Parameter(data, learns)

    usual = fsdp.FSDPParam.init_dtype_attrs

    def init_dtype_attrs(self: Any, policy: MixedPrecisionPolicy) -> None:
        casts = self.sharded_param.is_floating_point()
        usual(self, policy if casts else MixedPrecisionPolicy())

    names = SimpleNamespace(Module=nn.Module, Parameter=parameter)
    mock.patch.object(fsdp, "nn", names).start()
    mock.patch.object(fsdp.FSDPParam, "init_dtype_attrs", init_dtype_attrs).start()
