"""The reference model of reinforcement learning: the weights from which the rewards began, beside the trained ones.

They are a slot of every parameter that learns, so that they are cut as the parameters are and saved with them, and
another layout can go on with them. With an adapter they are that of the adapter alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from weft.parallel.state import State

#: The name of the slot.
REFERENCE = "reference"


def add_reference(state: State) -> None:
    """Add a slot for the reference model to every parameter that learns, and copy the parameter's present value into
    it.
    """
    for h in state.learning:
        h.slots[REFERENCE] = h.part(h.local.detach().clone())


@torch.no_grad()
def set_reference(state: State) -> None:
    """Copy the present weights of ``state`` into the slot of the reference model, which :func:`add_reference` has
    added.
    """
    state.expose()
    for h in state.learning:
        h.slots[REFERENCE].values.copy_(h.local)
