"""Ranks that exchange rows of tokens, and those of them that have experts."""

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from weft.layout.boundary import declare, untyped
from weft.layout.mesh import Mesh
from weft.models.numbers import has_numbers
from weft.models.router import by_token
from weft.parallel.units import all_gather

T = torch.Tensor


class Members:
    """Ranks of a group that exchange rows of tokens on the way to *slots* of experts.

    ``owner[s]``: the member that has slot ``s``, or leads to it, ``[slots + 1]``; the value ``count`` (the number of
    members) stands for no member. The last slot is that of dropped tokens. This rank has the slots from ``first`` up to
    ``last``. ``sent`` counts the bytes that this rank sends to others, by :data:`weft.models.router.SENT`.
    """

    def __init__(
        self,
        mesh: Mesh,
        group: dist.ProcessGroup,
        owner: T,
        first: int,
        last: int,
        sent: Counter[str],
    ) -> None:
        self.mesh, self.group, self.sent = mesh, group, sent
        self.owner, self.slots = owner.to(mesh.device), len(owner) - 1
        self.first, self.last = first, last
        self.count, self.rank = group.size(), group.rank()

    def note(self, what: str, rows: T, count: int) -> None:
        """Add the bytes of ``count`` rows like ``rows`` to those sent for ``what``, a key of the counter ``sent``."""
        self.sent[what] += count * rows.shape[1:].numel() * rows.element_size()

    def wanted(self, slots: T) -> T:
        """Return which members each token goes to, as 0 or 1: int64 ``[tokens, members]``.

        ``slots``: the slots of the experts that each token is routed to, ``[tokens, k]``.
        """
        none = slots.new_zeros(len(slots), self.count + 1)
        return none.scatter(1, self.owner[slots], 1)[:, : self.count]

    def counts_from_all(self, counts: T) -> T:
        """Gather the ``counts`` of all members, int64 ``[n]`` on each, to ``[members, n]``. Collective."""
        gathered = counts.new_empty(self.count * len(counts))
        all_gather(gathered, counts, group=self.group)
        return gathered.view(self.count, -1)

    def most(self, number: int) -> int:
        """Return the largest ``number`` that any member passes. Collective."""
        with untyped():
            largest = torch.tensor(number, device=self.mesh.device)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return int(largest) if has_numbers(largest) else number

    def declared(self, x: T) -> T:
        """Declare to the type checker that ``x`` follows from the routing of tokens, and return it."""
        return declare(x, self.mesh, **by_token(self.mesh))


class Homes(Members):
    """The ranks that hold all experts of a layer together.

    Where an expert is cut, its ``pieces`` are placed like experts. ``items``: the number of experts, or of pieces, on
    all ranks together. ``homes[r]``: the experts or pieces of rank ``r``; ``shares[r]``: the range of its slots, which
    begins with the slots of these.
    """

    pieces: int
    items: int
    homes: Sequence[range]
    shares: Sequence[tuple[int, int]]
