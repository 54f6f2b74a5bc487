"""What a model is to continue as ids: a text, or a conversation as its chat template writes it."""

import json
from typing import Any

from weft.data.chat.encode import ChatEncoder
from weft.data.chat.template import ChatTemplate
from weft.data.tokenizer import Tokenizer
from weft.errors import UsageError, WeftError

Messages = list[dict[str, Any]]


def read_messages(text: str) -> tuple[Messages, Messages | None]:
    """Messages and tools of a JSON text: a list of messages, or an object with ``messages`` and ``tools``."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"the conversation is not JSON: {error}") from None
    messages, tools = (found.get("messages"), found.get("tools")) if isinstance(found, dict) else (found, None)
    if not isinstance(messages, list) or not messages:
        raise UsageError("the conversation has no messages; give a list of objects with 'role' and 'content'")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UsageError(f"message {number} of the conversation is no object with 'role' and 'content'")
    return messages, tools


def prompt_ids(
    tokenizer: Tokenizer, prompt: str | Messages, chat: bool, name: str, tools: Messages | None = None
) -> list[int]:
    """Ids of what a model is to continue: a text, or with ``chat`` a conversation that the assistant is to answer.

    A text is then what the user says. ``name`` says in errors whose chat template it is.
    """
    if not chat:
        assert isinstance(prompt, str)
        return tokenizer.prompt_ids(prompt)
    return [int(i) for i in own_encoder(tokenizer, name).prompt(as_messages(prompt), tools)]


def as_messages(prompt: str | Messages) -> Messages:
    """A conversation, or what a user says as one."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def own_encoder(tokenizer: Tokenizer, name: str, learn: str = "assistant") -> ChatEncoder:
    """What writes conversations by the tokenizer's own chat template; ``name`` says in errors whose it is."""
    if not tokenizer.chat_template:
        raise WeftError(f"{name} has no chat template; do without chat, or give a model that was trained to chat")
    return ChatEncoder(ChatTemplate(tokenizer.chat_template, tokenizer), learn)
