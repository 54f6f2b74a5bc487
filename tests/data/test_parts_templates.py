"""Templates that read a content only as a list of parts, as those of models that also see images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.chats import TEMPLATES, save_tokenizer
from tests.serve.inprocess import serving
from weft.data.chat.chat_template import ChatTemplate
from weft.data.chat.conversation import conversation
from weft.data.chat.encode import ChatEncoder
from weft.data.tokenizer import Tokenizer, load_tokenizer

#: As SmolVLM's: of a text, each character is a part without a type, and so nothing is written.
SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
#: As LLaVA's, with a system turn that is a text, and generation tags.
LLAVA = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' }}"
    "{% if m.role == 'system' %}{{ m.content + '<|im_end|>' }}"
    "{% elif m.role == 'user' %}{% for c in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ '\n' + c['text'] }}{% endfor %}{{ '<|im_end|>' }}"
    "{% else %}{% for c in m.content | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ '\n' + c['text'] + '<|im_end|>' }}{% endgeneration %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: It writes calls, of an answer whose content it goes through.
CALLING = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    + SMOLVLM.replace("<|im_end|>\n{% endfor %}", "{% for c in message.tool_calls or [] %}"
    "<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}")
)  # fmt: skip
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "The user asks."},
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "In Paris."},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("parts")
    return load_tokenizer(str(save_tokenizer(folder, TEMPLATES["smollm2"])))


def as_parts(talk: list[dict[str, Any]], roles: tuple[str, ...]) -> list[Any]:
    return [
        m | {"content": [{"type": "text", "text": m["content"]}]}
        if m["role"] in roles
        else m
        for m in talk
    ]


@pytest.mark.parametrize(("text", "roles"), [
    (SMOLVLM, ("system", "user", "assistant")), (LLAVA, ("user", "assistant")),
    (CALLING, ("system", "user", "assistant")),
], ids=["smolvlm", "llava", "calling"])  # fmt: skip
def test_texts_are_written_and_learned(
    tokenizer: Tokenizer, text: str, roles: tuple[str, ...]
) -> None:
    """As from parts: they went unwritten, and conversations were refused."""
    template = ChatTemplate(text, replace(tokenizer, chat_template=text))
    shown = template.render(TALK)
    for message in TALK:
        assert shown.text.count(message["content"]) == 1
    assert shown.text == template.render(as_parts(TALK, roles)).text
    encoded = ChatEncoder(template).encode(conversation(TALK))
    learned = [shown.text[span.start : span.end].strip() for span in encoded.spans]
    assert learned == ["The user asks.<|im_end|>", "In Paris.<|im_end|>"]
    again = ChatEncoder(template).encode(conversation(as_parts(TALK, roles)))
    assert list(again.ids) == list(encoded.ids)
    assert list(again.weights) == list(encoded.weights)
    everywhere = as_parts(TALK, ("system", "user", "assistant"))
    assert template.render(everywhere).text == shown.text


def test_texts_stay_texts_where_they_are_read(tokenizer: Tokenizer) -> None:
    for family in TEMPLATES.values():
        template = ChatTemplate(
            family.template, replace(tokenizer, chat_template=family.template)
        )
        assert not template._needing_parts


def test_calls_and_what_tools_answer(tokenizer: Tokenizer) -> None:
    call = {"function": {"name": "f", "arguments": {"a": "b"}}, "type": "function"}
    talk = [
        TALK[1],
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "21 degrees"},
        TALK[4],
    ]
    template = ChatTemplate(CALLING, replace(tokenizer, chat_template=CALLING))
    text = template.render(talk).text
    for words in (
        "Who?",
        '{"name": "f", "arguments": {"a": "b"}}',
        "21 degrees",
        "In Paris.",
    ):
        assert text.count(words) == 1, text
    encoded = ChatEncoder(template).encode(conversation(talk))
    assert len(encoded.spans) == 2


def test_a_server_writes_them() -> None:
    with serving(CALLING) as served:

        def prompt(messages: list[Any]) -> str:
            answer = served.client.post("/tokenize", json={"messages": messages})
            assert answer.status_code == 200, answer.text
            return bytes(answer.json()["tokens"]).decode()

        text = prompt(TALK[:2])
        assert "Be brief." in text and "Who?" in text and text.endswith("Assistant:")
        assert text == prompt(as_parts(TALK[:2], ("user",)))
        tool = {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object"}},
        }
        asked = {"messages": TALK[1:2], "tools": [tool], "max_tokens": 2}
        answer = served.client.post("/v1/chat/completions", json=asked)
        assert answer.status_code == 200, answer.text
        more = {"messages": TALK[:3], "max_tokens": 2, "continue_final_message": True}
        answer = served.client.post("/v1/chat/completions", json=more)
        assert answer.status_code == 200, answer.text
