"""``weft serve``: a model over HTTP, with the interfaces of OpenAI and Anthropic."""

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from weft.data.chat.conversation import check_messages
from weft.data.chat.encode import own_encoder
from weft.data.tokenizer import Tokenizer
from weft.errors import UsageError, WeftError
from weft.generate.backend import AnswerRequest, Backend, SearchRequest
from weft.generate.beam_search import LENGTH_PENALTY
from weft.generate.embedding import LONGEST
from weft.generate.engine import check_ids
from weft.pages import render
from weft.serve.answering import (
    NO_ENGINE,
    PLAIN,
    AnswerForm,
    Answering,
    refusal_of,
    while_connected,
)
from weft.serve.anthropic import CountRequest, MessagesRequest, error_of
from weft.serve.embeddings import encoded_vector
from weft.serve.gate import Gate, GateRules, is_json
from weft.serve.lengths import PIECE, TokenLimit, TooManyTokens, check_tree
from weft.serve.model_choice import AUTO, ModelChoice, last_question
from weft.serve.prompts import ChatPrompt, Prompts
from weft.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    Conversing,
    EmbeddingRequest,
    Language,
    Modelled,
    Refusal,
    SamplingRequest,
    ScoreRequest,
    Texts,
    Tokenized,
    Untokenized,
)
from weft.serve.replies import Answer, Replies, usage_of
from weft.serve.request_reader import RequestReader
from weft.serve.responses import ResponsesRequest
from weft.serve.server_metrics import AnswerTimer, ServerMetrics

Q = TypeVar("Q", bound=Modelled)

#: Most bytes of a request, and of all requests that are being answered.
LARGEST, ALL = 8 * 2**20, 64 * 2**20

#: Seconds within which a request must have arrived completely.
PATIENCE = 60

#: Where Anthropic's interface begins.
MESSAGES = "/v1/messages"


