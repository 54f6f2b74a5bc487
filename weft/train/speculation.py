"""Speculative updates during backward, which are undone if the step must be clipped (SuperOffload, Lian et al. 2025).

A unit is updated as soon as its gradient is complete and reduced, as if nothing were to be clipped: its moments travel
and its update is computed beside the backward of the units before it. If the norm then says that the step is clipped or
skipped, these updates are undone to the last bit, and the units are updated with all others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from weft.data.batch import Batch
from weft.errors import WeftError
from weft.parallel.pipeline_pass import EarlyUpdates
from weft.parallel.state import State, Unit
from weft.parallel.tried import Tried
from weft.parallel.units import TableUnit
from weft.train.arrivals import Arrivals
from weft.train.step import (
    Stepper,
    StepResult,
    accumulate,
    clip_scale,
    result_of,
    summed_over_axes,
)

T = torch.Tensor


@dataclass
class Speculation(Stepper):
    """A stepper that updates the state's ``early`` units during backward; the results equal those of the plain stepper.

    Units in files are updated where the schedule completes their gradients. Others are updated in a thread, which makes
    the copies to go back to during forward, unless their rule needs other ranks. ``undone`` counts the steps whose
    early updates had to be undone.
    """

    def __post_init__(self) -> None:
        early = self.state.early
        self.tried = Tried(self.state, early)
        # each as a state of its own, for sums over axes
        self.parts = {unit: State([unit]) for unit in early}
        self.arrivals = (
            Arrivals(early, self._complete) if self.model.pipeline is None else None
        )
        alone = self.mesh.layout.world == 1 or self.settings.elementwise
        self.thread = (
            ThreadPoolExecutor(1, "weft-update")
            if alone and not self.streamed
            else None
        )
        self.running: list[Future[None]] = []
        self.lr, self.begun, self.wrong, self.steps, self.undone = (
            0.0,
            False,
            False,
            0,
            0,
        )

    def step(
        self, batches: Sequence[Batch], lr: float, stop: bool = False
    ) -> list[StepResult]:
        self.lr, self.begun, self.steps = lr, False, self.steps + 1
        (result,) = super().step(batches, lr, stop)
        self.tried.stand()
        return [result._replace(undone=self.wrong)]

    def gradients(self, batches: Sequence[Batch], stop: bool) -> tuple[dict[str, T], T]:
        """As of the plain stepper; early units are updated meanwhile, and restored if the step must be clipped."""
        try:
            with self._watching():
                loss = accumulate(
                    self.model,
                    self.state,
                    batches,
                    self.mesh,
                    self.routes,
                    before_last=lambda share: self._expect(),
                )
            # otherwise the norm is computed beside the last updates
            if any(self.state.tiers.groups.values()):
                self._wait()
            found = self.reduced_and_sums(loss, batches, stop, self._wait)
        except BaseException:
            self._take_back()
            raise
        result = result_of(found[1])
        self.wrong = bool(self.tried.done) and (
            result.skipped or clip_scale(result.grad_norm, self.settings.clip) != 1.0
        )
        if self.wrong:
            self.undone += 1
            self.tried.undo()
        return found

    def update(
        self, grads: Callable[[Unit], Mapping[str, T]], lr: float, scale: float = 1.0
    ) -> None:
        """Update the units that have not been updated early."""
        self.state.update_later(grads, lr, scale, but=tuple(self.tried.done))
        if not self.streamed:
            self.state.settle()

    def summary(self) -> str:
        often = self.undone > self.steps / 4
        hint = (
            "; so often that it does not pay: raise optimizer.clip, or leave memory.speculate out"
            if often
            else ""
        )
        rooms = (
            f", {self.tried.bytes / 2**20:.0f} MiB of copies"
            if self.tried.bytes
            else ""
        )
        return (
            f"speculation: {self.undone} of {self.steps} steps were undone{rooms}{hint}"
        )

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """A context in which early units are updated as their gradients become complete."""
        self.running = (
            []
            if self.thread is None
            else [self.thread.submit(self.tried.keep, *self.tried.units)]
        )
        pipeline = self.model.pipeline
        streamed = [
            unit
            for unit in self.state.early
            if isinstance(unit, TableUnit) and unit.reduced
        ]
        for unit in streamed:
            unit.fresh = {}
        if pipeline is not None:
            pipeline.early = EarlyUpdates(self.parts, self._complete)
        try:
            yield
        finally:
            for unit in streamed:
                unit.fresh = None
            if pipeline is not None:
                pipeline.early = None
            if self.arrivals is not None:
                self.arrivals.end()

    def _expect(self) -> None:
        if self.arrivals is not None:
            self.arrivals.expect()

    def _begin(self) -> None:
        """Call ``before_update``, once in a step."""
        if not self.begun:
            self.begun = True
            self.before_update()

    def _wait(self) -> None:
        """Wait for the updates that are under way."""
        self._begin()
        for update in self.running:
            update.result()

    @torch.no_grad()
    def _complete(self, unit: Unit) -> None:
        """Update a unit, whose gradient is complete on this rank and summed over those with other data."""
        self._begin()
        fresh = unit.fresh if isinstance(unit, TableUnit) else None
        grads = self.parts[unit].gradients() if fresh is None else fresh
        if isinstance(unit, TableUnit) and fresh is not None:
            unit.fresh = {}
        grads = summed_over_axes(grads, self.parts[unit], self.mesh)
        if self.thread is None:
            self.tried.keep(unit)
            self.tried.update(unit, grads, self.lr)
        else:
            ready = (
                torch.cuda.current_stream().record_event()
                if self.mesh.device.type == "cuda"
                else None
            )
            self.running.append(
                self.thread.submit(self._update, unit, grads, self.lr, ready)
            )

    def _update(
        self,
        unit: Unit,
        grads: Mapping[str, T],
        lr: float,
        ready: torch.cuda.Event | None,
    ) -> None:
        if ready is not None:
            ready.synchronize()
        self.tried.update(unit, grads, lr)

    def _take_back(self) -> None:
        """Restore the state of before the step, which has failed."""
        for update in self.running:
            with suppress(Exception):
                update.result()
        # a tier that has failed says so again to whoever looks at the state
        with suppress(WeftError):
            self.tried.undo()
