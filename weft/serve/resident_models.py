"""Models that come into memory when requests name them, while the engine goes on computing for others."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from weft.checkpoint.model_family import FamilyMember, ModelFamily
from weft.errors import UsageError, WeftError
from weft.generate.backend import Busy, ServerEnding
from weft.generate.engine_thread import EngineThread
from weft.generate.many_models import Room, open_member
from weft.generate.residency import Residency, Switch
from weft.models.transformer import Transformer


class ResidentModels:
    """Lets requests wait until the model that they name is in memory.

    ``thread``: the engine that computes the models. ``openings``: for each model's name, a function that opens the
    model, and returns it with the hash of its weights. A request that names a model without such a function does not
    wait. ``residency``: decides which models are in memory. ``most``: the largest number of waiting requests; further
    requests are refused.
    """

    def __init__(
        self, thread: EngineThread, openings: Mapping[str, Callable[[], tuple[Transformer, bytes]]],
        residency: Residency, most: int = 1024,
    ) -> None:  # fmt: skip
        self.thread, self.openings, self.most = thread, openings, most
        self.residency = residency
        self.queues = defaultdict[str, list[asyncio.Future[None]]](list)
        self.ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._reading: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[None]:
        """Return a context in which the model ``name`` is in memory; entering it may wait. Raises :class:`Busy` if too
        many requests wait, :class:`ServerEnding` if the server ends meanwhile, and :class:`WeftError` if the model
        cannot be read.
        """
        if name not in self.openings:
            yield
            return
        await self._enter(name)
        try:
            yield
        finally:
            self.residency.leave(name)
            self._look()

    def end(self) -> int:
        """Refuse all requests that wait, with :class:`ServerEnding`; return their number."""
        self.ended, refused = True, 0
        if self._timer is not None:
            self._timer.cancel()
        for name in [*self.queues]:
            refused += self._refuse(
                name, ServerEnding("the server ends; ask again later")
            )
        return refused

    async def _enter(self, name: str) -> None:
        now, waiting = asyncio.get_running_loop().time(), self.residency.waiting
        if self.ended:
            raise ServerEnding("the server ends; ask again later")
        if sum(map(len, waiting.values())) >= self.most:
            raise Busy("too many requests wait for models to be read; try again later")
        if self.residency.enter(name, now):
            return
        future = asyncio.get_running_loop().create_future()
        self.queues[name].append(future)
        self._look()
        try:
            await future
        except asyncio.CancelledError:
            if future in self.queues[name]:
                self.queues[name].remove(future)
                self.residency.give_up(name, now)
            elif not future.cancelled() and future.exception() is None:
                self.residency.leave(name)
            self._look()
            raise

    def _look(self) -> None:
        """Begin to read the next model if it is time, or wait until it is."""
        if self._timer is not None:
            self._timer.cancel()
        if self.ended or self.thread.ended:
            return
        loop = asyncio.get_running_loop()
        while (switch := self.residency.switch(loop.time())) is not None:
            if switch.name in self.residency.running:
                self._admit(switch.name)
                continue
            self._reading = asyncio.ensure_future(self._read(switch))
            return
        due = self.residency.due()
        # those that are due already look again when a request ends
        if due is not None and due > loop.time():
            self._timer = loop.call_at(due, self._look)

    async def _read(self, switch: Switch) -> None:
        """Take the leaving models out of the engine, and read the next one in a thread while the engine computes."""
        name, engine = switch.name, self.thread.engine
        try:
            for leaving in switch.leaving:
                await self._called(partial(engine.remove_model, leaving))
            opened = await asyncio.to_thread(self.openings[name])
            await self._called(partial(engine.add_model, name, *opened))
        except Exception as error:
            self.residency.fail(name)
            said = error if isinstance(error, WeftError) else None
            self._refuse(name, said or WeftError(f"{name} cannot be read: {error}"))
        else:
            self._admit(name)
        self._look()

    def _admit(self, name: str) -> None:
        self.residency.admit(name)
        for future in self.queues.pop(name, []):
            if future.done():  # its client went away just now
                self.residency.leave(name)
            else:
                future.set_result(None)

    def _refuse(self, name: str, error: Exception) -> int:
        waiting = [f for f in self.queues.pop(name, []) if not f.done()]
        for future in waiting:
            future.set_exception(error)
        return len(waiting)

    async def _called(self, action: Callable[[], None]) -> None:
        await asyncio.wrap_future(self.thread.call(action))


def resident_models(
    thread: EngineThread, family: ModelFamily, members: Mapping[str, FamilyMember], room: Room, bound: float,
    most: int,
) -> ResidentModels:  # fmt: skip
    """Return the object that reads ``members`` into memory when requests name them.

    ``thread``: the engine that computes the models. ``family``: the base model and the function that opens each member.
    ``members``: the models by name, which share weights with the base. ``room``: how many models, or how many bytes,
    may be in memory. ``bound``: seconds within which a request should begin. ``most``: largest number of requests that
    wait. Raises :class:`UsageError` if the base alone takes all of the room.
    """
    limit = room.models if room.nbytes is None else room.nbytes - family.nbytes
    if limit <= 0:
        raise UsageError(
            f"the base alone takes {family.nbytes / 1e9:.3g} GB; give --resident more"
        )

    def cost(name: str) -> float:
        return 1 if room.nbytes is None else max(1, members[name].own)

    openings = {
        name: partial(open_member, family, member) for name, member in members.items()
    }
    return ResidentModels(thread, openings, Residency(limit, bound, cost), most)
