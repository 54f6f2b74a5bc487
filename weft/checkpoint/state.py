"""What a run's state is: model, optimizer, position in the data, random state."""

import base64
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.boxes import BoxTensor
from weft.checkpoint.store import load, save
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


def boxes(parts: Sequence[LocalPart], optimizer: torch.optim.Optimizer | None) -> dict[str, BoxTensor]:
    """Every tensor of the state as this rank's box of a logical tensor."""
    found = {f"model.{p.name}": BoxTensor.wrap(p.local, p.box, p.logical.shape) for p in parts}
    if optimizer is not None:
        stored = [t for group in optimizer.param_groups for t in group["params"]]
        for tensor, p in zip(stored, optimizer_order(parts), strict=True):
            for moment in MOMENTS:
                wrapped = BoxTensor.wrap(optimizer.state[tensor][moment], p.box, p.logical.shape)
                found[f"optimizer.{moment}.{p.name}"] = wrapped
    return found


def save_state(
    root: Path,
    parts: Sequence[LocalPart],
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    about: dict[str, Any],
    keep: int,
    tokenizer: Tokenizer,
) -> Path:
    """Save a checkpoint under ``root``. ``about``: recipe, layout and data fingerprint, kept for the reader."""
    rng = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
    meta = {"progress": asdict(progress), "rng": rng, **about}
    return save(root, progress.step, boxes(parts, optimizer), meta, keep, tokenizer.save)


def load_state(
    checkpoint: Path, meta: dict[str, Any], parts: Sequence[LocalPart], optimizer: torch.optim.Optimizer
) -> Progress:
    """Bring back what :func:`save_state` saved, under whatever layout ``parts`` are of."""
    load(checkpoint, boxes(parts, optimizer))
    progress = Progress(**meta["progress"])
    for state in optimizer.state.values():
        state["step"].fill_(progress.updates)
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(meta["rng"])), dtype=torch.uint8))
    return progress


def check_same_data(meta: dict[str, Any], fingerprint: str, checkpoint: Path) -> None:
    """Refuse to resume on other data, where the same position would mean other tokens."""
    if meta.get("data") != fingerprint:
        raise WeftError(
            f"{checkpoint} was trained on other data (sources, tokenizer, seq_len or seed differ), so its position "
            "means nothing here; restore them, or start a new run with model.weights"
        )
