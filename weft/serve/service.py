"""An engine in a thread of its own, used from an event loop: steps go on while the loop serves clients."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from weft.checkpoint.convert.peft import is_adapter, read_adapter
from weft.errors import UsageError, WeftError
from weft.generate.beam_search import Hypothesis, Search
from weft.generate.engine import Engine
from weft.generate.grammar import Grammar
from weft.generate.request import Generation, Written
from weft.generate.sampling import Sampling


class AnswerRequest(NamedTuple):
    """One prompt with the arguments of :meth:`Engine.submit`, in their order."""

    ids: Sequence[int]
    most: int
    how: Sampling
    stops: Sequence[int]
    answers: int
    top: int | None
    tenant: str
    grammar: Grammar | None
    adapter: str = ""
    least: int = 0
    scored: bool = False


class TokenEvent(NamedTuple):
    """Result of an engine step for one answer: the next token, or None if the answer ended without a further token."""

    number: int  # which of the answers that were asked for together
    token: int | None
    log_probability: tuple[float, dict[int, float]] | None
    finished: str  # "stop", "length", "" if it goes on; "error" or "ended" if it cannot


def add_adapters(engine: Engine, folder: Path, model: str) -> list[str]:
    """Add every adapter that is a folder in ``folder``; returns their names, none of which may be ``model``.

    Raises :class:`UsageError` for a folder without adapters, and for adapters of other models.
    """
    if not folder.is_dir():
        raise UsageError(f"--adapters {folder} is no folder")
    folders = sorted(path for path in folder.iterdir() if is_adapter(path))
    if not folders:
        raise UsageError(
            f"--adapters {folder} has no folder with an adapter as PEFT or `weft export` writes it"
        )
    for path in folders:
        if path.name == model:
            raise UsageError(
                f"the adapter {path} is named like the model; rename it, or give --name"
            )
        engine.add_adapter(path.name, read_adapter(path, engine.model))
    return [path.name for path in folders]


class Busy(WeftError):
    """Error of a request that exceeds the number of answers that the server gives at a time."""


class ServerEnding(WeftError):
    """Error of an answer that is cut off because the server shuts down."""


class Service:
    """Accepts up to ``most`` answers at a time and refuses others, so that memory stays bounded."""

    def __init__(self, engine: Engine, most: int = 1024) -> None:
        self.engine, self.most = engine, most
        self.failure: Exception | None = None
        self._wake = threading.Condition()
        self._inbox: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._tell: dict[Generation, Callable[[Written | None], None]] = {}
        self._closed = False
        self._open: set[Answers] = set()  # those that somebody waits for
        self._searches: dict[Search, Future[list[Hypothesis]]] = {}
        self._cut = False  # nobody is to wait any more
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    @asynccontextmanager
    async def answers(
        self, requests: Sequence[AnswerRequest]
    ) -> AsyncIterator["Answers"]:
        """Submit ``requests`` and yield their answers; unfinished answers are cancelled at the end of the context.

        Raises :class:`Busy`, and the errors of :meth:`Engine.submit` for any of the requests.
        """
        if self._cut:
            raise ServerEnding("the server ends; ask again later")
        answers = Answers(self, asyncio.get_running_loop(), requests)
        begun = asyncio.ensure_future(self.call(answers.begin))
        self._open.add(answers)
        try:
            await asyncio.shield(begun)
            yield answers
        finally:  # also of a client that went away before it began
            self._open.discard(answers)
            if self.failure is None and not self._closed:
                await asyncio.shield(asyncio.ensure_future(self.call(answers.end)))

    async def search(self, begin: Callable[[], Search], width: int) -> list[Hypothesis]:
        """Run the beam search that ``begin`` creates and return its best texts. ``width``: its number of beams, which
        count as answers at a time.

        The search ends when the caller is cancelled. Raises :class:`Busy`, and the errors of ``begin``.
        """
        if self._cut:
            raise ServerEnding("the server ends; ask again later")
        best: Future[list[Hypothesis]] = Future()
        best.set_running_or_notify_cancel()
        search = await self.call(partial(self._begin_search, begin, width, best))
        try:
            return await asyncio.wrap_future(best)
        finally:
            if self.failure is None and not self._closed:
                ending = self.call(partial(self._end_search, search))
                await asyncio.shield(asyncio.ensure_future(ending))

    def _begin_search(
        self, begin: Callable[[], Search], width: int, best: Future[list[Hypothesis]]
    ) -> Search:
        self._check_room(width)
        search = begin()
        search.begin()
        self._searches[search] = best
        return search

    def _end_search(self, search: Search) -> None:
        self._searches.pop(search, None)
        search.end()

    def _check_room(self, count: int) -> None:
        """Raise :class:`Busy` if ``count`` more answers are too many. Called in the engine's thread."""
        written = len(self._tell) + sum(search.width for search in self._searches)
        if written + count > self.most:
            raise Busy(
                f"{written} answers are being written and no more are taken on; try again later"
            )

    def _cut_searches(self) -> None:
        for best in self._searches.values():
            best.set_exception(
                ServerEnding(
                    "the server ends, and this answer was not at its end; ask again later"
                )
            )
        self._searches.clear()

    def cut_answers(self) -> int:
        """End all unfinished answers with :class:`ServerEnding`; return their number."""
        self._cut = True
        for answers in self._open:
            answers.end_early()
        cut = sum(search.width for search in self._searches)
        with self._wake:
            self._inbox.append((self._cut_searches, Future()))
            self._wake.notify()
        return cut + sum(
            not generation.finished
            for answers in self._open
            for generation in answers.generations
        )

    async def call(self, action: Callable[[], Any]) -> Any:
        """Run ``action`` in the engine's thread, between two steps; returns its result."""
        future: Future[Any] = Future()
        with self._wake:
            if self.failure is not None or self._closed:
                raise WeftError("the engine has stopped") from self.failure
            self._inbox.append((action, future))
            self._wake.notify()
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the engine's thread after its current step."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _serve(self) -> None:
        """The engine's thread: take steps until the end. Actions that still wait then get an error."""
        try:
            self._take_steps()
        finally:
            with self._wake:
                self._closed = True
                for _, future in self._inbox:
                    if future.set_running_or_notify_cancel():
                        future.set_exception(WeftError("the engine has stopped"))

    def _take_steps(self) -> None:
        while True:
            with self._wake:
                while not (self._inbox or self._tell or self._searches or self._closed):
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
                for written in self.engine.step():
                    generation = written.request
                    if (
                        tell := self._tell.pop(generation, None)
                        if written.finished
                        else self._tell.get(generation)
                    ):
                        tell(written)
                for search, best in [*self._searches.items()]:
                    search.advance()
                    if not search.beams:
                        del self._searches[search]
                        best.set_result(search.best())
            except Exception as error:  # what the engine has in hand is lost
                self.failure = error
                for best in self._searches.values():
                    best.set_exception(WeftError(f"the engine has failed: {error}"))
                for tell in self._tell.values():
                    tell(None)
                return


