"""Callbacks: plugins that are called at fixed moments of a run, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.plugins import HOOKS, blame_plugin, call
from weft.registry import Registered, find

if TYPE_CHECKING:
    from weft.checkpoint.run_state import Progress
    from weft.checkpoint.storage import Storage
    from weft.layout.mesh import Mesh
    from weft.models.transformer import Transformer
    from weft.parallel.state import State
    from weft.recipe import Recipe, Use
    from weft.train.recorder import Recorder


@dataclass
class Running:
    """A run as a callback of the recipe sees it; every hook gets this object as its first argument.

    Attributes:
        ``recipe``: the recipe of the run.
        ``folder``: the run's folder.
        ``mesh``: this rank's position among the ranks of the run.
        ``model``: this rank's shard of the model. A callback may read it and must not change it.
        ``state``: this rank's shard of parameters and optimizer state. A callback may read it and must not change it.
        ``progress``: numbers of steps, samples and tokens so far.
        ``recorder``: object that writes the run's records, and prints.
        ``checkpoint``: the last checkpoint, set at the end of the run; None before, or if none was saved.
        ``stopping``: line that says why the run is to end as if it were complete, such as that a callback of this rank
            has asked for it; empty if it is not.
    """

    recipe: Recipe
    folder: Path
    mesh: Mesh
    model: Transformer
    state: State
    progress: Progress
    recorder: Recorder = field(repr=False)
    checkpoint: Storage | None = None
    stopping: str = ""

    @property
    def is_main(self) -> bool:
        """Whether this rank is the main rank, which alone writes and prints."""
        return self.mesh.speaks

    def say(self, text: str) -> None:
        """Print the line ``text``, and record it as an event of the run in ``metrics.jsonl``. Does nothing on ranks
        other than the main rank.
        """
        self.recorder.event(text)

    def log(self, kind: str, **values: Any) -> None:
        """Record ``values`` in ``metrics.jsonl`` and in the run's trackers, under the record kind ``kind``.

        Does nothing on ranks other than the main rank.
        """
        self.recorder.log(kind, **values)

    def stop(self, why: str) -> None:
        """End the run after the next step. The run ends as if it were complete: it evaluates, saves and exports.

        ``why``: the reason to report. A call on one rank is enough.
        """
        self.stopping = f"ended by a callback: {why}"


class Callbacks:
    """The callbacks that a recipe names, built and called in the recipe's order.

    ``uses``: the names and settings of the callbacks. ``running``: the object that is passed to them. An exception in a
    callback ends the run on all ranks with an error that names the plugin.
    """

    def __init__(self, uses: Sequence[Use], running: Running) -> None:
        self.running = running
        self._callbacks: list[tuple[Registered, Any]] = []
        for use in uses:
            technique = find("callback", use.name)
            self._callbacks.append((technique, call(technique, use.settings)()))

    def call(self, hook: str, *given: Any) -> None:
        """Call the method named ``hook`` of each callback that has one, with the run and the arguments ``given``.

        The names of hooks are those in :data:`weft.plugins.HOOKS`. ``after_step`` is called after every
        ``callback.every``-th step, and never if the callback has no attribute ``every``.
        """
        assert hook in HOOKS
        step = self.running.progress.step
        for who, callback in self._callbacks:
            every = getattr(callback, "every", 0) if hook == "after_step" else 1
            if (
                (method := getattr(callback, hook, None)) is not None
                and every
                and step % every == 0
            ):
                with blame_plugin(f"{who}, {hook} at step {step},"):
                    method(self.running, *given)
