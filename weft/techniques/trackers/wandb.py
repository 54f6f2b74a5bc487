"""Weights & Biases as a tracker of runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from weft.observe.trackers import Values, remembered
from weft.recipe.masked import masked_text
from weft.registry import register


@register("tracker", "wandb")
class WandB:
    """Sends the records of a run (losses and other values by step) to Weights & Biases, which its environment variables
    ``WANDB_*`` configure. With ``WANDB_MODE=offline`` nothing is sent. ``run``: the run's folder.
    """

    def __init__(self, run: Path) -> None:
        import wandb

        with _masked_command():
            self._tracked = wandb.init(
                project="weft", name=run.name, dir=str(run), id=remembered(run, "wandb", lambda: token_hex(4)),
                resume="allow", settings=wandb.Settings(silent=True),
            )  # fmt: skip
        # A run that is resumed comes by some steps again, which its own count of steps would not take.
        self._tracked.define_metric("step")
        self._tracked.define_metric("*", step_metric="step")

    def record(self, kind: str, step: int, values: Values) -> None:
        if kind == "run":
            self._tracked.config.update(
                json.loads(json.dumps(values, default=str)), allow_val_change=True
            )
        shown = {
            f"{kind}/{name}": value
            for name, value in values.items()
            if isinstance(value, (int, float, str))
        }
        self._tracked.log({"step": step, **shown})

    def close(self) -> None:
        self._tracked.finish()


@contextmanager
def _masked_command() -> Iterator[None]:
    """Have this process's command without the secrets of addresses while the context lasts: W&B records it."""
    given = sys.argv
    sys.argv = [*map(masked_text, given)]
    try:
        yield
    finally:
        sys.argv = given
