"""Records as exporters write them: whatever the variant, the conversation of its plain form, and no field lost."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.chat.chat_turns import ConversationError
from weft.data.chat.columns import Renaming
from weft.data.chat.forms import read_record
from weft.data.chat.pairs import read_pair

WORDS = st.text("ab é{}[]'\"", min_size=1, max_size=6).map(lambda text: f"w{text}w")
#: Names of speakers that mean the same.
ALIASES = {
    "system": ["system", "System"],
    "user": ["user", "human", "Human", "USER", "prompter"],
    "assistant": ["assistant", "gpt", "model", "Assistant", "bot"],
    "tool": ["tool", "function", "observation", "ipython"],
}
SYSTEM, ASKED, SAID = (
    {"role": role, "content": role[0]} for role in ("system", "user", "assistant")
)
CALL = {
    "type": "function",
    "id": "c1",
    "function": {"name": "f", "arguments": {"x": None, "y": [1]}},
}


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Messages in the plain form: perhaps a system turn, questions, answers, calls and what tools answered."""
    messages = (
        [{"role": "system", "content": draw(WORDS)}] if draw(st.booleans()) else []
    )
    for number in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(WORDS)})
        if draw(st.booleans()):
            arguments = draw(
                st.dictionaries(
                    st.sampled_from("xyz"),
                    st.none() | st.integers(0, 3) | WORDS,
                    max_size=2,
                )
            )
            call = {
                "type": "function",
                "id": f"c{number}",
                "function": {"name": "f", "arguments": arguments},
            }
            answer = draw(st.sampled_from(["", "3", '{"a": null}', "[1, 2]", "plain"]))
            messages.append({"role": "assistant", "tool_calls": [call]})
            messages.append(
                {"role": "tool", "tool_call_id": f"c{number}", "content": answer}
            )
        messages.append({"role": "assistant", "content": draw(WORDS)})
    return messages


def exported(draw: st.DrawFn, message: dict[str, Any]) -> dict[str, Any]:
    """``message`` in another way of writing the same."""
    turn = json.loads(json.dumps(message))
    role, words = draw(
        st.sampled_from([("from", "value"), ("role", "content"), ("role", "text")])
    )
    name, content = (
        draw(st.sampled_from(ALIASES[turn.pop("role")])),
        turn.pop("content", None),
    )
    if (
        message["role"] == "tool"
        and content in ("", "3", '{"a": null}', "[1, 2]")
        and draw(st.booleans())
    ):
        content = json.loads(content or "null")
    for call in turn.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        forms = [arguments, json.dumps(arguments), json.dumps(json.dumps(arguments))]
        call["function"]["arguments"] = draw(
            st.sampled_from([*forms, *(["", None] if not arguments else [])])
        )
    if "tool_calls" in turn and draw(st.booleans()):
        turn["tool_calls"] = json.dumps(turn["tool_calls"])
    else:
        turn.setdefault("tool_calls", draw(st.sampled_from([[], None, "[]"])))
    turn.setdefault("tool_call_id", draw(st.sampled_from(["", None])))
    turn |= draw(
        st.sampled_from(
            [{}, {"name": ""}, {"function_call": None}, {"reasoning_content": None}]
        )
    )
    return {role: name, words: content} | turn


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_what_exporters_write_is_its_plain_form(data: st.DataObject) -> None:
    plain = data.draw(conversations())
    turns = [exported(data.draw, message) for message in plain]
    beside = {}
    if plain[0]["role"] == "system" and data.draw(st.booleans()):
        beside = {
            data.draw(st.sampled_from(["system", "system_prompt"])): plain[0]["content"]
        }
        del turns[0]
    field = data.draw(st.sampled_from(["messages", "conversations", "Messages"]))
    as_text = data.draw(st.sampled_from([lambda turns: turns, json.dumps, repr]))
    record = beside | {field: as_text(turns), "note": "kept aside", "nothing": None}
    found = read_record(record)
    assert found == read_record({"messages": plain})
    assert list(found.messages) == plain and found.unread == ("note",)


