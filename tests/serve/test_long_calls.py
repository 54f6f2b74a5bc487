"""Long calls of tools take a time that grows with their length: the work is counted in characters that are read."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

from tests.chats import DEEPSEEK_V3
from tests.serve.test_call_finder import BARE, HERMES, LLAMA, MISTRAL, form_of
from weft.serve import call_finder, call_form
from weft.serve.call_finder import CallFinder, CallPiece
from weft.serve.object_extent import ObjectExtent

TEMPLATES = {
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK_V3,
}
#: Brackets, quotes and escapes in texts, at places where pieces of any size begin and end.
LONG = json.dumps({"text": 'é "}] \\ {[' * 2000, "more": [{"x": [1, {}]}] * 500})


class Read:
    """Counts the characters that are parsed, or looked at for the end of a call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        at, whole = call_form.parse_json_at, call_form.parse_json

        def parse_at(text: str, start: int) -> Any:
            self.count += len(text) - start
            return at(text, start)

        def parse(text: str) -> Any:
            self.count += len(text)
            return whole(text)

        monkeypatch.setattr(call_form, "parse_json_at", parse_at)
        monkeypatch.setattr(call_form, "parse_json", parse)
        extent = getattr(call_finder, "ObjectExtent", None)
        if extent is None:
            return
        add = extent.add

        def look(this: ObjectExtent, piece: str) -> int:
            self.count += len(piece)
            taken: int = add(this, piece)
            return taken

        monkeypatch.setattr(extent, "add", look)


@pytest.mark.parametrize(("streams", "most"), [(True, None), (False, 2)])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_long_call_is_read_once(
    name: str, streams: bool, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = form_of(TEMPLATES[name])
    assert form is not None
    call = form.cut("get_a", LONG) + form.behind
    if name == "mistral":  # its arguments stand before the name
        call = call.replace("weft_example", "get_a")
    read = Read(monkeypatch)
    finder = CallFinder(form, streams, ["get_a"], most)
    pieces = list[CallPiece]()
    for at in range(0, len(call), 3):
        pieces += finder.add(call[at : at + 3])[1]
    end = finder.end("stop")
    pieces += end.calls
    given = "".join(piece.arguments for piece in pieces)
    assert (
        json.loads(given) == json.loads(finder.calls[0].arguments) == json.loads(LONG)
    )
    assert end.finish == "tool_calls"
    assert read.count < 8 * len(call), read.count / len(call)


@pytest.mark.parametrize("text", [
    '{"name": "no_tool", "arguments": ' + LONG,  # what is no call is read on for the next call
    '{"name": "get_a", "arguments": {"x": oops} ' + LONG,
    '{"name": "get_a", "arguments": {}} oops ' + LONG,
    '{"name": "' + "a" * 30_000,
    "\n" * 30_000 + "{",
    LONG,
], ids=["other", "broken", "behind", "name", "blank", "nameless"])  # fmt: skip
def test_what_is_no_call_is_not_read_again_and_again(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = form_of(HERMES)
    assert form is not None
    read, tries = Read(monkeypatch), 0
    head = form._head  # type: ignore[union-attr]

    class Counted:
        def match(self, given: str, *at: int) -> Any:
            nonlocal tries
            tries += 1
            return head.match(given, *at)

    form.__dict__["_head"] = Counted()
    finder = CallFinder(form, True, ["get_a"])
    for at in range(0, len(text), 3):
        finder.add("<tool_call>" * (at == 0) + text[at : at + 3])
    finder.end("length")
    assert read.count < 40 * len(text) and tries < 1000


@pytest.mark.parametrize("template", [DEEPSEEK_V3, BARE])
def test_white_space_without_end_is_read_once(template: str) -> None:
    """It took its length cubed: the server stood still for a minute at 4,000 characters."""
    form = form_of(template)
    assert form is not None
    for tail, further in product(("x", "get_a", "get_a {}"), (False, True)):
        form.head("\n" * 100_000 + tail, further)
    finder = CallFinder(form, True, ["get_a"])
    call = form.cut("get_a", "{}") + form.closing
    pieces = [finder.add(text)[1] for text in (call, "\n" * 30_000, call)]
    end = finder.end("stop")
    calls = [call for some in (*pieces, end.calls) for call in some]
    assert [call.name for call in calls if call.name] == ["get_a"] * 2


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100_000])
@pytest.mark.parametrize("text", [
    "{}", '{"a": "\\\\"}', '{"a": "\\"}", "b": [[{}], "]"]}', '{"\\\\\\"{": {"}": "\\\\\\\\"}}', LONG,
])  # fmt: skip
def test_an_object_ends_where_its_json_ends(text: str, size: int) -> None:
    extent, taken = ObjectExtent(), 0
    whole = text + '} "{'
    for at in range(0, len(whole), size):
        taken += extent.add(whole[at : at + size])
    assert extent.complete and taken == extent.length == len(text)
    cut = ObjectExtent()
    assert cut.add(text[:-1]) == len(text) - 1 and not cut.complete
