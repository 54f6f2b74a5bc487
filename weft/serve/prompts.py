"""Turns requests into token ids and grammars in threads of their own: long texts take seconds, during which the event
loop must go on.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

import tokenizers

from weft.data.chat.chat_template import ChatTemplate, TemplateError
from weft.data.chat.conversation import Message
from weft.data.chat.encode import ChatEncoder, own_encoder
from weft.data.chat.marks import Marked, mark_words, without_marks
from weft.data.chat.reasoning import (
    Thoughts,
    begins_thinking,
    thoughts_of,
    without_reasoning,
)
from weft.data.tokenizer import Tokenizer
from weft.errors import UsageError
from weft.generate.grammar import Grammar, Grammars
from weft.serve.call_form import CallForm, call_form, shows_tools
from weft.serve.lengths import PIECE, TextLengths, TokenLimit, TooManyTokens
from weft.serve.messages import REASONING, read_live, with_short_ids
from weft.serve.protocol import Conversing, Language, Texts

R = TypeVar("R")

#: Fields of messages that are read, or that say how the others belong together.
READ_KEYS = {
    "role", "content", "tool_calls", "tool_call_id", "id", "type", "status", *REASONING
}  # fmt: skip

#: So many fields of one request that no template reads are named.
MOST_UNREAD = 8

#: Characters of a schema or grammar, of which some stay compiled.
LARGEST_FORM = 2**18


class ChatPrompt(NamedTuple):
    """The prompt of a conversation.

    Attributes:
        ``ids``: token ids of the conversation up to where the answer begins.
        ``thoughts``: tags of the reasoning with which the answer may begin; None if the chat template has none.
        ``idle``: names of template variables in the request that the chat template does not read.
    """

    ids: list[int]
    thoughts: Thoughts | None
    idle: list[str]


class PromptEncoder:
    """Encodes prompts in a thread of its own, because tokenizers are not thread-safe. ``tokenizer``: the model's
    tokenizer. ``name``: the model's name in error messages. ``copied``: whether to work on a copy of ``tokenizer``,
    because another encoder uses the original.
    """

    def __init__(self, tokenizer: Tokenizer, name: str, copied: bool = False) -> None:
        self._given, self.name, self.copied = tokenizer, name, copied
        self.thread = ThreadPoolExecutor(1, "weft-tokens")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that this encoder's thread uses."""
        return copied(self._given) if self.copied else self._given

    @cached_property
    def lengths(self) -> TextLengths:
        """Object that checks with this encoder's tokenizer whether texts are too long."""
        return TextLengths(self.tokenizer)

    @cached_property
    def chat(self) -> ChatEncoder:
        """The encoder of conversations by the model's chat template."""
        return own_encoder(self.tokenizer, self.name)

    @cached_property
    def form(self) -> CallForm | None:
        """How the chat template writes tool calls; None if that is not known."""
        return call_form(self.chat.template)

    def text(
        self, text: str, limit: TokenLimit | None, special: bool, opened: bool
    ) -> list[int]:
        """Return the ids of the prompt ``text``, read as ``special`` and ``opened`` say to
        :meth:`Tokenizer.prompt_ids`. Raises :class:`TooManyTokens` if there are more than ``limit`` allows; None: any
        number.
        """
        if limit is not None:
            self.lengths.check(text, limit)
        ids = self.tokenizer.prompt_ids(text, special, opened)
        if limit is not None and len(ids) > limit.tokens:
            raise TooManyTokens(len(ids), limit)
        return ids


