"""The ranks of each expert, and the groups of ranks between which rows travel."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from weft.layout.axes import FOLDED
from weft.layout.axis_groups import numbers_within
from weft.layout.boundary import untyped
from weft.layout.dims import Dim, part
from weft.layout.mesh import Mesh
from weft.layout.placement import Place
from weft.layout.placement_groups import expert_blocks
from weft.models.router import Choice
from weft.parallel.experts.copies import Copies
from weft.parallel.experts.members import Homes, Members

T = torch.Tensor


class ExpertRanks(Homes):
    """The ranks that hold all experts of a layer together, and the slots of each expert.

    A slot is a position in a rank's stack of expert weights; slots are numbered over all ranks, rank by rank. If there
    are fewer experts than ranks, each expert is cut in pieces, which are placed like experts.

    Attributes:
        ``pieces``: number of pieces of each expert; 1 where experts are not cut.
        ``slot_of``: the slot of each expert or piece.
        ``copies``: copies of other ranks' experts, which take the slots after those of a rank's own experts; None
            without such slots.
    """

    def __init__(self, mesh: Mesh, dims: Sequence[Dim], sent: Counter[str]) -> None:
        """Assign the experts of a layer to the ranks of ``mesh`` that exchange its tokens.

        ``dims``: dimensions of a stack of expert weights, of which the first counts the experts; ``sent``: counter to
        which the bytes that this rank sends are added, by kind of data.
        """
        experts = dims[0].count
        group, layout = mesh.group("exchange"), mesh.layout
        count, self.pieces = layout.ep, max(1, layout.ep // experts)
        self.items = experts * self.pieces
        spare = layout.spare if layout.placement != "static" else 0
        axes = (FOLDED, "tp") if layout.folds_tp else (FOLDED,)
        step = mesh.step_group
        assert step is not None
        placements = [Place.of(layout, rank) for rank in numbers_within(group, step)]
        places = [place.along(*axes) for place in placements]
        self.homes = [range(*part(self.items, count, place)) for place in places]
        sizes = [len(home) + spare for home in self.homes]
        self.shares = list(pairwise(accumulate(sizes, initial=0)))
        owner = torch.arange(count + 1).repeat_interleave(torch.tensor([*sizes, 1]))
        super().__init__(mesh, group, owner, *self.shares[group.rank()], sent)
        slot_of = torch.full((self.items + self.pieces,), self.slots)
        for (first, _), home in zip(self.shares, self.homes, strict=True):
            slot_of[home.start : home.stop] = first + torch.arange(len(home))
        self.slot_of = slot_of.to(mesh.device)
        self.copies = Copies(self, spare) if spare else None
        self.stacks = [place.logical(dims, None).local_shape for place in placements]
        self.blocks = [1]
        # neighbours have neighbouring experts, or pieces of one
        if places == [*range(count)] and not spare:
            self.blocks += [
                size
                for size in (*expert_blocks(layout), count)
                if size % self.pieces == 0 or self.pieces % size == 0
            ]

    def placed(self, choice: Choice) -> Choice:
        """Return a routing ``choice`` with slots in place of experts: positions in the ranks' stacks of expert weights.

        Slots are numbered over all ranks. An expert that is cut becomes the slots of all its pieces, each with the
        expert's routing weight; an expert with copies becomes the slot of one of them.
        """
        with untyped():
            pieces = torch.arange(self.pieces, device=choice.ids.device)
            ids = (choice.ids[..., None] * self.pieces + pieces).flatten(-2)
            copies = self.copies
            slots = self.slot_of[ids] if copies is None else copies.slots_of(ids)
        weights = choice.weights
        if self.pieces > 1:
            weights = weights.repeat_interleave(self.pieces, dim=-1)
        return Choice(weights, self.declared(slots))

    def across(self, block: int, joined: int = 1) -> Members:
        """Return the group that has one rank of each block of ``block`` neighbouring ranks, such as a node.

        All members of the group have the same position in their blocks, this rank among them. A token for any expert of
        a block is sent to the member that is in that block. ``joined``: number of neighbouring slots (positions in the
        ranks' stacks of expert weights) that count as one slot in the group.
        """
        start = self.rank // block * block
        first = self.shares[start][0] // joined
        last = self.shares[start + block - 1][1] // joined
        owner = torch.cat((self.owner[:-1:joined], self.owner[-1:])) // block
        group = self.mesh.group(f"across {block}")
        return Members(self.mesh, group, owner, first, last, self.sent)

    def within(self, block: int, from_anywhere: bool = False) -> Members:
        """Return the group of ``block`` neighbouring ranks, such as a node, to which this rank belongs.

        A slot is a position in a rank's stack of expert weights. Tokens for a slot of a rank in the block are sent to
        that rank. ``from_anywhere``: what happens to tokens for slots of other blocks. False: they are sent to nobody.
        True: they are sent to the rank that has the same position in this block as the slot's owner has in its own
        block.
        """
        here = from_anywhere | (self.owner // block == self.rank // block)
        owner = torch.where(here & (self.owner < self.count), self.owner % block, block)
        group = self.mesh.group(f"within {block}")
        return Members(self.mesh, group, owner, self.first, self.last, self.sent)
