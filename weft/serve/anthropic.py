"""``POST /v1/messages`` of Anthropic's API. A request is converted to a chat request; answers and streams are lists of
content blocks (text, thinking or a tool call).
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from weft.serve.json_values import as_strict_json
from weft.serve.messages import arguments_of, content_text
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

#: Where Anthropic's interface begins, and a header that its clients send to every path.
MESSAGES, VERSION = "/v1/messages", b"anthropic-version"

#: Kinds of errors by status; others are the client's own.
KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip

#: Why an answer ended.
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

_MODES = {"auto": "auto", "any": "required", "none": "none"}
_MOVED = (
    "system",
    "messages",
    "max_tokens",
    "stop_sequences",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
)


class MessagesRequest(ChatRequest):
    """``POST /v1/messages`` of Anthropic's API, read as an equivalent chat request."""

    NAMES: ClassVar[dict[str, str]] = {
        "max_completion_tokens": "max_tokens", "stop": "stop_sequences", "response_format": "output_config.format",
        "chat_template_kwargs": "thinking", "reasoning_effort": "output_config.effort",
    }  # fmt: skip
    IDLE: ClassVar[dict[str, Any]] = {"mcp_servers": [], "fallbacks": []}

    # a message is one answer, and has no place for log-probabilities
    n: Literal[1] = 1
    logprobs: Literal[False] = False
    top_logprobs: Literal[0] = 0

    @classmethod
    def prepared(cls, given: Schema) -> Schema:
        if given.get("max_tokens") is None:
            raise ValueError("max_tokens: it is missing")
        return messages_as_chat(given)


class CountRequest(MessagesRequest):
    """``POST /v1/messages/count_tokens``: a conversation whose tokens are counted without generating an answer."""

    @classmethod
    def prepared(cls, given: Schema) -> Schema:
        return messages_as_chat(given)


def messages_as_chat(asked: Schema) -> Schema:
    """Convert the body ``asked`` of ``/v1/messages`` to the fields of an OpenAI chat request. Raises ValueError for a
    wrong value, with the field's name before a colon.
    """
    rest = {key: value for key, value in asked.items() if key not in _MOVED}
    if _keeps_all(rest.get("context_management")):
        del rest["context_management"]
    messages = list(_messages(asked))
    chat: Schema = {
        "messages": messages,
        "max_completion_tokens": asked.get("max_tokens"),
        "stop": asked.get("stop_sequences"),
        "tools": [_tool(tool) for tool in _list(asked, "tools")],
    }
    for tool in _list(asked, "tools"):
        own = ("type", "name", "description", "strict", "input_schema")
        chat |= rest_of({"tools": tool}, "tools", own)
    last = messages[-1]
    chat["continue_final_message"] = last["role"] == "assistant" and not last.get(
        "tool_calls"
    )
    if choice := object_in(asked, "tool_choice"):
        chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
        kind = choice.get("type")
        if kind not in ("tool", *_MODES):
            raise ValueError(
                f"tool_choice: give auto, any, tool or none as its type, not {shown_json(kind)}"
            )
        chat |= rest_of(
            asked, "tool_choice", ("type", "name", "disable_parallel_tool_use")
        )
        named = {"type": "function", "name": choice.get("name")}
        chat["tool_choice"] = named if kind == "tool" else _MODES[kind]
    if thinking := object_in(asked, "thinking"):
        kind = thinking.get("type")
        if kind not in ("enabled", "adaptive", "disabled"):
            raise ValueError(
                f"thinking: give enabled, adaptive or disabled as its type, not {shown_json(kind)}"
            )
        thinks, words = kind != "disabled", object_in(asked, "chat_template_kwargs")
        if words.get("enable_thinking", thinks) != thinks:
            raise ValueError(
                "thinking: chat_template_kwargs.enable_thinking says otherwise; leave out one of both"
            )
        chat["chat_template_kwargs"] = words | {"enable_thinking": thinks}
        rest.pop("chat_template_kwargs", None)
        chat |= rest_of(asked, "thinking", ("type",))
    if config := object_in(asked, "output_config"):
        chat["reasoning_effort"] = config.get("effort")
        chat |= rest_of(asked, "output_config", ("effort", "format"))
        form = object_in(config, "format", "output_config.format")
        if form and (
            form.get("type") != "json_schema"
            or not isinstance(form.get("schema"), dict)
        ):
            raise ValueError(
                "output_config: a format has the type json_schema, and a schema"
            )
        if form:
            named_schema = {"name": "output", "schema": form["schema"]}
            chat["response_format"] = {
                "type": "json_schema",
                "json_schema": named_schema,
            }
    return merged_fields(rest, chat)


