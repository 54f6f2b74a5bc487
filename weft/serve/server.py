"""``weft serve``: a model over HTTP, with the interfaces of OpenAI and Anthropic."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from weft.data.tokenizer import Tokenizer
from weft.errors import UsageError, WeftError
from weft.generate.backend import AnswerRequest, Backend, SearchRequest
from weft.generate.beam_search import LENGTH_PENALTY
from weft.generate.embedding import LONGEST
from weft.generate.engine import check_ids
from weft.pages import render
from weft.serve.answering import PLAIN, AnswerForm, Answering, while_connected
from weft.serve.anthropic import MESSAGES, CountRequest, MessagesRequest
from weft.serve.api_server import ApiServer, refused_for, seed_for_key
from weft.serve.embeddings import encoded_vector
from weft.serve.lengths import TokenLimit, TooManyTokens
from weft.serve.model_choice import AUTO, ModelChoice, last_question
from weft.serve.prompts import ChatPrompt, Prompts
from weft.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    Conversing,
    EmbeddingRequest,
    Language,
    Modelled,
    SamplingRequest,
    ScoreRequest,
    Texts,
    Tokenized,
    Untokenized,
)
from weft.serve.replies import Answer, Replies, usage_of
from weft.serve.responses import ResponsesRequest
from weft.serve.server_metrics import AnswerTimer, ServerMetrics


class Server(ApiServer):
    """Serves the model of ``backend`` under ``name``, and the model with each of ``adapters`` under the adapter's own
    name.

    Args:
        ``backend``: generates the tokens.
        ``keys``: API keys, one of which each request must have; without any, all requests are accepted.
        ``tokens``: largest number of tokens of an answer to a chat request that sets no number itself.
        ``context``: largest number of tokens of a prompt and its answer; None: the number of tokens that the cache
            holds.
    """

    backend: Backend
    metrics: ServerMetrics

    def __init__(
        self, backend: Backend, tokenizer: Tokenizer, name: str, keys: Sequence[str] = (), tokens: int = 1024,
        adapters: Sequence[str] = (), context: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(backend, name, ServerMetrics(backend), keys)
        self.tokenizer, self.tokens = tokenizer, tokens
        self.adapters, self.context = adapters, context
        #: Chooses the model of requests that name ``auto``; None: such a name is not known.
        self.choice: ModelChoice | None = None
        self.prompts = Prompts(tokenizer, backend.facts.vocab, name)
        self.embedding = asyncio.Lock()

    def routes(self) -> list[Route]:
        return [
            Route("/", self.page),
            *super().routes(),
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

    def closed(self) -> None:
        self.prompts.close()

    async def page(self, request: Request) -> Response:
        return HTMLResponse(render("serve/chat_page.html"))

    @property
    def names(self) -> list[str]:
        """List of the names by which clients can choose a model: the served model, its adapters, and "auto" if the
        server chooses among models.
        """
        return [self.name, *self.adapters, *([AUTO] if self.choice else [])]

    def _card(self, name: str) -> dict[str, Any]:
        return super()._card(name) | {"max_model_len": self.limit.tokens}

    async def _choose(self, asked: Modelled) -> None:
        if self.choice and asked.model == AUTO:
            asked.model = await self.choice.choose(await self._text_of(asked))

    async def completions(self, request: Request) -> Response:
        asked = await self._question(request, CompletionRequest)
        n = max(asked.n, asked.best_of or 0)
        prompts = await self._texts(
            "prompt", asked.prompt, self.limit, True, asked.add_special_tokens
        )
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
                "it is for the model itself, on one rank, without guesses and without a cache policy that keeps sums "
                "(alisa); ask without it",
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
        self,
        field: str,
        texts: Texts,
        limit: TokenLimit | None,
        special: bool = False,
        opened: bool = True,
    ) -> list[list[int]]:
        try:
            return await self.prompts.texts(texts, limit, special, opened)
        except TooManyTokens as error:
            raise error.refusal(field) from None

    @property
    def limit(self) -> TokenLimit:
        """Largest number of tokens of a prompt and its answer together. It also says whether the cache or the model's
        context sets it.
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
        default = max(default, asked.min_tokens)
        if asked.most is None and room > 0 and room >= asked.min_tokens:
            return min(default, room)
        most = default if asked.most is None else asked.most
        if most > room:
            more = f" and {most:,} more" if most else ""
            raise TooManyTokens(len(ids), limit, more).refusal(field)
        # a prompt is read together with the next token, which needs no room until it is read
        return max(1, most)

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
        limit = TokenLimit(LONGEST, "a scored text's limit")
        ids = (await self._conversation(request, asked, limit=limit)).ids
        async with self.embedding:
            score = await self.backend.score(ids)
        usage = usage_of(len(ids), 0)
        return JSONResponse(
            {"object": "score", "score": score, "model": self.name, "usage": usage}
        )

    async def tokenize(self, request: Request) -> Response:
        asked = await self._question(request, Untokenized)
        if asked.messages:
            ids = (await self._conversation(request, asked)).ids
        else:
            opened = asked.add_special_tokens is not False
            (ids,) = await self.prompts.texts([asked.prompt or ""], None, True, opened)
        return JSONResponse({"tokens": ids, "count": len(ids)})

    async def detokenize(self, request: Request) -> Response:
        asked = await self._question(request, Tokenized)
        if any(i >= self.tokenizer.vocab for i in asked.tokens):
            raise refused_for(asked, "tokens", f"ids are below {self.tokenizer.vocab}")
        return JSONResponse({"prompt": await self.prompts.decode(asked.tokens)})

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
    """Return the name of the conversation or user to which a request belongs; "" if it has none. It stands in the
    header ``x-session-id`` of ``request``, or else in a field of the body ``asked``.
    """
    return request.headers.get("x-session-id", "") or asked.session
