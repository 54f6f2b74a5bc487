"""Updates that can be undone to the last bit (SuperOffload, Lian et al. 2025).

A step that updates before the global norm is known may have to undo its updates. A tier keeps the previous version of
the tensors that rest in it, and undoing forgets the new version; other tensors are copied before the update.
"""

from collections.abc import Mapping, Sequence

import torch

from weft.parallel.state import State, Unit

T = torch.Tensor


class RevocableUpdates:
    """Optimizer updates of ``units`` that can be undone until :meth:`commit` makes them final (SuperOffload).

    Call :meth:`keep` with a unit before it is updated. ``done`` (attribute): the units updated since the last
    :meth:`commit` or :meth:`undo`. The old version of a tensor is kept beside the new one. For tensors that rest off
    the device (in a tier), room for the second version is made there at once, so that a full disk is known before the
    first update. Other tensors of the units are copied in memory.
    """

    def __init__(self, state: State, units: Sequence[Unit]) -> None:
        self.state, self.units, self.done = state, list(units), list[Unit]()
        self._changing: dict[Unit, list[T]] = {}
        for unit in self.units:
            groups = state.tiers.groups.get(unit, {})
            for kind, group in groups.items():
                if kind != "gradients":
                    group.double()
            resting = {id(t) for group in groups.values() for t in group.tensors}
            self._changing[unit] = [
                t
                for h in unit.held
                if h.learns
                for t in (h.local, h.updates, *(s.values for s in h.slots.values()))
                if id(t) not in resting
            ]
        self._copies = {
            unit: [torch.empty_like(t) for t in changing]
            for unit, changing in self._changing.items()
        }

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for copies in self._copies.values() for t in copies)

    @torch.no_grad()
    def keep(self, *units: Unit) -> None:
        """Copy the tensors of ``units`` that rest in no tier, so that :meth:`undo` can restore them."""
        for unit in units:
            torch._foreach_copy_(self._copies[unit], self._changing[unit])

    @torch.no_grad()
    def update(self, unit: Unit, grads: Mapping[str, T], lr: float) -> None:
        """Update ``unit`` by its reduced gradients ``grads``, by parameter name; ``lr``: learning rate.

        This is collective if the optimizer's rule is.
        """
        self.done.append(unit)
        self.state.update(unit, grads, lr, revocable=True)

    def commit(self) -> None:
        """Keep all updates made so far: they can no longer be undone."""
        self.done.clear()
        self.state.tiers.stand()

    @torch.no_grad()
    def undo(self) -> None:
        """Restore the tensors of all units updated since the last :meth:`commit`, bit for bit."""
        for unit in self.done:
            torch._foreach_copy_(self._changing[unit], self._copies[unit])
        self.done.clear()
        self.state.tiers.undo()
