"""An engine in a thread of its own, which takes steps while other threads submit and cancel requests."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from math import inf
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

from weft.errors import UsageError, WeftError
from weft.generate.backend import (
    AnswerRequest,
    Busy,
    EngineLoad,
    Hypothesis,
    SearchRequest,
)
from weft.generate.beam_search import Search
from weft.generate.engine import Engine, KeptUsage
from weft.generate.request import Generation, Written
from weft.generate.thread_device import use_device

R = TypeVar("R")

#: Is called in the engine's thread with every result of a request's step, or with None if the engine has failed.
Tell = Callable[[Written | None], None]


class RunningSearch(NamedTuple):
    """A beam search under way. ``best``: future of its best finished texts."""

    search: Search
    best: "Future[list[Hypothesis]]"


class EngineThread:
    """Runs ``engine`` in a thread, for at most ``most`` answers at the same time. ``stepped`` is called after each of
    the engine's steps, in the engine's thread.
    """

    def __init__(
        self,
        engine: Engine,
        most: int = 1024,
        stepped: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine, self.most, self.stepped = engine, most, stepped
        self.failure: Exception | None = None
        self.seconds = 0.0  # of the last step
        self.tells: dict[Generation, Tell] = {}
        self.searches: dict[Search, Future[list[Hypothesis]]] = {}
        self._wake = threading.Condition()
        self._inbox: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        # what had no result after the last step
        self._pending: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._closed, self._written = False, 0
        self.thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self.thread.start()

    @property
    def ended(self) -> bool:
        """Whether the engine takes no further steps, because its thread was closed or the engine has failed."""
        return self.failure is not None or self._closed

    def call(self, action: Callable[[], R]) -> "Future[R]":
        """Run ``action`` in the engine's thread, between two steps; return the future of its result."""
        future: Future[R] = Future()
        with self._wake:
            if self.ended:
                raise WeftError("the engine has stopped") from self.failure
            self._inbox.append((action, future))
            self._wake.notify()
        return future

    def call_until(self, action: Callable[[], R | None]) -> "Future[R]":
        """Run ``action`` in the engine's thread, between two steps, and again after each step until its result is not
        None; return the future of that result. If the future is cancelled, ``action`` is not run again.
        """
        future: Future[R] = Future()

        def begun(first: Future[None]) -> None:
            if error := first.exception():
                # nobody waits for a cancelled one
                with suppress(InvalidStateError):
                    future.set_exception(error)

        self.call(partial(self._look, action, future)).add_done_callback(begun)
        return future

    def close(self) -> None:
        """End the thread after the engine's current step. Requests that have not ended stay without an answer."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self.thread.join()

    def load(self) -> EngineLoad:
        """Return the numbers of running and waiting requests and of used cache blocks. May be called in any thread."""
        scheduler, pool = self.engine.scheduler, self.engine.scheduler.pool
        usages = [party.usage() for party in self.engine.loans]
        lent = sum(usage.lent for usage in usages)
        # the router counts what it has ordered to come by itself
        coming = sum(len(each.table) for each in list(scheduler.arriving))
        outside = self.engine.outside
        kept = outside.usage() if outside is not None else KeptUsage(0, ())
        return EngineLoad(
            len(scheduler.running),
            len(scheduler.waiting),
            scheduler.preemptions,
            len(pool.owners) - lent - sum(usage.offered for usage in usages) - coming,
            pool.blocks,
            self._written,
            borrowed=sum(usage.borrowed for usage in usages),
            lent=lent,
            looked=kept.looked,
            sources=kept.sources,
        )

    # Called in the engine's thread, through `call`.

    def submit(
        self,
        requests: Sequence[AnswerRequest],
        tell_of: Callable[[int], Tell],
        generations: list[Generation],
    ) -> None:
        """Submit all ``requests``, and append one generation per answer to the list ``generations``. ``tell_of``:
        returns, for the index of a generation, the function that is called with its results.

        Raises :class:`Busy`, and the errors of :meth:`Engine.submit`; ``generations`` then has those of the requests
        before the refused one.
        """
        count = sum(request.answers for request in requests)
        if count > self.most:
            raise UsageError(
                f"{count} answers are asked for at once; the most is {self.most}"
            )
        self._check_room(count)
        for request in requests:
            generations += self.engine.submit(*request)
        self.tells |= {
            generation: tell_of(index) for index, generation in enumerate(generations)
        }

    def end(self, generations: Sequence[Generation]) -> None:
        """Cancel all of ``generations`` that have not ended."""
        for generation in generations:
            self.tells.pop(generation, None)
            if not generation.finished:
                self.engine.cancel(generation)

    def begin_search(self, request: SearchRequest) -> RunningSearch:
        """Begin a beam search and return it. Each beam counts as one answer of the engine's limit. Raises :class:`Busy`
        if the limit is exceeded, and :class:`UsageError` for prompts that cannot be continued.
        """
        self._check_room(request.width)
        search = Search(
            self.engine,
            request.ids,
            request.most,
            request.width,
            request.stops,
            request.penalty,
            request.prune or inf,
            request.tenant,
        )
        search.begin()
        best: Future[list[Hypothesis]] = Future()
        best.set_running_or_notify_cancel()
        self.searches[search] = best
        return RunningSearch(search, best)

    def end_search(self, search: Search) -> None:
        """Cancel the beam search ``search``, if it has not ended."""
        self.searches.pop(search, None)
        search.end()

    def take_weights(self, version: int, install: Callable[[], None]) -> None:
        """Let all further tokens be computed with new weights. Running requests continue from the tokens that they
        have. ``version``: number of the new weights. ``install``: function that writes them into the model.
        """
        self._pass_on(self.engine.drain())
        install()
        self._pass_on(self.engine.weights_changed(version))

    def _check_room(self, count: int) -> None:
        written = len(self.tells) + sum(search.width for search in self.searches)
        if written + count > self.most:
            raise Busy(
                f"{written} answers are being written and no more are taken on; try again later"
            )

    # The thread itself.

    def _serve(self) -> None:
        """Take steps until the end. Actions that still wait then get an error."""
        try:
            use_device(self.engine.model.mesh.device)
            self._take_steps()
        finally:
            with self._wake:
                self._closed = True
                for _, future in (*self._inbox, *self._pending):
                    if future.set_running_or_notify_cancel():
                        future.set_exception(WeftError("the engine has stopped"))

    def _take_steps(self) -> None:
        while True:
            with self._wake:
                while not (self._inbox or self.tells or self.searches or self._closed):
                    self._wake.wait()
                if self._closed:
                    return
                inbox, self._inbox = self._inbox, deque()
            for action, future in inbox:
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(action())
                    except Exception as error:
                        future.set_exception(error)
            try:
                begun = perf_counter()
                self._step()
                self.seconds = perf_counter() - begun
                if not (self.tells or self.searches):
                    self.engine.settle()  # as no step does it soon
            except Exception as error:  # what the engine has in hand is lost
                self.failure = error
                for best in self.searches.values():
                    best.set_exception(WeftError(f"the engine has failed: {error}"))
                for tell in self.tells.values():
                    tell(None)
                self.stepped()
                return
            self.stepped()
            pending, self._pending = self._pending, []
            for action, future in pending:
                self._look(action, future)

    def _look(self, action: Callable[[], R | None], future: "Future[R]") -> None:
        """Run ``action``, unless ``future`` is cancelled; without a result it is run again after the next step."""
        if future.cancelled():
            return
        try:
            result = action()
        except Exception as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        if result is None:
            self._pending.append((action, future))
        elif future.set_running_or_notify_cancel():
            future.set_result(result)

    def _step(self) -> None:
        self._pass_on(self.engine.step())
        for search, best in [*self.searches.items()]:
            try:
                search.advance()
            except WeftError as error:  # of this search alone
                self.end_search(search)
                best.set_exception(error)
                continue
            if not search.beams:
                del self.searches[search]
                best.set_result(search.best())

    def _pass_on(self, results: Sequence[Written]) -> None:
        for written in results:
            generation = written.request
            self._written += written.token is not None
            if (
                tell := self.tells.pop(generation, None)
                if written.finished
                else self.tells.get(generation)
            ):
                tell(written)
