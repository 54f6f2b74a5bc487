"""A pipeline rank's share of embedding and output layer, and the passes over it (:mod:`weft.schedule.vocab`)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.data.batch import IGNORE, Batch
from weft.layout.boundary import gather_tokens, scatter_tokens
from weft.layout.mesh import Mesh
from weft.models.fused import add_product, times
from weft.models.loss import merge
from weft.models.preference import weigh
from weft.models.transformer import Transformer
from weft.schedule.actions import Action
from weft.schedule.execute import Op

T = torch.Tensor


class OutputShard:
    """Rows ``first:`` of the output layer (and of the embedding), cut over ``pp`` and within a stage over ``tp``."""

    def __init__(self, model: Transformer, mesh: Mesh) -> None:
        self.model, self.mesh, self.barriers = model, mesh, mesh.layout.vocab_barriers
        logical = model.embedding.logical["table"]
        self.first = logical.box[0][0]
        self.group = mesh.group("tp") if mesh.size("tp") > 1 else None

    def ops(self, batch: Callable[[int], Batch], total: Callable[[], T], losses: list[T]) -> dict[str, Op]:
        """The passes as operations. ``total``: the weight of the step's labels, by which the loss is divided."""

        def look_up(a: Action, reads: Sequence[Any]) -> list[Any]:
            with torch.no_grad():
                return [self.model.embedding(batch(a.microbatch).tokens)]

        def output(a: Action, reads: Sequence[Any]) -> list[Any]:
            return self._output(reads[0], batch(a.microbatch).labels, training=len(a.writes) > 1)

        def combine(a: Action, reads: Sequence[Any]) -> list[Any]:
            return self._combine(reads, batch(a.microbatch), total(), losses, bool(a.writes))

        def weights(a: Action, reads: Sequence[Any]) -> list[Any]:
            ends, tape = reads
            return self._weights(ends, tape, batch(a.microbatch), pass_on=bool(a.writes))

        def embedding_gradient(a: Action, reads: Sequence[Any]) -> list[Any]:
            self._embedding_gradient(reads[0], batch(a.microbatch).tokens)
            return []

        def add_up(a: Action, reads: Sequence[Any]) -> list[Any]:
            return [torch.stack(list(reads)).sum(0)]

        return {"E": look_up, "S": output, "C": combine, "T": weights, "G": add_up, "D": embedding_gradient}

    def _mine(self, ids: T) -> tuple[T, T]:
        """Which of ``ids`` ``[tokens]`` are in this share, and their rows in it (0 for the others), ``[tokens, 1]``."""
        here = ((ids >= self.first) & (ids < self.first + len(self.model.output)))[:, None]
        return here, torch.where(here, ids[:, None] - self.first, 0)

    @torch.no_grad()
    def _output(self, act: T, labels: T, training: bool) -> list[Any]:
        """``act``: ``[rows, seq/tp, embed]``. Statistics ``[tokens, 2]``: log-sum-exp and target logit of the share.

        With one barrier also the share's mean output row and its target's row, ``[rows, seq/tp, embed]`` each: the
        gradient of the input is their difference once the first is weighted by the share's part of the softmax.
        """
        weight = self.model.output
        hidden = gather_tokens(act, self.mesh).flatten(0, 1)  # [tokens, embed]
        here, index = self._mine(labels.flatten())
        logits = times(hidden, weight).to(torch.promote_types(hidden.dtype, torch.float32))  # [tokens, vocab/pp/tp]
        top = logits.amax(-1, keepdim=True)
        target = torch.where(here, logits.gather(1, index), 0)
        p = logits.sub_(top).exp_()
        lse, target = merge(top + p.sum(-1, keepdim=True).log(), target, self.group)
        stats = torch.cat((lse, target), dim=1)
        if not training:
            return [stats]
        p = (p * (top - lse).exp()).to(hidden.dtype)
        tape = (p, hidden, lse)
        if self.barriers == 2:
            return [stats, tape]
        mean, row = times(p, weight.t()), torch.where(here, weight[index[:, 0]], 0)
        return [(stats, *(scatter_tokens(x.view(*labels.shape, -1), self.mesh) for x in (mean, row))), tape]

    @torch.no_grad()
    def _combine(self, reads: Sequence[Any], batch: Batch, total: T, losses: list[T], training: bool) -> list[Any]:
        """The loss, and for the shares' gradients ``[tokens, 2]``: the global log-sum-exp, and what the loss of each
        token is multiplied by. With one barrier the input's gradient as well.
        """
        one = training and self.barriers == 1
        stats = torch.stack([r[0] if one else r for r in reads])  # [pp, tokens, 2]
        lse, target = stats[..., :1].logsumexp(0), stats[..., 1:].sum(0)
        labels = batch.labels
        nll = torch.where(labels.view(-1, 1) != IGNORE, lse - target, 0)[:, 0]
        loss, scale = weigh(nll, batch, self.model.objective, self.mesh)
        losses.append(loss / total)
        scale = (scale.double() / total).to(lse.dtype)[:, None]
        ends = torch.cat((lse, scale), dim=1)
        if not one:
            return [ends] if training else []
        grad = torch.zeros_like(reads[0][1])
        for share, (_, mean, row) in zip(stats[..., :1], reads, strict=True):
            part = self._own_tokens((share - lse).exp() * scale, labels).to(grad.dtype)
            grad += part * mean - self._own_tokens(scale, labels).to(grad.dtype) * row
        return [ends, grad]

    def _own_tokens(self, x: T, labels: T) -> T:
        """``[tokens, 1]`` to this rank's tokens of the norm regions, ``[rows, seq/tp, 1]``."""
        return x.view(*labels.shape, 1).chunk(self.mesh.size("tp"), dim=1)[self.mesh.rank("tp")]

    @torch.no_grad()
    def _weights(self, ends: T, tape: tuple[T, T, T], batch: Batch, pass_on: bool) -> list[Any]:
        """Gradient of the share's weight; with two barriers also the share's part of the input's gradient."""
        p, hidden, share = tape
        weight, labels = self.model.output, batch.labels
        here, index = self._mine(labels.flatten())
        lse, scale = ends.split(1, dim=1)
        d_logits = p.to(lse.dtype) * torch.where(scale != 0, (share - lse).exp() * scale, 0)
        d_logits.scatter_add_(1, index, -torch.where(here, scale, 0))
        d_logits = d_logits.to(p.dtype)
        if weight.requires_grad:
            add_product(weight, d_logits, hidden)
        return [scatter_tokens(times(d_logits, weight.t()).view(*labels.shape, -1), self.mesh)] if pass_on else []

    @torch.no_grad()
    def _embedding_gradient(self, grad: T, tokens: T) -> None:
        table, scale = self.model.embedding.table, self.model.embedding.scale
        if not table.requires_grad:
            return
        here, index = self._mine(tokens.flatten())
        rows = torch.where(here, gather_tokens(grad, self.mesh).flatten(0, 1) * scale, 0)
        if table.grad is None:
            table.grad = torch.zeros_like(table)
        table.grad.index_add_(0, index[:, 0], rows)
