"""Interface of environments: what an agent asks of the world, turn by turn, until its task is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.data.chat.trajectory import ToolUse

if TYPE_CHECKING:
    from weft.data.chat.encode import Messages
    from weft.rl.rollout import RewardQuestion


class EnvironmentStep(NamedTuple):
    """Result of an action in an environment.

    ``observation``: messages that the agent sees next, such as results of tools; ``reward``: reward of the action;
    ``done``: whether the task is over.
    """

    observation: Messages
    reward: float
    done: bool


class ReadAction(NamedTuple):
    """An agent's text after parsing: its ``message``, and the ``calls`` of tools in it."""

    message: str
    calls: tuple[ToolUse, ...]


class Environment:
    """Base class of environments, which answer an agent's actions. Each trajectory has a new environment of its own.

    ``tools``: JSON schemas of the tools that the agent may call.
    """

    tools: Sequence[dict[str, Any]] = ()

    def reset(self, question: RewardQuestion) -> Messages:
        """Begin with a question, and return the messages that the agent sees first."""
        prompt = question.prompt
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        return [*prompt]

    def read(self, action: str) -> ReadAction:
        """Parse the text ``action`` into a message and tool calls, without acting.

        :meth:`step` parses it in the same way.
        """
        return ReadAction(action, ())

    def step(self, action: str) -> EnvironmentStep:
        """Carry out the action in the text ``action``, and return its result. The text is never executed as code."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the environment's resources, such as processes."""
