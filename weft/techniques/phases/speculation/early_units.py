"""The units (parameters that are updated together) that ``memory.speculate`` updates during backward."""

from weft.memory.step_traffic import Sizes, choose_early
from weft.parallel.state import State, Unit
from weft.recipe import Memory

#: How long backward takes, in multiples of forward, by ``train.recompute`` (what of forward it repeats).
BACKWARD = {"none": 2.0, "selective": 2.0, "full": 3.0}


def early_units(state: State, memory: Memory, recompute: str) -> list[Unit]:
    """Return the units of ``state`` that ``memory.speculate`` updates during backward.

    ``recompute``: the setting ``train.recompute``. The choice uses sizes of whole parameters, so that all ranks with
    shards of a unit choose alike.
    """
    if memory.speculate == "none":
        return []
    # Gradients that several pipeline stages share are summed at the end of a step: too late for these units.
    summed_last = {name for names in state.copies.values() for name in names}

    def may(unit: Unit) -> bool:
        learns = any(h.learns for h in unit.held) and all(
            h.name not in summed_last for h in unit.held
        )
        return learns and (unit.visited or memory.weights != "file")

    early = list(map(may, state.units))
    if memory.speculate == "even" and memory.weights == "file":
        of_units = [
            sizes(unit, memory, free)
            for unit, free in zip(state.units, early, strict=True)
        ]
        early = choose_early(of_units, BACKWARD[recompute])
    return [unit for unit, now in zip(state.units, early, strict=True) if now]


def sizes(unit: Unit, memory: Memory, free: bool) -> Sizes:
    """Return how many bytes of a unit's weights, gradients and moments lie in files, over all ranks. A unit is a group
    of parameters that are updated together. The result counts 0 bytes for whatever stays in memory. It also says
    whether any of the unit's parameters is trained, and repeats ``free``. ``memory``: the recipe's section
    ``[memory]``, which says what lies in files. ``free``: whether the unit may be updated during backward.
    """
    learning = [h for h in unit.held if h.learns]
    moments = [part.tensor for h in learning for part in h.slots.values()]
    every = {
        "weights": sum(h.logical.numel * h.local.element_size() for h in unit.held),
        "gradients": sum(h.logical.numel * h.local.element_size() for h in learning),
        "moments": sum(tensor.numel * tensor.itemsize for tensor in moments),
    }
    weights, gradients, kept = (
        size * (memory.place_of(kind) == "file") for kind, size in every.items()
    )
    return Sizes(weights, gradients, kept, bool(learning), free)
