"""Interface between HTTP and whoever generates the tokens: an engine in this process, or a router over many engines."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch

from weft.errors import UsageError, WeftError
from weft.generate.grammar import Grammar
from weft.generate.request import TOO_COMPLEX
from weft.generate.sampling import Sampling
from weft.generate.workflow import Workflow


class AnswerRequest(NamedTuple):
    """A prompt, and settings of the answers to generate after it. The fields are the arguments of :meth:`Engine.submit`
    in their order.

    Attributes:
        ``ids``: token ids of the prompt.
        ``most``: largest number of tokens of an answer.
        ``how``: settings of sampling.
        ``stops``: token ids that end an answer.
        ``answers``: number of answers, whose seeds are consecutive.
        ``top``: for how many of the likeliest tokens log-probabilities are kept, beside that of the written token; 0:
            only that of the written token; None: no log-probabilities.
        ``tenant``: whose cached prefixes the answers may use.
        ``grammar``: grammar that constrains the answers; None: no constraint.
        ``adapter``: name of an adapter; "": the model alone.
        ``least``: number of tokens that are written before a stop counts.
        ``scored``: whether log-probabilities of the prompt's tokens are kept, too.
        ``written``: the answer's first tokens, if another engine has written them already.
        ``workflow``: the workflow of which the answers are a stage; None: of none.
        ``priority``: answers with a smaller number begin first and lose their cache blocks last.
    """

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
    written: Sequence[int] = ()
    workflow: Workflow | None = None
    priority: int = 0


class SearchRequest(NamedTuple):
    """A request for a beam search.

    Attributes:
        ``ids``: token ids of the prompt.
        ``most``: largest number of tokens of a text.
        ``width``: number of beams.
        ``stops``: token ids that end a text.
        ``penalty``: exponent of the length penalty; a larger one favours longer texts.
        ``tenant``: whose cached prefixes the search may use.
        ``prune``: how far a log-probability may be below the best one before its text is dropped; 0: no limit.
    """

    ids: Sequence[int]
    most: int
    width: int
    stops: Sequence[int]
    penalty: float
    tenant: str = ""
    prune: float = 0.0


class Hypothesis(NamedTuple):
    """A finished text of a beam search, without its stop token.

    ``ids``: token ids after the prompt. ``log_probability``: log-probability of all its tokens together, the stop token
    included. ``score``: the log-probability, normalised by length. ``finish``: "stop" if a stop token ended it, else
    "length".
    """

    ids: list[int]  # behind the prompt
    log_probability: float  # of all its tokens, with the one that ended it
    score: float  # the log-probability, normalised by length
    finish: str  # "stop" at one of the ids that end texts, else "length"


class TokenEvent(NamedTuple):
    """Result of an engine step for one answer.

    Attributes:
        ``number``: index of the answer among those that were asked for together.
        ``token``: id of the next token; None if the answer ended without a further token.
        ``log_probability``: pair of the log-probability of ``token``, and the log-probabilities of the likeliest tokens
            by their ids; None if they were not asked for.
        ``finished``: why the answer ended: "stop" or "length", or "error" or "ended" if it could not go on; "" if it
            goes on.
    """

    number: int  # which of the answers that were asked for together
    token: int | None
    log_probability: tuple[float, dict[int, float]] | None
    finished: str  # "stop", "length", "" if it goes on; "error" or "ended" if it cannot


def failed_text(why: str) -> WeftError:
    """Return the error with which an answer ends that cannot go on. ``why``: its line, as in
    :attr:`weft.generate.request.Generation.failure`.
    """
    return UsageError(why) if why.startswith(TOO_COMPLEX) else WeftError(why)


class Busy(WeftError):
    """Raised when a request would exceed the number of answers that the server computes at the same time."""


class ServerEnding(WeftError):
    """Raised for an answer that is cut off because the server shuts down."""


class NoEngine(WeftError):
    """Raised for a request while no engine of the service can answer."""


@dataclass(frozen=True)
class BackendFacts:
    """What a server must know of the model and of its engines to refuse impossible requests before they start.

    ``vocab``: number of token ids of the model. ``embed``: elements of an embedding. ``cache``: tokens that the cache
    of an engine holds. ``searches``: whether beam searches are possible. ``scores``: whether the model is a reward
    model, which scores texts and writes none.
    """

    vocab: int
    embed: int
    cache: int
    searches: bool
    scores: bool = False


class EngineLoad(NamedTuple):
    """Queues and cache of an engine at one moment.

    Attributes:
        ``running``: requests that are being computed.
        ``waiting``: requests that wait to begin.
        ``preemptions``: how often requests have lost their cache blocks so far.
        ``used``: cache blocks that requests own, without those of requests that are still moving in.
        ``blocks``: all cache blocks of the engine.
        ``tokens``: tokens written so far.
        ``draining``: 1 if the engine takes no new requests, else 0.
        ``borrowed``: cache blocks of other engines that hold tokens of this engine's requests.
        ``lent``: cache blocks of this engine that hold tokens of other engines' requests.
        ``role``: 0 if the engine does all kinds of work; 1 if it only computes prompts; 2 if it only goes on with
            answers that other engines have begun; 3 if it only keeps cache blocks for the other engines.
        ``looked``: number of blocks that requests did not find in the engine's cache when they began.
        ``sources``: for each place outside the cache that keeps cache blocks, such as host memory, how many blocks and
            bytes it has given and taken: values of :class:`weft.generate.block_source.SourceUsage`.
    """

    running: int
    waiting: int
    preemptions: int
    used: int
    blocks: int
    tokens: int = 0
    draining: int = 0
    borrowed: int = 0
    lent: int = 0
    role: int = 0
    looked: int = 0
    sources: Sequence[Sequence[Any]] = ()


#: Names of what a backend may count, with what is said of each.
COUNTS = {
    "answers_continued": "Answers that another engine has gone on with from the tokens passed on.",
    "answers_moved": "Answers that have moved to another engine with their cache blocks.",
    "roles_chosen": "Times that the engines' roles were chosen anew, as the load has drifted.",
    "moved_bytes": "Bytes of cache blocks that moved with them.",
    "moved_stall_milliseconds": "Milliseconds in which answers that moved were at no engine.",
}


class AnswerState(Protocol):
    """What is known about one answer beside its tokens. ``hits``: number of the prompt's tokens whose keys and values
    were in the cache already. ``prompt_scores``: a list with one pair for each token of the prompt from the second
    one on. A pair is the token's log-probability, and the log-probabilities of the likeliest tokens at its place by
    their ids. The list is complete when the answer's first event comes.
    """

    #: Tokens of the prompt that were in the cache already.
    hits: int
    #: Log-probabilities of the prompt's tokens from the second one on, complete with the first event.
    prompt_scores: list[tuple[float, dict[int, float]]]

    @property
    def score(self) -> float:
        """Mean log-probability of the answer's generated tokens, by which several answers to a prompt are compared."""


