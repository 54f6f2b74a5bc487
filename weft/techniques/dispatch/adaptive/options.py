"""The choice, per layer and pass, of the dispatcher that sends least (after Tutel, Hwang et al. 2023).

Experts stay on their ranks, but for the duration of a pass a block of neighbouring ranks can share the weights of its
experts. Every rank of a block then has all weights of the block's experts, and a token is sent to one rank of each
block only, or nowhere if the block is all ranks. If experts are cut in their width, each rank of a block has wider
pieces of them, or whole experts.
"""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from weft.layout.boundary import untyped
from weft.models.experts import Arriving, Dispatched, Dispatcher, LocalExperts, Stacks
from weft.models.numbers import has_numbers
from weft.models.router import Choice
from weft.parallel.experts.dispatch import AllGather, AllToAll, per_rank
from weft.parallel.experts.expert_ranks import ExpertRanks
from weft.parallel.experts.members import Members
from weft.parallel.experts.rows import Awaited, gathered

T = torch.Tensor


class Option(NamedTuple):
    """One way to bring tokens and experts together: a dispatcher, and blocks of ranks that share expert weights. Every
    rank gathers the weights of all experts of its block, so that tokens need not be sent within the block.

    Attributes:
        ``way``: the dispatcher between blocks.
        ``joined``: number of pieces of an expert that one block holds, if experts are cut over ranks.
        ``weights``: number of elements that all ranks send to share weights in a pass, forward and backward.
        ``stacks``: a function from a rank's stacked weights to those of the block; None: no weights are shared.
    """

    way: Dispatcher
    joined: int = 1
    weights: int = 0
    stacks: Stacks | None = None


