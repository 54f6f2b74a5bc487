"""Which experts a token goes to, what they weigh, and what keeps their loads equal.

Routers count in whole numbers, by document, tokens that are no padding. What follows from the counts is therefore the
same under every layout: the losses that balance the loads are sums over documents, and a bias moves once per step.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from spmd_types import rules

from weft.data.batch import Batch
from weft.layout.boundary import (
    BY_DATA,
    OWN,
    Kind,
    R,
    V,
    declare,
    own_share,
    share_of_sum,
    untyped,
)
from weft.layout.mesh import Mesh
from weft.models.module import Module
from weft.recipe import ModelShape
from weft.shapes.parameters import Table

T = torch.Tensor

#: What ranks send each other for the sake of experts: rows of tokens with all that goes along, weights lent for a pass
#: with their gradients, and experts that change their owner with all of their state.
SENT = ("tokens", "copies", "moves")


class Choice(NamedTuple):
    """The experts of each token, ``ids`` int64 ``[tokens, k]``, and their ``weights`` alike.

    A choice that is dropped has the id after those of all experts, which nobody has.
    """

    weights: T
    ids: T


@dataclass
class RouterPass:
    """What routers see of a forward and backward pass beside activations, and what they count in it.

    ``documents``: int64 ``[tokens]``, -1 for padding; ``positions`` of tokens in them; ``lengths``: tokens of each on
    all ranks, ``[documents]``.
    ``step_tokens``: those of the step that are no padding, asked for in backward. ``chosen``, by layer: how often each
    document's tokens chose each expert, int64 ``[documents, experts]``; of this rank's tokens in ``own``. ``dropped``,
    alike: how many choices of this rank's tokens were. Layers write down what they counted, so that a block that is run
    again for backward counts the same once.
    """

    documents: T
    positions: T
    lengths: T
    step_tokens: Callable[[], T]
    own: dict[int, T] = field(default_factory=dict)
    chosen: dict[int, T] = field(default_factory=dict)
    dropped: dict[int, T] = field(default_factory=dict)

    @property
    def real(self) -> T:
        """Whether a token is no padding, ``[tokens]``."""
        return self.documents >= 0

    @property
    def rows(self) -> T:
        """Where a token's document is in what is kept by document, ``[tokens]``; padding is given the first."""
        return self.documents.clamp(min=0)


class Loads:
    """How often the experts of every layer were chosen in a step's passes, and the bytes that this rank ``sent``."""

    def __init__(self, shape: ModelShape, mesh: Mesh) -> None:
        self.mixtures, self.mesh = shape.mixtures, mesh
        self.balances = shape.balance_loss > 0 or shape.z_loss > 0
        self.drops = shape.capacity > 0
        self.passes, self.sent = list[RouterPass](), Counter[str]()
        self.step_tokens: Callable[[], T] = lambda: torch.ones(())

    def begin(self, step_tokens: Callable[[], T]) -> None:
        """Begin a step, of so many ``step_tokens``."""
        self.passes, self.step_tokens = [], step_tokens
        # of evaluation; moves come between steps
        self.sent["tokens"] = self.sent["copies"] = 0

    def seen(self, batch: Batch) -> RouterPass:
        """What is counted in a pass over ``batch``."""
        with untyped():
            documents, lengths = batch.documents, batch.cu_seqlens.diff()
            if documents is None:  # one, for all that is known
                documents = torch.zeros_like(batch.tokens)
                lengths = batch.cu_seqlens[-1:]
            tokens = torch.stack((documents, batch.positions))
            if self.mesh.layout.folds_tp:
                tokens = tokens.chunk(self.mesh.size("tp"), dim=2)[self.mesh.rank("tp")]
            lengths = lengths.to(documents.device)
            documents, positions = tokens.flatten(1).unbind()
            self.passes.append(
                RouterPass(documents, positions, lengths, lambda: self.step_tokens())
            )
        return self.passes[-1]

    def share(self) -> T:
        """This rank's share of the step's choices: of each expert of all layers in turn, ``[all experts]`` float64.

        Where there is a capacity, how many each layer has dropped comes after these.
        """
        shares = []
        with untyped():
            for layer, count in self.mixtures.items():
                shares.append(
                    self._sum(
                        [
                            seen.own[layer].sum(0)
                            for seen in self.passes
                            if layer in seen.own
                        ],
                        count,
                    )
                )
            for layer in self.mixtures if self.drops else ():
                shares.append(
                    self._sum(
                        [
                            seen.dropped[layer]
                            for seen in self.passes
                            if layer in seen.dropped
                        ],
                        1,
                    )
                )
            own_counts = torch.cat([share.double() for share in shares])
        by_stage = by_token(self.mesh) | {"pp": V}
        return share_of_sum(
            declare(own_counts, self.mesh, **by_stage), self.mesh, **by_stage
        )

    def share_of_bytes(self) -> T:
        """This rank's share of the bytes sent in the step, by :data:`SENT`; moves are those since the step before."""
        shares = [own_share(self.sent[what], self.mesh, **OWN) for what in SENT]
        self.sent.clear()
        return torch.stack(shares)

    def _sum(self, counts: list[T], count: int) -> T:
        """Of the passes' ``count`` numbers each; zeros of a layer that other stages have."""
        if counts:
            return torch.stack(counts).sum(0)
        return torch.zeros(count, device=self.mesh.device)


