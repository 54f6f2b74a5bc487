"""Callbacks: what a user's plugins do at certain moments of a run, on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.checkpoint.state import Progress
from weft.checkpoint.storage import Storage
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.parallel.state import State
from weft.plugins import HOOKS, Registered, blamed, find
from weft.recipe import Recipe, Use
from weft.train.recorder import Recorder
from weft.train.step import StepResult


@dataclass
class Running:
    """A run as a callback sees it.

    ``folder`` is the run's, ``progress`` how far it is; ``model`` and ``state`` are what this rank has of both, to look
    at. ``checkpoint`` is the last one, at the end. ``stopping``: why a callback of this rank wants the run to end.
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
        """Whether this is the one rank that writes and prints."""
        return self.mesh.is_main

    def say(self, text: str) -> None:
        """Say something, and keep it with the run; the main rank's word counts."""
        self.recorder.event(text)

    def log(self, kind: str, **values: Any) -> None:
        """Keep numbers of a ``kind`` with the run, and hand them to its trackers; the main rank's count."""
        self.recorder.log(kind, **values)

    def stop(self, why: str) -> None:
        """End the run after the next step as if it were complete: it saves and exports. One rank's wish is enough."""
        self.stopping = why


class Callbacks:
    """The callbacks of a recipe. What one of them raises says whose it is, and ends the run on all ranks."""

    def __init__(self, uses: Sequence[Use], running: Running) -> None:
        self.running = running
        self._callbacks: list[tuple[Registered, Any]] = []
        for use in uses:
            found = find("callback", use.name)
            self._callbacks.append((found, found.call(use.settings)()))

    def start(self) -> None:
        """Before the first step of this process."""
        self._call("start")

    def after_step(self, result: StepResult) -> None:
        """After a final step; each callback hears of every ``callback.every``-th, and by itself of none."""
        due = [(who, c) for who, c in self._callbacks if (n := getattr(c, "every", 0)) and self._step % n == 0]
        self._call("after_step", result, among=due)

    def after_evaluation(self, found: Mapping[str, float]) -> None:
        """After validation and tasks: the loss under ``validation``, and accuracies by the tasks' names."""
        self._call("after_evaluation", found)

    def end(self, checkpoint: Storage | None) -> None:
        """After the last checkpoint."""
        self.running.checkpoint = checkpoint
        self._call("end")

    @property
    def _step(self) -> int:
        return self.running.progress.step

    def _call(self, hook: str, *given: Any, among: Sequence[tuple[Registered, Any]] | None = None) -> None:
        assert hook in HOOKS
        for who, callback in self._callbacks if among is None else among:
            if (method := getattr(callback, hook, None)) is not None:
                with blamed(f"{who}, {hook} at step {self._step},"):
                    method(self.running, *given)
