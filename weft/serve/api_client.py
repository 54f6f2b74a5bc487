"""Client of OpenAI-compatible servers: one request, one reply, and one line about what went wrong."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from weft.errors import UsageError, WeftError

#: Seconds that a server has to begin its answer, and for each further piece.
PATIENCE_S = 600.0


class ApiRefused(WeftError):
    """Raised when a server refuses a request.

    ``code``: the HTTP status. ``wait``: seconds after which the server wants to be asked again; 0: it does not say.
    """

    def __init__(self, line: str, code: int, wait: float) -> None:
        super().__init__(line)
        self.code, self.wait = code, wait


class ApiUnreached(WeftError):
    """Raised when a server cannot be reached, or ends its reply too early."""


@dataclass(frozen=True)
class ApiClient:
    """Client of the server at ``url``, an address such as http://HOST:PORT with or without "/v1".

    ``key``: API key; "": none. ``seconds``: limit of time until a reply begins, and until each further piece of it
    arrives.
    """

    url: str
    key: str = ""
    seconds: float = PATIENCE_S

    def open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request and return the response as an open file of bytes, which the caller closes. ``path``: part of
        the address behind "/v1". ``body``: JSON of a POST request; None: a GET request. Raises :class:`ApiRefused` and
        :class:`ApiUnreached`.
        """
        base = self.url.rstrip("/").removesuffix("/v1") + "/v1"
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(base + path, data, headers)
            return urllib.request.urlopen(request, timeout=self.seconds)
        except urllib.error.HTTPError as error:
            line = f"{self.url} refuses ({error.code}): {error_reason(error.read())}"
            wait = error.headers.get("Retry-After", "")
            seconds = float(wait) if wait.isdecimal() else 0.0
            raise ApiRefused(line, error.code, seconds) from None
        except (OSError, ValueError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ApiUnreached(
                f"{self.url} cannot be reached: {getattr(reason, 'strerror', None) or reason}"
            ) from None

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request as :meth:`open` does, with the same arguments, and return the parsed JSON of its reply. Raises
        :class:`ApiRefused`, and :class:`ApiUnreached` also for a reply that is not JSON.
        """
        try:
            with self.open(path, body) as reply:
                return json.load(reply)
        except (OSError, ValueError, HTTPException) as error:
            raise ApiUnreached(f"{self.url} breaks off: {error!r}") from None

    def first_model(self) -> str:
        """Return the name of the first model that the server lists. Raises :class:`UsageError` if it does not speak
        OpenAI's API, and the errors of :meth:`open`.
        """
        try:
            with self.open("/models") as reply:
                return str(json.load(reply)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            base = self.url.rstrip("/").removesuffix("/v1")
            raise UsageError(
                f"{self.url} is no server that OpenAI's clients know: {base}/v1/models names no model"
            ) from None


def error_reason(body: bytes) -> str:
    """Return the reason for which a server refuses a request, in one line. ``body``: body of the server's error
    response.
    """
    try:
        answer = json.loads(body)
        return " ".join(str(answer["error"]["message"]).split())
    except (ValueError, LookupError, TypeError):
        lines = body.decode(errors="replace").strip().splitlines()
        return (lines or ["no reason given"])[0][:200]