#: A record of every form without anything beside it, and the field in which it has its words.
FORMS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [ASKED, SAID]},
    "sharegpt": {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]},
    "prompt": {"prompt": "u", "completion": "a"},
    "prompt of messages": {"prompt": [ASKED], "completion": [SAID]},
    "alpaca": {"instruction": "u", "output": "a"},
    "question": {"question": "u", "answer": "a"},
    "response": {"prompt": "u", "response": "a"},
    "dolly": {"instruction": "u", "context": "", "response": "a"},
    "table": {"Question": "u", "Answer": "a"},
    "input": {"input": "u", "output": "a"},
    "as text": {"prompt": json.dumps([ASKED]), "completion": "a"},
    "adp": {
        "id": "1",
        "content": [
            {"class_": "text_observation", "content": "u", "source": "user"},
            {"class_": "message_action", "content": "a"},
        ],
    },
    "atif": {
        "schema_version": "ATIF-v1.7",
        "steps": [
            {"step_id": 1, "source": "user", "message": "u"},
            {"step_id": 2, "source": "agent", "message": "a"},
        ],
    },
    "chosen": {"prompt": "u", "chosen": "a", "rejected": "b"},
    "chosen of messages": {"prompt": [ASKED], "chosen": [ASKED, SAID], "rejected": [ASKED, SAID | {"content": "b"}]},
    "chosen turn": {"conversations": [{"from": "human", "value": "u"}], "chosen": {"from": "gpt", "value": "a"},
                    "rejected": {"from": "gpt", "value": "b"}},
    "orca": {"question": "u", "chosen": "a", "rejected": "b"},
    "argilla": {"input": "u", "chosen": "a", "rejected": "b"},
    "pairs of turns": {"conversation": [{"input": "u", "output": "a"}]},
    "firefly": {"conversation": json.dumps([{"human": "u", "assistant": "a"}])},
    "dialogue": {"prompt": "\n\nHuman: u\n\nAssistant:", "completion": "a"},
    "chosen dialogue": {"chosen": "\n\nHuman: u\n\nAssistant: a", "rejected": "\n\nHuman: u\n\nAssistant: an"},
}  # fmt: skip
EXTRA = st.dictionaries(
    st.sampled_from(["note", "score", "source", "lang", "url"]),
    st.sampled_from([None, "", [], {}, 0, 1.5, "x", {"a": 1}, [False]]), max_size=4,
)  # fmt: skip


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from(sorted(FORMS)),
    st.none() | WORDS,
    EXTRA,
    st.sampled_from([None, 0, 0.5, "2"]),
)
def test_every_form_keeps_what_stands_beside_it(
    form: str, system: str | None, extra: dict[str, Any], weight: Any
) -> None:
    record = (
        FORMS[form]
        | extra
        | {"system": system, "weight": weight, "tools": json.dumps([CALL])}
    )
    pair = "chosen" in record
    found = read_pair(record).chosen if pair else read_record(record)
    assert [(m["role"], m["content"]) for m in found.messages] == [
        *([("system", system)] if system else []), ("user", "u"), ("assistant", "a"),
    ]  # fmt: skip
    assert found.tools == (CALL,)
    assert (read_pair(record).weight if pair else found.weight) == float(
        1 if weight is None else weight
    )
    assert sorted(found.unread) == sorted(
        key for key, value in extra.items() if value not in (None, "", [], {})
    )


def test_system_twice_is_one_or_refused() -> None:
    for record in (
        {"messages": [SYSTEM, ASKED, SAID]},
        {"prompt": [SYSTEM, ASKED], "completion": "a"},
    ):
        assert [m["role"] for m in read_record(record | {"system": "s"}).messages] == [
            "system",
            "user",
            "assistant",
        ]
        with pytest.raises(
            ConversationError,
            match=r"another text as 'system' beside it; leave one out: data.columns",
        ):
            read_record(record | {"system": "other"})
    with pytest.raises(ConversationError, match="'system' is 3"):
        read_record({"messages": [ASKED, SAID], "system": 3})


