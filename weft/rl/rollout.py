"""Answers that a policy has written for training, and the interface of whoever generates them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from weft.data.chat.encode import Messages
    from weft.data.chat.trajectory import Trajectory
    from weft.data.sample_ledger import VersionSpan


@dataclass(frozen=True)
class RewardQuestion:
    """A question of a task whose answers get a reward.

    Attributes:
        ``prompt``: the question, as a text or as messages of a conversation.
        ``answer``: a right answer, for supervised training; "" if none is known.
        ``facts``: values that the task needs to score an answer, as JSON values by name.
    """

    prompt: str | Messages
    answer: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WrittenAnswer:
    """An answer that a policy has written.

    Attributes:
        ``ids``: token ids after the prompt, with the stop token if it was written.
        ``log_probabilities``: log-probability with which each token of ``ids`` was sampled.
        ``versions``: spans of tokens in order, each with the version of the weights that have written it.
        ``finished``: why the answer ended: "stop" or "length".
        ``learns``: for each token, whether the policy has written it, and not an environment between two turns; None:
            the policy has written all.
        ``reward``: sum of the rewards that an environment gave in the turns; None: the task still has to score the
            answer.
        ``failed``: error of an environment that failed, and therefore gave no reward; "" if none has failed.
        ``trajectory``: the turns of an answer in several turns, without their tokens; None: it has a single turn.
    """

    ids: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finished: str
    learns: tuple[bool, ...] | None = None
    reward: float | None = None
    failed: str = ""
    trajectory: Trajectory | None = None


@dataclass(frozen=True)
class GroupRequest:
    """A request for several answers to one question.

    Attributes:
        ``number``: index of the question in the run, from which the question and all seeds follow.
        ``question``: the question.
        ``prompt``: its token ids.
        ``answers``: how many answers to write.
        ``seed``: seed of the first answer; the others have consecutive seeds.
    """

    number: int
    question: RewardQuestion
    prompt: tuple[int, ...]
    answers: int
    seed: int


@dataclass(frozen=True)
class AnswerGroup:
    """All answers to one question, which are compared with each other.

    ``request``: the request for them. ``answers``: the answers, in the order of their seeds.
    """

    request: GroupRequest
    answers: tuple[WrittenAnswer, ...]


class SentWeights(NamedTuple):
    """Bytes of the policy's weights that a rank has sent so far, and bytes that it did not have to send.

    ``sent``: bytes that the rank has sent. ``spared``: bytes that were left out because they had not changed.
    """

    sent: int = 0
    spared: int = 0


class RolloutSource(Protocol):
    """Interface of sources of answers to learn from. Answers may be written on the ranks that train or elsewhere."""

    def request(self, groups: Sequence[GroupRequest]) -> None:
        """Ask for the answers of ``groups``, and return at once."""

    def finished(self, count: int) -> list[AnswerGroup]:
        """Wait for ``count`` groups whose answers are all written, and return them in the order of their numbers.

        Raises :class:`weft.errors.WeftError` if they cannot be written.
        """

    def take_weights(self, version: int) -> None:
        """Use the newest weights, which are version ``version``, for all tokens that are sampled from now on."""

    def sent_weights(self) -> SentWeights:
        """Return how many bytes of weights this rank has sent to other processes so far, and how many it could leave
        out.
        """

    def close(self) -> None:
        """End the writing of answers, and free engines, processes and connections."""
