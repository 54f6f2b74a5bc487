"""What every server of a model does over HTTP, whatever the model makes: keys, limits, health, metrics and errors."""

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from weft.errors import WeftError
from weft.serve.answering import NO_ENGINE, refusal_of
from weft.serve.anthropic import error_for
from weft.serve.gate import Gate, GateRules, is_json
from weft.serve.lengths import PIECE, check_tree
from weft.serve.protocol import Modelled, Refusal
from weft.serve.request_reader import RequestReader
from weft.serve.server_metrics import RequestMetrics

Q = TypeVar("Q", bound=Modelled)

#: Most bytes of a request, and of all requests that are being answered.
LARGEST, ALL = 8 * 2**20, 64 * 2**20

#: Seconds within which a request must have arrived completely.
PATIENCE = 60


class ServedBackend(Protocol):
    """Interface of the object that computes a server's answers, such as an engine or a router of engines."""

    @property
    def failure(self) -> Exception | None:
        """The error that has ended the backend's work; None while it works."""

    def cut_answers(self) -> int:
        """End all unfinished answers at once, as at shutdown, and return their number."""

    def close(self) -> None:
        """End all work of the backend, and wait until its threads have ended."""


class ApiServer:
    """Base class of HTTP servers with OpenAI's API: health, metrics, list of models and errors.

    Args:
        ``backend``: computes the answers.
        ``name``: the model's name for clients.
        ``metrics``: counts requests.
        ``keys``: API keys, one of which each request must have; without any, all requests are accepted.
    """

    def __init__(
        self,
        backend: ServedBackend,
        name: str,
        metrics: RequestMetrics,
        keys: Sequence[str] = (),
    ) -> None:
        self.backend: Any = backend
        self.name, self.metrics, self.keys = name, metrics, keys
        self.reader = RequestReader()
        self.begun = int(time.time())
        self.held = 0  # bytes of questions that are being answered
        self.ending = False  # no answer is awaited any more

    def app(self, rules: GateRules | None = None) -> Any:
        """Return the ASGI application for uvicorn. It checks requests by ``rules`` (None: default rules), and closes
        the backend when it ends.
        """

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            yield
            await asyncio.to_thread(self.backend.close)
            self.closed()

        handlers: dict[Any, Any] = {
            Refusal: refused, WeftError: refused, Exception: refused,
            HTTPException: no_route, ClientDisconnect: client_gone,
        }  # fmt: skip
        app = Starlette(
            routes=self.routes(), exception_handlers=handlers, lifespan=lifespan
        )
        return self.metrics.counting(
            self._ending_quietly(Gate(self._weighing(app), rules or GateRules()))
        )

    def routes(self) -> list[Route]:
        """Return the routes of the server: paths and the methods that answer them."""
        return [
            Route("/health", self.health),
            Route("/metrics", self.measures),
            Route("/v1/models", self.models),
            Route("/v1/models/{id:path}", self.model),
        ]

    def closed(self) -> None:
        """End work that a subclass has started beside the backend, such as threads. It is called after the backend has
        ended; in this class nothing is done.
        """

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
                    body = error_for(scope, Refusal(503, "the server ends"))
                    await JSONResponse(body, 503)(scope, receive, send)

        return quiet

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
        """List of the names by which clients can choose a model."""
        return [self.name]

    def _card(self, name: str) -> dict[str, Any]:
        """Return what clients may know about a model."""
        return {
            "id": name, "object": "model", "created": self.begun, "owned_by": "weft",
            "parent": None if name == self.name else self.name,
        }  # fmt: skip

    async def _choose(self, asked: Modelled) -> None:
        """Set the model of a request that leaves the choice to the server."""

    def _tenant(self, request: Request) -> str:
        """Return the tenant that a request belongs to: prefixes in the cache are shared only within the same
        API key. Its name is a hash of the key, and not the key's number: blocks in files and at other engines outlive
        this server, and the next one may have other keys.
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
        known = [
            key.encode() for key in self.keys if hmac.compare_digest(key.encode(), sent)
        ]
        if not known:
            raise Refusal(
                401,
                "no valid API key; send the header Authorization: Bearer KEY",
                "invalid_api_key",
            )
        return f"key {hashlib.blake2b(known[0], digest_size=16).hexdigest()}"

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
        coding = request.headers.get("content-encoding", "identity")
        if coding.strip().lower() not in ("", "identity"):
            raise Refusal(
                415,
                f"send the question as it is, not with Content-Encoding: {coding[:40]}",
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
        await self._choose(asked)
        if asked.model not in (None, *self.names):
            raise Refusal(
                404,
                f"there is no model {asked.model!r} here, but {self.name!r}",
                "model_not_found",
                "model",
            )
        return asked


def seed_for_key(key: str, tenant: str) -> int:
    """Return the seed of sampling for a request that sets no seed but has an idempotency key. A repeated request gets
    the same seed, and so the same answer. ``key``: the key that the client has chosen. ``tenant``: name of the client,
    so that clients with the same key get different seeds.
    """
    said = json.dumps([key, tenant]).encode()
    return int.from_bytes(hashlib.blake2b(said, digest_size=4).digest()) >> 1


def refused_for(asked: Modelled, field: str, why: str) -> Refusal:
    """Build a refusal with status 400 for a wrong field of ``asked``. ``field``: the field's name in this class; the
    refusal has the name by which clients know it. ``why``: the reason.
    """
    name = asked.NAMES.get(field, field)
    return Refusal(400, f"{name}: {why}", param=name)


async def refused(request: Request, error: Exception) -> Response:
    """Return the error response for a ``request`` that has failed with ``error``. The traceback of an unexpected error
    is also logged.
    """
    refusal = refusal_of(error)
    again = refusal.status == 429 or refusal.code == NO_ENGINE
    headers = {"retry-after": "1"} if again else {}
    return JSONResponse(error_for(request.scope, refusal), refusal.status, headers)


async def no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(
        error_for(request.scope, Refusal(error.status_code, said)),
        error.status_code,
        error.headers,
    )


async def client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it