MASKS = [
    ("train", 1),
    ("training", 1),
    ("trainable", 1),
    ("loss", 1),
    ("loss_mask", 1),
    ("masked", 0),
    ("lossMask", 1),
]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(MASKS), st.booleans(), st.integers(0, 3)), min_size=1, max_size=4),
    st.booleans(),
)  # fmt: skip
def test_masks_of_turns_are_obeyed(masks: list[Any], sharegpt: bool) -> None:
    turns, wanted = [], []
    for (name, means), learned, how in masks:
        value = (
            learned == bool(means),
            int(learned == bool(means)),
            str(learned == bool(means)).lower(),
            None,
        )[how]
        turns += [
            ASKED,
            ({"from": "gpt", "value": "a"} if sharegpt else SAID) | {name: value},
        ]
        wanted.append(1.0 if value is None else float(learned))
    found = read_record({"conversations" if sharegpt else "messages": turns})
    assert list(found.weights)[1::2] == wanted
    marked = [
        2 * i + 1
        for i, ((_, means), learned, how) in enumerate(masks)
        if means and learned and how < 3
    ]
    assert list(found.marked) == marked


@pytest.mark.parametrize(
    ("key", "values"),
    [("loss_mask", [0, 0, 1, 1]), ("masked", "[true, true, false, false]")],
)
def test_masks_in_a_list_beside_the_messages_are_obeyed(key: str, values: Any) -> None:
    assert read_record({"messages": [ASKED, SAID] * 2, key: values}).weights == (
        0,
        0,
        1,
        1,
    )


def test_masks_that_are_not_known_are_refused() -> None:
    for change, said in (
        ({"train_detail": [1]}, "'train_detail', which says something about learning"),
        ({"mask": 1}, "'mask'"),
        ({"loss_mask": 0.5}, "true or false"),
        ({"loss_mask": [0, 1]}, "true or false"),
        ({"train": True, "masked": True}, "contradict"),
        ({"loss_weight": "big"}, "a weight is a number"),
    ):
        with pytest.raises(ConversationError, match=said):
            read_record({"messages": [ASKED, SAID | change]})
        with pytest.raises(ConversationError, match=said):
            read_record(
                {
                    "conversations": [
                        {"from": "human", "value": "u"},
                        {"from": "gpt", "value": "a"} | change,
                    ]
                }
            )
    for change, said in (
        ({"loss_mask": [1]}, "not one for each message"),
        ({"loss": 2.5}, "true or false"),
        ({"mask": "user"}, "'mask', which says something about learning"),
    ):
        with pytest.raises(ConversationError, match=said):
            read_record({"messages": [ASKED, SAID]} | change)
    with pytest.raises(
        ConversationError, match="masks of a pair's turns stand in the turns"
    ):
        read_pair({"prompt": "u", "chosen": "a", "rejected": "b", "loss_mask": [1]})
    assert (
        read_record({"messages": [ASKED, SAID], "trainable": 0, "weight": 2}).weight
        == 0
    )
    pair = read_pair(
        {
            "prompt": "u",
            "chosen": [SAID, ASKED, SAID | {"masked": 1}],
            "rejected": [SAID],
        }
    )
    assert pair.chosen.learned("assistant") == (0, 1, 0, 0)


def test_old_calls_and_functions_are_read() -> None:
    turns = [
        ASKED,
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "f", "arguments": '{"x": null}'},
        },
        {"role": "function", "name": "f", "content": {"sum": None}},
        SAID | {"function_call": {}},
    ]
    found = read_record({"messages": turns, "functions": [{"name": "f"}]})
    assert found.messages[1]["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": {"x": None}}}
    ]
    assert found.messages[2] == {
        "role": "tool",
        "name": "f",
        "content": '{"sum": null}',
    }
    assert (
        found.tools == ({"type": "function", "function": {"name": "f"}},)
        and not found.unread
    )


def test_lists_kept_as_columns_are_read_whole_or_refused() -> None:
    table = {"role": ["user", "assistant"], "content": ["u", "a"]}
    assert read_record({"messages": table}).messages == (ASKED, SAID)
    with pytest.raises(ConversationError, match="a conversation is a list of messages"):
        read_record({"messages": table | {"content": ["u"]}})
    # An answer that is a list of questions and answers is a text.
    text = json.dumps([{"question": "u", "answer": "a"}])
    assert read_record({"prompt": "Ask.", "completion": text}).messages[1] == SAID | {
        "content": text
    }


def test_fields_of_messages_that_nobody_knows_are_named() -> None:
    found = read_record(
        {"messages": [ASKED | {"mood": "fine", "seen": None}, SAID | {"emoji": ""}]}
    )
    assert found.unread == ("messages[].mood",) and found.messages[0]["mood"] == "fine"
    steps = FORMS["atif"]["steps"]
    found = read_record(
        FORMS["atif"]
        | {
            "session_id": "s",
            "steps": [steps[0] | {"odd": 1, "metrics": {"n": 1}}, steps[1]],
        }
    )
    assert found.unread == ("session_id", "steps[].odd")
    assert read_record(FORMS["adp"] | {"details": {"a": 1}, "odd": 1}).unread == (
        "odd",
        "details",
    )


