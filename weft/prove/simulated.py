"""A simulation of all islands in one process, one after the other: the reference for sync methods.

The simulation shares no code with the islands themselves (:mod:`weft.train.islands`, and each method's own): it goes
parameter by parameter, with the parameters of all islands in memory, and sends no messages. A method's ``simulate``
changes the parameters of a round.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from weft.parallel.state import State
from weft.recipe import Sync
from weft.sync.simulated_round import One, Round
from weft.sync.sync_method import SyncMethod
from weft.train.rule_optimizer import RuleOptimizer

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
    """Change the parameters of all islands as the sync method of ``how`` does after ``step`` (counted from 1).

    ``states``: the state of each island, by the island's number. ``how``: the recipe's section ``[sync]``. ``past``: a
    dictionary in which methods keep values for later steps; every call gets the same one. ``members``: function that
    says which islands take part, if islands come and go; ``members(number, i)`` returns the islands with which island
    ``i`` averages in exchange ``number``, ``i`` included. None: all islands take part in every exchange.
    """
    method: SyncMethod = how.method
    optimizer = next(iter(states.values())).optimizer
    betas = (
        optimizer.settings.betas if isinstance(optimizer, RuleOptimizer) else (0.0, 0.0)
    )
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
            if members:
                return members(number, i)
            return exchange_partners(i, len(states), how, number)

        kept = past.setdefault(name, [])
        method.simulate(Round(ones, step - offset, offset, how, kept, near, betas))
    for state in states.values():
        state.release()


def exchange_partners(i: int, count: int, how: Sync, number: int) -> Collection[int]:
    """Return the islands with which island ``i`` of ``count`` averages in exchange ``number``, itself included.

    ``how``: the recipe's section ``[sync]``, which names the partners. All islands take part in the exchange.
    """
    if how.partner == "ring":
        return {(i - 1) % count, i, (i + 1) % count}
    if how.partner == "graph":
        return {i}.union(*(edge for edge in how.graph if i in edge))
    if how.partnership == "all":
        return range(count)
    seeded = torch.Generator().manual_seed(number)
    order = torch.randperm(count, generator=seeded).tolist()
    first = order.index(i) // 2 * 2
    return {*order[first : first + 2]}
