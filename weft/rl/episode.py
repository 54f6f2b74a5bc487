"""Episodes: a policy and an environment in turns, whose tokens are kept as they were written.

What an environment says is tokenized once and put behind the tokens that the policy has written. No token before is
ever tokenized again, as a tokenizer writes other ids for the same text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from weft.data.chat.trajectory import Observed, Trajectory, Turn, TurnTokens
from weft.errors import UsageError, WeftError
from weft.rl.reward_numbers import NotAReward, reward_value
from weft.rl.rollout import GroupRequest
from weft.rl.time_limit import OutOfTime, call_within

if TYPE_CHECKING:
    from weft.data.chat.encode import ChatEncoder, Messages
    from weft.data.tokenizer import Tokenizer
    from weft.rl.environment import Environment, EnvironmentStep, ReadAction
    from weft.rl.rollout import RewardQuestion, RolloutSource, WrittenAnswer


class TurnEncoder(Protocol):
    """Interface of encoders from messages of a conversation to token ids."""

    def first(self, messages: Messages, tools: Messages) -> list[int]:
        """Return the token ids of the first messages, up to the beginning of the policy's turn.

        ``tools``: JSON schemas of the tools that the policy may call.
        """

    def following(self, messages: Messages, last: int) -> list[int]:
        """Return the token ids of ``messages`` after a turn of the policy, up to the beginning of its next turn.

        ``last``: the last token id of the policy's turn.
        """

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a turn of the policy with the token ids ``ids``."""


class PlainTurns:
    """Encodes messages as plain texts one after the other, for a model without a chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def first(self, messages: Messages, tools: Messages) -> list[int]:
        return self.tokenizer.prompt_ids(_texts(messages))

    def following(self, messages: Messages, last: int) -> list[int]:
        return [int(i) for i in self.tokenizer.encode(_texts(messages))]

    def text(self, ids: Sequence[int]) -> str:
        stops = self.tokenizer.stops
        return self.tokenizer.decode([i for i in ids if i not in stops])


def _texts(messages: Messages) -> str:
    return "".join(str(message.get("content") or "") for message in messages)


#: Words of the turns that stand before an observation while it is rendered; no template has them itself.
_ASKED, _ANSWERED = "weft asks", "weft answers"


class ChatTurns:
    """Encodes messages by a chat template. ``encoder``: the encoder of the model's template."""

    def __init__(self, encoder: ChatEncoder) -> None:
        self.encoder = encoder

    @property
    def tokenizer(self) -> Tokenizer:
        return self.encoder.template.tokenizer

    def first(self, messages: Messages, tools: Messages) -> list[int]:
        return [int(i) for i in self.encoder.prompt(messages, tools or None)]

    def following(self, messages: Messages, last: int) -> list[int]:
        """Return the token ids of ``messages`` after an assistant's turn, up to the beginning of its next turn.

        The template renders a placeholder conversation, and the part after the placeholder is used. The token that ends
        the turn is left out if it is ``last``, the last token that the policy has written.
        """
        before = [
            {"role": "user", "content": _ASKED},
            {"role": "assistant", "content": _ANSWERED},
        ]
        shown = self.encoder.template.render([*before, *messages], prompt=True)
        place = shown.text.rfind(_ANSWERED)
        if place < 0:
            raise WeftError(
                "the chat template does not write what the assistant has said; it cannot have several turns"
            )
        ids, starts, _ = self.encoder.tokens.encode(shown)
        behind = [
            int(i)
            for i, start in zip(ids, starts, strict=True)
            if start >= place + len(_ANSWERED)
        ]
        ended = last in self.tokenizer.stops and behind[:1] == [last]
        return behind[1:] if ended else behind

    def text(self, ids: Sequence[int]) -> str:
        return PlainTurns(self.tokenizer).text(ids)


