"""The exchange after the last layer of a decode step: every rank gets the keys and values that others have computed."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from weft.models.paged import Pages
from weft.parallel.experts.expert_ranks import ExpertRanks
from weft.parallel.experts.rows import start_exchange

T = torch.Tensor

#: Bytes of a token's number.
NUMBER = torch.int32.itemsize


class HeldTokens(NamedTuple):
    """Tokens of a step that are on this rank, and how many each rank has.

    ``x``: the residual stream, ``[1, tokens, embed]``; ``own``: the tokens' numbers in the step, ascending int64
    ``[tokens]``; ``counts``: number of tokens on each rank.
    """

    x: T
    own: T
    counts: list[int]


class SharedStep(NamedTuple):
    """What all ranks know after a step. ``x``: on the first rank the last block's output for all tokens, ``[1, tokens,
    embed]``; on other ranks it has no tokens. ``owners``: number of the rank that has each token, before each block and
    after the last, int64 ``[blocks + 1, tokens]``.
    """

    x: T
    owners: T


def share_context(
    members: ExpertRanks, pages: Sequence[Pages], path: Sequence[HeldTokens], places: T, blocks: int
) -> SharedStep:  # fmt: skip
    """Cache on every rank the keys and values of a step's tokens, and give the first rank its output. All ranks must
    call it. A rank sends the others the numbers of the tokens that it had in each layer, and then the layers' keys
    and values. It sends the first rank the tokens that it has after the last layer.

    Args:
        ``members``: the ranks that hold the experts.
        ``pages``: the cache of each layer, to which each rank has written the tokens that it computed.
        ``path``: the tokens on this rank before each block, and after the last.
        ``places``: index of each token of the step in the cache, counted over the tokens of all blocks, ``[tokens]``.
        ``blocks``: number of blocks that the cache must have.
    """
    rank, last = members.rank, path[-1]
    for each in pages:
        each.room(blocks)
    rows = [
        cached_rows(each, places[held.own])
        for each, held in zip(pages, path, strict=False)
    ]
    numbers = torch.cat([held.own for held in path]).int()
    context = torch.cat([as_bytes(each) for each in (numbers, *rows)])
    for_first = torch.cat((context, as_bytes(last.x)))
    leaving = [
        (context[:0] if to == rank else context if to else for_first)
        for to in range(members.count)
    ]
    widths = [prod(each.shape[1:]) * each.element_size() for each in rows]
    widths.append(0 if rank else last.x.shape[-1] * last.x.element_size())
    due = [
        sum(
            held.counts[source] * (NUMBER + width)
            for held, width in zip(path, widths, strict=True)
        )
        * (source != rank)
        for source in range(members.count)
    ]
    arrived, work = start_exchange(
        torch.cat(leaving), [len(each) for each in leaving], due, members, "tokens"
    )
    work.wait()
    x = last.x.new_zeros(0 if rank else len(places), last.x.shape[-1])
    owners = torch.full((len(path), len(places)), rank, device=places.device)
    if not rank:
        x[last.own] = last.x[0]
    targets = [*rows, x]
    for source, chunk in enumerate(arrived.split(due)):
        counts = [held.counts[source] for held in path] * (source != rank)
        sizes = [NUMBER * sum(counts)]
        sizes += [n * width for n, width in zip(counts, widths, strict=False)]
        numbers_bytes, *parts = chunk.split(sizes)
        of_layers = numbers_bytes.clone().view(torch.int32).long().split(counts)
        for layer, (own, part) in enumerate(zip(of_layers, parts, strict=True)):
            owners[layer, own] = source
            values = part.clone().view(targets[layer].dtype)
            if layer < len(pages):
                write_rows(
                    pages[layer], places[own], values.view(-1, *rows[layer].shape[1:])
                )
            elif not rank:
                x[own] = values.view(-1, x.shape[1])
    return SharedStep(x[None], owners)


def as_bytes(x: T) -> T:
    """Return the values of ``x`` as bytes, uint8 ``[bytes]``, so that tensors of different types can be sent in one
    message.
    """
    return x.contiguous().flatten().view(torch.uint8)


def cached_rows(pages: Pages, places: T) -> T:
    """Return the cached values of some tokens in one layer, whose cache is ``pages``: ``[tokens, parts, heads,
    width]``. ``places``: indices of the tokens in the cache, counted over the tokens of all blocks, ``[tokens]``.
    """
    assert pages.store is not None
    return pages.store.flatten(1, 2)[:, places].transpose(0, 1)


def write_rows(pages: Pages, places: T, rows: T) -> None:
    """Write ``rows`` to ``pages``, the cache of a layer. ``rows`` are the values of the tokens at ``places``, in the
    form that :func:`cached_rows` returns.
    """
    assert pages.store is not None
    pages.store.flatten(1, 2)[:, places] = rows.transpose(0, 1)
