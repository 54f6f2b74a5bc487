"""A pipeline rank's share of embedding and output layer, and the passes over it (:mod:`weft.schedule.vocab`)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.data.batch import IGNORE, Batch
from weft.errors import UsageError
from weft.layout.boundary import gather_tokens, scatter_tokens
from weft.layout.mesh import Mesh
from weft.models.answer_loss import Objective, weigh
from weft.models.fused import add_product, times
from weft.models.loss import entropy_of_shares, from_shares, merge
from weft.models.token_objective import TokenObjective
from weft.models.transformer import Transformer
from weft.schedule.actions import Action
from weft.schedule.execute import Op

T = torch.Tensor


class OutputShard:
    """This rank's share of the vocabulary: its rows of output layer and embedding, cut over ``pp`` and ``tp``.

    It runs the passes of vocabulary parallelism (:mod:`weft.schedule.vocab`), in which every rank computes with its own
    share of the vocabulary. ``first`` (attribute): index in the vocabulary of the share's first row.
    """

    def __init__(self, model: Transformer, mesh: Mesh) -> None:
        self.model, self.mesh, self.barriers = model, mesh, mesh.layout.vocab_barriers
        logical = model.embedding.logical["table"]
        self.first = logical.box[0][0]
        self.group = mesh.group("tp") if mesh.size("tp") > 1 else None

    def ops(
        self,
        batches: Sequence[Batch],
        total: Callable[[], T],
        losses: dict[int, T],
        objective: Objective | None,
    ) -> dict[str, Op]:
        """Return the functions that run the passes of vocabulary parallelism, by the kind of action in the schedule.

        Each rank holds a share of the embedding and of the output layer. The kinds of passes are:

        "E": look up tokens in the embedding's share. "S": logits and softmax of the output layer's share. "C": the
        loss, from the statistics of all shares. "T": weight gradient of the output layer's share. "G": sum of the
        shares' parts of the input's gradient. "D": gradient of the embedding's share.

        ``batches``: one batch per microbatch. ``total``: returns the sum of the weights of the step's labels, by which
        the loss is divided. ``losses``: dict to which the loss of each microbatch is added, by the microbatch's index.
        ``objective``: the loss to compute in place of cross entropy, such as a policy loss; None: cross entropy.
        """
        self.batches, self.total, self.losses = batches, total, losses
        self.objective = objective
        # in policy losses: also of the entropy
        self.policy = objective if isinstance(objective, TokenObjective) else None
        if self.policy is not None and self.model.shape.value_head:
            raise UsageError(
                "layout.vocab_barriers cuts the output layer over all stages, and a critic that shares the policy's "
                "trunk has its output on the last stage; leave layout.vocab_barriers out"
            )
        self.temperature = 1.0 if self.policy is None else self.policy.temperature
        return {"E": self._look_up, "S": self._output, "C": self._combine, "T": self._weights, "G": self._add_up,
                "D": self._embedding_gradient}  # fmt: skip

    @torch.no_grad()
    def _look_up(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        return [self.model.embedding(self.batches[a.microbatch].tokens)]

    def _add_up(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        return [torch.stack(list(reads)).sum(0)]

    def _rows_of(self, ids: T) -> tuple[T, T]:
        """Return which of ``ids`` ``[tokens]`` this share has, and their rows in it or 0: ``[tokens, 1]`` each."""
        rows = ids[:, None] - self.first
        here = (rows >= 0) & (rows < len(self.model.output))
        return here, torch.where(here, rows, 0)

    @torch.no_grad()
    def _output(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        """Return statistics ``[tokens, 2]`` of the input ``[rows, seq/tp, embed]``: log-sum-exp and target logit.

        A policy loss gets a third one, the mean logit. With one barrier also the share's mean output row and its
        target's row, ``[rows, seq/tp, embed]`` each: the gradient of the input is their difference once the first is
        weighted by the share's part of the softmax. For the gradient of the entropy there is a third row.
        """
        weight, labels = self.model.output, self.batches[a.microbatch].labels
        hidden = gather_tokens(reads[0], self.mesh).flatten(0, 1)  # [tokens, embed]
        if self.temperature != 1:
            hidden = hidden / self.temperature
        here, index = self._rows_of(labels.flatten())
        # [tokens, vocab/pp/tp]
        high = torch.promote_types(hidden.dtype, torch.float32)
        logits = times(hidden, weight).to(high)
        top = logits.amax(-1, keepdim=True)
        target = torch.where(here, logits.gather(1, index), 0)
        logits.sub_(top)
        p = logits.exp_() if self.policy is None else logits.exp()
        own = top + p.sum(-1, keepdim=True).log()
        lse, target = merge(own, target, self.group)
        stats = torch.cat((lse, target), dim=1)
        if self.policy is not None:
            mean_logit = (p * logits).sum(-1, keepdim=True) * (top - own).exp() + top
            shares = from_shares(torch.cat((own, mean_logit), dim=1), self.group)
            lses, means = shares.split(1, dim=-1)
            stats = torch.cat((stats, (lses.softmax(0) * means).sum(0)), dim=1)
        if len(a.writes) == 1:  # nothing is learned
            return [stats]
        p = (p * (top - lse).exp()).to(hidden.dtype)
        tape = (p, hidden, lse)
        if self.barriers == 2:
            return [stats, tape]
        # [tokens, embed]
        mean, row = times(p, weight.t()), torch.where(here, weight[index[:, 0]], 0)
        parts = [mean, row]
        if self.policy is not None and self.policy.has_entropy:
            parts.append(times(torch.xlogy(p, p), weight.t()))
        scattered = (self._scattered(x, labels) / self.temperature for x in parts)
        return [(stats, *scattered), tape]

    def _scattered(self, x: T, labels: T) -> T:
        """Sum ``[tokens, embed]`` over ``tp``; return this rank's tokens of norm regions, ``[rows, seq/tp, embed]``."""
        return scatter_tokens(x.view(*labels.shape, -1), self.mesh)

    @torch.no_grad()
    def _combine(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        """Add up the loss; return ``[tokens, 2]`` for the shares' gradients: the global log-sum-exp, and the factor of
        each token's loss. With one barrier return the input's gradient as well.
        """
        batch, total = self.batches[a.microbatch], self.total()
        early = bool(a.writes) and self.barriers == 1
        # [pp, tokens, 2], or 3 with mean logits
        stats = torch.stack([r[0] if early else r for r in reads])
        lse, target = stats[..., :1].logsumexp(0), stats[..., 1:2].sum(0)
        labels = batch.labels
        nll = torch.where(labels.view(-1, 1) != IGNORE, lse - target, 0)[:, 0]
        entropy: T | None = None
        if self.policy is not None:
            entropy = entropy_of_shares(stats[..., :1], stats[..., 2:])
        loss, slopes, bonuses = weigh(
            nll,
            batch,
            self.objective,
            self.mesh,
            None if entropy is None else entropy[:, 0],
        )
        self.losses[a.microbatch] = loss / total
        scale = (slopes.double() / total).to(lse.dtype)[:, None]
        ends = [lse, scale]
        if bonuses is not None and entropy is not None:
            ends += [(bonuses.double() / total).to(lse.dtype)[:, None], entropy]
        if not early:
            return [torch.cat(ends, dim=1)] if a.writes else []
        grad = torch.zeros_like(reads[0][1])

        def own(x: T) -> T:
            return self._own_tokens(x, labels).to(grad.dtype)

        for share, (_, mean, row, *spread) in zip(stats[..., :1], reads, strict=True):
            softmax = (share - lse).exp()  # the share's part of it
            grad += own(softmax * scale) * mean - own(scale) * row
            if len(ends) > 2:
                bonus = softmax * ends[2]
                grad -= own(bonus * (share - lse + ends[3])) * mean
                grad -= own(bonus) * spread[0]
        return [torch.cat(ends, dim=1), grad]

    def _own_tokens(self, x: T, labels: T) -> T:
        """Cut ``[tokens, 1]`` to this rank's tokens of the norm regions, ``[rows, seq/tp, 1]``."""
        chunks = x.view(*labels.shape, 1).chunk(self.mesh.size("tp"), dim=1)
        return chunks[self.mesh.rank("tp")]

    @torch.no_grad()
    def _weights(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        """Add up the gradient of the share's weight; with two barriers return its part of the input's gradient."""
        ends, (p, hidden, share) = reads
        weight, labels = self.model.output, self.batches[a.microbatch].labels
        here, index = self._rows_of(labels.flatten())
        lse, scale, *of_entropy = ends.split(1, dim=1)
        factor = torch.where(scale != 0, (share - lse).exp() * scale, 0)
        d_logits = p.to(lse.dtype) * factor  # [tokens, vocab/pp/tp]
        if of_entropy:
            bonus, entropy = of_entropy
            bonus = torch.where(bonus != 0, (share - lse).exp() * bonus, 0)
            wide = p.to(lse.dtype)
            d_logits -= bonus * (
                torch.xlogy(wide, wide) + wide * (share - lse + entropy)
            )
        d_logits.scatter_add_(1, index, -torch.where(here, scale, 0))
        d_logits = d_logits.to(p.dtype)
        if weight.requires_grad:
            add_product(weight, d_logits, hidden)
        if not a.writes:
            return []
        d_hidden = times(d_logits, weight.t()) / self.temperature
        return [self._scattered(d_hidden, labels)]

    @torch.no_grad()
    def _embedding_gradient(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        table, scale = self.model.embedding.table, self.model.embedding.scale
        if not table.requires_grad:
            return []
        here, index = self._rows_of(self.batches[a.microbatch].tokens.flatten())
        grad = gather_tokens(reads[0], self.mesh).flatten(0, 1)  # [tokens, embed]
        rows = torch.where(here, grad * scale, 0)
        if table.grad is None:
            table.grad = torch.zeros_like(table)
        table.grad.index_add_(0, index[:, 0], rows)
        return []
