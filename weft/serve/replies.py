"""Responses of OpenAI's HTTP interface."""

import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from math import isnan
from typing import Any, NamedTuple, cast

from weft.data.detokenizer import TextDecoder
from weft.data.token_bytes import token_bytes
from weft.data.tokenizer import Tokenizer
from weft.generate.backend import TokenEvent
from weft.serve.call_finder import CallPiece
from weft.serve.protocol import ChatRequest, Refusal, SamplingRequest

#: Log-probability that stands for that of an impossible token, which JSON cannot say; OpenAI's servers use this one.
IMPOSSIBLE = -9999.0

Usage = dict[str, Any]


class Answer(NamedTuple):
    """A whole answer, or in a stream the part by which the answer has grown.

    Attributes:
        ``text``: text of the answer, without reasoning and tool calls.
        ``events``: tokens of the answer with their log-probabilities.
        ``calls``: tool calls, or pieces of them.
        ``finish``: finish reason, "" if the answer goes on.
        ``thought``: reasoning before the text.
        ``echo``: tokens of the prompt, if the text begins with the prompt.
        ``stop``: stop string that ended the answer, None if none did.
    """

    text: str
    events: Sequence[TokenEvent]
    calls: Sequence[CallPiece]
    finish: str  # why it ended, or "" if it goes on
    thought: str = ""  # the reasoning before the text
    echo: Sequence[TokenEvent] = ()  # the prompt's tokens, if the text begins with them
    stop: str | None = None  # the stop string that has ended it

    def joined(self, new: "Answer") -> "Answer":
        """Return this answer extended by ``new``, the next part of the same answer."""
        events, calls = (
            cast(list[TokenEvent], self.events),
            cast(list[CallPiece], self.calls),
        )
        events += new.events
        calls += new.calls
        return Answer(
            self.text + new.text,
            events,
            calls,
            new.finish,
            self.thought + new.thought,
            self.echo or new.echo,
            new.stop,
        )


