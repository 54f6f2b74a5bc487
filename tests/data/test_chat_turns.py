"""Exactly what the assistant writes is learned, with what ends its turns: of generated templates and conversations.

The oracle (:func:`written`) writes a conversation in pieces as the template should, and says of each whether it is
learned; it knows nothing of how :mod:`weft.data.chat` finds turns.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests import chats
from weft.data.chat.chat_template import ChatTemplate
from weft.data.chat.conversation import conversation
from weft.data.chat.encode import ChatEncoder, Encoded
from weft.data.tokenizer import Tokenizer, load_tokenizer
from weft.errors import WeftError

Message = dict[str, Any]
#: The user's, the assistant's and the closing token of DeepSeek's, which are not written in ASCII.
DEEPSEEK = tuple(
    f"<\uff5c{name}\uff5c>"
    for name in ("User", "Assistant", "end\u2581of\u2581sentence")
)
SPECIALS = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]",
    "[/INST]", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>",
    "<|end|>", "<|tool|>",
    *DEEPSEEK, "<|endoftext|>",
)  # fmt: skip


@dataclass(frozen=True)
class Style:
    """How a family writes turns. ``opens``: by role; ``closes``: of each of them, and ``after`` it.

    ``stops``: at which tokens generation ends. ``lead``: before an answer, the model's to write. ``prefix``: of
    reasoning, behind the prompt. ``system``: as a turn, before the first words of the user's, or left out.
    """

    opens: dict[str, str]
    close: str
    user_close: str
    after: str
    stops: tuple[str, ...]
    lead: str = ""
    first: str = ""
    prefix: str = ""
    prompt: bool = True
    system: str = "turn"
    final: str = ""


def _same(
    form: str, assistant: str = "assistant", tool: str = "tool"
) -> dict[str, str]:
    names = {"system": "system", "user": "user", "assistant": assistant, "tool": tool}
    return {role: form.format(name) for role, name in names.items()}


FAMILIES = {
    "chatml": Style(_same("<|im_start|>{}\n"), "<|im_end|>", "<|im_end|>", "\n", ("<|im_end|>",)),
    "llama3": Style(
        _same("<|start_header_id|>{}<|end_header_id|>\n\n", tool="ipython"), "<|eot_id|>", "<|eot_id|>", "",
        ("<|eot_id|>",), first="<s>",
    ),
    "mistral": Style(
        {"system": "[INST] ", "user": "[INST] ", "assistant": "", "tool": "[INST] "}, "</s>", " [/INST]", "", ("</s>",),
        lead=" ", first="<s>", prompt=False,
    ),
    "gemma": Style(
        _same("<start_of_turn>{}\n", "model"), "<end_of_turn>", "<end_of_turn>", "\n", ("<end_of_turn>",), first="<s>"
    ),
    "glm": Style(_same("<|{}|>\n", tool="observation"), "", "", "", ("<|endoftext|>", "<|user|>", "<|observation|>")),
    "deepseek": Style(
        {"system": "", "user": DEEPSEEK[0], "assistant": DEEPSEEK[1], "tool": DEEPSEEK[0]}, DEEPSEEK[2], "", "",
        DEEPSEEK[2:],
    ),
    "phi": Style(_same("<|{}|>\n"), "<|end|>", "<|end|>", "\n", ("<|end|>", "<|endoftext|>")),
    "alpaca": Style(
        {"system": "", "user": "### Instruction:\n", "assistant": "### Response:\n", "tool": "### Result:\n"}, "\n\n",
        "\n\n", "", ("</s>",),
    ),
    "alpaca-eos": Style(
        {"system": "", "user": "### Instruction:\n", "assistant": "### Response:\n", "tool": "### Result:\n"}, "</s>",
        "\n\n", "\n", ("</s>",),
    ),
}  # fmt: skip


def call_text(call: Message) -> str:
    function = call["function"]
    return f'<tool_call>{{"name": "{function["name"]}", "arguments": {json.dumps(function["arguments"])}}}</tool_call>'


def jinja(style: Style, tagged: bool = False) -> str:
    """The template of ``style``, with generation tags around what the assistant writes if it is ``tagged``."""

    def text(value: str) -> str:
        return "{{ " + json.dumps(value, ensure_ascii=False) + " }}"

    turns = []
    for role in ("user", "tool", "system"):
        lead = (
            "{% if loop.index0 == first.user %}{{ first.words }}{% endif %}"
            if role == "user"
            else ""
        )
        body = (
            text(style.opens[role])
            + lead
            + "{{ m.content }}"
            + text(style.user_close)
            + text(style.after)
        )
        turns.append(
            f"{{% elif m.role == '{role}' %}}{body if role != 'system' or style.system == 'turn' else ''}"
        )
    reasoning = "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n' }}{% endif %}"
    calls = (
        '{% for c in m.tool_calls %}{{ \'<tool_call>{"name": "\' + c.function.name + \'", "arguments": \' }}'
        "{{ c.function.arguments | tojson }}{{ '}</tool_call>' }}{% endfor %}"
    )
    answer = (
        text(style.lead) + reasoning + "{{ m.content }}" + calls + text(style.close)
    )
    answer = f"{{% generation %}}{answer}{{% endgeneration %}}" if tagged else answer
    assistant = text(style.opens["assistant"]) + answer
    head = "{% set first = namespace(user=-1, words='') %}"
    if style.system == "merged":
        head += (
            "{% for m in messages %}{% if m.role == 'user' and first.user < 0 %}{% set first.user = loop.index0 %}"
            "{% elif m.role == 'system' %}{% set first.words = first.words + m.content + '\n\n' %}{% endif %}"
            "{% endfor %}"
        )
    prompt = text(style.opens["assistant"] + style.prefix) if style.prompt else ""
    body = f"{{% if m.role == 'assistant' %}}{assistant}{text(style.after)}{''.join(turns)}"
    asked = f"{{% if add_generation_prompt %}}{prompt}{{% else %}}{text(style.final)}{{% endif %}}"
    return f"{head}{text(style.first)}{{% for m in messages %}}{body}{{% endif %}}{{% endfor %}}{asked}"


def learns(message: Message) -> bool:
    return bool(message["role"] == "assistant" and message.get("train", True))


def written(style: Style, messages: list[Message]) -> list[tuple[str, bool]]:
    """The pieces of text of a conversation, each with whether it is learned."""
    pieces = [(style.first, False)]
    lead = (
        "".join(m["content"] + "\n\n" for m in messages if m["role"] == "system")
        if style.system == "merged"
        else ""
    )
    kept = [m for m in messages if m["role"] != "system" or style.system == "turn"]
    for number, message in enumerate(kept):
        role = message["role"]
        ended = bool(number) and learns(kept[number - 1]) and not style.close
        opening = style.opens[role]
        stop = next((s for s in style.stops if ended and opening.startswith(s)), "")
        pieces += [(stop, True), (opening.removeprefix(stop), False)]
        if role == "assistant":
            reasoning = message.get("reasoning_content")
            answer = f"<think>\n{reasoning}\n</think>\n" if reasoning else ""
            answer = style.lead + answer + message.get("content", "")
            answer += "".join(call_text(call) for call in message.get("tool_calls", ()))
            shown = (
                style.prefix if style.prompt and answer.startswith(style.prefix) else ""
            )
            own = learns(message)
            # what follows an answer is then all that tells where it ends
            endless = own and not style.close.strip()
            pieces += [
                (shown, False),
                (answer.removeprefix(shown) + style.close, own),
                (style.after, endless),
            ]
        else:
            pieces.append(
                (
                    (lead if role == "user" else "")
                    + message["content"]
                    + style.user_close
                    + style.after,
                    False,
                )
            )
            lead = "" if role == "user" else lead
    ends = learns(kept[-1]) and not style.close.startswith(style.stops)
    return [*pieces, (style.final, ends)]


def runs(pieces: list[tuple[str, bool]]) -> list[str]:
    """The learned pieces, those in a row together."""
    kept = [piece for piece in pieces if piece[0]]
    return [
        "".join(text for text, _ in run)
        for learned, run in groupby(kept, key=lambda piece: piece[1])
        if learned
    ]


def learned_runs(encoded: Encoded) -> list[str]:
    """The learned spans, those that touch together."""
    found: list[list[int]] = []
    for span in sorted(encoded.spans):
        if found and found[-1][1] == span.start:
            found[-1][1] = span.end
        elif span.end > span.start:
            found.append([span.start, span.end])
    return [encoded.text[start:end] for start, end in found]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("turns")
    return load_tokenizer(str(chats.save_tokenizer(folder, chats.Family("", SPECIALS))))


def encoder_of(style: Style, base: Tokenizer) -> ChatEncoder:
    ends = tuple(base.specials[name] for name in style.stops)
    return ChatEncoder(ChatTemplate(jinja(style), replace(base, ends=ends)))


words = st.one_of(
    st.sampled_from(
        [
            "red",
            "<think>",
            "<|im_end|>\n<|im_start|>assistant\n",
            " a ",
            "[/INST] b</s>",
            "t\n",
            "<t",
            "\n",
        ]
    ),
    st.text(
        st.characters(blacklist_categories=["Cs", "Cc"], max_codepoint=0x4000),
        min_size=1,
        max_size=8,
    ),
)
said = words.filter(lambda text: bool(text.strip()))
arguments = st.sampled_from(
    [
        {},
        {"n": 2},
        {"a": None, "b": [1, True]},
        {"city": "Paris"},
        {"": "<|im_end|>"},
        {"a": {}},
    ]
)
calls = arguments.map(
    lambda value: {"type": "function", "function": {"name": "sky", "arguments": value}}
)
answers = st.one_of(
    st.fixed_dictionaries(
        {"content": said},
        optional={"reasoning_content": st.sampled_from(["hm", "so:\nyes"])},
    ),
    st.fixed_dictionaries(
        {"tool_calls": st.lists(calls, min_size=1, max_size=2)},
        optional={"content": said},
    ),
)
messages = st.one_of(
    st.builds(
        lambda m, train: {"role": "assistant"} | m | train,
        answers,
        st.sampled_from([{}, {}, {"train": False}]),
    ),
    st.builds(
        lambda role, text: {"role": role, "content": text},
        st.sampled_from(["user", "tool", "system"]),
        words,
    ),
)
talks = st.lists(messages, min_size=1, max_size=7).filter(
    lambda talk: any(map(learns, talk))
)
styles = st.builds(
    lambda style, after, prefix, system, prompt, final: replace(
        style, after=style.after if after is None else after, prefix=prefix if style.prompt else "", system=system,
        prompt=prompt and style.prompt, final=final and style.stops[0],
    ),
    st.sampled_from([*FAMILIES.values()]), st.sampled_from([None, None, "", "\n"]), st.sampled_from(["", "<think>\n"]),
    st.sampled_from(["turn", "merged", "none"]), st.sampled_from([True, True, False]), st.sampled_from(["", "", "end"]),
)  # fmt: skip

TWICE = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "red"},
         {"role": "assistant", "content": "blue"}, {"role": "user", "content": "go on"},
         {"role": "assistant", "content": "green"}]  # fmt: skip
EMPTY_CALL = [{"role": "user", "content": "hi"},
              {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": {}}}]},
              {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"": 1}}}]},
              {"role": "tool", "content": "noon"}, {"role": "assistant", "content": "12"}]  # fmt: skip
#: A system message at the end, which some templates write into the first turn.
LATE_SYSTEM = [
    {"role": "user", "content": "\n"},
    EMPTY_CALL[1],
    {"role": "system", "content": "red"},
]


@example(FAMILIES["chatml"], TWICE)
@example(replace(FAMILIES["chatml"], prefix="<think>\n"), EMPTY_CALL)
@example(FAMILIES["glm"], EMPTY_CALL)
@example(replace(FAMILIES["chatml"], prefix="<think>\n", prompt=True, system="merged"), LATE_SYSTEM)  # fmt: skip
@settings(deadline=None, max_examples=60)
@given(styles, talks)
def test_just_what_the_assistant_writes_is_learned(
    base: Tokenizer, style: Style, talk: list[Message]
) -> None:
    encoder = encoder_of(style, base)
    pieces = written(style, talk)
    try:
        encoded = encoder.encode(conversation(talk))
    except WeftError as error:
        # a later system message changes the first turn, so that prompts of fewer messages begin otherwise
        late = any(m["role"] == "system" for m in talk[1:])
        assert style.system == "merged" and late and "other messages" in str(error)
        return
    assert encoded.text == "".join(text for text, _ in pieces)
    assert learned_runs(encoded) == runs(pieces)


@pytest.mark.parametrize("name", FAMILIES)
def test_masks_are_those_of_transformers(
    base: Tokenizer, tmp_path: Path, name: str
) -> None:
    """With generation tags, and found without them: the same tokens are learned, and the same ids are written."""
    from transformers import AutoTokenizer

    # Tags say nothing of a token that belongs to the next turn.
    style = replace(FAMILIES[name], stops=FAMILIES[name].stops[:1])
    base.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    talks = [
        [{"role": "system", "content": "s"}, *TWICE],
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a b", "reasoning_content": "so:\nyes"},
         {"role": "user", "content": "more"}, {"role": "assistant", "content": " é 5 < 6"}],
        [EMPTY_CALL[0], EMPTY_CALL[1] | {"content": ""}, EMPTY_CALL[2] | {"content": ""}, *EMPTY_CALL[3:]],
    ]  # fmt: skip
    ends = tuple(base.specials[token] for token in style.stops)
    tokenizer = replace(base, ends=ends)
    tagged, plain = (
        ChatEncoder(ChatTemplate(jinja(style, tags), tokenizer))
        for tags in (True, False)
    )
    for talk in talks:
        given = theirs.apply_chat_template(
            talk,
            chat_template=jinja(style, True),
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        mask = [weight == 1 for weight in given["assistant_masks"]]
        for encoder in (tagged, plain):
            encoded = encoder.encode(conversation(talk))
            assert encoded.ids.tolist() == given["input_ids"]
            assert (encoded.weights > 0).tolist() == mask


#: As gpt-oss's: the header of a tool's answer repeats the name of the tool, and a prompt ends within a header.
REPEATS = """\
{%- set last = namespace(name='') %}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- set last.name = m.tool_calls[0].function.name %}
        {{- '<|im_start|>assistant to=' + last.name + '\n' }}
        {{- m.tool_calls[0].function.arguments | tojson + '<|im_end|>' }}
    {%- elif m.role == 'tool' %}{{- '<|im_start|>' + last.name + '\n' + m.content + '<|im_end|>' }}
    {%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}{%- endif %}
