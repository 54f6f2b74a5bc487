"""Trajectories as records of ATIF 1.7 and of the Agent Data Protocol, and back.

ATIF (Agent Trajectory Interchange Format) holds all that a :class:`Trajectory` has. The Agent Data Protocol has no
place for token ids and log-probabilities, and keeps everything else. Both directions are exact otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, NonNegativeInt, PositiveInt, ValidationError

from weft.data.chat.agents import from_adp, from_atif
from weft.data.chat.chat_turns import ConversationError
from weft.data.chat.fields import Fields
from weft.data.chat.trajectory import Observed, ToolUse, Trajectory, Turn, TurnTokens
from weft.version import VERSION

#: Versions of both formats that are written.
ATIF, ADP = "ATIF-v1.7", "1.2.0"
#: The key under which facts of Weft's own stand in the free fields of a record.
OWN = "weft"

Record = dict[str, Any]
M = TypeVar("M", bound=BaseModel)


class _TokenFacts(BaseModel):
    """What Weft knows of a turn's tokens beside ATIF's own fields."""

    finished: str = "stop"
    versions: list[tuple[int, int]] = [(0, 0)]


class _Metrics(BaseModel):
    """Tokens of a step of ATIF."""

    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    extra: _TokenFacts | None = None


class _StepExtra(BaseModel):
    reward: float | None = None


class _StepFacts(BaseModel):
    """What a step of ATIF says beside its words."""

    metrics: _Metrics | None = None
    extra: _StepExtra | None = None


class _OwnDetails(BaseModel):
    """What Weft writes into the details of a record of the Agent Data Protocol."""

    turns: list[PositiveInt] | None = None
    unanswered: dict[NonNegativeInt, str | None] = {}
    tools: list[dict[str, Any]] | None = None


def _checked(kind: type[M], values: Any, place: str) -> M:
    """Validate ``values``; raise :class:`ConversationError`, which names the ``place``, if they are wrong."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConversationError(f"{place}: {where}: {first['msg']}") from None


def atif_record(trajectory: Trajectory) -> Record:
    """Convert a trajectory to a record of ATIF 1.7 (Agent Trajectory Interchange Format), as JSON values."""
    agent: Record = {"name": "weft", "version": VERSION}
    if trajectory.tools is not None:
        agent["tool_definitions"] = [dict(tool) for tool in trajectory.tools]
    steps = [_atif_step(n, turn) for n, turn in enumerate(trajectory.turns, 1)]
    record: Record = {
        "schema_version": ATIF,
        "trajectory_id": trajectory.name,
        "agent": agent,
        "steps": steps,
    }
    return record | ({"extra": dict(trajectory.facts)} if trajectory.facts else {})


def _atif_step(number: int, turn: Turn) -> Record:
    step: Record = {"step_id": number, "source": turn.source, "message": turn.message}
    if turn.reasoning is not None:
        step["reasoning_content"] = turn.reasoning
    if turn.calls:
        step["tool_calls"] = [
            {
                # ATIF wants an id of every call
                "tool_call_id": f"call_{number}_{i}" if call.id is None else call.id,
                "function_name": call.name,
                "arguments": dict(call.arguments),
            }
            | ({"extra": {OWN: {"id": None}}} if call.id is None else {})
            for i, call in enumerate(turn.calls)
        ]
    if turn.observations:
        results = [
            {"content": seen.content}
            | ({} if seen.id is None else {"source_call_id": seen.id})
            for seen in turn.observations
        ]
        step["observation"] = {"results": results}
    if turn.tokens is not None:
        tokens = turn.tokens
        step["metrics"] = {
            "prompt_tokens": len(tokens.prompt),
            "completion_tokens": len(tokens.ids),
            "prompt_token_ids": [*tokens.prompt],
            "completion_token_ids": [*tokens.ids],
            "logprobs": [*tokens.log_probabilities],
            "extra": {
                "finished": tokens.finished,
                "versions": [[*span] for span in tokens.versions],
            },
        }
    if turn.reward is not None:
        step["extra"] = {"reward": turn.reward}
    return step


