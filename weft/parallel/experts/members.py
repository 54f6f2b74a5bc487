"""Ranks that bring rows of tokens to each other, and those of them that have experts."""

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
    """Ranks of a group that bring rows to each other, on the way to *slots* for experts.

    ``owner``: the member that has, or leads to, each slot, ``[slots + 1]``. The number after the last member's stands
    for none of them, and so it is with the last slot, which is that of choices that are dropped. ``first`` to ``last``
    are the slots of this rank. ``sent``: the bytes that it sends to others, by :data:`weft.models.router.SENT`.
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
        self.mesh, self.group, self.owner, self.first, self.last = (
            mesh,
            group,
            owner.to(mesh.device),
            first,
            last,
        )
        self.count, self.rank, self.slots, self.sent = (
            group.size(),
            group.rank(),
            len(owner) - 1,
            sent,
        )

    def note(self, what: str, rows: T, count: int) -> None:
        """Count the bytes of so many ``rows`` as sent."""
        self.sent[what] += count * rows.shape[1:].numel() * rows.element_size()

    def owners(self, slots: T) -> T:
        """The members that have these slots."""
        return self.owner[slots]

    def wanted(self, owners: T) -> T:
        """1 where a token goes to a member at all, else 0: ``[tokens, members]``, of the ``owners`` of its choices."""
        none = torch.zeros(
            len(owners), self.count + 1, dtype=torch.int64, device=owners.device
        )
        return none.scatter(1, owners, 1)[:, : self.count]

    def counts_from_all(self, counts: T) -> T:
        """What each member gives of the same number of whole numbers: ``[members, numbers]``."""
        found = counts.new_empty(self.count * len(counts))
        all_gather(found, counts, group=self.group)
        return found.view(self.count, -1)

    def most(self, number: int) -> int:
        """The largest of all members' numbers."""
        with untyped():
            found = torch.tensor(number, device=self.mesh.device)
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return int(found) if has_numbers(found) else number

    def declared(self, x: T) -> T:
        """``x`` with the type of what tokens choose."""
        return declare(x, self.mesh, **by_token(self.mesh))


class Homes(Members):
    """Members that have all experts together, or pieces of them, which are placed like experts.

    ``pieces``: so many an expert is cut in. ``items``: experts, or pieces of these, of all members together.
    ``homes``: those that each member holds, and ``shares``: its slots, in which these come first.
    """

    pieces: int
    items: int
    homes: Sequence[range]
    shares: Sequence[tuple[int, int]]
