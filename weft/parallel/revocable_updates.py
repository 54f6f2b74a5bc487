"""Updates that can be undone to the last bit (SuperOffload, Lian et al. 2025).

Whoever does not wait for the global norm before it updates may have to undo that. Of what rests in a tier the version
before stays there, and undoing is to forget the new one; other tensors are copied first.
"""

from collections.abc import Mapping, Sequence

import torch

from weft.parallel.state import State, Unit

T = torch.Tensor


class RevocableUpdates:
    """Updates of ``units`` of a state, each of which may be taken back until all :meth:`stand`.

    Before it is updated a unit is to :meth:`keep` what it was. ``done``: the units that have been updated. ``bytes`` of
    memory are what copies take; what rests in a tier has room for a second version there, so that a full disk is known
    now.
    """

    def __init__(self, state: State, units: Sequence[Unit]) -> None:
        self.state, self.units, self.done = state, list(units), list[Unit]()
        self._changing: dict[Unit, list[T]] = {}
        for unit in self.units:
            groups = state.tiers.groups.get(unit, {})
            for kind, group in groups.items():
                if kind != "gradients":
                    group.double()
            resting = {
                id(tensor) for group in groups.values() for tensor in group.tensors
            }
            held = [h for h in unit.held if h.learns]
            every = [
                t
                for h in held
                for t in (
                    h.local,
                    h.updates,
                    *(slot.values for slot in h.slots.values()),
                )
            ]
            self._changing[unit] = [t for t in every if id(t) not in resting]
        self._copies = {
            unit: [torch.empty_like(t) for t in changing]
            for unit, changing in self._changing.items()
        }

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for copies in self._copies.values() for t in copies)

    @torch.no_grad()
    def keep(self, *units: Unit) -> None:
        """Copy what in these units rests in no tier, so that :meth:`undo` can bring it back."""
        for unit in units:
            torch._foreach_copy_(self._copies[unit], self._changing[unit])

    @torch.no_grad()
    def update(self, unit: Unit, grads: Mapping[str, T], lr: float) -> None:
        """Update one of the units by its reduced gradients. Collective, where the optimizer's rule is."""
        self.done.append(unit)
        self.state.update(unit, grads, lr, tried=True)

    def stand(self) -> None:
        """Nothing is taken back any more."""
        self.done.clear()
        self.state.tiers.stand()

    @torch.no_grad()
    def undo(self) -> None:
        """Have all units be as they were, to the last bit."""
        for unit in self.done:
            torch._foreach_copy_(self._changing[unit], self._copies[unit])
        self.done.clear()
        self.state.tiers.undo()