"""
#: As DeepSeek R1's: a call after the answer to another one has no header, though a prompt there has.
HEADLESS = """\
{%- for m in messages %}
    {%- if m.tool_calls %}
        {{- '<|im_start|>assistant\n' if messages[loop.index0 - 1].role != 'tool' else '\nthen ' }}
        {{- m.tool_calls[0].function.name + ' ' + m.tool_calls[0].function.arguments | tojson + '<|im_end|>' }}
    {%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""


@pytest.mark.parametrize(
    ("template", "right"),
    [
        (
            REPEATS,
            [' to=sky\n{"n": 2}<|im_end|>', " to=sky\n{}<|im_end|>", "\ndry<|im_end|>"],
        ),
        (
            HEADLESS,
            ['sky {"n": 2}<|im_end|>', "\nthen sky {}<|im_end|>", "dry<|im_end|>"],
        ),
    ],
)
def test_turns_without_words_or_headers_are_found(
    base: Tokenizer, template: str, right: list[str]
) -> None:
    tokenizer = replace(base, ends=(base.specials["<|im_end|>"],))

    def call(arguments: Any) -> Message:
        return {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "sky", "arguments": arguments}}],
        }

    talk = [{"role": "user", "content": "q"}, call({"n": 2}), {"role": "tool", "content": "21"}, call({}),
            {"role": "tool", "content": "no"}, {"role": "assistant", "content": "dry"}]  # fmt: skip
    assert (
        learned_runs(
            ChatEncoder(ChatTemplate(template, tokenizer)).encode(conversation(talk))
        )
        == right
    )


