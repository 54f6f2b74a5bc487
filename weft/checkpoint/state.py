"""What a run's state is: model, optimizer, position in the data, random state."""

import base64
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint import reshard
from weft.checkpoint.format import Tensor
from weft.checkpoint.load import Checkpoint
from weft.checkpoint.save import NAMES, Local, Saver
from weft.checkpoint.storage import Storage
from weft.data.tokenizer import Tokenizer
from weft.errors import WeftError
from weft.parallel.build import LocalPart
from weft.train.optim import optimizer_order

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Progress:
    """How far a run is. ``position`` counts global samples, so it means the same under every layout."""

    step: int = 0
    position: int = 0
    tokens: int = 0
    updates: int = 0


def local_state(parts: Sequence[LocalPart], optimizer: torch.optim.Optimizer | None) -> dict[str, Local]:
    """Every tensor of the state as this rank's part of a logical tensor; optimizer state goes by parameter name."""

    def local(p: LocalPart, values: torch.Tensor) -> Local:
        tensor = Tensor(p.logical.shape, NAMES[values.dtype], tuple(d.name for d in p.logical.dims))
        return Local(values, p.box, tensor, p.replica, p.replicas)

    found = {f"model.{p.name}": local(p, p.local) for p in parts}
    if optimizer is not None:
        stored = [t for group in optimizer.param_groups for t in group["params"]]
        for tensor, p in zip(stored, optimizer_order(parts), strict=True):
            for moment in MOMENTS:
                found[f"optimizer.{moment}.{p.name}"] = local(p, optimizer.state[tensor][moment])
    return found


def save_state(
    saver: Saver,
    place: Storage,
    parts: Sequence[LocalPart],
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    about: dict[str, Any],
    tokenizer: Tokenizer,
) -> float:
    """Start saving a checkpoint as ``place``; the seconds for which training waited.

    ``about``: recipe, layout and data fingerprint, kept for the reader.
    """
    rng = {"torch_cpu": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()}
    with tempfile.TemporaryDirectory(prefix="weft-tokenizer-") as extra:
        tokenizer.save(extra)
        files = {p.name: p.read_bytes() for p in Path(extra).iterdir()}
    meta = {"progress": asdict(progress), "rng": rng, **about}
    return saver.save(place, progress.step, local_state(parts, optimizer), meta, files, lazy=True)


def load_state(checkpoint: Checkpoint, parts: Sequence[LocalPart], optimizer: torch.optim.Optimizer) -> Progress:
    """Bring back what :func:`save_state` saved, under whatever layout ``parts`` are of."""
    reshard.load(checkpoint, local_state(parts, optimizer))
    meta = checkpoint.meta
    progress = Progress(**meta["progress"])
    for state in optimizer.state.values():
        state["step"].fill_(progress.updates)
    random = bytearray(base64.b64decode(meta["rng"]["torch_cpu"]))
    torch.set_rng_state(torch.frombuffer(random, dtype=torch.uint8))
    return progress


#: A model's parts and its optimizer.
Held = tuple[Sequence[LocalPart], torch.optim.Optimizer]


def move_state(old: Held | None, new: Held | None, progress: Progress) -> int:
    """Bring parameters and optimizer state of a running layout into another one, without storage. Collective.

    A rank that has no place in one of the layouts gives None for it. Returns the bytes that this rank sent.
    """
    sent = reshard.redistribute(local_state(*old) if old else {}, local_state(*new) if new else {})
    for state in new[1].state.values() if new else ():
        state["step"].fill_(progress.updates)
    return sent


def check_same_data(checkpoint: Checkpoint, fingerprint: str) -> None:
    """Refuse to resume on other data, where the same position would mean other tokens."""
    meta = checkpoint.meta
    instead = f"start a new run from its weights: --set model.weights={checkpoint}"
    if "data" not in meta or "rng" not in meta:
        kind = meta.get("source", {}).get("kind", "another program's")
        raise WeftError(f"{checkpoint} was converted (from {kind}) and has no position in the data; {instead}")
    if meta["data"] != fingerprint:
        raise WeftError(
            f"{checkpoint} was trained on other data (sources, tokenizer, seq_len or seed differ), so its position "
            f"means nothing here; restore them, or {instead}"
        )
