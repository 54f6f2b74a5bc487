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
    """Which ranks compute which experts in the passes of a step.

    ``copies``: where each is, bool ``[experts, ranks]``, and in which slot, ``slots`` alike. ``lent``: the rows of this
    rank's stack that others get, rank by rank, of which so many are ``sent`` to each, and ``received`` from each.
    """

    copies: T
    slots: T
    lent: list[int]
    sent: list[int]
    received: list[int]


@cache
def planner() -> ThreadPoolExecutor:
    """The thread in which placements are planned, beside training."""
    return ThreadPoolExecutor(1, "weft-placement")


class Copies:
    """What the ranks that have a layer's experts lend each other, who have ``spare`` slots each.

    A plan is made as soon as a step's counts are known, and waited for in the layer's next pass. Where there is a
    ``state`` that may move, experts change their owners now and then: ``order`` has them owner by owner, ``home`` as
    the layout has them.
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
        """Plan the next step by how often each expert was chosen in those before, in the last one above all."""
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
        """Let owners have the experts in this ``order``. Collective."""
        places = Places(self.order, self.sizes, self.home)
        move_experts(self.ranks, self.state, places, order)
        self.order = order

    def replan(self) -> None:
        """Plan by the counts and the owners that there are now."""
        self._plan = planner().submit(self._planned, self.running, self.order)

    def _cost_of_move(self) -> float:
        """That of moving an expert with its state, as a multiple of sending its weights once."""
        sent = self.state[0].parameter.element_size()
        return sum(t.nbytes for t in tensors_of(self.state)) / sum(
            h.local.numel() * sent for h in self.state
        )

    def _planned(self, loads: np.ndarray, order: np.ndarray) -> CopyPlan:
        ranks, device, first = (
            self.ranks,
            self.ranks.mesh.device,
            np.array([lo for lo, _ in self.ranks.shares]),
        )
        owners, rows = np.empty((2, ranks.items), np.int64)
        owners[order] = np.arange(ranks.count).repeat(self.sizes)
        rows[order] = np.arange(ranks.items) - (self.ends - self.sizes).repeat(
            self.sizes
        )
        copies = with_copies(loads, owners, ranks.count, self.spare)
        slots = np.zeros(copies.shape, np.int64)
        slots[order, owners[order]] = first[owners[order]] + rows[order]
        moves = []  # the experts that each rank borrows, owner by owner
        for rank in range(ranks.count):
            moves.append(order[copies[order, rank] & (owners[order] != rank)])
            slots[moves[rank], rank] = (
                first[rank] + self.sizes[rank] + np.arange(len(moves[rank]))
            )
        mine = [one[owners[one] == ranks.rank] for one in moves]
        received = np.bincount(
            owners[moves[ranks.rank]], minlength=ranks.count
        ).tolist()
        lent, sent = rows[np.concatenate(mine)].tolist(), [len(one) for one in mine]
        return CopyPlan(
            torch.tensor(copies).to(device),
            torch.tensor(slots).to(device),
            lent,
            sent,
            received,
        )

    def slots_of(self, ids: T) -> T:
        """The slot for each choice of an expert: copies share its choices of all ranks evenly."""
        plan, ranks, flat = self.plan, self.ranks, ids.flatten()
        # the last are of choices that are dropped
        mine = expert_counts(flat, ranks.items + ranks.pieces)
        counts = ranks.counts_from_all(mine[: ranks.items])
        if not has_numbers(ids):
            return ids.clone()
        shares = divided(counts, plan.copies, ranks.rank)
        times = torch.cat((shares.flatten(), mine[ranks.items :].sum()[None]))
        slots = F.pad(plan.slots.flatten(), (0, 1), value=ranks.slots)
        in_turn = slots.repeat_interleave(times, output_size=len(flat))
        return (
            torch.empty_like(flat)
            .scatter(0, flat.argsort(stable=True), in_turn)
            .view_as(ids)
        )

    def borrowed(self, *weights: T) -> Callable[[], tuple[T, ...]]:
        """Of each stack of weights, ``[own experts, ...]``, the rows that this rank borrows, as its plan has them.

        Each expert travels as one row, with all of its weights. What is returned waits for them.
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
    """The mixtures of ``model`` whose experts may change their owners, by name."""
    return {
        name: module.copies
        for name, module in model.named_modules()
        if isinstance(module, Mixture) and isinstance(module.copies, Copies)
    }


def let_experts_move(layers: Mapping[str, Copies], state: State) -> None:
    """Let the experts of ``state`` change their owners after steps (:func:`bring_experts_home`)."""
    held = {h.name: h for h in state.held}
    for name, copies in layers.items():
        copies.expose = state.expose
        copies.state = [
            held[f"{name}.experts.{weight}"] for weight in ("gate", "up", "down")
        ]


def bring_experts_home(layers: Mapping[str, Copies]) -> bool:
    """Have all experts be with the owners that the layout gives them; returns whether any were not. Collective."""
    away = [c for c in layers.values() if (c.order != c.home).any()]
    for copies in away:
        copies.move_to(copies.home)
        copies.replan()
    return bool(away)
