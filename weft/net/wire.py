"""Sealed connections: one handshake, and frames that nobody else can make, change, leave out, repeat or reorder.

The listener begins with a random challenge. The dialler answers with a nonce, the name of a channel and a text about
itself. From these four and the channel's secret both ends derive the keys of the connection, one for each direction.
The dialler proves that it knows them in the same message, and the listener in its answer, so that nothing is said to
a stranger, and nothing that was overheard opens another connection.

An encrypted connection's keys also come from a Diffie-Hellman exchange (X25519) in the same messages, so that who
learns the secret later, or overhears how it is handed out, reads nothing.

A frame is a head in JSON and a raw payload. Head, and every :data:`PIECE` of the payload, are records: numbered, and
sealed with 128 bits of a keyed hash (HMAC-SHA256; AES-256-GMAC, ten times as fast, where both ends have it), or
encrypted (AES-256-GCM) where both ends have agreed on that. A head is opened before memory is given to its payload.
Nothing that arrives is unpickled.

Whatever reads is a generator here, which yields the memory that it wants filled and knows nothing of sockets. So one
implementation serves threads that wait for one connection and threads that wait for many (:mod:`weft.net.poller`).
"""

import hmac
import ipaddress
import json
import math
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib.util import find_spec
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from weft.errors import UsageError
from weft.net.sockets import end_connection

R = TypeVar("R")
Head = dict[str, Any]
Buffer = bytes | bytearray | memoryview
#: Yields memory to be filled with the next bytes that arrive, and returns what they mean.
Steps = Generator[memoryview, None, R]
#: Gives the memory for a payload of so many bytes.
Place = Callable[[Head, int], memoryview]
Encryption = Literal["auto", "always", "never"]

#: What stands before a public key in the host of an address that is reached over peers.
PEER = "peer:"
#: Bytes of a challenge and of a nonce, of a seal, and of a record of the payload at most.
NONCE, SEAL, PIECE = 32, 16, 1 << 20
#: Most bytes of what a dialler says of itself, of a head, and of a payload.
LONGEST_HELLO, LONGEST_HEAD, LONGEST = 1 << 12, 1 << 26, 1 << 40
#: Seconds that each record of a frame may take once the frame has begun.
STALL_S = 600.0

_HELLO = struct.Struct(f"!{NONCE}sBBH")  # nonce, encrypted, bytes of channel and text
_FRAME = struct.Struct("!IQ")  # bytes of head and payload
ENDED = "the connection has ended"


class WireBroken(ConnectionError):
    """Error of a connection whose other end is gone, has stalled, or does not belong to the channel.

    The message says which.
    """


class WireForged(WireBroken):
    """Error of received data that does not match its seal (the hash or tag that only the other end can make)."""


class Frame(NamedTuple):
    head: Head
    payload: memoryview


class CipherMissing(UsageError, WireBroken):
    """Error of a connection that must be encrypted while the package for encryption is not installed."""


def key_of(secret: str) -> bytes:
    """Return a channel's key, which is derived from the channel's secret.

    If the environment variable ``WEFT_SECRET`` is set, the key depends on its value, too.
    """
    given = os.environ.get("WEFT_SECRET", "")
    return hmac.digest(b"weft channel" + given.encode(), secret.encode(), "sha256")


def encrypts(how: Encryption, host: str, own: str) -> bool:
    """Return whether a connection of this process with another is encrypted.

    ``how``: "always", "never" or "auto"; ``host``: address of the other process; ``own``: address of this process. With
    "auto" a connection is encrypted if ``host`` is neither this machine nor in a private network.
    """
    if how != "auto":
        return how == "always"
    # peers encrypt what they carry
    if host in (own, "localhost") or host.startswith(PEER):
        return False
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # a name, which may stand for anything
        return True
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_global)


class _Cipher(NamedTuple):
    """The parts of the package ``cryptography`` that encrypted connections use."""

    aead: Callable[[bytes], Any]
    private_key: Any
    public_key: Any


