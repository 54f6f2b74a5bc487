"""Islands simulated in one process, one after the other: the reference for methods of synchronisation.

Written apart from what islands do (:mod:`weft.train.islands`, and each method's own): parameter by parameter, with
the parameters of all islands at hand, and no messages. A method's ``simulate`` says what a round changes.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from weft.parallel.state import State
from weft.recipe import Sync
from weft.sync.simulated_round import One, Round
from weft.sync.sync_method import SyncMethod

#: Maps (number of an exchange, island) to the islands that this one agrees with in it, itself included.
Members = Callable[[int, int], Collection[int]]


@torch.no_grad()
def agree(
    states: Mapping[int, State],
    step: int,
    how: Sync,
    past: dict[str, Any],
    members: Members | None = None,
) -> None:
    """Change these states, by island, as islands do after ``step`` (from 1).

    ``past`` is a dictionary to pass to every call, for what methods need later. ``members``: who takes part, where
    islands come and go; else all always do.
    """
    method: SyncMethod = how.method
    for held in zip(*(state.learning for state in states.values()), strict=True):
        ones = {
            i: One(h.local, {k: s.values for k, s in h.slots.items()})
            for i, h in zip(states, held, strict=True)
        }
        name = held[0].name
        block = int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 0
        fragment = block % how.fragments
        offset = how.every * fragment // how.fragments
        number = (step - offset) // how.every * how.fragments + fragment

        def near(i: int, number: int = number) -> Collection[int]:
            return (
                members(number, i)
                if members
                else exchange_partners(i, len(states), how, number)
            )

        method.simulate(
            Round(ones, step - offset, offset, how, past.setdefault(name, []), near)
        )
    for state in states.values():
        state.release()


def exchange_partners(i: int, count: int, how: Sync, number: int) -> Collection[int]:
    """The islands that island ``i`` of ``count`` agrees with in exchange ``number``, itself included; all are there."""
    if how.partner == "ring":
        return {(i - 1) % count, i, (i + 1) % count}
    if how.partner == "graph":
        return {
            i,
            *(j for j in range(count) if (i, j) in how.graph or (j, i) in how.graph),
        }
    if how.partnership == "all":
        return range(count)
    order = torch.randperm(
        count, generator=torch.Generator().manual_seed(number)
    ).tolist()
    return next(
        {*order[k : k + 2]} for k in range(0, count, 2) if i in order[k : k + 2]
    )
