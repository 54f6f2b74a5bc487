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
    """A call of a tool by an agent. ``id``: name of the call, by which its result refers to it; None: none is known."""

    id: str | None
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Observed:
    """What an agent saw after a turn. ``id``: the call of a tool whose result this is; None: of no call."""

    content: str
    id: str | None = None


@dataclass(frozen=True)
class TurnTokens:
    """Tokens of a turn that a policy has written.

    Attributes:
        ``prompt``: all token ids before the turn.
        ``ids``: token ids of the turn.
        ``log_probabilities``: log-probability of each of these, when it was drawn.
        ``versions``: pairs of the index of a token in the turn, and the version of the weights that wrote it and what
            follows.
        ``finished``: why the turn ended: "stop" or "length".
    """

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    versions: tuple[tuple[int, int], ...] = ((0, 0),)
    finished: str = "stop"


@dataclass(frozen=True)
class Turn:
    """A turn of a trajectory.

    Attributes:
        ``source``: whose turn it is: "system", "user" or "agent".
        ``message``: its words.
        ``reasoning``: what the agent has thought before; None if it is not known.
        ``calls``: calls of tools by the agent.
        ``observations``: what the agent saw afterwards.
        ``reward``: the reward of the turn; None if there is none.
        ``tokens``: what a policy has written; None if it is not known.
    """

    source: str
    message: str = ""
    reasoning: str | None = None
    calls: tuple[ToolUse, ...] = ()
    observations: tuple[Observed, ...] = ()
    reward: float | None = None
    tokens: TurnTokens | None = None


class TokenSequence(NamedTuple):
    """Token ids of a trajectory as one text.

    ``learns``: for each token, whether the policy has written it. ``log_probabilities``: log-probability with which it
    was drawn; 0 for tokens that the policy has not written.
    """

    ids: list[int]
    learns: list[bool]
    log_probabilities: list[float]


@dataclass(frozen=True)
class Trajectory:
    """A trajectory of an agent.

    Attributes:
        ``name``: its name.
        ``turns``: its turns, in order.
        ``tools``: JSON schemas of the tools that the agent could call; None if they are not known.
        ``facts``: anything else that is known, as JSON values by name.
    """

    name: str
    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reward(self) -> float:
        """Sum of the rewards of all turns."""
        return sum(turn.reward or 0.0 for turn in self.turns)

    def without_tokens(self) -> Trajectory:
        """Return the trajectory without the token ids of its turns."""
        return replace(
            self, turns=tuple(replace(turn, tokens=None) for turn in self.turns)
        )

    def sequence(self) -> TokenSequence:
        """Return all tokens as one text, as the policy has read and written them.

        Raises :class:`WeftError`, which names the turn, if the tokens before a turn do not continue those of the turn
        before: then somebody has tokenized the text again.
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
