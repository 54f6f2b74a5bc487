"""Output layer and cross entropy in one function, cut over the vocabulary and computed in chunks of tokens.

No rank ever holds more than ``[chunk, vocab/tp]`` logits. The gradients of hidden states and output weight are computed
with the loss, chunk by chunk, so that logits are neither stored nor computed twice.
"""

from collections.abc import Callable, MutableMapping

import torch
import torch.distributed as dist
from spmd_types import rules

from weft.data.batch import IGNORE
from weft.layout.boundary import I, V
from weft.layout.mesh import Mesh
from weft.models.fused import times
from weft.models.numbers import has_numbers, wide
from weft.models.widened import multiply

T = torch.Tensor

#: Function with the arguments of :func:`linear_cross_entropy` that sums the losses of tokens.
Criterion = Callable[..., T]

#: Share of labelled tokens from which on leaving out the others does not pay for a copy.
MOST_LABELLED = 0.95

#: Elements of logits that a CPU computes at a time, so that they stay in its caches.
AT_A_TIME = 2**19


def linear_cross_entropy(
    hidden: T,
    weight: T,
    labels: T,
    first: int,
    chunk: int,
    mesh: Mesh,
    counts: T | None = None,
    entropies: T | None = None,
    kept: MutableMapping[int, T] | None = None,
) -> T:
    """Return the sum of ``-log p(label)`` over all tokens with a label, each times its weight in ``counts`` if given.

    With ``entropies`` the entropy of each token's distribution is added, times its entry there, ``[tokens]``.
    ``kept``: logits that are known already, by the first token of their chunk. They are taken out and overwritten.

    ``hidden``: ``[tokens, embed]``; ``weight``: rows of the output layer from row ``first`` on, ``[vocab/tp, embed]``;
    ``labels`` and ``counts``: ``[tokens]``; ``chunk``: number of tokens whose logits are computed at a time; ``mesh``:
    ranks that share the model. Returns a float64 scalar, the sum over the tokens of this call. All ranks of ``tp`` have
    the same tokens and get the same sum.
    """
    group = vocabulary_group(mesh)
    return _LinearCrossEntropy.apply(
        hidden, weight, labels, first, chunk, group, counts, entropies, kept or {}
    )


def vocabulary_group(mesh: Mesh) -> dist.ProcessGroup | None:
    """Return the process group of the ranks among which the vocabulary is cut; None if one rank has all of it."""
    return mesh.group("tp") if mesh.size("tp") > 1 else None


def scale_of(labels: T, counts: T | None, dtype: torch.dtype) -> T:
    """Return the factor of each token's loss, ``[tokens, 1]``: its entry of ``counts``, or 0 without a label.

    With ``counts`` None the factor is 1 for every token with a label. ``labels``: ``[tokens]``; ``dtype``: type of the
    result.
    """
    valid = (labels != IGNORE)[:, None]
    if counts is None:
        return valid.to(dtype)
    return torch.where(valid, counts[:, None].to(dtype), 0)


class SummedLoss(torch.autograd.Function):
    """Base of autograd functions that return a loss summed over tokens, and compute its gradients already in forward.

    The forward of a subclass saves the gradients of ``hidden`` and ``weight`` and sets two attributes. ``ctx.tokens``
    is the number of tokens. ``ctx.rows`` is None if the saved gradient of ``hidden`` has a row for every token.
    Otherwise it lists the indices of the tokens that have a row; the gradient of all others is 0.
    """

    @staticmethod
    def spmd_typecheck(*, hidden, weight, labels, group, counts, entropies=None):  # type: ignore[no-untyped-def]
        """Declare to the type check of distributed tensors that the loss is a sum over tokens and ranks of ``group``.

        The arguments are those of a subclass's forward.
        """
        of_tokens = [x for x in (labels, counts, entropies) if x is not None]
        total = rules.einsum(
            f"te,ve{',t' * len(of_tokens)}->", hidden, weight, *of_tokens
        )
        return total if group is None else rules.all_reduce(total, group, src=V, dst=I)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        """Return the saved gradients times ``grad``, the gradient of the summed loss."""

        # In at least float32: 1 / tokens rounded to bfloat16 would make every gradient up to 0.4 % too large or small.
        def scaled(d):  # type: ignore[no-untyped-def]
            dtype = wide(d.dtype)
            # in place: a large vocabulary's may not fit twice
            return d.copy_(d.to(dtype).mul_(grad.to(dtype)))

        d_hidden, d_weight = (
            None if d is None else scaled(d) for d in ctx.saved_tensors
        )
        if d_hidden is not None and ctx.rows is not None:
            d_hidden = d_hidden.new_zeros(ctx.tokens, d_hidden.shape[1]).index_copy_(
                0, ctx.rows, d_hidden
            )
        return d_hidden, d_weight, *[None] * (len(ctx.needs_input_grad) - 2)


