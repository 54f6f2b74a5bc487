"""Updates that rows of a table have missed, because a step had no gradient for them.

Momentum and decay move such rows as well. Each row is brought up to date when it is read next, by the updates that it
has missed, one by one with their own learning rates and gradients of zero. So its values are those of an optimizer that
updates all rows in every step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from weft.parallel.state import Held, Updater

T = torch.Tensor


class MissedUpdates:
    """Record of recent updates of a table, and of how many of them each row has had, as rows may miss updates.

    The record begins when all rows are up to date. ``rows``: number of rows of the table. ``rates`` (attribute):
    learning rate of each recorded update. ``had`` (attribute): for each row, how many of these updates it has had.
    """

    def __init__(self, rows: int) -> None:
        self.rates = list[float]()
        self.had = torch.zeros(rows, dtype=torch.int64)

    def behind(self) -> T:
        """Return the indices, ascending, of the table's rows that have missed an update."""
        return torch.nonzero(self.had < len(self.rates)).flatten()

    def had_all(self, rows: T) -> None:
        """Record that the rows with the indices ``rows`` have had all updates so far."""
        self.had[rows] = len(self.rates)

    def forget(self) -> None:
        """Forget all updates so far, because every row has had them."""
        self.rates.clear()
        self.had.zero_()

    def make_up(self, optimizer: Updater, held: Held, rows: T) -> Held:
        """Return the rows of ``held`` after the updates that they have missed; nothing else is changed.

        ``held``: the parameter with values and slots of the rows ``rows`` alone, in their order; its number of updates
        is that of the whole table. ``optimizer``: the update rule.
        """
        order = torch.argsort(self.had[rows])
        had = self.had[rows[order]]
        values = held.local[order]
        slots = {name: part.values[order] for name, part in held.slots.items()}
        first = int(had[0]) if len(had) else len(self.rates)
        before = int(held.updates) - len(self.rates)
        for update in range(first, len(self.rates)):
            count = int((had <= update).sum())
            late = replace(
                held,
                local=values[:count],
                slots={
                    name: replace(held.slots[name], values=slot[:count])
                    for name, slot in slots.items()
                },
                updates=held.updates.new_full((), before + update),
            )
            nothing = torch.zeros_like(late.local)
            optimizer([late], [nothing], self.rates[update])
        back = torch.argsort(order)
        return replace(
            held,
            local=values[back],
            slots={
                name: replace(held.slots[name], values=slot[back])
                for name, slot in slots.items()
            },
        )