def require_cipher() -> _Cipher:
    """Return the functions of the package ``cryptography`` that encrypted connections use.

    Raises :class:`CipherMissing` if the package is not installed.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric import x25519
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise CipherMissing(
            "an encrypted connection needs the package cryptography: pip install 'weft[secure]' on every machine, or "
            'set resilience.encrypt = "never" if the network between them is your own'
        ) from None
    return _Cipher(AESGCM, x25519.X25519PrivateKey, x25519.X25519PublicKey)


class _Mode(IntEnum):
    """How records are protected: by a keyed hash, by encryption, or by the cipher's tag without encryption."""

    HASHED = 0
    ENCRYPTED = 1
    TAGGED = 2


@cache
def _has_cipher() -> bool:
    return find_spec("cryptography") is not None


@dataclass
class _Records:
    """One direction of a connection: numbers its records, and seals or opens them."""

    key: bytes
    mode: _Mode
    number: int = 0

    def __post_init__(self) -> None:
        self._hash = hmac.new(self.key, digestmod="sha256")
        aead = None if self.mode is _Mode.HASHED else require_cipher().aead(self.key)
        self._cipher = aead if self.mode is _Mode.ENCRYPTED else None
        self._tagger = aead if self.mode is _Mode.TAGGED else None

    def seal(self, views: Sequence[Buffer], context: bytes) -> list[Buffer]:
        """Return the record of these bytes as it is sent. The receiver must pass the same ``context``."""
        number = self._next()
        if self._cipher is not None:
            return [self._cipher.encrypt(number, b"".join(views), context)]
        return [*views, self._seal(number, views, context)]

    def open(self, text: memoryview, seal: Buffer, context: bytes) -> None:
        """Check a record, and decrypt it in place. Raises :class:`WireForged`."""
        number = self._next()
        if self._cipher is None:
            if not hmac.compare_digest(seal, self._seal(number, [text], context)):
                raise WireForged("what came is not what was sealed")
            return
        from cryptography.exceptions import InvalidTag

        try:
            text[:] = self._cipher.decrypt(number, b"".join([text, seal]), context)
        except InvalidTag:
            raise WireForged("what came is not what was encrypted") from None

    def _next(self) -> bytes:
        self.number += 1
        return self.number.to_bytes(12)

    def _seal(self, number: bytes, views: Iterable[Buffer], context: bytes) -> bytes:
        if self._tagger is not None:  # nothing encrypted, everything authenticated
            # the length tells the context from what follows it
            about = [len(context).to_bytes(4), context, *views]
            tag: bytes = self._tagger.encrypt(number, b"", b"".join(about))
            return tag
        mac = self._hash.copy()
        mac.update(number + context)
        for view in views:
            mac.update(view)
        return mac.digest()[:SEAL]


@dataclass
class Session:
    """Keys of one connection, on which both ends have agreed in the handshake.

    Bytes are sent in records (pieces that are checked one by one). A sealed connection sends records in clear, each
    with a tag that only the two ends can make. An encrypted connection encrypts them as well. ``outgoing``: seals or
    encrypts the records sent; ``incoming``: checks or decrypts the records received; ``hello``: JSON values by which
    the end that opened the connection says who it is.
    """

    outgoing: _Records
    incoming: _Records
    hello: Head

    def encode(
        self, head: Head, payload: Sequence[memoryview] = ()
    ) -> Iterator[Buffer]:
        """Yield the bytes of a frame as they are sent, sealed or encrypted.

        ``head``: JSON values by name; ``payload``: raw bytes, one view after another.
        """
        text = json.dumps(head, separators=(",", ":")).encode()
        fixed = _FRAME.pack(len(text), sum(view.nbytes for view in payload))
        yield b"".join([fixed, *self.outgoing.seal([text], fixed)])
        for piece in _pieces(payload):
            yield from self.outgoing.seal(piece, b"")

    def decode(self, place: Place | None = None) -> Steps[Frame]:
        """Read the next frame (a head in JSON and a raw payload), as a generator.

        The generator yields writable buffers, one after another. The caller fills each of them with the next received
        bytes, and then resumes the generator. At its end the generator returns the frame. ``place(head, size)``:
        returns the buffer for the frame's payload of ``size`` bytes; by default a new buffer is allocated. Raises
        :class:`WireForged` if received data does not match its seal.
        """
        yield (fixed := memoryview(bytearray(_FRAME.size)))
        length, size = _FRAME.unpack(fixed)
        if length > LONGEST_HEAD or size > LONGEST:
            raise WireForged(f"a frame of {length} and {size} bytes is too long")
        yield (text := memoryview(bytearray(length + SEAL)))
        self.incoming.open(text[:length], text[length:], bytes(fixed))
        head = _head(bytes(text[:length]))
        memory = place(head, size) if place else memoryview(bytearray(size))
        if len(memory) != size:
            raise WireBroken("a message of another size than there is room for")
        seal = memoryview(bytearray(SEAL))
        for at in range(0, size, PIECE):
            yield (piece := memory[at : at + PIECE])
            yield seal
            self.incoming.open(piece, seal, b"")
        return Frame(head, memory)