def _keeps_all(management: Any) -> bool:
    """Return whether the edits of a conversation that a client asks for, as Claude Code does, leave all of it."""
    edits = management.get("edits") if isinstance(management, dict) else None
    return isinstance(edits, list) and all(
        isinstance(edit, dict)
        and str(edit.get("type")).startswith("clear_thinking_")
        and edit.get("keep") == "all"
        for edit in edits
    )


def _list(given: Schema, name: str) -> list[Any]:
    value = given.get(name)
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{name}: give a list, not {shown_json(value)}")
    return value or []


def _tool(tool: Any) -> Schema:
    """Convert a tool to the form of chats; tools that the server itself would have to run are refused."""
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        raise ValueError(
            f"tools: only tools with a name and an input_schema are possible here, not {shown_json(tool)}"
        )
    function = {
        key: tool[key] for key in ("name", "description", "strict") if key in tool
    }
    return {
        "type": "function",
        "function": function | {"parameters": tool.get("input_schema")},
    }


def _messages(asked: Schema) -> Iterator[Schema]:
    """Yield the messages of a chat."""
    if asked.get("system"):
        yield {"role": "system", "content": content_text(asked["system"], "system: it")}
    messages = _list(asked, "messages")
    if not messages:
        raise ValueError("messages: give at least one")
    for number, message in enumerate(messages):
        name = f"messages: its item {number}"
        if not isinstance(message, dict) or message.get("role") not in (
            "user",
            "assistant",
            "system",
        ):
            raise ValueError(
                f"{name} is {shown_json(message)}; give the role user or assistant, and content"
            )
        content = message.get("content")
        blocks = (
            [{"type": "text", "text": content}] if isinstance(content, str) else content
        )
        if not isinstance(blocks, list) or not all(
            isinstance(block, dict) for block in blocks
        ):
            raise ValueError(
                f"{name} has {shown_json(content)} as 'content'; give a text, or blocks"
            )
        yield from _spoken(message["role"], blocks, name)


def _spoken(role: str, blocks: Sequence[Schema], name: str) -> Iterator[Schema]:
    """Yield one message's ``blocks`` as messages: first results of tools by themselves, then the user's other words."""
    texts, calls, thoughts, results = list[str](), list[Schema](), list[str](), 0
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_result":
            results += 1
            said = content_text(block.get("content"), name)
            result = {
                "role": "tool",
                "tool_call_id": block.get("tool_use_id"),
                "content": said,
            }
            # for templates that read it; the log says where one does not
            yield result | ({"is_error": True} if block.get("is_error") else {})
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append(
                {"id": block.get("id"), "type": "function", "function": function}
            )
        elif kind == "thinking" and role == "assistant":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            texts.append(content_text([block], name))
    if texts or not results:
        spoken: Schema = {"role": role, "content": "".join(texts)}
        spoken |= {"tool_calls": calls} if calls else {}
        yield spoken | (
            {"reasoning_content": "".join(thoughts)} if any(thoughts) else {}
        )


def error_of(refusal: Refusal) -> Schema:
    """Return the JSON body of a refusal in the form of Anthropic's API."""
    other = "invalid_request_error" if refusal.status < 500 else "api_error"
    kind = KINDS.get(refusal.status, other)
    return {
        "type": "error",
        "error": {"type": kind, "message": refusal.body["error"]["message"]},
    }


def error_for(scope: Mapping[str, Any] | None, refusal: Refusal) -> Schema:
    """Return the JSON body of a refusal in the form that the client reads: Anthropic's or OpenAI's.

    ``scope``: ASGI scope of the request, of which the path and the headers count; None: nothing is known of it.
    """
    if scope is None:
        return refusal.body
    path = scope["path"]
    if path == MESSAGES or path.startswith(f"{MESSAGES}/"):
        return error_of(refusal)
    names = (name.lower() for name, _ in scope["headers"])
    return error_of(refusal) if VERSION in names else refusal.body