def atif_trajectory(record: Mapping[str, Any]) -> Trajectory:
    """Convert a record of ATIF 1.x (Agent Trajectory Interchange Format) to a trajectory.

    Raises :class:`ConversationError`, which names the step, in three cases: the record is malformed, a step has the
    result of a call that it does not make, or its numbers of tokens and log-probabilities differ.
    """
    from_atif(Fields(record))  # checks it
    turns = tuple(
        _atif_turn(number, step) for number, step in enumerate(record["steps"], 1)
    )
    tools = (record.get("agent") or {}).get("tool_definitions")
    name = record.get("trajectory_id") or record.get("session_id") or ""
    facts = record.get("extra") or {}
    return Trajectory(name, turns, None if tools is None else tuple(tools), facts)


def _atif_turn(number: int, step: Mapping[str, Any]) -> Turn:
    calls = tuple(
        ToolUse(
            None if _is_own(call) else call["tool_call_id"],
            call["function_name"],
            call.get("arguments") or {},
        )
        for call in step.get("tool_calls") or ()
    )
    seen = tuple(
        Observed(_text(result.get("content")), result.get("source_call_id"))
        for result in (step.get("observation") or {}).get("results") or ()
    )
    facts = _checked(_StepFacts, step, f"step {number}")
    metrics, tokens = facts.metrics or _Metrics(), None
    if metrics.completion_token_ids is not None:
        ids, chances = metrics.completion_token_ids, metrics.logprobs or []
        if len(chances) != len(ids):
            raise ConversationError(
                f"step {number} has {len(ids)} completion_token_ids, and {len(chances)} logprobs"
            )
        extra = metrics.extra or _TokenFacts()
        tokens = TurnTokens(
            tuple(metrics.prompt_token_ids or ()),
            tuple(ids),
            tuple(chances),
            tuple(extra.versions),
            extra.finished,
        )
    return Turn(
        step["source"],
        _text(step.get("message")),
        step.get("reasoning_content"),
        calls,
        seen,
        None if facts.extra is None else facts.extra.reward,
        tokens,
    )


def _is_own(call: Mapping[str, Any]) -> bool:
    """Whether the id of a call stands for a call without one."""
    return OWN in (call.get("extra") or {})


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part.get("text") or "" for part in content)
    return content or ""


def adp_record(trajectory: Trajectory) -> Record:
    """Convert a trajectory to a record of the Agent Data Protocol, as JSON values, without its token ids.

    An agent's text becomes a message action, and each call an API action. Values for which the protocol has no field
    are written in ``details`` under the key "weft".
    """
    content: list[Record] = []
    lengths = list[int]()
    for turn in trajectory.turns:
        items = _adp_items(turn)
        content += items
        lengths.append(len(items))
    own: Record = {"turns": lengths}
    asked = {seen.id for turn in trajectory.turns for seen in turn.observations}
    for index, item in enumerate(content):
        if item["class_"] != "api_action" or item.get("tool_call_id") in asked - {None}:
            continue
        if index < len(content) - 1 and not _is_action(content[index + 1]):
            raise ConversationError(
                f"content[{index}] calls {item['function']!r} with the tool_call_id {item.get('tool_call_id')!r}, "
                "which nothing answers; the Agent Data Protocol wants each call answered once"
            )
        # the protocol takes ids of answered calls alone
        own.setdefault("unanswered", {})[str(index)] = item.pop("tool_call_id", None)
    if trajectory.tools is not None:
        own["tools"] = [dict(tool) for tool in trajectory.tools]
    return {
        "schema_version": ADP,
        "id": trajectory.name,
        "content": content,
        "details": {**trajectory.facts, OWN: own},
    }


