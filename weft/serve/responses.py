"""``POST /v1/responses``: OpenAI's newer interface. A request is converted to a chat request; answers are lists of
items, streams are events.

Nothing is kept between requests: a client that continues a conversation sends all of it.
"""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from weft.serve.messages import content_text
from weft.serve.protocol import (
    ChatRequest,
    Refusal,
    Schema,
    merged_fields,
    object_in,
    rest_of,
    shown_json,
)
from weft.serve.replies import Answer, Usage, call_fields

#: What may be included in an answer, beside what would come from tools that are not here.
_LOGS = "message.output_text.logprobs"
INCLUDED = (
    _LOGS, "reasoning.encrypted_content", "message.input_image.image_url", "file_search_call.results",
    "web_search_call.results", "web_search_call.action.sources", "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
)  # fmt: skip


class ResponsesRequest(ChatRequest):
    """``POST /v1/responses`` of OpenAI's API, read as an equivalent chat request."""

    NAMES: ClassVar[dict[str, str]] = {
        "max_completion_tokens": "max_output_tokens", "response_format.json_schema": "text.format",
        "response_format": "text.format", "messages": "input", "reasoning_effort": "reasoning.effort",
    }  # fmt: skip

    n: Literal[1] = 1
    logprobs: Literal[False] = False
    instructions: str | None = None
    metadata: dict[str, str] = Field({})

    @classmethod
    def prepared(cls, given: Schema) -> Schema:
        return responses_as_chat(given)


def responses_as_chat(asked: Schema) -> Schema:
    """Convert the body ``asked`` of ``/v1/responses`` to the fields of an OpenAI chat request. Raises ValueError for a
    wrong value, with the field's name before a colon.
    """
    moved = (
        "input",
        "text",
        "reasoning",
        "include",
        "max_output_tokens",
        "tools",
        "top_logprobs",
    )
    rest = {key: value for key, value in asked.items() if key not in moved}
    text, tools = object_in(asked, "text"), asked.get("tools")
    chat: Schema = {
        "messages": messages_of_input(asked),
        "max_completion_tokens": asked.get("max_output_tokens"),
        "tools": list(map(nested, tools)) if isinstance(tools, list) else tools,
        "verbosity": text.get("verbosity"),
        "reasoning_effort": object_in(asked, "reasoning").get("effort"),
        "include": _included(asked) or None,
    }
    chat |= rest_of(asked, "text", ("format", "verbosity"))
    chat |= rest_of(asked, "reasoning", ("effort",))
    if form := dict(object_in(text, "format", "text.format")):
        kind = form.pop("type", "text")
        chat["response_format"] = {"type": kind} | (
            {"json_schema": form} if form else {}
        )
    if asked.get("top_logprobs") or _LOGS in _included(asked):
        name = "top_logprobs" if asked.get("top_logprobs") else "include"
        raise ValueError(f"{name}: log-probabilities are those of /v1/chat/completions")
    return merged_fields(rest, chat)


def _included(asked: Schema) -> list[Any]:
    include = asked.get("include") or []
    if not isinstance(include, list):
        raise ValueError(f"include: give a list, not {shown_json(include)}")
    for name in include:
        if name not in INCLUDED:
            raise ValueError(f"include: there is no {shown_json(name)} to include")
    return include


def nested(tool: Any) -> Any:
    """Convert ``tool``, a tool of the Responses API, to the form of chat requests: name, parameters and all other
    fields except the type move into the field ``function``.
    """
    if not isinstance(tool, dict):
        return tool
    function = {
        key: value
        for key, value in tool.items()
        if key not in ("type", "defer_loading")
    }
    return {"type": tool.get("type"), "function": function}


