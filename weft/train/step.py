"""The training step: the same lines for one device and for every layout.

Gradients are reduced in two places only, both before clipping: FSDP2 sums over the data axes while backward runs
(:mod:`weft.parallel.data`), and :func:`reduce_over_tp` sums what every ``tp`` rank computed a share of.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import record_function

from weft.data.batch import Batch
from weft.layout.boundary import I, R, V, declare, own_number, share_of_sum, sum_over_tp, world_sum
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.parallel.build import LocalPart
from weft.parallel.data import begin_pass, end_evaluation
from weft.parallel.hybrid import begin_step, share_pass
from weft.train.optim import set_gradients


class StepResult(NamedTuple):
    """``loss`` is the mean over the step's real tokens; a skipped step changed nothing."""

    loss: float
    grad_norm: float
    tokens: int
    skipped: bool
    stop: bool


def collect(parts: Sequence[LocalPart]) -> dict[str, torch.Tensor]:
    """The gradients that backward left on this rank. A parameter without one has gradient zero."""
    return {p.name: p.grad if p.grad is not None else torch.zeros_like(p.local) for p in parts}


def count_tokens(batches: Sequence[Batch], mesh: Mesh) -> torch.Tensor:
    """Real tokens of the whole step, over all ranks: the one denominator of the loss. Scalar, float64."""
    return world_sum(share_of_tokens(batches, mesh), mesh)


def share_of_tokens(batches: Sequence[Batch], mesh: Mesh) -> torch.Tensor:
    """This rank's share of the step's real tokens: ranks with the same data count once."""
    types = {"pp": R, "dp": V, "shard": V, "cp": V, "tp": R}
    mine = own_number(sum(b.real_tokens for b in batches), mesh, **types)
    return share_of_sum(mine, mesh, **types)


