"""How tokens get to experts that other ranks hold (``ep``), and back.

Every way brings the same rows to the same experts; they differ in bytes. Of ``T`` tokens on each of ``P`` ranks, each
with ``k`` of ``E`` experts, a rank sends, per direction: by ``all-to-all`` a row for each choice that is elsewhere,
about ``T k (P - 1) / P`` of them; by ``per-rank`` one copy to each rank that has any of a token's experts; by
``all-gather`` all tokens to all, ``T (P - 1)``, in fixed sizes.

Rows that have set out are waited for when experts need them, so that what else there is to compute runs meanwhile, and
likewise in backward: the gradients of these rows are back when what comes before dispatch needs them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from weft.layout.boundary import declare, untyped
from weft.layout.dims import part
from weft.layout.layout import FOLDED
from weft.layout.mesh import Mesh
from weft.layout.placement import Place
from weft.models.experts import (
    Dispatched,
    Dispatcher,
    Local,
    Mixture,
    Moved,
    counted,
    placed,
    reordered,
    sizes_of,
    spread,
    weighted,
)
from weft.models.router import Choice, by_token
from weft.models.transformer import Transformer
from weft.parallel.experts.copies import Copies
from weft.parallel.units import all_gather, exchanged_rows, reduce_scatter

T = torch.Tensor


class Ranks:
    """The ranks that have all experts together. Each has some *slots*, and ``slot_of`` says where which expert is.

    Where experts are fewer than ranks, each is cut in ``pieces``, which are placed like experts. ``homes``: those that
    each rank holds, and ``shares``: its slots, in which these come first, in the order in which its group has the
    ranks. What else there are slots for is up to ``copies``.
    """

    def __init__(self, mesh: Mesh, experts: int) -> None:
        self.mesh, layout = mesh, mesh.layout
        self.group, self.count = mesh.group("exchange"), layout.ep
        self.rank, self.pieces = self.group.rank(), max(1, self.count // experts)
        self.items = experts * self.pieces
        spare = layout.spare if layout.placement != "static" else 0
        axes = (FOLDED, "tp") if layout.folds_tp else (FOLDED,)
        places = [Place.of(layout, rank).along(*axes) for rank in dist.get_process_group_ranks(self.group)]
        self.homes = [range(*part(self.items, self.count, place)) for place in places]
        sizes = [len(home) + spare for home in self.homes]
        self.shares = list(pairwise(accumulate(sizes, initial=0)))
        self.slots, (self.first, self.last) = sum(sizes), self.shares[self.rank]
        order = torch.tensor([item for home in self.homes for item in home])
        at = [first + i for (first, _), home in zip(self.shares, self.homes, strict=True) for i in range(len(home))]
        nowhere = torch.full((self.pieces,), self.slots)  # of choices that are dropped: a slot that no rank has
        self.slot_of = torch.cat((torch.empty_like(order).scatter(0, order, torch.tensor(at)), nowhere))
        self.owner = torch.arange(self.count + 1).repeat_interleave(torch.tensor([*sizes, 1]))
        self.copies = Copies(self, spare) if spare else None

    def placed(self, choice: Choice) -> Choice:
        """``choice`` with slots in the place of experts; those of all pieces of an expert, whose results add up."""
        with untyped():
            pieces = torch.arange(self.pieces, device=choice.ids.device)
            ids = (choice.ids[..., None] * self.pieces + pieces).flatten(-2)
            slots = self.slot_of.to(ids.device)[ids] if self.copies is None else self.copies.slots_of(ids)
        weights = choice.weights if self.pieces == 1 else choice.weights.repeat_interleave(self.pieces, dim=-1)
        return Choice(weights, self.declared(slots))

    def owners(self, slots: T) -> T:
        """The ranks that have these slots."""
        return self.owner.to(slots.device)[slots]

    def wanted(self, owners: T) -> T:
        """1 where a token goes to a rank at all, else 0: ``[tokens, ranks]``, of the ``owners`` of its choices."""
        none = torch.zeros(len(owners), self.count + 1, dtype=torch.int64, device=owners.device)
        return none.scatter(1, owners, 1)[:, : self.count]

    def counts_from_all(self, counts: T) -> T:
        """What each rank gives of the same number of whole numbers: ``[ranks, numbers]``."""
        found = counts.new_empty(self.count * len(counts))
        all_gather(found, counts, group=self.group)
        return found.view(self.count, -1)

    def declared(self, x: T) -> T:
        """``x`` with the type of what tokens choose."""
        return declare(x, self.mesh, **by_token(self.mesh))


class AllToAll:
    """A row for each choice, to the rank of its expert."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def dispatch(self, x: T, choice: Choice) -> Callable[[], Dispatched]:
        ranks, choice = self.ranks, self.ranks.placed(choice)
        with untyped():
            order = choice.ids.flatten().argsort(stable=True)  # those that are dropped come last
            counts = counted(choice.ids, ranks.slots + 1)[:-1]
            arriving = ranks.counts_from_all(counts)[:, ranks.first : ranks.last]  # [ranks, experts here]
            sent = sizes_of(torch.stack([counts[lo:hi].sum() for lo, hi in ranks.shares]), len(order))
            received = sizes_of(arriving.sum(1), len(order))
            counts_here = arriving.sum(0)
            here = torch.arange(arriving.shape[1], device=x.device).repeat(ranks.count)
            which = counts.new_empty(sum(received)) if x.is_meta else here.repeat_interleave(arriving.flatten())
            by_expert = which.argsort(stable=True)
        order, by_expert = ranks.declared(order), ranks.declared(by_expert)
        # Rank by rank, and of each rank expert by expert.
        rows = exchanged(spread(x, order, choice.ids.shape[1], sum(sent)), sent, received, ranks.group)
        meta = (order, choice.weights, by_expert, sent, received)
        return lambda: Dispatched(reordered(rows(), by_expert), counts_here, meta)

    def combine(self, rows: T, meta: Any) -> T:
        order, weights, by_expert, sent, received = meta
        back = exchanged(placed(rows, by_expert), received, sent, self.ranks.group)()
        return weighted(back, order, weights)


