"""The answers of a router's engines, as whoever has asked for them in an event loop receives them."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from weft.cluster.flight import Flight, fail_future
from weft.errors import WeftError
from weft.generate.backend import ServerEnding, TokenEvent

ENDING = "the server ends, and this answer was not at its end; ask again later"


class RoutedAnswers:
    """The answers to requests that were submitted together to a router, and the events of their tokens.

    ``drop``: cancels answers that nobody waits for. ``loop``: the event loop in which the caller waits for the events.
    """

    def __init__(
        self, drop: Callable[[Sequence[Flight]], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._drop, self.loop = drop, loop
        self.generations: list[Flight] = []
        self._events: asyncio.Queue[TokenEvent] = asyncio.Queue()

    def deliver(self, events: Sequence[TokenEvent]) -> None:
        """Pass ``events`` on to the caller that waits for them in :meth:`next`. May be called in any thread."""
        with suppress(RuntimeError):  # the loop has ended, and who waited in it
            self.loop.call_soon_threadsafe(self._put, events)

    def _put(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            self._events.put_nowait(event)

    def end_early(self) -> None:
        """Make the next call of :meth:`next` raise :class:`ServerEnding`. Answers that still wait for an engine fail
        with the same error.
        """
        for flight in self.generations:
            fail_future(flight.accepted, ServerEnding(ENDING))
        self._events.put_nowait(TokenEvent(0, None, None, "ended"))

    async def cancel(self, index: int) -> None:
        self._drop([self.generations[index]])

    async def next(self) -> TokenEvent:
        event = await self._events.get()
        if event.finished == "ended":
            raise ServerEnding(ENDING)
        if event.finished == "error":
            error = self.generations[event.number].error
            raise error or WeftError("the answer cannot go on")
        return event
