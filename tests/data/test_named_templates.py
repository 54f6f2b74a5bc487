"""Tokenizers with several chat templates, and templates that take calls of tools in their own way, as transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import chats
from weft.data.chat.chat_template import ChatTemplate
from weft.data.chat.conversation import conversation
from weft.data.chat.encode import ChatEncoder, own_encoder, prompt_ids
from weft.data.chat.source import open_chats
from weft.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_files
from weft.errors import WeftError
from weft.models.hugging_face import tokenizer_files
from weft.recipe import Chat, Source
from weft.recipe.named_templates import NAMED_FOLDER

TOOLS = [
    {"type": "function", "function": {"name": "sky", "parameters": {"type": "object"}}}
]
CALL = {
    "type": "function",
    "function": {"name": "sky", "arguments": {"town": "Oslo", "n": 2}},
}
AGENT: list[dict[str, Any]] = [
    {"role": "user", "content": "rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "no"},
    {"role": "assistant", "content": "dry"},
]
PLAIN = chats.turns("hi", "there")
NAMED = {
    "default": chats.SMOLLM2,
    "tool_use": chats.QWEN25,
    "rag": "{{ messages | length }}",
}


def write_as(kind: str, folder: Path) -> None:
    """Write a tokenizer with the templates of :data:`NAMED`, in one of the ways in which they are published."""
    chats.save_tokenizer(folder, chats.TEMPLATES["qwen2.5"])
    if kind == "files":
        (folder / NAMED_FOLDER).mkdir()
        (folder / "chat_template.jinja").write_text(NAMED["default"])
        for name in ("tool_use", "rag"):
            (folder / NAMED_FOLDER / f"{name}.jinja").write_text(NAMED[name])
        return
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": name, "template": text} for name, text in NAMED.items()
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", ["list", "files"])
def test_the_template_for_tools_is_used_where_there_are_tools(
    tmp_path: Path, kind: str
) -> None:
    from transformers import AutoTokenizer

    write_as(kind, tmp_path / "own")
    own = load_tokenizer(str(tmp_path / "own"))
    own.save(tmp_path / "again")  # as a checkpoint and an export have it
    carried = tokenizer_from_files(tokenizer_files(tmp_path / "own"), "a model")
    assert {"default": own.chat_template, **own.named_templates} == NAMED
    theirs = [
        AutoTokenizer.from_pretrained(tmp_path / name) for name in ("own", "again")
    ]
    record = tmp_path / "talks.jsonl"
    for tokenizer in (own, carried, load_tokenizer(str(tmp_path / "again"))):
        assert tokenizer.named_templates == own.named_templates
        for messages, tools in ((PLAIN, None), (AGENT, TOOLS)):
            encoded = own_encoder(tokenizer, "a model").encode(
                conversation(messages, tools)
            )
            asked = prompt_ids(tokenizer, messages[:-1], True, "a model", tools)
            record.write_text(json.dumps({"messages": messages, "tools": tools}))
            trained = open_chats(
                Source(kind="chat", path=str(record)),
                Chat(),
                tokenizer,
                tmp_path / "cache",
            )
            for other in theirs:
                ids = other.apply_chat_template(
                    messages, tools=tools, return_dict=True
                )["input_ids"]
                assert encoded.ids.tolist() == ids == trained.ids.tolist()
                prompt = other.apply_chat_template(
                    messages[:-1],
                    tools=tools,
                    add_generation_prompt=True,
                    return_dict=True,
                )
                assert asked == prompt["input_ids"]


def test_a_tokenizer_may_have_a_template_for_tools_alone(tmp_path: Path) -> None:
    chats.save_tokenizer(tmp_path, chats.TEMPLATES["qwen2.5"])
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / NAMED_FOLDER).mkdir()
    (tmp_path / NAMED_FOLDER / "tool_use.jinja").write_text(chats.QWEN25)
    encoder = own_encoder(load_tokenizer(str(tmp_path)), "a model")
    assert encoder.encode(conversation(AGENT, TOOLS)).weights.any()
    with pytest.raises(WeftError, match="none for conversations without tools"):
        encoder.encode(conversation(PLAIN))
    (tmp_path / NAMED_FOLDER / "tool_use.jinja").write_bytes(b"\xff")
    with pytest.raises(WeftError, match=r"chat templates in .* cannot be read"):
        load_tokenizer(str(tmp_path))


#: As DeepSeek's: arguments are put behind other text, and calls are written only where the content is none.
AS_TEXT = """\
{%- for m in messages %}
    {%- if m.role in ('user', 'tool') %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}
    {%- elif m['content'] is none %}
        {{- '<|im_start|>assistant\n' }}
        {%- for call in m.tool_calls %}CALL{%- endfor %}
        {{- '<|im_end|>' }}
    {%- else %}{{- '<|im_start|>assistant\n' + m.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
STYLES = {
    "text": "{{- call.function.name + ' ```json\n' + call.function.arguments + '\n```' }}",
    "object": "{{- call.function.name }}{%- for k, v in call.function.arguments.items() %}{{- ' ' + k + '=' }}"
    "{{- v | tojson }}{%- endfor %}",
    "either": "{{- call.function.name + ' ' }}{{- call.function.arguments if call.function.arguments is string else "
    "call.function.arguments | tojson }}",
    "json": "{{- call.function | tojson }}",
}
TEMPLATES = {name: AS_TEXT.replace("CALL", style) for name, style in STYLES.items()}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("calls")
    return load_tokenizer(str(chats.save_tokenizer(folder, chats.TEMPLATES["qwen2.5"])))


def talk_of(arguments: Any, content: Any = "absent") -> list[dict[str, Any]]:
    """A conversation with one call, whose turn has ``content``."""
    call = CALL | {"function": {"name": "sky", "arguments": arguments}}
    said = {"role": "assistant", "tool_calls": [call]} | (
        {} if content == "absent" else {"content": content}
    )
    return [AGENT[0], said, *AGENT[2:]]


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([*TEMPLATES]),
    st.sampled_from([{}, {"town": "Oslo"}, {"a": {"b": [1, None]}, "é": "\"\n"}, {"n": 2}]),
    st.sampled_from(["absent", None, ""]), st.sampled_from(["object", "text", "spaced"]),
)  # fmt: skip
def test_templates_get_calls_as_they_take_them(
    tokenizer: Tokenizer, style: str, arguments: Any, content: Any, form: str
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    text = json.dumps(
        arguments, ensure_ascii=False, indent=1 if form == "spaced" else None
    )
    given = arguments if form == "object" else text
    right = talk_of(text if style == "text" else arguments, None)
    (wanted,), _ = render_jinja_template([right], chat_template=TEMPLATES[style])
    own = ChatTemplate(TEMPLATES[style], tokenizer)
    assert own.render(conversation(talk_of(given, content)).messages).text == wanted
    # as generation gives it, unchecked
    assert own.render(talk_of(given, content)).text == wanted


@pytest.mark.parametrize("style", TEMPLATES)
def test_calls_in_any_form_are_learned(tokenizer: Tokenizer, style: str) -> None:
    encoder = ChatEncoder(ChatTemplate(TEMPLATES[style], tokenizer))
    for arguments in ({"town": "Oslo"}, {"n": 2}, {}, '{"town":"Oslo"}'):
        encoded = encoder.encode(conversation(talk_of(arguments)))
        first, second = (encoded.text[span.start : span.end] for span in encoded.spans)
        assert (
            "sky" in first
            and first.endswith("<|im_end|>")
            and second == "dry<|im_end|>"
        )
        assert "<|im_start|>" not in first and encoded.text.count(first) == 1
        assert encoded.text[: encoded.spans[0].start].endswith("assistant\n")
        if isinstance(arguments, str):
            assert (arguments in first) == (style == "text")