class Replies:
    """Builds the JSON of the answers to the request ``question`` in OpenAI's API: one body with all answers, or the
    chunks of a stream. ``model``: name of the model that it gives.
    """

    last = "data: [DONE]\n\n"  # of a stream

    def __init__(
        self, question: SamplingRequest, model: str, tokenizer: Tokenizer
    ) -> None:
        self.chat = isinstance(question, ChatRequest)
        self.include_usage = question.stream_options.include_usage
        # of a chunk
        self.kind = "chat.completion.chunk" if self.chat else "text_completion"
        self.logs = question.top is not None and (
            self.chat or getattr(question, "logprobs", None) is not None
        )
        self.bytes = token_bytes(tokenizer)
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex
        # by the answer
        self.offsets: dict[int, TextOffsets] = defaultdict(
            partial(TextOffsets, tokenizer)
        )
        self.head = {"id": self.id, "created": int(time.time()), "model": model}

    def begun(self) -> Iterator[dict[str, Any]]:
        """Yield the events with which a stream begins before the first token. This API has none."""
        yield from ()

    def chunks(self, index: int, new: Answer, first: bool) -> Iterator[dict[str, Any]]:
        """Yield the stream chunks for ``new``, the part by which answer number ``index`` has grown. ``first``: whether
        ``new`` is the first part of that answer.
        """
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": self._logs(index, [*new.echo, *new.events]),
            "finish_reason": new.finish or None,
        }
        if self.chat:
            calls = [
                {"index": piece.number} | call_fields(piece) for piece in new.calls
            ]
            choice["delta"] = (
                ({"role": "assistant"} if first else {})
                | ({"reasoning_content": new.thought} if new.thought else {})
                | (
                    {"content": new.text}
                    if new.text or (first and not calls and not new.thought)
                    else {}
                )
                | ({"tool_calls": calls} if calls else {})
            )
        else:
            choice["text"] = new.text
        yield {**self.head, "object": self.kind, "choices": [choice]} | (
            {"usage": None} if self.include_usage else {}
        )

    def whole(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """Build the response body with all ``answers``. ``usage``: numbers of tokens that the response reports."""
        choices = []
        for index, (text, events, calls, finish, thought, echo, _) in enumerate(
            answers
        ):
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if thought:
                message["reasoning_content"] = thought
            if calls:
                message |= {
                    "content": text or None,
                    "tool_calls": [call_fields(call) for call in calls],
                }
            said = {"message": message} if self.chat else {"text": text}
            choices.append(
                {
                    "index": index,
                    **said,
                    "logprobs": self._logs(index, [*echo, *events]),
                    "finish_reason": finish,
                }
            )
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self.head, "object": kind, "choices": choices, "usage": usage}

    def ended(self, usage: Usage) -> Iterator[dict[str, Any]]:
        """Yield the event with the token counts ``usage`` that ends a stream, if the request asks for it."""
        if self.include_usage:
            yield {**self.head, "object": self.kind, "choices": [], "usage": usage}

    def failed(self, refusal: Refusal) -> dict[str, Any]:
        """Return the event that ends a stream with the error ``refusal``."""
        return refusal.body

    def _logs(self, index: int, events: Sequence[TokenEvent]) -> dict[str, Any] | None:
        """Return the log-probabilities of the answer's tokens; the first token of a prompt has none."""
        if not self.logs:
            return None
        said = [
            (e.token, *spoken(e.log_probability)) for e in events if e.token is not None
        ]
        if self.chat:
            return {
                "content": [
                    self._named(token, p)
                    | {
                        "top_logprobs": [
                            self._named(i, q) for i, q in (top or {}).items()
                        ]
                    }
                    for token, p, top in said
                ]
            }
        # Of each token, and of the likeliest ones in its place.
        names = [
            self.bytes.names({token: p or 0.0} | (top or {})) for token, p, top in said
        ]
        return {
            "tokens": [
                named[token] for named, (token, _, _) in zip(names, said, strict=True)
            ],
            "token_logprobs": [p for _, p, _ in said],
            "top_logprobs": [
                top and {named[i]: q for i, q in top.items()}
                for named, (_, _, top) in zip(names, said, strict=True)
            ],
            "text_offset": [self.offsets[index].add(token) for token, _, _ in said],
        }

    def _named(self, token: int, p: float | None) -> dict[str, Any]:
        return {
            "token": self.bytes.text(token),
            "logprob": p,
            "bytes": list(self.bytes.bytes_of(token)),
        }


def spoken(said: tuple[float, dict[int, float]] | None) -> tuple[Any, Any]:
    """Return the log-probability of a token, and those of the likeliest tokens by their ids, as JSON can say them: a
    token that is impossible has :data:`IMPOSSIBLE`. Both are None if ``said`` is. A log-probability that is NaN is
    None, and is left out among the likeliest tokens.
    """
    if said is None:
        return None, None
    chosen, top = said
    likeliest = {i: max(p, IMPOSSIBLE) for i, p in top.items() if not isnan(p)}
    return None if isnan(chosen) else max(chosen, IMPOSSIBLE), likeliest


class TextOffsets:
    """Counts, for the log-probabilities of completions, at which character of an answer's text each of its tokens
    begins.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.writer, self.at = TextDecoder(tokenizer), 0

    def add(self, token: int) -> int:
        """Append ``token`` to the text; return the index of the character at which it begins."""
        at = self.at
        self.at += len(self.writer.add(token))
        return at


def usage_of(prompt: int, written: int, hits: int = 0, thinking: int = 0) -> Usage:
    """Build the token counts of a response. ``prompt``, ``written``: numbers of tokens of prompt and answer. ``hits``:
    number of prompt tokens that were in the cache; ``thinking``: number of reasoning tokens of the answer.
    """
    counts = {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
    }
    details = (
        {"completion_tokens_details": {"reasoning_tokens": thinking}}
        if thinking
        else {}
    )
    return (
        counts
        | {"prompt_tokens_details": {"cached_tokens": min(hits, prompt)}}
        | details
    )


def call_fields(piece: CallPiece) -> dict[str, Any]:
    """Build the JSON of ``piece``: of a whole tool call, or in a stream of the new part of a call. Only a first part,
    which has a name, gets an id.
    """
    if piece.name is None:
        return {"function": {"arguments": piece.arguments}}
    said = {"name": piece.name, "arguments": piece.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": said}
