"""Which turn stands between generation tags, where a template has several for a turn, or some around no words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import chats
from tests.data.test_chat_turns import SPECIALS, Message, learned_runs
from weft.data.chat.chat_template import ChatTemplate, TemplateError
from weft.data.chat.conversation import conversation
from weft.data.chat.encode import ChatEncoder
from weft.data.tokenizer import Tokenizer, load_tokenizer

#: As TRL's for Phi-3: the text ends with a token of its own, which is the model's to write.
ENDED = """\
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}
{%- endfor %}
{%- generation %}{{ '<|endoftext|>' }}{% endgeneration %}
"""
#: As TRL's for Gemma 4: parts of a turn have tags of their own, also empty ones, and turns follow without a header.
PARTS = """\
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{ m.reasoning_content or '' }}{% endgeneration %}
        {%- generation %}{{ m.content }}{% endgeneration %}
        {%- if loop.last or messages[loop.index].role != 'assistant' %}
            {%- generation %}{{ '<|im_end|>' }}{% endgeneration %}
        {%- endif %}
    {%- else %}{{- '<|im_start|>' + m.content + '<|im_end|>' }}{%- endif %}
{%- endfor %}
"""
QUESTION = {"role": "user", "content": "q"}


def answer(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text} | more


#: A template, a conversation, and what is learned of each of its answers alone.
CASES: dict[str, tuple[str, list[Message], dict[int, list[str]]]] = {
    "the end of all": (
        ENDED, [QUESTION, answer("a"), QUESTION, answer("b")],
        {1: ["a<|im_end|>"], 3: ["b<|im_end|><|endoftext|>"]},
    ),
    "an empty tag": (
        PARTS, [QUESTION, answer("a"), QUESTION, answer("b", reasoning_content="hm")],
        {1: ["a<|im_end|>"], 3: ["hmb<|im_end|>"]},
    ),
    "answers that touch": (
        PARTS, [QUESTION, answer("a"), answer("b"), answer("c")], {1: ["a"], 2: ["b"], 3: ["c<|im_end|>"]},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tagged")
    return load_tokenizer(str(chats.save_tokenizer(folder, chats.Family("", SPECIALS))))


@pytest.mark.parametrize("name", CASES)
def test_each_turn_is_learned_by_its_own_mask(base: Tokenizer, name: str) -> None:
    template, talk, right = CASES[name]
    encoder = ChatEncoder(ChatTemplate(template, base))
    for number, runs in right.items():
        masked = [
            message | {"weight": int(i == number)}
            if message["role"] == "assistant"
            else message
            for i, message in enumerate(talk)
        ]
        assert learned_runs(encoder.encode(conversation(masked))) == runs
    whole = "".join(text for runs in right.values() for text in runs)
    assert "".join(learned_runs(encoder.encode(conversation(talk)))) == whole


def test_masks_are_those_of_transformers(base: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    base.save(tmp_path)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    for template, talk, _ in CASES.values():
        given = theirs.apply_chat_template(
            talk,
            chat_template=template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        encoded = ChatEncoder(ChatTemplate(template, base)).encode(conversation(talk))
        assert encoded.ids.tolist() == given["input_ids"]
        assert (encoded.weights > 0).astype(int).tolist() == given["assistant_masks"]


def test_a_tag_that_may_be_of_two_turns_is_refused(base: Tokenizer) -> None:
    # The template leaves the words of a call out, and its end of turn might belong to the answer before.
    call = {"function": {"name": "f", "arguments": {}}}
    silent = {"role": "assistant", "content": "", "tool_calls": [call], "weight": 0}
    talk = [QUESTION, answer("a"), silent]
    template = PARTS.replace(
        "loop.last or messages[loop.index].role != 'assistant'", "true"
    ).replace("m.content }}{% end", "m.content or '' }}{% end")
    encoder = ChatEncoder(ChatTemplate(template, base))
    with pytest.raises(TemplateError, match="is not certain"):
        encoder.encode(conversation(talk))