def messages_of_input(asked: Schema) -> list[Schema]:
    """Convert the instructions and input items of a body ``asked`` to chat messages."""
    said = list[Schema]()
    if asked.get("instructions"):
        said.append({"role": "system", "content": asked["instructions"]})
    items, reasoning = asked.get("input"), ""
    if not isinstance(items, str | list) or items == []:
        raise ValueError(
            f"input: give a text, or a list of items, not {shown_json(items)}"
        )
    for number, item in enumerate(
        [{"role": "user", "content": items}] if isinstance(items, str) else items
    ):
        kind = item.get("type") or "message" if isinstance(item, dict) else None
        if kind == "reasoning":
            reasoning += content_text(
                item.get("content") or item.get("summary"), f"input: its item {number}"
            )
        elif kind == "function_call":
            if not said or said[-1]["role"] != "assistant":
                said.append({"role": "assistant", "content": ""})
            function = {key: item.get(key) for key in ("name", "arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            said[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            said.append(
                {
                    "role": "tool",
                    "tool_call_id": item.get("call_id"),
                    "content": item.get("output"),
                }
            )
        elif kind == "message":
            said.append({"role": item.get("role"), "content": item.get("content")})
        else:
            raise ValueError(
                f"input: its item {number} is {shown_json(item)}; give messages, function_call and its output"
            )
        if reasoning and said and said[-1]["role"] == "assistant":
            said[-1]["reasoning_content"], reasoning = reasoning, ""
    return said


class ResponseReplies:
    """Builds the JSON of one answer to ``asked`` in OpenAI's Responses API: a whole response, or the events of a
    stream. ``model``: name of the model that it gives.
    """

    last = ""

    def __init__(self, asked: ResponsesRequest, model: str) -> None:
        said = asked.model_dump(
            include={
                "instructions",
                "metadata",
                "temperature",
                "top_p",
                "parallel_tool_calls",
            }
        )
        tools = [
            {"type": "function", **tool.function.model_dump()} for tool in asked.tools
        ]
        self.output: list[Schema] = []
        self.response: Schema = said | {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()), "model": model,
            "status": "in_progress", "output": self.output, "store": False, "error": None, "incomplete_details": None,
            "tools": tools, "tool_choice": asked.tool_choice.mode, "max_output_tokens": asked.most,
        }  # fmt: skip
        self.number = 0

    def begun(self) -> Iterator[Schema]:
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self.response)

    def chunks(self, index: int, new: Answer, first: bool) -> Iterator[Schema]:
        """Yield the stream events for ``new``, the part by which the answer has grown.

        ``index``, ``first``: not used. They are for APIs that stream several answers at once.
        """
        if new.thought:
            if not self.output:
                thought: Schema = {"type": "reasoning_text", "text": ""}
                yield from self._begin("reasoning", summary=[], content=[thought])
                yield self._of_item("content_part.added", content_index=0, part=thought)
            self.output[-1]["content"][0]["text"] += new.thought
            yield self._of_item(
                "reasoning_text.delta", content_index=0, delta=new.thought
            )
        if new.text:
            part: Schema = {"type": "output_text", "text": "", "annotations": []}
            if not self.output or self.output[-1]["type"] != "message":
                yield from self._begin("message", role="assistant", content=[part])
                yield self._of_item("content_part.added", content_index=0, part=part)
            self.output[-1]["content"][0]["text"] += new.text
            yield self._of_item(
                "output_text.delta", content_index=0, delta=new.text, logprobs=[]
            )
        for piece in new.calls:
            if piece.name is not None:
                yield from self._begin(
                    "function_call",
                    call_id=call_fields(piece)["id"],
                    name=piece.name,
                    arguments="",
                )
            self.output[-1]["arguments"] += piece.arguments
            yield self._of_item("function_call_arguments.delta", delta=piece.arguments)
        if new.finish:
            cut = new.finish == "length"
            self.response["status"] = "incomplete" if cut else "completed"
            self.response["incomplete_details"] = (
                {"reason": "max_output_tokens"} if cut else None
            )
            yield from self._end(self.response["status"])

    def ended(self, usage: Usage) -> Iterator[Schema]:
        details = usage.get("completion_tokens_details", {"reasoning_tokens": 0})
        self.response["usage"] = {
            "input_tokens": usage["prompt_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"], "output_tokens_details": details,
            "total_tokens": usage["total_tokens"],
        }  # fmt: skip
        yield self._event(self.response["status"], response=self.response)

    def failed(self, refusal: Refusal) -> Schema:
        error = {"code": "server_error", "message": refusal.body["error"]["message"]}
        return self._event(
            "failed", response=self.response | {"status": "failed", "error": error}
        )

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Schema:
        for _ in (*self.chunks(0, answers[0], True), *self.ended(usage)):
            pass
        return self.response

    def _event(self, kind: str, **about: Any) -> Schema:
        self.number += 1
        return {"type": f"response.{kind}", "sequence_number": self.number - 1, **about}

    def _of_item(self, kind: str, **about: Any) -> Schema:
        return self._event(
            kind,
            item_id=self.output[-1]["id"],
            output_index=len(self.output) - 1,
            **about,
        )

    def _begin(self, kind: str, **about: Any) -> Iterator[Schema]:
        yield from self._end()
        self.output.append(
            {
                "id": f"item_{uuid.uuid4().hex}",
                "type": kind,
                "status": "in_progress",
                **about,
            }
        )
        item = self.output[-1] | ({"content": []} if "content" in about else {})
        yield self._of_item("output_item.added", item=item)

    def _end(self, status: str = "completed") -> Iterator[Schema]:
        """Yield the end event of the last item, if there is one."""
        if not self.output:
            return
        item = self.output[-1]
        if item["type"] == "message":
            (part,) = item["content"]
            yield self._of_item(
                "output_text.done", content_index=0, text=part["text"], logprobs=[]
            )
            yield self._of_item("content_part.done", content_index=0, part=part)
        elif item["type"] == "reasoning":
            (part,) = item["content"]
            yield self._of_item(
                "reasoning_text.done", content_index=0, text=part["text"]
            )
            yield self._of_item("content_part.done", content_index=0, part=part)
        else:
            yield self._of_item(
                "function_call_arguments.done",
                name=item["name"],
                arguments=item["arguments"],
            )
        item["status"] = status
        yield self._of_item("output_item.done", item=item)
