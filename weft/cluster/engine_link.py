"""The router's end of the connection to an engine, and what the router knows of that engine."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.cluster.cache_knowledge import CacheKnowledge
from weft.cluster.cluster_messages import EngineAbout, EngineBeat, submit_message
from weft.cluster.dispatch_policy import EngineView
from weft.cluster.engine_loans import lendable_blocks
from weft.cluster.flight import SUSPECTS, Flight, RemoteCall
from weft.cluster.loan_choice import EngineLedger
from weft.cluster.outbox import Outbox
from weft.generate.backend import AnswerRequest, EngineLoad
from weft.generate.keys import chained_keys, root_key
from weft.net.wire import Head


@dataclass
class EarlyEvents:
    """Events of an answer that moves to another engine. The new engine may send them before the router knows that the
    move is complete; the router passes them on afterwards.

    Messages of an engine have lists called ``tokens``, ``begun`` and ``failures``. Each field keeps the entries of this
    answer from the list of the same name. ``blocks``: cache blocks of the answer's text when the move began.
    """

    tokens: list[Any] = field(default_factory=list)
    begun: list[Any] = field(default_factory=list)
    failures: list[Any] = field(default_factory=list)
    blocks: int = 0


@dataclass(eq=False)
class EngineLink:
    """An engine that has joined, as the router sees it.

    Attributes:
        ``about``: description of the engine, which it has sent when it joined.
        ``outbox``: sends messages to the engine.
        ``beat``: the engine's last sign of life.
        ``flights``: answers that the engine writes, by number.
        ``calls``: searches and embeddings that the engine computes, by number.
        ``cache``: the router's knowledge of the engine's cache: its usage, and the blocks that it has.
        ``incoming``: early events of each answer that is moving to this engine, by its number at this engine. They are
            held back until the engine that the answer leaves has confirmed the move.
        ``role``: the engine's present role: that in ``about``, until the router chooses another one.
        ``kept``: keys of answers that the engine has kept for clients of an earlier router.
        ``draining``: whether the engine takes no new requests.
        ``released``: whether the engine may end, because it has nothing left to do.
        ``tokens``: number of tokens that the engine has written.
        ``borrowable``: largest number of tokens that the engine can keep in blocks of other engines.
        ``headroom``: fraction of the cache that counts as used while the engine has urgent answers; it keeps room free
            for them.
        ``weights``: version of the weights that write the engine's next token.
    """

    about: EngineAbout
    outbox: Outbox
    beat: EngineBeat = field(
        default_factory=lambda: EngineBeat(EngineLoad(0, 0, 0, 0, 0), 0, 0)
    )
    flights: dict[int, Flight] = field(default_factory=dict)
    calls: dict[int, RemoteCall] = field(default_factory=dict)
    incoming: dict[int, "EarlyEvents"] = field(default_factory=dict)
    role: str = ""
    kept: set[str] = field(default_factory=set)
    draining: bool = False
    released: bool = False
    tokens: int = 0
    borrowable: int = 0
    headroom: float = 0.0
    weights: int = 0

    def __post_init__(self) -> None:
        self.weights = self.about.weights
        self.role = self.role or self.about.role
        self.cache = CacheKnowledge(self.blocks)

    @property
    def name(self) -> str:
        return self.about.name

    @property
    def busy(self) -> bool:
        """Whether the engine has an answer, search or embedding to compute for this router."""
        return bool(self.flights or self.calls or self.incoming)

    @property
    def blocks(self) -> int:
        """Number of cache blocks of the engine."""
        return self.about.cache // self.about.block

    @property
    def room(self) -> int:
        """Largest number of tokens that a prompt and its answer can have together on this engine, borrowed blocks
        included.
        """
        return self.about.cache + self.borrowable

    @property
    def full(self) -> bool:
        """Whether a further answer could not be written at once: the engine has as many as a step can have."""
        return 0 < self.about.rows <= len(self.flights) + len(self.incoming)

    @property
    def usage(self) -> int:
        """Virtual usage of the engine's cache, in blocks, with the headroom for urgent answers while it has any."""
        urgent = any(flight.priority < 0 for flight in self.flights.values())
        return self.cache.usage + (round(self.headroom * self.blocks) if urgent else 0)

    @property
    def coming(self) -> int:
        """Number of cache blocks of the answers that are moving to this engine, which its load does not count."""
        return sum(early.blocks for early in self.incoming.values())

    @property
    def spare(self) -> int:
        """Number of free cache blocks that an answer which moves to this engine could get; 0 if it could not be written
        at once (:attr:`full`). The room of answers on their way is not free.
        """
        free = self.blocks - self.usage - self.beat.load.lent - self.coming
        return 0 if self.full else max(0, free)

    def takes(self, adapter: str, tokens: int, answers: int) -> bool:
        """Return whether the engine can take ``answers`` more answers with the adapter named ``adapter``. ``tokens``:
        largest number of tokens that an answer and its prompt can have together.
        """
        return (
            not self.draining
            and (not adapter or adapter in self.about.adapters)
            and tokens <= self.room
            and len(self.flights) + len(self.incoming) + answers <= self.about.most
        )

    def view(self, request: AnswerRequest) -> EngineView:
        """Return the state of the engine, as a dispatch policy gets it to choose an engine for ``request``."""
        return EngineView(
            self.name,
            self.blocks,
            self.usage,
            len(self.flights) + len(self.incoming),
            self.cache.known(self.prompt_keys(request)) * self.about.block,
            self.about.block,
        )

    def prompt_keys(self, request: AnswerRequest) -> Iterable[bytes]:
        """Return the keys of the full blocks of the prompt of ``request`` and of what is written of its answer."""
        return self._keys(request, [*request.ids, *request.written])

    def ledger(self) -> EngineLedger:
        """Return the engine's free blocks, texts and other numbers from which loans are chosen. With a loan an engine
        keeps cache blocks of a text in the cache of another engine.
        """
        load = self.beat.load
        free = lendable_blocks(self.blocks) - load.used - load.lent - self.coming
        return EngineLedger(
            self.name,
            max(0, free),
            load.running,
            self.beat.keys,
            load.waiting,
            max(1, self.beat.demand // max(1, load.waiting)),
            self.beat.longest,
            load.lent * self.about.block,
            load.borrowed > 0,
        )

    def tries(self, flight: Flight) -> bool:
        """Return whether the engine may get the answer ``flight``, even if that answer is suspected of making engines
        crash. An engine has at most :data:`SUSPECTS` suspected answers at a time. An accused answer
        (:attr:`Flight.accused`) gets only an engine without any other suspect.
        """
        if not flight.suspected:
            return True
        suspects = [each for each in self.flights.values() if each.suspected]
        if flight.accused:
            return not suspects
        return len(suspects) < SUSPECTS and not any(each.accused for each in suspects)

    def submit(
        self,
        number: int,
        request: AnswerRequest,
        flights: Sequence[Flight],
        move_on: Callable[[Flight], Head | None] = lambda flight: None,
    ) -> None:
        """Send ``request`` to the engine. ``flights``: its answers, which have the numbers from ``number`` on.
        ``move_on``: returns the message that lets an answer go on at another engine after its first token; None: the
        answer stays.
        """
        length = len(request.ids) + len(request.written)
        self.cache.submit(-(-length // self.about.block))
        for flight in flights:
            flight.engine = self.name
            self.flights[flight.number] = flight
        self.remember(request, request.written)
        keys = [flight.key for flight in flights]
        self.kept -= {*keys}
        moves = [head for head in map(move_on, flights) if head is not None]
        self.outbox.put(*submit_message(number, request, request.written, keys, moves))

    def start_call(self, call: RemoteCall) -> None:
        """Send the engine the beam search or embedding ``call``."""
        call.engine = self.name
        self.calls[call.number] = call
        self.outbox.put(*call.message(call.number))

    def note_beat(self, beat: EngineBeat) -> None:
        """Update the engine's load and the usage of its cache from ``beat``, a sign of life of the engine."""
        self.beat = beat
        self.cache.note_beat(beat.load.used + beat.demand, beat.taken)

    def let_go(self, flight: Flight) -> None:
        """Forget the answer ``flight``, because the engine has ended the answer, or the answer goes on at another
        engine.
        """
        if self.flights.pop(flight.number, None) is not None:
            self.cache.free(-(-flight.length // self.about.block))

    def remember(self, request: AnswerRequest, written: Sequence[int]) -> None:
        """Note that the engine will hold the cache blocks of the prompt of ``request`` and of the tokens ``written``
        after it.
        """
        self.cache.remember(self._keys(request, [*request.ids, *written]))

    def _keys(self, request: AnswerRequest, ids: Sequence[int]) -> Iterable[bytes]:
        root = root_key(0, request.adapter, request.tenant)
        return chained_keys(root, ids, self.about.block)
