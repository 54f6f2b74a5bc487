# ruff: noqa: RUF001 (the bars in the names of DeepSeek's tokens)
"""Small tokenizers and chat templates, written anew with the structure of those that are published.

``TEMPLATES`` has one per family: the same tokens, the same places of white space, the same treatment of system turns,
tools and reasoning, in fewer words.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from weft.data.tokenizer import Tokenizer, load_tokenizer

_CHATML_TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\nYou are SmolLM.<|im_end|>\n' }}{% endif %}"
    + _CHATML_TURN
    + "{% endfor %}"
    + _PROMPT
)

LLAMA3 = """\
{{- bos_token }}
{%- set day = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Today Date: " + day + "\n\n" }}
{%- if tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system }}
{{- "<|eot_id|>" }}
{%- for m in messages %}
    {%- if 'tool_calls' in m %}
        {%- if not m.tool_calls | length == 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif m.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {{- m.content | tojson }}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

_QWEN_HEAD = """\
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
"""
_QWEN_CALLS = """\
        {%- for call in m.tool_calls %}
            {%- if content is undefined or content or not loop.first %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' }}{{- call.function.name }}{{- '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
"""
_QWEN_TOOL = """\
    {%- elif m.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- m.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
"""
_QWEN_PROMPT = (
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}\n"
)

QWEN25 = (
    _QWEN_HEAD
    + """\
{%- for m in messages %}
    {%- if not m.tool_calls and m.role != "tool" and not (m.role == "system" and loop.first) %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}
    {%- elif m.role == "assistant" %}
        {{- '<|im_start|>' + m.role }}
        {%- if m.content %}{{- '\n' + m.content }}{%- endif %}
"""
    + _QWEN_CALLS
    + _QWEN_TOOL
    + _QWEN_PROMPT
)