def _as_input(written: str) -> Schema:
    """Return the arguments of a call, as the model has ``written`` them, as an object. Arguments that are no object, or
    that have numbers which JSON cannot say, become its only text.
    """
    given = arguments_of(written)
    try:
        strict = as_strict_json(given)
    except ValueError:
        strict = written
    return strict if isinstance(strict, dict) else {"arguments": strict}


class MessageReplies:
    """Builds the JSON of one answer in Anthropic's API: a whole message, or the events of a stream. ``model``: name of
    the model that it gives. ``prompt``: number of tokens of the prompt.
    """

    last = ""

    def __init__(self, model: str, prompt: int) -> None:
        self.content: list[Schema] = []  # blocks, of which the last one may go on
        self.message: Schema = {
            "id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model,
            "content": self.content, "stop_reason": None, "stop_sequence": None,
            "usage": {"input_tokens": prompt, "output_tokens": 0},
        }  # fmt: skip

    def begun(self) -> Iterator[Schema]:
        yield {"type": "message_start", "message": self.message | {"content": []}}

    def chunks(self, index: int, new: Answer, first: bool) -> Iterator[Schema]:
        """Yield the stream events for ``new``, the part by which the answer has grown.

        ``index``, ``first``: not used. They are for APIs that stream several answers at once.
        """
        if new.thought:
            yield from self._write(
                "thinking", "thinking_delta", "thinking", new.thought, {"signature": ""}
            )
        if new.text:
            yield from self._write("text", "text_delta", "text", new.text, {})
        for piece in new.calls:
            if piece.name is not None:
                yield from self._end()
                name = {
                    "id": call_fields(piece)["id"].replace("call_", "toolu_"),
                    "name": piece.name,
                }
                self.content.append({"type": "tool_use", **name, "input": ""})
                yield self._of_block(
                    "start", content_block={"type": "tool_use", **name, "input": {}}
                )
            self.content[-1]["input"] += piece.arguments
            yield self._delta("input_json_delta", "partial_json", piece.arguments)
        if new.finish:
            self.message["stop_reason"] = (
                "stop_sequence" if new.stop else REASONS[new.finish]
            )
            self.message["stop_sequence"] = new.stop or None
            yield from self._end()

    def _write(
        self, kind: str, delta: str, key: str, text: str, about: Mapping[str, Any]
    ) -> Iterator[Schema]:
        """Yield the events for more text of a block, which begins if the last block is of another kind."""
        if not self.content or self.content[-1]["type"] != kind:
            yield from self._end()
            self.content.append({"type": kind, key: "", **about})
            yield self._of_block("start", content_block=dict(self.content[-1]))
        self.content[-1][key] += text
        yield self._delta(delta, key, text)

    def _end(self) -> Iterator[Schema]:
        """Yield the end event of the last block, if there is one."""
        if not self.content:
            return
        block = self.content[-1]
        if block["type"] == "tool_use":
            block["input"] = _as_input(block["input"])
        yield self._of_block("stop")

    def _delta(self, kind: str, key: str, text: str) -> Schema:
        return self._of_block("delta", delta={"type": kind, key: text})

    def _of_block(self, kind: str, **about: Any) -> Schema:
        return {
            "type": f"content_block_{kind}",
            "index": len(self.content) - 1,
            **about,
        }

    def ended(self, usage: Usage) -> Iterator[Schema]:
        hits = usage["prompt_tokens_details"]["cached_tokens"]
        self.message["usage"] = {
            "input_tokens": usage["prompt_tokens"] - hits, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": hits, "output_tokens": usage["completion_tokens"],
        }  # fmt: skip
        delta = {key: self.message[key] for key in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": delta, "usage": self.message["usage"]}
        yield {"type": "message_stop"}

    def failed(self, refusal: Refusal) -> Schema:
        return error_of(refusal)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Schema:
        for _ in (*self.chunks(0, answers[0], True), *self.ended(usage)):
            pass
        return self.message