def test_pairs_that_repeat_their_prompt_have_it_once() -> None:
    both = [SYSTEM, ASKED]
    pair = read_pair(
        {
            "prompt": both,
            "chosen": [*both, SAID],
            "rejected": [*both, SAID | {"content": "b"}],
        }
    )
    assert [m["role"] for m in pair.chosen.messages] == ["system", "user", "assistant"]
    pair = read_pair(
        {
            "prompt": "another",
            "chosen": [ASKED, SAID],
            "rejected": [ASKED, SAID | {"content": "b"}],
        }
    )
    assert pair.chosen.unread == ("prompt",)
    pair = read_pair(
        {
            "prompt": "u",
            "chosen": [ASKED, SAID],
            "rejected": [ASKED, SAID | {"content": "b"}],
        }
    )
    assert pair.chosen.unread == ()
    whole = {
        "messages": [ASKED, SAID],
        "chosen": [ASKED, SAID],
        "rejected": [ASKED, SAID | {"content": "b"}],
    }
    pair = read_pair(whole)
    assert len(pair.chosen.messages) == 2 and pair.chosen.unread == ("messages",)
    # Capybara's
    pair = read_pair(
        {**whole, "messages": None, "conversation": [{"input": "u", "output": "other"}]}
    )
    assert len(pair.chosen.messages) == 2 and pair.chosen.unread == ("conversation",)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"promt": "u", "completion": "a"}, 'nearest is prompt and completion: data.columns = { promt = "prompt" }'),
        ({"prompt": "u", "reply": "a"}, 'nearest is prompt and completion: data.columns = { NAME = "completion" }'),
        ({"query": "u", "answers": "a"}, 'data.columns = { answers = "completion" }'),
        ({"mesages": []}, 'data.columns = { mesages = "messages" }'),
        ({"prompt": "u", "completion": None}, "its 'completion' is empty"),
        ({"question": "u", "answer": None}, "its 'answer' is empty"),
        ({"chosen": "a", "rejected": "b"}, "set data.kind = 'preference'"),
        ({"text": "a"}, "kind = 'jsonl'"),
        ({"messages": [{"speaker": "A", "text": "u"}]}, 'data.columns = { "messages.speaker" = "role" }'),
        ({"messages": [{"role": "Teacher", "content": "u"}]}, 'data.roles = { "Teacher" = "user" }'),
        (FORMS["atif"] | {"steps": [{"step_id": 1, "source": "user", "message": 3}]}, "steps[0].message: Input"),
        (FORMS["adp"] | {"content": [{"class_": "api_action", "function": "f"}]}, "content[0].kwargs: Field required"),
        ({"messages": [{"role": ["user"], "content": "u"}]}, "has [\"user\"] as its role, which is a text"),
        ({"data": [], "version": 1}, "kind = 'jsonl'"),
        ({"id": 1, "content": "plain"}, "none of the known forms"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_the_nearest_form(record: Any, said: str) -> None:
    with pytest.raises(ConversationError) as error:
        read_record(record)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).count("prompt and completion") <= 1


@pytest.mark.parametrize("field", ["messages", "conversations", "prompt"])
@pytest.mark.parametrize(
    "turn", [{"speaker": "user", "content": "u"}, ASKED | {"train_detail": [1]}]
)
def test_what_errors_say_of_columns_helps(field: str, turn: dict[str, Any]) -> None:
    answer = {"speaker": "assistant", "content": "a"} if "speaker" in turn else SAID
    record = (
        {"prompt": [turn], "completion": [answer]}
        if field == "prompt"
        else {field: [turn, answer]}
    )
    with pytest.raises(ConversationError) as error:
        read_record(record)
    columns = tomllib.loads(
        "data.columns = {" + str(error.value).rpartition("data.columns = {")[2]
    )["data"]["columns"]
    found = read_record(Renaming(columns, {})(record))
    assert [(m["role"], m["content"]) for m in found.messages] == [
        ("user", "u"),
        ("assistant", "a"),
    ]
