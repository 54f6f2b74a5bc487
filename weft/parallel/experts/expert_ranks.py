"""Which ranks have which experts, and between which of them rows travel."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from weft.layout.axes import FOLDED
from weft.layout.boundary import untyped
from weft.layout.dims import Dim, part
from weft.layout.mesh import Mesh
from weft.layout.placement import Place, expert_blocks
from weft.models.router import Choice
from weft.parallel.experts.copies import Copies
from weft.parallel.experts.members import Homes, Members

T = torch.Tensor


class ExpertRanks(Homes):
    """The ranks that have all experts together, and ``slot_of``, which says where which expert is.

    Where experts are fewer than ranks, each is cut in ``pieces``, which are placed like experts. ``homes``: those that
    each rank holds, and ``shares``: its slots, in which these come first, in the order in which its group has the
    ranks. What else there are slots for is up to ``copies``.
    """

    def __init__(self, mesh: Mesh, dims: Sequence[Dim], sent: Counter[str]) -> None:
        """``dims``: those of a stack of weights, of which the first counts the experts."""
        experts = dims[0].count
        group, layout = mesh.group("exchange"), mesh.layout
        count, self.pieces = layout.ep, max(1, layout.ep // experts)
        self.items = experts * self.pieces
        spare = layout.spare if layout.placement != "static" else 0
        axes = (FOLDED, "tp") if layout.folds_tp else (FOLDED,)
        placements = [
            Place.of(layout, rank) for rank in dist.get_process_group_ranks(group)
        ]
        places = [place.along(*axes) for place in placements]
        self.homes = [range(*part(self.items, count, place)) for place in places]
        sizes = [len(home) + spare for home in self.homes]
        self.shares = list(pairwise(accumulate(sizes, initial=0)))
        owner = torch.arange(count + 1).repeat_interleave(torch.tensor([*sizes, 1]))
        super().__init__(mesh, group, owner, *self.shares[group.rank()], sent)
        order = torch.tensor([item for home in self.homes for item in home])
        at = [
            first + i
            for (first, _), home in zip(self.shares, self.homes, strict=True)
            for i in range(len(home))
        ]
        nowhere = torch.full((self.pieces,), self.slots)
        slot_of = torch.cat(
            (torch.empty_like(order).scatter(0, order, torch.tensor(at)), nowhere)
        )
        self.slot_of = slot_of.to(mesh.device)
        self.copies = Copies(self, spare) if spare else None
        self.stacks = [place.logical(dims, None).local_shape for place in placements]
        self.blocks = [1]
        # neighbours have neighbouring experts, or pieces of one
        if places == [*range(count)] and not spare:
            fit = [
                n
                for n in (*expert_blocks(layout), count)
                if n % self.pieces == 0 or self.pieces % n == 0
            ]
            self.blocks += fit

    def placed(self, choice: Choice) -> Choice:
        """``choice`` with slots in the place of experts; those of all pieces of an expert, whose results add up."""
        with untyped():
            pieces = torch.arange(self.pieces, device=choice.ids.device)
            ids = (choice.ids[..., None] * self.pieces + pieces).flatten(-2)
            slots = (
                self.slot_of[ids] if self.copies is None else self.copies.slots_of(ids)
            )
        weights = (
            choice.weights
            if self.pieces == 1
            else choice.weights.repeat_interleave(self.pieces, dim=-1)
        )
        return Choice(weights, self.declared(slots))

    def across(self, block: int, joined: int = 1) -> Members:
        """The ranks at this one's place in each block of so many neighbours; they lead to the slots of their block.

        ``joined``: so many neighbouring slots of a block count as one.
        """
        start = self.rank // block * block
        first, last = (
            self.shares[start][0] // joined,
            self.shares[start + block - 1][1] // joined,
        )
        owner = torch.cat((self.owner[:-1:joined], self.owner[-1:])) // block
        return Members(
            self.mesh, self.mesh.group(f"across {block}"), owner, first, last, self.sent
        )

    def within(self, block: int, from_anywhere: bool = False) -> Members:
        """The ranks of this one's block of neighbours.

        ``from_anywhere``: they lead to all slots, to those of other blocks by who has the same place in these.
        """
        here = from_anywhere | (self.owner // block == self.rank // block)
        owner = torch.where(here & (self.owner < self.count), self.owner % block, block)
        return Members(
            self.mesh,
            self.mesh.group(f"within {block}"),
            owner,
            self.first,
            self.last,
            self.sent,
        )
