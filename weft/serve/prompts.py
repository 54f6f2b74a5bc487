"""Turns requests into ids and grammars, in threads: long texts take seconds, and the event loop must go on."""

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from weft.data.chat.conversation import check_messages
from weft.data.chat.encode import ChatEncoder, own_encoder
from weft.data.tokenizer import Tokenizer
from weft.errors import UsageError
from weft.generate.grammar import Grammar, Grammars
from weft.serve.protocol import Language
from weft.serve.tools import CallForm, call_form

R = TypeVar("R")

#: Characters of a schema or grammar, of which some stay compiled.
LARGEST_FORM = 2**18


class Prompts:
    """Encodes prompts and compiles grammars for a model with ``vocab`` ids, called ``name`` in errors.

    One thread tokenizes, as tokenizers are not thread-safe, and another one compiles grammars.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, name: str) -> None:
        self.tokenizer, self.vocab, self.name = tokenizer, vocab, name
        self._tokenizing, self._compiling = (ThreadPoolExecutor(1, f"weft-{kind}") for kind in ("tokens", "grammars"))
        self._compiled = lru_cache(64)(lambda kind, text: self._grammars.compile(kind, text))

    async def texts(self, texts: Sequence[str | list[int]]) -> list[list[int]]:
        """The ids of texts that a model is to continue; lists of ids stay as they are."""
        if not any(isinstance(text, str) for text in texts):
            return list(texts)  # type: ignore[arg-type]
        return await self._run(
            lambda: [self.tokenizer.prompt_ids(text) if isinstance(text, str) else text for text in texts]
        )

    async def chat(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """The ids of a conversation, up to where the assistant is to answer. Raises what its template refuses."""

        def encode() -> list[int]:
            encoder = self._encoder
            if tools and self._form is None:
                raise UsageError(
                    f"the chat template of {self.name} writes no calls of tools as JSON; ask without tools"
                )
            talk = [message | {"content": _joined(message)} for message in check_messages(messages)]
            return [int(i) for i in encoder.prompt(talk, tools or None)]

        return await self._run(encode)

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


def _joined(message: dict[str, Any]) -> str:
    """The text of a message, whose content may be a list of parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
