"""Routers: the experts of each token, the weights of the experts, and losses and biases that keep their loads equal.

Routers count tokens that are not padding, by document and in integers. All that follows from the counts is therefore
the same under every layout: the losses that balance the loads are sums over documents, and a bias changes once per
step.
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
from weft.models.numbers import wide
from weft.recipe import ModelShape
from weft.shapes.parameters import Table

T = torch.Tensor

#: Kinds of bytes that ranks send each other for experts: rows of tokens, weights lent for a pass and their gradients,
#: and experts that change their owner with all of their state.
SENT = ("tokens", "copies", "moves")


class Choice(NamedTuple):
    """The experts that each token is routed to.

    ``weights``: factors of the experts' results, ``[tokens, k]``; ``ids``: numbers of the experts, int64 ``[tokens,
    k]``. If a full expert drops a route, the number in ``ids`` is the count of experts, which no expert has.
    """

    weights: T
    ids: T


@dataclass
class RouterPass:
    """What routers need in a forward and backward pass besides activations, and the counts that they record.

    The counts ``own``, ``chosen`` and ``dropped`` are dicts by the index of the layer. Counts are assigned, not added,
    so that a block that runs again for backward counts once.

    Attributes:
        ``documents``: index of each token's document, int64 ``[tokens]``; -1 for padding.
        ``positions``: position of each token in its document, ``[tokens]``.
        ``lengths``: number of tokens of each document on all ranks, ``[documents]``.
        ``step_tokens``: a function that returns, in backward, the number of the step's tokens that are not padding.
        ``own``: how many of this rank's tokens of each document were routed to each expert, int64 ``[documents,
            experts]``.
        ``chosen``: like ``own``, but for the documents' tokens on all ranks; only if the balancing loss needs it.
        ``dropped``: the number of this rank's routes that a full expert dropped.
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
        """Mask of the tokens that are not padding, bool ``[tokens]``."""
        return self.documents >= 0

    @property
    def rows(self) -> T:
        """Index of each token's document, ``[tokens]``; 0 for padding. It selects each token's row from tensors that
        have one row per document.
        """
        return self.documents.clamp(min=0)


class Loads:
    """Counts of how many tokens of a training step were routed to each expert of every layer.

    ``shape``: shape of the model; ``mesh``: ranks that share the model. The attribute ``sent`` counts the bytes that
    this rank has sent for experts, by kind (:data:`SENT`).
    """

    def __init__(self, shape: ModelShape, mesh: Mesh) -> None:
        self.mixtures, self.mesh = shape.mixtures, mesh
        self.balances = shape.balance_loss > 0 or shape.z_loss > 0
        self.drops = shape.capacity > 0
        self.passes, self.sent = list[RouterPass](), Counter[str]()
        self.step_tokens: Callable[[], T] = lambda: torch.ones(())

    def begin(self, step_tokens: Callable[[], T]) -> None:
        """Begin the counts of a training step.

        ``step_tokens``: a function that returns the step's number of tokens that are not padding.
        """
        self.passes, self.step_tokens = [], step_tokens
        # of evaluation; moves come between steps
        self.sent["tokens"] = self.sent["copies"] = 0

    def seen(self, batch: Batch) -> RouterPass:
        """Begin a pass over ``batch``, and return the :class:`RouterPass` in which routers record their counts."""
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
        """Return this rank's share of the step's counts of routed tokens, one float64 vector for all layers.

        The vector first has, for each layer with experts, one element per expert: how many tokens were routed to it.
        With a capacity, one element per layer follows: how many routes were dropped because the expert was full. The
        sum of the vectors of all ranks is the count of the step.
        """
        with untyped():
            shares = [
                self._sum(
                    [p.own[layer].sum(0) for p in self.passes if layer in p.own], n
                )
                for layer, n in self.mixtures.items()
            ]
            for layer in self.mixtures if self.drops else ():
                passes = [p.dropped for p in self.passes if layer in p.dropped]
                shares.append(self._sum([dropped[layer] for dropped in passes], 1))
            counts = torch.cat([share.double() for share in shares])
        by_stage = by_token(self.mesh) | {"pp": V}
        counts = declare(counts, self.mesh, **by_stage)
        return share_of_sum(counts, self.mesh, **by_stage)

    def share_of_bytes(self) -> T:
        """Return this rank's share of the bytes sent for experts in the step, by kind in the order of :data:`SENT`.
        Bytes of experts that moved to other ranks before the step are included.
        """
        shares = [own_share(self.sent[what], self.mesh, **OWN) for what in SENT]
        self.sent.clear()
        return torch.stack(shares)

    def _sum(self, counts: list[T], count: int) -> T:
        """Return the sum over passes of ``count`` numbers each; zeros for a layer of another stage."""
        if counts:
            return torch.stack(counts).sum(0)
        return torch.zeros(count, device=self.mesh.device)


