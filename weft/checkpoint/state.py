"""What a run's state is: model, optimizer, position in the data, random state."""

import base64
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint import reshard
from weft.checkpoint.load import Checkpoint
from weft.checkpoint.save import Saver
from weft.checkpoint.storage import Storage
from weft.data.tokenizer import Tokenizer
from weft.parallel.state import State


@dataclass
class Progress:
    """How far a run is. ``position`` counts global samples, so it means the same under every layout."""

    step: int = 0
    position: int = 0
    tokens: int = 0
    updates: int = 0


def save_state(
    saver: Saver, place: Storage, state: State, progress: Progress, about: dict[str, Any], tokenizer: Tokenizer
) -> float:
    """Start saving a checkpoint as ``place``; the seconds for which training waited.

    ``about``: recipe, layout and data fingerprint, kept for the reader.
    """
    rng = {"torch_cpu": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()}
    with tempfile.TemporaryDirectory(prefix="weft-tokenizer-") as extra:
        tokenizer.save(extra)
        files = {p.name: p.read_bytes() for p in Path(extra).iterdir()}
    meta = {"progress": asdict(progress), "rng": rng, **about}
    return saver.save(place, progress.step, state.tensors(), meta, files, lazy=True)


def load_state(checkpoint: Checkpoint, state: State) -> Progress:
    """Bring back what :func:`save_state` saved, under whatever layout ``state`` is of."""
    reshard.load(checkpoint, state.tensors())
    meta = checkpoint.meta
    progress = Progress(**meta["progress"])
    state.updates = progress.updates
    random = bytearray(base64.b64decode(meta["rng"]["torch_cpu"]))
    torch.set_rng_state(torch.frombuffer(random, dtype=torch.uint8))
    return progress


def move_state(old: State | None, new: State | None, progress: Progress) -> int:
    """Bring the state of a running layout into another one, without storage. Collective.

    A rank that has no place in one of the layouts gives None for it. Returns the bytes that this rank sent.
    """
    sent = reshard.redistribute(old.tensors() if old else {}, new.tensors() if new else {})
    if new is not None:
        new.updates = progress.updates
    return sent