def by_token(mesh: Mesh) -> dict[str, Kind]:
    """The types of what tokens choose."""
    return BY_DATA | {"tp": V if mesh.layout.folds_tp else R}


def by_layer(
    mixtures: Mapping[int, int], loads: Sequence[int]
) -> dict[int, Sequence[int]]:
    """By layer how often its experts were chosen, from what :meth:`Loads.share` adds up to.

    ``mixtures``: experts by layer.
    """
    ends = [0, *accumulate(mixtures.values())]
    return {
        layer: loads[lo:hi]
        for layer, (lo, hi) in zip(mixtures, pairwise(ends), strict=True)
    }


class Router(Module):
    """Chooses experts for tokens (see :class:`weft.recipe.ModelShape`), in at least float32.

    ``bias`` is added to what is chosen by, and never to what weighs. ``load``: the experts' shares of the last step's
    choices. ``own``: each rank of ``tp`` routes its own tokens, and not all of them.
    """

    def __init__(self, shape: ModelShape, mesh: Mesh, layer: int, table: Table) -> None:
        super().__init__(mesh, table, f"blocks.{layer}.ffn.router")
        self.shape = shape
        self.layer = layer
        self.count = shape.experts_of(layer)
        self.own = mesh.layout.folds_tp
        self.weight("table", whole=True)
        for statistic in ("bias", "load"):
            if self.inside(statistic) in table:
                self.weight(statistic)

    def forward(self, x: T, seen: RouterPass | None) -> Choice:
        """``x``: ``[tokens, embed]``."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.table.to(wide))  # [tokens, experts]
        if self.shape.router == "sigmoid":
            scores = logits.sigmoid()
            ids = self._best(scores.detach() + self.bias, by=2)
        else:
            scores = logits.softmax(-1)
            ids = self._best(
                logits.detach()
                if self.shape.router == "post-softmax"
                else scores.detach(),
                by=1,
            )
        weights = self._weights(logits, scores, ids)
        if seen is None:
            return Choice(weights, ids)
        with untyped():
            self._count(ids, seen)
        if self.shape.balance_loss:
            probabilities = (
                scores / scores.sum(-1, keepdim=True)
                if self.shape.router == "sigmoid"
                else scores
            )
            weights = _WithLoss.apply(
                weights, probabilities, self._balance_gradient(seen)
            )
        if self.shape.z_loss:
            weights = _WithLoss.apply(
                weights, logits, self._z_gradient(logits.detach(), seen)
            )
        return Choice(
            weights, self._within_capacity(ids, seen) if self.shape.capacity else ids
        )

    def _best(self, scores: T, by: int) -> T:
        """The ids of the best experts, of the best groups by their ``by`` best: ``[tokens, k]``."""
        shape = self.shape
        if shape.router_groups > shape.router_top_groups:
            # [tokens, groups, experts of each]
            grouped = scores.unflatten(-1, (shape.router_groups, -1))
            merit = grouped.topk(min(by, grouped.shape[-1])).values.sum(-1)
            left_out = torch.ones_like(merit).scatter(
                -1, merit.topk(shape.router_top_groups).indices, 0
            )
            scores = grouped.masked_fill(left_out[..., None] > 0, -torch.inf).flatten(
                -2
            )
        return scores.topk(shape.experts_per_token).indices

    def _weights(self, logits: T, scores: T, ids: T) -> T:
        shape = self.shape
        if shape.router == "post-softmax":
            return logits.gather(-1, ids).softmax(-1) * shape.router_scale
        weights = scores.gather(-1, ids)
        if shape.router_norm:
            weights = weights / (
                weights.sum(-1, keepdim=True)
                + (1e-20 if shape.router == "sigmoid" else 0)
            )
        return weights * shape.router_scale

    @torch.no_grad()
    def _count(self, ids: T, seen: RouterPass) -> None:
        """Write down how often this layer's experts were chosen, by this rank's tokens and by whole documents."""
        cells, real = self._cells(ids, seen)
        counts = torch.zeros(
            len(seen.lengths) * self.count, dtype=torch.int64, device=ids.device
        )
        counts = counts.scatter_add(0, cells.flatten(), real.flatten().long()).view(
            -1, self.count
        )
        seen.own[self.layer] = counts
        if self.shape.balance_loss and self.shape.balance != "step":
            for group in self._sharing_documents():
                counts = counts.clone()
                dist.all_reduce(counts, group=group)
        seen.chosen[self.layer] = counts

    def _cells(self, ids: T, seen: RouterPass) -> tuple[T, T]:
        """A number for the document and the expert of each choice, and whether its token is no padding."""
        # each [tokens, k]
        return seen.rows[:, None] * self.count + ids, seen.real[:, None].expand_as(ids)

    def _sharing_documents(self) -> list[dist.ProcessGroup]:
        """The groups over which documents are cut."""
        axes = ("cp", "tp") if self.own else ("cp",)
        return [self.mesh.group(axis) for axis in axes if self.mesh.size(axis) > 1]

    def _within_capacity(self, ids: T, seen: RouterPass) -> T:
        """``ids`` without the choices of experts that earlier tokens of the same document have filled.

        By position, and not by weight, a token's choices depend on none that comes after it, nor on any rounding.
        """
        with untyped():
            cells, real = self._cells(ids, seen)
            # [tokens, k]
            codes = torch.where(real, (cells << 31) + seen.positions[:, None], -1)
            every = codes.flatten()
            for group in self._sharing_documents():
                parts = [torch.empty_like(every) for _ in range(group.size())]
                dist.all_gather(parts, every, group=group)
                every = torch.cat(parts)
            every = every.sort().values
            before = torch.searchsorted(every, codes) - torch.searchsorted(
                every, cells << 31
            )
            share = self.shape.capacity * self.shape.experts_per_token / self.count
            room = (seen.lengths.double() * share).ceil().long()[seen.rows]
            dropped = (before >= room[:, None]) & real
            seen.dropped[self.layer] = dropped.sum()[None]
            kept = torch.where(dropped, self.count, ids)
        return declare(kept, self.mesh, **by_token(self.mesh))

    def _balance_gradient(self, seen: RouterPass) -> Callable[[], T]:
        """The gradient of the loss that balances the loads, with respect to each token's probabilities.

        The loss is linear in these: ``balance_loss * experts * sum(f * p)``, where ``f`` are the experts' shares of
        what was chosen (Fedus et al. 2021, Switch).
        """
        shape = self.shape
        dtype = torch.promote_types(self.table.dtype, torch.float32)

        def gradient() -> T:
            if shape.balance == "step":
                # [documents, experts]
                shares = self.load.to(dtype)[None].expand(len(seen.lengths), -1)
            else:
                layers = len(seen.chosen) if shape.balance == "huggingface" else 1
                chosen = (
                    torch.stack(list(seen.chosen.values())).sum(0)
                    if layers > 1
                    else seen.chosen[self.layer]
                )
                per_token = (
                    layers**2
                    if shape.balance == "huggingface"
                    else shape.experts_per_token
                )
                shares = chosen.to(dtype) / (
                    seen.lengths.to(dtype)[:, None] * per_token
                )
            factor = self._factor(seen, dtype) * (shape.balance_loss * self.count)
            return shares[seen.rows] * factor[:, None]

        return gradient

    def _z_gradient(self, logits: T, seen: RouterPass) -> Callable[[], T]:
        """That of the mean squared log-sum-exp of the logits (Zoph et al. 2022, ST-MoE)."""

        def gradient() -> T:
            z = (
                2
                * self.shape.z_loss
                * logits.logsumexp(-1)
                * self._factor(seen, logits.dtype)
            )
            return logits.softmax(-1) * z[:, None]

        return gradient

    def _factor(self, seen: RouterPass, dtype: torch.dtype) -> T:
        """What a token counts in a mean over the step's tokens, ``[tokens]``; on one of the ranks that see it."""
        counted = seen.real & (self.own or self.mesh.rank("tp") == 0)
        return counted.to(dtype) / seen.step_tokens().to(dtype).clamp(min=1)

    @torch.no_grad()
    def learn_from(self, loads: Sequence[int]) -> None:
        """Take in how often each expert was chosen in a whole step: the same numbers, so the same result, anywhere."""
        counts = torch.tensor(loads, dtype=torch.float64)
        if "bias" in self.logical and self.shape.bias_rate:
            self.bias.add_(
                (counts.mean() - counts).sign().to(self.bias),
                alpha=self.shape.bias_rate,
            )
        if "load" in self.logical and counts.sum() > 0:
            self.load.copy_(counts / counts.sum())


class _WithLoss(torch.autograd.Function):
    """``y`` as it is; in backward the gradient of ``x`` is ``gradient()``, that of a loss beside the model's.

    So a loss that is no part of the output reaches what it is of, in whatever order stages run backward, and what it
    depends on need not be known before.
    """

    @staticmethod
    def spmd_typecheck(*, y, x, gradient):  # type: ignore[no-untyped-def]
        rules.ignore(x)
        return rules.einsum("tk->tk", y)

    @staticmethod
    def forward(ctx, y, x, gradient):  # type: ignore[no-untyped-def]
        ctx.gradient = gradient
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, ctx.gradient(), None