class Prompts:
    """Encodes prompts and compiles grammars for a model with ``vocab`` token ids. ``name``: the model's name in error
    messages. It has three threads: one for short prompts, one for long prompts, and one for grammars, so that short
    prompts do not wait for the others.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, name: str) -> None:
        self.tokenizer, self.vocab, self.name = tokenizer, vocab, name
        self._short, self._long = (
            PromptEncoder(tokenizer, name),
            PromptEncoder(tokenizer, name, copied=True),
        )
        self._compiling = ThreadPoolExecutor(1, "weft-grammars")
        self._compiled = lru_cache(64)(
            lambda kind, text: self._grammars.compile(kind, text)
        )

    async def texts(
        self,
        texts: Texts,
        limit: TokenLimit | None = None,
        special: bool = False,
        opened: bool = True,
    ) -> list[list[int]]:
        """Return a list of token ids for each of ``texts``. A prompt that already is a list of ids is returned
        unchanged.

        ``limit``: largest number of tokens of a text; None: no limit. ``special``: whether names of special tokens in a
        text become these tokens. ``opened``: whether ids begin with those that the tokenizer writes before a text.

        Raises :class:`TooManyTokens` for a text with more tokens than ``limit`` allows.
        """
        if not any(isinstance(text, str) for text in texts):
            return list(texts)  # type: ignore[arg-type]
        encoder = self._encoder_for(sum(map(len, texts)))

        def encode() -> list[list[int]]:
            return [
                encoder.text(text, limit, special, opened)
                if isinstance(text, str)
                else text
                for text in texts
            ]

        return await _run(encoder, encode)

    async def chat(
        self,
        asked: Conversing,
        tools: Sequence[dict[str, Any]] = (),
        limit: TokenLimit | None = None,
        size: int = 0,
    ) -> ChatPrompt:
        """Return the prompt of the conversation ``asked``.

        ``tools``: tools that the model may call. ``limit``: largest number of tokens; None: no limit. ``size``: bytes
        of the request. Long and short prompts are encoded in different threads, and ``size`` decides which one encodes
        this prompt.

        Raises :class:`TooManyTokens` for a conversation with more tokens than ``limit`` allows, and errors of the chat
        template.
        """
        encoder = self._encoder_for(size)
        return await _run(encoder, lambda: self._encode(encoder, asked, tools, limit))

    def _encoder_for(self, size: int) -> PromptEncoder:
        return self._long if size > PIECE else self._short

    def _encode(
        self,
        encoder: PromptEncoder,
        asked: Conversing,
        tools: Sequence[dict[str, Any]],
        limit: TokenLimit | None,
    ) -> ChatPrompt:
        template, form = encoder.chat.template.of(tools), encoder.form
        if tools and form is None:
            lacks = (
                "writes no calls whose arguments are JSON"
                if shows_tools(template)
                else "does not show tools to the model"
            )
            raise UsageError(
                f"the chat template of {self.name} {lacks}; ask without tools, or serve it with another --chat-template"
            )
        talk = [as_written(message, form) for message in read_live(asked.messages)]
        # as OpenAI has come to call what others call the system
        if "developer" not in template.source:
            talk = [
                m | {"role": "system"} if m["role"] == "developer" else m for m in talk
            ]
        variables = self._variables(asked, template.source)
        try:
            shown = self._shown(template, asked, talk, tools, variables)
        except TemplateError as error:
            try:
                short = with_short_ids(talk)
                shown = self._shown(template, asked, short, tools, variables)
            except TemplateError:
                raise error from None
        if limit is not None:
            encoder.lengths.check(shown.text, limit)
        thoughts = thoughts_of(template.source)
        closed = thoughts and asked.opens and (asked.formed or asked.thinks is False)
        if thoughts and closed:
            text = without_reasoning(thoughts, template.source, shown.text)
            shown = replace(shown, text=text)
        if thoughts:
            words = talk[-1]["content"] if asked.continue_final_message else ""
            thoughts = thoughts._replace(
                begun=begins_thinking(thoughts, shown.text, words)
            )
        idle = [name for name in variables if name not in template.source]
        idle += _unread_keys(talk, template.source)
        if closed:
            heeded = ("reasoning_effort", "enable_thinking")
            idle = [name for name in idle if name not in heeded]
        return ChatPrompt(
            [int(i) for i in encoder.chat.tokens.encode(shown)[0]], thoughts, idle
        )

    def _shown(
        self,
        template: ChatTemplate,
        asked: Conversing,
        talk: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        variables: Mapping[str, Any],
    ) -> Marked:
        """Return the conversation ``talk`` as ``template`` writes it, up to where the answer begins."""
        if asked.continue_final_message:
            return continued(template, talk, tools, variables)
        return template.render(talk, tools or None, asked.opens, variables)

    def _variables(self, asked: Conversing, source: str) -> dict[str, Any]:
        """Return the variables of the request for the template, beside the conversation."""
        effort = asked.reasoning_effort
        variables: dict[str, Any] = (
            {} if effort is None else {"reasoning_effort": effort}
        )
        if (effort == "none" or asked.formed) and "enable_thinking" in source:
            variables["enable_thinking"] = False
        return variables | without_marks(asked.chat_template_kwargs)

    async def form(self) -> CallForm | None:
        """Return the form in which the chat template writes tool calls; None if it is not known."""
        return await _run(self._short, lambda: self._short.form)

    async def grammar(self, language: Language) -> Grammar:
        """Compile the constraint ``language`` to a grammar. Raises :class:`UsageError` for a constraint that cannot be
        read, or that no text meets.
        """
        kind, text = language
        key = text if isinstance(text, str) else json.dumps(text)
        if len(key) > LARGEST_FORM:
            raise UsageError(f"a form of text has {LARGEST_FORM} characters at most")
        return await asyncio.get_running_loop().run_in_executor(
            self._compiling, self._compiled, kind, key
        )

    def close(self) -> None:
        """End each of the three threads after its current task."""
        for thread in (self._short.thread, self._long.thread, self._compiling):
            thread.shutdown(wait=False, cancel_futures=True)

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the token ids ``ids``."""
        encoder = self._encoder_for(len(ids))
        return await _run(encoder, lambda: encoder.tokenizer.decode(ids))

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.vocab)