class PendingSum:
    """A sum over the world that is under way, of every rank's ``share``; call it for the value."""

    def __init__(self, share: torch.Tensor) -> None:
        self.value = share.clone()
        self.work = dist.all_reduce(self.value, async_op=True)

    def __call__(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.value


def pass_loss(model: Transformer, batch: Batch, total: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """This rank's share of the step's mean loss, equal on ``tp``. ``total``: the step's real tokens."""
    loss = model(batch.tokens, batch.positions, batch.cu_seqlens, labels=batch.labels)
    return share_of_sum(loss, mesh, dp=V, shard=V, cp=V) / total


def accumulate(
    model: Transformer, batches: Sequence[Batch], mesh: Mesh, routes: Sequence[Sequence[int]] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward and backward of every pass. Returns this rank's share of the loss and the step's real tokens.

    ``routes``: the blocks that each pass runs (in turn, if there are more passes), where these are not all.
    """
    if model.pipeline is not None:
        count = PendingSum(share_of_tokens(batches, mesh))  # due when the first microbatch has passed all stages
        return model.pipeline.accumulate(batches, lambda: count().clamp(min=1)), count()
    begin_step(model, batches, mesh)
    total = count_tokens(batches, mesh)
    shares = []
    for i, batch in enumerate(batches):
        begin_pass(model, mesh, last=i == len(batches) - 1)
        share_pass(model, batch.group)
        model.route = routes[i % len(routes)] if routes else None
        share = pass_loss(model, batch.to(mesh.device), total.clamp(min=1), mesh)
        share.backward()
        shares.append(share.detach())
    model.route = None
    share_pass(model, None)
    return torch.stack(shares).sum(), total


def moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``x`` on ``device``: where the state is offloaded, gradients are on the host and sums are not."""
    return x if x.device == device else x.to(device)


@torch.no_grad()
def reduce_over_tp(grads: dict[str, torch.Tensor], parts: Sequence[LocalPart], mesh: Mesh) -> dict[str, torch.Tensor]:
    """Sum, in one call, the gradients of what every ``tp`` rank holds whole (norms, shared key/value heads)."""
    whole = [p.name for p in parts if p.logical.whole]
    if mesh.size("tp") == 1 or not whole:
        return grads
    flat = torch.cat([grads[name].flatten() for name in whole])
    place = flat.device
    flat = moved(sum_over_tp(moved(flat, mesh.device), mesh), place)  # they may be on the host
    shares = flat.split([grads[name].numel() for name in whole])
    return grads | {name: share.view(grads[name].shape) for name, share in zip(whole, shares, strict=True)}


@torch.no_grad()
def square_norm(grads: dict[str, torch.Tensor], parts: Sequence[LocalPart], mesh: Mesh) -> torch.Tensor:
    """This rank's share of the squared global gradient norm. Every element of the model counts once in the world."""
    # FSDP2 leaves each state rank its rows, the same on every replica; stages hold different parameters.
    data = {"pp": V, "dp": I, "shard": V, "cp": V}
    shares = []
    for whole, tp in ((True, I), (False, V)):
        mine = [p.name for p in parts if p.logical.whole is whole and p.counted]
        tensors = [grads[name] for name in mine if grads[name].numel()]
        if tensors:
            norm = torch.nn.utils.get_total_norm([declare(g, mesh, **data, tp=tp) for g in tensors])
            square = moved(norm.double().square(), mesh.device)
            shares.append(share_of_sum(square, mesh, **data, tp=tp))
    return torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float64, device=mesh.device)


def gradients(
    model: Transformer,
    parts: Sequence[LocalPart],
    batches: Sequence[Batch],
    mesh: Mesh,
    stop: bool = False,
    routes: Sequence[Sequence[int]] = (),
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Everything of a step up to the clip: reduced local gradients, and the world's sums.

    The sums are one vector of float64 from one all-reduce: mean loss, squared gradient norm, ranks that wish to stop,
    real tokens.
    """
    loss, total = accumulate(model, batches, mesh, routes)
    with record_function("weft:optimizer"):
        grads = reduced(model, parts, mesh)
        return grads, world_sum(shares_of_sums(loss, grads, parts, total, stop, mesh), mesh)


def reduced(model: Transformer, parts: Sequence[LocalPart], mesh: Mesh) -> dict[str, torch.Tensor]:
    """The local gradients, summed over all that hold or compute a share of the same parameter."""
    grads = reduce_over_tp(collect(parts), parts, mesh)
    return grads if model.pipeline is None else model.pipeline.reduce_copies(grads)


def shares_of_sums(
    loss: torch.Tensor,
    grads: dict[str, torch.Tensor],
    parts: Sequence[LocalPart],
    total: torch.Tensor,
    stop: bool,
    mesh: Mesh,
) -> torch.Tensor:
    """This rank's shares of the world's sums (see :func:`gradients`), float64 ``[4]``."""
    everywhere = {"pp": V, "dp": V, "shard": V, "cp": V, "tp": V}
    shares = (
        share_of_sum(loss, mesh, tp=I),
        square_norm(grads, parts, mesh),
        share_of_sum(own_number(stop, mesh, **everywhere), mesh, **everywhere),
        share_of_sum(total, mesh, pp=R, dp=R, shard=R, cp=R, tp=R),
    )
    return torch.stack(shares)


def judge(sums: torch.Tensor) -> StepResult:
    """What the world's sums say of a step."""
    loss, square, stops, tokens = sums.tolist()
    norm = math.sqrt(square) if square >= 0 else math.nan
    return StepResult(loss, norm, round(tokens), not (math.isfinite(norm) and math.isfinite(loss)), stops > 0)


def update(
    optimizer: torch.optim.Optimizer, grads: dict[str, torch.Tensor], parts: Sequence[LocalPart], lr: float
) -> None:
    """Let the optimizer take its step with these gradients."""
    set_gradients(optimizer, grads, parts)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()


def clear_gradients(model: Transformer, parts: Sequence[LocalPart]) -> None:
    model.zero_grad()
    for p in parts:
        p.parameter.grad = None


def clipped(grads: dict[str, torch.Tensor], norm: float, clip: float) -> None:
    """Scale the gradients in place to the global norm ``clip``, if that is above 0 and below theirs."""
    if clip and norm > clip:
        torch._foreach_mul_(list(grads.values()), clip / (norm + 1e-6))


def train_step(
    model: Transformer,
    parts: Sequence[LocalPart],
    batches: Sequence[Batch],
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    *,
    lr: float,
    clip: float,
    stop: bool = False,
    inspect: Callable[[dict[str, torch.Tensor]], None] | None = None,
    routes: Sequence[Sequence[int]] = (),
    before_update: Callable[[], None] = lambda: None,
) -> StepResult:
    """One optimizer step. ``stop`` is this rank's wish to end the run; the result says whether any rank has it.

    A loss or gradient norm that is not finite skips the update, on all ranks alike. ``inspect`` sees the reduced,
    unclipped local gradients. ``routes``: see :func:`accumulate`. ``before_update`` returns when parameters and
    optimizer state may change.
    """
    grads, sums = gradients(model, parts, batches, mesh, stop, routes)
    with record_function("weft:optimizer"):
        result = judge(sums)
        if inspect is not None:
            inspect(grads)
        before_update()
        if not result.skipped:
            clipped(grads, result.grad_norm, clip)
            update(optimizer, grads, parts, lr)
        clear_gradients(model, parts)
    return result


@torch.no_grad()
def evaluate(model: Transformer, steps: Iterable[Sequence[Batch]], mesh: Mesh) -> float:
    """Mean loss per real token over some steps' batches, the same on all ranks."""
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    counted = mesh.rank("pp") == 0
    for batches in steps:
        if model.pipeline is not None:
            tokens = own_number(counted * sum(b.real_tokens for b in batches), mesh)
            sums += torch.stack((model.pipeline.evaluate(batches), tokens))
            continue
        for batch in batches:
            batch = batch.to(mesh.device)
            loss = model(batch.tokens, batch.positions, batch.cu_seqlens, labels=batch.labels)
            sums += torch.stack((loss, own_number(batch.real_tokens, mesh)))
    end_evaluation(model, mesh)
    loss, tokens = world_sum(share_of_sum(sums, mesh, dp=V, shard=V, cp=V, tp=R), mesh).tolist()
    return loss / max(1.0, tokens)
