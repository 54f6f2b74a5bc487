"""Requests and errors of OpenAI's HTTP interface."""

import json
import random
import re
from collections.abc import Collection, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    StrictInt,
    model_validator,
)

from weft.data.chat.conversation import OWN_VARIABLES
from weft.data.json_text import parse_json
from weft.generate.sampling import Sampling
from weft.generate.workflow import Workflow
from weft.serve.request_fields import RequestFields

Schema: TypeAlias = dict[str, Any]
Texts: TypeAlias = Sequence[str | list[int]]

#: At most so many stop strings, characters of each, and texts of a request.
MOST_STOPS, LONGEST_STOP, MOST_TEXTS = 16, 256, 2048

#: What stands for a ``top_p`` of 0.
LEAST_TOP_P = 1e-9

#: Characters of a text that a regular expression writes with a backslash.
_IN_REGEX = re.compile(r"[\\.^$|?*+()\[\]{}]")

#: Most milliseconds until the deadline of a workflow: a week.
LONGEST_JOB = 7 * 86_400_000


class Refusal(Exception):
    """An error that a client gets as JSON.

    ``status``: HTTP status. ``message``: text for people. ``code``: error code for programs; None: none. ``param``: the
    wrong field of the request; None: none.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        kinds = {
            401: "authentication_error",
            429: "rate_limit_error",
            500: "server_error",
            503: "server_error",
        }
        self.status, self.code = status, code
        self.body = {
            "error": {
                "message": message, "type": kinds.get(status, "invalid_request_error"), "param": param, "code": code,
            }
        }  # fmt: skip


def read_texts(given: Any) -> Texts:
    """Return the prompts in ``given``, which is a text, a list of token ids, or a list of either. Raises ValueError for
    anything else.
    """
    if isinstance(given, str):
        return [given]
    if _are_ids(given):
        return [given]
    if not isinstance(given, list) or not given:
        raise ValueError(
            f"give a text, ids, or a list of either, not {shown_json(given)}"
        )
    if len(given) > MOST_TEXTS:
        raise ValueError(f"at most {MOST_TEXTS} texts are taken, not {len(given)}")
    for number, item in enumerate(given):
        if not isinstance(item, str) and not _are_ids(item):
            raise ValueError(
                f"give a text, ids, or a list of either; its item {number} is {shown_json(item)}"
            )
    return given


def _are_ids(given: Any) -> bool:
    return isinstance(given, list) and set(map(type, given)) == {int}


def read_stops(given: Any) -> list[str]:
    """Return the stop strings in ``given``, which is one string or a list of strings; empty strings are left out.
    Raises ValueError for too many or too long strings, and for any other value.
    """
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"give a text, or a list of texts, not {shown_json(given)}")
    if len(stops) > MOST_STOPS:
        raise ValueError(f"at most {MOST_STOPS} stops are taken, not {len(stops)}")
    longest = max(map(len, stops), default=0)
    if longest > LONGEST_STOP:
        raise ValueError(f"a stop has at most {LONGEST_STOP} characters, not {longest}")
    return [stop for stop in stops if stop]


def object_in(given: Schema, name: str, path: str = "") -> Schema:
    """Return the object in the field ``name`` of ``given``, or an empty object if the field is missing. ``path``: the
    field's name in errors, if it differs.
    """
    value = given.get(name)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{path or name}: give an object, not {shown_json(value)}")
    return value or {}


def rest_of(given: Schema, name: str, known: Collection[str]) -> Schema:
    """Return the fields of the object ``name`` of ``given`` that are not among ``known``, under their whole names, such
    as ``reasoning.summary``. The reader of requests refuses them, or names them in the log.
    """
    return {
        f"{name}.{key}": value
        for key, value in object_in(given, name).items()
        if key not in known
    }


def merged_fields(given: Schema, converted: Schema) -> Schema:
    """Return the fields ``given`` by a client together with those into which its other fields were ``converted``.
    Raises ValueError for a field that both have with different values, as one of them would be lost.
    """
    said = {name: value for name, value in converted.items() if value is not None}
    for name, value in said.items():
        if given.get(name) not in (None, value):
            raise ValueError(
                f"{name}: another field says otherwise; leave out one of both"
            )
    return given | said


def shown_json(value: Any) -> str:
    """Return the JSON text of ``value`` for an error line, cut to 40 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."


