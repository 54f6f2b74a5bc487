"""What a router keeps of each answer, so that any engine can continue it from the tokens that were passed on."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from weft.cluster.cluster_messages import LogProbability, Message
from weft.errors import WeftError
from weft.generate.backend import AnswerRequest
from weft.net.wire import Frame

#: Engines that a request may lose in a row without a further token. A request that ends every engine must not end all.
LOSSES = 3


@dataclass(eq=False)
class Flight:
    """One answer that some engine writes, or that waits for an engine.

    Attributes:
        ``number``: its number, by which router and engine call it.
        ``request``: what was asked for, with the seed of this answer.
        ``index``: the answer's index among those that were asked for together.
        ``session``: name of the conversation or user that it belongs to.
        ``tokens``: tokens that were passed on.
        ``hits``: tokens of the prompt that were in the cache of the engine that began it.
        ``prompt_scores``: log-probabilities of the prompt's tokens, if they were asked for.
        ``log_probabilities``: those of ``tokens``, if they were asked for.
        ``engine``: name of the engine that writes it, empty if it waits for an engine.
        ``losses``: engines lost since its last token.
        ``alone``: whether its engine has got it as the only suspected answer.
        ``since``: when it began to wait for an engine, on the monotonic clock.
        ``target``: name of the engine to which it is moving, or empty.
        ``target_number``: its number there.
        ``rest_until``: time on the monotonic clock before which it does not move.
        ``accepted``: completed when an engine has accepted it, or with the error why none does.
        ``error``: why it cannot go on.
        ``finished``: why it has ended, or empty.
    """

    number: int
    request: AnswerRequest
    index: int
    session: str
    tokens: list[int] = field(default_factory=list)
    hits: int = 0
    prompt_scores: list[LogProbability] = field(default_factory=list)
    log_probabilities: list[LogProbability] = field(default_factory=list)
    engine: str = ""
    losses: int = 0
    alone: bool = False
    since: float = 0.0
    target: str = ""
    target_number: int = -1
    rest_until: float = 0.0
    accepted: "Future[None]" = field(default_factory=Future)
    error: WeftError | None = None
    finished: str = ""

    @property
    def priority(self) -> int:
        """Priority of the request: when engines are lost, answers with a smaller one are continued first."""
        return self.request.priority

    @property
    def suspected(self) -> bool:
        """Whether it may be the answer that ends engines, so that no engine gets two of the kind at a time."""
        return self.losses >= LOSSES - 1

    @property
    def unproved(self) -> bool:
        """Whether its engine may as well have been lost for another suspected answer."""
        return not self.alone

    @property
    def length(self) -> int:
        """Number of tokens of the prompt and of the answer so far."""
        return len(self.request.ids) + len(self.tokens)

    @property
    def score(self) -> float:
        """Mean log-probability of the generated tokens."""
        chosen = [said[0] for said in self.log_probabilities]
        return sum(chosen) / max(1, len(chosen))

    def continued(self) -> AnswerRequest:
        """Return the request with which another engine continues the answer after the tokens that were passed on."""
        scored = self.request.scored and not self.tokens
        return self.request._replace(written=list(self.tokens), scored=scored)


@dataclass(eq=False)
class RemoteCall:
    """A beam search or an embedding that some engine computes, or that waits for an engine.

    Attributes:
        ``number``: number by which router and engine call it.
        ``message``: function that builds, for this number, the message to send.
        ``result``: future of the engine's reply.
        ``engine``: name of the engine that computes it, empty if it waits for an engine.
        ``losses``: engines that were lost while they computed it.
        ``since``: when it began to wait for an engine, on the monotonic clock.
        ``priority``: the smaller, the earlier another engine gets it.
    """

    number: int
    message: Callable[[int], Message]
    result: "Future[Frame]" = field(default_factory=Future)
    engine: str = ""
    losses: int = 0
    since: float = 0.0
    priority: int = 0
    unproved: bool = False
