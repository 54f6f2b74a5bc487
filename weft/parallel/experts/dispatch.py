"""How tokens get to experts that other ranks hold (``ep``), and back.

All dispatchers bring the same rows to the same experts; they differ in bytes. With ``T`` tokens on each of ``P`` ranks
and ``k`` of ``E`` experts for each token, a rank sends in each direction: by ``all-to-all`` a row for each choice of an
expert on another rank, about ``T k (P - 1) / P`` rows; by ``per-rank`` one copy of a token to each rank that has any of
its experts; by ``all-gather`` all tokens to all ranks, ``T (P - 1)`` rows in fixed sizes.

On ``n`` nodes of ``g`` ranks, ``two-level`` sends a row for each choice in two hops, within the node to the rank with
the target's place and then to the target: ``g + n - 2`` larger messages. ``per-node`` sends one copy to each node that
has any of a token's experts, and from there one copy to each rank.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from weft.layout.boundary import untyped
from weft.models.experts import (
    Arriving,
    Dispatched,
    Dispatcher,
    LocalExperts,
    expert_counts,
    placed,
    reordered,
    sizes_of,
    spread,
    weighted,
)
from weft.models.router import Choice
from weft.parallel.experts.expert_ranks import ExpertRanks
from weft.parallel.experts.members import Members
from weft.parallel.experts.rows import Awaited, exchanged, gathered, scattered

T = torch.Tensor


@dataclass(frozen=True)
class AllToAll:
    """Dispatcher that sends each token once for every expert to which the token is routed, to that expert's rank.

    ``members``: the ranks of the group, and the experts that each has.
    """

    members: Members

    def dispatch(self, x: T, choice: Choice) -> Arriving:
        members = self.members
        with untyped():
            # those that are dropped come last
            order = choice.ids.flatten().argsort(stable=True)
            counts = expert_counts(choice.ids, members.slots + 1)[:-1]
            # [members, experts here]
            arriving = members.counts_from_all(counts)[:, members.first : members.last]
            by_member = counts.new_zeros(members.count)
            by_member.scatter_add_(0, members.owner[:-1], counts)
            sent = sizes_of(by_member, len(order))
            received = sizes_of(arriving.sum(1), len(order))
            counts_here = arriving.sum(0)
            experts = torch.arange(arriving.shape[1], device=x.device)
            of_row = experts.repeat(members.count).repeat_interleave(
                arriving.flatten(), output_size=sum(received)
            )
            by_expert = of_row.argsort(stable=True)
        order, by_expert = members.declared(order), members.declared(by_expert)
        # Rank by rank, and of each rank expert by expert.
        leaving = spread(x, order, choice.ids.shape[1], sum(sent))
        rows = exchanged(leaving, sent, received, members)
        meta = (order, choice.weights, by_expert, sent, received)
        return lambda: Dispatched(reordered(rows(), by_expert), counts_here, meta)

    def combine(self, rows: T, meta: Any) -> Awaited:
        order, weights, by_expert, sent, received = meta
        back = exchanged(placed(rows, by_expert), received, sent, self.members)
        return lambda: weighted(back(), order, weights)


@dataclass(frozen=True)
class PerMember:
    """Dispatcher that sends a token only once to each rank, even if the token is routed to several experts there.

    ``members``: the ranks of the group, and the experts for whose tokens each rank is responsible. A rank either has
    these experts itself, or passes the tokens on to ranks that have them. ``inner``: the dispatcher that brings a token
    from the receiving rank to the experts. On the way back, the receiving rank adds up the results of a token first,
    and sends the sum.
    """

    members: Members
    inner: Dispatcher

    def dispatch(self, x: T, choice: Choice) -> Arriving:
        members, tokens = self.members, len(x)
        with untyped():
            wanted = members.wanted(choice.ids)
            # A place for each rank that a token could go to; those that it goes to come first, rank by rank.
            places = torch.where(
                wanted > 0, torch.arange(members.count, device=x.device), members.count
            ).flatten()
            order, counts = places.argsort(stable=True), wanted.sum(0)
            sent = sizes_of(counts, len(order))
            arriving = members.counts_from_all(counts)[:, members.rank]
            received = sizes_of(arriving, len(order))
        order = members.declared(order)

        def leaving(y: T) -> T:
            return spread(y, order, members.count, sum(sent))

        rows, weights, ids = (
            exchanged(leaving(y), sent, received, members)
            for y in (x, choice.weights, choice.ids)
        )
        return then(
            lambda: self.inner.dispatch(rows(), Choice(weights(), ids()))(),
            (order, tokens, sent, received),
        )

    def combine(self, rows: T, meta: Any) -> Awaited:
        inner, order, tokens, sent, received = meta
        results = self.inner.combine(rows, inner)()
        back = exchanged(results, received, sent, self.members)
        with untyped():
            ones = torch.ones(tokens, self.members.count, device=rows.device)
        ones = self.members.declared(ones)
        return lambda: weighted(back(), order, ones)


class AllGather:
    """Dispatcher that sends all tokens to all ranks of a group.

    Each rank computes its own experts for every token, and their weighted results are summed over the ranks.
    ``members``: the ranks of the group, and the experts that each has.
    """

    def __init__(self, members: Members) -> None:
        self.members, self.fan_out = members, local_experts(members)

    def dispatch(self, x: T, choice: Choice) -> Arriving:
        members, tokens = self.members, len(x)
        if members.uneven and (padding := members.most(tokens) - tokens):
            pad = partial(F.pad, pad=(0, 0, 0, padding))
            nowhere = pad(choice.ids, value=members.slots)
            x, choice = pad(x), Choice(pad(choice.weights), nowhere)
        rows, weights, ids = (
            gathered(y, members) for y in (x, choice.weights, choice.ids)
        )
        return then(
            lambda: self.fan_out.dispatch(rows(), Choice(weights(), ids()))(), (tokens,)
        )

    def combine(self, rows: T, meta: Any) -> Awaited:
        inner, tokens = meta
        back = scattered(self.fan_out.combine(rows, inner)(), self.members)
        return lambda: back()[:tokens]


@dataclass(frozen=True)
class EachChoice:
    """Dispatcher that makes a copy of a token for each expert that the token is routed to.

    The dispatcher ``inner`` takes the copies to the experts. The experts' results come back one by one, and the rank
    that the token came from weights them and adds them up.
    """

    inner: Dispatcher

    def dispatch(self, x: T, choice: Choice) -> Arriving:
        count, k = choice.ids.numel(), choice.ids.shape[1]
        order = torch.arange(count, device=x.device)
        ones, ids = (
            torch.ones_like(choice.weights).view(count, 1),
            choice.ids.view(count, 1),
        )
        arriving = self.inner.dispatch(spread(x, order, k), Choice(ones, ids))
        return then(arriving, (order, choice.weights))

    def combine(self, rows: T, meta: Any) -> Awaited:
        inner, order, weights = meta
        back = self.inner.combine(rows, inner)
        return lambda: weighted(back(), order, weights)


def then(arriving: Arriving, meta: tuple[Any, ...]) -> Arriving:
    """Return a function that waits for the rows of an inner dispatcher, and adds ``meta`` to the dispatcher's metadata.

    ``arriving``: the inner dispatcher's function that waits for the rows; ``meta``: values that the outer dispatcher
    keeps until the experts' results come back, such as which row belongs to which token.
    """

    def arrived() -> Dispatched:
        inner = arriving()
        return inner._replace(meta=(inner.meta, *meta))

    return arrived


def local_experts(members: Members) -> LocalExperts:
    """Return the dispatcher that gives the rows on this rank to the experts on this rank, and sends nothing.

    Rows that are routed to experts of other ranks are left out. ``members``: this rank's group, and the experts that
    each rank of the group has.
    """
    return LocalExperts(range(members.first, members.last), others=True)


def per_rank(members: Members) -> Dispatcher:
    """Return the dispatcher that sends at most one copy of a token to each rank of ``members``.

    A rank gets a token if it has at least one expert to which the token is routed.
    """
    return PerMember(members, local_experts(members))


@dataclass(frozen=True)
class Placing:
    """Dispatcher that translates experts to slots, and leaves the sending of tokens to the dispatcher ``inner``.

    A slot is a position in a rank's stack of expert weights, numbered over all ranks. ``ranks``: the ranks that hold
    the experts, and the slots of each expert.
    """

    ranks: ExpertRanks
    inner: Dispatcher

    def dispatch(self, x: T, choice: Choice) -> Arriving:
        return self.inner.dispatch(x, self.ranks.placed(choice))

    def combine(self, rows: T, meta: Any) -> Awaited:
        return self.inner.combine(rows, meta)
