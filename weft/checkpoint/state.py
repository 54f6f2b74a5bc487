"""What a run's state is: model, optimizer, position in the data, random state."""

import base64
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.format import Tensor
from weft.checkpoint.save import NAMES, Local, Saver
from weft.checkpoint.storage import LocalStorage
from weft.checkpoint.store import new_folder, open_checkpoint
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
    root: Path,
    parts: Sequence[LocalPart],
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    about: dict[str, Any],
    tokenizer: Tokenizer,
) -> tuple[Path, float]:
    """Start saving a checkpoint under ``root``; its folder, and the seconds for which training waited.

    ``about``: recipe, layout and data fingerprint, kept for the reader.
    """
    rng = {"torch_cpu": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()}
    folder = new_folder(root, progress.step)
    with tempfile.TemporaryDirectory(prefix="weft-tokenizer-") as extra:
        tokenizer.save(extra)
        files = {p.name: p.read_bytes() for p in Path(extra).iterdir()}
    meta = {"progress": asdict(progress), "rng": rng, **about}
    waited = saver.save(LocalStorage(folder), progress.step, local_state(parts, optimizer), meta, files)
    return folder, waited


def load_state(
    folder: Path, meta: dict[str, Any], parts: Sequence[LocalPart], optimizer: torch.optim.Optimizer
) -> Progress:
    """Bring back what :func:`save_state` saved, under whatever layout ``parts`` are of."""
    open_checkpoint(folder).load(local_state(parts, optimizer))
    progress = Progress(**meta["progress"])
    for state in optimizer.state.values():
        state["step"].fill_(progress.updates)
    random = bytearray(base64.b64decode(meta["rng"]["torch_cpu"]))
    torch.set_rng_state(torch.frombuffer(random, dtype=torch.uint8))
    return progress


def check_same_data(meta: dict[str, Any], fingerprint: str, checkpoint: Path) -> None:
    """Refuse to resume on other data, where the same position would mean other tokens."""
    if meta.get("data") != fingerprint:
        raise WeftError(
            f"{checkpoint} was trained on other data (sources, tokenizer, seq_len or seed differ), so its position "
            "means nothing here; restore them, or start a new run with model.weights"
        )