class Adaptive:
    """Dispatcher that takes in each pass the :class:`Option` for which all ranks together send the fewest elements."""

    def __init__(self, ranks: ExpertRanks) -> None:
        self.ranks, self.options, self.levels = (
            ranks,
            list[Option](),
            list[tuple[int, Members | None]](),
        )
        for block in ranks.blocks:
            joined, members = min(block, ranks.pieces), None
            if block < ranks.count:
                members = ranks if block == 1 else ranks.across(block, joined)
            ways: list[Dispatcher] = [
                LocalExperts(range(ranks.slots // joined), others=True)
            ]
            if members is not None:
                ways = [AllToAll(members), per_rank(members), AllGather(members)]
            self.levels.append((joined, members))
            weights, stacks = (
                weights_sent(ranks.stacks, block),
                self._block_of(block, joined),
            )
            self.options += [Option(way, joined, weights, stacks) for way in ways]
        self.weights = torch.tensor(
            [option.weights for option in self.options], device=ranks.mesh.device
        )

    def _block_of(self, block: int, joined: int) -> Stacks | None:
        """What makes the stacks of this rank's block."""
        if block == 1:
            return None
        ranks, start = self.ranks, self.ranks.rank // block * block
        members = ranks if block == ranks.count else ranks.within(block)
        return partial(
            stacks_of_block,
            parts=ranks.stacks[start : start + block],
            joined=joined,
            members=members,
        )

    def dispatch(self, x: T, choice: Choice) -> Arriving:
        with untyped():
            sent = [
                numbers_sent(part_of(choice, joined), x.shape[1], members)
                for joined, members in self.levels
            ]
            numbers = torch.cat(sent)
            dist.all_reduce(numbers, group=self.ranks.group)
            best = self.best(numbers + self.weights)
        option = self.options[best]
        arriving = option.way.dispatch(x, part_of(choice, option.joined))

        def arrived() -> Dispatched:
            rows = arriving()
            return rows._replace(meta=(option.way, rows.meta), stacks=option.stacks)

        return arrived

    def best(self, numbers: T) -> int:
        """Return the index of the option with which all ranks together send the fewest elements. ``numbers``: number of
        elements for each option. In a rehearsal, where tensors have no values, the index is 0.
        """
        return int(numbers.argmin()) if has_numbers(numbers) else 0

    def combine(self, rows: T, meta: Any) -> Awaited:
        way, inner = meta
        return way.combine(rows, inner)


def part_of(choice: Choice, joined: int) -> Choice:
    """Return the routes of ``choice`` to joined experts in place of routes to their pieces.

    An expert that is cut over ranks consists of pieces, each with a number, and ``choice`` routes a token to all pieces
    of an expert. ``joined``: number of neighbouring pieces that are joined to one larger piece. Where ``choice`` has
    ``joined`` routes of a token, the result has one, and its expert number is the number of the larger piece.
    """
    return (
        choice
        if joined == 1
        else Choice(choice.weights[:, ::joined], choice.ids[:, ::joined] // joined)
    )


def weights_sent(stacks: Sequence[tuple[int, ...]], block: int) -> int:
    """Return how many elements all ranks send, forward and backward, to share expert weights within blocks.

    ``stacks``: for each rank, its number of experts, the width of an expert and the width of the model. ``block``:
    number of ranks in a block. Stacks of different size in a block are padded to the largest, and the padding counts.
    """
    blocks = [stacks[start : start + block] for start in range(0, len(stacks), block)]
    return sum(
        3 * 2 * block * (block - 1) * prod(map(max, zip(*parts, strict=True)))
        for parts in blocks
    )


def numbers_sent(choice: Choice, width: int, members: Members | None) -> T:
    """Return how many elements each of three dispatchers sends for this rank's tokens: int64 ``[3]``.

    Forward and backward are counted. ``choice``: the experts of the tokens; ``width``: elements of a token. The first
    dispatcher sends a token once for each of its experts. The second sends it once to each rank that has experts of the
    token. The third sends all tokens to all ranks. The last two also send the numbers of a token's experts, the factors
    of the experts' outputs, and the gradients of these factors. With ``members`` None every rank has all experts, and
    the result is one zero, ``[1]``.
    """
    tokens, k = choice.ids.shape
    if members is None:
        return choice.ids.new_zeros(1)
    owners = members.owner[choice.ids]
    rows = ((owners != members.rank) & (owners < members.count)).sum()
    present = members.wanted(choice.ids)
    copies = present.sum() - present[:, members.rank].sum()
    to_all = torch.full_like(rows, tokens * (members.count - 1))
    return torch.stack(
        (4 * width * rows, (4 * width + 3 * k) * copies, (4 * width + 3 * k) * to_all)
    )


def stacks_of_block(
    *weights: T, parts: Sequence[tuple[int, ...]], joined: int, members: Members
) -> tuple[T, ...]:
    """Gather the stacked weights of all experts of a block of ranks, and return them as stacks of gate, up and down.
    All ranks of the block must call it.

    ``weights``: this rank's stacks of the matrices gate, up and down. ``parts``: for each rank of the block, its number
    of experts, the width of an expert and the width of the model. ``joined``: number of pieces of an expert that lie in
    the block if experts are cut over ranks, else 1; these pieces are joined. ``members``: the ranks of the block. In
    backward each rank gets the sum of all gradients of its own experts.
    """
    experts, hidden, _ = map(max, zip(*parts, strict=True))
    waiting = []
    for weight, dim in zip(weights, (1, 1, 2), strict=True):
        wider = [0] * 6
        wider[-1], wider[2 * (2 - dim) + 1] = (
            experts - weight.shape[0],
            hidden - weight.shape[dim],
        )
        waiting.append(
            gathered(F.pad(weight, wider) if any(wider) else weight, members, "copies")
        )
    columns = []
    for dim, wait in zip((1, 1, 2), waiting, strict=True):
        each = wait().split(experts)
        each = tuple(
            x[:n].narrow(dim, 0, width)
            for x, (n, width, _) in zip(each, parts, strict=True)
        )
        if joined > 1:
            each = tuple(
                torch.cat(each[i : i + joined], dim)
                for i in range(0, len(each), joined)
            )
        columns.append(torch.cat(each))
    return tuple(columns)
