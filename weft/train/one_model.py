"""The end of a run of islands: one model, the mean of what they have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft.train.island_exchange import IslandExchange
from weft.train.island_state import flat_values, keep_values

if TYPE_CHECKING:
    from weft.recipe import Sync
    from weft.train.step import StepContext

T = torch.Tensor


@torch.no_grad()
def end_with_mean(context: StepContext, how: Sync, number: int, step: int) -> str:
    """Replace the parameters of this island, and their moving averages, by the mean over all islands that are present.

    All present islands must call this function after the same step. Slots of the synchronisation method that must
    follow the parameters (``SyncMethod.following``) get the same change added, so that a continued run starts from the
    mean. Returns a line to print, which says how far apart the islands were. ``context``: model, state and mesh of the
    run. ``how``: the recipe's section ``[sync]``. ``number``: index of the exchange; larger than those of the run
    before. ``step``: the number of steps so far.
    """
    state, presence = context.state, context.presence
    assert presence is not None
    plain = {"update": "average", "partner": "all", "compress": "none", "allocate": 0}
    alone = {"fragments": 1, "delay": 0, "graph": ()}
    exchange = IslandExchange(
        state, context.mesh, presence, how.model_copy(update=plain | alone)
    )
    (held,) = exchange.fragments
    context.before_update()
    state.expose()
    presence.begin(number)
    averaged = ["ema"] if held and "ema" in held[0].slots else []
    islands = 1
    moved = torch.zeros(2, dtype=torch.float64)
    for i, name in enumerate(["", *averaged]):
        theta = flat_values(held, name)
        result = exchange.whole(
            0, exchange.run(0, number + i, theta, {}, step), theta.numel()
        )
        islands = result.islands
        keep_values(name, held, result.answer)
        if name:
            continue
        change = result.answer - theta
        moved[0], moved[1] = change.square().sum(), result.answer.square().sum()
        for slot in how.method.following:
            keep_values(slot, held, flat_values(held, slot).add_(change))
    state.release()
    if islands == 1:
        return "the run ends with this island's model, as no other island is present"
    apart = float((moved[0] / moved[1].clamp(min=1e-30)).sqrt())
    return (
        f"the run ends with one model, the mean of {islands} islands: this one's parameters were "
        f"{100 * apart:.3g} % of their norm away from it"
    )