class Server:
    """Serves the model of ``backend`` under ``name``, and the model with each of ``adapters`` under the adapter's own
    name.

    Args:
        ``backend``: generates the tokens.
        ``keys``: API keys, one of which each request must have; without any, all requests are accepted.
        ``tokens``: largest number of tokens of an answer to a chat request that sets no number itself.
        ``context``: largest number of tokens of a prompt and its answer; None: the number of tokens that the cache
            holds.
    """

    def __init__(
        self, backend: Backend, tokenizer: Tokenizer, name: str, keys: Sequence[str] = (), tokens: int = 1024,
        adapters: Sequence[str] = (), context: int | None = None,
    ) -> None:  # fmt: skip
        self.backend, self.tokenizer, self.name, self.keys, self.tokens = (
            backend,
            tokenizer,
            name,
            keys,
            tokens,
        )
        self.adapters, self.context = adapters, context
        #: Chooses the model of requests that name ``auto``; None: such a name is not known.
        self.choice: ModelChoice | None = None
        self.reader = RequestReader()
        self.prompts = Prompts(tokenizer, backend.facts.vocab, name)
        self.metrics = ServerMetrics(backend)
        self.begun = int(time.time())
        self.held = 0  # bytes of questions that are being answered
        self.embedding = asyncio.Lock()
        self.ending = False  # no answer is awaited any more

    def app(self, rules: GateRules | None = None) -> Any:
        """Return the ASGI application for uvicorn, behind ``rules``. The engine's thread ends with the application."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            yield
            await asyncio.to_thread(self.backend.close)
            self.prompts.close()

        routes = [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/metrics", self.measures),
            Route("/v1/models", self.models),
            Route("/v1/models/{id:path}", self.model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/v1/score", self.score, methods=["POST"]),
            Route(MESSAGES, self.messages, methods=["POST"]),
            Route(f"{MESSAGES}/count_tokens", self.count_tokens, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {
            Refusal: refused, WeftError: refused, Exception: refused,
            HTTPException: no_route, ClientDisconnect: client_gone,
        }  # fmt: skip
        app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
        return self.metrics.counting(
            self._ending_quietly(Gate(self._weighing(app), rules or GateRules()))
        )

    def _weighing(self, app: Any) -> Any:
        """Wrap the ASGI application ``app``, and count the bytes of requests in progress in ``held``."""

        async def weighed(scope: Any, receive: Any, send: Any) -> None:
            own = 0

            async def counted() -> Any:
                nonlocal own
                message = await receive()
                size = len(message.get("body", b""))
                own, self.held = own + size, self.held + size
                return message

            try:
                await app(scope, counted, send)
            finally:
                self.held -= own

        return weighed

    def _ending_quietly(self, app: Any) -> Any:
        """Wrap the ASGI application ``app``, so that its requests end without a traceback once the server ends."""

        async def quiet(scope: Any, receive: Any, send: Any) -> None:
            began = False

            async def watched(message: Any) -> None:
                nonlocal began
                began = True
                await send(message)

            try:
                await app(scope, receive, watched)
            except asyncio.CancelledError:
                if not self.ending or scope["type"] != "http":
                    raise
                if not began:
                    await JSONResponse(Refusal(503, "the server ends").body, 503)(
                        scope, receive, send
                    )

        return quiet

    async def page(self, request: Request) -> Response:
        return HTMLResponse(render("serve/chat_page.html"))

    async def health(self, request: Request) -> Response:
        failure = self.backend.failure
        return JSONResponse(
            {"status": "ok"} if failure is None else {"status": str(failure)},
            503 if failure else 200,
        )

    async def measures(self, request: Request) -> Response:
        return Response(
            self.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST}
        )

    async def models(self, request: Request) -> Response:
        self._tenant(request)
        return JSONResponse(
            {"object": "list", "data": [self._card(name) for name in self.names]}
        )

    async def model(self, request: Request) -> Response:
        self._tenant(request)
        name = request.path_params["id"]
        if name not in self.names:
            raise Refusal(
                404,
                f"there is no model {name!r} here, but {self.name!r}",
                "model_not_found",
                "model",
            )
        return JSONResponse(self._card(name))

    @property
    def names(self) -> list[str]:
        """List of the names by which clients can choose a model: the served model, its adapters, and "auto" if the
        server chooses among models.
        """
        return [self.name, *self.adapters, *([AUTO] if self.choice else [])]

    def _card(self, name: str) -> dict[str, Any]:
        """Return what clients may know about a model."""
        return {
            "id": name, "object": "model", "created": self.begun, "owned_by": "weft",
            "parent": None if name == self.name else self.name, "max_model_len": self.limit.tokens,
        }  # fmt: skip

    async def completions(self, request: Request) -> Response:
        asked = await self._question(request, CompletionRequest)
        if asked.stream and asked.best_of is not None:
            raise refused_for(
                asked, "best_of", "best_of cannot be streamed; leave out one of them"
            )
        n = max(asked.n, asked.best_of or 0)
        prompts = await self._texts("prompt", asked.prompt, self.limit)
        if asked.use_beam_search:
            return await self._search(request, asked, prompts)
        return await self._answer(
            request, asked, prompts, 16, n, asked.language, echo=asked.echo
        )

    async def _search(
        self,
        request: Request,
        asked: CompletionRequest,
        prompts: Sequence[Sequence[int]],
    ) -> Response:
        """Answer with the ``n`` likeliest texts of a beam search with ``n`` beams, the best one first."""
        self._check(asked, prompts, asked.n)
        if not self.backend.facts.searches or self._adapter(asked):
            raise refused_for(
                asked,
                "use_beam_search",
                "it is for the model itself, on one rank and without guesses; ask without it",
            )
        penalty = (
            LENGTH_PENALTY if asked.length_penalty is None else asked.length_penalty
        )
        answers, written, field = list[Answer](), 0, "prompt"
        for ids in prompts:
            most = self._most(field, asked, ids, 16)
            search = SearchRequest(
                ids,
                most,
                asked.n,
                self._stops(asked),
                penalty,
                self._tenant(request),
                asked.prune,
            )
            best = await while_connected(request, self.backend.search(search))
            for hypothesis in best:
                text = await self.prompts.decode(hypothesis.ids)
                ends = [at for stop in asked.stop if (at := text.find(stop)) >= 0]
                finish = "stop" if ends else hypothesis.finish
                answers.append(Answer(text[: min(ends, default=None)], [], [], finish))
                written += len(hypothesis.ids)
        prompt = sum(map(len, prompts))
        self.metrics.prompt.inc(prompt)
        self.metrics.written.inc(written)
        replies = Replies(asked, asked.model or self.name, self.tokenizer)
        return JSONResponse(replies.whole(answers, usage_of(prompt, written)))

    async def chat(self, request: Request) -> Response:
        return await self._talk(request, await self._question(request, ChatRequest))

    async def responses(self, request: Request) -> Response:
        return await self._talk(
            request, await self._question(request, ResponsesRequest)
        )

    async def messages(self, request: Request) -> Response:
        return await self._talk(request, await self._question(request, MessagesRequest))

    async def count_tokens(self, request: Request) -> Response:
        asked = await self._question(request, CountRequest)
        tools = [tool.model_dump(exclude_none=True) for tool in asked.offered]
        return JSONResponse(
            {"input_tokens": len((await self._conversation(request, asked, tools)).ids)}
        )

    async def _talk(self, request: Request, asked: ChatRequest) -> Response:
        tools = [tool.model_dump(exclude_none=True) for tool in asked.offered]
        prompt = await self._conversation(request, asked, tools, self.limit)
        calls, language = await self.prompts.form() if tools else None, asked.language
        functions = [tool["function"] for tool in tools]
        if calls and (asked.forced or language):
            language = Language(
                "lark", calls.grammar(functions, None if asked.forced else language)
            )
        # A form holds from the first token on, so that such an answer has no reasoning before it.
        thoughts, most = (
            None if language else prompt.thoughts,
            None if asked.parallel_tool_calls else 1,
        )
        form = AnswerForm(
            calls, [function["name"] for function in functions], most, thoughts
        )
        return await self._answer(
            request, asked, [prompt.ids], self.tokens, asked.n, language, form
        )

    async def _conversation(
        self,
        request: Request,
        asked: Conversing,
        tools: Sequence[dict[str, Any]] = (),
        limit: TokenLimit | None = None,
    ) -> ChatPrompt:
        field = asked.NAMES.get("messages", "messages")
        try:
            prompt = await self.prompts.chat(asked, tools, limit, request.scope["size"])
        except TooManyTokens as error:
            raise error.refusal(field) from None
        except WeftError as error:
            raise refused_for(asked, asked.PROMPT, str(error)) from None
        self.reader.note([asked.NAMES.get(name, name) for name in prompt.idle])
        return prompt

    async def _texts(
        self, field: str, texts: Texts, limit: TokenLimit | None
    ) -> list[list[int]]:
        try:
            return await self.prompts.texts(texts, limit)
        except TooManyTokens as error:
            raise error.refusal(field) from None

    @property
    def limit(self) -> TokenLimit:
        """Largest number of tokens of a prompt and its answer together, and whether the cache or the model's context
        sets it.
        """
        cache = self.backend.facts.cache
        if self.context is None or self.context > cache:
            return TokenLimit(cache, "the cache")
        return TokenLimit(self.context, "the model's context")

    def _most(
        self, field: str, asked: SamplingRequest, ids: Sequence[int], default: int
    ) -> int:
        """Return how many tokens to write after ``ids``: the requested number, or ``default`` as far as there
        is room.
        """
        limit = self.limit
        room = limit.tokens - len(ids)
        if asked.most is None and room > 0:
            return min(default, room)
        # a prompt is read together with the next token
        most = max(1, default if asked.most is None else asked.most)
        if most > room:
            raise TooManyTokens(len(ids), limit, f" and {most:,} more").refusal(field)
        return most

    async def embeddings(self, request: Request) -> Response:
        """Answer a request for embeddings. Each text is computed in a pass of its own, so that the engine's steps for
        other requests run in between.
        """
        asked = await self._question(request, EmbeddingRequest)
        if asked.model in self.adapters:
            raise refused_for(
                asked,
                "model",
                f"vectors are those of {self.name!r}; other models and adapters make none",
            )
        data, elements = list[dict[str, Any]](), self.backend.facts.embed
        if asked.dimensions and asked.dimensions > elements:
            said = f"a vector has {elements} numbers, not {asked.dimensions}"
            raise refused_for(asked, "dimensions", said)
        limit = (
            TokenLimit(LONGEST, "a vector's limit")
            if self.context is None or self.context > LONGEST
            else self.limit
        )
        texts = await self._texts("input", asked.input, limit)
        if (tokens := max(map(len, texts))) > limit.tokens:
            raise TooManyTokens(tokens, limit).refusal("input")
        for index, ids in enumerate(texts):
            async with self.embedding:
                if await request.is_disconnected():
                    raise ClientDisconnect
                try:
                    vector = await self.backend.embed(
                        ids, asked.pooling, asked.dimensions
                    )
                except UsageError as error:
                    raise refused_for(asked, "input", str(error)) from None
            data.append(
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": encoded_vector(
                        vector, asked.encoding_format == "base64"
                    ),
                }
            )
        usage = usage_of(sum(map(len, texts)), 0)
        return JSONResponse(
            {"object": "list", "data": data, "model": self.name, "usage": usage}
        )

    async def score(self, request: Request) -> Response:
        """Answer a request for the score of a conversation by a reward model."""
        asked = await self._question(request, ScoreRequest)
        if not self.backend.facts.scores:
            raise refused_for(
                asked,
                "model",
                f"{self.name!r} writes texts and scores none; serve a reward model",
            )
        try:
            ids = await asyncio.to_thread(self._scored_ids, asked.messages)
        except WeftError as error:
            raise refused_for(asked, "messages", str(error)) from None
        if len(ids) > LONGEST:
            limit = TokenLimit(LONGEST, "a scored text's limit")
            raise TooManyTokens(len(ids), limit).refusal("messages")
        async with self.embedding:
            score = await self.backend.score(ids)
        usage = usage_of(len(ids), 0)
        return JSONResponse(
            {"object": "score", "score": score, "model": self.name, "usage": usage}
        )

    def _scored_ids(self, messages: Any) -> list[int]:
        encoder = own_encoder(self.tokenizer, self.name)
        shown = encoder.template.render(check_messages(messages))
        return [int(i) for i in encoder.tokens.encode(shown)[0]]

    async def tokenize(self, request: Request) -> Response:
        asked = await self._question(request, Untokenized)
        if asked.messages:
            ids = (await self._conversation(request, asked)).ids
        else:
            (ids,) = await self.prompts.texts([asked.prompt or ""])
        return JSONResponse({"tokens": ids, "count": len(ids)})

    async def detokenize(self, request: Request) -> Response:
        asked = await self._question(request, Tokenized)
        if any(i >= self.tokenizer.vocab for i in asked.tokens):
            raise refused_for(asked, "tokens", f"ids are below {self.tokenizer.vocab}")
        return JSONResponse({"prompt": await self.prompts.decode(asked.tokens)})

    def _tenant(self, request: Request) -> str:
        """Return the tenant that a request belongs to: prefixes in the cache are shared only within the same
        API key.
        """
        if not self.keys:
            return ""
        scheme, _, given = (
            request.headers.get("authorization", "").strip().partition(" ")
        )
        bearer = (
            given.strip()
            if scheme.lower() == "bearer"
            else request.headers.get("x-api-key", "")
        )
        sent = bearer.encode("latin-1")
        tenants = [
            number
            for number, key in enumerate(self.keys)
            if hmac.compare_digest(key.encode(), sent)
        ]
        if not tenants:
            raise Refusal(
                401,
                "no valid API key; send the header Authorization: Bearer KEY",
                "invalid_api_key",
            )
        return f"key {tenants[0]}"

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > LARGEST:
                raise Refusal(413, f"the request has more than {LARGEST} bytes")
            if self.held > ALL:
                raise Refusal(
                    429,
                    "too many bytes of questions are in hand; try again later",
                    "busy",
                )
        return bytes(body)

    async def _question(self, request: Request, kind: type[Q]) -> Q:
        self._tenant(request)
        if not is_json(request.headers.get("content-type")):
            raise Refusal(
                415,
                "send the question as JSON, with the header Content-Type: application/json",
            )
        try:
            async with asyncio.timeout(PATIENCE):
                body = await self._body(request)
        except TimeoutError:
            raise Refusal(
                408, f"the request was not whole after {PATIENCE} seconds"
            ) from None
        request.scope["size"] = len(body)
        check_tree(body)
        # Python's part of the work lets the event loop go on meanwhile
        if len(body) > PIECE:
            asked = await asyncio.to_thread(self.reader.read, kind, body)
        else:
            asked = self.reader.read(kind, body)
        if self.choice and asked.model == AUTO:
            asked.model = await self.choice.choose(await self._text_of(asked))
        if asked.model not in (None, *self.names):
            raise Refusal(
                404,
                f"there is no model {asked.model!r} here, but {self.name!r}",
                "model_not_found",
                "model",
            )
        return asked

    async def _text_of(self, asked: Modelled) -> str:
        """Return the text by which a model is chosen: the prompt, or the user's last message; "" for other requests."""
        if isinstance(asked, Conversing):
            return last_question(asked.messages)
        if not isinstance(asked, CompletionRequest):
            return ""
        prompt = asked.prompt[0]
        return prompt if isinstance(prompt, str) else await self.prompts.decode(prompt)

    def _check(
        self, asked: SamplingRequest, prompts: Sequence[Sequence[int]], n: int
    ) -> None:
        """Refuse a request that the engine would refuse, with the name of the field."""
        vocab, most = self.backend.facts.vocab, self.backend.most
        if any(not 0 <= i < vocab for i in asked.logit_bias):
            said = f"a bias is for an id that the model does not have; it has {vocab}"
            raise refused_for(asked, "logit_bias", said)
        if len(prompts) * n > most:
            raise refused_for(
                asked,
                "n",
                f"{len(prompts) * n} answers are asked for at once; the most is {most}",
            )
        for ids in prompts:
            try:
                check_ids(ids, vocab)
            except UsageError as error:
                raise refused_for(asked, asked.PROMPT, str(error)) from None

    def _stops(self, asked: SamplingRequest) -> list[int]:
        """Return the ids that end an answer."""
        own = [] if asked.ignore_eos else self.tokenizer.stops
        return [*own, *asked.stop_token_ids]

    def _adapter(self, asked: SamplingRequest) -> str:
        """Return the requested adapter; empty for the model itself."""
        return asked.model if asked.model in self.adapters and asked.model else ""

    async def _answer(
        self, request: Request, asked: SamplingRequest, prompts: Sequence[Sequence[int]], default: int, n: int,
        language: Language | None, form: AnswerForm = PLAIN,
        echo: bool = False,
    ) -> Response:  # fmt: skip
        """Answer ``prompts``, each ``n`` times with up to ``most`` tokens, constrained by ``language`` if given.

        ``echo``: answers begin with their prompts.
        """
        self._check(asked, prompts, n)
        prompt = sum(map(len, prompts))
        watch = AnswerTimer(self.metrics, prompt, request.scope["began"])
        tenant = self._tenant(request)
        try:
            grammar = None if language is None else await self.prompts.grammar(language)
        except WeftError as error:
            raise refused_for(
                asked, asked.form_field if asked.language else "tools", str(error)
            ) from None
        scored = echo and asked.top is not None
        field = (
            "prompt"
            if isinstance(asked, CompletionRequest)
            else asked.NAMES.get("messages", "messages")
        )
        key = request.headers.get("idempotency-key", "")
        if key and asked.seed is None:
            asked.seed = seed_for_key(key, tenant)
        stage, now = asked.workflow, time.monotonic()
        workflow = None if stage is None else stage.begun(now)
        requests = [
            AnswerRequest(
                ids,
                self._most(field, asked, ids, default),
                asked.sampling,
                self._stops(asked),
                n,
                asked.top,
                tenant,
                grammar,
                self._adapter(asked),
                asked.min_tokens,
                scored,
                workflow=workflow,
                priority=asked.priority,
            )
            for ids in prompts
        ]
        answering = Answering(
            asked,
            self.tokenizer,
            asked.model or self.name,
            prompt,
            form,
            watch,
            prompts if echo else (),
        )
        return await answering.respond(
            request, self.backend.answers(requests, session_of(request, asked), key), n
        )


