"""Storage of checkpoints on S3-compatible object stores, through obstore (``pip install 'weft[s3]'``).

Bucket and prefix come from ``s3://bucket/prefix``; endpoint, region and credentials from the usual ``AWS_*`` variables
of the process that makes the requests. No message shows a credential: of what a server answers only its status, code
and message are shown, and those without anything that is known to be secret.
"""

import os
import re
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeVar, cast
from urllib.parse import urlsplit

from weft.checkpoint.storage import MissingObject, StorageError
from weft.errors import WeftError

T = TypeVar("T")

#: Variables that say where credentials come from.
SOURCES = (
    "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_METADATA_ENDPOINT", "AWS_SKIP_SIGNATURE",
)  # fmt: skip
_NO_CREDENTIALS = (
    "there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
)

#: Bytes of a part of an upload and of a range of a download, and how many of either are under way at a time.
PART = 8 << 20
STREAMS = 8

#: S3 takes no more parts than 10,000.
MOST_PARTS = 9_000

#: Answers after which the same request may well succeed: too slow, two at once, too many, and any fault of the server.
TRANSIENT = {408, 409, 425, 429, *range(500, 600)}


@dataclass(frozen=True)
class S3Storage:
    """:class:`Storage` of the objects in an S3 bucket whose keys begin with a prefix.

    An interrupted upload leaves nothing visible. Parts that a killed process has sent stay hidden until a lifecycle
    rule of the bucket (AbortIncompleteMultipartUpload) removes them.

    Attributes:
        ``bucket``: name of the bucket.
        ``prefix``: prefix of the keys, without a slash at the end.
        ``timeout``: seconds for one request.
        ``patience``: seconds after which a failing operation is no longer retried.
        ``pause``: seconds before the first retry, doubled for each further one.
    """

    bucket: str
    prefix: str = ""
    timeout: float = 60
    patience: float = 60
    pause: float = 0.1

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    @property
    def name(self) -> str:
        return (self.prefix or self.bucket).rpartition("/")[2]

    def __truediv__(self, name: str) -> Self:
        below = replace(self, prefix=self._key(name))
        if "_store" in self.__dict__:  # the connections are the bucket's
            below.__dict__["_store"] = self._store
        return below

    def __getstate__(self) -> dict[str, Any]:
        # connections stay here
        return {
            name: value for name, value in self.__dict__.items() if name != "_store"
        }

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        key, total = self._key(name), _total(chunks)
        if total <= PART:
            created = self.create(name, b"".join(map(bytes, chunks)))
        elif created := not self.holds(name):
            part = max(PART, -(-total // MOST_PARTS))

            def attempt() -> None:
                with closing(_slices(chunks, part)) as slices:
                    put = _obstore().put
                    put(
                        self._store,
                        key,
                        slices,
                        use_multipart=True,
                        chunk_size=part,
                        max_concurrency=STREAMS,
                    )

            self._retried("write", key, attempt)
        if not created:
            raise self._problem("write", key, "it exists already")
        return total

    def create(self, name: str, data: bytes) -> bool:
        """Create a small object ``name`` with the bytes ``data`` atomically, and return whether it has been created.

        Returns False if an object of that name exists with other bytes. If it exists with the same bytes, the result is
        True: an earlier attempt of this call may have created it, and only the answer was lost. So processes that
        compete for a name must write different bytes.
        """
        key = self._key(name)

        def attempt() -> bool:
            obs = _obstore()
            try:
                obs.put(self._store, key, data, mode="create", use_multipart=False)
            except obs.exceptions.AlreadyExistsError:
                return self.read(name) == data
            return True

        return self._retried("create", key, attempt)

    def read(self, name: str) -> bytes:
        key = self._key(name)
        return self._retried(
            "read", key, lambda: bytes(_obstore().get(self._store, key).bytes())
        )

    def holds(self, name: str) -> bool:
        key = self._key(name)
        try:
            self._retried("read", key, lambda: _obstore().head(self._store, key))
        except MissingObject:
            return False
        return True

    @property
    def granule(self) -> int:
        return STREAMS * PART

    def read_into(self, name: str, offset: int, *buffers: memoryview) -> None:
        key = self._key(name)
        joined = (
            buffers[0]
            if len(buffers) == 1
            else memoryview(bytearray(sum(b.nbytes for b in buffers)))
        )

        def attempt() -> None:
            if not joined.nbytes:
                _obstore().head(self._store, key)
                return
            self._fill(key, offset, joined.cast("B"))

        self._retried("read", key, attempt)
        if len(buffers) > 1:
            at = 0
            for buffer in buffers:
                buffer[:] = joined[at : (at := at + buffer.nbytes)]

    def list(self, prefix: str = "") -> dict[str, int]:
        cut = len(self._key(""))
        names = {entry["path"][cut:]: entry["size"] for entry in self._listed(prefix)}
        return {
            n: size
            for n, size in sorted(names.items())
            if n.startswith(prefix) and not n.endswith("/")
        }

    def marked_objects(self, name: str = "") -> dict[str, tuple[int, str]]:
        """Return ``(size, ETag)`` of the object ``name``, or of all objects if ``name`` is empty, by their names."""
        cut, key = len(self._key("")), self._key(name)
        entries = (
            [self._retried("read", key, lambda: _obstore().head(self._store, key))]
            if name
            else self._listed()
        )
        return {
            entry["path"][cut:]: (entry["size"], str(entry["e_tag"]))
            for entry in sorted(entries, key=lambda entry: entry["path"])
            if not entry["path"].endswith("/")
        }

    def _listed(self, prefix: str = "") -> Sequence[Any]:
        """obstore's entries of all objects in the folder part of ``prefix``, as a store can only list whole folders."""
        folder = self._key(prefix).rpartition("/")[0]
        return self._retried(
            "list",
            folder,
            lambda: _obstore().list(self._store, prefix=folder or None).collect(),
        )

    def folders(self) -> Sequence[str]:
        prefix = self._key("")
        prefixes = self._retried(
            "list",
            prefix,
            lambda: _obstore().list_with_delimiter(self._store, prefix=prefix or None),
        )["common_prefixes"]
        return sorted(path.strip("/").rpartition("/")[2] for path in prefixes)

    def modified(self, name: str = "") -> float:
        key = self._key(name)
        entries = (
            [self._retried("read", key, lambda: _obstore().head(self._store, key))]
            if name
            else self._listed()
        )
        if not entries:
            raise self._problem("read", key, "it does not exist")
        return float(max(entry["last_modified"] for entry in entries).timestamp())

    def clear(self) -> None:
        self.delete(self.list())

    def delete(self, names: Iterable[str]) -> None:
        keys = [self._key(name) for name in names]
        if keys:
            what = keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} more"
            self._retried("delete", what, lambda: _obstore().delete(self._store, keys))

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    @cached_property
    def _store(self) -> Any:
        from obstore.store import S3Store

        options: dict[str, Any] = {
            "timeout": f"{round(self.timeout * 1000)}ms",
            "connect_timeout": "5s",
        }
        if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get(
            "AWS_ENDPOINT_URL"
        ):
            parts = urlsplit(endpoint)
            if "amazonaws." not in endpoint and not any(
                os.environ.get(name) for name in SOURCES
            ):
                # before obstore asks for Amazon's metadata service
                raise self._problem("use", "", _NO_CREDENTIALS)
            if (
                parts.username
                or parts.password
                or parts.scheme not in ("http", "https")
            ):
                raise self._problem(
                    "use",
                    "",
                    "the endpoint must be http(s)://host:port, without credentials",
                )
            if parts.scheme == "http":
                allowed = os.environ.get("AWS_ALLOW_HTTP", "").lower() in (
                    "1",
                    "true",
                    "yes",
                )
                if not allowed and not re.fullmatch(
                    r"localhost|127(\.\d+){3}|::1", parts.hostname or ""
                ):
                    raise self._problem(
                        "use",
                        "",
                        f"{endpoint} is not encrypted; AWS_ALLOW_HTTP=true allows that",
                    )
                options["allow_http"] = True
        backoff = {
            "init_backoff": timedelta(seconds=self.pause),
            "max_backoff": timedelta(seconds=5),
            "base": 2,
        }
        limit: Any = {
            "max_retries": 8,
            "retry_timeout": timedelta(seconds=self.patience),
            "backoff": backoff,
        }
        return S3Store(
            self.bucket, client_options=cast(Any, options), retry_config=limit
        )

    def _retried(self, doing: str, key: str, attempt: Callable[[], T]) -> T:
        """Return the result of ``attempt``, which is repeated after transient errors.

        obstore repeats only requests that are always safe to repeat; the requests here are, too (see :meth:`create`).
        """
        deadline, pause = time.monotonic() + self.patience, self.pause
        while True:
            try:
                return attempt()
            except WeftError:
                raise
            except Exception as error:
                if not (_transient(error) and time.monotonic() + pause < deadline):
                    problem = self._problem(doing, key, _cause(error))
                    break
            time.sleep(pause)
            pause = min(5, 2 * pause)
        try:
            raise problem  # out here, so that no traceback shows what obstore said
        finally:
            # which would keep itself alive, and with it the caller's memory
            del problem

    def _problem(self, doing: str, key: str, cause: str) -> StorageError:
        for name in ("SECRET_ACCESS_KEY", "SESSION_TOKEN", "ACCESS_KEY_ID"):
            if secret := os.environ.get(f"AWS_{name}"):
                cause = cause.replace(secret, "***")
        kind = (
            MissingObject
            if cause.startswith(("it does not exist", "it is shorter"))
            else StorageError
        )
        return kind(f"cannot {doing} s3://{self.bucket}/{key}: {cause}")

    def _fill(self, key: str, offset: int, buffer: memoryview) -> None:
        """Read ``buffer`` full, several ranges at a time."""
        obs, store = _obstore(), self._store

        def fetch(at: int) -> None:
            piece = buffer[at : at + PART]
            got = obs.get_range(store, key, start=offset + at, length=len(piece))
            if len(got) != len(piece):
                raise self._problem("read", key, "it is shorter than it should be")
            piece[:] = memoryview(got)

        if len(buffer) <= PART:
            fetch(0)
            return
        with ThreadPoolExecutor(STREAMS) as threads:
            for _ in threads.map(fetch, range(0, len(buffer), PART)):
                pass


def _total(chunks: Iterable[bytes | memoryview]) -> int:
    """Return the number of bytes of all chunks: their attribute ``nbytes``, else the sum of their sizes."""
    known = getattr(chunks, "nbytes", None)
    return (
        known
        if known is not None
        else sum(memoryview(chunk).nbytes for chunk in chunks)
    )


def _slices(
    chunks: Iterable[bytes | memoryview], part: int
) -> Generator[bytes, None, None]:
    """Copies of the chunks in slices of at most ``part`` bytes.

    They are made in a thread of their own: obstore takes them in a thread in which no other request can be made, and
    making a chunk may take one.
    """

    def slices() -> Generator[bytes, None, None]:
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            for at in range(0, len(view), part):
                # sent later, when the chunk may have changed
                yield bytes(view[at : at + part])

    with closing(slices()) as pieces, ThreadPoolExecutor(1) as thread:
        while (piece := thread.submit(next, pieces, None).result()) is not None:
            yield piece


def _obstore() -> Any:
    try:
        import obstore
        import obstore.exceptions
    except ImportError:
        raise StorageError(
            "s3:// needs the package obstore: pip install 'weft[s3]'"
        ) from None
    return obstore


class _Answer(NamedTuple):
    status: int | None
    code: str
    message: str


def _answer_of(error: Exception) -> _Answer:
    """Status, code and message of a server's answer, as far as there are any."""
    text = str(error).partition("\nDebug source:")[0]
    status = re.search(r"status code: (\d{3})", text)
    code = re.search(r"<Code>(\w+)</Code>", text)
    message = re.search(r"<Message>([^<]*)</Message>", text)
    return _Answer(
        int(status[1]) if status else None,
        code[1] if code else "",
        message[1] if message else "",
    )


def _transient(error: Exception) -> bool:
    status, code, _ = _answer_of(error)
    if code == "NoSuchUpload":  # a repeated request may have found its upload completed
        return True
    return status in TRANSIENT if status is not None else _transport(error) != ""


def _transport(error: Exception) -> str:
    """Return what is wrong with the connection, or "" if another error occurred."""
    text = str(error)
    if "HTTP error" not in text and "reqwest::Error" not in text:
        return ""
    for sign, cause in {
        "TimedOut": "the server did not answer in time",
        "dns error": "the endpoint's host is not known",
        "ConnectionRefused": "the endpoint refuses connections",
        "Connect": "the endpoint cannot be reached",
    }.items():
        if sign in text:
            return cause
    return "the connection broke off"


def _cause(error: Exception) -> str:
    """One line on what went wrong, without addresses, headers or anything else that was sent."""
    status, code, message = _answer_of(error)
    if "169.254." in str(error) and status is None:
        return _NO_CREDENTIALS
    if isinstance(error, FileNotFoundError) and code != "NoSuchBucket":
        return "it does not exist"
    if status == 416:
        return "it is shorter than it should be"
    if status is not None:
        answer = f"{status} {code}".strip() + (
            f" ({' '.join(message.split())[:200]})" if message else ""
        )
        return f"the server answered {answer}"
    return (
        _transport(error)
        or f"{type(error).__name__}: {' '.join(str(error).splitlines()[:1])[:200]}"
    )
