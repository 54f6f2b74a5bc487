"""An engine as a member of a cluster: it joins a router, answers the router's requests, and joins anew when it must."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from weft.cluster.cluster_messages import (
    BEAT_S,
    CHANNEL,
    ROUTER_SILENT_S,
    EngineAbout,
    TokenMessage,
    grammar_source,
    read_search,
    read_submit,
    refusal_values,
    score_values,
    token_values,
    unpacked_ids,
)
from weft.cluster.engine_loans import EngineLoans, LenderAddress
from weft.cluster.joining import DIAL_S, REFUSED, ask_to_join, stay_joined
from weft.cluster.kept_answers import KeptAnswers
from weft.cluster.mover import MOVES, AnswerMove, MoveReport, take_in
from weft.cluster.outbox import Outbox
from weft.cluster.pulse import Pulse
from weft.errors import UsageError, WeftError
from weft.generate.backend import AnswerRequest, Busy, Hypothesis, SearchRequest
from weft.generate.beam_search import Search
from weft.generate.best_answer import text_score
from weft.generate.block_channel import BLOCKS, PeerBlocks
from weft.generate.cache_role import CacheEngines
from weft.generate.embedding import embed
from weft.generate.engine import Engine
from weft.generate.engine_thread import EngineThread, RunningSearch
from weft.generate.grammar import Grammar, Grammars, GrammarSource, Kind
from weft.generate.migration import MOVED, Arrival, MoveFrame
from weft.generate.outside_cache import attach_caches
from weft.generate.request import Generation, Written
from weft.generate.step_curve import StepWatch
from weft.net.endpoint import Address, Channel, Endpoint
from weft.net.wire import Frame, Head, SealedConnection, WireBroken

#: Seconds in which a frame of a request that comes from another engine must come, as its prompt may still be computed.
ARRIVAL_S = 600.0

#: Seconds for which an engine waits for a rank of its own that gives no sign of life, before it ends.
SILENT_RANK_S = 60.0


@dataclass
class RouterWork:
    """What an engine does for one connection to its router.

    Attributes:
        ``outbox``: sends to the router.
        ``taken``: how many submissions have been received.
        ``heard``: number of the router's last sign of life that has come.
        ``counts``: number of tokens that each answer under way has so far, by the answer's number. It includes tokens
            that another engine has written.
        ``generations``: answers under way, by number.
        ``keys``: keys by which answers under way are kept when the router is gone, by number.
        ``fresh``: numbers of the answers under way of which the router has got no event yet.
        ``searches``: beam searches under way, by number.
        ``preparing``: numbers of answers whose grammar is being compiled.
        ``cancelled``: numbers in ``preparing`` of answers that nobody wants any more.
        ``tokens``: token events of the current step, as JSON values.
        ``begun``: answers of which this step brings the first event. Each is a list: the answer's number, its number of
        cached prompt tokens, and its prompt scores.
        ``failures``: answers that cannot go on, each as a list of the answer's number and the cause.
        ``later``: orders to move answers in ``preparing``.
        ``unwelcome``: numbers of answers that are refused if they still come from another engine, as nobody wants them.
        ``over``: whether the connection has ended, so that nothing more may begin for it.
    """

    outbox: Outbox
    taken: int = 0
    heard: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    generations: dict[int, Generation] = field(default_factory=dict)
    keys: dict[int, str] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)
    searches: dict[int, Search] = field(default_factory=dict)
    preparing: set[int] = field(default_factory=set)
    cancelled: set[int] = field(default_factory=set)
    tokens: list[list[Any]] = field(default_factory=list)
    begun: list[list[Any]] = field(default_factory=list)
    failures: list[list[Any]] = field(default_factory=list)
    later: list[Head] = field(default_factory=list)
    unwelcome: deque[int] = field(default_factory=lambda: deque(maxlen=4096))
    over: bool = False


class EngineMember:
    """Lets ``engine`` work for a router. Create a member, then call :meth:`run` in the thread that is to wait for the
    router.

    ``about``: description of the engine for the router. ``say`` prints a line. ``grammars`` builds the compiler of
    grammars; None: requests with a grammar are refused. ``loans``: lends cache blocks to other engines and borrows from
    them; None: the engine does neither. ``memories``: reads blocks from other engines' host memory; None: the engine
    does not. ``joined``: called with True when the engine has joined a router, and with False when it is with none.
    ``keeps``: fingerprint of the model, under which blocks are kept at the service's cache engines; "": nowhere.
    """

    def __init__(
        self,
        engine: Engine,
        about: EngineAbout,
        say: Callable[[str], None],
        grammars: Callable[[], Grammars] | None = None,
        loans: EngineLoans | None = None,
        memories: PeerBlocks | None = None,
        joined: Callable[[bool], None] = lambda joined: None,
        keeps: str = "",
    ) -> None:
        self.about, self.say, self._grammars = about, say, grammars
        self.engine, self.loans, self.memories = engine, loans, memories
        self.keeps = keeps
        self._blocks: Channel | None = None
        self.caches: CacheEngines | None = None
        self._note_joined = joined
        self.thread = EngineThread(engine, about.most, self._flush)
        self.kept = KeptAnswers(self.thread)
        self._steps = engine.watch = StepWatch()
        self._compiler = ThreadPoolExecutor(1, "weft-grammar")
        self._compiled: Grammars | None = None
        self._current: RouterWork | None = None
        self._moves: Channel | None = None
        self._draining, self._ended = threading.Event(), threading.Event()
        self._pulse = Pulse()

    def run(
        self, endpoint: Endpoint, router: Address, secret: str, redial: float
    ) -> None:
        """Join the router at the address ``router`` and answer its requests, until it lets this engine go.
        ``endpoint``: where other engines reach this one. ``secret``: known to router and engines.

        When the connection ends, requests with a key go on, and are kept for a new router that asks for them again. All
        others are cancelled, and their blocks stay in the cache. The engine then tries to join anew for ``redial``
        seconds, at least once. Raises :class:`WeftError` if the router refuses this engine
        or cannot be reached, or if the engine has failed.
        """
        channel = endpoint.join(CHANNEL, secret)
        host, port = endpoint.address
        self.about = self.about._replace(host=host, port=port)
        self._moves = endpoint.open(MOVES, secret, self._arrive)
        self._blocks = endpoint.join(BLOCKS, secret)
        stay_joined(
            f"{router[0]}:{router[1]}",
            partial(self._dial, channel, router),
            partial(self._serve, redial=redial),
            self._ends,
            redial,
            self._ended,
            self.say,
        )

    def _ends(self) -> bool:
        """Whether this engine ends now that its connection has. Raises :class:`WeftError` if the engine has failed."""
        if self.thread.failure is not None:
            raise self._failure() from self.thread.failure
        return self._draining.is_set()

    @property
    def draining(self) -> bool:
        """Whether this engine has asked the router for no further requests."""
        return self._draining.is_set()

    def drain(self, move: bool = False) -> None:
        """Ask the router for no further requests, and to let this engine go when its present requests are answered.
        Other engines are asked to fetch back the cache blocks that this engine holds for them. ``move``: whether the
        router moves the present requests to other engines at once.
        """
        self._draining.set()
        if self.loans is not None:
            self.loans.recall_all()
        if (current := self._current) is None:
            self._ended.set()
        else:
            current.outbox.put({"kind": "drain", "move": move})

    def leave(self) -> None:
        """Close the connection to the router, so that :meth:`run` returns at once. The router is not told before."""
        self._ended.set()
        if self._current is not None:
            self._current.outbox.close()

    def take_weights(self, version: int, install: Callable[[], None]) -> Future[None]:
        """Let the engine use new weights from its next step on; keys and values of earlier weights are computed again.
        ``version``: number of the weights. ``install``: function that writes them into the model. Returns a future that
        is completed when the engine uses them.
        """
        return self.thread.call(partial(self._install, version, install))

    def close(self) -> None:
        """End the engine's thread. A :meth:`run` under way then returns, or raises an error."""
        self._ended.set()
        self._pulse.close()
        if self._current is not None:
            self._current.outbox.close()
        if self.loans is not None:
            self.loans.close()
        if self._moves is not None:
            self._moves.close()
        self.thread.close()
        self._compiler.shutdown(cancel_futures=True)

    def _failure(self) -> WeftError:
        return WeftError(f"the engine has failed: {self.thread.failure}")

    def _dial(self, channel: Channel, router: Address) -> SealedConnection:
        """Connect with the router and be taken, once all ranks of this engine give signs of life.

        Raises OSError, :class:`RouterRefusal`, and :class:`WeftError` if a rank gives none for long.
        """
        self._await_ranks()
        about = self.about._replace(
            hung=self._pulse.take(), weights=self.engine.scheduler.version
        )
        seat = ask_to_join(channel, router, about)
        if seat.again:
            self._call(self.kept.drop_all)  # the same router has them go on elsewhere
            self.say(f"it was given up: {seat.again}; joins anew")
        self.say(f"joined {router[0]}:{router[1]} as {self.about.name}")
        return seat.connection

    def _await_ranks(self) -> None:
        """Wait until no rank is silent. Raises :class:`WeftError` after :data:`SILENT_RANK_S` seconds."""
        deadline = _after(SILENT_RANK_S)
        while (why := self.engine.silence()) and not self._ended.is_set():
            if time.monotonic() > deadline:
                raise WeftError(f"the engine ends: {why}")
            self._ended.wait(BEAT_S)

    def _serve(self, connection: SealedConnection, redial: float) -> bool:
        """Do what the router asks for over ``connection``; return whether the engine may end.

        Raises OSError when the connection ends.
        """

        def beat() -> Head:
            load, demand, taken = self.thread.load(), self._demand(), current.taken
            lending = self.loans.beat() if self.loans is not None else {}
            known = {"taken": taken, "heard": current.heard, "rates": self._steps.rates}  # fmt: skip
            return {"load": load, "demand": demand, **known, **lending}

        current = self._current = RouterWork(Outbox(connection, beat, BEAT_S))
        current.outbox.start()
        self._call(partial(self._show_kept, current))
        self._call(
            partial(self._say_weights, current)
        )  # they may be newer than `about`
        if self._draining.is_set():
            self.drain()
        self._note_joined(True)
        try:
            while True:
                try:
                    frame = connection.receive(limit=ROUTER_SILENT_S)
                except TimeoutError:
                    raise WireBroken(
                        f"no sign of life for {ROUTER_SILENT_S:g} s"
                    ) from None
                if why := self.engine.silence():
                    current.outbox.put({"kind": "halted", "why": why})
                    current.outbox.close(DIAL_S)
                    raise WireBroken(why)
                kind = frame.head["kind"]
                if kind == "leave":
                    return True
                if kind == "end":
                    if redial <= 0:
                        return True
                    raise WireBroken("the router ends")
                self._take(current, kind, frame)
        finally:
            current.over = True
            self._current = None
            self._note_joined(False)
            current.outbox.close()
            if not self.thread.ended:
                self.thread.call(partial(self._stop, current))

    def _take(self, current: RouterWork, kind: str, frame: Frame) -> None:
        """Act on a message of the router."""
        head = frame.head
        if kind == "beat":
            current.heard = head["number"]
        elif kind == "submit":
            answer, source = head["answer"], grammar_source(head)
            request = read_submit(frame)
            rest = head["keys"], head["moves"]
            if source is None:
                self._call(partial(self._begin, current, answer, request, *rest))
            else:
                current.preparing |= {*range(answer, answer + request.answers)}
                self._compiler.submit(
                    self._prepare, current, answer, request, *rest, source
                )
        elif kind == "cancel":
            self._call(partial(self._cancel, current, head["answers"], head["calls"]))
        elif kind == "move":
            self._call(partial(self._move, current, head))
        elif kind == "embed":
            ids = unpacked_ids(frame.payload)
            self._call(partial(self._embed, current, head, ids))
        elif kind == "score":
            ids = unpacked_ids(frame.payload)
            self._call(partial(self._score, current, head["call"], ids))
        elif kind == "lenders" and self.loans is not None:
            self.loans.meet([LenderAddress(*each) for each in head["lenders"]])
            self._call(partial(self._refuse_too_long, current))
        elif kind == "memories":
            if self.memories is not None:
                self.memories.meet([(host, port) for host, port in head["memories"]])
            self._call(partial(self._meet_caches, head["caches"]))
        elif kind == "lend" and self.loans is not None:
            self._call(partial(self.loans.lend, head["to"], head["blocks"]))
        elif kind == "search":
            search = read_search(frame)
            self._call(partial(self._search, current, head["call"], search))

    def _call(self, action: Callable[[], None]) -> None:
        if not self.thread.ended:
            self.thread.call(action)

    def _prepare(
        self,
        current: RouterWork,
        answer: int,
        request: AnswerRequest,
        keys: Sequence[str],
        moves: Sequence[Head],
        source: GrammarSource,
    ) -> None:
        """Compile the grammar of a request, then begin the request. Called in a thread of its own."""
        try:
            grammar = self._compile(source.kind, source.text)
        except Exception as error:
            self._refuse(current, answer, request.answers, error)
            return
        request = request._replace(grammar=grammar)
        self._call(partial(self._begin, current, answer, request, keys, moves))

    def _refuse(
        self, current: RouterWork, answer: int, answers: int, error: Exception
    ) -> None:
        refused = {"answer": answer, "answers": answers}
        current.outbox.put({"kind": REFUSED, **refused, **refusal_values(error)})

    # Moves, each in a thread of its own.

    def _depart(self, current: RouterWork, move: AnswerMove, head: Head) -> None:
        """Move an answer to another engine, and tell the router how that has ended."""
        assert self._moves is not None
        answer = head["answer"]
        report = move.send_away(
            self._moves,
            (head["host"], head["port"]),
            {name: head[name] for name in ("number", "instance", "key")},
        )
        if report.why:
            return self._report_move(current, answer, report)

        def forget() -> None:
            current.generations.pop(answer, None)
            current.counts.pop(answer, None)
            current.keys.pop(answer, None)
            current.fresh.discard(answer)

        self._call(forget)
        # not behind a step of this engine: tokens that the other one has written wait for it
        self._report_move(current, answer, report)

    def _report_move(
        self, current: RouterWork, answer: int, report: MoveReport
    ) -> None:
        moved = {"kind": "moved", "answer": answer, **report._asdict()}
        current.outbox.put(moved)

    def _arrive(self, connection: SealedConnection) -> None:
        """Take in a request that another engine sends."""
        current, hello = self._current, connection.hello
        arrival = Arrival(self.engine, self._compile, self._call)
        landed = False

        def land(frame: MoveFrame) -> bool:
            nonlocal landed
            arrival.unload()
            if current is None or hello.get("instance") != self.about.instance:
                raise WeftError("this engine has joined anew; it takes nothing in")
            number, key = hello["number"], hello["key"]
            action = partial(self._land, current, number, key, arrival, frame)
            landed = self.thread.call(action).result(ARRIVAL_S)
            if not landed:
                arrival.unload()
            return landed

        take_in(connection, land, arrival.keep, ARRIVAL_S)
        connection.close()
        if not landed:
            self._call(arrival.drop)

    def _compile(self, kind: Kind, text: str | dict[str, Any]) -> Grammar:
        if self._grammars is None:
            raise UsageError("this engine has no tokenizer for texts with a form")
        self._compiled = self._compiled or self._grammars()
        return self._compiled.compile(kind, text)

    # Called in the engine's thread.

    def _move(self, current: RouterWork, head: Head) -> None:
        """Begin to move an answer to another engine; a thread of its own then sends it."""
        answer = head["answer"]
        if answer in current.preparing:
            current.later.append(head)
            return
        generation = current.generations.get(answer)
        if generation is None:
            return self._report_move(current, answer, MoveReport("it has ended", 0, 0))
        tell = partial(self._note, current, answer)
        try:
            move = AnswerMove(self.thread, generation, tell, head["after_first"])
        except UsageError as error:
            return self._report_move(current, answer, MoveReport(str(error), 0, 0))
        mover = partial(self._depart, current, move, head)
        threading.Thread(target=mover, name="weft-move", daemon=True).start()

    def _install(self, version: int, install: Callable[[], None]) -> None:
        self.thread.take_weights(version, install)
        if self._current is not None:
            self._send_tokens(self._current)  # those of the weights of before
            self._say_weights(self._current)

    def _say_weights(self, current: RouterWork) -> None:
        """Tell the router which weights write the tokens that it gets from now on."""
        if version := self.engine.scheduler.version:
            current.outbox.put({"kind": "weights", "version": version})

    def _land(
        self,
        current: RouterWork,
        number: int,
        key: str,
        arrival: Arrival,
        frame: MoveFrame,
    ) -> bool:
        """Take a frame of a request that comes; return whether the request goes on here from now on."""
        if current.over or number in current.unwelcome:
            arrival.drop()
            raise WeftError("nobody waits for this request here")
        if len(self.thread.tells) >= self.thread.most:
            arrival.drop()
            raise Busy("no more answers are taken on; try another engine")
        generation = arrival.take(frame)
        if generation is None:
            return False
        current.generations[number] = generation
        current.keys[number] = key
        current.counts[number] = len(generation.written)
        if not generation.written:
            current.fresh.add(number)
        self.thread.tells[generation] = partial(self._note, current, number)
        return True

    def _begin(
        self,
        current: RouterWork,
        answer: int,
        request: AnswerRequest,
        keys: Sequence[str],
        moves: Sequence[Head],
    ) -> None:
        """Begin the answers of a request. ``moves``: the messages that let them go on elsewhere after a first token."""
        current.preparing -= {*range(answer, answer + request.answers)}
        current.taken += 1
        if current.over:
            return
        self._begin_or_resume(current, answer, request, keys)
        later, current.later = current.later, []
        for head in (*moves, *later):
            self._move(current, head)

    def _begin_or_resume(
        self,
        current: RouterWork,
        answer: int,
        request: AnswerRequest,
        keys: Sequence[str],
    ) -> None:
        if not {*keys} & {*self.kept.keys}:
            return self._begin_anew(current, answer, request, keys)
        for index, key in enumerate(keys):
            how = replace(request.how, seed=request.how.seed + index)
            alone = request._replace(answers=1, how=how)
            if not self._resume(current, answer + index, alone, key):
                self._begin_anew(current, answer + index, alone, [key])

    def _resume(
        self, current: RouterWork, answer: int, request: AnswerRequest, key: str
    ) -> bool:
        """Go on with an answer that was kept while the router was gone; return False if there is none."""
        taken = self.kept.take(key, answer, request)
        if taken is None:
            return False
        generation, messages = taken
        current.outbox.put({"kind": "taken", "answer": answer, "answers": 1})
        scores = [score_values(said) for said in generation.prompt_scores]
        current.begun.append([answer, generation.hits, scores])
        current.tokens += map(token_values, messages)
        if not generation.finished:
            current.generations[answer], current.keys[answer] = generation, key
            current.counts[answer] = len(generation.written)
            self.thread.tells[generation] = partial(self._note, current, answer)
        return True

    def _begin_anew(
        self,
        current: RouterWork,
        answer: int,
        request: AnswerRequest,
        keys: Sequence[str],
    ) -> None:
        numbers = range(answer, answer + request.answers)
        self.kept.make_room(request.answers)
        generations = list[Generation]()

        def tell_of(index: int) -> Callable[[Written | None], None]:
            return partial(self._note, current, answer + index)

        try:
            self.thread.submit([request], tell_of, generations)
        except Exception as error:  # of this request alone
            self.thread.end(generations)
            self._refuse(current, answer, request.answers, error)
            return
        current.generations |= dict(zip(numbers, generations, strict=True))
        current.fresh |= {*numbers}
        current.keys |= dict(zip(numbers, keys, strict=False))
        current.counts |= dict.fromkeys(numbers, len(request.written))
        current.outbox.put(
            {"kind": "taken", "answer": answer, "answers": request.answers}
        )
        if unwanted := current.cancelled & {*numbers}:
            current.cancelled -= unwanted
            self._cancel(current, sorted(unwanted), [])

    def _cancel(
        self, current: RouterWork, answers: list[int], calls: list[int]
    ) -> None:
        for answer in answers:
            if answer in current.preparing:
                current.cancelled.add(answer)
            elif generation := current.generations.pop(answer, None):
                del current.counts[answer]
                current.keys.pop(answer, None)
                self.thread.end([generation])
                if generation.finished == MOVED:  # and does not come back
                    generation.finished = "stop"
            else:
                current.unwelcome.append(answer)
        for call in calls:
            if search := current.searches.pop(call, None):
                self.thread.end_search(search)

    def _refuse_too_long(self, current: RouterWork) -> None:
        """Hand back answers that neither the cache nor lenders, as they are now, have room for."""
        for answer, generation in [*current.generations.items()]:
            try:
                self.engine.scheduler.check_size(generation)
            except UsageError as error:
                self._cancel(current, [answer], [])
                self._refuse(current, answer, 1, Busy(str(error)))

    def _search(self, current: RouterWork, call: int, request: SearchRequest) -> None:
        if current.over:
            return
        try:
            running: RunningSearch = self.thread.begin_search(request)
        except Exception as error:  # of this request alone
            self._reply(current, call, refusal_values(error))
            return
        current.searches[call] = running.search

        def ended(best: Future[list[Hypothesis]]) -> None:
            current.searches.pop(call, None)
            if (error := best.exception()) is not None:
                self._reply(current, call, refusal_values(error))
            else:
                self._reply(current, call, {"best": best.result()})

        running.best.add_done_callback(ended)

    def _meet_caches(self, addresses: Sequence[Sequence[Any]]) -> None:
        """Keep this engine's blocks at the cache engines at ``addresses``, and at no others any more."""
        if self.caches is None and addresses and self.keeps:
            assert self._blocks is not None
            try:
                self.caches = attach_caches(self.engine, self.keeps, self._blocks, self.say)  # fmt: skip
            except UsageError as error:  # a model without blocks that could be kept
                self.keeps = ""
                self.say(f"this engine uses no cache engine: {error}")
        if self.caches is not None:
            self.caches.meet([(host, port) for host, port in addresses])

    def _embed(self, current: RouterWork, head: Head, ids: list[int]) -> None:
        if current.over:
            return
        try:
            vector = embed(self.engine, ids, head["pooling"], head["size"])
        except Exception as error:  # of this request alone
            self._reply(current, head["call"], refusal_values(error))
            return
        numbers = memoryview(vector.float().numpy().tobytes())
        self._reply(current, head["call"], {}, [numbers])

    def _score(self, current: RouterWork, call: int, ids: list[int]) -> None:
        if current.over:
            return
        try:
            score = text_score(self.engine.model, ids)
        except Exception as error:  # of this request alone
            self._reply(current, call, refusal_values(error))
            return
        self._reply(current, call, {"score": score})

    @staticmethod
    def _reply(
        current: RouterWork,
        call: int,
        values: Head,
        payload: list[memoryview] | None = None,
    ) -> None:
        current.outbox.put({"kind": "result", "call": call, **values}, payload)

    def _stop(self, current: RouterWork) -> None:
        """Keep the requests of a router that is gone which have a key, and cancel the others."""
        for answer, key in current.keys.items():
            if key and not self._ended.is_set():
                self.kept.keep(key, current.generations.pop(answer))
        self._cancel(current, [*current.generations], [*current.searches])

    def _show_kept(self, current: RouterWork) -> None:
        if keys := self.kept.keys:
            current.outbox.put({"kind": "kept", "keys": keys})

    def _note(self, current: RouterWork, answer: int, written: Written | None) -> None:
        """Note the result of a step for the answer, to be sent at the end of the step."""
        if written is None or answer not in current.counts:
            return
        generation, index = written.request, current.counts[answer]
        if answer in current.fresh:
            current.fresh.discard(answer)
            scores = [score_values(said) for said in generation.prompt_scores]
            current.begun.append([answer, generation.hits, scores])
        if written.finished == "error":
            current.failures.append([answer, generation.failure])
        message = TokenMessage(answer, index, *written[1:])
        current.tokens.append(token_values(message))
        current.counts[answer] += written.token is not None
        if written.finished:
            del current.generations[answer], current.counts[answer]
            current.keys.pop(answer, None)

    def _flush(self) -> None:
        self.kept.make_room(0)
        self._steps.end(self.thread.seconds)
        if self.loans is not None:
            self.loans.note_step(self.thread.seconds)
        current = self._current
        if current is None:
            return
        if self.thread.failure is not None:
            current.outbox.put({"kind": "failed", "why": str(self.thread.failure)})
            current.outbox.close(DIAL_S)
        else:
            self._send_tokens(current)

    def _demand(self) -> int:
        """Return how many cache blocks the waiting requests will need."""
        scheduler = self.engine.scheduler
        size, waiting = scheduler.pool.size, list(scheduler.waiting)
        return sum(-(-len(request.ids) // size) for request in waiting)

    def _send_tokens(self, current: RouterWork) -> None:
        if current.tokens:
            used = self.thread.load().used + self._demand()
            message = {
                "kind": "tokens",
                "usage": [used, current.taken],
                "tokens": current.tokens,
                "begun": current.begun,
                "failures": current.failures,
            }
            current.outbox.put(message)
            current.tokens, current.begun, current.failures = [], [], []


def _after(seconds: float) -> float:
    """Return the time on the monotonic clock in so many ``seconds``."""
    return time.monotonic() + seconds
