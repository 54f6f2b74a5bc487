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
    """Ranks of a process group that exchange rows of tokens on the way to the slots of experts.

    A slot is a position in a rank's stack of expert weights; slots are numbered over all ranks. Rows for a slot are
    sent to one member of the group: to the rank that has the slot or, if that rank is outside of the group, to a member
    that passes them on. Rows for a slot without such a member are sent to nobody.

    Attributes:
        ``mesh``: the layout over ranks.
        ``owner``: for each slot the number of the member that gets the slot's rows, ``[slots + 1]``. The number
            ``count`` means nobody. The last entry is for tokens that are dropped, and is ``count`` too.
        ``slots``: the number of slots.
        ``first``, ``last``: this rank has the slots from ``first`` up to but not including ``last``.
        ``count``, ``rank``: the number of members, and this rank's number among them.
        ``sent``: counts the bytes that this rank sends to others. Its keys are ``tokens`` (rows of tokens), ``copies``
            (lent weights) and ``moves`` (experts that change their owner).
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
        """Count the bytes of ``count`` rows, shaped like those of ``rows``, as sent for the purpose ``what``.

        ``what``: the kind of data, such as ``tokens``.
        """
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

    @property
    def uneven(self) -> bool:
        """Whether members may have different numbers of tokens in a pass."""
        layout = self.mesh.layout
        return bool(self.mesh.uneven or layout.balance or layout.lsh)

    def most(self, number: int) -> int:
        """Return the largest of the numbers that the members of the group pass as ``number``. Collective."""
        with untyped():
            largest = torch.tensor(number, device=self.mesh.device)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return int(largest) if has_numbers(largest) else number

    def declared(self, x: T) -> T:
        """Return ``x`` unchanged, and declare on which axes it differs between ranks, for ``weft verify --types``.

        ``x``: a tensor that follows from the routing of tokens.
        """
        return declare(x, self.mesh, **by_token(self.mesh))


class Homes(Members):
    """The ranks that hold all experts of a layer together, and which experts each of them owns.

    A slot is a position in a rank's stack of expert weights, numbered over all ranks.

    Attributes:
        ``pieces``: the number of pieces of each expert, which are placed like experts; 1 where experts are not cut.
        ``items``: the number of pieces on all ranks together.
        ``homes``: for each rank, the pieces that the rank owns.
        ``shares``: for each rank, the range of its slots as a pair (first slot, end). The first slots of a rank are for
            the pieces that it owns, the others for copies.
    """

    pieces: int
    items: int
    homes: Sequence[range]
    shares: Sequence[tuple[int, int]]
