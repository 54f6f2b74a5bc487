"""Pairs of answers to one prompt, of which one is preferred, in the formats in which they are published."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from weft.data.chat.conversation import Conversation, ConversationError, as_messages, conversation, unlearned, weight_of


class AnswerPair(NamedTuple):
    """Two conversations that begin alike, of which only what differs is learned.

    ``weight``: how much the pair counts in the loss; ``margin``: by how much the chosen one should be ahead.
    """

    chosen: Conversation
    rejected: Conversation
    weight: float
    margin: float


def read_pair(record: Any) -> AnswerPair:
    """The pair in ``record``: ``chosen`` and ``rejected``, each a text or a list of messages, and perhaps ``prompt``.

    Without a prompt, or if the answers are conversations and it is a text, what both begin with is the prompt. Raises
    :class:`ConversationError`.
    """
    if not isinstance(record, Mapping):
        raise ConversationError(f"expected a JSON object, got {type(record).__name__}")
    if lacking := [key for key in ("chosen", "rejected") if record.get(key) is None]:
        raise ConversationError(f"no {lacking[0]!r}; a pair of answers has 'chosen', 'rejected' and perhaps 'prompt'")
    prompt, chosen, rejected = (record.get(key) for key in ("prompt", "chosen", "rejected"))
    if not (isinstance(chosen, str) and isinstance(rejected, str)):
        if not (isinstance(chosen, list) and isinstance(rejected, list)):
            raise ConversationError("'chosen' and 'rejected' are each a text, or each a list of messages")
        asked = [message for message, _ in _alike(chosen[:-1], rejected[:-1])]
        if not isinstance(prompt, list) and asked:
            prompt, chosen, rejected = asked, chosen[len(asked) :], rejected[len(asked) :]
    elif prompt is None:
        # The prompt ends with a word, so that no token of an answer is cut.
        prompt = "".join(a for a, _ in _alike(chosen, rejected))
        prompt = prompt[: 1 + max(prompt.rfind(space) for space in " \n\t")]
        chosen, rejected, prompt = chosen[len(prompt) :], rejected[len(prompt) :], prompt.rstrip()
    if not prompt:
        raise ConversationError("no 'prompt', and 'chosen' and 'rejected' do not begin alike")
    prompt = as_messages(prompt)
    if not isinstance(prompt, list):
        raise ConversationError("'prompt' is a text or a list of messages")
    sides = [_side(prompt, answer, name, record) for answer, name in ((chosen, "chosen"), (rejected, "rejected"))]
    weight = weight_of(record.get("weight"), "its 'weight'")
    return AnswerPair(sides[0], sides[1], weight, _margin(record.get("margin")))


def _alike(chosen: Sequence[Any], rejected: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """What both begin with, twice."""
    return takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))


def with_garbled(record: Mapping[str, str]) -> dict[str, str]:
    """A pair from a question and its answer: this is preferred to the one with its words in reverse."""
    answer = record["completion"]
    return {"prompt": record["prompt"], "chosen": answer, "rejected": " ".join(reversed(answer.split()))}


def _side(prompt: Sequence[Any], answer: Any, name: str, record: Mapping[str, Any]) -> Conversation:
    answers = as_messages(answer, "assistant")
    if not any(isinstance(m, dict) and m.get("role") == "assistant" for m in answers):
        raise ConversationError(f"{name!r} has no turn of the assistant's")
    try:
        return conversation([*unlearned(prompt), *answers], record.get("tools"))
    except ConversationError as error:
        raise ConversationError(f"prompt and {name!r}: {error}") from None


def _margin(value: Any) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConversationError(f"its 'margin' is {str(value)[:40]!r}, which is no number")
    return float(value)