def _head(text: bytes) -> Head:
    try:
        head = json.loads(text)
    except (ValueError, RecursionError):
        head = None
    if not isinstance(head, dict):
        raise WireBroken("a message has no head in JSON")
    return head


def _pieces(payload: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the bytes of these views, cut into :data:`PIECE` each."""
    piece, room = list[memoryview](), PIECE
    for view in payload:
        rest = view.cast("B") if view.nbytes else view[:0]
        while len(rest):
            piece.append(rest[:room])
            room -= len(piece[-1])
            rest = rest[len(piece[-1]) :]
            if not room:
                yield piece
                piece, room = [], PIECE
    if piece:
        yield piece


# --- the handshake ---


def greet(
    key_for: Callable[[str], bytes | None],
    allows: Callable[[bool], bool],
    send: Callable[[bytes], object],
) -> Steps[tuple[str, Session]]:
    """Run the listening end of a handshake, as a generator.

    The generator yields writable buffers. The caller fills each of them with the next received bytes, and then resumes
    the generator. At its end it returns the channel's name and the session. ``key_for(channel)`` returns the key of a
    channel by its name, or None if there is no such channel; ``allows(encrypted)`` returns whether such a connection is
    allowed; ``send`` sends bytes. Raises :class:`WireForged` if the other end does not know the key or is not allowed.
    """
    challenge = bytearray(secrets.token_bytes(NONCE))
    # the last bit says whether this end has the cipher; it is part of what is proved
    challenge[-1] = challenge[-1] & ~1 | _has_cipher()
    send(bytes(challenge))
    yield (fixed := memoryview(bytearray(_HELLO.size)))
    nonce, asked, name, size = _HELLO.unpack(fixed)
    if asked not in list(_Mode) or size > LONGEST_HELLO:
        raise WireForged("no hello of Weft's")
    mode = _Mode(asked)
    encrypted = mode is _Mode.ENCRYPTED
    yield (rest := memoryview(bytearray(name + size + SEAL)))
    text, seal = bytes(rest[:-SEAL]), rest[-SEAL:]
    channel = text[:name].decode(errors="replace")
    # strangers are told no difference between a wrong name and a wrong secret
    key = key_for(channel) or secrets.token_bytes(NONCE)
    master = hmac.digest(key, challenge + bytes(fixed) + text, "sha256")
    if not hmac.compare_digest(seal, _proof(master, b"dialler")):
        raise WireForged("a stranger")
    if not allows(encrypted):
        raise WireForged("it does not encrypt what it sends")
    hello, share, secret = _head(text[name:]), b"", b""
    if encrypted:
        private = require_cipher().private_key.generate()
        share, secret = private.public_key().public_bytes_raw(), _shared(private, nonce)
    send(share + _proof(master, b"listener" + share))
    return channel, _session(master + share + secret, mode, hello, False)


def introduce(
    channel: str,
    key: bytes,
    hello: Head,
    encrypted: bool,
    send: Callable[[bytes], object],
) -> Steps[Session]:
    """Run the dialling end of a handshake, as a generator.

    The generator yields writable buffers. The caller fills each of them with the next received bytes, and then
    resumes the generator. At its end it returns the session.

    ``channel``: name of the channel at the other end; ``key``: its key; ``hello``: JSON values that tell the other
    end who connects; ``encrypted``: whether the connection is to be encrypted; ``send``: function that sends bytes.
    Raises :class:`WireForged` if the other end does not know the key.
    """
    name, words = channel.encode(), json.dumps(hello).encode()
    private = require_cipher().private_key.generate() if encrypted else None
    nonce = (
        private.public_key().public_bytes_raw()
        if private
        else secrets.token_bytes(NONCE)
    )
    yield (challenge := memoryview(bytearray(NONCE)))
    tagged = bool(challenge[-1] & 1) and _has_cipher()
    mode = _Mode.TAGGED if tagged else _Mode.HASHED
    mode = _Mode.ENCRYPTED if encrypted else mode
    fixed = _HELLO.pack(nonce, mode, len(name), len(words))
    text = fixed + name + words
    master = hmac.digest(key, bytes(challenge) + text, "sha256")
    send(text + _proof(master, b"dialler"))
    yield (answer := memoryview(bytearray(NONCE * encrypted + SEAL)))
    share, secret = bytes(answer[:-SEAL]), b""
    if not hmac.compare_digest(answer[-SEAL:], _proof(master, b"listener" + share)):
        raise WireForged("who answers does not know the channel's secret")
    if private:
        secret = _shared(private, share)
    return _session(master + share + secret, mode, hello, True)


def _proof(master: bytes, who: bytes) -> bytes:
    return hmac.digest(master, b"proof of the " + who, "sha256")[:SEAL]


def _shared(private: Any, share: bytes) -> bytes:
    """Return the shared secret of a Diffie-Hellman exchange from the own private key and the other end's
    public share.
    """
    try:
        secret: bytes = private.exchange(
            require_cipher().public_key.from_public_bytes(share)
        )
    except ValueError:  # a share that makes every secret the same
        raise WireForged("no share of a Diffie-Hellman exchange") from None
    return secret


def _session(secret: bytes, mode: _Mode, hello: Head, dials: bool) -> Session:
    up, down = (
        _Records(hmac.digest(secret, way, "sha256"), mode)
        for way in (b"from the dialler", b"from the listener")
    )
    return Session(up, down, hello) if dials else Session(down, up, hello)


# --- connections ---


class Incoming(Generic[R]):
    """Runner of a generator that reads from a non-blocking socket, such as a handshake.

    The generator yields writable buffers. It is resumed each time when the buffer that it has yielded is filled with
    received bytes. ``steps``: the generator; ``result``: what it returns at its end; ``begun``: whether any byte has
    come; ``filled``: number of buffers that have been filled.
    """

    def __init__(self, steps: Steps[R]) -> None:
        self._steps, self._left = steps, next(steps)
        self.begun = False  # something has come
        self.filled = 0  # how many pieces of memory are full
        self.result: R | None = None

    def take(self, sock: socket.socket) -> bool:
        """Read what the socket ``sock`` has received, without waiting. Returns whether ``result`` is complete.

        Raises OSError, also when the connection ends.
        """
        while True:
            while len(self._left):
                try:
                    count = sock.recv_into(self._left)
                except (BlockingIOError, InterruptedError):
                    return False
                if not count:
                    raise WireBroken(ENDED)
                self.begun = True
                self._left = self._left[count:]
            self.filled += 1
            try:
                self._left = next(self._steps)
            except StopIteration as over:
                self.result = over.value
                return True


class SealedConnection:
    """Connection whose handshake is over. Its calls to send and receive block until a whole frame is transferred.

    One thread may send while another thread receives.

    ``sock``: socket in non-blocking mode, so that the methods can bound their waits; ``session``: keys of the
    connection; ``stall``: seconds that each record (at most a MiB) of a frame may take once the frame has begun.
    """

    def __init__(
        self, sock: socket.socket, session: Session, stall: float = STALL_S
    ) -> None:
        self.socket, self.session, self.stall = sock, session, stall

    @property
    def hello(self) -> Head:
        return self.session.hello

    def send(self, head: Head, payload: Sequence[memoryview] = ()) -> int:
        """Send a frame (a head in JSON and a raw payload), and return the number of bytes sent.

        ``head``: JSON values by name; ``payload``: raw bytes, one view after another. Raises OSError
        (:class:`WireBroken` is a subclass).
        """
        count = 0
        for buffer in self.session.encode(head, payload):
            send_all(self.socket, buffer, self.stall)
            count += len(buffer)
        return count

    def receive(self, place: Place | None = None, limit: float = math.inf) -> Frame:
        """Wait for the next frame and return it.

        ``place(head, size)``: returns the buffer for the frame's payload of ``size`` bytes, by default a new buffer.
        ``limit``: seconds to wait until the frame begins. Raises TimeoutError after that, and OSError if the connection
        is broken.
        """
        return read_steps(self.socket, self.session.decode(place), limit, self.stall)

    def poll(self, limit: float = 0.0) -> bool:
        """Wait for at most ``limit`` seconds; return whether a frame has begun, or the connection has ended."""
        return await_ready(self.socket, limit)

    def drain(self, limit: float) -> None:
        """Read and discard bytes until the other end closes the connection, for at most ``limit`` seconds.

        Call it before closing: if this end closed at once, the system might discard data that the other end has not
        read yet. No frame can be received afterwards.
        """
        deadline, waste = time.monotonic() + limit, memoryview(bytearray(1 << 16))
        with suppress(OSError):
            while (left := deadline - time.monotonic()) > 0:
                if self.poll(left) and not self.socket.recv_into(waste):
                    return

    def close(self) -> None:
        """End the connection. Calls that wait for it in other threads raise."""
        end_connection(self.socket)


def await_ready(sock: socket.socket, limit: float, writing: bool = False) -> bool:
    """Wait until the socket ``sock`` is readable or has ended. Returns whether it is, False after ``limit`` seconds.

    ``writing``: wait until the socket is writable instead.
    """
    waiting = select.poll()
    try:
        waiting.register(sock, select.POLLOUT if writing else select.POLLIN)
    except ValueError as error:  # it was closed by another thread
        raise WireBroken(ENDED) from error
    # the system counts milliseconds in 32 bits
    return bool(waiting.poll(min(max(0.0, limit), 1e6) * 1000))


def send_all(sock: socket.socket, buffer: Buffer, stall: float) -> None:
    """Send all bytes of ``buffer`` on the non-blocking socket ``sock``.

    Raises :class:`WireBroken` if that takes more than ``stall`` seconds.
    """
    rest, deadline = memoryview(buffer), time.monotonic() + stall
    while len(rest):
        try:
            rest = rest[sock.send(rest) :]
        except (BlockingIOError, InterruptedError):
            left = deadline - time.monotonic()
            if left <= 0 or not await_ready(sock, left, writing=True):
                raise WireBroken(f"it has taken nothing for {stall:g} s") from None


def read_steps(sock: socket.socket, steps: Steps[R], limit: float, stall: float) -> R:
    """Run a generator that reads from a socket, such as a handshake, and return its result.

    The generator yields writable buffers. It is resumed each time when its buffer is filled with received bytes.
    ``sock``: non-blocking socket; ``steps``: the generator; ``limit``: seconds to wait for the first byte; ``stall``:
    seconds that it may take to fill each further buffer. Raises TimeoutError after ``limit``, and :class:`WireBroken`
    after ``stall``.
    """
    incoming, begun, filled = Incoming(steps), False, 0
    deadline = time.monotonic() + limit
    while not incoming.take(sock):
        if (incoming.begun, incoming.filled) != (begun, filled):
            begun, filled = incoming.begun, incoming.filled
            deadline = time.monotonic() + stall
        left = deadline - time.monotonic()
        if left <= 0 or not await_ready(sock, left):
            if time.monotonic() < deadline:
                continue
            if not begun:
                raise TimeoutError(f"nothing has come for {limit:g} s")
            raise WireBroken(f"it has stalled for {stall:g} s in a message")
    assert incoming.result is not None
    return incoming.result
