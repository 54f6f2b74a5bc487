"""The backend with many engines: it dispatches requests, and continues them elsewhere when an engine is lost."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import InvalidStateError
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Literal

import numpy as np
import torch

from weft.cluster.answer_moves import AnswerMoves
from weft.cluster.cache_knowledge import CacheKnowledge
from weft.cluster.cluster_messages import (
    BEAT_S,
    CHANNEL,
    SILENT_S,
    UNHEARD,
    EngineAbout,
    Message,
    TokenMessage,
    packed_ids,
    read_beat,
    read_hypotheses,
    read_refusal,
    read_score,
    read_token,
    search_message,
)
from weft.cluster.dispatch_policy import (
    DispatchPolicy,
    DispatchRequest,
    EngineView,
    freest,
)
from weft.cluster.engine_link import EngineLink
from weft.cluster.engine_notices import order_loans, tell_lenders, tell_memories
from weft.cluster.engine_times import ClusterTimes
from weft.cluster.flight import (
    FAILED,
    GONE,
    GUILTY,
    EngineLoss,
    Flight,
    RemoteCall,
    acquit,
    blame_of,
    fail_future,
)
from weft.cluster.joining import JOINED, REFUSED
from weft.cluster.kept_answers import kept_key
from weft.cluster.other_router import ROUTER, WHO
from weft.cluster.outbox import Outbox, ending_of
from weft.cluster.role_counts import (
    CHOICE_S,
    RecentRequests,
    RoleChooser,
    RoleCounts,
    RoleQuestion,
    assign_roles,
)
from weft.cluster.routed_answers import ENDING, RoutedAnswers
from weft.cluster.router_model import RouterModel
from weft.errors import UsageError, WeftError
from weft.generate.backend import (
    AnswerRequest,
    BackendFacts,
    Busy,
    EngineLoad,
    Hypothesis,
    NoEngine,
    SearchRequest,
    ServerEnding,
    TokenEvent,
    failed_text,
)
from weft.net.endpoint import Endpoint
from weft.net.wire import Frame, Head, SealedConnection

#: Seconds within which who connects must have said what it is, and between two looks at requests that wait.
ABOUT_S, LOOK_S = 10.0, 0.1

#: Seconds between two choices of loans; signs of life tell their effect before the next one.
LOANS_S = 1.0

#: Seconds between two looks at how full engines are.
BALANCE_S = 0.5

#: Numbers that stand for the roles in metrics, and seconds that a move counts before the first one is measured.
ROLE_NUMBERS = {"": 0, "prefill": 1, "decode": 2, "cache": 3}
UNMEASURED_S = 0.01

#: Seconds between two lines about the same stranger.
STRANGER_S = 60.0

#: The size of the cache while no engine has joined: no request is refused for its length then.
UNKNOWN = 2**31

NO_ENGINE = "no engine is there to answer; ask again later"


class EngineFailed(OSError):
    """Raised when the computation of an engine has failed."""


class EngineRouter:
    """Backend that divides requests among engines. Engines that know ``secret`` join it at ``endpoint``.

    ``model``: the model that every engine must have; an engine with another one is refused. ``policy`` chooses the
    engine for each request. ``say`` prints a line. ``patience``: seconds that an answer waits for an engine when it has
    lost its own. ``headroom``: share of a cache that counts as used while its engine has urgent answers. ``balances``:
    whether answers move to other engines to balance memory. ``name``: description of this router, for the error line of
    another router that is started for the same engines. ``roles`` chooses the engines' roles anew as the load drifts;
    None: they stay as they are.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        secret: str,
        model: RouterModel,
        say: Callable[[str], None],
        policy: DispatchPolicy = freest,
        patience: float = 60.0,
        headroom: float = 0.1,
        balances: bool = True,
        name: str = "",
        roles: RoleChooser | None = None,
    ) -> None:
        self.name, self.recent, self.roles_chosen = name, RecentRequests(), 0
        self.endpoint, self.model, self.say = endpoint, model, say
        self.policy, self.patience = policy, patience
        self.links: dict[str, EngineLink] = {}
        self.times = ClusterTimes()
        # answers that were continued on another engine by computing them again; others move with their blocks
        self.continued = 0
        self.headroom, self.balances = headroom, balances
        self._lock = threading.RLock()
        self._flights: dict[int, Flight] = {}
        self._waiting: list[Flight | RemoteCall] = []  # in the order of their numbers
        self._owners: dict[Flight, RoutedAnswers] = {}
        self._open: set[RoutedAnswers] = set()
        self._numbers = count()
        self.moves = AnswerMoves(
            self.links, self._flights, self._numbers, self._able, self._release
        )
        self._kept = CacheKnowledge(0)  # by all cache engines together
        self._lost: dict[str, str] = {}  # why engines were given up, by instance
        self._strangers: dict[str, float] = {}
        # names of engines that were asked to end, or let go, and may still have files to write
        self.let_go: set[str] = set()
        self._cut, self._closed = False, threading.Event()
        endpoint.refused = self._note_stranger
        self._channel = endpoint.open(CHANNEL, secret, self._serve)
        self._watcher = threading.Thread(
            target=self._watch, name="weft-router", daemon=True
        )
        self._watcher.start()
        if roles is not None:
            chooser = partial(self._watch_roles, roles)
            threading.Thread(target=chooser, name="weft-roles", daemon=True).start()

    # What HTTP needs, in the event loop.

    @property
    def failure(self) -> Exception | None:
        return None if self._able() else NoEngine(NO_ENGINE)

    @property
    def most(self) -> int:
        """Largest number of answers at the same time; while no engine has joined, there is no limit."""
        with self._lock:
            return sum(link.about.most for link in self._able()) or UNKNOWN

    @property
    def facts(self) -> BackendFacts:
        with self._lock:
            able = self._able()
            cache = max((link.room for link in able), default=UNKNOWN)
            searches = any(link.about.searches for link in able) or not able
        known = self.model
        return BackendFacts(known.vocab, known.embed, cache, searches, known.scores)

    @asynccontextmanager
    async def answers(
        self,
        requests: Sequence[AnswerRequest],
        session: str = "",
        key: str = "",
        weights: int = 0,
    ) -> AsyncIterator[RoutedAnswers]:
        """Return a context in which ``requests`` are answered, as :meth:`weft.generate.backend.Backend.answers` does;
        ``session`` and ``key`` are arguments of that method. ``weights``: version of the oldest weights that may write
        the answers; only engines with these or newer weights get them.
        """
        if self._cut:
            raise ServerEnding("the server ends; ask again later")
        answers = RoutedAnswers(self._drop, asyncio.get_running_loop())
        self._open.add(answers)
        try:
            self._begin(answers, requests, session, key, weights)
            for flight in answers.generations:
                await asyncio.wrap_future(flight.accepted)
            yield answers
        finally:
            self._open.discard(answers)
            self._drop(answers.generations)

    async def search(self, request: SearchRequest) -> list[Hypothesis]:
        frame = await self._called(partial(_asked_search, request), searches=True)
        return read_hypotheses(frame.head["best"])

    async def embed(
        self, ids: Sequence[int], pooling: Literal["mean", "last"], size: int | None
    ) -> torch.Tensor:
        head: Head = {"kind": "embed", "pooling": pooling, "size": size}
        frame = await self._called(partial(_asked_vector, head, ids))
        return torch.from_numpy(np.frombuffer(frame.payload, "<f4").copy())

    async def score(self, ids: Sequence[int]) -> float:
        frame = await self._called(partial(_asked_vector, {"kind": "score"}, ids))
        return float(frame.head["score"])

    def loads(self) -> Mapping[str, EngineLoad]:
        with self._lock:
            return {
                name: link.beat.load._replace(
                    draining=int(link.draining), role=ROLE_NUMBERS[link.role]
                )
                for name, link in sorted(self.links.items())
            }

    def counts(self) -> Mapping[str, int]:
        return {
            "answers_continued": self.continued,
            "answers_moved": self.moves.moved,
            "roles_chosen": self.roles_chosen,
            "moved_bytes": self.moves.moved_bytes,
            "moved_stall_milliseconds": round(1000 * self.moves.stalled),
        }

    def cut_answers(self) -> int:
        self._cut = True
        cut = 0
        for answers in self._open:
            cut += sum(not flight.finished for flight in answers.generations)
            answers.end_early()
        with self._lock:
            calls = [
                call for link in self.links.values() for call in link.calls.values()
            ]
            calls += [call for call in self._waiting if isinstance(call, RemoteCall)]
        for call in calls:
            fail_future(call.result, ServerEnding(ENDING))
        return cut + len(calls)

    def close(self) -> None:
        """Tell the engines that the router ends, and close their connections."""
        self._closed.set()
        self._channel.shut()
        with self._lock:
            links = [*self.links.values()]
        for link in links:
            self.let_go.add(link.name)
            link.outbox.put({"kind": "end"})
        for link in links:
            link.outbox.close(1.0)
        self._channel.close()
        self._watcher.join()

    def _able(self) -> list[EngineLink]:
        """Return the engines that take requests."""
        with self._lock:
            able = [link for link in self.links.values() if not link.draining]
            return [link for link in able if link.role != "cache"]

    def _begin(
        self,
        answers: RoutedAnswers,
        requests: Sequence[AnswerRequest],
        session: str,
        key: str,
        weights: int,
    ) -> None:
        """Submit all requests. Raises :class:`NoEngine`, :class:`Busy` and :class:`UsageError`."""
        with self._lock:
            for request in requests:
                flights = [
                    Flight(
                        next(self._numbers),
                        request._replace(
                            answers=1,
                            how=replace(request.how, seed=request.how.seed + i),
                        ),
                        len(answers.generations) + i,
                        session,
                        weights=weights,
                    )
                    for i in range(request.answers)
                ]
                for flight in flights if key else ():
                    flight.key = kept_key(f"{key} {flight.index}", flight.request)
                link = self._keeper(request, flights) or self._choose(
                    request, session, weights=weights
                )
                answers.generations += flights
                for flight in flights:
                    self.recent.note(flight, time.monotonic())
                    self._flights[flight.number] = flight
                    self._owners[flight] = answers
                if flights:
                    self._submit(link, request, flights)

    def _keeper(
        self, request: AnswerRequest, flights: Sequence[Flight]
    ) -> EngineLink | None:
        """Return the engine that has kept one of ``flights`` while no router was there, or None."""
        keys, tokens = {flight.key for flight in flights}, len(request.ids) + request.most - 1  # fmt: skip
        keepers = (
            link
            for link in self._able()
            if link.kept & keys and link.takes(request.adapter, tokens, request.answers)
        )
        return next(keepers, None)

    def _choose(
        self,
        request: AnswerRequest,
        session: str,
        flight: Flight | None = None,
        weights: int = 0,
    ) -> EngineLink:
        """Return the engine for ``request``, which belongs to ``flight`` if it was begun elsewhere. ``weights``:
        version of the oldest weights that may answer it.

        Raises :class:`NoEngine` if there is none, :class:`Busy` if all have too many answers, and :class:`UsageError`
        if none can ever answer it.
        """
        able = self._able()
        if not able:
            raise NoEngine(NO_ENGINE)
        tokens = len(request.ids) + request.most - 1
        fitting = [
            link
            for link in able
            if link.takes(request.adapter, tokens, request.answers)
            and link.weights >= weights
            and (flight is None or link.tries(flight))
        ]
        if not fitting:
            if request.adapter and not any(
                request.adapter in link.about.adapters for link in able
            ):
                raise NoEngine(f"no engine has the adapter {request.adapter!r}")
            largest = max(link.room for link in able)
            if tokens > largest:
                raise UsageError(
                    f"{tokens} tokens of prompt and answer do not fit into a cache of {largest}; ask for fewer"
                )
            widest = max(link.about.most for link in able)
            if request.answers > widest:
                raise UsageError(
                    f"{request.answers} answers are asked for at once; the most is {widest}"
                )
            written = sum(len(link.flights) for link in able)
            raise Busy(
                f"{written} answers are being written and no more are taken on; try again later"
            )
        if first := [link for link in fitting if link.role != "decode"]:
            fitting = first  # those that write only take what others have begun
        length = len(request.ids) + len(request.written)
        about = DispatchRequest(length, session, request.priority)
        views = [self._view(link, request) for link in fitting]
        return self.links[self.policy(views, about)]

    def _view(self, link: EngineLink, request: AnswerRequest) -> EngineView:
        self.times.retain(link.name, link.flights.values())
        seconds = self.times.seconds(link.name, _stage_of(request))
        work = self.times.work(link.name)
        view = link.view(request)._replace(seconds=seconds, work=work)
        return view._replace(kept=self._kept.known(link.prompt_keys(request)) * view.size)  # fmt: skip

    async def _called(
        self, message: Callable[[int], Message], searches: bool = False
    ) -> Frame:
        """Have an engine compute what ``message`` asks for, and return its reply. Raises the engine's error."""
        if self._cut:
            raise ServerEnding("the server ends; ask again later")
        call = RemoteCall(next(self._numbers), message)
        call.result.set_running_or_notify_cancel()
        with self._lock:
            if not self._able():
                raise NoEngine(NO_ENGINE)
            self._start_call(call)
        try:
            return await asyncio.wrap_future(call.result)
        finally:
            with self._lock:
                self._forget_call(call)

    # Work of all threads; the lock is held.

    def _submit(
        self, link: EngineLink, request: AnswerRequest, flights: Sequence[Flight]
    ) -> None:
        """Send a request to an engine; from one that only computes prompts the answers move on to others."""
        stage, length = _stage_of(request), len(request.ids) + len(request.written)
        for flight in flights:
            self.times.begin(link.name, flight, stage, length, time.monotonic())
        if link.role == "prefill":
            link.submit(flights[0].number, request, flights, self.moves.onward)
        else:
            link.submit(flights[0].number, request, flights)

    def _take_move(self, link: EngineLink, head: Head) -> None:
        """A move has ended: the answer is at its target from now on, or stays."""
        if (arrived := self.moves.end(link, head)) is None:
            return
        flight, target, early = arrived
        if target is None:
            self._waiting.append(flight)
            self._continue_waiting()
        else:
            stage, length = _stage_of(flight.request), flight.length
            self.times.begin(target.name, flight, stage, length, time.monotonic())
            target.remember(flight.request, flight.tokens)
            self._take_tokens(target, vars(early))
        self._release(link)

    def role_question(self) -> RoleQuestion | None:
        """Return recent requests, step times and other facts from which the engines' roles are chosen; None if no
        engine has measured its steps yet.
        """
        with self._lock:
            able = self._able()
            rates = [link.beat.rates for link in able if link.beat.rates]
            if not rates:
                return None
            roles, moves = [link.role for link in able], self.moves
            return RoleQuestion(
                self.recent.all(),
                len(able),
                RoleCounts(roles.count("prefill"), roles.count("decode")),
                np.mean(rates, 0).tolist(),
                min(link.about.cache for link in able),
                moves.stalled / moves.moved if moves.moved else UNMEASURED_S,
            )

    def set_roles(self, counts: RoleCounts) -> None:
        """Give as many engines each role as ``counts`` says. Engines keep their roles as far as possible; otherwise
        engines with the fewest answers change. If an engine then only computes prompts, its answers move to other
        engines.
        """
        with self._lock:
            able = sorted(self._able(), key=lambda link: (len(link.flights), link.name))
            was = assign_roles(able, counts).said(len(able))
            now = counts.said(len(able))
            self.roles_chosen += 1
            self.say(f"roles of engines: {now}, as the recent load needs; were {was}")
            for link in able:
                if link.role == "prefill":
                    for flight in [*link.flights.values()]:
                        if not flight.target:
                            self.moves.move_on(flight)

    def _watch_roles(self, choose: RoleChooser) -> None:
        """Ask now and then whether other roles would serve the recent load better, and take them."""
        while not self._closed.wait(CHOICE_S):
            asked = self.role_question()
            if asked is not None and (counts := choose(asked)) is not None:
                self.set_roles(counts)

    def _start_call(self, call: RemoteCall) -> None:
        able = self._able()
        if not able:
            call.since = time.monotonic()
            self._waiting.append(call)
            return
        least = min(able, key=lambda link: len(link.flights) + 8 * len(link.calls))
        least.start_call(call)

    def _forget_call(self, call: RemoteCall) -> None:
        if call in self._waiting:
            self._waiting.remove(call)
        link = self.links.get(call.engine)
        if link and link.calls.pop(call.number, None):
            link.outbox.put({"kind": "cancel", "answers": [], "calls": [call.number]})
            self._release(link)

    def _tell_of_others(self) -> None:
        """Tell every engine from which others it may borrow, which give memory, and where cache engines are."""
        links = [*self.links.values()]
        tell_lenders(links)
        if not tell_memories(links):
            self._kept = CacheKnowledge(0)

    def _release(self, link: EngineLink) -> None:
        """Let a draining engine go once it has nothing left to do."""
        if link.draining and not link.busy and not link.released:
            link.released = True
            self.let_go.add(link.name)
            link.outbox.put({"kind": "leave"})

    def _drop(self, flights: Sequence[Flight]) -> None:
        """Cancel those of ``flights`` that have not ended, as nobody waits for them."""
        with self._lock:
            by_engine: dict[str, list[int]] = {}
            for flight in flights:
                self._owners.pop(flight, None)
                self._flights.pop(flight.number, None)
                flight.finished = flight.finished or "stop"
                if flight in self._waiting:
                    self._waiting.remove(flight)
                self.moves.forget(flight)
                link = self.links.get(flight.engine)
                if link and link.flights.pop(flight.number, None):
                    by_engine.setdefault(link.name, []).append(flight.number)
            for name, answers in by_engine.items():
                self.links[name].outbox.put(
                    {"kind": "cancel", "answers": answers, "calls": []}
                )
                self._release(self.links[name])

    def _orphan(self, link: EngineLink, blame: int = 0) -> None:
        """Have what ``link`` works on wait for another engine. ``blame``: :data:`FAILED` or :data:`GONE` if the engine
        is lost, as a request may have made it crash.
        """
        orphans: list[Flight | RemoteCall] = [*link.flights.values()]
        for flight in link.flights.values():
            self.moves.forget(flight)
        for orphan in [*orphans, *link.calls.values()]:
            orphan.engine, orphan.since = "", time.monotonic()
            if blame:
                orphan.losses.append(EngineLoss(link.about.instance, blame))
            if blame_of(orphan.losses) < GUILTY or orphan.unproved:
                self._waiting.append(orphan)
                continue
            error = WeftError(
                f"{len(orphan.losses)} engines were lost in a row with this request; it is not tried again"
            )
            if isinstance(orphan, Flight):
                self._end_flight(orphan, error)
            else:
                fail_future(orphan.result, error)
        link.flights.clear()
        link.calls.clear()

    def _continue_waiting(self) -> None:
        """Give answers that wait for an engine to one that can take them."""
        waiting, self._waiting = self._waiting, []
        for each in sorted(waiting, key=lambda w: (w.priority, w.number)):
            if isinstance(each, RemoteCall):
                self._start_call(each)
                continue
            request = each.continued()
            try:
                link = self._choose(request, each.session, each, each.weights)
            except (NoEngine, Busy):
                self._waiting.append(each)
                continue
            except UsageError as error:  # the engines that are left are too small
                self._end_flight(each, error)
                continue
            each.alone = each.accused
            self.continued += 1
            self._submit(link, request, [each])

    def _end_flight(self, flight: Flight, error: WeftError) -> None:
        """End an answer with ``error``."""
        self._flights.pop(flight.number, None)
        flight.error, flight.finished = error, "error"
        fail_future(flight.accepted, error)
        if answers := self._owners.pop(flight, None):
            answers.deliver([TokenEvent(flight.index, None, None, "error")])

    # A thread for each connection.

    def _serve(self, connection: SealedConnection) -> None:
        """Take in the engine that has dialled, and read what it sends until it is lost."""
        try:
            frame = connection.receive(limit=ABOUT_S)
            if frame.head["kind"] == WHO:
                connection.send({"kind": ROUTER, "said": self.name})
                connection.close()
                return
            head = {key: value for key, value in frame.head.items() if key != "kind"}
            about = EngineAbout(**head)
            link = self._join(connection, about)
        except (OSError, KeyError, TypeError, ValueError):
            connection.close()
            return
        if link is None:
            return
        why, blame = "the connection has ended", GONE
        try:
            while True:
                self._take(link, connection.receive(limit=SILENT_S))
        except TimeoutError:
            why = f"no sign of life for {SILENT_S:g} s"
        except EngineFailed as error:
            why, blame = str(error), FAILED
        except OSError as error:
            why = ending_of(error)
        except (KeyError, ValueError, TypeError) as error:
            why, blame = f"a message that cannot be read ({error!r})", FAILED
        finally:
            self._lose(link, why, blame)

    def _join(
        self, connection: SealedConnection, about: EngineAbout
    ) -> EngineLink | None:
        """Take an engine in, or refuse it with a line on both sides and return None. Raises OSError."""
        with self._lock:
            if why := self._refusal(about):
                self.say(f"engine {about.name} is refused: {why}")
                connection.send({"kind": REFUSED, "why": why})
                connection.close()
                return None
            if (older := self.links.get(about.name)) is not None:
                self._lose(older, "it has joined anew")
            again = self._lost.pop(about.instance, "")
            outbox = Outbox(connection, dict, BEAT_S)
            outbox.put({"kind": JOINED, "again": again})
            outbox.start()
            link = EngineLink(about, outbox, headroom=self.headroom)
            self.links[about.name] = link
            self.let_go.discard(about.name)
            self.times.add_engine(about.name)
            if again and about.hung < SILENT_S:
                self._acquit(about.instance)
            self.say(f"engine {about.name} has joined{' again' if again else ''}")
            self._tell_of_others()
            self._continue_waiting()
            if link.role not in (
                "prefill",
                "cache",
            ):  # somebody may wait for one that writes
                for other in self._able():
                    for flight in [*other.flights.values()]:
                        if other.role == "prefill" and not flight.target:
                            self.moves.move_on(flight)
        return link

    def _refusal(self, about: EngineAbout) -> str:
        """Return why an engine cannot join, or an empty string."""
        if why := self.model.refusal(about):
            return why
        older = self.links.get(about.name)
        if older is not None and older.about.instance != about.instance:
            return f"an engine named {about.name!r} has joined already; give another --name"
        return ""

    def _acquit(self, instance: str) -> None:
        """Let the loss of an engine speak against no request: it was only cut off or stopped, and has not crashed."""
        under_way = [call for link in self.links.values() for call in link.calls.values()]  # fmt: skip
        for each in [*self._flights.values(), *under_way, *self._waiting]:
            acquit(each.losses, instance)

    def _lose(self, link: EngineLink, why: str, blame: int = GONE) -> None:
        """Give an engine up: what it works on is continued elsewhere. ``blame``: the argument of :meth:`_orphan`."""
        with self._lock:
            # closed with the lock held, as an engine that joins anew at once would else hide why it was given up
            link.outbox.close()
            if self.links.get(link.name) is not link:
                return
            del self.links[link.name]
            self.times.remove_engine(link.name)
            self._tell_of_others()
            if link.released:
                self.say(f"engine {link.name} has left")
                return
            if self._closed.is_set():
                return
            self._lost[link.about.instance] = why
            while len(self._lost) > 1000:
                del self._lost[next(iter(self._lost))]
            moved = (
                f"; {len(link.flights)} answers go on elsewhere" if link.flights else ""
            )
            self.say(f"engine {link.name} is given up: {why}{moved}")
            self._orphan(link, blame)
            self._continue_waiting()

    def _take(self, link: EngineLink, frame: Frame) -> None:
        """Act on a message of an engine."""
        head, kind = frame.head, frame.head["kind"]
        with self._lock:
            if self.links.get(link.name) is not link:
                raise OSError("it was given up")
            if kind == "beat":
                link.note_beat(read_beat(head))
                if link.outbox.beats - link.beat.heard >= UNHEARD:
                    raise OSError(f"it has heard nothing for {SILENT_S:g} s")
            elif kind == "kept":
                link.kept |= {*head["keys"]}
            elif kind == "tokens":
                self._take_tokens(link, head)
            elif kind == "taken":
                for number in range(head["answer"], head["answer"] + head["answers"]):
                    if flight := link.flights.get(number):
                        flight.note_accepted()
            elif kind == REFUSED:
                self._take_refusal(link, head)
            elif kind == "result":
                if call := link.calls.pop(head["call"], None):
                    if "error" in head:
                        fail_future(call.result, read_refusal(head))
                    else:
                        with suppress(InvalidStateError):  # the server ends
                            call.result.set_result(frame)
                    self._release(link)
            elif kind == "moved":
                self._take_move(link, head)
            elif kind == "weights":
                link.weights = head["version"]
                self._continue_waiting()
            elif kind == "drain":
                self._drain(link, head["move"])
            elif kind == "halted":
                raise OSError(head["why"])
            elif kind == "failed":
                raise EngineFailed(f"its engine has failed: {head['why']}")

    def _take_tokens(self, link: EngineLink, head: Head) -> None:
        """Pass on the tokens of a step; each is passed on once, in order."""
        events: dict[RoutedAnswers, list[TokenEvent]] = {}
        for name in ("tokens", "begun", "failures"):
            for values in head[name]:
                if (early := link.incoming.get(values[0])) is not None:
                    getattr(early, name).append(values)
        for answer, hits, scores in head["begun"]:
            if (flight := link.flights.get(answer)) and not flight.tokens:
                flight.hits = hits
                flight.prompt_scores = [read_score(said) for said in scores]
        for answer, why in head["failures"]:
            if flight := link.flights.get(answer):
                flight.error = failed_text(why)
        for message in map(read_token, head["tokens"]):
            flight = link.flights.get(message.answer)
            if flight is None or message.place != len(flight.tokens):
                continue
            owner = self._owners[flight]
            events.setdefault(owner, []).append(self._note(link, flight, message))
        for answers, batch in events.items():
            answers.deliver(batch)
        if "usage" in head:
            link.cache.note_beat(*head["usage"])
        if any(event.finished for batch in events.values() for event in batch):
            self.moves.relieve()
        self._release(link)

    def _note(
        self, link: EngineLink, flight: Flight, message: TokenMessage
    ) -> TokenEvent:
        """Note a token, or the end of an answer; return the event for the client."""
        flight.note_accepted()
        if message.token is not None:
            if not flight.versions or flight.versions[-1][1] != link.weights:
                flight.versions.append((len(flight.tokens), link.weights))
            flight.tokens.append(message.token)
            if len(flight.tokens) == 1:
                self._note_kept(link, flight)
            flight.losses.clear()
            link.tokens += 1
            self.times.token(link.name, flight, time.monotonic())
            if message.log_probability is not None:
                flight.log_probabilities.append(message.log_probability)
        if message.finished:
            flight.finished = message.finished
            self.times.end(link.name, flight)
            link.let_go(flight)
            del self._flights[flight.number]
            self.moves.forget(flight)
            self._owners.pop(flight)
            link.remember(flight.request, flight.tokens)
            self._note_kept(link, flight)
        return TokenEvent(
            flight.index, message.token, message.log_probability, message.finished
        )

    def _note_kept(self, link: EngineLink, flight: Flight) -> None:
        """Note that ``link`` has computed ``flight`` so far, and so has sent its blocks to the cache engines."""
        loads = [each.beat.load for each in self.links.values() if each.role == "cache"]
        self._kept.blocks = sum(load.blocks or UNKNOWN for load in loads)
        if loads:
            self._kept.remember(link.prompt_keys(flight.continued()))

    def _take_refusal(self, link: EngineLink, head: Head) -> None:
        """An engine does not begin answers: those that came too many at once wait, the others end."""
        error = read_refusal(head)
        for number in range(head["answer"], head["answer"] + head["answers"]):
            if (flight := link.flights.pop(number, None)) is None:
                continue
            self.moves.forget(flight)
            flight.engine, flight.since = "", time.monotonic()
            if isinstance(error, Busy):
                self._waiting.append(flight)
            else:
                self._end_flight(flight, error)
        self._release(link)

    def _drain(self, link: EngineLink, move: bool) -> None:
        """Send no new requests to an engine. ``move``: others continue those that it has, if there are others."""
        if not link.draining:
            self.say(f"engine {link.name} drains")
        link.draining = True
        self._tell_of_others()
        self.moves.evacuate(link)
        if move and link.busy and self._able():
            numbers = {"answers": [*link.flights], "calls": [*link.calls]}
            link.outbox.put({"kind": "cancel", **numbers})
            self._orphan(link)
            self._continue_waiting()
        self._release(link)

    def _note_stranger(self, host: str, why: str) -> None:
        now = time.monotonic()
        if now - self._strangers.get(host, -STRANGER_S) >= STRANGER_S:
            self._strangers[host] = now
            self.say(f"whoever connects from {host} is refused: {why}")

    def _watch(self) -> None:
        """Give waiting answers to engines that have become able, and end those that have waited too long."""
        loans_at = time.monotonic() + LOANS_S
        balanced = time.monotonic()
        while not self._closed.wait(LOOK_S):
            with self._lock:
                if time.monotonic() >= loans_at:
                    order_loans(self._able())
                    loans_at = time.monotonic() + LOANS_S
                for link in [each for each in self.links.values() if each.draining]:
                    self.moves.evacuate(link)
                if time.monotonic() - balanced >= BALANCE_S:
                    self.moves.relieve()
                    if self.balances:
                        self.moves.balance()
                    balanced = time.monotonic()
                if not self._waiting:
                    continue
                self._continue_waiting()
                late = time.monotonic() - self.patience
                for each in [w for w in self._waiting if w.since < late]:
                    self._waiting.remove(each)
                    error = NoEngine(
                        f"no engine could go on with this answer for {self.patience:g} s; ask again later"
                    )
                    if isinstance(each, Flight):
                        self._end_flight(each, error)
                    else:
                        fail_future(each.result, error)


def _stage_of(request: AnswerRequest) -> str:
    return "" if request.workflow is None else request.workflow.stage


def _asked_search(request: SearchRequest, call: int) -> Message:
    return search_message(call, request)


def _asked_vector(head: Head, ids: Sequence[int], call: int) -> Message:
    return head | {"call": call}, [packed_ids(ids)]
