"""The phase after a step of an island that exchanges with one neighbour at a time, without rounds."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch

from weft.checkpoint.boxes import MOMENTS
from weft.sync.neighbour_moments import BEFORE, average_square, gradient_of
from weft.sync.replicas import replicas_of
from weft.sync.streams import IslandLost
from weft.train.island_state import flat_values, keep_values
from weft.train.rule_optimizer import RuleOptimizer
from weft.train.step import PhaseFiller

if TYPE_CHECKING:
    from weft.recipe import Sync
    from weft.sync.gossip_dynamics import GossipDynamics, LinkExchange
    from weft.train.step import StepContext
    from weft.train.step_values import StepResult

T = torch.Tensor

#: Gradients that all islands still take when one is asked to end; the island that is ahead may have taken one since.
LAST = 3


class Unsynchronised(PhaseFiller):
    """Phase after the training step for methods in which islands do not wait for a common round.

    Every ``sync.every`` steps, the change of the parameters in these steps is applied to the island's state as a
    gradient. Then the island makes the exchanges with neighbouring islands that are due before its next gradient.
    ``context``: model, state and mesh of the run. ``how``: the recipe's section ``[sync]``. ``dynamics``: rules by
    which gradients, exchanges and time change the state of an island.
    """

    def __init__(
        self, context: StepContext, how: Sync, dynamics: GossipDynamics
    ) -> None:
        assert context.presence is not None
        self.context, self.presence, self.how = context, context.presence, how
        self.streams = self.presence.streams
        self.steps, self.stops, self.exchanged = context.begun, False, 0
        self.ending, self.requested = "", False
        self.held = context.state.learning
        self.replicas = replicas_of(self.held, context.mesh)
        slots = how.method.slots
        self.averages_squares, self.skipped = BEFORE in slots, False
        self.dynamics, self.rows = dynamics, [name for name in slots if name != BEFORE]
        optimizer = context.state.optimizer
        self.betas = (
            optimizer.settings.betas
            if isinstance(optimizer, RuleOptimizer)
            else (0.0, 0.0)
        )
        self._tell("taken", self.steps // how.every)

    def after(
        self, results: list[StepResult], finish: Callable[[], list[StepResult]]
    ) -> list[StepResult]:
        self.steps += 1
        due = self.steps % self.how.every == 0
        if due:
            results += finish()
            self.skipped = bool(results) and results[-1].skipped
        results = self._without_stop(results)
        if due:
            self.context.before_update()
            self.context.state.expose()
            self.learn_and_exchange(self.steps // self.how.every)
            self.context.state.release()
            results = self._with_stop(results, self.steps // self.how.every)
        return results

    def end(self, results: list[StepResult]) -> list[StepResult]:
        return self._without_stop(results)

    @torch.no_grad()
    def learn_and_exchange(self, gradients: int) -> None:
        """Apply gradient number ``gradients`` of this island to its state, and make all exchanges with neighbours that
        come before the next gradient.
        """
        # [rows, n], first the parameters
        state = torch.stack([flat_values(self.held, name) for name in self.rows])
        gradient, heard = self._last_gradient(), dict[int, T]()
        self.dynamics.learn(state, state[0] - flat_values(self.held))
        now, island = 0.0, self.streams.island
        for event in self.dynamics.clock(gradients):
            if island in event.islands:
                other = event.partner_of(island)
                state, now = self._moved(state, event.time - now), event.time
                extra = None if other in heard else gradient
                came = self._exchange(state, extra, event, gradients)
                if came is not None:
                    self.dynamics.pull(state, came[0])
                    self.exchanged += 1
                    if extra is not None:
                        heard[other] = extra - came[1]
        state = self._moved(state, 1 - now)
        for name, values in zip(self.rows, state, strict=True):
            keep_values(name, self.held, values)
        keep_values("", self.held, state[0])
        if gradient is not None:
            self._average_squares(gradient, heard.values())

    def _last_gradient(self) -> T | None:
        """Return this island's gradient of the last step, clipped; None if second moments are the island's own.

        It is NaN if the step was skipped, so that no island averages its square.
        """
        if not self.averages_squares:
            return None
        average = flat_values(self.held, MOMENTS[0])
        gradient = gradient_of(average, flat_values(self.held, BEFORE), self.betas[0])
        keep_values(BEFORE, self.held, average)
        return gradient.fill_(float("nan")) if self.skipped else gradient

    def _average_squares(self, gradient: T, others: Collection[T]) -> None:
        """Let the second moments average squares of the mean of ``gradient`` and those of ``others`` of the same
        step.
        """
        square = flat_values(self.held, MOMENTS[1])
        average_square(square, gradient, others, self.betas[1])
        keep_values(MOMENTS[1], self.held, square)

    def _moved(self, state: T, time: float) -> T:
        return self.dynamics.flow(time).to(state.dtype) @ state

    def _exchange(
        self, state: T, extra: T | None, event: LinkExchange, gradients: int
    ) -> T | None:
        """Return what this island sends in an exchange minus what the other one does; None if that one has ended.

        The first row of the result ``[rows, n]`` is of the vector that the dynamics send; a second row is of ``extra``,
        a vector that goes with it unless it is None.
        """
        other, tag = (
            event.partner_of(self.streams.island),
            f"{gradients}/{event.number}",
        )
        sent = self.dynamics.sent(state)
        rows, size = [sent] if extra is None else [sent, extra], sent.numel()
        here = self.replicas.part(size)
        part = torch.cat([row[here] for row in rows])
        if self._ended(other, gradients):
            return None
        self.streams.send(other, tag, part)
        try:
            came = self.streams.receive(other, tag, part.dtype)
        except IslandLost:
            if self._ended(other, gradients):
                return None
            raise
        self.streams.flush()
        apart = (part - came).chunk(len(rows))
        return torch.stack([self.replicas.whole(row, size) for row in apart])

    def conclude(self) -> None:
        if self.how.at_end == "mean":
            from weft.train.one_model import end_with_mean

            after = self.steps // self.how.every + 1  # which no gradient has been
            self.ending = end_with_mean(self.context, self.how, after, self.steps)

    def summary(self) -> str:
        sent = (self.streams.sent + self.streams.around) / 2**20
        return (
            f"island {self.streams.island} exchanged {self.exchanged} times, with one island at a time; this rank has "
            f"sent {sent:.3g} MiB to others{self.ending and '; ' + self.ending}"
        )

    def news(self) -> list[str]:
        return self.presence.take_news()

    def _without_stop(self, results: list[StepResult]) -> list[StepResult]:
        """Return ``results`` with all requests to end the run cleared, and remember whether there was one."""
        self.stops = self.stops or any(result.stop for result in results)
        return [result._replace(stop=False) for result in results]

    def _with_stop(self, results: list[StepResult], gradients: int) -> list[StepResult]:
        """Let all islands end after the same gradient, if one of them is asked to end."""
        self._tell("taken", gradients)
        if self.stops and not self.requested:
            self.requested = True
            store, count = self.streams.shared, self.streams.islands
            assert store is not None
            taken = [int(store.get(f"weft/gossip/taken/{i}")) for i in range(count)]
            self.presence.request_stop(max(taken) + LAST)
        request = self.presence.stop_request()
        if results and request is not None and request.round <= gradients:
            self._tell("ended", gradients)
            results[-1] = results[-1]._replace(stop=True)
        return results

    def _tell(self, what: str, gradients: int) -> None:
        """Say at the store how many gradients this island has taken, so far or in all."""
        if self.streams.shared is not None and self.streams.place == 0:
            name = f"weft/gossip/{what}/{self.streams.island}"
            self.streams.shared.set(name, str(gradients))

    def _ended(self, island: int, gradients: int) -> bool:
        """Return whether ``island`` was asked to end before the exchanges after gradient number ``gradients``."""
        store, name = self.streams.shared, f"weft/gossip/ended/{island}"
        if store is None or not store.check([name]):
            return False
        return int(store.get(name)) < gradients
