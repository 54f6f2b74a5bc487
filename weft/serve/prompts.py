"""Turns requests into ids and grammars, in threads: long texts take seconds, and the event loop must go on."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

from weft.data.chat.conversation import Message
from weft.data.chat.encode import ChatEncoder, own_encoder
from weft.data.chat.marks import Marked, cleaned, numbered
from weft.data.chat.template import ChatTemplate
from weft.data.tokenizer import Tokenizer
from weft.errors import UsageError
from weft.generate.grammar import Grammar, Grammars
from weft.serve.messages import read_live
from weft.serve.protocol import Conversing, Language, Texts
from weft.serve.reasoning import Thoughts, begins_thinking, thoughts_of
from weft.serve.tools import CallForm, call_form

R = TypeVar("R")

#: Characters of a schema or grammar, of which some stay compiled.
LARGEST_FORM = 2**18


class ChatPrompt(NamedTuple):
    """The ids of a conversation that a model is to go on with, and where its reasoning is, if it is to think."""

    ids: list[int]
    thoughts: Thoughts | None


class Prompts:
    """Encodes prompts and compiles grammars for a model with ``vocab`` ids, called ``name`` in errors.

    One thread tokenizes, as tokenizers are not thread-safe, and another one compiles grammars.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, name: str) -> None:
        self.tokenizer, self.vocab, self.name = tokenizer, vocab, name
        self._tokenizing, self._compiling = (ThreadPoolExecutor(1, f"weft-{kind}") for kind in ("tokens", "grammars"))
        self._compiled = lru_cache(64)(lambda kind, text: self._grammars.compile(kind, text))

    async def texts(self, texts: Texts) -> list[list[int]]:
        """The ids of texts that a model is to continue; lists of ids stay as they are."""
        if not any(isinstance(text, str) for text in texts):
            return list(texts)  # type: ignore[arg-type]
        return await self._run(
            lambda: [self.tokenizer.prompt_ids(text) if isinstance(text, str) else text for text in texts]
        )

    async def chat(self, asked: Conversing, tools: Sequence[dict[str, Any]] = ()) -> ChatPrompt:
        """The prompt of a conversation. Raises what its template refuses."""
        return await self._run(lambda: self._encode(asked, tools))

    def _encode(self, asked: Conversing, tools: Sequence[dict[str, Any]]) -> ChatPrompt:
        template = self._encoder.template.of(tools)
        if tools and self._form is None:
            raise UsageError(f"the chat template of {self.name} writes no calls of tools as JSON; ask without tools")
        talk = [as_written(message, self._form) for message in read_live(asked.messages)]
        if "developer" not in template.source:  # as OpenAI has come to call what others call the system
            talk = [m | {"role": "system"} if m["role"] == "developer" else m for m in talk]
        variables = self._variables(asked)
        if asked.continue_final_message:
            shown = continued(template, talk, tools, variables)
        else:
            shown = template.render(talk, tools or None, asked.opens, variables)
        thoughts = thoughts_of(template.source)
        if thoughts:
            words = talk[-1]["content"] if asked.continue_final_message else ""
            thoughts = thoughts._replace(begun=begins_thinking(thoughts, shown.text, words))
        return ChatPrompt([int(i) for i in self._encoder.tokens.encode(shown)[0]], thoughts)

    def _variables(self, asked: Conversing) -> dict[str, Any]:
        """What the request tells the template, beside the conversation."""
        source, effort = self._encoder.template.source, asked.reasoning_effort
        variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none" and "enable_thinking" in source:
            variables["enable_thinking"] = False
        return variables | cleaned(asked.chat_template_kwargs)

    async def form(self) -> CallForm | None:
        """How the chat template writes calls of tools."""
        return await self._run(lambda: self._form)

    async def grammar(self, language: Language) -> Grammar:
        """Compile a grammar. Raises :class:`UsageError` for one that cannot be read or met."""
        kind, text = language
        key = text if isinstance(text, str) else json.dumps(text)
        if len(key) > LARGEST_FORM:
            raise UsageError(f"a form of text has {LARGEST_FORM} characters at most")
        return await asyncio.get_running_loop().run_in_executor(self._compiling, self._compiled, kind, key)

    def close(self) -> None:
        """End both threads."""
        self._tokenizing.shutdown()
        self._compiling.shutdown()

    async def decode(self, ids: Sequence[int]) -> str:
        return await self._run(lambda: self.tokenizer.decode(ids))

    async def _run(self, action: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, action)

    @cached_property
    def _encoder(self) -> ChatEncoder:
        return own_encoder(self.tokenizer, self.name)

    @cached_property
    def _form(self) -> CallForm | None:
        return call_form(self._encoder.template)

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.vocab)


def as_written(message: Message, form: CallForm | None) -> Message:
    """A message whose calls were cut in their arguments, with these as the text that the model had written."""
    calls = message.get("tool_calls", [])
    whole = [call for call in calls if isinstance(call["function"]["arguments"], dict)]
    if form is None or len(whole) == len(calls):
        return message
    cut = [call["function"] for call in calls if call not in whole]
    text = message["content"] + "".join(form.begun(call["name"], str(call["arguments"])) for call in cut)
    rest = {key: value for key, value in message.items() if key != "tool_calls"} | {"content": text}
    return rest | {"tool_calls": whole} if whole else rest


def continued(
    template: ChatTemplate, talk: Sequence[Message], tools: Sequence[Message], variables: Mapping[str, Any]
) -> Marked:
    """The text of a conversation up to the last word of its last message. Raises :class:`UsageError`."""
    last = talk[-1]
    if last["role"] != "assistant" or not last["content"].strip():
        raise UsageError("continue_final_message goes on with words of the assistant's, which the last message lacks")
    shown = template.render([*talk[:-1], numbered(last, len(talk))], tools or None, False, variables)
    places = [at for run in shown.groups(len(talk)) for at in run]
    if not places:
        raise UsageError("the chat template does not write the last message; leave out continue_final_message")
    end, blanks = max(places), last["content"][len(last["content"].rstrip()) :]
    if shown.text.startswith(blanks, end):
        end += len(blanks)
    return replace(shown, text=shown.text[:end])
