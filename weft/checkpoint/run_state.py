"""Load a run's state: model, optimizer, and progress through the data. It has no random state.

Initial values are a function of seed and parameter, samples of seed and number. Other random numbers must be functions
of seed, sample and layer, so that nothing depends on the rank that draws them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from weft.errors import WeftError

if TYPE_CHECKING:
    from weft.checkpoint.load import StoredCheckpoint
    from weft.parallel.state import State

#: Slots that begin with the parameters.
LIKE_PARAMETERS = ("ema", "anchor")


@dataclass
class Progress:
    """Progress of a run through steps and data.

    Attributes:
        ``step``: number of steps taken.
        ``position``: number of samples used so far by all ranks together, so that it means the same under every layout.
        ``tokens``: number of tokens in these samples.
        ``updates``: number of steps that changed the parameters.
        ``loader``: further JSON values that the run's loader keeps in checkpoints; empty for most loaders.
    """

    step: int = 0
    position: int = 0
    tokens: int = 0
    updates: int = 0
    loader: dict[str, Any] = field(default_factory=dict)

    @property
    def mixed(self) -> dict[str, Any]:
        """Description of the mixture of the run's data sources: a dict with the key ``mix``; an empty dict with one
        source.
        """
        return {"mix": self.loader["mix"]} if "mix" in self.loader else {}

    def to_json(self) -> dict[str, Any]:
        """Return the progress as JSON values, from which ``Progress(**values)`` restores it.

        An empty ``loader`` is left out.
        """
        return {name: value for name, value in asdict(self).items() if value != {}}

    def advance(self, samples: int, tokens: int, updated: bool) -> None:
        """Count one step. ``samples`` and ``tokens``: numbers of samples and tokens in the step's batch over all ranks.

        ``updated``: whether the step changed the parameters.
        """
        self.step += 1
        self.position += samples
        self.tokens += tokens
        self.updates += updated


def load_state(
    checkpoint: StoredCheckpoint, state: State, group: dist.ProcessGroup | None = None
) -> Progress:
    """Load ``checkpoint`` into ``state``, whatever layout it was saved from. Returns the progress of the saved run.

    The checkpoint may lack some optional tensors of the optimizer, such as moving averages of the parameters. A missing
    tensor of a slot in :data:`LIKE_PARAMETERS` becomes a copy of its parameter; other missing tensors keep their values
    in ``state``. Collective over ``group`` (default: all ranks). Raises :class:`WeftError` if the checkpoint has a
    critic with layers of its own, and the run has none.
    """
    from weft.checkpoint import reshard

    kept = {name.partition(".")[0] for name in checkpoint.tensors}
    if kept - {"model", "optimizer"} - state.beside.keys():
        raise WeftError(
            f"{checkpoint} has a critic of its own, and this run has none; restore rl.method and roles.critic, or "
            f"start a new run from its weights: --set model.from={checkpoint}"
        )
    optional = (*LIKE_PARAMETERS, "outer", "own", "answer", "up", "down")
    stored = {
        name: part
        for name, part in state.saved().items()
        if name.split(".")[1] not in optional or name in checkpoint.tensors
    }
    reshard.load_parts(checkpoint, stored, group)
    for h in state.learning:
        for slot in LIKE_PARAMETERS:
            if slot in h.slots and f"optimizer.{slot}.{h.name}" not in stored:
                h.slots[slot].values.copy_(h.local)
    progress = Progress(**checkpoint.meta["progress"])
    state.updates = progress.updates
    return progress
