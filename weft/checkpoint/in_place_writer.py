"""Write a rank's checkpoint from the state's own memory, for a run that saves at its end alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from weft.checkpoint.pack import elements
from weft.checkpoint.writer import commit_report, write_elements

if TYPE_CHECKING:
    from weft.checkpoint.pack import Elements
    from weft.checkpoint.write_task import Report, WriteTask


class InPlaceWriter:
    """Writes checkpoints in the calling process, without a copy of the state.

    It has the methods of :class:`weft.checkpoint.staging.WriterProcess`. :meth:`send` returns only when the rank's part
    is written, and training waits for that time. In return, no memory for a copy and no second process are needed.

    Attributes:
        ``values``: the elements that the next task writes, a tensor for each share of the task.
    """

    def __init__(self) -> None:
        self.values: Sequence[torch.Tensor] = ()
        self._reports: deque[Report] = deque()
        self._task: WriteTask | None = None  # whose commit is due
        self._abandoned = False

    def serves(self, size: int) -> bool:
        """Return True for every ``size``, because this writer needs no memory for a copy."""
        return True

    def send(self, task: WriteTask | str) -> None:
        """Write the rank's part as ``task`` describes it, before returning.

        A text in place of a task says that another rank has failed; the next commit then fails with this text.
        """
        if isinstance(task, str):
            self._abandoned = True
            return
        self._abandoned = False
        self._reports.append(write_elements(task, self._shares))
        self._task = task if task.commit is not None else None
        self.values = ()

    def has_report(self) -> bool:
        """Return whether :meth:`report` returns without waiting."""
        return bool(self._reports)

    def report(self) -> Report | None:
        """Return the next report: first on the rank's part, then on the commit, which is made during this call."""
        if self._reports:
            return self._reports.popleft()
        task, self._task = self._task, None
        if task is None or task.commit is None:
            return None
        return commit_report(task.storage, task.commit, lambda: self._abandoned)

    def kill(self) -> None:
        """Do nothing, because this writer has no process of its own that could be killed."""

    def close(self) -> None:
        """Drop the writer's references to the state's tensors, so that their memory can be freed."""
        self.values = ()

    def _shares(self) -> Iterator[Elements]:
        """Yield the elements of each share. Those of a GPU are copied one share at a time."""
        for values in self.values:
            flat = values.detach().cpu().contiguous().view(-1)
            box = tuple((0, size) for size in values.shape)
            data = flat.view(torch.uint8).numpy().data
            yield elements(data, box, values.element_size())
