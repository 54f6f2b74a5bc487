"""Forty calls of people's clients against a server with OpenAI's interface, and a few of Anthropic's against Weft's.

The clients need an environment of their own, as their versions of shared packages differ from ours:

    python -m venv /tmp/clients
    /tmp/clients/bin/pip install openai langchain-openai instructor litellm anthropic
    weft serve --checkpoint MODEL --name m
    /tmp/clients/bin/python tests/serve/clients.py http://127.0.0.1:8000 m [KEY]

Each of openai, langchain-openai, instructor and litellm makes ten calls: answers, streams, tools, forms, and what was
answered sent back. Words are not judged, as any model will do; a model that was not trained is asked for little. Prints
a line per call, and leaves with 1 if any has failed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Literal

# nothing is fetched
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}

TALK: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is two and two?"},
]
CITY = {
    "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"], "additionalProperties": False,
}  # fmt: skip
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": CITY,
    },
}
SHAPE = {
    "type": "json_schema",
    "json_schema": {"name": "place", "schema": CITY, "strict": True},
}

#: A call of a client: what it is about, and what makes it and returns something that is not empty.
ClientCall = tuple[str, Callable[[], Any]]


def checked(arguments: str | dict[str, Any]) -> dict[str, Any]:
    """Arguments that meet the schema of ``CITY``."""
    given: dict[str, Any] = (
        json.loads(arguments) if isinstance(arguments, str) else arguments
    )
    assert given["city"] in ("Oslo", "Rome") and given["days"] in (1, 2, 3), given
    return given


def openai_calls(base: str, model: str, key: str) -> Iterator[ClientCall]:
    import openai

    client = openai.OpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0)
    chat = client.chat.completions
    asked: Any = {"model": model, "messages": TALK, "max_tokens": 20, "seed": 1}
    forced: Any = asked | {
        "tools": [WEATHER],
        "tool_choice": "required",
        "max_tokens": 900,
    }

    def again() -> Any:
        message = chat.create(**forced).choices[0].message
        (call,) = message.tool_calls or ()
        answer = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
        return chat.create(
            **asked | {"messages": [*TALK, message, answer], "tools": [WEATHER]}
        )

    def streamed() -> Any:
        with chat.stream(**forced) as stream:
            (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
            return checked(call.function.arguments)

    async def abroad() -> Any:
        async with openai.AsyncOpenAI(
            base_url=f"{base}/v1", api_key=key, max_retries=0
        ) as other:
            return [
                chunk
                async for chunk in await other.chat.completions.create(
                    **asked, stream=True
                )
            ]

    yield (
        "lists models",
        lambda: [client.models.retrieve(each.id) for each in client.models.list()],
    )
    yield (
        "chats",
        lambda: chat.create(
            **asked, user="u", store=False, metadata={"a": "b"}, service_tier="auto"
        ),
    )
    yield (
        "chats with nulls",
        lambda: chat.create(
            **asked, temperature=None, n=None, stop=None, logprobs=None
        ),
    )
    yield "streams a chat", lambda: asyncio.run(abroad())
    yield (
        "completes",
        lambda: client.completions.create(
            model=model, prompt="a", max_tokens=3, echo=True, logprobs=2
        ),
    )
    yield (
        "forces a call",
        lambda: checked(
            chat.create(**forced).choices[0].message.tool_calls[0].function.arguments
        ),
    )
    yield "streams a call", streamed
    yield "answers a call", again
    form: Any = {"format": SHAPE["json_schema"] | {"type": "json_schema"}}
    shaped: Any = {
        "model": model,
        "input": "?",
        "max_output_tokens": 900,
        "text": form,
        "extra_body": {"seed": 1},
    }
    yield "has a form", lambda: checked(client.responses.create(**shaped).output_text)
    yield (
        "embeds",
        lambda: (
            client.embeddings.create(model=model, input=["a", "b"], dimensions=8)
            .data[1]
            .embedding
        ),
    )


def langchain_calls(base: str, model: str, key: str) -> Iterator[ClientCall]:
    from langchain_core.messages import (
        AIMessage,
        HumanMessage,
        SystemMessage,
        ToolMessage,
    )
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

    shared: Any = {
        "base_url": f"{base}/v1",
        "api_key": key,
        "model": model,
        "max_retries": 0,
    }
    short, long = (
        ChatOpenAI(**shared, max_tokens=20, seed=1),
        ChatOpenAI(**shared, max_tokens=900, seed=1),
    )
    newer = ChatOpenAI(**shared, max_tokens=20, use_responses_api=True)
    talk = [SystemMessage("Be brief."), HumanMessage("What is two and two?")]
    caller = long.bind_tools(
        [WEATHER], tool_choice="get_weather", parallel_tool_calls=False
    )

    def again() -> Any:
        said = caller.invoke(talk)
        (call,) = said.tool_calls
        return short.invoke(
            [*talk, said, ToolMessage("Rain.", tool_call_id=call["id"])]
        )

    def empty() -> Any:
        return short.invoke([*talk, AIMessage(""), HumanMessage("Again?")])

    yield "chats", lambda: short.invoke(talk)
    yield "streams", lambda: list(short.stream(talk, stream_usage=True))
    yield "batches", lambda: short.batch([talk, talk])
    yield "chats later", lambda: asyncio.run(short.ainvoke(talk))
    yield "forces a call", lambda: checked(caller.invoke(talk).tool_calls[0]["args"])
    yield "answers a call", again
    yield (
        "has a form",
        lambda: checked(
            long.with_structured_output(CITY | {"title": "place"}).invoke(talk)
        ),
    )
    yield "sends an empty answer back", empty
    yield "asks for responses", lambda: newer.invoke(talk)
    yield (
        "completes and embeds",
        lambda: [
            OpenAI(**shared, max_tokens=5).invoke("a"),
            OpenAIEmbeddings(**shared, check_embedding_ctx_length=False).embed_query(
                "a"
            ),
        ],
    )


def instructor_calls(base: str, model: str, key: str) -> Iterator[ClientCall]:
    import instructor
    import openai
    from pydantic import BaseModel, ConfigDict

    class Place(BaseModel):
        """A place to go to."""

        # a model that was not trained would write more and more
        model_config = ConfigDict(extra="forbid")

        city: Literal["Oslo", "Rome"]
        days: Literal[1, 2, 3]

    class Journey(BaseModel):
        """Where the journey goes."""

        model_config = ConfigDict(extra="forbid")

        place: Place
        alone: bool

    asked: Any = {
        "model": model,
        "messages": TALK,
        "max_tokens": 900,
        "max_retries": 0,
        "seed": 1,
    }
    own = openai.OpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0)
    far = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0)

    async def later() -> Any:
        return await instructor.from_openai(far).chat.completions.create(
            response_model=Place, **asked
        )

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(own, mode=mode).chat.completions

        def of(kind: Any, client: Any = client) -> Any:
            return client.create(response_model=kind, **asked)

        def partly(client: Any = client) -> Any:
            return list(client.create_partial(response_model=Journey, **asked))

        def with_answer(client: Any = client) -> Any:
            return client.create_with_completion(response_model=Place, **asked)

        yield f"a place ({mode.value})", lambda of=of: of(Place)
        yield f"a journey ({mode.value})", lambda of=of: of(Journey)
        yield f"a journey that comes ({mode.value})", partly
        yield f"a place and its answer ({mode.value})", with_answer
    yield "a place later", lambda: asyncio.run(later())
    yield (
        "plain words",
        lambda: instructor.from_openai(own).chat.completions.create(
            response_model=None, **asked | {"max_tokens": 9}
        ),
    )


def litellm_calls(base: str, model: str, key: str) -> Iterator[ClientCall]:
    import litellm

    litellm.telemetry = False
    own: Any = {
        "model": f"openai/{model}",
        "api_base": f"{base}/v1",
        "api_key": key,
        "num_retries": 0,
    }
    asked: Any = own | {"messages": TALK, "max_tokens": 20, "seed": 1}
    forced: Any = asked | {
        "tools": [WEATHER],
        "tool_choice": "required",
        "max_tokens": 900,
    }

    def again() -> Any:
        message = litellm.completion(**forced).choices[0].message
        answer = {
            "role": "tool",
            "tool_call_id": message.tool_calls[0].id,
            "content": "Rain.",
        }
        return litellm.completion(
            **asked
            | {"messages": [*TALK, message.model_dump(), answer], "tools": [WEATHER]}
        )

    async def later() -> Any:
        return await litellm.acompletion(**asked)

    yield "chats", lambda: litellm.completion(**asked)
    yield (
        "streams",
        lambda: list(
            litellm.completion(
                **asked, stream=True, stream_options={"include_usage": True}
            )
        ),
    )
    yield "chats later", lambda: asyncio.run(later())
    yield (
        "chats with settings",
        lambda: litellm.completion(
            **asked,
            temperature=0.5,
            top_p=0.9,
            stop=["x"],
            presence_penalty=0.1,
            user="u",
        ),
    )
    yield (
        "forces a call",
        lambda: checked(
            litellm.completion(**forced)
            .choices[0]
            .message.tool_calls[0]
            .function.arguments
        ),
    )
    yield "streams a call", lambda: list(litellm.completion(**forced, stream=True))
    yield "answers a call", again
    yield (
        "has a form",
        lambda: checked(
            litellm.completion(**asked | {"response_format": SHAPE, "max_tokens": 900})
            .choices[0]
            .message.content
        ),
    )
    yield (
        "completes",
        lambda: litellm.text_completion(
            **own | {"model": f"text-completion-openai/{model}"},
            prompt="a",
            max_tokens=5,
        ),
    )
    yield (
        "embeds",
        lambda: litellm.embedding(
            **own, input=["a", "b"], encoding_format="float"
        ).data[1],
    )


def anthropic_calls(base: str, model: str, key: str) -> Iterator[ClientCall]:
    import anthropic

    client = anthropic.Anthropic(base_url=base, api_key=key, max_retries=0)
    talk: list[Any] = TALK[1:]
    asked: Any = {
        "model": model,
        "messages": talk,
        "system": "Be brief.",
        "max_tokens": 20,
    }
    asked |= {"extra_body": {"seed": 1}}
    tool = {"name": "get_weather", "description": "The weather.", "input_schema": CITY}
    forced: Any = asked | {
        "tools": [tool],
        "tool_choice": {"type": "any"},
        "max_tokens": 900,
    }

    def again() -> Any:
        (call,) = (answer := client.messages.create(**forced)).content
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}
        more = [
            *talk,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
        return client.messages.create(**asked | {"messages": more, "tools": [tool]})

    def streamed(asked: Any) -> Any:
        with client.messages.stream(**asked) as stream:
            assert list(stream)
            return stream.get_final_message()

    def refused() -> Any:
        try:
            client.messages.create(**asked | {"model": "no such model"})
        except anthropic.NotFoundError as error:
            return error.body
        raise AssertionError("another model was taken")

    yield (
        "asks",
        lambda: client.messages.create(
            **asked, stop_sequences=["x"], metadata={"user_id": "u"}
        ),
    )
    yield (
        "counts",
        lambda: (
            client.messages.count_tokens(
                model=model, messages=talk, system="Be brief."
            ).input_tokens
        ),
    )
    yield "streams", lambda: streamed(asked)
    yield (
        "forces a call",
        lambda: checked(client.messages.create(**forced).content[0].input),
    )
    yield "streams a call", lambda: checked(streamed(forced).content[0].input)
    yield "answers a call", again
    yield (
        "goes on",
        lambda: client.messages.create(
            **asked | {"messages": [*talk, {"role": "assistant", "content": "It is"}]}
        ),
    )
    yield "is refused", refused


CLIENTS = {
    "openai": openai_calls, "langchain-openai": langchain_calls, "instructor": instructor_calls,
    "litellm": litellm_calls, "anthropic": anthropic_calls,
}  # fmt: skip


def main(base: str, model: str, key: str = "none") -> int:
    """Make all calls; returns 1 if any has failed."""
    counts, failures = dict.fromkeys(CLIENTS, 0), 0
    for name, calls in CLIENTS.items():
        for what, call in calls(base.rstrip("/"), model, key):
            counts[name] += 1
            try:
                assert call()
            except Exception:
                failures += 1
                print(
                    f"{name}: {what}: FAILED\n{traceback.format_exc(limit=-4)}",
                    flush=True,
                )
            else:
                print(f"{name}: {what}: ok", flush=True)
    asked = ", ".join(f"{name} {count}" for name, count in counts.items())
    print(
        f"{sum(counts.values()) - failures} of {sum(counts.values())} calls ok ({asked})"
    )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