class StreamOptions(RequestFields):
    """Options of a streamed response. ``include_usage``: whether the stream ends with the numbers of tokens of prompt
    and answer. ``include_obfuscation``: accepted without effect. ``continuous_usage_stats``: with ``include_usage``,
    whether every chunk has these numbers as they are by then.
    """

    include_usage: bool = False
    # padding against those who count bytes; a server of one's own needs none
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class NamedSchema(RequestFields):
    """A JSON schema with a name, in OpenAI's field ``response_format``. ``name``, ``description``: name and description
    that the client gives the schema. ``schema_``: the schema itself, which clients send as ``schema``. ``strict``:
    accepted without effect, because answers always meet the schema.
    """

    name: str
    description: str | None = None
    schema_: Schema = Field({}, alias="schema")
    strict: bool | None = None  # it always is


class ResponseFormat(RequestFields):
    """Form of an answer. ``type``: any text, any JSON object, or JSON that meets a schema. ``json_schema``: the schema
    in the last case.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(
                "json_schema: json_schema belongs to the type json_schema, which needs one"
            )
        return self


def read_schema(given: Any) -> Any:
    """Return the JSON schema in ``given``, which may be its text. Raises ValueError for a text that is no object."""
    value = parse_json(given) if isinstance(given, str) else given
    if isinstance(given, str) and not isinstance(value, dict):
        raise ValueError(f"give a schema, which is an object, not {shown_json(value)}")
    return value


class StructuredOutputs(RequestFields):
    """vLLM's field for constrained generation. Exactly one of the constraints may be set.

    ``json_``: JSON schema of the answer, or its text; clients call the field ``json``. ``regex``: regular expression
    that the answer matches. ``choice``: texts, one of which is the answer. ``grammar``: grammar in Lark's notation.
    """

    json_: Annotated[Schema | None, BeforeValidator(read_schema)] = Field(
        None, alias="json"
    )
    regex: str | None = None
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(None, min_length=1)
    grammar: str | None = None  # in Lark's notation

    @model_validator(mode="after")
    def _has_one(self) -> "StructuredOutputs":
        ways = (self.json_, self.regex, self.choice, self.grammar)
        if sum(way is not None for way in ways) != 1:
            raise ValueError("give one of json, regex, choice and grammar")
        return self

    @property
    def language(self) -> "Language":
        """The constraint that is set."""
        if self.json_ is not None:
            return Language("json", self.json_)
        if self.choice is not None:
            words = (_IN_REGEX.sub(r"\\\g<0>", word) for word in self.choice)
            return Language("regex", "|".join(words))
        if self.regex is not None:
            return Language("regex", self.regex)
        return Language("lark", self.grammar or "")


class Language(NamedTuple):
    """A constraint on a generated text. ``text``: the constraint. ``kind``: its language: a JSON schema, a regular
    expression, or a grammar in Lark's notation. These are the arguments of
    :meth:`weft.generate.grammar.Grammars.compile`.
    """

    kind: Literal["json", "regex", "lark"]
    text: str | Schema


class Modelled(RequestFields):
    """Base class of requests to a model.

    Attributes:
        ``model``: the model's name; None: the server's only model.
        ``NAMES``: dict from the names of fields in this class to the names that clients use for them, where these
            differ.
        ``PROMPT``: name of the field with the text that the model reads.
        ``IDLE``: further fields that a client may send, each with the only value that is accepted. They change nothing.
    """

    NAMES: ClassVar[dict[str, str]] = {}
    PROMPT: ClassVar[str] = "prompt"  # the field that is read
    IDLE: ClassVar[dict[str, Any]] = {}

    model: str | None = None

    @classmethod
    def prepared(cls, given: Schema) -> Schema:
        """Convert the request body ``given`` to the fields that the class declares. By default it is returned
        unchanged.
        """
        return given


class WorkflowStage(RequestFields):
    """A request's place in a job of several requests.

    ``id``: name of the job, which all its requests have. ``stage``: label of this stage. ``remaining``: labels of the
    stages after it. ``deadline_ms``: milliseconds from the request's arrival to the end of the whole job; 0 or less if
    the deadline has passed; None: no deadline.
    """

    id: str = Field(min_length=1, max_length=256)
    stage: str = Field("", max_length=64)
    remaining: list[Annotated[str, Field(max_length=64)]] = Field([], max_length=64)
    deadline_ms: float | None = Field(None, ge=-LONGEST_JOB, le=LONGEST_JOB)

    def begun(self, now: float) -> Workflow:
        """Return a description, for the scheduler, of the job of several requests to which this request belongs.

        ``now``: time at which the request came, in seconds of ``time.monotonic``; its deadline counts from then.
        """
        return Workflow.of_frame(self.model_dump(), now)


class SamplingRequest(Modelled):
    """Common fields of requests for completions and chats. Names, meanings and ranges are OpenAI's, and for fields that
    OpenAI does not have, vLLM's.

    ``workflow`` is Weft's own: the request's place in a job of several requests.
    """

    temperature: float = Field(1.0, ge=0, le=2)
    # 0 leaves the likeliest token
    top_p: Annotated[
        float, Field(ge=0, le=1), AfterValidator(partial(max, LEAST_TOP_P))
    ] = 1.0
    # as others, -1 stands for all tokens
    top_k: Annotated[int, Field(ge=-1, lt=2**31), AfterValidator(partial(max, 0))] = 0
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0.01, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = Field({})
    seed: int | None = None
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    stop: Annotated[list[str], PlainValidator(read_stops)] = Field([])
    stop_token_ids: list[int] = Field([])
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    workflow: WorkflowStage | None = None
    # the smaller, the earlier; as vLLM has it
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    # they change no answer, and may be anything
    prompt_cache_key: Any = None
    user: Any = None

    @model_validator(mode="after")
    def _agrees(self) -> "SamplingRequest":
        """Of two fields that say different things about the same, none is left out silently."""
        form = self.response_format
        if self.structured_outputs and form and form.type != "text":
            raise ValueError(
                "structured_outputs: response_format gives the text another form; leave out one of both"
            )
        if self.most is not None and self.min_tokens > self.most:
            raise ValueError(
                f"min_tokens: the answer has at most {self.most} tokens, not {self.min_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _can_end(self) -> "SamplingRequest":
        if self.language and self.ignore_eos:
            raise ValueError(
                "ignore_eos: a text that has a form ends where it is complete; leave out ignore_eos"
            )
        return self

    @property
    def language(self) -> Language | None:
        """The constraint that the text must meet, such as a JSON schema; None if there is none."""
        if self.structured_outputs:
            return self.structured_outputs.language
        if self.response_format is None or self.response_format.type == "text":
            return None
        asked = self.response_format.json_schema
        return Language("json", asked.schema_ if asked else {"type": "object"})

    @property
    def session(self) -> str:
        """Name of the conversation or user that the request belongs to, or an empty string."""
        return str(self.prompt_cache_key or self.user or "")

    @property
    def form_field(self) -> str:
        """Name of the request field that may constrain the text: ``structured_outputs`` if it is set, else
        ``response_format``.
        """
        return "structured_outputs" if self.structured_outputs else "response_format"

    @property
    def most(self) -> int | None:
        """Largest number of tokens of an answer; None if the request does not set it."""
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """Number of alternative log-probabilities per token. 0: only the log-probability of the chosen token; None: no
        log-probabilities.
        """
        raise NotImplementedError

    @property
    def sampling(self) -> Sampling:
        """Settings of sampling that the request asks for. If it sets no seed, every access draws a random one."""
        seed = random.getrandbits(31) if self.seed is None else self.seed
        return Sampling(
            self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty,
            self.presence_penalty, self.frequency_penalty, self.logit_bias, seed,
        )  # fmt: skip


#: Fields that a beam search heeds, or that change nothing of it.
_OF_SEARCHES = frozenset({
    "model", "prompt", "n", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "use_beam_search", "length_penalty",
    "prune", "temperature", "seed", "workflow", "user", "prompt_cache_key", "add_special_tokens",
})  # fmt: skip


class CompletionRequest(SamplingRequest):
    """``POST /v1/completions``. With a null ``prompt``, generation starts from an empty text. Names and meanings are
    OpenAI's and vLLM's.

    In a text, the names of special tokens are these tokens, as the text is all that the model reads.
    ``add_special_tokens``: whether the tokens that the tokenizer writes before a text stand before it.
    ``prune`` is Weft's own: by how much a beam's score may be below the best one in a beam search; 0: beams are not
    pruned.
    """

    prompt: Annotated[Texts, PlainValidator(read_texts)]
    add_special_tokens: bool = True
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = Field(None, ge=1, le=128)
    echo: bool = False
    use_beam_search: bool = False
    length_penalty: float | None = Field(None, ge=0, le=10)
    prune: float = Field(0.0, ge=0, le=1000)

    @model_validator(mode="after")
    def _chooses(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of: {self.n} answers are not the best of fewer")
        if self.stream and self.best_of is not None and self.best_of > self.n:
            raise ValueError(
                "best_of: best_of cannot be streamed; leave out one of them"
            )
        return self

    @model_validator(mode="after")
    def _searches_alone(self) -> "CompletionRequest":
        """Beams are the likeliest texts, so what shapes the odds of single tokens would not count."""
        if not self.use_beam_search and self.length_penalty not in (None, 1):
            raise ValueError(
                "length_penalty: it is about beam search; set use_beam_search, or leave it out"
            )
        if not self.use_beam_search and self.prune:
            raise ValueError(
                "prune: it is about beam search; set use_beam_search, or leave it out"
            )
        idle = _OF_SEARCHES | {
            name
            for name in self.model_fields_set
            if getattr(self, name) == type(self).model_fields[name].default
        }
        if self.use_beam_search and self.max_tokens == 0:
            raise ValueError("max_tokens: use_beam_search writes one token at least")
        if self.use_beam_search and (others := sorted(self.model_fields_set - idle)):
            raise ValueError(
                f"{others[0]}: use_beam_search finds the likeliest texts, as they are; leave out one of both"
            )
        return self

    @classmethod
    def prepared(cls, given: Schema) -> Schema:
        changed: Schema = {"prompt": ""} if given.get("prompt", ...) is None else {}
        # as chats say that they want none; they would count as the numbers 0 and 1
        if isinstance(given.get("logprobs"), bool):
            if given["logprobs"]:
                raise ValueError(
                    "logprobs: give the number of likeliest tokens, not true"
                )
            changed["logprobs"] = None
        return given | changed

    @property
    def top(self) -> int | None:
        return 0 if self.logprobs is None and self.best_of else self.logprobs


class Function(RequestFields):
    """A function that the model may call. ``name``, ``description``: name and description that the model reads.
    ``parameters``: JSON schema of its arguments; None: any object.
    """

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(RequestFields):
    """A tool that the model may call, which is always a function."""

    type: Literal["function"] = "function"
    function: Function


class ToolChoice(NamedTuple):
    """Which tools an answer may or must call. ``mode``: whether it may ("auto"), must ("required") or cannot ("none")
    call tools. ``names``: names of the allowed tools; None: any.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] | None = None


