"""TensorBoard as a tracker of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.observe.trackers import Values
from weft.registry import register


@register("tracker", "tensorboard")
class TensorBoard:
    """Writes the records of a run (losses and other values by step) as TensorBoard events into ``run``, the run's
    folder.
    """

    def __init__(self, run: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._run, self._writer_class = run, SummaryWriter
        self._writer: Any = None

    def record(self, kind: str, step: int, values: Values) -> None:
        if self._writer is None:
            # What a crashed attempt wrote after this step disappears from TensorBoard too.
            purge = step + 1 if kind == "run" and step else None
            self._writer = self._writer_class(str(self._run), purge_step=purge)
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(f"{kind}/{name}", value, step)
            else:
                self._writer.add_text(
                    f"{kind}/{name}",
                    f"```\n{json.dumps(value, indent=2, default=str)}\n```",
                    step,
                )

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