class Answers:
    """The answers to requests that were submitted together, and the events of their tokens."""

    def __init__(
        self,
        service: Service,
        loop: asyncio.AbstractEventLoop,
        requests: Sequence[AnswerRequest],
    ) -> None:
        self.service, self.loop, self.requests = service, loop, requests
        self.generations: list[Generation] = []
        self._events: asyncio.Queue[TokenEvent] = asyncio.Queue()

    def begin(self) -> None:
        """Submit all requests. Called in the engine's thread."""
        service = self.service
        count = sum(request.answers for request in self.requests)
        if count > service.most:
            raise UsageError(
                f"{count} answers are asked for at once; the most is {service.most}"
            )
        service._check_room(count)
        for request in self.requests:
            self.generations += service.engine.submit(*request)
        service._tell |= {
            generation: partial(self._pass_on, index)
            for index, generation in enumerate(self.generations)
        }

    def end(self, generations: Sequence[Generation] | None = None) -> None:
        """Stop ``generations`` (default: all) that have not ended. Called in the engine's thread."""
        for generation in self.generations if generations is None else generations:
            self.service._tell.pop(generation, None)
            if not generation.finished:
                self.service.engine.cancel(generation)

    def _pass_on(self, index: int, written: Written | None) -> None:
        event = (
            TokenEvent(index, *written[1:])
            if written
            else TokenEvent(index, None, None, "error")
        )
        self.loop.call_soon_threadsafe(self._events.put_nowait, event)

    def end_early(self) -> None:
        """Make :meth:`next` raise :class:`ServerEnding`."""
        self._events.put_nowait(TokenEvent(0, None, None, "ended"))

    async def cancel(self, index: int) -> None:
        """Cancel the answer number ``index``, whose text has ended."""
        await self.service.call(partial(self.end, [self.generations[index]]))

    async def next(self) -> TokenEvent:
        """Wait for the next event of any answer and return it."""
        event = await self._events.get()
        if event.finished == "ended":
            raise ServerEnding(
                "the server ends, and this answer was not at its end; ask again later"
            )
        if event.finished == "error" and self.service.failure is None:
            grammar = self.generations[event.number].grammar
            raise UsageError(
                f"the text's form has become too complex; ask for a simpler one: {grammar and grammar.failure}"
            )
        if event.finished == "error":
            raise WeftError(f"the engine has failed: {self.service.failure}")
        return event