class AnswerEvents(Protocol):
    """The answers to requests that were submitted together, and the events of their tokens."""

    @property
    def generations(self) -> Sequence[AnswerState]:
        """One state for each answer, in the order of the requests."""

    async def next(self) -> TokenEvent:
        """Wait for the next event of any answer and return it. Raises :class:`ServerEnding`, and :class:`WeftError` for
        answers that cannot go on.
        """

    async def cancel(self, index: int) -> None:
        """Stop generating the answer number ``index``, as its text has ended already, for example at a stop string."""


class Backend(Protocol):
    """Generates tokens for the requests of clients. All coroutines run in the event loop of the HTTP server."""

    @property
    def most(self) -> int:
        """Largest number of answers that are computed at the same time."""

    @property
    def facts(self) -> BackendFacts:
        """Properties of the model and its engines at this moment, such as the size of the cache, by which the server
        checks a request before it starts.
        """

    @property
    def failure(self) -> Exception | None:
        """The error because of which no request can be answered any more; None while requests can be answered."""

    def answers(
        self, requests: Sequence[AnswerRequest], session: str = "", key: str = ""
    ) -> AbstractAsyncContextManager[AnswerEvents]:
        """Return a context in which ``requests`` are answered; at its end unfinished answers are cancelled.
        ``session``: name of a conversation or user, by which an engine that knows its earlier requests can be
        chosen; "": none. ``key``: text that a client has chosen for ``requests``; "": none. A client whose router
        was lost sends the same requests with the same key again. It then gets the answers of the engine that has
        gone on with them.

        Raises :class:`Busy`, :class:`ServerEnding`, and the errors of :meth:`Engine.submit` for any of the requests.
        """

    async def search(self, request: SearchRequest) -> list[Hypothesis]:
        """Run a beam search and return its best texts. The search ends when the caller is cancelled."""

    async def embed(
        self, ids: Sequence[int], pooling: Literal["mean", "last"], size: int | None
    ) -> torch.Tensor:
        """Return the embedding of the text ``ids``, float32 of L2 norm 1.

        ``pooling``: whether it is the mean of the tokens' final hidden states, or the last token's hidden state.
        ``size``: number of leading elements that are kept; None: all.
        """

    async def score(self, ids: Sequence[int]) -> float:
        """Return the score that a reward model gives the text ``ids``."""

    def loads(self) -> Mapping[str, EngineLoad]:
        """Return the load of every engine by its name. A single engine of this process has the empty name."""

    def counts(self) -> Mapping[str, int]:
        """Return numbers of events since the start, such as how many answers have moved to another engine. Their names
        are the keys of :data:`COUNTS`, which describes them.
        """

    def cut_answers(self) -> int:
        """End all unfinished answers at once: whoever waits for one gets :class:`ServerEnding`. Return the number of
        these answers. Called when the server shuts down.
        """

    def close(self) -> None:
        """End the work; blocks until the threads of the backend have ended."""