class PerRank:
    """One copy of a token to each rank that has any of its experts, which adds up what these make of it."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.fan_out = ranks, Local(range(ranks.first, ranks.last), others=True)

    def dispatch(self, x: T, choice: Choice) -> Callable[[], Dispatched]:
        ranks, choice, tokens = self.ranks, self.ranks.placed(choice), len(x)
        with untyped():
            owners = ranks.owners(choice.ids)  # [tokens, k]
            wanted = ranks.wanted(owners)
            # A place for each rank that a token could go to; those that it goes to come first, rank by rank.
            places = torch.where(wanted > 0, torch.arange(ranks.count, device=x.device), ranks.count).flatten()
            order, counts = places.argsort(stable=True), wanted.sum(0)
            sent = sizes_of(counts, len(order))
            received = sizes_of(ranks.counts_from_all(counts)[:, ranks.rank], len(order))
        order = ranks.declared(order)

        rows, weights, ids = (
            exchanged(spread(y, order, ranks.count, sum(sent)), sent, received, ranks.group)
            for y in (x, choice.weights, choice.ids)
        )

        def arrived() -> Dispatched:
            found = self.fan_out.dispatch(rows(), Choice(weights(), ids()))()
            return Dispatched(found.rows, found.counts, (found.meta, order, tokens, sent, received))

        return arrived

    def combine(self, rows: T, meta: Any) -> T:
        inner, order, tokens, sent, received = meta
        back = exchanged(self.fan_out.combine(rows, inner), received, sent, self.ranks.group)()
        with untyped():
            ones = torch.ones(tokens, self.ranks.count, device=rows.device)
        return weighted(back, order, self.ranks.declared(ones))


class AllGather:
    """All tokens to all ranks, each of which adds up what its experts make of them."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.fan_out = ranks, Local(range(ranks.first, ranks.last), others=True)

    def dispatch(self, x: T, choice: Choice) -> Callable[[], Dispatched]:
        group, choice = self.ranks.group, self.ranks.placed(choice)
        weights, ids, rows = (gathered(y, group) for y in (choice.weights, choice.ids, x))
        return lambda: self.fan_out.dispatch(rows(), Choice(weights(), ids()))()

    def combine(self, rows: T, meta: Any) -> T:
        return scattered(self.fan_out.combine(rows, meta), self.ranks.group)()


