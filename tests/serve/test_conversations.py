"""Live conversations: the server reads its own answers, goes on with them, and parts reasoning, calls and text."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from tests.serve.inprocess import InProcess, serving
from tests.serve.test_call_finder import (
    ASKED,
    CITY,
    DEAF,
    HERMES,
    LLAMA,
    MISTRAL,
    TIME,
    WEATHER,
    form_of,
)
from weft.data.chat.chat_template import ChatTemplate
from weft.data.chat.reasoning import (
    ReasoningFinder,
    Thoughts,
    begins_thinking,
    thoughts_of,
)
from weft.data.tokenizer import load_tokenizer
from weft.generate.backend import TokenEvent
from weft.serve.answering import AnswerForm, AnswerReader
from weft.serve.call_finder import CallFinder, CallPiece
from weft.serve.messages import arguments_of, read_live
from weft.serve.prompts import as_written, continued
from weft.serve.protocol import ChatRequest

#: A template that writes reasoning, and begins it where ``enable_thinking`` does not say otherwise.
THINKING = (
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: "
    "{% if enable_thinking is undefined or enable_thinking %}<think>\n{% endif %}{% endif %}"
)
SHAPE = {
    "type": "object",
    "properties": {"age": {"enum": [7, 70]}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def served() -> Iterator[InProcess]:
    with serving(HERMES) as served:
        yield served


def ask(served: InProcess, **asked: Any) -> Any:
    answer = served.client.post(
        "/v1/chat/completions", json={"messages": ASKED, "max_tokens": 8} | asked
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def prompt_of(served: InProcess, **asked: Any) -> str:
    answer = served.client.post("/tokenize", json={"messages": ASKED} | asked)
    assert answer.status_code == 200, answer.text
    return bytes(i for i in answer.json()["tokens"] if i < 256).decode()


texts = st.sampled_from(
    ["", " ", "words", None, [{"type": "text", "text": "a part"}], []]
)
arguments = st.sampled_from(
    [
        "{}",
        "",
        None,
        {},
        {"city": "Oslo"},
        '{"city": "Os',
        '"{\\"city\\": 1}"',
        '"',
        "[1]",
        "null",
        7,
    ]
)
calls = st.builds(
    lambda name, given, number: {"id": number, "type": "function", "function": {"name": name, "arguments": given}},
    st.sampled_from(["get_time", "unknown"]), arguments, st.sampled_from(["call_1", "", None]),
)  # fmt: skip
answers = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": texts},
    optional={
        "tool_calls": st.one_of(st.none(), st.lists(calls, max_size=3)), "refusal": st.none(),
        "annotations": st.just([]),
        "reasoning_content": st.sampled_from([None, "", "I think"]), "function_call": st.none(), "audio": st.none(),
    },
)  # fmt: skip
others = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "system", "developer", "tool", "function"]),
        "content": texts,
    },
    optional={
        "tool_call_id": st.sampled_from(["call_1", "nobody's", None]),
        "name": st.sampled_from([None, "x"]),
    },
)


FORMS = {
    template: (form_of(template), ChatTemplate(template, load_tokenizer("bytes")))
    for template in (HERMES, LLAMA, MISTRAL, DEAF, THINKING)
}


@settings(max_examples=60, deadline=None)
@given(talk=st.lists(st.one_of(answers, others), min_size=1, max_size=5),
       template=st.sampled_from([*FORMS]))  # fmt: skip
def test_whatever_was_answered_is_read_and_written_by_every_template(
    talk: list[Any], template: str
) -> None:
    form, known = FORMS[template]
    read = [as_written(message, form) for message in read_live(talk)]
    assert all(isinstance(message["content"], str) for message in read)
    if form:
        given = [
            call["function"]["arguments"]
            for message in read
            for call in message.get("tool_calls", ())
        ]
        assert all(isinstance(each, dict) for each in given)
    assert known.render(read, None, prompt=True).text.count("assistant: ") >= 1


@pytest.mark.parametrize(("given", "value"), [
    ('{"a": 1}', {"a": 1}), ('"{\\"a\\": 1}"', {"a": 1}), ("", {}), (None, {}), ("null", {}),
    ({"a": None}, {"a": None}),
    ('{"a": ', '{"a": '), ("[1]", "[1]"), (7, 7),
])  # fmt: skip
def test_arguments_are_objects_where_they_can_be(given: Any, value: Any) -> None:
    assert arguments_of(given) == value


def test_a_call_that_was_cut_comes_back_as_the_model_wrote_it() -> None:
    """Both as whole answers have it, which is text, and as streams do, which is a call."""
    form = form_of(HERMES)
    assert form is not None
    cut = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "U'
    call = {
        "type": "function",
        "function": {"name": "get_time", "arguments": '{"zone": "U'},
    }
    (message,) = read_live(
        [{"role": "assistant", "content": "Well. ", "tool_calls": [call]}]
    )
    assert as_written(message, form) == {"role": "assistant", "content": f"Well. {cut}"}


@pytest.mark.parametrize(("message", "said"), [
    ({"role": "nobody", "content": "x"}, "message 0 has the unknown role \"nobody\""), (3, "message 0 is 3"),
    ({"content": "x"}, "message 0 has no role"), ({"role": "user", "content": 5}, "has 5 as 'content'"),
    ({"role": "user", "content": [{"type": "image_url"}]}, "only parts of type 'text' are read"),
    ({"role": "assistant", "tool_calls": [{"function": {}}]}, "which names no function"),
    ({"role": "assistant", "audio": {"id": "x"}}, "has 'audio'"),
    ({"role": "user"}, "has no 'content'; give it one"), ({"role": "user", "contents": "x"}, "in place of 'contents'"),
    ({"role": "system", "text": "x"}, "in place of 'text'"),
])  # fmt: skip
def test_what_is_no_message_is_named(
    served: InProcess, message: Any, said: str
) -> None:
    answer = served.client.post("/v1/chat/completions", json={"messages": [message]})
    error = answer.json()["error"]
    assert (
        answer.status_code == 400
        and error["param"] == "messages"
        and said in error["message"]
    ), answer.text


def test_developers_are_the_system_where_a_template_knows_none(
    served: InProcess,
) -> None:
    talk = [{"role": "developer", "content": "Be brief."}, *ASKED]
    assert prompt_of(served, messages=talk) == "system: Be brief.user: ?assistant: "
    with serving("{# developer #}" + DEAF) as other:
        assert prompt_of(other, messages=talk).startswith("developer: Be brief.")


@pytest.mark.parametrize("words", ["Let me", "Let me ", " so\n", "a user: b"])
def test_a_last_message_goes_on(served: InProcess, words: str) -> None:
    talk = [
        *ASKED,
        {"role": "assistant", "content": "Yes."},
        *ASKED,
        {"role": "assistant", "content": words},
    ]
    told = {
        "messages": talk,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    assert (
        prompt_of(served, **told) == f"user: ?assistant: Yes.user: ?assistant: {words}"
    )
    assert prompt_of(served, messages=talk, add_generation_prompt=False).endswith(words)
    assert ask(served, **told, temperature=0, max_tokens=3)["finish_reason"] == "length"
    refused = served.client.post(
        "/v1/chat/completions", json={"messages": ASKED, "continue_final_message": True}
    )
    assert (
        refused.status_code == 400
        and "which the last message lacks" in refused.json()["error"]["message"]
    )


CHATML = (
    "{% for m in messages %}{{ '[S]' + m.role + '\\n' + m.content | trim + '[E]\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[S]assistant\\n' }}{% endif %}"
)
REASONING = (
    "{% for m in messages %}{{ '[S]' + m.role + '\\n' }}{% set c = m.content %}{% if '</think>' in c %}"
    "{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}{% if m.role == 'assistant' %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ c + '[E]\\n' }}{% endfor %}"
)


@pytest.mark.parametrize("template", [CHATML, REASONING])
@pytest.mark.parametrize(
    "words",
    ["Let me", "Let me ", "  a", "x\n", "Hi Hi", "<think>\nno\n</think>\n\nbar"],
)
def test_a_last_message_goes_on_as_transformers_lets_it(
    template: str, words: str
) -> None:
    talk = read_live(
        [
            {"role": "user", "content": "Let me a x"},
            {"role": "assistant", "content": words},
        ]
    )
    own = continued(ChatTemplate(template, load_tokenizer("bytes")), talk, (), {}).text
    # whose words are not all written, which transformers refuses
    if "</think>" in words and template == REASONING:
        assert own.endswith("\n\nbar")
        return
    (theirs,), _ = render_jinja_template(
        [talk], chat_template=template, continue_final_message=True
    )
    assert own == theirs


def test_what_a_template_does_not_read_is_logged(
    served: InProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "weft.serve"):
        for _ in range(2):
            ask(served, reasoning_effort="low", chat_template_kwargs={"colour": "red"})
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "requests have fields that change nothing here: colour, reasoning_effort"
    ]


def test_requests_tell_the_template_more() -> None:
    with serving(THINKING + "{{ mood }}") as served:
        assert prompt_of(served) == "user: ?\nassistant: <think>\n"
        told = {"chat_template_kwargs": {"enable_thinking": False, "mood": "calm"}}
        assert (
            prompt_of(served, **told)
            == prompt_of(served, **told | {"reasoning_effort": "none"})
            != prompt_of(served)
        )
        assert prompt_of(served, **told).endswith("assistant: calm")
        assert prompt_of(served, reasoning_effort="none") == "user: ?\nassistant: "


@pytest.mark.parametrize("opening", ["", "<think>"])
def test_a_template_without_a_variable_has_its_reasoning_closed(
    opening: str, caplog: pytest.LogCaptureFixture
) -> None:
    template = "{{ messages[-1].content.split('</think>')[-1] }}\nassistant: " + opening
    with serving(template) as served:
        closed = "?\nassistant: <think>\n\n</think>\n\n"
        assert prompt_of(served) == "?\nassistant: " + opening
        assert prompt_of(served, reasoning_effort="none") == closed
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        assert prompt_of(served, **off) == closed
        with caplog.at_level(logging.WARNING, "weft.serve"):
            answer = ask(served, **off)["message"]
        assert not caplog.records and "reasoning_content" not in answer
        assert prompt_of(served, reasoning_effort="low") == prompt_of(served)


THOUGHT = Thoughts("<think>", "</think>")


@pytest.mark.parametrize(("begun", "text", "thought", "answer"), [
    (False, "<think>\nIt is 4. </think>\n\nFour.", "It is 4.", "Four."), (False, "Four <think>.", "", "Four <think>."),
    (True, "\nIt < 5 </thin\n</think>Four. ", "It < 5 </thin", "Four. "), (True, "It is cut", "It is cut", ""),
    (False, "  <think>a</think>  ", "a", ""), (False, "<thi", "", "<thi"), (False, "  x ", "", "  x "),
    (True, "", "", ""),
    (False, "<think></think>Four.", "", "Four."), (True, "a</think>b</think>c", "a", "b</think>c"),
])  # fmt: skip
def test_reasoning_is_parted_however_it_comes(
    begun: bool, text: str, thought: str, answer: str
) -> None:
    for size in (1, 2, 3, 7, len(text) or 1):
        finder = ReasoningFinder(THOUGHT._replace(begun=begun))
        pieces = [
            finder.add(text[at : at + size]) for at in range(0, len(text), size)
        ] + [finder.end()]
        assert ("".join(t for t, _ in pieces), "".join(a for _, a in pieces)) == (
            thought,
            answer,
        ), size


def test_templates_that_think_are_known() -> None:
    thoughts = thoughts_of(THINKING)
    assert thoughts == THOUGHT and thoughts_of(HERMES) is None
    assert begins_thinking(THOUGHT, "assistant: <think>\n") and not begins_thinking(
        THOUGHT, "<think></think>\n"
    )
    assert begins_thinking(THOUGHT, "<think>so", "<think>so") and not begins_thinking(
        THOUGHT, "", "<think>a</think>b"
    )


def test_reasoning_is_in_a_field_of_its_own_whole_and_streamed() -> None:
    """Of a model with random weights, which closes no tag: all of it is reasoning until it is cut."""
    with serving(THINKING) as served:
        choice = ask(served, temperature=0)
        assert (
            choice["message"]["reasoning_content"]
            and choice["message"]["content"] == ""
        )
        body = {"messages": ASKED, "max_tokens": 8, "temperature": 0, "stream": True}
        lines = served.client.post("/v1/chat/completions", json=body).text.split(
            "\n\n"
        )[:-2]
        deltas = [
            json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
            for line in lines
        ]
        parts = [delta.get("reasoning_content", "") for delta in deltas]
        assert (
            "".join(parts) == choice["message"]["reasoning_content"]
            and deltas[0]["role"] == "assistant"
        )
        assert not any(delta.get("content") for delta in deltas)
        usage = served.client.post(
            "/v1/chat/completions", json=body | {"stream": False}
        ).json()["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 8}
        item = served.client.post(
            "/v1/responses",
            json={"input": "?", "max_output_tokens": 8, "temperature": 0},
        ).json()
        assert [part["type"] for part in item["output"]] == ["reasoning"], (
            "which comes back as it is"
        )
        talk = [
            {"role": "user", "content": "?"},
            *item["output"],
            {"role": "assistant", "content": "4"},
        ]
        assert (
            served.client.post(
                "/v1/responses", json={"input": talk, "max_output_tokens": 2}
            ).status_code
            == 200
        )
        shaped = ask(served, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SHAPE}},
                     max_tokens=300)  # fmt: skip
        jsonschema.validate(json.loads(shaped["message"]["content"]), SHAPE)


def read_all(text: str, form: AnswerForm, stream: bool = False) -> Any:
    """What an answer's characters are read as, and how many of them it took."""
    asked = ChatRequest.model_validate({"messages": ASKED, "stream": stream})
    reader, news = AnswerReader(asked, load_tokenizer("bytes"), form), []
    for number, byte in enumerate(text.encode()):
        news.append(
            reader.read(
                TokenEvent(0, byte, None, "stop" if number == len(text) - 1 else "")
            )
        )
        if news[-1].finish:
            break
    whole = news[0]._replace(events=[], calls=[])
    for new in news:
        whole = whole.joined(new._replace(text="" if new is news[0] else new.text))
    return whole, len(news)


