"""Answers that move from one engine of a router to another, with their cache blocks."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.cluster.balance import REST_S, MovableAnswer, balancing_move
from weft.cluster.dispatch_policy import (
    DispatchPolicy,
    DispatchRequest,
    freest,
    lightest,
)
from weft.cluster.engine_link import EarlyEvents, EngineLink
from weft.cluster.flight import Flight, asked_nothing
from weft.net.wire import Head


class MovedAnswer(NamedTuple):
    """An answer that has left its engine. ``target``: the engine where it is; None: it was lost on the way. ``early``:
    what that engine has said of it before it was known to be there.
    """

    flight: Flight
    target: EngineLink | None
    early: EarlyEvents


@dataclass
class AnswerMoves:
    """Moves answers between engines. The router's lock is held during every call.

    Attributes:
        ``links``: the engines by name; ``flights``: all answers that have not ended, by number. The router changes
            both.
        ``numbers``: gives new numbers of answers.
        ``able``: returns the engines that take requests.
        ``release``: lets a draining engine go once it has nothing left to do.
        ``moved``: number of moves that have ended well; ``moved_bytes``: bytes of their blocks; ``stalled``: seconds in
            which no engine has computed them.
    """

    links: dict[str, EngineLink]
    flights: dict[int, Flight]
    numbers: Iterator[int]
    able: Callable[[], list[EngineLink]]
    release: Callable[[EngineLink], None]
    moved: int = 0
    moved_bytes: int = 0
    stalled: float = 0.0

    def onward(self, flight: Flight) -> Head | None:
        """Return the message that lets an answer leave the engine that computes its prompt, once its first token is
        written; None if no other engine has room for it.
        """
        if flight.request.most - len(flight.tokens) > 1 and (
            target := self._target_of(flight, ("decode", ""), lightest)
        ):
            return self._order_move(flight, target, after_first=not flight.tokens)
        return None

    def relieve(self) -> None:
        """Let answers go on elsewhere that have stayed with the engine of their prompt, as others had no room for them:
        those that came first, as far as there is room now.
        """
        reading = [link for link in self.able() if link.role == "prefill"]
        writing = [link for link in self.able() if link.role != "prefill"]
        staying = [flight for link in reading for flight in link.flights.values() if not flight.target]  # fmt: skip
        for flight in sorted(staying, key=lambda flight: flight.number):
            if not any(link.spare for link in writing):
                return
            if flight.rest_until <= time.monotonic():
                self.move_on(flight)

    def move_on(self, flight: Flight) -> None:
        """Have an answer leave an engine that from now on only computes prompts."""
        if (head := self.onward(flight)) is not None:
            self.links[flight.engine].outbox.put(head)

    def _target_of(
        self, flight: Flight, roles: Sequence[str], policy: DispatchPolicy = freest
    ) -> EngineLink | None:
        """Return the engine that ``policy`` chooses among those to which an answer can move, or None."""
        request = flight.continued()
        tokens = len(request.ids) + request.most - 1
        fitting = [
            link
            for link in self.able()
            if link.name != flight.engine
            and link.weights == self.links[flight.engine].weights
            and link.role in roles
            and link.spare >= -(-flight.length // link.about.block)
            and link.takes(request.adapter, tokens, 1)
        ]
        if not fitting:
            return None
        about = DispatchRequest(flight.length, flight.session, flight.priority)
        chosen = policy([link.view(request) for link in fitting], about)
        return self.links[chosen]

    def move(self, flight: Flight, target: EngineLink, after_first: bool) -> None:
        """Tell an engine to send an answer to another engine."""
        head = self._order_move(flight, target, after_first)
        self.links[flight.engine].outbox.put(head)

    def _order_move(
        self, flight: Flight, target: EngineLink, after_first: bool
    ) -> Head:
        """Expect an answer at the engine ``target``; return the message that lets it leave its own engine."""
        flight.target, flight.target_number = target.name, next(self.numbers)
        about = target.about
        blocks = -(-flight.length // about.block)
        target.incoming[flight.target_number] = EarlyEvents(blocks=blocks)
        return {
            "kind": "move",
            "answer": flight.number,
            "number": flight.target_number,
            "instance": about.instance,
            "host": about.host,
            "port": about.port,
            "after_first": after_first,
            "key": flight.key,
        }

    def forget(self, flight: Flight) -> None:
        """Let an answer that was on its way be wanted no more at the engine to which it was moving."""
        target = self.links.get(flight.target)
        if target and target.incoming.pop(flight.target_number, None) is not None:
            unwanted = {"answers": [flight.target_number], "calls": []}
            target.outbox.put({"kind": "cancel", **unwanted})
            self.release(target)
        flight.target = ""

    def evacuate(self, link: EngineLink) -> None:
        """Move the answers of a draining engine to others, as far as others have room."""
        now = time.monotonic()
        for flight in [*link.flights.values()]:
            if flight.target or flight.rest_until > now:
                continue
            # a shorter one may have room where this one has none
            if target := self._target_of(flight, ("decode", "", "prefill")):
                self.move(flight, target, after_first=False)

    def balance(self) -> None:
        """Move an answer from an engine with little free memory to one with much, if there are such."""
        now, nothing = time.monotonic(), asked_nothing()
        writing = [link for link in self.able() if link.role != "prefill"]
        answers = {
            link.name: [
                MovableAnswer(
                    flight.number,
                    -(-flight.length // link.about.block),
                    flight.priority,
                )
                for flight in link.flights.values()
                if not flight.target and flight.rest_until <= now
            ]
            for link in writing
        }
        move = balancing_move([link.view(nothing) for link in writing], answers)
        if move is None:
            return
        flight, target = self.flights[move.number], self.links[move.target]
        tokens = len(flight.request.ids) + flight.request.most - 1
        if target.takes(flight.request.adapter, tokens, 1):
            self.move(flight, target, after_first=False)

    def end(self, link: EngineLink, head: Head) -> MovedAnswer | None:
        """Note that the move of an answer away from ``link`` has ended as ``head`` says: the answer is at its target
        from now on, or stays, and the result is None.
        """
        if (flight := link.flights.get(head["answer"])) is None:
            return None
        target = self.links.get(flight.target)
        if head["why"]:
            self.forget(flight)
            flight.rest_until = time.monotonic() + REST_S
            return None
        self.moved, self.stalled = self.moved + 1, self.stalled + head["stall"]
        self.moved_bytes += head["payload"]
        early = None
        if target is not None:
            early = target.incoming.pop(flight.target_number, None)
        link.let_go(flight)
        del self.flights[flight.number]
        flight.target, flight.rest_until = "", time.monotonic() + REST_S
        if target is None or early is None:  # it is lost, and the answer with it
            flight.engine, flight.since = "", time.monotonic()
            self.flights[flight.number] = flight
            return MovedAnswer(flight, None, EarlyEvents())
        # its blocks are counted from here on, until the target's next message has them
        target.cache.take(early.blocks)
        flight.number, flight.engine = flight.target_number, target.name
        self.flights[flight.number] = target.flights[flight.number] = flight
        return MovedAnswer(flight, target, early)