class _LinearCrossEntropy(SummedLoss):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, hidden, weight, labels, first, chunk, group, counts, entropies, kept
    ):
        ctx.tokens, ctx.rows = len(hidden), labelled_rows(labels)
        if ctx.rows is not None:
            hidden, labels = hidden[ctx.rows], labels[ctx.rows]
            counts = None if counts is None else counts[ctx.rows]
            entropies = None if entropies is None else entropies[ctx.rows]
        dtype = wide(hidden.dtype)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        scales = scale_of(labels, counts, dtype)
        bonuses = entropies if entropies is None else scale_of(labels, entropies, dtype)
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight: T | None = None
        if ctx.needs_input_grad[1]:
            # which the first product overwrites
            sets = len(hidden) and dtype == hidden.dtype
            blank = torch.empty_like if sets else torch.zeros_like
            d_weight = blank(weight, dtype=dtype)
        for start in range(0, len(hidden), chunk):
            h = hidden[start : start + chunk]
            logits = kept.pop(start, None)  # [chunk, vocab/tp]
            if logits is None:
                logits = times(h, weight).to(dtype)
            for at in rows_in_cache(logits, group):
                of = slice(start + at.start, start + at.stop)
                bonus = None if bonuses is None else bonuses[of]
                total += getattr(kept, "differentiate", differentiated)(
                    logits[at], labels[of], scales[of], bonus, first, group
                )
            p = logits.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[start : start + chunk] = times(p, weight.t())
            if d_weight is not None and d_weight.dtype == p.dtype:
                # of the largest tensors: no second one to add
                torch.addmm(d_weight, p.t(), h, beta=min(start, 1), out=d_weight)
            elif d_weight is not None:
                d_weight += multiply(p.t(), h)
            del logits, p  # before the next chunk's
        if d_hidden is not None or d_weight is not None:
            ctx.save_for_backward(
                d_hidden, d_weight if d_weight is None else d_weight.to(weight.dtype)
            )
        return total


