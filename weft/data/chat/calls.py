"""Find the form in which a chat template takes tool calls: arguments as object or JSON text, and the content beside.

Most templates write arguments as JSON and need an object; some append them to other text and need a text. Some write
calls only if the content is ``none``. The form is found by rendering a call.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from weft.data.chat.marks import JsonObject
from weft.data.json_text import parse_json

#: A call that no template has itself.
_NAME, _KEY, _VALUE = "weft_tool", "weft_key", "weft_value"
#: That a message has no content at all.
ABSENT = "absent"

Render = Callable[
    [Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], str
]


@dataclass(frozen=True)
class CallStyle:
    """Form in which a chat template expects messages with tool calls.

    ``as_text``: whether arguments are JSON text instead of an object. ``content``: value of ``content`` in messages
    that have calls but no text; ``ABSENT`` leaves the key out.
    """

    as_text: bool = False
    content: str | None = ABSENT

    def adapted(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of the dictionary ``message``, which must have tool calls, with its calls in this form."""
        adapted = {
            key: value
            for key, value in message.items()
            if key != "content" or value not in (None, "")
        }
        if "content" not in adapted and self.content != ABSENT:
            adapted["content"] = self.content
        adapted["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        return adapted

    def _call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or "arguments" not in function:
            return call
        arguments = (_as_text if self.as_text else _as_object)(function["arguments"])
        return dict(call) | {"function": dict(function) | {"arguments": arguments}}


def _as_text(arguments: Any) -> Any:
    if isinstance(arguments, str):
        return arguments
    return (
        arguments.text
        if isinstance(arguments, JsonObject)
        else json.dumps(arguments, ensure_ascii=False)
    )


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return parse_json(arguments)
    except ValueError:
        return arguments


def find_style(render: Render, empty: bool) -> CallStyle:
    """Find the form of tool calls that a chat template expects, by rendering a test call in each form.

    Returns the first form whose call the template writes. If it writes none, the form of the data is returned.

    ``render``: function that renders a list of messages and a list of tools, or raises. ``empty``: whether messages
    with calls in the data have an empty text as ``content`` instead of no ``content``.
    """
    contents = ("", None, ABSENT) if empty else (ABSENT, None, "")
    styles = [
        CallStyle(as_text, content)
        for as_text, content in product((False, True), contents)
    ]
    function = {
        "name": _NAME,
        "description": "-",
        "parameters": {"type": "object", "properties": {}},
    }
    tools = [None, [{"type": "function", "function": function}]]
    return next(
        (
            style
            for tool in tools
            for style in styles
            if _is_written(render, style, tool)
        ),
        styles[0],
    )


def _is_written(
    render: Render, style: CallStyle, tools: Sequence[Mapping[str, Any]] | None
) -> bool:
    """Return whether a template writes a call of this style as JSON, or its arguments one by one."""
    asked = {"role": "user", "content": "?"}
    call = {
        "id": "callcall1",
        "type": "function",
        "function": {"name": _NAME, "arguments": {_KEY: _VALUE}},
    }
    try:
        written = render(
            [asked, style.adapted({"role": "assistant", "tool_calls": [call]})], tools
        )
        before = render([asked], tools)
    except Exception:  # whatever a template raises
        return False
    # as Python writes an object, and as text within text
    wrong = (f"'{_KEY}'", f'\\"{_KEY}')
    if written.count("None") > before.count("None") or any(
        text in written for text in wrong
    ):
        return False
    return all(word in written for word in (_NAME, _KEY, _VALUE))
