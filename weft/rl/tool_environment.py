"""Environment in which an agent calls tools, which are functions, and then gives an answer, which is rewarded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.data.chat.trajectory import ToolUse
from weft.rl.environment import Environment, EnvironmentStep, ReadAction
from weft.serve.call_finder import CallFinder
from weft.serve.call_form import CallForm, ObjectCalls

if TYPE_CHECKING:
    from weft.data.chat.encode import Messages
    from weft.rl.rollout import RewardQuestion

#: The form of calls where no chat template says another one.
TAGGED_CALLS = ObjectCalls(
    before='<tool_call>\n{"name": "weft_example", "arguments": ',
    behind="}\n</tool_call>",
    opening="<tool_call>",
    closing="</tool_call>",
    name="name",
    arguments="arguments",
)
#: Characters of an action that are read, and of a result that the agent sees.
LONGEST, SHOWN = 20_000, 2_000


@dataclass(frozen=True)
class AgentTool:
    """A tool that an agent can call.

    ``schema``: the tool as chat templates show it to the model. ``work``: function that is called with the arguments as
    keywords, and returns a text. If it raises an exception, the agent gets the error as a line.
    """

    schema: dict[str, Any]
    work: Callable[..., str]

    @property
    def name(self) -> str:
        """Name by which the agent calls the tool, from its schema."""
        name: str = self.schema["function"]["name"]
        return name


class ToolEnvironment(Environment):
    """Lets an agent call tools, turn by turn. A text without calls is the answer, which ends the task.

    ``agent_tools``: the tools. ``judge``: function that gives the reward of an answer to a question. ``form``: how the
    agent writes calls (:func:`weft.serve.call_form.call_form` derives this from a chat template). ``most``: largest
    number of calls in one turn; further ones are not made, and the agent is told so.
    """

    def __init__(
        self,
        agent_tools: Sequence[AgentTool],
        judge: Callable[[RewardQuestion, str], float],
        form: CallForm = TAGGED_CALLS,
        most: int = 4,
    ) -> None:
        self._tools = {tool.name: tool for tool in agent_tools}
        self.tools = [tool.schema for tool in agent_tools]
        self._judge, self._form, self._most = judge, form, most
        self._question: RewardQuestion | None = None
        self._calls = 0  # in all turns so far

    def reset(self, question: RewardQuestion) -> Messages:
        self._question, self._calls = question, 0
        return super().reset(question)

    def read(self, action: str) -> ReadAction:
        finder = CallFinder(self._form)
        try:
            text, _ = finder.add(action[:LONGEST])
            rest = finder.end("stop").text
            calls = [(call.name, _arguments(call.arguments)) for call in finder.calls]
        except RecursionError:  # of brackets without end
            return ReadAction(action, ())
        numbered = tuple(
            ToolUse(f"call_{self._calls + n}", name, arguments)
            for n, (name, arguments) in enumerate(calls, 1)
        )
        return ReadAction(f"{text}{rest}".strip() if calls else action, numbered)

    def step(self, action: str) -> EnvironmentStep:
        assert self._question is not None
        calls = self.read(action).calls
        if not calls:
            return EnvironmentStep([], self._judge(self._question, action), True)
        self._calls += len(calls)
        observation = [
            {
                "role": "tool",
                "tool_call_id": call.id,
                "name": call.name,
                "content": self._result(call, number),
            }
            for number, call in enumerate(calls)
        ]
        return EnvironmentStep(observation, 0.0, False)

    def _result(self, call: ToolUse, number: int) -> str:
        if number >= self._most:
            return f"error: only {self._most} calls are made in one turn"
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: no tool is called {call.name[:40]!r}; there is {', '.join(self._tools)}"
        try:
            return str(tool.work(**call.arguments))[:SHOWN]
        except Exception as error:
            line = (str(error).splitlines() or [""])[0]
            return f"error: {type(error).__name__}: {line}"[:SHOWN]


def _arguments(text: str) -> Mapping[str, Any]:
    """Return the arguments of a call; empty for JSON that is no object, which the tool then refuses."""
    given = json.loads(text)
    return given if isinstance(given, dict) else {}