async def _run(encoder: PromptEncoder, action: Callable[[], R]) -> R:
    return await asyncio.get_running_loop().run_in_executor(encoder.thread, action)


def _unread_keys(talk: Sequence[Message], source: str) -> list[str]:
    """Return the names of fields of messages that a chat template with this ``source`` does not read, such as
    ``messages[].prefix``; at most a few. Fields without a value are left out.
    """
    given = {key for message in talk for key, value in message.items() if value}
    unread = [key for key in given - READ_KEYS if key not in source]
    return [f"messages[].{key}" for key in sorted(unread)[:MOST_UNREAD]]


def copied(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy of ``tokenizer`` that another thread can use."""
    if tokenizer.model is None:
        return tokenizer
    model = tokenizers.Tokenizer.from_str(tokenizer.model.to_str())
    model.encode_special_tokens = True
    return replace(tokenizer, model=model)


def as_written(message: Message, form: CallForm | None) -> Message:
    """Return ``message`` with each tool call whose arguments were cut off turned back to text, as the model wrote it.
    The text is appended to the message's content. Complete calls stay calls. ``form``: how the model writes calls;
    None: it is not known, and nothing changes.
    """
    calls = message.get("tool_calls", [])
    whole = [call for call in calls if isinstance(call["function"]["arguments"], dict)]
    if form is None or len(whole) == len(calls):
        return message
    cut = [call["function"] for call in calls if call not in whole]
    text = message["content"] + "".join(
        form.cut(call["name"], str(call["arguments"])) for call in cut
    )
    rest = {key: value for key, value in message.items() if key != "tool_calls"} | {
        "content": text
    }
    return rest | {"tool_calls": whole} if whole else rest


def continued(
    template: ChatTemplate,
    talk: Sequence[Message],
    tools: Sequence[Message],
    variables: Mapping[str, Any],
) -> Marked:
    """Render the conversation ``talk`` as a prompt that ends with its last message, so that the model continues that
    message. ``template``: the chat template; ``tools``: tools that the model may call; ``variables``: further variables
    of the chat template. Raises :class:`UsageError` if the last message is not a message of the assistant with text.
    """
    last = talk[-1]
    if last["role"] != "assistant" or not last["content"].strip():
        raise UsageError(
            "continue_final_message goes on with words of the assistant's, which the last message lacks"
        )
    shown = template.render(
        [*talk[:-1], mark_words(last, len(talk))], tools or None, False, variables
    )
    places = [at for run in shown.groups(len(talk)) for at in run]
    if not places:
        raise UsageError(
            "the chat template does not write the last message; leave out continue_final_message"
        )
    end, blanks = max(places), last["content"][len(last["content"].rstrip()) :]
    if shown.text.startswith(blanks, end):
        end += len(blanks)
    return replace(shown, text=shown.text[:end])