def by_token(mesh: Mesh) -> dict[str, Kind]:
    """Return, for each mesh axis, whether a tensor with a row per routed token is equal or different on the ranks of
    the axis, for the type check of distributed tensors.
    """
    return BY_DATA | {"tp": V if mesh.layout.folds_tp else R}


def by_layer(
    mixtures: Mapping[int, int], loads: Sequence[int]
) -> dict[int, Sequence[int]]:
    """Return, for every layer with experts, how many tokens were routed to each of the layer's experts.

    ``mixtures``: number of experts by layer; ``loads``: the sum over ranks of :meth:`Loads.share`.
    """
    ends = [0, *accumulate(mixtures.values())]
    return {
        layer: loads[lo:hi]
        for layer, (lo, hi) in zip(mixtures, pairwise(ends), strict=True)
    }


class Router(Module):
    """Router of a layer: it chooses the experts of each token, and computes in float32 or wider.

    The settings of the router are fields of the model's shape.

    Attributes:
        ``table``: weight that computes the score of each expert from a token, ``[experts, embed]``.
        ``bias``: is added to the scores when experts are chosen. It does not change the weights of the experts'
            results. It is a statistic: no gradient changes it.
        ``load``: for each expert, its fraction of all choices of experts in the last step; a statistic too.
        ``own``: whether each rank of ``tp`` routes only its own tokens.
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
        """Choose the experts of the tokens ``x`` ``[tokens, embed]``.

        ``seen``: where the counts of chosen experts are recorded. If it is None, nothing is counted and no balancing
        loss applies.
        """
        dtype, kind = wide(x.dtype), self.shape.router
        logits = F.linear(x.to(dtype), self.table.to(dtype))  # [tokens, experts]
        if kind == "sigmoid":
            scores = logits.sigmoid()
            ids = self._best(scores.detach() + self.bias, by=2)
        else:
            scores = logits.softmax(-1)
            merit = logits if kind == "post-softmax" else scores
            ids = self._best(merit.detach(), by=1)
        weights = self._weights(logits, scores, ids)
        if seen is None:
            return Choice(weights, ids)
        with untyped():
            self._count(ids, seen)
        if self.shape.balance_loss:
            if kind == "sigmoid":
                scores = scores / scores.sum(-1, keepdim=True)
            weights = _WithLoss.apply(weights, scores, self._balance_gradient(seen))
        if self.shape.z_loss:
            z_gradient = self._z_gradient(logits.detach(), seen)
            weights = _WithLoss.apply(weights, logits, z_gradient)
        if self.shape.capacity:
            ids = self._within_capacity(ids, seen)
        return Choice(weights, ids)

    def _best(self, scores: T, by: int) -> T:
        """Return the ids of the best experts, from the groups that are best by the sum of their ``by`` best: ``[tokens,
        k]``.
        """
        shape = self.shape
        if shape.router_groups > shape.router_top_groups:
            # [tokens, groups, experts of each]
            grouped = scores.unflatten(-1, (shape.router_groups, -1))
            merit = grouped.topk(min(by, grouped.shape[-1])).values.sum(-1)
            best = merit.topk(shape.router_top_groups).indices
            left_out = torch.ones_like(merit).scatter(-1, best, 0)[..., None] > 0
            scores = grouped.masked_fill(left_out, -torch.inf).flatten(-2)
        return scores.topk(shape.experts_per_token).indices

    def _weights(self, logits: T, scores: T, ids: T) -> T:
        shape = self.shape
        if shape.router == "post-softmax":
            return logits.gather(-1, ids).softmax(-1) * shape.router_scale
        weights = scores.gather(-1, ids)
        if shape.router_norm:
            least = 1e-20 if shape.router == "sigmoid" else 0
            weights = weights / (weights.sum(-1, keepdim=True) + least)
        return weights * shape.router_scale

    @torch.no_grad()
    def _count(self, ids: T, seen: RouterPass) -> None:
        """Count how often this layer's experts were chosen, by this rank's tokens and by whole documents."""
        cells, real = self._cells(ids, seen)
        counts = cells.new_zeros(len(seen.lengths) * self.count)
        counts = counts.scatter_add(0, cells.flatten(), real.flatten().long())
        counts = counts.view(-1, self.count)  # [documents, experts]
        seen.own[self.layer] = counts
        if self.shape.balance_loss and self.shape.balance != "step":
            for group in self._sharing_documents():
                counts = counts.clone()
                dist.all_reduce(counts, group=group)
        seen.chosen[self.layer] = counts

    def _cells(self, ids: T, seen: RouterPass) -> tuple[T, T]:
        """Return a number for the document and the expert of each choice, and whether its token is not padding."""
        # each [tokens, k]
        return seen.rows[:, None] * self.count + ids, seen.real[:, None].expand_as(ids)

    def _sharing_documents(self) -> list[dist.ProcessGroup]:
        """Return the groups over which documents are cut."""
        axes = ("cp", "tp") if self.own else ("cp",)
        return [self.mesh.group(axis) for axis in axes if self.mesh.size(axis) > 1]

    def _within_capacity(self, ids: T, seen: RouterPass) -> T:
        """Drop the choices of experts that earlier tokens of the same document have filled.

        Since position decides, and not weight, a token's choices depend neither on later tokens nor on rounding.
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
            first = torch.searchsorted(every, cells << 31)
            before = torch.searchsorted(every, codes) - first
            share = self.shape.capacity * self.shape.experts_per_token / self.count
            room = (seen.lengths.double() * share).ceil().long()[seen.rows]
            dropped = (before >= room[:, None]) & real
            seen.dropped[self.layer] = dropped.sum()[None]
            kept = torch.where(dropped, self.count, ids)
        return declare(kept, self.mesh, **by_token(self.mesh))

    def _balance_gradient(self, seen: RouterPass) -> Callable[[], T]:
        """Return the gradient of the loss that balances the loads, by each token's probabilities.

        The loss is linear in them: ``balance_loss * experts * sum(f * p)``, where ``f`` are the experts' shares of the
        choices (Fedus et al. 2021, Switch).
        """
        shape = self.shape
        dtype = wide(self.table.dtype)

        def gradient() -> T:
            lengths = seen.lengths.to(dtype)[:, None]
            if shape.balance == "step":
                # [documents, experts]
                shares = self.load.to(dtype)[None].expand(len(lengths), -1)
            elif shape.balance == "huggingface":
                chosen = torch.stack(list(seen.chosen.values())).sum(0)
                shares = chosen.to(dtype) / (lengths * len(seen.chosen) ** 2)
            else:
                per_token = shape.experts_per_token
                shares = seen.chosen[self.layer].to(dtype) / (lengths * per_token)
            factor = self._factor(seen, dtype) * (shape.balance_loss * self.count)
            return shares[seen.rows] * factor[:, None]

        return gradient

    def _z_gradient(self, logits: T, seen: RouterPass) -> Callable[[], T]:
        """Return the gradient of the mean squared log-sum-exp of the logits (Zoph et al. 2022, ST-MoE)."""

        def gradient() -> T:
            z = 2 * self.shape.z_loss * logits.logsumexp(-1)
            z = z * self._factor(seen, logits.dtype)
            return logits.softmax(-1) * z[:, None]

        return gradient

    def _factor(self, seen: RouterPass, dtype: torch.dtype) -> T:
        """Return the factor of each token in a mean over the step's tokens, ``[tokens]``; on one of the ranks that see
        it.
        """
        counted = seen.real & (self.own or self.mesh.rank("tp") == 0)
        return counted.to(dtype) / seen.step_tokens().to(dtype).clamp(min=1)

    @torch.no_grad()
    def learn_from(self, loads: Sequence[int]) -> None:
        """Update ``bias`` and ``load`` after a training step, identically on every rank.

        ``loads``: how many tokens of the whole step were routed to each expert of this layer.
        """
        counts = torch.tensor(loads, dtype=torch.float64)
        if "bias" in self.logical and self.shape.bias_rate:
            missing = (counts.mean() - counts).sign().to(self.bias)
            self.bias.add_(missing, alpha=self.shape.bias_rate)
        if "load" in self.logical and counts.sum() > 0:
            self.load.copy_(counts / counts.sum())


class _WithLoss(torch.autograd.Function):
    """Return ``y``; in backward the gradient of ``x`` is ``gradient()``, that of a loss beside the model's.

    A loss that is no part of the output thus reaches its inputs, in whatever order stages run backward, and values that
    it depends on need not be known before backward.
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
