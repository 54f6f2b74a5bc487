"""Islands that take steps independently, and exchange parameters between some steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from weft.layout.mesh import from_all
from weft.sync.measure import measured_ring
from weft.sync.rounds import begins
from weft.train.island_exchange import Exchanged, IslandExchange
from weft.train.island_state import flat_values, keep_values, send_state
from weft.train.step import PhaseFiller

if TYPE_CHECKING:
    from weft.parallel.state import State
    from weft.recipe import Sync
    from weft.sync.presence import Presence, StopRequest
    from weft.sync.streams import Streams
    from weft.sync.sync_method import SyncMethod
    from weft.train.step import StepContext
    from weft.train.step_values import StepResult

T = torch.Tensor


def put_in_ring(streams: Streams, state: State, how: Sync) -> str:
    """Measure the links between islands, and order the islands in the fastest ring. Returns a line to report.

    ``streams``: the connections to other islands. ``how``: the recipe's section ``[sync]``. In these cases nothing is
    done and the line is empty: there are fewer than three islands, ``how`` uses no ring, ``how`` fixes the order of the
    ring, or the islands share no key-value store.
    """
    if (
        streams.islands < 3
        or not how.in_ring
        or how.order == "numbered"
        or streams.shared is None
    ):
        # two islands make only one ring, and an island that comes later is told the ring's order
        return ""
    elements = sum(h.local.numel() for h in state.learning)
    return measured_ring(streams, 4.0 * elements / how.fragments)


class Apart(PhaseFiller):
    """Fills the phase after a step in a run of islands, which exchange parameters every ``how.every`` steps.

    A *round* lasts ``how.every`` steps. In each round, each *fragment* (a subset of the parameters) is exchanged
    once with the partner islands. ``presence``: which islands take part. ``how``: the recipe's section ``[sync]``.
    ``steps``: the number of steps so far.

    All islands end the run after the same step. For this, an island sends a request to end the run to the others at
    the end of a round. All islands then end with the next round.
    """

    def __init__(self, context: StepContext, presence: Presence, how: Sync) -> None:
        self.context, self.presence, self.how = context, presence, how
        self.state, self.mesh = context.state, context.mesh
        self.steps, self.stops, self.ending = context.begun, False, ""
        #: The round after which this island has asked all to end the run.
        self.requested: int | None = None
        self.method: SyncMethod = how.method
        self.streams = presence.streams
        self.exchange = IslandExchange(self.state, self.mesh, presence, how)
        self.fragments = self.exchange.fragments
        #: Exchanges under way, by fragment. One after the other, in the same order on all islands.
        self.under_way: dict[int, Future[Exchanged]] = {}
        #: By fragment: how many islands the answer in its slots is the mean of; all, if it is not in here.
        self.counts: dict[int, int] = dict(enumerate(self.presence.counts))
        self.exchanging = ThreadPoolExecutor(1, "weft-islands")

    def after(
        self, results: list[StepResult], finish: Callable[[], list[StepResult]]
    ) -> list[StepResult]:
        self.steps += 1
        due = [f for f in range(len(self.fragments)) if self.is_due(f)]
        if due:
            results += finish()
        results = self.without_stop(results)
        if due:
            number = self.steps // self.how.every  # of the round
            if self.stops and self.requested is None:
                self.requested = number + 1
                self.presence.request_stop(self.requested)
            self.context.before_update()
            self.state.expose()
            for f in due:
                self.agree(f)
            self.state.release()  # what was gathered is of other values
            if begins(self.steps, 0, self.how):
                request = self.stop_request()
                ends = request if request and request.round <= number else None
                for island in self.presence.newcomers(self.number(0)):
                    tokens = sum(result.tokens for result in results)
                    self.hand_over(island, tokens, ends)
                if results and ends:
                    results[-1] = results[-1]._replace(stop=True)
        return results

    def end(self, results: list[StepResult]) -> list[StepResult]:
        """Wait for the exchanges that are under way, and store their results in the slots ``answer`` of the state.

        Returns ``results`` with all requests to end the run cleared.
        """
        results = self.without_stop(results)
        self.keep_answers()
        return results

    def keep_answers(self) -> None:
        """Wait for the exchanges that are under way, and store their results in the slots ``answer`` of the state."""
        if self.under_way:
            self.context.before_update()
        for f in list(self.under_way):
            answer, self.counts[f] = self.answer(f)
            keep_values("answer", self.fragments[f], answer)

    def conclude(self) -> None:
        """Replace the islands' parameters by their mean at the end of the run, unless all islands have the same ones
        anyway.

        Nothing is done, too, if islands were asked to end early that exchange with some partners only, as each of them
        then ends in a round of its own.
        """
        request = self.stop_request()
        # a request of the last round ends no island early, and some may not have heard of it yet
        early = request is not None and request.round <= self.steps // self.how.every
        if early and self.how.partnership != "all":
            self.ending = "each island ends with its own model, as it was asked to end"
            return
        whole = self.how.fragments == 1 and not self.how.delay
        equal = whole and "anchor" in self.method.shared
        equal = equal and begins(self.steps, 0, self.how)
        if self.how.at_end == "mean" and not equal:
            from weft.train.one_model import end_with_mean

            self.keep_answers()
            rounds = self.steps // self.how.every + 1
            self.ending = end_with_mean(
                self.context, self.how, rounds * self.how.fragments, self.steps
            )

    def summary(self) -> str:
        sent = (self.streams.sent + self.streams.around) / 2**20
        times = self.steps // self.how.every
        return (
            f"islands agreed {times} time{'s' * (times != 1)}; this rank has sent {sent:.3g} MiB to others"
            f"{self.ending and '; ' + self.ending}"
        )

    def news(self) -> list[str]:
        return self.presence.take_news()

    def without_stop(self, results: list[StepResult]) -> list[StepResult]:
        """Return ``results`` with all requests to end the run cleared, and remember whether there was one."""
        self.stops = self.stops or any(result.stop for result in results)
        return [result._replace(stop=False) for result in results]

    def stop_request(self) -> StopRequest | None:
        """Return the request to end the run, the same on all ranks of this island; None without one. Collective."""
        request = self.presence.stop_request()
        if self.how.partnership == "all":  # all have heard of it in the exchange
            return request
        requests = from_all(request, self.mesh.step_group)
        return min(filter(None, requests), default=None)

    def is_due(self, f: int) -> bool:
        """Return whether, after this step, an exchange of fragment ``f`` (a subset of the parameters) begins, or the
        result of such an exchange is applied.
        """
        return begins(self.steps, f, self.how) or begins(
            self.steps - self.how.delay, f, self.how
        )

    def number(self, f: int) -> int:
        """Return the index of the exchange of fragment ``f`` (a subset of the parameters) that begins after this step,
        counted over the whole run.
        """
        return self.steps // self.how.every * self.how.fragments + f

    @torch.no_grad()
    def agree(self, f: int) -> None:
        """Begin an exchange of fragment ``f`` or apply the result of one, whichever is due after this step.

        The result is applied at once, or ``how.delay`` steps after the exchange began, or in the next round if the
        method asks for that.
        """
        held, delay = self.fragments[f], self.how.delay
        starts, later, answer = (
            begins(self.steps, f, self.how),
            bool(delay) or self.method.late,
            None,
        )
        if starts:
            self.presence.begin(self.number(f))
        if later and (self.method.late or begins(self.steps - delay, f, self.how)):
            answer = self.answer(f)
        theta, slots = (
            flat_values(held),
            {name: flat_values(held, name) for name in self.method.slots},
        )
        values_sent = self.method.sent(theta, slots) if starts else theta
        shared = {name: slots[name] for name in self.method.shared}
        if starts and not later:
            result = self.exchange.whole(
                f,
                self.exchange.run(f, self.number(f), values_sent, shared, self.steps),
                values_sent.numel(),
            )
            answer = self.keep_exchanged(f, result)
            slots |= {name: result.kept[name] for name in shared if name in result.kept}
        if answer is not None:
            theta = self.method.applied(theta, slots, *answer)
            for name, values in slots.items():
                keep_values(name, held, values)
            keep_values("", held, theta)
        if starts and later:
            self.under_way[f] = self.exchanging.submit(
                self.exchange.run, f, self.number(f), values_sent, shared, self.steps
            )

    def answer(self, f: int) -> tuple[T, int]:
        """Return the mean from the latest exchange of fragment ``f``, flat, and the number of islands in it.

        Waits for the exchange if it is under way.
        """
        if f in self.under_way:
            result = self.under_way.pop(f).result()
            return self.keep_exchanged(
                f,
                self.exchange.whole(
                    f, result, sum(h.local.numel() for h in self.fragments[f])
                ),
            )
        return flat_values(self.fragments[f], "answer"), self.counts.get(
            f, self.mesh.islands
        )

    def keep_exchanged(self, f: int, result: Exchanged) -> tuple[T, int]:
        """Store the slots of fragment ``f`` (a subset of the parameters) that an exchange has changed. ``result``: what
        the exchange has returned.

        Returns the exchange's mean (flat) and the number of islands that took part.
        """
        for name, values in result.kept.items():
            keep_values(name, self.fragments[f], values)
        self.exchange.warm |= result.warm
        return result.answer, result.islands

    def hand_over(self, island: int, tokens: int, ends: StopRequest | None) -> None:
        """Send this rank's state to the island ``island``, which joins or comes back.

        ``tokens``: number of tokens of the latest steps, which the run's progress does not count yet. The other island
        is told how many tokens the whole run has seen: the number in the progress plus ``tokens``. ``ends``: the
        request with which the run ends now, or None if it goes on. The other island gets its wishes, too.
        """
        self.keep_answers()
        counts = [
            self.counts.get(f, self.mesh.islands) for f in range(self.how.fragments)
        ]
        wishes = json.dumps(ends.wishes if ends else None).encode()
        about = [self.presence.tokens + tokens, *counts, *self.streams.order, *wishes]
        send_state(
            self.state,
            self.how,
            self.streams,
            island,
            self.steps // self.how.every,
            about,
        )