def read_choice(given: Any) -> ToolChoice:
    """Return the tool choice in ``given``, which is a mode, one function, or a mode with functions. Raises ValueError
    for any other value.
    """
    if given in ("none", "auto", "required"):
        return ToolChoice(given)
    modes = "none, auto, required, a function, or allowed_tools"
    if not isinstance(given, dict):
        raise ValueError(f"give {modes}, not {shown_json(given)}")
    kind, inside = given.get("type", "function"), given
    if kind == "function":
        return ToolChoice("required", (_name_of(given),))
    if kind == "allowed_tools":
        inside = given.get("allowed_tools", given)
        mode, tools = (
            (inside.get("mode"), inside.get("tools"))
            if isinstance(inside, dict)
            else (None, None)
        )
        if mode in ("auto", "required") and isinstance(tools, list):
            return ToolChoice(mode, tuple(map(_name_of, tools)))
    raise ValueError(f"give {modes}, not {shown_json(given)}")


def _name_of(tool: Any) -> str:
    """Return the name of a function, which chats nest and responses do not."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ValueError(f"it names no function: {shown_json(tool)}")
    return name


class Conversing(Modelled):
    """Fields of requests about a conversation and its chat template. Names and meanings are OpenAI's and vLLM's.

    Attributes:
        ``messages``: the conversation.
        ``add_generation_prompt``: whether the prompt ends with the beginning of an assistant's message; None: yes,
            unless the last message is continued.
        ``continue_final_message``: whether the answer continues the last message.
        ``chat_template_kwargs``: further variables of the chat template.
        ``reasoning_effort``: how much the model is to reason, for templates that read it.
    """

    PROMPT: ClassVar[str] = "messages"

    messages: Annotated[list[Any], Field(min_length=1)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Schema = Field({})
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _opens_or_continues(self) -> "Conversing":
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "add_generation_prompt: a new turn begins, or the last one goes on; choose one of both"
            )
        if taken := self.chat_template_kwargs.keys() & OWN_VARIABLES:
            raise ValueError(
                f"chat_template_kwargs: {min(taken)!r} is no variable of the user's"
            )
        return self

    @property
    def formed(self) -> bool:
        """Whether the answer must have a form, which leaves no room for reasoning."""
        return False

    @property
    def thinks(self) -> bool | None:
        """Whether the answer may begin with reasoning; None if the request does not say."""
        given = self.chat_template_kwargs.get("enable_thinking")
        if isinstance(given, bool):
            return given
        return False if self.reasoning_effort == "none" else None

    @property
    def opens(self) -> bool:
        """Whether the prompt ends with the beginning of an assistant's message, which the model then writes."""
        return (
            not self.continue_final_message
            if self.add_generation_prompt is None
            else self.add_generation_prompt
        )