CALL = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_with_its_first_call_where_calls_come_one_by_one(
    stream: bool,
) -> None:
    form = AnswerForm(form_of(HERMES), ["get_time"], 1)
    whole, read = read_all(f"So: {CALL}\n{CALL} and more", form, stream)
    assert [call.name for call in whole.calls if call.name] == [
        "get_time"
    ] and whole.finish == "tool_calls"
    assert whole.text == "So: " and read < len("So: ") + len(CALL)
    many, _ = read_all(f"{CALL}\n{CALL}", form._replace(most=None), stream)
    assert [call.name for call in many.calls if call.name] == ["get_time"] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("template", [HERMES, LLAMA, MISTRAL])
def test_a_name_that_is_no_tools_is_no_call(template: str, stream: bool) -> None:
    form = form_of(template)
    assert form is not None
    call = form.cut("nothing", "{}") + form.behind
    finder = CallFinder(form, stream, ["get_time"])
    shown = "".join(finder.add(char)[0] for char in call)
    rest, pieces, finish = finder.end("stop")
    assert (shown + rest, pieces, finish, finder.calls) == (call, [], "stop", [])


def test_arguments_that_are_text_of_text_go_out_as_an_object() -> None:
    form = form_of(HERMES)
    assert form is not None
    finder = CallFinder(form, names=["a"])
    finder.add('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>')
    assert finder.end("stop") == ("", [CallPiece(0, "a", '{"x": 1}')], "tool_calls")


