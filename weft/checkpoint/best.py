"""Record a run's lowest validation loss, and link its checkpoint as ``best`` in the run's folder."""

import json
import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from weft.errors import WeftError
from weft.paths import real_path

#: In a run's folder: what is known of its best, and a link to that checkpoint where it is on this file system.
FILE, LINK = "best.json", "best"


@dataclass(frozen=True)
class Best:
    """Lowest validation loss of a run so far.

    Attributes:
        ``step``: step after which the loss was measured.
        ``loss``: the loss; infinity if none has been measured.
        ``checkpoint``: address of the checkpoint of that step; "" if none is kept.
        ``data``: digest of the validation data.
    """

    step: int = 0
    loss: float = math.inf
    checkpoint: str = ""
    data: str = field(default="", compare=False)


def read_best(run: Path) -> Best:
    """Read the best validation loss of a run from its folder ``run``.

    Raises :class:`WeftError` if its file is damaged.
    """
    try:
        return Best(**json.loads((run / FILE).read_text()))
    except FileNotFoundError:
        return Best()
    except (ValueError, TypeError):
        raise WeftError(
            f"{run / FILE} is damaged; remove it, and the run looks for its best from there on"
        ) from None


def best_checkpoint(run: Path) -> str:
    """Return the address of the checkpoint with the lowest validation loss of the run in folder ``run``.

    Returns "" if no such checkpoint is kept.
    """
    kept = read_best(run).checkpoint
    return kept if "://" in kept or not kept else str(run / kept)


def write_best(run: Path, best: Best) -> None:
    """Write ``best`` to the run's folder ``run``, and create a link to its checkpoint there if the checkpoint is local.

    Raises :class:`OSError` if the folder cannot be written.
    """
    local = bool(best.checkpoint) and "://" not in best.checkpoint
    if local:
        with suppress(ValueError):  # so that the run's folder can be moved
            inside = real_path(best.checkpoint).relative_to(real_path(run))
            best = replace(best, checkpoint=str(inside))
    draft = run / f".{FILE}"
    draft.write_text(json.dumps(asdict(best)) + "\n")
    draft.replace(run / FILE)
    if local:
        link = run / f".{LINK}"
        link.unlink(missing_ok=True)
        os.symlink(best.checkpoint, link, target_is_directory=True)
        link.replace(run / LINK)