def session_of(request: Request, asked: SamplingRequest) -> str:
    """Return the name of the conversation or user to which a request belongs, or an empty string. It is in the header
    ``x-session-id`` of ``request``, or else in the body ``asked``.
    """
    return request.headers.get("x-session-id", "") or asked.session


def seed_for_key(key: str, tenant: str) -> int:
    """Return the seed of a request that sets none and whose client has chosen ``key``: the same when the request comes
    again. ``tenant``: whose request it is.
    """
    said = json.dumps([key, tenant]).encode()
    return int.from_bytes(hashlib.blake2b(said, digest_size=4).digest()) >> 1


def refused_for(asked: Modelled, field: str, why: str) -> Refusal:
    """Build a refusal of ``field`` for the reason ``why``, with the name by which the client knows the field."""
    name = asked.NAMES.get(field, field)
    return Refusal(400, f"{name}: {why}", param=name)


async def refused(request: Request, error: Exception) -> Response:
    """Return the response that tells the client of ``error``. The traceback of an unexpected error is logged, too."""
    refusal = refusal_of(error)
    again = refusal.status == 429 or refusal.code == NO_ENGINE
    headers = {"retry-after": "1"} if again else {}
    return JSONResponse(body_of(request, refusal), refusal.status, headers)


def body_of(request: Request, refusal: Refusal) -> dict[str, Any]:
    """Return the JSON body of a refusal, in Anthropic's form for paths of Anthropic's API and in OpenAI's form
    otherwise.
    """
    return error_of(refusal) if request.url.path.startswith(MESSAGES) else refusal.body


async def no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(
        body_of(request, Refusal(error.status_code, said)),
        error.status_code,
        error.headers,
    )


async def client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it