#: As Gemma 4's: answers of tools stand in the turn that calls them, each with the name of its tool again.
ANSWERED = """\
{%- for m in messages %}
    {%- if m.tool_calls %}
        {{- '<|im_start|>assistant\n' }}
        {%- if m.reasoning and loop.index0 > messages | length - 4 %}{{- m.reasoning + '\n' }}{%- endif %}
        {%- for call in m.tool_calls %}{{- call.function.name + call.function.arguments | tojson + '\n' }}{%- endfor %}
        {{- '<|im_end|>' }}
        {%- set at = loop.index0 %}
        {%- for call in m.tool_calls %}
            {%- set answer = messages[at + loop.index] %}
            {%- if answer %}{{- '<|tool|>' + call.function.name + ': ' + answer.content }}{%- endif %}
        {%- endfor %}
    {%- elif m.role != 'tool' %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""


@pytest.mark.parametrize("later", [0, 1])
@pytest.mark.parametrize("reasoning", [{}, {"reasoning": "so: yes"}])
@pytest.mark.parametrize("arguments", [({"n": "2"}, {}), ({}, {"n": "2"}), ({}, {})])
def test_names_of_tools_that_answers_repeat_are_not_learned(
    base: Tokenizer, arguments: tuple[Message, Message], reasoning: Message, later: int
) -> None:
    """Case ``later``: with turns behind it, for which the template leaves out the reasoning."""
    tokenizer = replace(base, ends=(base.specials["<|im_end|>"],))
    calls = [
        {"function": {"name": name, "arguments": each}}
        for name, each in zip(("sky", "sea"), arguments, strict=True)
    ]
    question = {"role": "user", "content": "q"}
    answers = [{"role": "tool", "content": text} for text in ("dry", "wet")]
    talk = [question, {"role": "assistant", "tool_calls": calls} | reasoning, *answers]
    talk += [question, {"role": "assistant", "content": "bye"}] * later
    encoded = ChatEncoder(ChatTemplate(ANSWERED, tokenizer)).encode(conversation(talk))
    shown = "so: yes\n" if reasoning and not later else ""
    called = "".join(
        f"{name}{json.dumps(each)}\n"
        for name, each in zip(("sky", "sea"), arguments, strict=True)
    )
    right = [f"{shown}{called}<|im_end|>", *["bye<|im_end|>"] * later]
    assert learned_runs(encoded) == right
    left_out = {part for _, part in encoded.followed.left_out()}
    assert left_out == ({"reasoning"} if reasoning and later else set())


_TURN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
_ASKED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
#: ChatML of which a prompt does not agree with what turns begin with.
UNEVEN = {
    "a prompt after users only": _TURN + _ASKED.replace("add_generation_prompt", "messages[-1].role == 'user'"),
    "no prompt": _TURN,
    "a prompt with a new line more": _TURN.replace("+ '\n' + m.content", "+ m.content") + _ASKED,
    "a prompt with other reasoning": _TURN.replace(
        "m.content", "('<think></think>' if m.role == 'assistant' else '') + m.content"
    ) + _ASKED.replace("assistant\n", "assistant\n<think>\n"),
    "a note behind the last question": _TURN.replace(
        "m.content", "m.content + (' /no_think' if loop.last and m.role == 'user' else '')"
    ) + _ASKED,
    "roles by words": _TURN.replace("m.role", "('x' if m.content.startswith('h') else m.role)") + _ASKED,
}  # fmt: skip


@pytest.mark.parametrize("name", UNEVEN)
def test_prompts_may_differ_from_turns(base: Tokenizer, name: str) -> None:
    tokenizer = replace(base, ends=(base.specials["<|im_end|>"],))
    encoded = ChatEncoder(ChatTemplate(UNEVEN[name], tokenizer)).encode(
        conversation(TWICE)
    )
    assert learned_runs(encoded) == [
        "red<|im_end|>",
        "blue<|im_end|>",
        "green<|im_end|>",
    ]
