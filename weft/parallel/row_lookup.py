"""The table of embeddings, of which a pass brings those rows that its tokens name.

The table rests on the host or in a file, and no rank ever has all of it. A pass asks for the unique tokens of all ranks
that share the state; each rank reads those rows that it holds, and one sum brings them to all. Their gradients are
summed as rows too, and the update reads, changes and writes these rows alone. Where momentum or decay also move rows
without a gradient, each row makes up for the updates that it has missed when it is read next. Large Graph Convolutional
Network Training (Min et al. 2021) gathers features that way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from weft.memory.resting_tiles import rows_of_whole_pages
from weft.parallel.missed_updates import MissedUpdates
from weft.parallel.part_unit import PartUnit
from weft.parallel.resting_rows import BroughtRows, RestingRows
from weft.parallel.state import Held, Updater
from weft.parallel.units import Full

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.layout.mesh import Mesh
    from weft.memory.on_device import OnDevice

T = torch.Tensor

#: Bytes of rows that are brought up to date at a time, where all are.
CHUNK = 4 << 20


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
        self.weights = RestingRows(held.local, tiers, "weights", self.block)
        self.slots = dict[str, RestingRows]()
        self.missed: MissedUpdates | None = None
        self.optimizer: Updater | None = None
        held.parameter.data = held.local.data
        # gradients are summed over the replicas at once
        self.reduced = {held.name: torch.empty(0)}

    def make_slots(self, optimizer: Updater, tiers: OnDevice) -> None:
        """Make the slots of ``optimizer`` for the table, and let them rest in ``tiers``. Their rows are read and
        written together with the table's.
        """
        if not self.learns:
            return
        (held,) = self.held
        held.updates = torch.zeros((), device=held.local.device)
        self.optimizer = optimizer
        held.slots |= optimizer.slots(held)
        self.slots = {
            name: RestingRows(part.values, tiers, "moments", self.block)
            for name, part in held.slots.items()
        }
        late = self.slots or self._decays(optimizer)
        self.missed = MissedUpdates(len(held.local)) if late else None

    def _decays(self, optimizer: Updater) -> bool:
        """Return whether an update without slots moves a row that has no gradient."""
        row = self.held[0].local.new_ones(1, self.width)
        tried = replace(self.held[0], local=row, updates=torch.zeros(()))
        optimizer([tried], [torch.zeros_like(row)], 1.0)
        return not bool((row == 1).all())

    def release(self, drop: bool) -> None:
        """Do nothing, because rows are freed after each use."""

    # --- rows of this rank

    def _bring(self, rows: T, slots: bool) -> tuple[Held, dict[str, BroughtRows]]:
        """Read the rows with these ascending numbers, of those that this rank holds; ``slots``: with their slots.

        Returns the parameter with these rows alone, up to date if the slots are read too, and what was read by slot, of
        which "" is the table itself.
        """
        held = self.held[0]
        parts = {"": self.weights} | (self.slots if slots else {})
        brought = {name: part.bring(rows) for name, part in parts.items()}
        now = replace(
            held,
            local=brought[""].values,
            slots={
                name: replace(held.slots[name], values=brought[name].values)
                for name in (self.slots if slots else ())
            },
        )
        if self.missed is not None and slots:
            assert self.optimizer is not None
            now = self.missed.make_up(self.optimizer, now, rows)
        return now, brought

    def _put(self, held: Held, brought: Mapping[str, BroughtRows]) -> None:
        """Write the rows in ``held`` to where they were brought from."""
        self.weights.put(brought[""], held.local)
        for name, part in held.slots.items():
            self.slots[name].put(brought[name], part.values)

    @torch.no_grad()
    def catch_up(self) -> None:
        """Apply to all rows of the table the updates that they have missed.

        Some MiB of rows are in memory at a time.
        """
        if self.missed is None:
            return
        most = max(1, CHUNK // (self.width * self.wide.itemsize))
        for rows in self.missed.behind().split(most):
            self._put(*self._bring(rows, slots=True))
            self.missed.had_all(rows)
        self.missed.forget()

    # --- passes and updates

    @torch.no_grad()
    def table(self, tokens: T) -> T:
        """Return the rows ``[tokens, embed]`` of the ascending ``tokens``. Collective over ranks that share the state.

        All these ranks must ask for the same tokens.
        """
        local, own = self._own(tokens)
        rows = local.to(self.held[0].local.device)
        # what rows have missed depends on their slots
        held, _ = self._bring(rows, slots=self.missed is not None)
        values = held.local.to(self.mesh.device, self.compute)
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
        """Update the rows that have a gradient: read them, update them, and write them back. All other rows miss the
        update, which they get later if the update rule needs it (:meth:`catch_up`).

        ``grads``: gradients by parameter name, here of the table alone, which may be sparse. ``scale``: factor that
        multiplies the gradient. ``optimizer``: the update rule; ``lr``: learning rate.
        """
        name = self.held[0].name
        grad = grads[name]
        grad = (grad if grad.is_sparse else grad.to_sparse(1)).coalesce()
        rows = grad.indices()[0]
        held, brought = self._bring(rows, slots=True)
        optimizer([held], [grad.values() * scale], lr)
        self._put(held, brought)
        if self.missed is not None:
            self.missed.rates.append(lr)
            self.missed.had_all(rows)


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
