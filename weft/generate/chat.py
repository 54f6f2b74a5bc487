"""A conversation as the prompt that its chat template makes of it."""

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


def chat_ids(tokenizer: Tokenizer, messages: Messages, tools: Messages | None, name: str) -> list[int]:
    """Ids of the conversation up to where the assistant is to answer; ``name`` says in errors whose template it is."""
    if not tokenizer.chat_template:
        raise WeftError(f"{name} has no chat template; leave out --chat, or give a model that was trained to chat")
    encoder = ChatEncoder(ChatTemplate(tokenizer.chat_template, tokenizer))
    return [int(i) for i in encoder.prompt(messages, tools)]