def rows_in_cache(logits: T, group: dist.ProcessGroup | None) -> list[slice]:
    """Return ranges of rows of ``logits`` ``[tokens, vocab/tp]`` that are computed one after the other: on a CPU so few
    rows that they stay in its caches, elsewhere and if several ranks of ``group`` share a row all at once.
    """
    count = step = len(logits)
    if logits.device.type == "cpu" and group is None:
        step = max(1, AT_A_TIME // logits.shape[1])
    return [slice(i, min(i + step, count)) for i in range(0, count, step)]


def differentiated(
    logits: T, y: T, scale: T, bonus: T | None, first: int, group: dist.ProcessGroup | None
) -> T:  # fmt: skip
    """Return the loss of some tokens, and overwrite their ``logits`` ``[tokens, vocab/tp]`` by its derivatives.

    ``y``: labels, ``[tokens]``. ``scale``, ``bonus``: factors of each token's loss and entropy, ``[tokens, 1]``. The
    other arguments are those of :func:`linear_cross_entropy`.
    """
    top = logits.amax(-1, keepdim=True)
    here = ((y >= first) & (y < first + logits.shape[1]))[:, None]
    index = torch.where(here, y[:, None] - first, 0)
    target = torch.where(here, logits.gather(1, index), 0)
    logits.sub_(top)
    p = logits.exp_() if bonus is None else logits.exp()
    own = top + p.sum(-1, keepdim=True).log()
    lse, target = merge(own, target, group)
    valid = (y != IGNORE)[:, None]
    loss = (torch.where(valid, lse - target, 0) * scale).sum()
    # d loss / d logits = softmax - onehot, zero where there is no label
    share = torch.where(valid, (top - lse).exp(), 0)
    if bonus is None:
        logits.mul_(share * scale)
    else:
        mean = (p * logits).sum(-1, keepdim=True) * (top - own).exp() + top
        entropy = merged_entropy(own, mean, group)
        loss += (entropy * bonus).sum()
        # log p of the whole vocabulary, plus the entropy
        logits.add_(top - lse + entropy).mul_(-bonus).add_(scale)
        logits.mul_(p.mul_(share))
    logits.scatter_add_(1, index, -torch.where(here, scale, 0))
    return loss


def labelled_rows(labels: T) -> T | None:
    """Return the indices of the tokens with a label, so that the output layer can skip prompts and padding.

    Returns None if few tokens lack a label, because copying the other rows then costs more than it saves. On a GPU the
    result is always None: to count the labels, the host would have to wait for the queued work.
    """
    if labels.device.type != "cpu" or not has_numbers(labels):
        return None
    rows = (labels != IGNORE).nonzero()[:, 0]
    return rows if len(rows) < MOST_LABELLED * len(labels) else None


def merge(lse: T, target: T, group: dist.ProcessGroup | None) -> list[T]:
    """Merge what the ranks of ``group`` have computed, each for its own range of the vocabulary, for a chunk of tokens.

    ``lse``: for each token the log-sum-exp of the logits in this rank's range. ``target``: the logit of the token's
    label, or 0 if the label is in another rank's range. Both are ``[chunk, 1]``. Returns the log-sum-exp and the
    label's logit over the whole vocabulary, in the same shapes. ``group`` None: this rank has the whole vocabulary.
    """
    if group is None:
        return [lse, target]
    both = from_shares(torch.cat((lse, target), dim=1), group)
    return [both[..., :1].logsumexp(0), both[..., 1:].sum(0)]


def merged_entropy(lse: T, mean: T, group: dist.ProcessGroup | None) -> T:
    """Return the entropy of distributions over the whole vocabulary, ``[chunk, 1]``. Each rank of ``group`` has a range
    of the vocabulary; if ``group`` is None, this rank has all of it.

    ``lse``: log-sum-exp of the logits in this rank's range. ``mean``: mean of the logits in this rank's range, weighted
    by their softmax within the range. Both are ``[chunk, 1]``.
    """
    lses, means = from_shares(torch.cat((lse, mean), dim=1), group).split(1, dim=-1)
    return entropy_of_shares(lses, means)


def entropy_of_shares(lses: T, means: T) -> T:
    """Return the entropy of each token's distribution over the whole vocabulary, which is divided into shares:
    ``[chunk, 1]``. ``lses``, ``means``: log-sum-exp and mean logit of each share of the vocabulary, ``[shares, chunk,
    1]``.
    """
    return lses.logsumexp(0) - (lses.softmax(0) * means).sum(0)


def from_shares(share: T, group: dist.ProcessGroup | None) -> T:
    """Gather a tensor ``[chunk, n]`` from all ranks of ``group``, which share the vocabulary: ``[tp, chunk, n]``.

    ``group`` None: one rank has all of the vocabulary, and the result is ``[1, chunk, n]``.
    """
    shares = [share]
    if group is not None:
        shares = [torch.empty_like(share) for _ in range(group.size())]
        dist.all_gather(shares, share, group=group)
    return torch.stack(shares)


def with_gradient_of(value: T, weighted: Callable[[], T]) -> T:
    """Return the scalar ``value`` with the gradients of another scalar, which ``weighted()`` returns. Losses of whole
    answers are computed in this way: ``value`` is the loss, and the other scalar is a sum over tokens that has the same
    gradients.

    ``weighted`` is not called where no gradient is needed.
    """
    if not torch.is_grad_enabled():
        return value
    total = weighted()
    return value + (total - total.detach())
