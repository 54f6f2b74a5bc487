"""Copies of hot experts on other ranks, for one pass each: fully sharded experts (Qing et al. 2025, Hecate's FSSDP).

State stays with the owners, so that gradients, optimizer and checkpoints know nothing of this. In every layer and pass
the owners send the weights of the experts that the last steps' counts ask for to ranks with spare slots, beside
attention, and these get a part of the experts' tokens. Their gradients come back and are added up rank by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F

from weft.models.experts import Mixture, expert_counts
from weft.models.numbers import has_numbers
from weft.models.transformer import Transformer
from weft.parallel.experts.copy_placement import divided, with_copies
from weft.parallel.experts.members import Homes
from weft.parallel.experts.moves import (
    REST,
    Places,
    better_order,
    move_experts,
    tensors_of,
)
from weft.parallel.experts.rows import exchanged
from weft.parallel.state import Held, State

T = torch.Tensor


@dataclass(frozen=True)
class CopyPlan:
    """For the passes of a step, the ranks that compute each expert of a layer: its owner and ranks with a copy of it.

    A slot is a position in a rank's stack of expert weights; slots are numbered over all ranks.

    Attributes:
        ``copies``: whether a rank computes an expert, as owner or with a copy: bool ``[experts, ranks]``.
        ``slots``: the slot in which the rank has the expert, ``[experts, ranks]``; without meaning where it has none.
        ``lent``: the experts whose weights this rank sends, as positions among its own experts: those sent to rank 0
            first, then those sent to rank 1, and so on.
        ``sent``: for each rank, the number of experts that this rank sends to it.
        ``received``: for each rank, the number of experts that this rank receives from it.
    """

    copies: T
    slots: T
    lent: list[int]
    sent: list[int]
    received: list[int]


@cache
def planner() -> ThreadPoolExecutor:
    """Return a pool of one thread, which plans the copies of experts while training goes on."""
    return ThreadPoolExecutor(1, "weft-placement")


class Copies:
    """Copies of a layer's experts that ranks lend each other; each rank has ``spare`` slots for copies.

    A slot is a position in a rank's stack of expert weights. When the routing counts of a step are known, a plan of
    copies is made in another thread. The layer's next pass waits for it. Once :func:`let_experts_move` has been called,
    experts may also change their owners after a step.

    Attributes:
        ``ranks``: the ranks that hold the layer's experts.
        ``order``: all experts, those of the first owner first, then those of the second owner, and so on.
        ``home``: the order at the beginning, with the owners that the layout gives, before any expert has moved.
        ``state``: the experts' parameters on this rank; empty as long as experts may not move.
    """

    def __init__(self, ranks: Homes, spare: int) -> None:
        self.ranks, self.spare = ranks, spare
        self.home = np.concatenate([np.asarray(home) for home in ranks.homes])
        self.sizes = np.array([len(home) for home in ranks.homes])
        self.ends = self.sizes.cumsum()
        self.state: Sequence[Held] = ()
        # has the state where it rests, as it will be changed
        self.expose: Callable[[], None] = lambda: None
        self.running, self.order, self.rested = np.zeros(ranks.items), self.home, REST
        self._plan: Future[CopyPlan]
        self.replan()

    @property
    def plan(self) -> CopyPlan:
        return self._plan.result()

    def learn_from(self, loads: Sequence[int]) -> None:
        """Plan the copies of the next step by the experts' loads, in which the last step counts most.

        ``loads``: tokens routed to each expert in the last step. The loads of each earlier step count half as much as
        those of the step after it. Before the copies are planned, experts may change their owners: if that saves more
        than it costs, and they have not changed lately. This change is collective.
        """
        self.running = self.running / 2 + np.repeat(loads, self.ranks.pieces)
        self.rested += 1
        if self.state and self.rested >= REST:
            order = better_order(
                self.running, self.order, self.sizes, self.spare, self._cost_of_move()
            )
            if (order != self.order).any():
                self.expose()
                self.move_to(order)
                self.rested = 0
        self.replan()

    def move_to(self, order: np.ndarray) -> None:
        """Move experts between ranks, with their state. Collective.

        ``order``: all experts as they are owned after the move: those of the first rank, then those of the second, and
        so on.
        """
        places = Places(self.order, self.sizes, self.home)
        move_experts(self.ranks, self.state, places, order)
        self.order = order

    def replan(self) -> None:
        """Plan again which ranks hold copies of which experts, from the present loads and owners of experts."""
        self._plan = planner().submit(self._planned, self.running, self.order)

    def _cost_of_move(self) -> float:
        """Return the cost of moving an expert with its state, as a multiple of sending its weights once."""
        sent = self.state[0].parameter.element_size()
        return sum(t.nbytes for t in tensors_of(self.state)) / sum(
            h.local.numel() * sent for h in self.state
        )

    def _planned(self, loads: np.ndarray, order: np.ndarray) -> CopyPlan:
        ranks, device = self.ranks, self.ranks.mesh.device
        first = np.array([first for first, _ in ranks.shares])
        owners, rows = np.empty((2, ranks.items), np.int64)
        owners[order] = np.arange(ranks.count).repeat(self.sizes)
        rows[order] = np.arange(ranks.items) - (self.ends - self.sizes).repeat(
            self.sizes
        )
        copies = with_copies(loads, owners, ranks.count, self.spare)
        slots = np.zeros(copies.shape, np.int64)
        slots[order, owners[order]] = first[owners[order]] + rows[order]
        moves = []  # the experts that each rank borrows, owner by owner
        for rank, start in enumerate(first + self.sizes):
            moves.append(order[copies[order, rank] & (owners[order] != rank)])
            slots[moves[rank], rank] = start + np.arange(len(moves[rank]))
        lent = [borrowed[owners[borrowed] == ranks.rank] for borrowed in moves]
        received = np.bincount(owners[moves[ranks.rank]], minlength=ranks.count)
        return CopyPlan(
            torch.tensor(copies).to(device),
            torch.tensor(slots).to(device),
            rows[np.concatenate(lent)].tolist(),
            [*map(len, lent)],
            received.tolist(),
        )

    def slots_of(self, ids: T) -> T:
        """Return, for each routed token, the slot to send it to: a copy of its expert.

        ``ids``: the experts that tokens are routed to; the result has the same shape. A slot is a position in a rank's
        stack of expert weights, numbered over all ranks. The copies of an expert share its tokens of all ranks evenly.
        Collective.
        """
        plan, ranks, flat = self.plan, self.ranks, ids.flatten()
        # the last are of choices that are dropped
        own = expert_counts(flat, ranks.items + ranks.pieces)
        counts = ranks.counts_from_all(own[: ranks.items])
        if not has_numbers(ids):
            return ids.clone()
        shares = divided(counts, plan.copies, ranks.rank)
        times = torch.cat((shares.flatten(), own[ranks.items :].sum()[None]))
        slots = F.pad(plan.slots.flatten(), (0, 1), value=ranks.slots)
        in_turn = slots.repeat_interleave(times, output_size=len(flat))
        chosen = torch.empty_like(flat).scatter(0, flat.argsort(stable=True), in_turn)
        return chosen.view_as(ids)

    def borrowed(self, *weights: T) -> Callable[[], tuple[T, ...]]:
        """Start to receive the weights of the experts that this rank borrows; return a function that waits for them.

        ``weights``: stacks ``[experts, ...]`` of this rank's own experts, from which other ranks get the weights that
        they borrow. The function returns the borrowed experts' weights, one stack for each of ``weights``.
        """
        plan = self.plan
        rows = torch.cat([w[plan.lent].flatten(1) for w in weights], 1)
        arriving = exchanged(rows, plan.sent, plan.received, self.ranks, "copies")

        def arrived() -> tuple[T, ...]:
            pieces = arriving().split([w.shape[1:].numel() for w in weights], 1)
            return tuple(
                piece.unflatten(1, w.shape[1:])
                for piece, w in zip(pieces, weights, strict=True)
            )

        return arrived


def moving_layers(model: Transformer) -> dict[str, Copies]:
    """Return the :class:`Copies` of each mixture of experts in ``model`` that has spare slots, by the layer's name."""
    return {
        name: module.copies
        for name, module in model.named_modules()
        if isinstance(module, Mixture) and isinstance(module.copies, Copies)
    }


def let_experts_move(layers: Mapping[str, Copies], state: State) -> None:
    """Allow the experts of ``layers`` to change their owners after steps, with their weights and slots in ``state``.

    ``layers``: the copies of each mixture by the layer's name. :func:`bring_experts_home` moves the experts back.
    """
    held = {h.name: h for h in state.held}
    for name, copies in layers.items():
        copies.expose = state.expose
        copies.state = [
            held[f"{name}.experts.{weight}"] for weight in ("gate", "up", "down")
        ]


def bring_experts_home(layers: Mapping[str, Copies]) -> bool:
    """Move all experts to the owners that the layout gives; return whether any had another owner. Collective.

    ``layers``: the copies of each mixture of experts by the layer's name.
    """
    away = [c for c in layers.values() if (c.order != c.home).any()]
    for copies in away:
        copies.move_to(copies.home)
        copies.replan()
    return bool(away)