class ChatRequest(SamplingRequest, Conversing):
    """``POST /v1/chat/completions``: a conversation that the model is to continue with the assistant's next message."""

    IDLE: ClassVar[dict[str, Any]] = {"add_special_tokens": False}

    tools: list[Tool] = Field([])
    tool_choice: Annotated[ToolChoice, PlainValidator(read_choice)] = ToolChoice()
    parallel_tool_calls: bool = True
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @model_validator(mode="after")
    def _tools_are_there(self) -> "ChatRequest":
        names = [tool.function.name for tool in self.tools]
        for name in self.tool_choice.names or ():
            if name not in names:
                raise ValueError(
                    f"tool_choice: it names {name!r}, which is none of the tools"
                )
        if self.tool_choice.mode == "required" and not self.offered:
            raise ValueError("tool_choice: it is 'required', but there are no tools")
        if self.offered and self.language and self.language.kind == "lark":
            raise ValueError(
                "structured_outputs: a grammar stands alone; leave out tools or structured_outputs"
            )
        if self.max_tokens not in (None, self.most):
            raise ValueError(
                f"max_tokens: the answer has at most {self.most} tokens by another field; leave out one of both"
            )
        if self.top_logprobs and not self.logprobs:
            raise ValueError(
                "top_logprobs: they stand beside log-probabilities; set logprobs to true"
            )
        return self

    @property
    def offered(self) -> list[Tool]:
        """List of the tools that the request lets the model call; empty if the model may call none."""
        mode, names = self.tool_choice
        return (
            []
            if mode == "none"
            else [t for t in self.tools if names is None or t.function.name in names]
        )

    @property
    def forced(self) -> bool:
        """Whether the answer must call one of the offered tools."""
        return self.tool_choice.mode == "required"

    @property
    def formed(self) -> bool:
        return self.forced or self.language is not None

    @property
    def top(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class EmbeddingRequest(Modelled):
    """``POST /v1/embeddings``: texts to be converted to vectors.

    Attributes:
        ``input``: one or several texts, or lists of token ids.
        ``encoding_format``: whether a vector is sent as a list of numbers or as base64 of float32 values.
        ``pooling``: whether a text's vector is the mean of its tokens' vectors, or the last token's vector.
        ``dimensions``: number of values of a vector that are kept, from the first one on; None: all.
    """

    IDLE: ClassVar[dict[str, Any]] = {"add_special_tokens": True}

    input: Annotated[Texts, PlainValidator(read_texts)]
    encoding_format: Literal["float", "base64"] = "float"
    pooling: Literal["mean", "last"] = "mean"
    dimensions: int | None = Field(None, ge=1)


class ScoreRequest(Conversing):
    """``POST /v1/score``: a conversation, which ends with the answer to be scored."""

    add_generation_prompt: Literal[False] = False
    continue_final_message: Literal[False] = False


class Untokenized(Conversing):
    """``POST /tokenize``: the text ``prompt`` or the conversation ``messages``, to be converted to token ids as
    completions and chats are. ``add_special_tokens``: as in completions; a conversation's template writes its own.
    """

    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Annotated[list[Any], Field(min_length=1)] = Field([])

    @model_validator(mode="after")
    def _has_one(self) -> "Untokenized":
        if (self.prompt is None) == (not self.messages):
            raise ValueError("prompt: give prompt or messages")
        if self.messages and self.add_special_tokens:
            raise ValueError(
                "add_special_tokens: the template writes those of a conversation; leave it out"
            )
        return self


class Tokenized(Modelled):
    """``POST /detokenize``: the token ids ``tokens``, to be converted to text."""

    tokens: list[Annotated[StrictInt, Field(ge=0)]]
