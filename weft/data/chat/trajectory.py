"""Trajectory of an agent: what it was asked, what it did in each turn, and what its environment answered.

Token ids and log-probabilities of what a policy has written are kept, so that no text is tokenized again to learn from
it: tokenizers write other ids for the same text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from weft.errors import WeftError


@dataclass(frozen=True)
class ToolUse:
    """A call of a tool by an agent: name of the tool, and arguments of the call.

    ``id``: name of the call, by which its result refers to it; None if the trajectory gives no name.
    """

    id: str | None
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Observed:
    """Text that an agent got to see after a turn, such as the result of a tool.

    ``id``: name of the tool call whose result this is; None if it is not the result of a call.
    """

    content: str
    id: str | None = None


@dataclass(frozen=True)
class TurnTokens:
    """Tokens of a turn that a policy has written.

    Attributes:
        ``prompt``: all token ids before the turn.
        ``ids``: token ids of the turn.
        ``log_probabilities``: log-probability with which each token of ``ids`` was sampled.
        ``versions``: pairs ``(index, version)``. From token ``index`` of the turn on, up to the next pair, the tokens
            were sampled from this version of the weights.
        ``finished``: why the turn ended: "stop" or "length".
    """

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    versions: tuple[tuple[int, int], ...] = ((0, 0),)
    finished: str = "stop"


@dataclass(frozen=True)
class Turn:
    """One turn of an agent's trajectory: a message, or what the agent did and then observed.

    Attributes:
        ``source``: whose turn it is: "system", "user" or "agent".
        ``message``: the text of the turn.
        ``reasoning``: the agent's reasoning before the message; None if it is not recorded.
        ``calls``: calls of tools by the agent.
        ``observations``: what the agent observed afterwards, such as results of the calls.
        ``reward``: the reward of the turn; None if it has none.
        ``tokens``: token ids of the turn; None if no policy has written it, or they are not recorded.
    """

    source: str
    message: str = ""
    reasoning: str | None = None
    calls: tuple[ToolUse, ...] = ()
    observations: tuple[Observed, ...] = ()
    reward: float | None = None
    tokens: TurnTokens | None = None


class TokenSequence(NamedTuple):
    """All token ids of a trajectory, joined to one sequence (``ids``), and two more lists with an entry for each of
    these tokens.

    ``learns``: whether the policy has written the token. ``log_probabilities``: log-probability with which the token
    was sampled; 0 for tokens that the policy has not written.
    """

    ids: list[int]
    learns: list[bool]
    log_probabilities: list[float]


@dataclass(frozen=True)
class Trajectory:
    """What an agent did in one attempt at a task: its turns with calls of tools, their results, and rewards.

    Attributes:
        ``name``: name of the trajectory.
        ``turns``: the turns, in order.
        ``tools``: JSON schemas of the tools that the agent could call; None if they are not known.
        ``facts``: further JSON values of the record, by name.
    """

    name: str
    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reward(self) -> float:
        """Sum of the rewards of all turns; turns without a reward count 0."""
        return sum(turn.reward or 0.0 for turn in self.turns)

    def without_tokens(self) -> Trajectory:
        """Return the trajectory without the token ids of its turns."""
        return replace(
            self, turns=tuple(replace(turn, tokens=None) for turn in self.turns)
        )

    def sequence(self) -> TokenSequence:
        """Return the tokens of all turns, joined to one sequence, as the policy has read and written them.

        Turns without recorded tokens are left out. Raises :class:`WeftError`, which names the turn, if the tokens
        before a turn do not begin with all earlier tokens. The text was then tokenized a second time.
        """
        text = TokenSequence([], [], [])
        for number, turn in enumerate(self.turns, 1):
            if turn.tokens is None:
                continue
            tokens, known = turn.tokens, len(text.ids)
            if [*tokens.prompt[:known]] != text.ids:
                raise WeftError(
                    f"{self.name}: the tokens before turn {number} are not those of the turns before it; their text "
                    "was tokenized again"
                )
            observed = len(tokens.prompt) - known
            text.ids.extend((*tokens.prompt[known:], *tokens.ids))
            text.learns.extend([False] * observed + [True] * len(tokens.ids))
            text.log_probabilities.extend(
                (*[0.0] * observed, *tokens.log_probabilities)
            )
        return text
