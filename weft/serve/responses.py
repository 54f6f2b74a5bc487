"""``POST /v1/responses``: OpenAI's newer way to ask. A question is one of a chat; answers are items, streams events.

Nothing is kept between questions: whoever goes on with a conversation sends all of it.
"""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import model_validator

from weft.serve.protocol import ChatRequest, Refusal, Schema
from weft.serve.replies import Answer, Usage, call_fields

#: What would have to be kept.
KEPT = ("store", "previous_response_id", "conversation", "background")
TEXTS = ("input_text", "output_text", "text")


class ResponsesRequest(ChatRequest):
    """The chat that a question asks for."""

    n: Literal[1] = 1
    instructions: str | None = None
    metadata: dict[str, str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_chat(cls, asked: Any) -> Any:
        try:
            return as_chat(asked)
        except (TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"input, text, tools and tool_choice are not as OpenAI's are ({error})") from None


def as_chat(asked: Schema) -> Schema:
    """The fields of a chat that asks the same."""
    if named := [name for name in KEPT if asked.get(name)]:
        raise ValueError(f"{named[0]}: nothing is kept here; leave it out, and send the whole conversation")
    found = {key: value for key, value in asked.items() if key not in (*KEPT, "input", "text", "max_output_tokens")}
    found |= {"messages": [*messages(asked)], "max_completion_tokens": asked.get("max_output_tokens")}
    if form := dict(dict(asked.get("text") or {}).get("format") or {}):
        kind = form.pop("type", "text")
        found["response_format"] = {"type": kind} | ({"json_schema": form} if form else {})
    if isinstance(tools := asked.get("tools"), list):
        found["tools"] = [nested(tool) for tool in tools] or None
    if isinstance(choice := asked.get("tool_choice"), dict):
        found["tool_choice"] = nested(choice)
    return found


def nested(function: Any) -> Any:
    """A tool as chats have it."""
    return {"type": function.pop("type", None), "function": function} if isinstance(function, dict) else function


def messages(asked: Schema) -> Iterator[Schema]:
    """What is said in a chat in the place of instructions and items."""
    if asked.get("instructions"):
        yield {"role": "system", "content": asked["instructions"]}
    items, calls = asked["input"], list[Schema]()  # which are made together
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        kind = item.get("type", "message")
        if kind == "function_call":
            function = {key: item.get(key) for key in ("name", "arguments")}
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
            if len(calls) == 1:
                yield {"role": "assistant", "content": "", "tool_calls": calls}
        elif kind in ("message", "function_call_output"):
            said, calls = item.get("content", item.get("output")), []
            if isinstance(said, list):
                said = [part | {"type": "text"} if part.get("type") in TEXTS else part for part in said]
            of_tool = {"role": "tool", "tool_call_id": item.get("call_id")}
            yield (of_tool if kind != "message" else {"role": item.get("role")}) | {"content": said}
        else:
            raise ValueError(f"input has an item of type {kind!r}; give messages, function_call and its output")


class ResponseReplies:
    """The JSON of one answer, whole, or event by event."""

    last = ""

    def __init__(self, asked: ResponsesRequest, model: str) -> None:
        said = asked.model_dump(include={"instructions", "metadata", "temperature", "top_p", "parallel_tool_calls"})
        tools = [{"type": "function", **tool.function.model_dump()} for tool in asked.tools or []]
        choice = asked.tool_choice if isinstance(asked.tool_choice, str) else "required"
        self.output: list[Schema] = []
        self.response: Schema = said | {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()), "model": model,
            "status": "in_progress", "output": self.output, "store": False, "error": None, "incomplete_details": None,
            "tools": tools, "tool_choice": choice, "max_output_tokens": asked.most,
        }  # fmt: skip
        self.number = 0

    def begun(self) -> Iterator[Schema]:
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self.response)

    def chunks(self, index: int, new: Answer, first: bool) -> Iterator[Schema]:
        """What is new of the answer."""
        if new.text:
            part = {"type": "output_text", "text": "", "annotations": []}
            if not self.output or self.output[-1]["type"] != "message":
                yield from self._begin("message", role="assistant", content=[part])
                yield self._of_item("content_part.added", content_index=0, part=part)
            self.output[-1]["content"][0]["text"] += new.text
            yield self._of_item("output_text.delta", content_index=0, delta=new.text, logprobs=[])
        for piece in new.calls:
            if piece.name is not None:
                yield from self._begin("function_call", call_id=call_fields(piece)["id"], name=piece.name, arguments="")
            self.output[-1]["arguments"] += piece.arguments
            yield self._of_item("function_call_arguments.delta", delta=piece.arguments)
        if new.finish:
            cut = new.finish == "length"
            self.response["status"] = "incomplete" if cut else "completed"
            self.response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
            yield from self._end(self.response["status"])

    def ended(self, usage: Usage) -> Iterator[Schema]:
        self.response["usage"] = {
            "input_tokens": usage["prompt_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }  # fmt: skip
        yield self._event(self.response["status"], response=self.response)

    def failed(self, refusal: Refusal) -> Schema:
        error = {"code": "server_error", "message": refusal.body["error"]["message"]}
        return self._event("failed", response=self.response | {"status": "failed", "error": error})

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Schema:
        for _ in (*self.chunks(0, answers[0], True), *self.ended(usage)):
            pass
        return self.response

    def _event(self, kind: str, **about: Any) -> Schema:
        self.number += 1
        return {"type": f"response.{kind}", "sequence_number": self.number - 1, **about}

    def _of_item(self, kind: str, **about: Any) -> Schema:
        return self._event(kind, item_id=self.output[-1]["id"], output_index=len(self.output) - 1, **about)

    def _begin(self, kind: str, **about: Any) -> Iterator[Schema]:
        yield from self._end()
        self.output.append({"id": f"item_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **about})
        item = self.output[-1] | ({"content": []} if kind == "message" else {})
        yield self._of_item("output_item.added", item=item)

    def _end(self, status: str = "completed") -> Iterator[Schema]:
        """The last item, if there is one, has ended."""
        if not self.output:
            return
        item = self.output[-1]
        if item["type"] == "message":
            (part,) = item["content"]
            yield self._of_item("output_text.done", content_index=0, text=part["text"], logprobs=[])
            yield self._of_item("content_part.done", content_index=0, part=part)
        else:
            yield self._of_item("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        item["status"] = status
        yield self._of_item("output_item.done", item=item)
