"""JSON that people and programs bring: what is nested without end, given twice, or no JSON is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.data.chat.forms import read_record
from weft.data.files import read_records
from weft.data.json_text import (
    MOST_LEVELS,
    RefusedJson,
    RepeatedKey,
    TooDeep,
    parse_json,
    parse_record,
    repeated_keys,
)
from weft.errors import WeftError

DEEP = "[" * 300 + "]" * 300
TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def calling(arguments: Any) -> dict[str, Any]:
    """A record whose assistant calls a tool with ``arguments``."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [TALK[0], {"role": "assistant", "tool_calls": [call]}]}


@pytest.mark.parametrize(("record", "said"), [
    (calling('{"x": NaN}'), "calls 'f' with arguments that cannot be read: it has a number that is not finite"),
    (calling('{"x": [-Infinity]}'), "not finite"),
    (calling({"x": float("inf")}), "not finite"),
    (calling('{"x": 1e999}'), "not finite"),
    (calling('{"x": 1, "y": {"z": 1, "z": 2}}'), "the key 'z' is given twice; leave one of both out"),
    (calling(json.dumps('{"x": 1, "x": 2}')), "the key 'x' is given twice"),
    (calling(f'{{"x": {DEEP}}}'), "nested too deeply"),
    (calling('{"x": ' + "[" * 100_000), "nested too deeply"),
    ({"messages": TALK, "tools": f"[{DEEP}]"}, "its 'tools' are a text that cannot be read: nested too deeply"),
    ({"messages": TALK, "tools": '[{"name": "f", "name": "g"}]'}, "the key 'name' is given twice"),
    ({"messages": TALK, "tools": [{"name": "f", "least": float("nan")}]}, "its 'tools' cannot be read"),
    ({"messages": '[{"role": "user", "content": "q", "content": "r"}]'}, "the key 'content' is given twice"),
], ids=str)  # fmt: skip
def test_what_a_template_would_write_wrong_is_refused(record: Any, said: str) -> None:
    with pytest.raises(WeftError) as refused:
        read_record(record, "auto")
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_words_that_look_like_json_stay_words() -> None:
    words = '{"a": 1, "a": 2}'
    talk = read_record({"prompt": words, "completion": words}, "auto")
    assert [message["content"] for message in talk.messages] == [words, words]
    mended = read_record(calling('{"x": "\\ud83d"}'), "auto")
    (call,) = mended.messages[1]["tool_calls"]
    assert call["function"]["arguments"] == {"x": "?"}


@pytest.mark.parametrize(("name", "text"), [
    ("a.jsonl", '{"text": "a"}\n{"text": "b", "text": "c"}\n'),
    ("a.json", '[{"text": "a"},\n{"more": {"text": "b", "text": "c"}}]'),
])  # fmt: skip
def test_a_key_twice_is_refused_with_its_place(
    tmp_path: Path, name: str, text: str
) -> None:
    """One of both values would be lost, and with it what the record teaches."""
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(
        WeftError, match="the key 'text' is given twice; leave one"
    ) as e:
        list(read_records(file))
    assert str(e.value).startswith(f"{file}:2: " if name == "a.jsonl" else str(file))


def test_a_number_that_no_template_reads_may_be_nan(tmp_path: Path) -> None:
    """As exports of tables have it."""
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a", "score": NaN}')
    assert [record["text"] for _, record in read_records(file)] == ["a"]


def test_levels_and_keys() -> None:
    nested = "[" * MOST_LEVELS + "]" * MOST_LEVELS
    assert parse_json(f" {nested}\n") == parse_record(nested)
    for text in (f"[{nested}]", "[" * 100_000):
        for parse in (parse_json, parse_record):
            with pytest.raises(TooDeep):
                parse(text)
    with pytest.raises(RepeatedKey, match="'a' is given twice"):
        parse_record('{"b": {"a": 1, "a": 1}}')
    assert issubclass(RepeatedKey, RefusedJson)
    assert parse_json('{"a": 1, "a": 2}') == {"a": 2}
    assert repeated_keys(
        b'{"a": [{"b": 1, "b": 1}], "c": 1, "c": 1, "d": {"a": 1}}'
    ) == ["b", "c"]
    assert repeated_keys(b'[1, "a", {"a": 1%s}]' % (b"0" * 5000)) == []