@pytest.mark.parametrize(
    ("template", "begins"),
    [(HERMES, "{<"), (LLAMA, "an"), (MISTRAL, "{[")],
    ids=["hermes", "llama", "mistral"],
)
def test_an_answer_is_a_call_or_has_its_form(template: str, begins: str) -> None:
    """Of random weights, that a bias draws to the characters with which the form begins, or else a call."""
    shape: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SHAPE}}
    blanks = dict.fromkeys(map(str, b" \n\t\r"), -9)
    ends = list[str]()
    with serving(template) as served:
        for char in begins:
            asked = {
                "tools": [WEATHER, TIME],
                "response_format": shape,
                "logit_bias": blanks | {str(ord(char)): 30},
            }
            choice = ask(served, **asked, max_tokens=600, seed=3)
            ends.append(choice["finish_reason"])
            if choice["finish_reason"] == "tool_calls":
                (call,) = choice["message"]["tool_calls"]
                if call["function"]["name"] == "get_weather":
                    jsonschema.validate(json.loads(call["function"]["arguments"]), CITY)
            else:
                jsonschema.validate(json.loads(choice["message"]["content"]), SHAPE)
    assert ends == ["stop", "tool_calls"]


def test_so_many_tokens_come_before_any_end(served: InProcess) -> None:
    ending = {"logit_bias": {"256": 100}, "temperature": 0}
    for least in (0, 1, 5):
        answer = served.client.post(
            "/v1/completions", json={"prompt": "x", "min_tokens": least} | ending
        ).json()
        assert (
            answer["usage"]["completion_tokens"] == least
            and answer["choices"][0]["finish_reason"] == "stop"
        )
    (plain,) = served.client.post(
        "/v1/completions", json={"prompt": "x", "temperature": 0}
    ).json()["choices"]
    asked = {"prompt": "x", "temperature": 0, "stop": plain["text"][0], "min_tokens": 3}
    (choice,) = served.client.post("/v1/completions", json=asked).json()["choices"]
    assert choice["text"].startswith(plain["text"][:2])


def test_vectors_have_as_many_numbers_as_are_asked_for(served: InProcess) -> None:
    def vector(**asked: Any) -> Any:
        answer = served.client.post("/v1/embeddings", json={"input": "a text"} | asked)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"][0]["embedding"]

    whole, half = vector(), vector(dimensions=16)
    length = sum(x * x for x in whole[:16]) ** 0.5
    assert len(whole) == 32 and half == pytest.approx(
        [x / length for x in whole[:16]], abs=1e-6
    )
    refused = served.client.post(
        "/v1/embeddings", json={"input": "x", "dimensions": 33}
    )
    assert (
        refused.status_code == 400
        and refused.json()["error"]["message"]
        == "dimensions: a vector has 32 numbers, not 33"
    )
