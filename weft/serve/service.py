"""The backend with one engine in this process, used from an event loop: steps go on while the loop serves clients."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Literal

import torch

from weft.errors import WeftError
from weft.generate.backend import (
    AnswerRequest,
    BackendFacts,
    EngineLoad,
    Hypothesis,
    SearchRequest,
    ServerEnding,
    TokenEvent,
    failed_text,
)
from weft.generate.beam_search import can_search
from weft.generate.best_answer import text_score
from weft.generate.embedding import embed
from weft.generate.engine import Engine
from weft.generate.engine_thread import EngineThread
from weft.generate.request import Generation, Written
from weft.serve.resident_models import ResidentModels


def engine_facts(engine: Engine) -> BackendFacts:
    """Return the limits and sizes of ``engine`` against which requests are checked, such as the size of its cache."""
    shape = engine.model.shape
    return BackendFacts(
        vocab=shape.vocab,
        embed=shape.embed,
        cache=engine.scheduler.pool.blocks * engine.reader.size,
        searches=can_search(engine),
        scores=shape.output == "score",
    )


class Service:
    """Backend that computes answers with one ``engine`` in a thread. It accepts up to ``most`` answers at the same time
    and refuses others, so that memory stays bounded.
    """

    def __init__(self, engine: Engine, most: int = 1024) -> None:
        self.engine, self.most = engine, most
        self.thread = EngineThread(engine, most)
        #: Models that are read when requests name them; None if all are in memory.
        self.resident: ResidentModels | None = None
        self._open: set[Answers] = set()  # those that somebody waits for
        self._cut = False  # nobody is to wait any more

    @property
    def failure(self) -> Exception | None:
        return self.thread.failure

    @property
    def facts(self) -> BackendFacts:
        return engine_facts(self.engine)

    @asynccontextmanager
    async def answers(
        self, requests: Sequence[AnswerRequest], session: str = "", key: str = ""
    ) -> AsyncIterator["Answers"]:
        if self._cut:
            raise ServerEnding("the server ends; ask again later")
        name = requests[0].adapter if requests else ""
        using = self.resident.using(name) if self.resident else nullcontext()
        async with using, self._answers(requests) as answers:
            yield answers

    @asynccontextmanager
    async def _answers(
        self, requests: Sequence[AnswerRequest]
    ) -> AsyncIterator["Answers"]:
        answers = Answers(self, asyncio.get_running_loop(), requests)
        begun = asyncio.ensure_future(self._called(answers.begin))
        self._open.add(answers)
        try:
            await asyncio.shield(begun)
            yield answers
        finally:  # also of a client that went away before it began
            self._open.discard(answers)
            if not self.thread.ended:
                await asyncio.shield(asyncio.ensure_future(self._called(answers.end)))

    async def search(self, request: SearchRequest) -> list[Hypothesis]:
        if self._cut:
            raise ServerEnding("the server ends; ask again later")
        begin = partial(self.thread.begin_search, request)
        running = await asyncio.wrap_future(self.thread.call(begin))
        try:
            return await asyncio.wrap_future(running.best)
        finally:
            if not self.thread.ended:
                ending = self._called(partial(self.thread.end_search, running.search))
                await asyncio.shield(asyncio.ensure_future(ending))

    async def embed(
        self, ids: Sequence[int], pooling: Literal["mean", "last"], size: int | None
    ) -> torch.Tensor:
        action = partial(embed, self.engine, ids, pooling, size)
        return await asyncio.wrap_future(self.thread.call(action))

    async def score(self, ids: Sequence[int]) -> float:
        action = partial(text_score, self.engine.model, ids)
        return await asyncio.wrap_future(self.thread.call(action))

    def loads(self) -> Mapping[str, EngineLoad]:
        return {"": self.thread.load()}

    def counts(self) -> Mapping[str, int]:
        return {}

    def cut_answers(self) -> int:
        self._cut = True
        for answers in self._open:
            answers.end_early()
        cut = sum(search.width for search in self.thread.searches)
        cut += self.resident.end() if self.resident else 0
        if not self.thread.ended:
            self.thread.call(self._cut_searches)
        return cut + sum(
            not generation.finished
            for answers in self._open
            for generation in answers.generations
        )

    def close(self) -> None:
        self.thread.close()

    def _cut_searches(self) -> None:
        for best in self.thread.searches.values():
            best.set_exception(
                ServerEnding(
                    "the server ends, and this answer was not at its end; ask again later"
                )
            )
        self.thread.searches.clear()

    async def _called(self, action: Callable[[], None]) -> None:
        """Run ``action`` in the engine's thread, between two steps."""
        await asyncio.wrap_future(self.thread.call(action))


class Answers:
    """The answers to ``requests``, which are submitted together to ``service``, and the events of their tokens.
    ``loop``: the event loop in which the caller waits for the events.
    """

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
        """Submit all requests to the engine. The engine's thread calls this."""

        def tell_of(index: int) -> "partial[None]":
            return partial(self._pass_on, index)

        self.service.thread.submit(self.requests, tell_of, self.generations)

    def end(self) -> None:
        """Stop all answers that have not ended. The engine's thread calls this."""
        self.service.thread.end(self.generations)

    def _pass_on(self, index: int, written: Written | None) -> None:
        event = (
            TokenEvent(index, *written[1:])
            if written
            else TokenEvent(index, None, None, "error")
        )
        self.loop.call_soon_threadsafe(self._events.put_nowait, event)

    def end_early(self) -> None:
        """Make the next call of :meth:`next` raise :class:`ServerEnding`, because the server ends."""
        self._events.put_nowait(TokenEvent(0, None, None, "ended"))

    async def cancel(self, index: int) -> None:
        ending = partial(self.service.thread.end, [self.generations[index]])
        await asyncio.wrap_future(self.service.thread.call(ending))

    async def next(self) -> TokenEvent:
        event = await self._events.get()
        if event.finished == "ended":
            raise ServerEnding(
                "the server ends, and this answer was not at its end; ask again later"
            )
        if event.finished == "error" and self.service.failure is None:
            raise failed_text(self.generations[event.number].failure)
        if event.finished == "error":
            raise WeftError(f"the engine has failed: {self.service.failure}")
        return event
