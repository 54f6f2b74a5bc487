"""Attention over the ranks of ``cp``, by a scheme of tiles, by Ulysses, or by both."""

from collections.abc import Sequence

import torch.distributed as dist

from weft.layout.mesh import Mesh
from weft.models.attention import Attend, T, local_attention
from weft.net.groups import new_group
from weft.parallel.context.heads import exchange_heads, head_index, head_ranges
from weft.parallel.context.tile_attention import tile_attention
from weft.recipe import ModelShape
from weft.registry import find


def context_attention(mesh: Mesh, shape: ModelShape) -> Attend:
    """Return the attention function over the ranks of ``cp`` that the layout of ``mesh`` asks for.

    Ranks exchange keys and values of blocks of the sequence (tiles), or heads (Ulysses), or both. ``shape``: the model.
    Collective over ``cp``, as Ulysses needs a process group.
    """
    layout = mesh.layout
    if mesh.size("cp") == 1:
        return local_attention
    inner, rank, group = layout.head_ranks, mesh.rank("cp"), mesh.group("cp")
    ranks = dist.get_process_group_ranks(group)
    attend = local_attention
    if inner < layout.cp:
        peers, index = ranks[rank % inner :: inner], rank // inner

        def attend(q: T, k: T, v: T, cu_seqlens: T, window: int = 0) -> T:
            return across(q, k, v, cu_seqlens, layout.context, peers, index, [], window)

    if inner == 1:
        return attend
    if inner < layout.cp:
        first = rank - rank % inner
        group = new_group(ranks[first : first + inner], "ulysses")
    return ulysses(attend, group.group_name, inner, rank % inner)


def across(
    q: T, k: T, v: T, cu_seqlens: T, scheme: str, peers: Sequence[int], index: int, lengths: Sequence[int],
    window: int = 0,
) -> T:  # fmt: skip
    """Return causal attention over the ranks ``peers``, by the context scheme named ``scheme``, shaped like ``q``.

    The sequence is cut into blocks, and each rank owns one or two of them. If the scheme has an operator, such as a
    fused kernel, the operator computes the attention.

    Args:
        ``q, k, v``: ``[batch, seq held, heads or kv_heads, head_dim]``, for the tokens of the blocks that this rank
            owns.
        ``cu_seqlens``: boundaries of the documents, from 0, as indices in the flattened whole rows of all ranks'
            tokens.
        ``scheme``: name of the scheme.
        ``peers``: global ranks, in the order in which the scheme's table numbers them.
        ``index``: this rank's position among ``peers``.
        ``lengths``: for each block of the sequence, on all ranks, its number of tokens in a row; empty if all are
            equal.
        ``window``: number of tokens that a token sees, itself included; 0 for all.
    """
    if operator := find("context", scheme).implementation().operator():
        out: T = operator(q, k, v, cu_seqlens, peers, index, lengths, window)[0]
        return out
    return tile_attention(q, k, v, cu_seqlens, scheme, peers, index, lengths, window)[0]


def ulysses(attend: Attend, group: str, ranks: int, index: int) -> Attend:
    """Return an attention that exchanges heads for tokens, and calls ``attend`` on a share of the heads (Ulysses).

    ``group``: name of the process group; ``ranks``: its size; ``index``: this rank's position in it. ``attend`` sees
    the tokens of all ranks of the group.
    """

    def exchanged(q: T, k: T, v: T, cu_seqlens: T, window: int = 0) -> T:
        heads, kv_heads = q.shape[2], k.shape[2]
        own, read = head_ranges(heads, kv_heads, ranks)
        which = head_index(heads, kv_heads, ranks, index)
        q = exchange_heads(q, group, own, index, True)
        k, v = (exchange_heads(x, group, read, index, True) for x in (k, v))
        if which is not None:
            k, v = k[:, :, which], v[:, :, which]
        return exchange_heads(
            attend(q, k, v, cu_seqlens, window), group, own, index, False
        )

    return exchanged
