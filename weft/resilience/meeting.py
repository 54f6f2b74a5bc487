"""Lets the ranks that were started together find each other's addresses."""

import json
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from weft.resilience.membership import Membership
from weft.resilience.views import Member, View
from weft.run.rank_processes import MEMBERS


def announce(
    membership: Membership,
    store: dist.Store,
    rank: int,
    facts: dict[str, Any] | None = None,
) -> None:
    """Write this rank's address and ``facts`` to ``store``, where the launcher and all other ranks read them.

    ``membership``: this rank's agent; ``store``: key-value store of the run's start; ``rank``: number of this rank;
    ``facts``: JSON values by name that the other ranks get to know about this rank; None: none.
    """
    store.set(
        f"{MEMBERS}/{rank}",
        json.dumps({"member": asdict(membership.me), "facts": facts or {}}),
    )


def exchange_addresses(
    membership: Membership, store: dist.Store, rank: int, world: int, about: dict[str, Any],
    facts: dict[str, Any] | None = None,
) -> View:  # fmt: skip
    """Exchange addresses with all ranks that were started together. Returns the first view (set of members) of the run.

    ``membership``: this rank's agent, which agrees on views; ``store``: key-value store that these ranks share;
    ``rank``: number of this rank; ``world``: number of ranks. ``about``: JSON values about the run, such as the recipe,
    for members that join later. ``facts``: JSON values about this rank for the other ranks; None: none.
    """
    announce(membership, store, rank, facts)
    met = [json.loads(store.get(f"{MEMBERS}/{other}")) for other in range(world)]
    members = [Member(**said["member"]) for said in met]
    membership.endpoint.check([member.address for member in members])
    return membership.begin(members, about, [said["facts"] for said in met])
