"""A model over HTTP, asked by a real client: answers are the engine's, and nothing that goes wrong leaves a trace."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import string
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import psutil
import pytest
import torch

from tests.conftest import Command
from tests.generate.test_adapters import merged, write
from tests.serve.running import Running, build, until
from tests.started import Started
from weft.checkpoint.convert.peft import read_adapter
from weft.data.tokenizer import Tokenizer, load_tokenizer
from weft.errors import WeftError
from weft.generate.backend import TokenEvent
from weft.generate.engine import Engine
from weft.generate.lookup import Lookup
from weft.generate.request import Generation
from weft.generate.sampling import GREEDY, Sampling
from weft.layout.mesh import Mesh
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train
from weft.serve.answering import PLAIN, Answering
from weft.serve.protocol import CompletionRequest
from weft.serve.service import Service
from weft.serve.text_requests import TextRequest, write_texts

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
)
PROMPT = "a few words"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return replace(load_tokenizer("bytes"), chat_template=TEMPLATE)


@pytest.fixture(scope="module", params=[False, True], ids=["", "guesses"])
def server(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> Iterator[Running]:
    """Once with guesses of what will be written, so that a step may write several tokens of an answer."""
    running = Running(
        tokenizer,
        drafter=Lookup(shared=10_000, least=1, width=2) if request.param else None,
    )
    yield running
    until(running.empty)
    running.close()


@pytest.fixture(scope="module")
def expected(tokenizer: Tokenizer) -> Callable[..., str]:
    """What the engine alone writes."""
    model = build()

    def write(
        text: str, most: int, how: Sampling = GREEDY, stops: tuple[str, ...] = ()
    ) -> str:
        ask = TextRequest(tokenizer.prompt_ids(text), most, how, tokenizer.stops, stops)
        return write_texts(Engine(model), tokenizer, [ask])[0]

    return write


def test_health_and_models(server: Running) -> None:
    assert server.client.get("/health").json() == {"status": "ok"}
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model["id"] == "tiny" and model["object"] == "model"


def test_completions_are_what_the_engine_writes(
    server: Running, expected: Callable[..., str]
) -> None:
    answer = server.post(
        "completions", model="tiny", prompt=PROMPT, max_tokens=20, temperature=0
    ).json()
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "text": expected(PROMPT, 20),
        "finish_reason": "length",
        "logprobs": None,
    }
    assert answer["object"] == "text_completion" and answer["model"] == "tiny"
    # known from another test or not
    assert answer["usage"].pop("prompt_tokens_details")["cached_tokens"] in (0, 8)
    assert answer["usage"] == {
        "prompt_tokens": 11,
        "completion_tokens": 20,
        "total_tokens": 31,
    }
    how = {"temperature": 0.9, "top_p": 0.9, "top_k": 30, "min_p": 0.01, "seed": 5, "presence_penalty": 0.5,
           "frequency_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {"97": 1.5}}  # fmt: skip
    sampling = Sampling(0.9, 30, 0.9, 0.01, 1.1, 0.5, 0.2, {97: 1.5}, 5)
    answer = server.post(
        "completions", prompt=[PROMPT, "b"], max_tokens=9, n=2, **how
    ).json()
    seeds = [sampling, replace(sampling, seed=6)]
    assert [c["text"] for c in answer["choices"]] == [
        expected(p, 9, s) for p in (PROMPT, "b") for s in seeds
    ]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3] and answer["usage"][
        "completion_tokens"
    ] == 36
    default = server.post(
        "completions", prompt=list(PROMPT.encode()), temperature=0
    ).json()["choices"][0]
    assert default["text"] == expected(PROMPT, 16)


def test_streams_add_up_and_count(
    server: Running, expected: Callable[..., str]
) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "n": 2}
    chunks = server.events(
        "completions", **asked, stream_options={"include_usage": True}
    )
    *chunks, usage = chunks
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 40
    for index in range(2):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert (
            "".join(c["text"] for c in mine) == expected(PROMPT, 20) and len(mine) > 5
        )
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [
            "length"
        ]
    assert len({c["id"] for c in chunks}) == 1 and all(
        c["usage"] is None for c in chunks
    )


def test_chats_by_the_template(server: Running, expected: Callable[..., str]) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    text = expected("system: Be brief.\nuser: Hi\nassistant:", 12)
    answer = server.post("chat/completions", messages=messages, temperature=0).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text}
    chunks = [
        c["choices"][0]
        for c in server.events("chat/completions", messages=messages, temperature=0)
    ]
    assert chunks[0]["delta"]["role"] == "assistant" and all(
        "role" not in c["delta"] for c in chunks[1:]
    )
    assert "".join(c["delta"].get("content", "") for c in chunks) == text
    assert (
        server.events("chat/completions", messages=messages)[0]["object"]
        == "chat.completion.chunk"
    )


def test_stop_strings_across_tokens_and_log_probabilities(
    server: Running, expected: Callable[..., str]
) -> None:
    whole = expected(PROMPT, 20)
    stop = whole[3:6]
    asked = {
        "prompt": PROMPT,
        "max_tokens": 20,
        "temperature": 0,
        "stop": ["never", stop],
    }
    (choice,) = server.post("completions", **asked).json()["choices"]
    assert (
        choice["text"]
        == expected(PROMPT, 20, GREEDY, (stop,))
        == whole[: whole.index(stop)]
    )
    assert choice["finish_reason"] == "stop"
    streamed = [c["choices"][0] for c in server.events("completions", **asked)]
    assert (
        "".join(c["text"] for c in streamed) == choice["text"]
        and streamed[-1]["finish_reason"] == "stop"
    )
    asked = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "logprobs": 2}
    logs = server.post("completions", **asked).json()["choices"][0]["logprobs"]
    model, ids = build(), torch.tensor([list(PROMPT.encode())])
    with torch.no_grad():
        logits = model(
            ids, torch.arange(11)[None], torch.tensor([0, 11], dtype=torch.int32)
        )[0, -1]
    scores = logits.log_softmax(-1)
    assert (
        logs["token_logprobs"][0] == pytest.approx(float(scores.max()), abs=1e-10)
        and len(logs["tokens"]) == 5
    )
    assert sorted(logs["top_logprobs"][0].values()) == pytest.approx(
        sorted(scores.topk(2).values.tolist())
    )
    messages = [{"role": "user", "content": "Hi"}]
    content = server.post(
        "chat/completions", messages=messages, logprobs=True, top_logprobs=3
    ).json()
    (first, *_) = content["choices"][0]["logprobs"]["content"]
    assert (
        len(first["top_logprobs"]) == 3
        and first["logprob"] <= 0
        and isinstance(first["bytes"], list)
    )


def test_the_best_of_several(server: Running, tokenizer: Tokenizer) -> None:
    engine = Engine(build())
    family = engine.submit(
        list(PROMPT.encode()), 6, Sampling(seed=1), tokenizer.stops, n=4, top=0
    )
    engine.run()
    best = sorted(family, key=lambda one: -one.score)[:2]
    answer = server.post(
        "completions", prompt=PROMPT, max_tokens=6, n=2, best_of=4, seed=1
    ).json()
    assert [c["text"] for c in answer["choices"]] == [
        tokenizer.decode(one.written) for one in best
    ]
    assert [c["index"] for c in answer["choices"]] == [0, 1] and answer["choices"][0][
        "logprobs"
    ] is None


@pytest.mark.parametrize(("what", "body", "status", "said"), [
    ("completions", b"{not json", 400, "Invalid JSON"),
    ("completions", b"[]", 400, "should be an object"),
    ("completions", b'{"max_tokens": 3}', 400, "prompt: it is missing"),
    ("completions", b'{"prompt": "a", "colour": "red"}', 400, "colour: there is no such field"),
    ("completions", b'{"prompt": "a", "temperature": 3}', 400, "temperature: Input should be less than or equal to 2"),
    ("completions", b'{"prompt": [400]}', 400, "of ids below the model's 257"),
    ("completions", b'{"prompt": []}', 400, "prompt"),
    ("completions", b'{"prompt": "a", "logit_bias": {"999": 1}}', 400, "a bias is for an id that"),
    ("completions", b'{"prompt": "a", "max_tokens": 100000}', 400, "100,000 more are more than the cache of 4,096"),
    ("completions", b'{"prompt": "a", "model": "other"}', 404, "there is no model 'other' here, but 'tiny'"),
    ("completions", b'{"prompt": "a", "stream": true, "best_of": 2}', 400, "best_of cannot be streamed"),
    ("completions", b'{"prompt": "a", "n": 100, "best_of": null, "seed": null, "x": 1}', 400, "x: there is no such"),
    ("completions", b" " * (8 * 2**20 + 1), 413, "more than 8388608 bytes"),
    ("chat/completions", b'{"messages": []}', 400, "messages: List should have at least 1 item"),
    ("chat/completions", b'{"messages": [{"role": "user"}], "n": 0}', 400, "n: Input should be greater"),
    ("nothing", b"{}", 404, "POST /v1/nothing: Not Found"),
    ("models", b"{}", 405, "POST /v1/models: Method Not Allowed"),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_openais_shape(
    server: Running, what: str, body: bytes, status: int, said: str
) -> None:
    answer = server.client.post(f"/v1/{what}", content=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (
        said in error["message"]
        and error["type"] == "invalid_request_error"
        and {"param", "code"} <= error.keys()
    )
    assert server.client.get("/health").status_code == 200


def test_who_goes_away_is_forgotten(server: Running) -> None:
    """In the middle of a stream, before an answer is whole, and while others go on."""
    asked = {"prompt": PROMPT, "max_tokens": 3000, "temperature": 0}
    with server.client.stream(
        "POST", "/v1/completions", json=asked | {"stream": True}
    ) as answer:
        next(answer.iter_lines())
        (streamed,) = server.engine.scheduler.running
    until(server.empty)
    submit, asked_for = server.engine.submit, list[Generation]()

    def submitting(*given: Any, **more: Any) -> list[Generation]:
        asked_for.extend(found := submit(*given, **more))
        return found

    with pytest.MonkeyPatch.context() as patch, pytest.raises(httpx.ReadTimeout):
        patch.setattr(server.engine, "submit", submitting)
        server.client.post("/v1/completions", json=asked, timeout=0.3)
    until(lambda: bool(asked_for))
    (waited,) = asked_for
    until(server.empty)
    assert len(streamed.written) < 3000 > len(waited.written), (
        "they were written to their ends"
    )
    assert server.post("completions", prompt=PROMPT, max_tokens=2).status_code == 200


def test_what_comes_behind_a_stop_string_is_not_shown(tokenizer: Tokenizer) -> None:
    """A step may make several tokens of one answer, and the next step has begun when its stop string is found."""
    asked = CompletionRequest.model_validate({"prompt": "x", "stop": "end"})
    events = [TokenEvent(0, ord(c), None, "") for c in "a end b"] + [
        TokenEvent(1, 99, None, "length"),
        TokenEvent(0, None, None, "stop"),
    ]

    class Given:
        generations = (SimpleNamespace(hits=0),) * 2
        cancelled: ClassVar[list[int]] = []

        async def next(self) -> TokenEvent:
            return events.pop(0)

        async def cancel(self, index: int) -> None:
            self.cancelled.append(index)

    watch = SimpleNamespace(record=lambda event, generation: None)
    answering = Answering(asked, tokenizer, "tiny", 1, PLAIN, watch)  # type: ignore[arg-type]
    chunks = asyncio.run(collected(answering._stream(Given())))  # type: ignore[arg-type]
    choices = [json.loads(c.removeprefix("data: "))["choices"][0] for c in chunks[:-1]]
    assert [
        (c["index"], c["text"], c["finish_reason"]) for c in choices if c["index"] == 0
    ][-1] == (0, "", "stop")
    assert (
        "".join(c["text"] for c in choices if c["index"] == 0) == "a "
        and len(choices) == 4
    )
    assert Given.cancelled == [0] and chunks[-1] == "data: [DONE]\n\n"


def test_a_stream_that_ends_in_a_fault_says_so(tokenizer: Tokenizer) -> None:
    asked = CompletionRequest.model_validate({"prompt": "x", "stream": True})

    class Broken:
        generations = (SimpleNamespace(hits=0),)

        async def next(self) -> TokenEvent:
            raise RecursionError("too deep")

    watch = SimpleNamespace(record=lambda event, generation: None)
    answering = Answering(asked, tokenizer, "tiny", 1, PLAIN, watch)  # type: ignore[arg-type]
    chunks = list[str]()

    async def read() -> None:
        async for chunk in answering._stream(Broken()):  # type: ignore[arg-type]
            chunks.append(chunk)

    with pytest.raises(RecursionError):
        asyncio.run(read())
    assert "too deep" in chunks[0] and '"server_error"' in chunks[0]
    assert chunks[1:] == ["data: [DONE]\n\n"]


async def collected(stream: AsyncIterator[str]) -> list[str]:
    return [chunk async for chunk in stream]


def test_who_waits_for_an_engine_that_ends_is_told(tokenizer: Tokenizer) -> None:
    engine, stepping, go = Engine(build()), threading.Event(), threading.Event()
    service, step = Service(engine), engine.step
    engine.step = lambda: (stepping.set(), go.wait(60), step())[2]  # type: ignore[method-assign]

    async def wait() -> None:
        await asyncio.wrap_future(
            service.thread.call(lambda: None)
        )  # the thread now takes a step
        stepping.wait(60)
        gone = asyncio.wrap_future(service.thread.call(lambda: "nobody waits for it"))
        waiting = asyncio.wrap_future(service.thread.call(lambda: "done"))
        await asyncio.sleep(0.1)
        gone.cancel()
        await asyncio.sleep(0.1)
        closing = asyncio.create_task(asyncio.to_thread(service.close))
        await asyncio.sleep(0.1)
        go.set()
        with pytest.raises(WeftError, match="the engine has stopped"):
            await asyncio.wait_for(waiting, 20)
        await closing

    asyncio.run(wait())


def test_keys_are_asked_for_and_part_the_prefixes(tokenizer: Tokenizer) -> None:
    server = Running(tokenizer, ("one", "two"))
    asked = {"prompt": "a prompt of more than two blocks", "max_tokens": 2}
    for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "Bearer"}):
        for answer in (server.client.post("/v1/completions", json=asked, headers=headers),
                       server.client.get("/v1/models", headers=headers)):  # fmt: skip
            assert (
                answer.status_code == 401
                and answer.json()["error"]["code"] == "invalid_api_key"
            )
    assert server.client.get("/health").status_code == 200
    hits = []
    begin = server.engine.scheduler._begin
    server.engine.scheduler._begin = lambda r: (begin(r), hits.append(r.hits))[0]  # type: ignore[method-assign]
    for key in ("one", "one", "two", "three", "one"):
        if key == "three":  # as a server with another file of keys, and the same blocks
            server.server.keys = ("three", "one", "two")
        headers = {"authorization": f"Bearer {key}"}
        assert (
            server.client.post(
                "/v1/completions", json=asked, headers=headers
            ).status_code
            == 200
        )
    assert hits == [0, 24, 0, 0, 24]
    server.close()


def test_many_clients_are_served_or_refused_and_nothing_is_left(
    tokenizer: Tokenizer,
) -> None:
    """More than are taken on, in a cache that is too small for all, some of whom go away."""
    server = Running(tokenizer, most=12, limit=5, tokens=160, budget=20)

    async def ask(client: Any, number: int) -> int:
        asked = {
            "prompt": "x" * (number % 23 + 1),
            "max_tokens": 30,
            "seed": number,
            "stream": number % 2 == 0,
        }
        try:
            answer = await client.post(
                "/v1/completions", json=asked, timeout=0.4 if number % 5 == 4 else 120
            )
        except httpx.ReadTimeout:
            return 0
        return int(answer.status_code)

    async def all_of_them() -> list[int]:
        async with httpx.AsyncClient(
            base_url=str(server.client.base_url), limits=httpx.Limits()
        ) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(60)))

    found = asyncio.run(all_of_them())
    assert set(found) <= {0, 200, 429} and found.count(200) >= 5 and 429 in found
    until(server.empty)
    assert server.post("completions", prompt="x", max_tokens=2).status_code == 200
    pool = server.engine.scheduler.pool
    assert pool.free == pool.blocks == 20
    server.close()


def test_an_engine_that_fails_says_so_to_all(tokenizer: Tokenizer) -> None:
    server = Running(tokenizer)

    def fail() -> Any:
        raise RuntimeError("out of memory")

    server.engine.step = fail  # type: ignore[method-assign]
    answer = server.post("completions", prompt="x", max_tokens=2)
    assert (
        answer.status_code == 500
        and "out of memory" in answer.json()["error"]["message"]
    )
    assert server.post("completions", prompt="x").status_code == 500
    health = server.client.get("/health")
    assert health.status_code == 503 and health.json() == {"status": "out of memory"}
    server.close()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_text_without_numbers_ends_alone(tokenizer: Tokenizer, dtype: str) -> None:
    """The embedding of one byte is NaN, as in a damaged file: texts with this byte end with one line, others go on."""
    shape = ModelShape(
        vocab=257, layers=2, embed=32, heads=4, kv_heads=2, ffn=48, init_std=0.5
    )
    model = parallelize(shape, Mesh.single(), Train(seed=2, dtype=dtype))[0]
    server = Running(tokenizer, model=model)
    asked: dict[str, Any] = {"prompt": "a few words", "max_tokens": 8, "seed": 5}
    ways: list[dict[str, Any]] = [
        {"temperature": 0}, {}, {"top_p": 0.9}, {"top_k": 4}, {"logprobs": 2}, {"echo": True, "logprobs": 1},
        {"n": 2}, {"use_beam_search": True, "n": 2, "seed": None}, {"presence_penalty": 1.0, "min_p": 0.1},
        {"response_format": {"type": "json_object"}},
    ]  # fmt: skip
    sound = [server.post("completions", **asked | way) for way in ways]
    assert all(answer.status_code == 200 for answer in sound)
    written = "".join(
        choice["text"] for answer in sound for choice in answer.json()["choices"]
    )
    lost = next(letter for letter in string.ascii_letters if letter not in written)
    with torch.no_grad():
        model.embedding.table[ord(lost)] = torch.nan
    with ThreadPoolExecutor(2 * len(ways)) as clients:
        damaged = [
            clients.submit(server.post, "completions", **asked | way | {"prompt": lost})
            for way in ways
        ]
        again = [
            clients.submit(server.post, "completions", **asked | way) for way in ways
        ]
    for task in damaged:
        answer = task.result()
        assert answer.status_code == 500, answer.text
        assert "are not numbers" in answer.json()["error"]["message"]
    for first, task in zip(sound, again, strict=True):
        assert task.result().status_code == 200, task.result().text
        texts = [
            [c["text"] for c in each.json()["choices"]]
            for each in (first, task.result())
        ]
        assert texts[0] == texts[1]
    events = server.events("completions", **asked | {"prompt": "two " + lost})
    assert "are not numbers" in events[-1]["error"]["message"]
    assert server.client.get("/health").status_code == 200
    until(server.empty)
    server.close()


def exported(folder: Path) -> Path:
    """A small model as Hugging Face has it."""
    from weft.models.hugging_face import export
    from weft.parallel.build import resident_state

    model = build().float()
    export({p.name: p.local for p in resident_state(model, model.mesh).held}, model.shape, folder / "tiny",
           files=load_tokenizer("bytes").files())  # fmt: skip
    return folder / "tiny"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["", pytest.param("tp=2", marks=pytest.mark.soak)])
def test_the_command_serves_and_ends_with_its_last_answer(
    command: Command, layout: str, tmp_path: Path, request: Any
) -> None:
    """Ctrl-C in the middle of a stream: it is written to its end, and the command leaves without an error."""
    (tmp_path / "keys").write_text("secret\n")
    words = ["serve", "--from", exported(tmp_path), "--port", "0", "--api-key", tmp_path / "keys", "--cache", "9000",
             "--drain", "300"]  # fmt: skip
    write(tmp_path / "adapters" / "spoken", build(), 3, 0)
    beside = ["--layout", layout, "--adapters", tmp_path / "adapters"]
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}!")
    alone = ["--policy", "chunked:4", "--invariant", "--chat-template", tmp_path / "own.jinja"]  # fmt: skip
    words += beside if layout else alone
    process = Started(*words)
    request.addfinalizer(process.kill)
    assert process.stdout is not None
    line = process.stdout.readline()
    (address,) = re.findall(
        r"tiny at (http://127\.0\.0\.1:\d+)/v1, with a cache of 9,000 tokens; Ctrl-C ends it",
        line,
    )
    client = httpx.Client(
        base_url=address, headers={"authorization": "Bearer secret"}, timeout=120
    )
    vectors = client.post("/v1/embeddings", json={"input": "x"})
    assert vectors.status_code == 200, vectors.text
    asked = {"messages": [{"role": "user", "content": "Hi"}]}
    written = client.post("/tokenize", json=asked)
    assert layout or written.json()["tokens"] == list(b"Hi!"), written.text
    if layout:
        asked = {"model": "spoken", "prompt": PROMPT, "max_tokens": 9, "temperature": 0}
        said = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        model, tokenizer = build().float(), load_tokenizer("bytes")
        ask = TextRequest(tokenizer.prompt_ids(PROMPT), 9, GREEDY, tokenizer.stops)
        adapter = read_adapter(tmp_path / "adapters" / "spoken", model)
        assert [said] == write_texts(Engine(merged(model, adapter)), tokenizer, [ask])
    asked = {
        "prompt": "x",
        "max_tokens": 150,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    with client.stream("POST", "/v1/completions", json=asked) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        rest = [line for line in lines if line]
    assert (
        rest[-1] == "data: [DONE]"
        and json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"]
    )
    assert (
        process.wait(120) == (130 if layout else 0)
        and process.stderr is not None
        and not process.stderr.read()
    )


@pytest.mark.sampled(1)  # what ranks say of each other: tests/generate/test_leader.py
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "number", "said"), [
    ("tp=2", signal.SIGKILL, "was killed by SIGKILL"), ("pp=2", signal.SIGKILL, "was killed by SIGKILL"),
    ("tp=2", signal.SIGSTOP, "is stopped (SIGSTOP or a debugger)"),
])  # fmt: skip
def test_a_rank_that_is_gone_is_named_and_all_end(
    layout: str, number: int, said: str, tmp_path: Path, request: Any
) -> None:
    words = [
        "serve",
        "--from",
        exported(tmp_path),
        "--port",
        "0",
        "--cache",
        "9000",
        "--layout",
        layout,
    ]
    process = Started(*words)
    request.addfinalizer(process.kill)
    assert process.stdout is not None and process.stderr is not None
    (address,) = re.findall(
        r"tiny at (http://127\.0\.0\.1:\d+)/v1", process.stdout.readline()
    )
    asked = {
        "prompt": "x",
        "max_tokens": 900,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    with httpx.Client(base_url=address, timeout=120).stream(
        "POST", "/v1/completions", json=asked
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        ranks = psutil.Process(process.pid).children(recursive=True)
        process.ranks()[1].send_signal(number)
        with contextlib.suppress(httpx.RemoteProtocolError):
            assert "rank 1 is gone" in "".join(lines)
    assert process.wait(60) == 1 and process.stderr.read().startswith(
        f"weft: error: rank 1 {said}"
    )
    assert not [
        one
        for one in ranks
        if one.is_running() and one.status() != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.parametrize(("words", "said"), [
    (["--api-key", "none.txt"], "--api-key names a file, and there is none of this name"),
    (["--api-key", "empty.txt"], "--api-key empty.txt has no key; write one per line"),
    (["--host", "203.0.113.1"], "cannot listen at 203.0.113.1 port 8000"),
    (["--policy", "chunked:0"], "--policy cannot be 'chunked:0': behind chunked: comes a whole number"),
    (["--invariant", "--layout", "tp=2"], "--invariant is for a model on one rank"),
    (["--chat-template", "nowhere.jinja"], "--chat-template: cannot read nowhere.jinja: No such file"),
    (["--chat-template", "empty.txt"], "--chat-template: empty.txt is empty"),
    (["--chat-template", "open.jinja"], "--chat-template: open.jinja is not valid Jinja: Unexpected end of template"),
], ids=["no file", "no key", "no host", "no policy", "ranks", "no template", "empty", "broken"])  # fmt: skip
def test_mistakes_of_the_command(
    command: Command, words: list[str], said: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("\n")
    Path("open.jinja").write_text("{% for m in messages %}")
    code, _, error = command("serve", "--from", "nowhere", *words)
    assert code == 2 and said in error, error
