"""Records and display of runs that take steps of their own, beside the loop that trains language models."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.observe.display import Display
from weft.observe.run_metrics import Metrics

if TYPE_CHECKING:
    from weft.checkpoint.run_state import Progress
    from weft.recipe import Recipe


class ProgressRecorder:
    """Writes a run's records to ``metrics.jsonl``, and shows its progress in the terminal.

    ``recipe``: names the trackers that also get the records. ``folder``: the run's folder; None on ranks other than the
    first, which neither write nor print. ``progress``: counts of the run, which the recorder reads. ``steps``: number
    of steps of the run; ``title``: the first line of the display. ``stack``: closes display and records.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path | None,
        progress: Progress,
        steps: int,
        title: str,
        stack: ExitStack,
    ) -> None:
        self._progress = progress
        self._display = Display(steps, title, enabled=folder is not None)
        stack.enter_context(self._display)
        self._metrics = Metrics(folder, recipe.observe.trackers, self._display.note)
        stack.callback(self._metrics.close)

    def event(self, text: str) -> None:
        """Print the line ``text``, and record it as an event of the run."""
        self._display.note(text)
        self.log("event", message=text)

    def log(self, kind: str, step: int | None = None, /, **values: Any) -> None:
        """Write a record of the kind ``kind`` with ``values`` for ``step``; None: the last step that ``progress``
        counts.
        """
        self._metrics.log(kind, self._progress.step if step is None else step, **values)

    def show(self, **values: float | None) -> None:
        """Update the display after a step. ``values``: numbers by the keys of :data:`weft.observe.display.CELLS`."""
        self._display.update(self._progress.step, **values)
