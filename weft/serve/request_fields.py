"""Fields of requests: null means the default, values without effect are accepted, and a refusal names its field."""

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

#: Fields of OpenAI's and vLLM's that change no answer here, whatever they say.
HARMLESS = frozenset({
    "cache_control", "client_metadata", "include", "inference_geo", "max_tool_calls", "metadata", "prediction",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning.generate_summary",
    "reasoning.summary", "request_id", "safety_identifier", "service_tier", "store", "thinking.budget_tokens",
    "thinking.display", "tools.allowed_callers", "tools.cache_control", "tools.defer_loading",
    "tools.eager_input_streaming", "tools.input_examples", "user",
})  # fmt: skip

_UNKEPT = "nothing is kept here; leave it out, and send the whole conversation"

#: Fields that would change the answer: the values under which they do not, and why others are refused.
IDLE: Mapping[str, tuple[Sequence[Any], str]] = {
    "access_programs": ((), ""),
    "allowed_token_ids": ((), "use structured_outputs"),
    "audio": ((), "answers are texts"),
    "background": ((False,), _UNKEPT),
    "background_options": ((), _UNKEPT),
    "bad_words": (([],), "use logit_bias"),
    "context_management": (([],), "send the conversation as it is to be read"),
    "conversation": ((), _UNKEPT),
    "detokenize": ((True,), ""),
    "early_stopping": ((False,), ""),
    "echo": ((False,), "use /v1/completions"),
    "function_call": (("none", "auto"), "use tool_choice"),
    "functions": (([],), "use tools"),
    "image": ((), "answers are texts"),
    "include_stop_str_in_output": ((False,), ""),
    "length_penalty": ((1,), ""),
    "modalities": ((["text"],), "answers are texts"),
    "moderation": ((), ""),
    "previous_response_id": ((), _UNKEPT),
    "prompt": ((), _UNKEPT),
    "prompt_logprobs": ((), "use echo with logprobs of /v1/completions"),
    "return_token_ids": ((False,), ""),
    "return_tokens_as_token_ids": ((False,), ""),
    "skip_special_tokens": ((True,), ""),
    "spaces_between_special_tokens": ((True,), ""),
    "suffix": (("",), "a text is only written on"),
    "truncate_prompt_tokens": ((), "a prompt is read as a whole"),
    "truncation": (("disabled",), "a conversation is read as a whole"),
    "use_beam_search": ((False,), "use /v1/completions"),
    "verbosity": (("medium",), "say in the conversation how long an answer is to be"),
    "web_search_options": ((), ""),
}


class RequestFields(BaseModel):
    """A JSON object that accepts only its declared fields. Others are refused, as a setting that is ignored would
    mislead its sender.

    A field that is null takes its default. Numbers must be finite.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return (
            {key: value for key, value in given.items() if value is not None}
            if isinstance(given, dict)
            else given
        )

    @classmethod
    def fields(cls) -> frozenset[str]:
        """Return the names of all fields that requests of this class may have, as clients spell them."""
        return frozenset(
            field.alias or name for name, field in cls.model_fields.items()
        )


def take_idle(
    given: Mapping[str, Any], declared: Collection[str], more: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Split the request ``given`` into the fields to be read, and the names of fields that do not change the answer.
    ``declared``: names of the fields that are read. ``more``: further fields that are accepted without effect, beyond
    those of every request; each is given with its only accepted value. Raises ValueError for another value of such a
    field. Unknown fields are among the fields to be read, where they are refused later. Fields with the value None are
    left out.
    """
    rest, idle = dict[str, Any](), list[str]()
    known = HARMLESS | IDLE.keys() | more.keys()
    for name, value in given.items():
        if value is None:
            continue
        if name in declared or name not in known:
            rest[name] = value
            continue
        values, remedy = (
            ((more[name],), "") if name in more else IDLE.get(name, ((value,), ""))
        )
        if value not in values:
            only = (
                f"only {' or '.join(map(repr, values))} is possible here"
                if values
                else "this is not possible here"
            )
            raise ValueError(
                f"{name}: {remedy if remedy == _UNKEPT else '; '.join(filter(None, (only, remedy)))}"
            )
        idle.append(name)
    return rest, idle


def explained(
    error: ValidationError, given: Any, declared: Collection[str]
) -> tuple[str, str]:
    """Return the path of the wrong field in the request ``given``, with dots between keys, and the reason why ``error``
    refuses it. ``declared``: names of the fields that a request may have.
    """
    first = error.errors(include_url=False)[0]
    path, why = _path(first["loc"], given), _why(first)
    field, colon, rest = why.partition(": ")
    if colon and first["type"] == "value_error" and field.isidentifier():
        # a check of several fields names the one that is to change
        path, why = [*path, field], rest
    if first["type"] == "extra_forbidden":
        # of a field with a dot, the declared names are none of its neighbours
        outer = len(path) == 1 and "." not in path[-1]
        close = difflib.get_close_matches(path[-1], declared if outer else (), 1)
        why = (
            f"there is no such field{f'; did you mean {close[0]!r}?' if close else ''}"
        )
    return ".".join(path), why


def _path(where: Sequence[int | str], given: Any) -> list[str]:
    """Return the keys and indices in ``where`` that lead into ``given``, without pydantic's names of types between
    them.
    """
    path: list[str] = []
    for number, key in enumerate(where):
        last = number == len(where) - 1
        if isinstance(given, dict) and (
            key in given or (last and isinstance(key, str) and key.isidentifier())
        ):
            given = given.get(key)
        elif isinstance(given, list) and isinstance(key, int):
            given = given[key] if key < len(given) else None
        else:
            continue
        path.append(str(key))
    return path


def _why(error: ErrorDetails) -> str:
    """Explain the error in words for the sender of the request."""
    said, about = error["msg"], error.get("ctx", {})
    if error["type"] == "too_long":
        return f"at most {about['max_length']} are taken, not {about['actual_length']}"
    if error["type"] == "missing":
        return "it is missing"
    return said.removeprefix("Value error, ")
