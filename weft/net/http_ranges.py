"""Read files over HTTP in ranges, for downloads that go on after a cut."""

from __future__ import annotations

import base64
import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

#: Seconds that a server has for its answer, and for each further piece.
ANSWER_S = 30.0
#: Bytes of a piece.
PIECE_SIZE = 1 << 20
#: Answers after which the same request may well succeed.
TRY_AGAIN = {408, 409, 425, 429, *range(500, 600)}


class HttpProblem(Exception):
    """Error of a request over HTTP that brought no file: the server refused it, or the connection failed.

    ``again``: whether the same request may succeed later. ``status``: the server's status code; 0: the server has not
    answered.
    """

    def __init__(self, reason: str, again: bool, status: int = 0) -> None:
        super().__init__(reason)
        self.again, self.status = again, status


class HttpFile(NamedTuple):
    """Facts about a file on a server.

    ``size``: its size in bytes, -1 if unknown. ``mark``: a text that changes when the file does, such as its ETag;
    "" if unknown.
    """

    size: int
    mark: str


def http_file(address: str, headers: Mapping[str, str] | None = None) -> HttpFile:
    """Ask a server for the size and mark of the file at the web address ``address``, by a HEAD request.

    If the server refuses HEAD, as for addresses that are signed for GET alone, the first byte is requested instead.
    ``headers``: further headers of the request. Raises :class:`HttpProblem`.
    """
    try:
        with closing(_opened(address, "HEAD", headers)) as answer:
            return HttpFile(
                int(answer.headers.get("Content-Length") or -1), _mark(answer)
            )
    except HttpProblem as problem:
        if problem.status not in (400, 403, 405, 501):
            raise
    with closing(
        _opened(address, "GET", {**(headers or {}), "Range": "bytes=0-0"})
    ) as answer:
        whole = re.fullmatch(
            r"bytes 0-0/(\d+)", answer.headers.get("Content-Range", "")
        )
        size = (
            int(whole[1]) if whole else int(answer.headers.get("Content-Length") or -1)
        )
        return HttpFile(size, _mark(answer))


def http_bytes(
    address: str, start: int, mark: str, headers: Mapping[str, str] | None = None
) -> Iterator[bytes]:
    """Yield the bytes of a file from ``start`` to its end.

    ``mark``: the mark of the file, "" if unknown. Raises :class:`HttpProblem`, also if the connection is cut, and
    with status 412 if the file is another one now. ``address``: address of the file; ``headers``: further headers of
    the request.
    """
    asked = dict(headers or {})
    if start:
        asked["Range"] = f"bytes={start}-"
    with closing(_opened(address, "GET", asked)) as answer:
        now = _mark(answer)
        if mark and now and now != mark:
            raise HttpProblem("it has changed", again=False, status=412)
        skip = start if start and answer.status != 206 else 0  # it knows no ranges
        expected = answer.headers.get("Content-Length")
        received = 0
        while True:
            try:
                piece = answer.read(PIECE_SIZE)
            except (OSError, http.client.HTTPException) as error:
                raise HttpProblem(_reason(error), again=True) from None
            if not piece:
                break
            received += len(piece)
            if skip:
                piece, skip = piece[skip:], max(0, skip - len(piece))
            if piece:
                yield piece
        if expected is not None and received < int(expected):
            raise HttpProblem("the connection broke off", again=True)


def http_json(address: str, headers: Mapping[str, str] | None = None) -> bytes:
    """Return the body of the answer to a GET request for JSON, as bytes that are not parsed. ``address``: the web
    address. Raises :class:`HttpProblem`.

    ``headers``: further headers of the request.
    """
    return b"".join(http_bytes(address, 0, "", headers))


def _mark(answer: Any) -> str:
    """Return what changes with a file: its ETag, else the time of its last change; without both ""."""
    return str(answer.headers.get("ETag") or answer.headers.get("Last-Modified") or "")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, and shows the token to no other host."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if (
            request is not None
            and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc
        ):
            request.remove_header("Authorization")
        return request


def _opened(address: str, method: str, headers: Mapping[str, str] | None) -> Any:
    parts = urlsplit(address)
    who, _, host = parts.netloc.rpartition("@")
    if who:  # a name and a password, which are no part of the host
        address = parts._replace(netloc=host).geturl()
        basic = base64.b64encode(unquote(who).encode()).decode()
        headers = {"Authorization": f"Basic {basic}", **(headers or {})}
    request = urllib.request.Request(
        address,
        headers={"Accept-Encoding": "identity", **(headers or {})},
        method=method,
    )
    try:
        return urllib.request.build_opener(_Redirects).open(request, timeout=ANSWER_S)
    except urllib.error.HTTPError as error:
        error.close()
        raise HttpProblem(
            f"the server answered {error.code} ({error.reason})",
            error.code in TRY_AGAIN,
            error.code,
        ) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        again = not isinstance(error, ValueError)
        raise HttpProblem(_reason(error), again) from None


def _reason(error: BaseException) -> str:
    cause = getattr(error, "reason", error)
    if isinstance(cause, TimeoutError):
        return f"the server did not answer within {ANSWER_S:.0f} s"
    return str(getattr(cause, "strerror", None) or cause or type(cause).__name__)
