"""How tokens get to experts that other ranks hold (``ep``), and back.

Every way brings the same rows to the same experts; they differ in bytes. Of ``T`` tokens on each of ``P`` ranks, each
with ``k`` of ``E`` experts, a rank sends, per direction: by ``all-to-all`` a row for each choice that is elsewhere,
about ``T k (P - 1) / P`` of them; by ``per-rank`` one copy to each rank that has any of a token's experts; by
``all-gather`` all tokens to all, ``T (P - 1)``, in fixed sizes.

Where ranks stand on ``n`` nodes of ``g``, ``two-level`` brings a row for each choice to who stands on this node where
its expert's rank does on its own, and then to that rank: fewer and larger messages, ``g + n - 2`` of them. ``per-node``
brings one copy to each node that has any of a token's experts, and from there one to each rank.
"""

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


class AllToAll:
    """A row for each choice, to the member that has its expert."""

    def __init__(self, members: Members) -> None:
        self.members = members

    def dispatch(self, x: T, choice: Choice) -> Arriving:
        members = self.members
        with untyped():
            # those that are dropped come last
            order = choice.ids.flatten().argsort(stable=True)
            counts = expert_counts(choice.ids, members.slots + 1)[:-1]
            # [members, experts here]
            arriving = members.counts_from_all(counts)[:, members.first : members.last]
            sent = sizes_of(
                counts.new_zeros(members.count).scatter_add(
                    0, members.owner[:-1], counts
                ),
                len(order),
            )
            received = sizes_of(arriving.sum(1), len(order))
            counts_here = arriving.sum(0)
            here = torch.arange(arriving.shape[1], device=x.device).repeat(
                members.count
            )
            which = here.repeat_interleave(
                arriving.flatten(), output_size=sum(received)
            )
            by_expert = which.argsort(stable=True)
        order, by_expert = members.declared(order), members.declared(by_expert)
        # Rank by rank, and of each rank expert by expert.
        rows = exchanged(
            spread(x, order, choice.ids.shape[1], sum(sent)), sent, received, members
        )
        meta = (order, choice.weights, by_expert, sent, received)
        return lambda: Dispatched(reordered(rows(), by_expert), counts_here, meta)

    def combine(self, rows: T, meta: Any) -> Awaited:
        order, weights, by_expert, sent, received = meta
        back = exchanged(placed(rows, by_expert), received, sent, self.members)
        return lambda: weighted(back(), order, weights)


class PerMember:
    """One copy of a token to each member that has or leads to any of its experts, for the ``inner`` way from there.

    A member adds up what comes of a token before it goes back.
    """

    def __init__(self, members: Members, inner: Dispatcher) -> None:
        self.members, self.inner = members, inner

    def dispatch(self, x: T, choice: Choice) -> Arriving:
        members, tokens = self.members, len(x)
        with untyped():
            wanted = members.wanted(members.owners(choice.ids))
            # A place for each rank that a token could go to; those that it goes to come first, rank by rank.
            places = torch.where(
                wanted > 0, torch.arange(members.count, device=x.device), members.count
            ).flatten()
            order, counts = places.argsort(stable=True), wanted.sum(0)
            sent = sizes_of(counts, len(order))
            received = sizes_of(
                members.counts_from_all(counts)[:, members.rank], len(order)
            )
        order = members.declared(order)

        rows, weights, ids = (
            exchanged(
                spread(y, order, members.count, sum(sent)), sent, received, members
            )
            for y in (x, choice.weights, choice.ids)
        )

        def arrived() -> Dispatched:
            found = self.inner.dispatch(rows(), Choice(weights(), ids()))()
            return found._replace(meta=(found.meta, order, tokens, sent, received))

        return arrived

    def combine(self, rows: T, meta: Any) -> Awaited:
        inner, order, tokens, sent, received = meta
        back = exchanged(
            self.inner.combine(rows, inner)(), received, sent, self.members
        )
        with untyped():
            ones = torch.ones(tokens, self.members.count, device=rows.device)
        ones = self.members.declared(ones)
        return lambda: weighted(back(), order, ones)


class AllGather:
    """All tokens to all members, each of which adds up what its experts make of them."""

    def __init__(self, members: Members) -> None:
        self.members, self.fan_out = members, local_experts(members)
        self.uneven = bool(members.mesh.layout.balance or members.mesh.layout.lsh)

    def dispatch(self, x: T, choice: Choice) -> Arriving:
        members, tokens = self.members, len(x)
        if self.uneven and (padding := members.most(tokens) - tokens):
            pad = (0, 0, 0, padding)
            padded = F.pad(choice.ids, pad, value=members.slots)
            x, choice = F.pad(x, pad), Choice(F.pad(choice.weights, pad), padded)
        rows, weights, ids = (
            gathered(y, members) for y in (x, choice.weights, choice.ids)
        )

        def arrived() -> Dispatched:
            found = self.fan_out.dispatch(rows(), Choice(weights(), ids()))()
            return found._replace(meta=(found.meta, tokens))

        return arrived

    def combine(self, rows: T, meta: Any) -> Awaited:
        inner, tokens = meta
        back = scattered(self.fan_out.combine(rows, inner)(), self.members)
        return lambda: back()[:tokens]


class EachChoice:
    """Every choice as a token of its own, so that what comes of them is added up where they set out."""

    def __init__(self, inner: Dispatcher) -> None:
        self.inner = inner

    def dispatch(self, x: T, choice: Choice) -> Arriving:
        count, k = choice.ids.numel(), choice.ids.shape[1]
        order = torch.arange(count, device=x.device)
        alone = Choice(
            torch.ones_like(choice.weights).view(count, 1), choice.ids.view(count, 1)
        )
        arriving = self.inner.dispatch(spread(x, order, k), alone)

        def arrived() -> Dispatched:
            found = arriving()
            return found._replace(meta=(found.meta, order, choice.weights))

        return arrived

    def combine(self, rows: T, meta: Any) -> Awaited:
        inner, order, weights = meta
        back = self.inner.combine(rows, inner)
        return lambda: weighted(back(), order, weights)


def local_experts(members: Members) -> LocalExperts:
    """The experts of this rank, where tokens are that may have chosen others too."""
    return LocalExperts(range(members.first, members.last), others=True)


def per_rank(members: Members) -> Dispatcher:
    """One copy of a token to each rank that has any of its experts."""
    return PerMember(members, local_experts(members))


class Placing:
    """The ``inner`` way with slots in the place of experts."""

    def __init__(self, ranks: ExpertRanks, inner: Dispatcher) -> None:
        self.ranks, self.inner = ranks, inner

    def dispatch(self, x: T, choice: Choice) -> Arriving:
        return self.inner.dispatch(x, self.ranks.placed(choice))

    def combine(self, rows: T, meta: Any) -> Awaited:
        return self.inner.combine(rows, meta)
