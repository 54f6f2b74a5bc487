"""``weft serve``: a model over HTTP, as OpenAI's clients ask for it."""

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from weft.data.chat.encode import prompt_ids
from weft.data.tokenizer import Tokenizer
from weft.errors import WeftError
from weft.generate.text import Writer
from weft.serve.protocol import Chat, Completion, Question, Refusal, Replies, usage_of
from weft.serve.service import Answers, Busy, Event, Service, Wish

Q = TypeVar("Q", bound=Question)

#: Bytes of a question at most.
LARGEST = 8 * 2**20


class Server:
    """One model, ``name``. ``keys``: who has none of them is refused (none given: nobody is).

    ``tokens``: an answer's at most, where a chat does not say.
    """

    def __init__(
        self, service: Service, tokenizer: Tokenizer, name: str, keys: Sequence[str] = (), tokens: int = 1024
    ) -> None:
        self.service, self.tokenizer, self.name, self.keys, self.tokens = service, tokenizer, name, keys, tokens
        self.begun = int(time.time())

    def app(self) -> Starlette:
        """What uvicorn runs; its end is the end of the engine's thread."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            yield
            await asyncio.to_thread(self.service.close)

        routes = [
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {Refusal: refused, HTTPException: no_route, ClientDisconnect: gone}
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)

    async def health(self, request: Request) -> Response:
        failure = self.service.failure
        return JSONResponse({"status": "ok"} if failure is None else {"status": str(failure)}, 503 if failure else 200)

    async def models(self, request: Request) -> Response:
        self._tenant(request)
        model = {"id": self.name, "object": "model", "created": self.begun, "owned_by": "weft"}
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(self, request: Request) -> Response:
        asked = await self._question(request, Completion)
        if asked.stream and asked.best_of is not None:
            raise Refusal(400, "best_of cannot be streamed; leave out one of them", param="best_of")
        n = max(asked.n, asked.best_of or 0)
        prompts = [self.tokenizer.prompt_ids(p) if isinstance(p, str) else p for p in asked.prompts]
        return await self._answer(request, asked, prompts, asked.most or 16, n)

    async def chat(self, request: Request) -> Response:
        asked = await self._question(request, Chat)
        try:
            ids = prompt_ids(self.tokenizer, asked.messages, True, self.name)
        except WeftError as error:
            raise Refusal(400, str(error), param="messages") from None
        return await self._answer(request, asked, [ids], asked.most or self.tokens, asked.n)

    def _tenant(self, request: Request) -> str:
        """Whose cached prefixes this may find: those of the same key."""
        if not self.keys:
            return ""
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        found = [number for number, key in enumerate(self.keys) if hmac.compare_digest(key.encode(), given)]
        if not found:
            raise Refusal(401, "no valid API key; send the header Authorization: Bearer KEY", "invalid_api_key")
        return f"key {found[0]}"

    async def _question(self, request: Request, kind: type[Q]) -> Q:
        self._tenant(request)
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > LARGEST:
                raise Refusal(413, f"the request has more than {LARGEST} bytes")
        try:
            asked = kind.model_validate_json(bytes(body))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise Refusal(400, f"{where}: {first['msg']}" if where else first["msg"], param=where or None) from None
        if asked.model not in (None, self.name):
            raise Refusal(404, f"there is no model {asked.model!r} here, but {self.name!r}", "model_not_found", "model")
        return asked

    async def _answer(
        self, request: Request, asked: Question, prompts: Sequence[Sequence[int]], most: int, n: int
    ) -> Response:
        stops = [*([] if asked.ignore_eos else self.tokenizer.stops), *asked.stop_token_ids]
        tenant = self._tenant(request)
        try:
            wishes = [Wish(ids, most, asked.sampling, stops, n, asked.top, tenant) for ids in prompts]
        except WeftError as error:
            raise Refusal(400, str(error)) from None
        replies = Replies(asked, self.name, self.tokenizer)
        prompt = sum(map(len, prompts))
        open_answers = self.service.answers(wishes)
        answers = await entered(open_answers)
        if asked.stream:
            return Stream(self._stream(answers, asked, replies, prompt), open_answers)
        writing = asyncio.ensure_future(self._collect(answers, asked))
        leaving = asyncio.ensure_future(left(request))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                raise ClientDisconnect
            texts = writing.result()
        except WeftError as error:
            raise Refusal(500, str(error)) from None
        finally:
            writing.cancel()
            leaving.cancel()
            await open_answers.__aexit__(None, None, None)
        usage = usage_of(prompt, sum(event.token is not None for _, events, _ in texts for event in events))
        kept: list[tuple[str, Sequence[Event], str]] = []
        for first in range(0, len(texts), n):  # the best of each prompt's
            order = range(first, first + n)
            if n > asked.n:
                order = sorted(order, key=lambda i: -answers.generations[i].score)  # type: ignore[assignment]
            kept += [texts[i] for i in order[: asked.n]]
        return JSONResponse(replies.whole(kept, usage))

    async def _pieces(self, answers: Answers, asked: Question) -> AsyncIterator[tuple[int, str, Event, str]]:
        """Of every event: which answer it is of, what text can be shown now, and why it ended, if it did."""
        writers = [Writer(self.tokenizer, asked.stops) for _ in answers.generations]
        left = set(range(len(writers)))
        while left:
            event = await answers.next()
            index, writer = event.number, writers[event.number]
            if index not in left:
                continue  # written after its stop string had come
            text = "" if event.token is None else writer.add(event.token)
            if event.finished and not writer.stopped:
                text += writer.end()
            finish = "stop" if writer.stopped else event.finished
            if writer.stopped and not event.finished:
                await answers.cancel(index)
            if finish:
                left.discard(index)
            yield index, text, event, finish

    async def _collect(self, answers: Answers, asked: Question) -> list[tuple[str, list[Event], str]]:
        found: list[tuple[str, list[Event], str]] = [("", [], "") for _ in answers.generations]
        async for index, text, event, finish in self._pieces(answers, asked):
            before, events, _ = found[index]
            found[index] = before + text, [*events, event], finish
        return found

    async def _stream(self, answers: Answers, asked: Question, replies: Replies, prompt: int) -> AsyncIterator[str]:
        began: set[int] = set()
        written = 0
        held: dict[int, list[Event]] = {}  # whose text is not shown yet
        try:
            async for index, text, event, finish in self._pieces(answers, asked):
                held.setdefault(index, []).append(event)
                written += event.token is not None
                if text or finish:
                    yield said(replies.chunk(index, text, held.pop(index), finish or None, index not in began))
                    began.add(index)
            if replies.include_usage:
                yield said(replies.usage_chunk(usage_of(prompt, written)))
            yield "data: [DONE]\n\n"
        except WeftError as error:
            yield said(Refusal(500, str(error)).body)


class Stream(StreamingResponse):
    """Events as they come. What is written for them is cancelled when the client goes away, also before the first."""

    def __init__(self, chunks: AsyncIterator[str], context: Any) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self.context = context

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.context.__aexit__(None, None, None)


async def entered(context: Any) -> Answers:
    """What is being written; what cannot be is refused."""
    try:
        answers: Answers = await context.__aenter__()
    except Busy as error:
        raise Refusal(429, str(error), "busy") from None
    except WeftError as error:
        raise Refusal(400 if error.exit_code == 2 else 500, str(error)) from None
    return answers


async def left(request: Request) -> None:
    """Returns when the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def said(what: dict[str, Any]) -> str:
    """An event of a stream."""
    return f"data: {json.dumps(what, ensure_ascii=False)}\n\n"


async def refused(request: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, Refusal)
    headers = {"retry-after": "1"} if refusal.status == 429 else {}
    return JSONResponse(refusal.body, refusal.status, headers)


async def no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(Refusal(error.status_code, said).body, error.status_code, error.headers)


async def gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it