def _adp_items(turn: Turn) -> list[Record]:
    if turn.source != "agent":
        said: Record = {"class_": "text_observation", "content": turn.message}
        speaker: Record = {"source": "user"}
        if turn.source == "system":
            speaker = {"source": "environment", "name": "system"}
        items = [said | speaker]
    else:
        items = [
            {"class_": "api_action", "function": call.name, "kwargs": dict(call.arguments)}
            | ({} if call.id is None else {"tool_call_id": call.id})
            for call in turn.calls
        ]  # fmt: skip
        if turn.message or not items:
            items.insert(0, {"class_": "message_action", "content": turn.message})
        if turn.reasoning is not None:
            items[0]["reasoning_content"] = turn.reasoning
        if turn.reward is not None:
            items[-1]["reward"] = turn.reward
    items += [
        {"class_": "text_observation", "content": seen.content, "source": "environment"}
        | ({} if seen.id is None else {"tool_call_id": seen.id})
        for seen in turn.observations
    ]
    return items


def adp_trajectory(record: Mapping[str, Any]) -> Trajectory:
    """Convert a record of the Agent Data Protocol to a trajectory.

    Successive actions without a result between them become one turn. Records that Weft wrote say themselves where turns
    begin. Raises :class:`ConversationError`, which names the item by its index, for a malformed record, and for a
    ``tool_call_id`` that is not answered exactly once.
    """
    from_adp(Fields(record))  # checks it
    details = dict(record.get("details") or {})
    own = _checked(_OwnDetails, details.pop(OWN, {}), f"details.{OWN}")
    content = [dict(item) for item in record["content"]]
    lengths = own.turns or _lengths(content)
    if sum(lengths) != len(content) or any(i >= len(content) for i in own.unanswered):
        raise ConversationError(
            f"details.{OWN} is about another content than the {len(content)} items of this record"
        )
    for index, link in own.unanswered.items():
        content[index]["tool_call_id"] = link
    turns, at = [], 0
    for length in lengths:
        turns.append(_adp_turn(content[at : at + length]))
        at += length
    tools = None if own.tools is None else tuple(own.tools)
    return Trajectory(record["id"], tuple(turns), tools, details)


def _is_action(item: Mapping[str, Any]) -> bool:
    return str(item["class_"]).endswith("_action")


def _is_asking(item: Mapping[str, Any]) -> bool:
    """Whether an item is a turn of the user's or the system's."""
    said = item.get("source") in ("user", "system") or item.get("name") == "system"
    return not _is_action(item) and item.get("tool_call_id") is None and said


def _lengths(content: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the number of items of each turn in a record of another program."""
    lengths: list[int] = []
    for index, item in enumerate(content):
        begins = index == 0 or _is_asking(item)
        if _is_action(item) and not begins:
            begins = not _is_action(content[index - 1])
        if begins:
            lengths.append(0)
        lengths[-1] += 1
    return lengths


def _adp_turn(items: Sequence[Mapping[str, Any]]) -> Turn:
    actions = [item for item in items if _is_action(item)]
    first = items[0]
    if not actions:
        system = first.get("source") == "system" or first.get("name") == "system"
        source = "system" if system else "user"
        seen = tuple(map(_observed, items[1:]))
        return Turn(source, _words(first), observations=seen)
    said = [_words(item) for item in actions if _words(item)]
    thought = [t for item in actions if (t := item.get("reasoning_content")) is not None]  # fmt: skip
    rewards = [r for item in actions if (r := item.get("reward")) is not None]
    return Turn(
        "agent",
        "\n".join(said),
        "\n".join(thought) if thought else None,
        tuple(_call(item) for item in actions if item["class_"] != "message_action"),
        tuple(_observed(item) for item in items if not _is_action(item)),
        sum(rewards) if rewards else None,
    )


def _call(item: Mapping[str, Any]) -> ToolUse:
    link = item.get("tool_call_id")
    if item["class_"] == "code_action":
        return ToolUse(link, item["language"], {"code": item["content"]})
    return ToolUse(link, item["function"], item["kwargs"])


def _observed(item: Mapping[str, Any]) -> Observed:
    return Observed(_words(item), item.get("tool_call_id"))


def _words(item: Mapping[str, Any]) -> str:
    """Return the words of an item, without those of a call."""
    if item["class_"] == "web_observation":
        page = item.get("axtree") or item.get("html")
        return "\n".join(text for text in (item.get("url"), page) if text)
    spoken = item["content"] if item["class_"] in ("message_action", "text_observation") else None  # fmt: skip
    return "\n".join(text for text in (item.get("description"), spoken) if text)
