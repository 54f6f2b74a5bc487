"""Which steps of a run are saved, according to its folder."""

import json
from contextlib import suppress
from pathlib import Path

from weft.checkpoint.storage import Storage
from weft.checkpoint.store import checkpoint_places, committed_checkpoints, step_of
from weft.errors import WeftError
from weft.observe.run_metrics import FILE, resume_hint

#: Bytes at the end of a run's records in which its latest step is looked for.
TAIL = 1 << 16


def what_is_saved(folder: Path) -> str:
    """Return a line for the user that names the run's newest checkpoint and any later steps, which are not saved.

    ``folder``: the run's folder.
    """
    newest: Storage | None = None
    with suppress(WeftError):
        every = [
            place
            for root in checkpoint_places(folder)
            for place in committed_checkpoints(root)
        ]
        newest = max(every, key=step_of, default=None)
    saved, taken = (
        step_of(newest) if newest else 0,
        max(recorded_steps(folder), default=0),
    )
    if newest is None:
        return f"{taken:,} steps were taken, and none is saved: there is no checkpoint in {folder}"
    lost = (
        f"steps {saved + 1:,} to {taken:,} are not saved"
        if taken > saved
        else "all of its steps are saved"
    )
    return f"{lost}: the last checkpoint is {newest}; {resume_hint(folder)}"


def recorded_steps(folder: Path) -> list[int]:
    """Return the numbers of the steps in the newest records of the run in ``folder``.

    Only the last :data:`TAIL` bytes of the run's metrics are read.
    """
    steps: list[int] = []
    with suppress(OSError), (folder / FILE).open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - TAIL))
        for line in file.read().splitlines():
            with suppress(ValueError, KeyError, TypeError):  # cut off at either end
                steps.append(int(json.loads(line)["step"]))
    return steps
