"""The words of OpenAI's HTTP interface: what is asked, what is answered, and how a refusal looks."""

import random
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt

from weft.data.tokenizer import Tokenizer
from weft.generate.sampling import Sampling
from weft.serve.service import Event

Ids = Annotated[list[StrictInt], Field(min_length=1)]


class Refusal(Exception):
    """An answer that is no answer, with its status of HTTP."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        kinds = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        self.status = status
        self.body = {
            "error": {
                "message": message, "type": kinds.get(status, "invalid_request_error"), "param": param, "code": code,
            }
        }  # fmt: skip


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class Question(BaseModel):
    """What both ways of asking share; names and ranges are OpenAI's, and some of vLLM's."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0.01, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = None
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def stops(self) -> list[str]:
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in found if stop]

    @property
    def most(self) -> int | None:
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """How many log-probabilities beside the chosen token's are asked for; None: not even that."""
        raise NotImplementedError

    @property
    def sampling(self) -> Sampling:
        seed = random.getrandbits(31) if self.seed is None else self.seed
        return Sampling(
            self.temperature, max(0, self.top_k), self.top_p, self.min_p, self.repetition_penalty,
            self.presence_penalty, self.frequency_penalty, self.logit_bias or {}, seed,
        )  # fmt: skip


class Completion(Question):
    """``POST /v1/completions``."""

    prompt: Annotated[str | Ids | list[str] | list[Ids], Field(min_length=1)]
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = Field(None, ge=1, le=128)

    @property
    def top(self) -> int | None:
        return 0 if self.logprobs is None and self.best_of else self.logprobs

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class Chat(Question):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @property
    def top(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class Replies:
    """The JSON of answers to one question: whole, or chunk by chunk."""

    def __init__(self, question: Question, model: str, tokenizer: Tokenizer) -> None:
        self.chat = isinstance(question, Chat)
        self.include_usage = bool((question.stream_options or StreamOptions()).include_usage)
        self.kind = "chat.completion.chunk" if self.chat else "text_completion"  # of a chunk
        self.logs = question.top is not None and (self.chat or getattr(question, "logprobs", None) is not None)
        self.tokenizer = tokenizer
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex
        self.head = {"id": self.id, "created": int(time.time()), "model": model}

    def chunk(self, index: int, text: str, events: Sequence[Event], finish: str | None, first: bool) -> dict[str, Any]:
        """What is new of one answer."""
        choice: dict[str, Any] = {"index": index, "logprobs": self._logs(events), "finish_reason": finish}
        if self.chat:
            choice["delta"] = ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})
        else:
            choice["text"] = text
        return {**self.head, "object": self.kind, "choices": [choice]} | ({"usage": None} if self.include_usage else {})

    def whole(self, answers: Sequence[tuple[str, Sequence[Event], str]], usage: dict[str, int]) -> dict[str, Any]:
        """All of the answers: texts, what came, and why they ended."""
        choices = []
        for index, (text, events, finish) in enumerate(answers):
            said = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            choices.append({"index": index, **said, "logprobs": self._logs(events), "finish_reason": finish})
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self.head, "object": kind, "choices": choices, "usage": usage}

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """The last chunk of a stream that was asked to count."""
        return {**self.head, "object": self.kind, "choices": [], "usage": usage}

    def _logs(self, events: Sequence[Event]) -> dict[str, Any] | None:
        if not self.logs:
            return None
        found = [(e.token, *e.log_probability) for e in events if e.token is not None and e.log_probability is not None]
        if self.chat:
            return {
                "content": [
                    self._named(token, p) | {"top_logprobs": [self._named(i, q) for i, q in top.items()]}
                    for token, p, top in found
                ]
            }
        return {
            "tokens": [self.tokenizer.decode([token]) for token, _, _ in found],
            "token_logprobs": [p for _, p, _ in found],
            "top_logprobs": [{self.tokenizer.decode([i]): q for i, q in top.items()} for _, _, top in found],
        }

    def _named(self, token: int, p: float) -> dict[str, Any]:
        text = self.tokenizer.decode([token])
        return {"token": text, "logprob": p, "bytes": list(text.encode())}


def usage_of(prompt: int, written: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
