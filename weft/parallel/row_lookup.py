"""The table of embeddings, of which a pass brings those rows that its tokens name.

The table rests on the host or in a file, and no rank ever has all of it. A pass asks for the unique tokens of all ranks
that share the state; each rank reads those rows that it holds, and one sum brings them to all. Their gradients are
summed as rows too, and the update reads, changes and writes these rows alone. That is exact where a row without a
gradient stays as it is. Large Graph Convolutional Network Training (Min et al. 2021) gathers features that way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.distributed as dist

from weft.memory.resting_tiles import rows_of_whole_pages
from weft.parallel.part_unit import PartUnit
from weft.parallel.state import Updater
from weft.parallel.units import Full

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.layout.mesh import Mesh
    from weft.memory.on_device import OnDevice
    from weft.memory.resting import RestingGroup, Tiers

T = torch.Tensor


class BroughtRows(NamedTuple):
    """Rows of the embedding table that were read into memory.

    ``blocks``: indices of the blocks of rows that were read, ascending; ``memory``: the rows of these blocks, ``[blocks
    * rows per block, width]``; ``places``: for every requested row, its index in ``memory``.
    """

    blocks: T
    memory: T
    places: T


class EmbeddingRows(PartUnit):
    """Unit of the embedding table that reads only the rows of the tokens in use, from the host's memory or a file.

    The arguments are those of :class:`weft.parallel.units.TableUnit`, with one parameter ``[vocab, embed]``. In a file
    rows travel in blocks of whole pages: one row each if its bytes are a multiple of 4096.
    """

    def __init__(
        self, named: Sequence[Full], mesh: Mesh, compute: torch.dtype, tiers: OnDevice
    ) -> None:  # fmt: skip
        (full,) = named
        super().__init__(full, mesh, compute, tiers)
        self.place, self.apart = tiers.places["weights"], True
        held = self._hold(full)
        self.held = [held]
        self.width = full.logical.local_shape[1]
        # rows of a block, and the first that this rank holds
        self.block = rows_of_whole_pages(self.width * self.wide.itemsize)
        self.first = held.box[0][0] - held.logical.box[0][0]
        # whole in no unit's update
        self.owner = object()
        tiers.rest(self.owner, "weights", [held.local], self._block_bytes)
        held.parameter.data = held.local.data
        # gradients are summed over the replicas at once
        self.reduced = {held.name: torch.empty(0)}

    @property
    def _block_bytes(self) -> int:
        return self.block * self.width * self.wide.itemsize

    @property
    def _group(self) -> RestingGroup | None:
        group = self.tiers.groups.get(self.owner, {}).get("weights")
        return cast("RestingGroup | None", group)

    def make_slots(self, optimizer: Updater, tiers: OnDevice) -> None:
        """Create only the counter of updates: the optimizer must leave rows without a gradient alone, and has no slots
        here.
        """
        for h in self.held:
            h.updates = torch.zeros((), device=h.local.device)

    def release(self, drop: bool) -> None:
        """Do nothing, because rows are freed after each use."""

    # --- rows of this rank

    def _bring(self, rows: T) -> BroughtRows:
        """Read the rows with these ascending numbers, of those that this rank holds."""
        held, group = self.held[0], self._group
        if group is None or group.region is None:
            return BroughtRows(rows, held.local[rows], torch.arange(len(rows)))
        blocks = torch.unique(rows // self.block)
        memory = cast("Tiers", self.tiers).pool.take(max(1, len(blocks)) * self._block_bytes)  # fmt: skip
        self._transfer(blocks, memory, write=False)
        values = memory.view(held.local.dtype)[: len(blocks) * self.block * self.width]
        places = torch.searchsorted(blocks, rows // self.block) * self.block + rows % self.block  # fmt: skip
        return BroughtRows(blocks, values.view(-1, self.width), places)

    def _transfer(self, blocks: T, memory: T, write: bool) -> None:
        """Read blocks into ``memory``, or write them from there, and wait."""
        group, each = self._group, self._block_bytes
        assert group is not None
        region = group.region
        assert region is not None
        move = region.store if write else region.load
        moves, total = [], 0
        for place, block in enumerate(blocks.tolist()):
            size = min(each, region.size - block * each)
            total += size
            moves.append(partial(move, memory[place * each : place * each + size], block * each))  # fmt: skip
        region.run(moves, total, write).wait()

    def _put(self, rows: T, brought: BroughtRows) -> None:
        """Write what was brought back; ``rows``: the numbers that were asked for."""
        if self._group is None:
            self.held[0].local[rows] = brought.memory
            return
        memory = brought.memory.flatten().view(torch.uint8)
        self._transfer(brought.blocks, memory, write=True)

    # --- passes and updates

    @torch.no_grad()
    def table(self, tokens: T) -> T:
        """Return the rows ``[tokens, embed]`` of the ascending ``tokens``. Collective over ranks that share the state.

        All these ranks must ask for the same tokens.
        """
        local, own = self._own(tokens)
        brought = self._bring(local.to(self.held[0].local.device))
        values = brought.memory[brought.places].to(self.mesh.device, self.compute)
        table = values.new_zeros(len(tokens), self.width)
        table[own] = values
        if self.size > 1:
            dist.all_reduce(table, group=self.mesh.group(self.sharing))
        return table

    def _own(self, tokens: T) -> tuple[T, T]:
        """Return the numbers of those rows of ``tokens`` that this rank holds, and which of the tokens these are."""
        own = (tokens >= self.first) & (tokens < self.first + len(self.held[0].local))
        return tokens[own] - self.first, own

    def union(self, tokens: T, axis: str) -> T:
        """Return the ascending union of the ``tokens`` of all ranks of the group ``axis``. Collective."""
        ranks = self.mesh.size(axis)
        if ranks == 1:
            return tokens
        group = self.mesh.group(axis)
        most = torch.tensor(len(tokens), device=tokens.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        padded = tokens.new_full((int(most),), int(tokens[0]))
        padded[: len(tokens)] = tokens
        every = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(every, padded, group=group)
        return torch.unique(torch.cat(every))

    @torch.no_grad()
    def add_gradient(self, tokens: T, rows: T) -> None:
        """Add the gradients ``rows`` ``[tokens, embed]`` of ``tokens`` to those of the step, summed over all ranks."""
        if self.size > 1:
            dist.all_reduce(rows, group=self.mesh.group(self.sharing))
        if self.mesh.size(self.replicas) > 1:
            every = self.union(tokens, self.replicas)
            whole = rows.new_zeros(len(every), self.width)
            whole[torch.searchsorted(every, tokens)] = rows
            dist.all_reduce(whole, group=self.mesh.group(self.replicas))
            tokens, rows = every, whole
        held = self.held[0]
        local, own = self._own(tokens)
        place = held.local.device
        at, values = local[None].to(place), rows[own].to(place)
        # without a choice PyTorch warns every user
        grad = torch.sparse_coo_tensor(
            at, values, held.local.shape, check_invariants=False
        )
        seen = held.parameter.grad
        grad = (grad if seen is None else seen + grad).coalesce()
        held.parameter.grad = grad
        held.norm = torch.linalg.vector_norm(grad.values())

    def update(
        self, optimizer: Updater, grads: Mapping[str, T], lr: float, scale: float
    ) -> None:
        """Update the rows that have a gradient: read them, update them, and write them back. Other rows stay as they
        are.

        ``grads``: gradients by parameter name, here of the table alone, which may be sparse. ``scale``: factor that
        multiplies the gradient. ``optimizer``: the update rule; ``lr``: learning rate.
        """
        held = self.held[0]
        grad = grads[held.name]
        grad = (grad if grad.is_sparse else grad.to_sparse(1)).coalesce()
        rows = grad.indices()[0]
        brought = self._bring(rows)
        values = brought.memory[brought.places]
        optimizer([replace(held, local=values)], [grad.values() * scale], lr)
        brought.memory[brought.places] = values
        self._put(rows, brought)


class RowLookup:
    """Embedding look-up, as a callable in place of the model's own, that reads only the needed rows of the table.

    ``unit``: the unit that reads the rows, and collects their gradients.
    """

    def __init__(self, unit: EmbeddingRows) -> None:
        self.unit = unit

    def __call__(self, tokens: T, table: T) -> T:
        """Map ``tokens`` ``[batch, seq]`` to ``[batch, seq, embed]``; ``table`` is not read. Collective."""
        learns = self.unit.learns and torch.is_grad_enabled()
        anchor = torch.zeros((), requires_grad=learns)
        rows: T = _LookUp.apply(tokens, anchor, self.unit)
        return rows


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, anchor, unit):  # type: ignore[no-untyped-def]
        own, inverse = torch.unique(tokens, return_inverse=True)
        wanted = unit.union(own, unit.sharing)
        places = torch.searchsorted(wanted, own)[inverse]  # [batch, seq]
        ctx.unit = unit
        ctx.save_for_backward(wanted, places)
        return unit.table(wanted)[places]

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        wanted, places = ctx.saved_tensors
        grad = grad.to(ctx.unit.wide).flatten(0, -2)
        rows = grad.new_zeros(len(wanted), grad.shape[-1])
        rows.index_add_(0, places.flatten(), grad)
        ctx.unit.add_gradient(wanted, rows)
        return None, None, None
