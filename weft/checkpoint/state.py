"""What a run's state is: model, optimizer, and position in the data. It has no random state.

Initial values are a function of seed and parameter, samples of seed and number. Whatever else is drawn one day has to
be a function of seed, sample and layer, so that nothing depends on which rank draws it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from weft.checkpoint.load import StoredCheckpoint
    from weft.parallel.state import State

#: Slots that begin with the parameters.
LIKE_PARAMETERS = ("ema", "anchor")


@dataclass
class Progress:
    """How far a run is. ``position`` counts global samples, so it means the same under every layout."""

    step: int = 0
    position: int = 0
    tokens: int = 0
    updates: int = 0

    def advance(self, samples: int, tokens: int, updated: bool) -> None:
        """Count a step."""
        self.step += 1
        self.position += samples
        self.tokens += tokens
        self.updates += updated


def load_state(
    checkpoint: StoredCheckpoint, state: State, group: dist.ProcessGroup | None = None
) -> Progress:
    """Bring back what :class:`weft.checkpoint.checkpoints.Checkpoints` saved, under whatever layout ``state`` is of.

    Averages of the parameters that the checkpoint has not got begin with the parameters, and so does what islands agree
    by. Collective over ``group`` (default: all ranks).
    """
    from weft.checkpoint import reshard

    wanted, late = (
        state.saved(),
        (*LIKE_PARAMETERS, "outer", "own", "answer", "up", "down"),
    )
    begun = {
        name
        for name in wanted
        if name.split(".")[1] in late and name not in checkpoint.tensors
    }
    reshard.load(
        checkpoint,
        {name: part for name, part in wanted.items() if name not in begun},
        group,
    )
    for h in state.learning:
        for slot in LIKE_PARAMETERS:
            if f"optimizer.{slot}.{h.name}" in begun:
                h.slots[slot].values.copy_(h.local)
    progress = Progress(**checkpoint.meta["progress"])
    state.updates = progress.updates
    return progress