class Episode:
    """A trajectory in progress: the policy continues :attr:`ids`, and :meth:`take` adds its turn.

    Arguments:
        ``environment``: environment of this episode alone.
        ``question``: the question that the episode begins with.
        ``encoder``: encodes the environment's messages.
        ``turns``: largest number of turns of the policy.
        ``room``: largest number of tokens of the whole text before a turn.
        ``name``: name of the trajectory.
        ``seed``: seed from which the seeds of all turns follow.
        ``seconds``: most seconds that the environment may take for a turn; 0: no limit.

    Raises :class:`UsageError` if the first turn begins after more tokens than ``room``, and :class:`WeftError` if the
    environment fails to begin, or takes more than ``seconds`` to.

    Attributes:
        ``ids``: all token ids so far.
        ``done``: whether the episode is over.
        ``why``: reason why the episode ended, if the environment did not end it itself; empty otherwise.
    """

    def __init__(
        self,
        environment: Environment,
        question: RewardQuestion,
        encoder: TurnEncoder,
        turns: int = 8,
        room: int = 1 << 30,
        name: str = "",
        seed: int = 0,
        seconds: float = 0.0,
    ) -> None:
        self.question, self.done, self.why = question, False, ""
        self._environment, self._encoder = environment, encoder
        self._most, self._room, self._name, self._seed = turns, room, name, seed
        self._seconds = seconds
        try:
            messages = checked_messages(
                call_within(seconds, lambda: environment.reset(question))
            )
        except OutOfTime:
            raise WeftError(
                f"{name}: its environment took longer than {seconds:g} s to begin; mend it, or raise tasks.seconds"
            ) from None
        except Exception as error:
            kind = type(environment).__name__
            raise WeftError(
                f"{name}: its environment {kind} {_failure(error)} when it was to begin; mend it"
            ) from error
        self.ids = [*encoder.first(messages, [*environment.tools])]
        self._turns = [
            Turn(_source(message), str(message.get("content") or ""))
            for message in messages
        ]
        self._written = 0
        if len(self.ids) > room:
            raise UsageError(
                f"{name}: its first turn begins behind {len(self.ids)} tokens, of at most {room}; raise "
                "data.seq_len or lower rl.tokens"
            )

    @property
    def seed(self) -> int:
        """Seed with which the policy's next turn is to be sampled."""
        return Random(f"turn {self._seed}/{self._written}").getrandbits(48)

    def take(self, answer: WrittenAnswer) -> None:
        """Add the policy's next turn, let the environment act on it, and append the environment's messages.

        An episode also ends in these cases: its turns or its room are used up, the turn was cut off, or the environment
        fails or takes longer than the limit; ``why`` then says so. The reward of a turn on which the environment failed
        is None.
        """
        text = self._encoder.text(answer.ids)
        spans = tuple((span.first, span.version) for span in answer.versions)
        tokens = TurnTokens(tuple(self.ids), answer.ids, answer.log_probabilities, spans, answer.finished)  # fmt: skip
        self.ids += answer.ids
        self._written += 1
        why = ""
        try:
            action, step = call_within(self._seconds, lambda: self._acted(text))
            said, calls = action
            observation, reward, done = step
            observation = checked_messages(observation)
            reward = reward_value(0.0 if reward is None else reward)
        except NotAReward as error:
            why = f"{error} as a reward"
        except OutOfTime:
            why = f"took longer than {self._seconds:g} s"
        except Exception as error:
            why = _failure(error)
        if why:
            self._end(f"its environment {why}")
            self._turns.append(Turn("agent", text, tokens=tokens))
            return
        seen = tuple(
            Observed(str(message.get("content") or ""), message.get("tool_call_id"))
            for message in observation
        )
        self._turns.append(
            Turn(
                "agent",
                said,
                calls=calls,
                observations=seen,
                reward=reward,
                tokens=tokens,
            )
        )
        self.done = done
        if done:
            return
        following = self._encoder.following(observation, self.ids[-1])
        if answer.finished == "length":
            self._end("its turn was cut off")
        elif self._written >= self._most:
            self._end(f"it has had its {self._most} turns")
        elif len(self.ids) + len(following) > self._room:
            self._end(f"the next turn begins behind {self._room} tokens")
        else:
            self.ids += following

    def close(self) -> None:
        """Close the environment. If that takes longer than the limit for a turn, the environment is abandoned."""
        with suppress(OutOfTime):
            call_within(self._seconds, self._environment.close)

    def _acted(self, text: str) -> tuple[ReadAction, EnvironmentStep]:
        return self._environment.read(text), self._environment.step(text)

    def _end(self, why: str) -> None:
        self.done, self.why = True, why

    @property
    def trajectory(self) -> Trajectory:
        """The turns so far as a trajectory, with their tokens and rewards."""
        tools = tuple(self._environment.tools) or None
        facts = {"answer": self.question.answer} if self.question.answer else {}
        if self.why:
            facts["ended"] = self.why
        return Trajectory(self._name, tuple(self._turns), tools, facts)


class NoMessages(TypeError):
    """Raised for an observation of an environment that is no list of messages; the text says what it is."""


def checked_messages(given: Any) -> Messages:
    """Return what an environment has said. Raises :class:`NoMessages` unless it is a list of messages with roles."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise NoMessages(
            f"returned {type(given).__name__}, which is no list of messages"
        )
    for message in given:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise NoMessages(
                f"returned a list with {message!r:.60}, which is no message with a role"
            )
    return [*given]


def _failure(error: Exception) -> str:
    """Return in words how an environment has failed."""
    line = (str(error).splitlines() or [""])[0]
    return line if isinstance(error, NoMessages) else f"raised {type(error).__name__}: {line}"  # fmt: skip


def _source(message: dict[str, object]) -> str:
    return "system" if message["role"] in ("system", "developer") else "user"


def write_episodes(episodes: Sequence[Episode], source: RolloutSource) -> list[Trajectory]:  # fmt: skip
    """Play all ``episodes`` to their end, and return the trajectories.

    The next turns of all unfinished episodes are generated as one batch. ``source``: generates the policy's turns.
    """
    while going := [episode for episode in episodes if not episode.done]:
        requests = [
            GroupRequest(number, episode.question, tuple(episode.ids), 1, episode.seed)
            for number, episode in enumerate(going)
        ]
        source.request(requests)
        for group in source.finished(len(requests)):
            going[group.request.number].take(group.answers[0])
    return [episode.trajectory for episode in episodes]
