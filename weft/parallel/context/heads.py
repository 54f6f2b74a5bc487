"""Ulysses (Jacobs et al. 2023, 2309.14509): tokens of all heads against heads of all tokens, by all-to-all."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from weft.layout.dims import part

T = torch.Tensor


def head_ranges(heads: int, kv_heads: int, ranks: int) -> tuple[list[int], list[int]]:
    """Return which query heads each rank computes, and which key/value heads these query heads read.

    Each of the two lists has the range of heads of every rank, rank by rank: ``[start, end, start, end, ...]``. The
    number of ranks need not divide the numbers of heads. Ranges of query heads then differ by one in length at most.
    A key/value head is in the ranges of all ranks that read it. ``heads``, ``kv_heads``: numbers of query heads and
    of key/value heads.
    """
    own = [part(heads, ranks, rank) for rank in range(ranks)]
    group = heads // kv_heads
    return [i for a, b in own for i in (a, b)], [
        i for a, b in own for i in (a // group, -(-b // group))
    ]


def head_index(heads: int, kv_heads: int, ranks: int, rank: int) -> list[int] | None:
    """Return, for each query head of ``rank``, which of the rank's own key/value heads it reads, by index among these.

    ``heads``, ``kv_heads``: numbers of query and key/value heads on all ranks together; ``ranks``: number of ranks. The
    result is None if no index is needed, because each key/value head of the rank serves equally many query heads, in
    order.
    """
    first, last = part(heads, ranks, rank)
    group = heads // kv_heads
    read = [head // group - first // group for head in range(first, last)]
    even = (last - first) // (read[-1] + 1)
    return None if read == [i // even for i in range(last - first)] else read


@torch.library.custom_op("weft::exchange_heads", mutates_args=())
def exchange_heads(
    x: T, group: str, ranges: Sequence[int], index: int, inward: bool
) -> T:
    """Exchange tokens for heads among the ranks of a group by all-to-all (``inward``), or exchange them back.

    Inward, a rank gives its tokens of all heads and gets all tokens of its own heads: ``[batch, seq, heads, head_dim]``
    becomes ``[batch, ranks * seq, own heads, head_dim]``. The exchange is a PyTorch operator so that selective
    recomputation can keep its result.

    ``x``: the tensor to exchange; ``group``: name of the process group; ``ranges``: the heads of every rank, flat
    (:func:`head_ranges`); ``index``: this rank's position in the group. Several ranks may have the same head, as with
    few key/value heads. On the way back, the gradients that these ranks send for the head are added up.
    """
    cuts = list(zip(ranges[::2], ranges[1::2], strict=True))
    batch, seq, _, dim = x.shape
    if inward:
        parts = [x[:, :, a:b] for a, b in cuts]
        widths = [cuts[index][1] - cuts[index][0]] * len(cuts)
    else:
        parts, seq = list(x.chunk(len(cuts), dim=1)), seq // len(cuts)
        widths = [b - a for a, b in cuts]
    # counts may differ, which gloo takes in one flat tensor only
    sent = torch.cat([p.flatten() for p in parts])
    sizes = [batch * seq * width * dim for width in widths]
    flat = x.new_empty(sum(sizes))
    there = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    dist.all_to_all_single(flat, sent, sizes, [p.numel() for p in parts], group=there)
    received = [part.view(batch, seq, -1, dim) for part in flat.split(sizes)]
    if inward:
        return torch.cat(received, dim=1)
    if sum(widths) == max(ranges):
        return torch.cat(received, dim=2)
    whole = x.new_zeros(batch, seq, max(ranges), dim)
    for (a, b), heads_of_rank in zip(cuts, received, strict=True):
        whole[:, :, a:b] += heads_of_rank
    return whole


@exchange_heads.register_fake
def _(x: T, group: str, ranges: Sequence[int], index: int, inward: bool) -> T:
    ranks = len(ranges) // 2
    if inward:
        heads = ranges[2 * index + 1] - ranges[2 * index]
        return x.new_empty(x.shape[0], x.shape[1] * ranks, heads, x.shape[3])
    return x.new_empty(x.shape[0], x.shape[1] // ranks, max(ranges), x.shape[3])


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, *ctx.where, ctx.inward = inputs


def _exchange_grad(ctx, grad):  # type: ignore[no-untyped-def]
    return exchange_heads(grad, *ctx.where, not ctx.inward), None, None, None, None


exchange_heads.register_autograd(_exchange_grad, setup_context=_save)