class Everywhere:
    """All ranks have the same tokens, as generation has: each adds up what its experts make of them, then all do."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.fan_out = ranks, Local(range(ranks.first, ranks.last), others=True)

    def dispatch(self, x: T, choice: Choice) -> Callable[[], Dispatched]:
        return self.fan_out.dispatch(x, self.ranks.placed(choice))

    def combine(self, rows: T, meta: Any) -> T:
        share = self.fan_out.combine(rows, meta)
        dist.all_reduce(share, group=self.ranks.group)
        return share


def numbers_sent(choice: Choice, width: int, ranks: Ranks) -> T:
    """How many numbers each way sends of these tokens to other ranks, forward and backward: int64 ``[ways]``.

    ``choice`` is :meth:`Ranks.placed`. Rows go there and back, twice. Where results are added up elsewhere, weights and
    ids go along, and the weights' gradients come back.
    """
    tokens, k = choice.ids.shape
    owners = ranks.owners(choice.ids)
    rows = ((owners != ranks.rank) & (owners < ranks.count)).sum()
    present = ranks.wanted(owners)
    copies = present.sum() - present[:, ranks.rank].sum()
    to_all = torch.full_like(rows, tokens * (ranks.count - 1))
    return torch.stack((4 * width * rows, (4 * width + 3 * k) * copies, (4 * width + 3 * k) * to_all))


class Adaptive:
    """In each layer and pass the way that sends least in total, as :func:`numbers_sent` counts (after Tutel, Hwang et
    al. 2023); the weights stay where they are."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.ways = ranks, [way(ranks) for way in WAYS.values()]

    def dispatch(self, x: T, choice: Choice) -> Callable[[], Dispatched]:
        with untyped():
            sent = numbers_sent(self.ranks.placed(choice), x.shape[1], self.ranks)
            dist.all_reduce(sent, group=self.ranks.group)
            best = 0 if sent.is_meta else int(sent.argmin())
        arriving = self.ways[best].dispatch(x, choice)

        def arrived() -> Dispatched:
            found = arriving()
            return found._replace(meta=(best, found.meta))

        return arrived

    def combine(self, rows: T, meta: Any) -> T:
        best, inner = meta
        return self.ways[best].combine(rows, inner)


WAYS: dict[str, Callable[[Ranks], Dispatcher]] = {
    "all-to-all": AllToAll, "per-rank": PerRank, "all-gather": AllGather,
}  # fmt: skip
#: The dispatchers, by ``layout.dispatch``.
DISPATCHERS = WAYS | {"adaptive": Adaptive}


def connect_experts(model: Transformer, mesh: Mesh) -> None:
    """Let tokens get to the experts of other ranks, where there are some (``ep``)."""
    for module in model.modules():
        if isinstance(module, Mixture) and mesh.layout.ep > 1:
            ranks = Ranks(mesh, module.router.count)
            module.dispatcher, module.copies = DISPATCHERS[mesh.layout.dispatch](ranks), ranks.copies


#: Waits for rows that are under way.
Awaited = Callable[[], T]
#: Rows as they are with others, and what is to be waited for until they are there.
Moving = tuple[T, Any]


def exchanged(rows: T, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Awaited:
    """Rows from every rank: so many of ``rows`` to each rank in turn, and so many from each."""
    there, back = (
        partial(exchanged_rows, sent=a, received=b, group=group) for a, b in ((sent, received), (received, sent))
    )
    return _move(rows, there, back)


def gathered(x: T, group: dist.ProcessGroup) -> Awaited:
    """The rows of all ranks, as many of each."""
    return _move(x, partial(_gather, group=group), partial(_scatter, group=group))


def scattered(x: T, group: dist.ProcessGroup) -> Awaited:
    """This rank's rows of the sum of all ranks' ``x``."""
    return _move(x, partial(_scatter, group=group), partial(_gather, group=group))


def _gather(x: T, group: dist.ProcessGroup) -> Moving:
    found = x.new_empty(group.size() * len(x), *x.shape[1:])
    return found, all_gather(found, x.contiguous(), group=group, async_op=True)


def _scatter(x: T, group: dist.ProcessGroup) -> Moving:
    found = x.new_empty(len(x) // group.size(), *x.shape[1:])
    return found, reduce_scatter(found, x.contiguous(), group=group, async_op=True)


@dataclass
class _Flight:
    """Moves rows there and their gradients back, and keeps what is under way until it is needed."""

    there: Callable[[T], Moving]
    back: Callable[[T], Moving]
    moving: Moving | None = None

    def land(self) -> T:
        """What was under way."""
        assert self.moving is not None
        (found, work), self.moving = self.moving, None
        work.wait()
        return found

    def leave(self, rows: T) -> T:
        self.moving = self.there(rows)
        return self.moving[0]

    def arrive(self, rows: T) -> T:
        self.land()
        return rows.view_as(rows)

    def turn_back(self, grad: T) -> T:
        """Let gradients set out; what is returned, of their shape here, is not looked at by :meth:`come_back`."""
        self.moving = self.back(grad)
        return grad

    def come_back(self, grad: T) -> T:
        return self.land()


def _move(rows: T, there: Callable[[T], Moving], back: Callable[[T], Moving]) -> Awaited:
    """Let rows go ``there``, and in backward their gradients ``back``; what is returned waits for the rows."""
    flight = _Flight(there, back)
    under_way = Moved.apply(rows, flight.leave, flight.come_back)
    return lambda: Moved.apply(under_way, flight.arrive, flight.turn_back)
