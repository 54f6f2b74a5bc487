"""Convert trajectories of agents (Agent Data Protocol, ATIF) to conversations.

An action becomes a turn of the assistant, and its result a turn of the tool. Actions without a result between them are
one turn, as chat templates expect.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from weft.data.chat.chat_turns import ConversationError, Message
from weft.data.chat.fields import Fields

T = TypeVar("T", bound=BaseModel)


#: What validation errors call the kinds of a union.
_BRANCHES = (
    "str", "list[_Part]", "api_action", "code_action", "message_action", "text_observation", "image_observation",
    "web_observation",
)  # fmt: skip


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


# --- Agent Data Protocol (schema 1.x): https://github.com/neulab/agent-data-protocol ---


class _Action(_Strict):
    reasoning_content: str | None = None
    reward: float | None = None
    tool_call_id: str | None = None
    description: str | None = None

    def call(self) -> Message | None:
        """Return the call of a tool that this action is, if it is one."""
        return None

    def words(self) -> str:
        return self.description or ""


class _ApiAction(_Action):
    class_: Literal["api_action"]
    function: str
    kwargs: dict[str, Any]

    def call(self) -> Message:
        return {
            "id": self.tool_call_id,
            "function": {"name": self.function, "arguments": self.kwargs},
        }


class _CodeAction(_Action):
    class_: Literal["code_action"]
    language: str
    content: str

    def call(self) -> Message:
        """Running code is a call of the tool named after the language."""
        return {
            "id": self.tool_call_id,
            "function": {"name": self.language, "arguments": {"code": self.content}},
        }


class _MessageAction(_Action):
    class_: Literal["message_action"]
    content: str

    def words(self) -> str:
        return "\n".join(text for text in (self.description, self.content) if text)


class _Observation(_Strict):
    tool_call_id: str | None = None
    name: str | None = None
    source: str = "environment"

    def words(self) -> str:
        raise ConversationError(
            "it holds an image, and only text can be learned from; leave the trajectory out"
        )


class _TextObservation(_Observation):
    class_: Literal["text_observation"]
    content: str
    source: Literal["user", "agent", "environment", "system", "assistant"]

    def words(self) -> str:
        return self.content


class _ImageObservation(_Observation):
    class_: Literal["image_observation"]
    content: Any = None
    annotations: Any = None


class _WebObservation(_Observation):
    class_: Literal["web_observation"]
    html: str | None = None
    axtree: str | None = None
    url: str | None = None
    image_observation: Any = None
    viewport_size: tuple[int, int] | None = None

    def words(self) -> str:
        """Return the page as its accessibility tree, or else its HTML."""
        return "\n".join(text for text in (self.url, self.axtree or self.html) if text)


_Item = (
    _ApiAction
    | _CodeAction
    | _MessageAction
    | _TextObservation
    | _ImageObservation
    | _WebObservation
)


class _Trajectory(_Strict):
    id: str
    schema_version: str | None = None
    content: list[Annotated[_Item, Field(discriminator="class_")]]
    available_custom_tools: list[str] | None = None
    available_code_languages: list[str] | None = None
    details: dict[str, Any] = {}


def from_adp(fields: Fields) -> tuple[list[Message], list[str]]:
    """Convert a trajectory of the Agent Data Protocol, given as the fields of a record, to messages of a conversation.

    Returns the messages, and the names of the record's fields that are not used. Raises :class:`ConversationError` if
    the trajectory is malformed or a ``tool_call_id`` is not answered exactly once.
    """
    trajectory = _validated(_Trajectory, _taken(fields, _Trajectory))
    messages: list[Message] = []
    open_calls: dict[str, int] = {}
    seen: set[str] = set()
    for index, item in enumerate(trajectory.content):
        link = item.tool_call_id
        if isinstance(item, _Action):
            if link in seen:
                raise ConversationError(
                    f"content[{index}] has the tool_call_id {link!r} of an earlier action"
                )
            if link is not None:
                seen.add(link)
                open_calls[link] = index
            _add_action(
                messages,
                item.words(),
                item.reasoning_content,
                [c for c in [item.call()] if c],
            )
            continue
        if link is not None and open_calls.pop(link, None) is None:
            raise ConversationError(
                f"content[{index}] answers the tool_call_id {link!r}, which no action before it has"
            )
        messages.append(_observed(messages, item))
    if open_calls:
        link, index = next(iter(open_calls.items()))
        raise ConversationError(
            f"content[{index}] has the tool_call_id {link!r}, which nothing answers"
        )
    rewards = any(
        isinstance(item, _Action) and item.reward is not None
        for item in trajectory.content
    )
    return messages, [
        *(["details"] if trajectory.details else []),
        *(["content[].reward"] if rewards else []),
    ]


def _observed(messages: list[Message], item: _Observation) -> Message:
    if item.source == "system" or (
        item.source == "environment" and item.name == "system"
    ):
        return {"role": "system", "content": item.words()}
    # said before, or by another agent: there to be read
    if item.source in ("agent", "assistant"):
        return {"role": "assistant", "content": item.words(), "train": False}
    after_call = bool(messages) and (
        messages[-1]["role"] == "tool" or "tool_calls" in messages[-1]
    )
    if item.tool_call_id is None and (item.source == "user" or not after_call):
        return {"role": "user", "content": item.words()}
    return {
        "role": "tool",
        "content": item.words(),
        "tool_call_id": item.tool_call_id,
        "name": item.name,
    }


def _add_action(
    messages: list[Message], words: str, reasoning: str | None, calls: list[Message]
) -> None:
    """Add what the agent did to its turn, or begin one."""
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and "train" not in last:
        last["content"] = "\n".join(text for text in (last["content"], words) if text)
        if said := [
            text for text in (last.get("reasoning_content"), reasoning) if text
        ]:
            last["reasoning_content"] = "\n".join(said)
    else:
        last = {"role": "assistant", "content": words, "reasoning_content": reasoning}
        messages.append(last)
    if calls:
        last["tool_calls"] = last.get("tool_calls", []) + calls


# --- ATIF: https://github.com/laude-institute/harbor/blob/main/docs/rfcs/0001-trajectory-format.md ---


class _Part(BaseModel):
    type: str
    text: str | None = None


_Content = str | list[_Part]


class _ToolCall(BaseModel):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any] = {}


class _Result(BaseModel):
    source_call_id: str | None = None
    content: _Content | None = None


class _Results(BaseModel):
    results: list[_Result] = []


class _Step(BaseModel):
    step_id: int
    source: Literal["system", "user", "agent"]
    message: _Content = ""
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    observation: _Results | None = None
    is_copied_context: bool | None = None


#: What ATIF says of a step beside its words.
_ABOUT_STEPS = {
    "timestamp",
    "model_name",
    "metrics",
    "extra",
    "reasoning_effort",
    "llm_call_count",
}


class _Agent(BaseModel):
    tool_definitions: list[dict[str, Any]] | None = None


class _Atif(BaseModel):
    schema_version: str = Field(pattern=r"^ATIF-v1\.\d+$")
    agent: _Agent = _Agent()
    steps: list[_Step] = Field(min_length=1)


def from_atif(fields: Fields) -> tuple[list[Message], list[str]]:
    """Convert a trajectory of ATIF 1.x (Agent Trajectory Interchange Format), given as the fields of a record, to
    messages.

    Returns the messages, and the names of the fields of the trajectory's steps that are not used. Turns that were
    copied from another trajectory are not learned. Raises :class:`ConversationError` for a malformed trajectory.
    """
    given = _taken(fields, _Atif)
    trajectory = _validated(_Atif, given)
    messages: list[Message] = []
    for number, step in enumerate(trajectory.steps, 1):
        if step.step_id != number:
            raise ConversationError(
                f"step {number} has the step_id {step.step_id}; steps count from 1"
            )
        if step.source != "agent":
            messages.append({"role": step.source, "content": _text_of(step.message)})
        else:
            calls = [
                {
                    "id": call.tool_call_id,
                    "function": {
                        "name": call.function_name,
                        "arguments": call.arguments,
                    },
                }
                for call in step.tool_calls or ()
            ]
            learned = {"train": False} if step.is_copied_context else {}
            turn = {
                "role": "assistant",
                "content": _text_of(step.message),
                "reasoning_content": step.reasoning_content,
            }
            messages.append(turn | learned | ({"tool_calls": calls} if calls else {}))
        asked = {call.tool_call_id for call in step.tool_calls or ()}
        for result in step.observation.results if step.observation else ():
            link = result.source_call_id
            if link is not None and link not in asked:
                raise ConversationError(
                    f"step {number} has a result of the call {link!r}, which it does not make"
                )
            role = "tool" if asked else "user"
            messages.append(
                {
                    "role": role,
                    "content": _text_of(result.content),
                    "tool_call_id": link,
                }
            )
    if trajectory.agent.tool_definitions and fields.name("tools") is None:
        fields.record["tools"] = trajectory.agent.tool_definitions
    known = set(_Step.model_fields) | _ABOUT_STEPS
    return messages, sorted(
        {
            f"steps[].{key}"
            for step in given["steps"]
            for key in step.keys() - known
            if step[key]
        }
    )


def _text_of(content: _Content | None) -> str:
    if isinstance(content, list):
        if any(part.type != "text" for part in content):
            raise ConversationError(
                "it holds an image, and only text can be learned from; leave the trajectory out"
            )
        return "\n".join(part.text or "" for part in content)
    return content or ""


def _taken(fields: Fields, kind: type[BaseModel]) -> dict[str, Any]:
    """What a record has of the fields of ``kind``."""
    return {
        name: value
        for name in kind.model_fields
        if (value := fields.take(name)) is not None
    }


def _validated(kind: type[T], record: Mapping[str, Any]) -> T:
    try:
        return kind.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        # A union names the branch that it tried, which the data does not have.
        steps = [part for part in first["loc"] if part not in _BRANCHES]
        where = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in steps
        ).lstrip(".")
        raise ConversationError(f"{where}: {first['msg']}") from None
