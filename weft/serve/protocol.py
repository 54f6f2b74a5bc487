"""Requests and errors of OpenAI's HTTP interface."""

import random
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

from weft.generate.sampling import Sampling

Schema: TypeAlias = dict[str, Any]
Stop = Annotated[str, Field(max_length=256)]
Ids = Annotated[list[StrictInt], Field(min_length=1)]
Several = Annotated[list[str] | list[Ids], Field(min_length=1, max_length=2048)]


class Refusal(Exception):
    """An error that a client gets as JSON, with an HTTP status."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        kinds = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        self.status = status
        self.body = {
            "error": {
                "message": message, "type": kinds.get(status, "invalid_request_error"), "param": param, "code": code,
            }
        }  # fmt: skip


class Strict(BaseModel):
    """An object without other fields than those declared: a setting that is ignored would mislead its sender."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(Strict):
    include_usage: bool = False


class NamedSchema(Strict):
    name: str
    description: str | None = None
    schema_: Schema = Field({}, alias="schema")
    strict: bool | None = None  # it always is


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema, which needs one")
        return self


class StructuredOutputs(Strict):
    """vLLM's field for constrained generation; one of its ways."""

    json_: Schema | None = Field(None, alias="json")
    regex: str | None = None
    grammar: str | None = None  # in Lark's notation

    @model_validator(mode="after")
    def _has_one(self) -> "StructuredOutputs":
        if sum(one is not None for one in (self.json_, self.regex, self.grammar)) != 1:
            raise ValueError("give one of json, regex and grammar")
        return self


class Language(NamedTuple):
    """A constraint on a text, as :meth:`weft.generate.grammar.Grammars.compile` takes it."""

    kind: Literal["json", "regex", "lark"]
    text: str | Schema


class Modelled(Strict):
    """A request to a model by its name, or to the only one."""

    model: str | None = None
    user: str | None = None


class SamplingRequest(Modelled):
    """What requests for completions and for chats share; names and ranges are OpenAI's, and some of vLLM's."""

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
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _can_end(self) -> "SamplingRequest":
        if self.language and self.ignore_eos:
            raise ValueError("a text that has a form ends where it is complete; leave out ignore_eos")
        return self

    @property
    def language(self) -> Language | None:
        """The constraint on the text, if there is one."""
        if said := self.structured_outputs:
            if said.json_ is not None:
                return Language("json", said.json_)
            return Language("regex", said.regex) if said.regex is not None else Language("lark", said.grammar or "")
        if self.response_format is None or self.response_format.type == "text":
            return None
        asked = self.response_format.json_schema
        return Language("json", asked.schema_ if asked else {"type": "object"})

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


class CompletionRequest(SamplingRequest):
    """``POST /v1/completions``."""

    prompt: Annotated[str | Ids | list[str] | list[Ids], Field(min_length=1)]
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = Field(None, ge=1, le=128)

    @property
    def top(self) -> int | None:
        return 0 if self.logprobs is None and self.best_of else self.logprobs

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        return several(self.prompt)


class Function(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"] = "function"
    function: Function


class ChosenName(Strict):
    name: str


class Chosen(Strict):
    type: Literal["function"] = "function"
    function: ChosenName


class ChatRequest(SamplingRequest):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Chosen = "auto"
    parallel_tool_calls: bool = True
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @model_validator(mode="after")
    def _tools_are_there(self) -> "ChatRequest":
        names = [tool.function.name for tool in self.offered]
        if self.offered and self.language:
            raise ValueError("a text cannot be a call and have another form; leave out tools or response_format")
        if isinstance(self.tool_choice, Chosen) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}, which is none of the tools")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice is 'required', but there are no tools")
        return self

    @property
    def offered(self) -> list[Tool]:
        """Tools that the model may call."""
        return (self.tools or []) if self.tool_choice != "none" else []

    @property
    def forced(self) -> list[Schema]:
        """Functions one of which the answer has to call."""
        found = [tool.function.model_dump() for tool in self.offered if self.tool_choice != "auto"]
        chosen = self.tool_choice.function.name if isinstance(self.tool_choice, Chosen) else None
        return [function for function in found if chosen in (None, function["name"])]

    @property
    def top(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class Texts(Modelled):
    """``POST /v1/embeddings``. ``pooling``: of a text's tokens, the mean or the last one's vector."""

    input: Annotated[str, Field(min_length=1)] | Ids | Several
    encoding_format: Literal["float", "base64"] = "float"
    pooling: Literal["mean", "last"] = "mean"

    @property
    def texts(self) -> Sequence[str | list[int]]:
        return several(self.input)


class Untokenized(Modelled):
    """``POST /tokenize``: a text, or a conversation."""

    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _has_one(self) -> "Untokenized":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages")
        return self


class Tokenized(Modelled):
    """``POST /detokenize``."""

    tokens: list[Annotated[StrictInt, Field(ge=0)]]


def several(given: str | list[int] | list[str] | list[list[int]]) -> Sequence[str | list[int]]:
    """A list of texts or of lists of ids; a single one becomes a list of one."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given