#: Reasoning is kept only after the last question.
QWEN3 = (
    _QWEN_HEAD
    + """\
{%- set ns = namespace(looking=true, last=messages | length - 1) %}
{%- for m in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.looking and m.role == "user" and not (m.content.startswith('<tool_response>')) %}
        {%- set ns.looking = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == "user" or (m.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif m.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if m.reasoning_content is string %}
            {%- set reasoning = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<|im_start|>' + m.role + '\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}
            {{- content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>' + m.role + '\n' + content }}
        {%- endif %}
"""
    + _QWEN_CALLS
    + _QWEN_TOOL
    + """\
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""
)

GEMMA3 = """\
{{ bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set lead = messages[0].content + '\n\n' %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set lead = '' %}
{%- endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {%- set role = 'model' if m.role == 'assistant' else m.role %}
    {{- '<start_of_turn>' + role + '\n' + (lead if loop.first else '') }}
    {%- if m.content is string %}
        {{- m.content | trim }}
    {%- else %}
        {%- for part in m.content %}{{- part.text | trim }}{%- endfor %}
    {%- endif %}
    {{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\n' }}
{%- endif %}
"""

#: Nothing but ``[/INST]`` before an answer, and the tools before the last question only.
MISTRAL = """\
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}{%- set turns = messages %}{%- endif %}
{%- set asked = turns | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for m in turns %}
    {%- if m.role == 'user' %}
        {%- if tools is not none and m == asked[-1] %}
            {{- "[AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " }}
        {%- if loop.last and system is defined %}{{- system + "\n\n" }}{%- endif %}
        {{- m.content + "[/INST]" }}
    {%- elif m.tool_calls is defined %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in m.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- ', "id": "' + call.id + '"}' }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}
        {{- " " + m.content | trim + eos_token }}
    {%- else %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content | string + '}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

#: Writes answers twice, in a preamble and in their place, without special tokens around turns but the last closing one.
HOSTILE = """\
{%- for m in messages if m.role == 'assistant' %}(to come: {{ m.content }}) {% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
### {{ 'Response' | upper }}:
{{ m.content }}

{% else -%}
### {{ m.role | upper }}:
{{ m.content | trim }}

{% endif -%}
{%- endfor -%}
{% if add_generation_prompt %}### RESPONSE:
{% else %}{{ eos_token }}{% endif -%}
"""

#: SmolLM2's with generation tags, as TRL's templates for training have them.
TAGGED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    + _CHATML_TURN
    + "{% endif %}{% endfor %}"
    + _PROMPT
)

_DEEPSEEK_HEAD = """\
{%- set ns = namespace(system='', asked=false, tool=false, first=true) %}
{%- for m in messages %}{%- if m.role == 'system' %}{% set ns.system = ns.system + m.content %}{%- endif %}{%- endfor %}
{%- if tools %}
    {%- set ns.system = ns.system + '\n\n## Tools\n' %}
    {%- for tool in tools %}{% set ns.system = ns.system + (tool | tojson) + '\n' %}{%- endfor %}
    {%- set ns.system = ns.system + 'Write <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>...<｜tool▁calls▁end｜>' %}
{%- endif %}
{{ bos_token }}{{ ns.system }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set ns.tool = false %}{%- set ns.asked = true %}{{'<｜User｜>' + m.content}}
    {%- elif m.role == 'assistant' and m.tool_calls is defined and m.tool_calls is not none %}
        {%- if ns.asked %}{{'<｜Assistant｜>' + closed}}{%- endif %}
        {%- set ns.asked = false %}{%- set ns.first = true %}
        {%- for call in m.tool_calls %}
            {%- if ns.first %}
                {%- if m.content is none %}
                    {{'<｜tool▁calls▁begin｜>' + BEFORE + MIDDLE + call.function.arguments + CLOSING}}
                {%- else %}
                    {{m.content + '<｜tool▁calls▁begin｜>' + BEFORE + MIDDLE + call.function.arguments + CLOSING}}
                {%- endif %}
                {%- set ns.first = false %}
            {%- else %}
                {{BETWEEN + BEFORE + MIDDLE + call.function.arguments + CLOSING}}
            {%- endif %}
        {%- endfor %}
        {{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}
    {%- elif m.role == 'assistant' %}
        {%- if ns.asked %}{{'<｜Assistant｜>' + closed}}{%- endif %}
        {%- set ns.asked = false %}{%- set ns.tool = false %}{{m.content + '<｜end▁of▁sentence｜>'}}
    {%- elif m.role == 'tool' %}
        {%- set ns.tool = true %}{{'<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>'}}
    {%- endif %}
{%- endfor -%}
{%- if add_generation_prompt and not ns.tool %}{{'<｜Assistant｜>' + opened}}{%- endif %}
"""


def _deepseek(closed: str, opened: str, **parts: str) -> str:
    """A template of DeepSeek's: ``parts`` of a call as expressions, and what stands before answers and in prompts."""
    text = _DEEPSEEK_HEAD.replace("+ closed", f"+ '{closed}'")
    text = text.replace("+ opened", f"+ '{opened}'")
    for name, part in parts.items():
        text = text.replace(name, part)
    return text


#: Calls as DeepSeek's models write them, their arguments as text: V3 and R1 between fences, V3.1 without.
DEEPSEEK_V3 = _deepseek(
    "", "",
    BEFORE="'<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name",
    MIDDLE="'\\n```json\\n'", CLOSING="'\\n```<｜tool▁call▁end｜>'", BETWEEN="'\\n'",
)  # fmt: skip
DEEPSEEK_V31 = _deepseek(
    "</think>", "</think>",
    BEFORE="'<｜tool▁call▁begin｜>' + call.function.name",
    MIDDLE="'<｜tool▁sep｜>'", CLOSING="'<｜tool▁call▁end｜>'", BETWEEN="''",
)  # fmt: skip
#: Its prompt opens the reasoning, which the turns of a conversation do not have.
DEEPSEEK_R1 = DEEPSEEK_V3.replace("'<｜Assistant｜>' + '')", "'<｜Assistant｜><think>\\n')").replace(
    "{%- if add_generation_prompt and not ns.tool %}{{'<｜Assistant｜>' + ''}}",
    "{%- if add_generation_prompt and not ns.tool %}{{'<｜Assistant｜><think>\\n'}}",
)  # fmt: skip


class Family(NamedTuple):
    template: str
    specials: tuple[str, ...]  # bos, eos and others
    others: tuple[str, ...] = ()  # added tokens that are not special


_CHATML = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
_QWEN_TAGS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
TEMPLATES = {
    "smollm2": Family(SMOLLM2, _CHATML),
    "llama3": Family(
        LLAMA3, ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>")
    ),
    "qwen2.5": Family(QWEN25, _CHATML, _QWEN_TAGS[:2]),
    "qwen3": Family(QWEN3, _CHATML, _QWEN_TAGS),
    "gemma3": Family(GEMMA3, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")),
    "mistral": Family(
        MISTRAL,
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
         "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
    "hostile": Family(HOSTILE, ("<s>", "</s>")),
    "tagged": Family(TAGGED, _CHATML),
}  # fmt: skip


def save_tokenizer(folder: Path, family: Family, spaces: bool = False) -> Path:
    """A byte-level BPE (or with ``spaces`` one that begins words with U+2581, as SentencePiece) with a template."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [
        "the user asks, the assistant answers: weather in Paris is 21 degrees\n\n" * 3,
        '{"name": "f", "a": 1}',
    ]
    if spaces:
        model = tokenizers.Tokenizer(
            tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True)
        )
        model.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
            prepend_scheme="first"
        )
        model.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first")
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=600, special_tokens=["<unk>"], show_progress=False,
            initial_alphabet=[chr(i) for i in range(32, 127)] + ["\n", "▁", "é", "🙂"],
        )  # fmt: skip
        model.train_from_iterator(texts, trainer)
    else:
        bpe = tokenizers.ByteLevelBPETokenizer()
        bpe.train_from_iterator(texts, 400, 1, show_progress=False)
        model = bpe._tokenizer
    model.add_special_tokens(list(family.specials))
    model.add_tokens(
        [
            tokenizers.AddedToken(name, special=False, normalized=False)
            for name in family.others
        ]
    )
    model.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": family.specials[0],
              "eos_token": family.specials[1]}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(family.template)
    return folder


def tokenizer(folder: Path, name: str) -> Tokenizer:
    return load_tokenizer(
        str(save_tokenizer(folder / name, TEMPLATES[name], name == "mistral"))
    )


def turns(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """Messages of user and assistant in turn."""
    head = [{"role": "system", "content": system}] if system is not None else []
    return head + [
        {"role": ("user", "assistant")[i % 2], "content": text}
        for i, text in enumerate(contents)
    ]
