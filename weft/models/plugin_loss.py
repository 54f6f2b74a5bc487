"""Token losses of plugins, under every layout that the cross entropy supports."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from weft.data.batch import IGNORE
from weft.errors import WeftError
from weft.layout.mesh import Mesh
from weft.models.fused import times
from weft.models.loss import SummedLoss, scale_of, vocabulary_group
from weft.models.numbers import has_numbers, wide
from weft.models.widened import multiply
from weft.plugins import call
from weft.recipe import Loss
from weft.registry import find

T = torch.Tensor


@dataclass(frozen=True)
class TokenLoss:
    """Sum of a plugin's loss over all tokens, each token's loss times the weight of its label.

    ``of``: the plugin's function from logits and labels to losses; ``vocab``: size of the vocabulary. So that every
    layout computes the same, the following holds for ``of``:

    - The logits ``[tokens, vocab]`` are whole rows in float32 (in float64, if the run is), even where the layout cuts
    the vocabulary. The labels ``[tokens]`` are ids, and every token has one. The function returns the losses
    ``[tokens]``.

    - Tokens come in chunks of ``train.loss_chunk``, of any documents and in any order. The loss of a token must depend
    on its own row and label alone: no mean over the chunk, no state, nothing random.

    - PyTorch must be able to differentiate the function. It is called once per chunk, for the loss and the gradients
    together.

    Weft multiplies by the labels' weights, adds up, and divides by the weight of all the step's labels. With tensor
    parallelism each rank computes the logits of a part of the vocabulary, and an all-reduce over ``tp`` puts the rows
    of every chunk together. The built-in cross entropy does without this communication.
    """

    of: Callable[[T, T], T]
    vocab: int

    def __call__(
        self,
        hidden: T,
        weight: T | None,
        labels: T,
        first: int,
        chunk: int,
        mesh: Mesh,
        counts: T | None = None,
    ) -> T:
        """Sum the losses, as :func:`weft.models.loss.linear_cross_entropy`; without ``weight``, ``hidden`` are the
        logits.
        """
        if weight is not None:
            group = vocabulary_group(mesh)
            loss: T = _Chunked.apply(
                hidden, weight, labels, first, chunk, group, counts, self
            )
            return loss
        rows = (labels != IGNORE).nonzero()[:, 0]
        scales = scale_of(labels, counts, torch.float64)[rows, 0]
        losses = self.losses(hidden[rows].to(wide(hidden.dtype)), labels[rows])
        return (losses * scales).sum()

    def losses(self, logits: T, labels: T) -> T:
        """Return the plugin's loss of each token in float64, ``[tokens]``.

        ``logits``: ``[tokens, vocab]``; ``labels``: ids ``[tokens]``. Raises :class:`WeftError` if the plugin returns
        another shape.
        """
        losses = self.of(logits, labels)
        if not isinstance(losses, T) or losses.shape != labels.shape:
            kind = type(losses).__name__
            shape = list(losses.shape) if isinstance(losses, T) else kind
            raise WeftError(
                f"a plugin's loss returned {shape} for {len(labels)} tokens; it returns one loss for each"
            )
        return losses.double()


def plugin_loss(settings: Loss, vocab: int) -> TokenLoss | None:
    """Return the plugin's loss that ``loss.kind`` names; None if it names no loss of a plugin.

    ``settings``: the section ``[loss]``. ``vocab``: size of the vocabulary.
    """
    if settings.is_own:
        return TokenLoss(call(find("loss", settings.kind), settings.settings), vocab)
    return None


class _Chunked(SummedLoss):
    """The sum of losses, whose gradients are computed with it, chunk by chunk."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, first, chunk, group, counts, criterion):  # type: ignore[no-untyped-def]
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        with_grad, dtype = any(ctx.needs_input_grad[:2]), wide(hidden.dtype)
        d_hidden = torch.zeros_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=dtype)
        scales = scale_of(labels, counts, torch.float64)[:, 0]
        # Types do not depend on what a plugin computes, which need not know tensors without values.
        labelled = labels[:0]
        if has_numbers(labels):
            labelled = (labels != IGNORE).nonzero()[:, 0]
        for rows in labelled.split(chunk) if len(labelled) else ():
            h = hidden[rows]
            share = logits = times(h, weight).to(dtype)  # [chunk, vocab/tp]
            if group is not None:
                logits = share.new_zeros(len(rows), criterion.vocab)
                logits[:, first : first + len(weight)] = share
                dist.all_reduce(logits, group=group)
            with torch.set_grad_enabled(with_grad):
                logits.requires_grad_(with_grad)
                loss = (criterion.losses(logits, labels[rows]) * scales[rows]).sum()
            total += loss.detach()
            if with_grad:
                (d_logits,) = torch.autograd.grad(loss, logits)
                d_share = d_logits[:, first : first + len(weight)].to(hidden.dtype)
                d_hidden[rows] = times(d_share, weight.t())
                d_weight += multiply(d_share.t(), h)
        if with_grad:
            ctx.rows = None
            ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype))
        return total
