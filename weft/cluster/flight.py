"""What a router keeps of each answer, so that any engine can continue it from the tokens that were passed on."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weft.cluster.cluster_messages import LogProbability, Message
from weft.errors import WeftError
from weft.generate.backend import AnswerRequest
from weft.generate.sampling import GREEDY
from weft.net.wire import Frame

#: How much a lost engine speaks against the requests that it had: one whose computation has failed, and one of which
#: nobody knows more than that it is gone.
FAILED, GONE = 2, 1

#: Sums of these from which on a request is suspected of making engines crash, from which on it is the only suspect of
#: its engine, and at which it is then given up. A request that ends every engine must not end all; faults of links and
#: hosts that hit the same request by chance must not end it.
SUSPECT, ACCUSED, GUILTY = 2, 4, 5

#: Suspects that an engine has at a time. With fewer, the many requests of engines that were lost together would wait
#: for one another; with more, those that are innocent would soon be accused.
SUSPECTS = 8


class EngineLoss(NamedTuple):
    """The loss of an engine. ``instance``: random text that names the engine. ``blame``: :data:`FAILED` if its
    computation is known to have failed, :data:`GONE` if it is only known to be gone.
    """

    instance: str
    blame: int


def blame_of(losses: Sequence[EngineLoss]) -> int:
    """Return how likely a request is the cause of the ``losses`` of engines that had it: the sum of
    :attr:`EngineLoss.blame`. The larger the number, the more likely.
    """
    return sum(loss.blame for loss in losses)


def acquit(losses: list[EngineLoss], instance: str) -> None:
    """Remove from ``losses`` the last loss of the connection to the engine ``instance``. The engine was only cut off or
    stopped, so that no request is to blame.
    """
    for place in reversed(range(len(losses))):
        if losses[place] == (instance, GONE):
            del losses[place]
            break


def fail_future(future: "Future[Any]", error: WeftError) -> None:
    """Let ``future`` end with ``error``, unless it has a result, or whoever waits for it has gone."""
    with suppress(InvalidStateError):
        future.set_exception(error)


@dataclass(eq=False)
class Flight:
    """One answer that some engine writes, or that waits for an engine.

    Attributes:
        ``number``: the answer's number, by which router and engine call it.
        ``request``: what was asked for, with the seed of this answer.
        ``index``: the answer's index among those that were asked for together.
        ``session``: name of the conversation or user that the answer belongs to.
        ``key``: key by which an engine keeps the answer when the router is gone; "": it does not.
        ``tokens``: tokens that were passed on to the client.
        ``hits``: tokens of the prompt that were in the cache of the engine that began the answer.
        ``prompt_scores``: log-probabilities of the prompt's tokens, if they were asked for.
        ``log_probabilities``: log-probabilities of ``tokens``, if they were asked for.
        ``engine``: name of the engine that writes the answer; empty if it waits for an engine.
        ``weights``: version of the oldest weights that may write the answer's next tokens.
        ``versions``: pairs of the index of a token and the version of the weights that have written the tokens from
            there on.
        ``losses``: the engines that were lost while they had the answer, since the answer's last token. An engine
            that was only cut off, and joins again, is removed from the list.
        ``alone``: whether the answer was already :attr:`accused` of making engines crash when its engine got it. As the
            engine has no other suspect then, a crash is blamed on this answer.
        ``since``: when the answer began to wait for an engine, on the monotonic clock.
        ``target``: name of the engine to which the answer is moving, or empty.
        ``target_number``: the answer's number at that engine.
        ``rest_until``: time on the monotonic clock before which the answer does not move.
        ``accepted``: future that is completed when an engine has accepted the answer, or with the error why none does.
        ``error``: why the answer cannot go on; None: it can.
        ``finished``: why the answer has ended, or empty.
    """

    number: int
    request: AnswerRequest
    index: int
    session: str
    key: str = ""
    tokens: list[int] = field(default_factory=list)
    hits: int = 0
    prompt_scores: list[LogProbability] = field(default_factory=list)
    log_probabilities: list[LogProbability] = field(default_factory=list)
    engine: str = ""
    weights: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)
    losses: list[EngineLoss] = field(default_factory=list)
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
        """Priority of the request. When engines are lost, answers with a smaller number are continued first."""
        return self.request.priority

    @property
    def suspected(self) -> bool:
        """Whether the answer may be what makes engines crash, because several engines in a row were lost with it."""
        return blame_of(self.losses) >= SUSPECT

    @property
    def accused(self) -> bool:
        """Whether the answer is very likely the cause of engines' crashes, because many engines in a row were lost with
        it.
        """
        return blame_of(self.losses) >= ACCUSED

    @property
    def unproved(self) -> bool:
        """Whether another answer may have caused the crash of the last engine, because that engine had other suspected
        answers too. This answer is then tried once more.
        """
        return not self.alone

    def note_accepted(self) -> None:
        """Tell whoever waits for it that an engine has accepted the answer."""
        # who waits in the event loop may cancel it at any moment
        with suppress(InvalidStateError):
            self.accepted.set_result(None)

    @property
    def length(self) -> int:
        """Number of tokens of the prompt and of the answer so far together."""
        return len(self.request.ids) + len(self.tokens)

    @property
    def score(self) -> float:
        """Mean log-probability of the written tokens."""
        chosen = [said[0] for said in self.log_probabilities]
        return sum(chosen) / max(1, len(chosen))

    def continued(self) -> AnswerRequest:
        """Return a request for the rest of the answer, with which another engine continues after the tokens that the
        client has received.
        """
        scored = self.request.scored and not self.tokens
        return self.request._replace(written=list(self.tokens), scored=scored)


@dataclass(eq=False)
class RemoteCall:
    """A beam search or an embedding that some engine computes, or that waits for an engine.

    Attributes:
        ``number``: number by which router and engine call it.
        ``message``: function that builds the message to send, for this number.
        ``result``: future of the engine's reply.
        ``engine``: name of the engine that computes it; empty if it waits for an engine.
        ``losses``: engines that were lost while they computed it, as those of a :class:`Flight`.
        ``since``: when it began to wait for an engine, on the monotonic clock.
        ``priority``: when several calls wait, those with a smaller number get an engine first.
        ``unproved``: always False, so that the call fails after too many losses. For a :class:`Flight` it may be True;
            the answer is then tried once more.
    """

    number: int
    message: Callable[[int], Message]
    result: "Future[Frame]" = field(default_factory=Future)
    engine: str = ""
    losses: list[EngineLoss] = field(default_factory=list)
    since: float = 0.0
    priority: int = 0
    unproved: bool = False


def asked_nothing() -> AnswerRequest:
    """Return a request without tokens, which stands for any request when engines are compared."""
    return AnswerRequest((), 0, GREEDY, (), 0, None, "", None)
