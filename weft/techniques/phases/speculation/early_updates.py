"""Speculative updates during backward, undone if the step must be clipped (SuperOffload, Lian et al. 2025).

A unit is updated as soon as its gradient is complete and reduced, as if nothing were to be clipped. The transfers of
its moments and its update then run beside the backward of the earlier units. If the norm shows that the step must be
clipped or skipped, these updates are undone to the last bit, and the units are updated with all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch

from weft.errors import WeftError
from weft.models.hooks import EarlyUpdates
from weft.parallel.revocable_updates import RevocableUpdates
from weft.parallel.state import State, Unit
from weft.parallel.units import TableUnit
from weft.train.ready_units import ReadyUnits
from weft.train.step import (
    PhaseFiller,
    StepContext,
    accumulate,
    clip_scale,
    reduced_and_sums,
    step_result,
    summed_over_axes,
    update_unless_skipped,
)
from weft.train.step_values import Agreed, StepInput, StepResult

if TYPE_CHECKING:
    from weft.train.phases import AgreePhase
    from weft.train.step import UnitGradients

T = torch.Tensor


class Speculation(PhaseFiller):
    """Updates the units ``early`` during backward; the results equal those of the plain step.

    A unit is a group of parameters that are updated together, mostly a block of the model. Units that are kept in files
    are updated by the training thread as soon as their gradients are complete. Other units are updated in a thread of
    their own, which copies them during forward so that their update can be undone.

    ``elementwise``: whether the update rule works without messages between ranks. If it does not, runs of several ranks
    make all updates in the training thread. ``undone``: number of steps whose early updates were undone.
    """

    def __init__(
        self, context: StepContext, early: Sequence[Unit], elementwise: bool
    ) -> None:
        self.context, self.early = context, early
        self.tried = RevocableUpdates(context.state, early)
        # each as a state of its own, for sums over axes
        self.parts = {unit: State([unit]) for unit in early}
        self.ready = (
            ReadyUnits(early, self._complete)
            if context.model.pipeline is None
            else None
        )
        alone = context.mesh.layout.world == 1 or elementwise
        self.thread = (
            ThreadPoolExecutor(1, "weft-update")
            if alone and not context.streamed
            else None
        )
        self.running: list[Future[None]] = []
        self.lr, self.begun, self.wrong = 0.0, False, False
        self.steps = self.undone = 0

    def gradients(self, given: StepInput, agree: AgreePhase) -> T:
        """Run forward and backward passes, and update the units in ``early`` meanwhile.

        Returns this rank's share of the mean loss. ``given``: batches and learning rate of the step. ``agree`` is not
        used.
        """
        self.lr, self.begun, self.steps = given.lr, False, self.steps + 1
        context = self.context
        with self._restoring(), self._watching():
            return accumulate(
                context.model,
                context.state,
                given.batches,
                context.mesh,
                context.routes,
                before_last=lambda share: self._expect(),
                early=EarlyUpdates(self.parts, self._complete),
            )

    def agree(self, given: StepInput, shares: T) -> Agreed:
        """Reduce gradients and sums over ranks as the plain step does, and return both. ``shares``: this rank's share
        of the mean loss.

        Undoes the early updates if the step must be clipped or skipped.
        """
        with self._restoring():
            # otherwise the norm is computed beside the last updates
            if any(self.context.state.tiers.groups.values()):
                self._wait()
            grads, sums = reduced_and_sums(self.context, given, shares, self._wait)
        result = step_result(sums)
        self.wrong = bool(self.tried.done) and (
            result.skipped or clip_scale(result.grad_norm, given.clip) != 1.0
        )
        if self.wrong:
            self.undone += 1
            self.tried.undo()
        return Agreed(grads, lambda: result)

    def update(self, given: StepInput, agreed: Agreed) -> list[StepResult]:
        """Update the units that were not updated during backward, or all units if the early updates were undone.
        ``agreed``: the reduced gradients. Returns a list with the step's result.
        """
        result = update_unless_skipped(self.context, given, agreed, self._update_others)
        self.tried.commit()
        return [result._replace(undone=self.wrong)]

    def _update_others(self, grads: UnitGradients, lr: float, scale: float) -> None:
        state = self.context.state
        state.update_later(grads, lr, scale, but=tuple(self.tried.done))
        if not self.context.streamed:
            state.settle()

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
    def _restoring(self) -> Iterator[None]:
        """Return a context that restores the state of before the step if something fails in it."""
        try:
            yield
        except BaseException:
            self._take_back()
            raise

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Return a context in which early units are updated as their gradients become complete."""
        self.running = (
            []
            if self.thread is None
            else [self.thread.submit(self.tried.keep, *self.tried.units)]
        )
        streamed = [
            unit for unit in self.early if isinstance(unit, TableUnit) and unit.reduced
        ]
        for unit in streamed:
            unit.fresh = {}
        try:
            yield
        finally:
            for unit in streamed:
                unit.fresh = None
            if self.ready is not None:
                self.ready.end()

    def _expect(self) -> None:
        if self.ready is not None:
            self.ready.expect()

    def _begin(self) -> None:
        """Call ``before_update``, once in a step."""
        if not self.begun:
            self.begun = True
            self.context.before_update()

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
        grads = summed_over_axes(grads, self.parts[unit], self.context.mesh)
        if self.thread is None:
            self.tried.keep(unit)
            self.tried.update(unit, grads, self.lr)
        else:
            ready = (
                torch.cuda.current_stream().record_event()
                if self.context.mesh.device.type == "cuda"
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
