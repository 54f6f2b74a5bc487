"""The handshake and the frames of connections: whatever an attacker does to the bytes, nothing of it is accepted."""

from __future__ import annotations

import hmac
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import pytest

from weft.net import wire
from weft.net.wire import (
    Frame,
    SealedConnection,
    Session,
    Steps,
    WireBroken,
    WireForged,
    encrypts,
    greet,
    introduce,
    key_of,
)

KEY, CASES = key_of("the run's secret"), 1000


def drive(steps: Steps[Any], data: bytearray) -> Any:
    """What ``steps`` reads from ``data``; None if it waits for more."""
    view = next(steps)
    while len(data) >= len(view):
        view[:], data[:] = data[: len(view)], data[len(view) :]
        try:
            view = next(steps)
        except StopIteration as over:
            return over.value
    return None


class Handshake(NamedTuple):
    """What was said in a handshake by either end, and what came of it."""

    challenge: bytes
    hello: bytes
    answer: bytes
    dialler: Session | None
    listener: Session | None


Change = Callable[[bytes], bytes]


def shake(
    encrypted: bool,
    on_challenge: Change = bytes,
    on_hello: Change = bytes,
    on_answer: Change = bytes,
    key: bytes = KEY,
    channel: str = "copies",
    demands: bool = False,
) -> Handshake:
    """A handshake whose messages are changed on the way. Raises what an end raises of it."""
    to_listener, to_dialler = bytearray(), bytearray()
    listening = greet(
        lambda name: KEY if name == "copies" else None,
        lambda encrypted: encrypted or not demands,
        to_dialler.extend,
    )
    dialling = introduce(channel, key, {"rank": 3}, encrypted, to_listener.extend)
    first, view = next(listening), next(dialling)
    challenge = bytes(to_dialler)
    view[:] = on_challenge(challenge)
    view = next(dialling)
    hello = on_hello(bytes(to_listener))
    to_dialler.clear()
    met = drive(_after(first, listening), bytearray(hello))
    if met is None:
        return Handshake(challenge, hello, b"", None, None)
    answer = bytes(to_dialler)
    view[:] = on_answer(answer)
    try:
        next(dialling)
    except StopIteration as over:
        assert met[1].hello == {"rank": 3}
        return Handshake(challenge, hello, answer, over.value, met[1])
    raise AssertionError("the dialler waits for more")


def _after(first: memoryview, steps: Steps[Any]) -> Steps[Any]:
    yield first
    return (yield from steps)


def flipped(data: bytes, rng: random.Random) -> bytes:
    at, bit = rng.randrange(len(data)), 1 << rng.randrange(8)
    return data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def break_in(kind: str, encrypted: bool, rng: random.Random) -> None:
    """Try to become, or to pretend to be, an end of a channel."""
    before = shake(encrypted)
    tries: dict[str, dict[str, Any]] = {
        "stranger": {"key": key_of(rng.randbytes(16).hex())},
        "other channel": {"channel": "other"},
        "noise": {"on_hello": lambda hello: rng.randbytes(rng.randrange(200, 400))},
        "replay of a hello": {"on_hello": lambda hello: before.hello},
        "replay of an answer": {"on_answer": lambda answer: before.answer},
        "changed challenge": {"on_challenge": lambda text: flipped(text, rng)},
        "changed hello": {"on_hello": lambda hello: flipped(hello, rng)},
        "changed answer": {"on_answer": lambda answer: flipped(answer, rng)},
        "short hello": {"on_hello": lambda hello: cut(hello, rng)},
        "plain": {"demands": True},
    }
    try:
        shaken = shake(encrypted and kind != "plain", **tries[kind])
    except WireForged:
        return
    assert shaken.listener is None, f"{kind} was let in"


def tamper(kind: str, encrypted: bool, rng: random.Random) -> None:
    """Change a connection's bytes on the way: only what was sent before that is accepted."""
    shaken = shake(encrypted)
    assert shaken.dialler and shaken.listener
    sent, records = [], []
    for number in range(rng.randint(3, 5)):
        payload = rng.randbytes(rng.choice([0, 1, 40, 3000]))
        head = {"number": number, "text": "x" * rng.randrange(40)}
        sent.append((head, payload))
        parts = shaken.dialler.encode(head, [memoryview(payload)])
        records.append(b"".join(parts))
    at = rng.randrange(len(records) - 1)
    match kind:
        case "changed":
            records[at] = flipped(records[at], rng)
        case "left out":
            del records[at]
        case "repeated":
            records.insert(at := at + 1, records[at - 1])
        case "reordered":
            records[at], records[at + 1] = records[at + 1], records[at]
        case "truncated":
            records[at:] = [cut(records[at], rng)]
        case "oversize":
            size = rng.choice([wire.LONGEST + 1, 1 << 63, wire.LONGEST, 1 << 30])
            records[at] = records[at][:4] + size.to_bytes(8) + records[at][12:]
        case "long head":
            length = rng.choice([wire.LONGEST_HEAD + 1, 2**32 - 1])
            records[at] = length.to_bytes(4) + records[at][4:]
        case "of another connection":
            other = shake(encrypted)
            assert other.dialler
            made = list(other.dialler.encode(*sent[at][:1], [memoryview(sent[at][1])]))
            records[at] = b"".join(made)
        case "sent back":
            made = list(shaken.listener.encode({"number": at}))
            records[at] = b"".join(made)
        case "forged":
            text = b'{"number":0}'
            records[at] = wire._FRAME.pack(len(text), 0) + text + rng.randbytes(16)
    stream, accepted = bytearray(b"".join(records)), list[Frame]()
    # whoever changes a length makes the reader wait, which has a limit
    with suppress(WireForged):
        while frame := drive(shaken.listener.decode(), stream):
            accepted.append(frame)
        assert kind in ("changed", "truncated"), "it was not found"
    assert [(head, bytes(payload)) for head, payload in accepted] == sent[:at]


ATTACKS = [
    *((break_in, kind) for kind in (
        "stranger", "other channel", "noise", "replay of a hello", "replay of an answer", "changed challenge",
        "changed hello", "changed answer", "short hello", "plain",
    )),
    *((tamper, kind) for kind in (
        "changed", "left out", "repeated", "reordered", "truncated", "oversize", "long head",
        "of another connection", "sent back", "forged",
    )),
]  # fmt: skip


@pytest.mark.parametrize("how", ["hashed", "tagged", "encrypted"])
def test_nothing_is_accepted_that_was_not_sent(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encrypted = how == "encrypted"
    if how == "hashed":
        monkeypatch.setattr(wire, "_has_cipher", lambda: False)
    else:
        pytest.importorskip("cryptography")
    for seed in range(CASES // 2):
        attack, kind = ATTACKS[seed % len(ATTACKS)]
        try:
            attack(kind, encrypted, random.Random(f"{seed} {how}"))
        except BaseException as error:
            error.add_note(f"case {seed}, {kind}, {how}")
            raise


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("size", [0, 1, 5_000, 2_500_000])
def test_payloads_come_as_they_were_sent(encrypted: bool, size: int) -> None:
    """Of several views, beyond a record, into memory that the receiver chooses; nobody reads them if encrypted."""
    if encrypted:
        pytest.importorskip("cryptography")
    shaken = shake(encrypted)
    assert shaken.dialler and shaken.listener
    data = memoryview(random.Random(size).randbytes(size))
    views = [data[: size // 3], data[size // 3 :], data[:0]]
    stream = bytearray(b"".join(shaken.dialler.encode({"secret": "words"}, views)))
    assert (b"words" in stream) == (not encrypted)
    memory = memoryview(bytearray(size + 9))
    steps = shaken.listener.decode(lambda head, count: memory[:count])
    frame = drive(steps, stream)
    assert frame.head == {"secret": "words"} and not stream
    assert memory[:size] == data and not any(memory[size:])


def connection() -> tuple[SealedConnection, SealedConnection]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    shaken = shake(False)
    assert shaken.dialler and shaken.listener
    stall = 0.2
    return (
        SealedConnection(ends[0], shaken.dialler, stall),
        SealedConnection(ends[1], shaken.listener, stall),
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["never", "in a head", "in a payload", "drop by drop"])
def test_a_slow_sender_is_given_up(how: str) -> None:
    sender, receiver = connection()
    whole = b"".join(sender.session.encode({"n": 1}, [memoryview(bytes(1000))]))
    sent = {"never": b"", "in a head": whole[:14], "in a payload": whole[:500]}
    dripping = threading.Event()

    def drip() -> None:
        for byte in whole[:100]:
            if dripping.wait(0.03):
                return
            sender.socket.send(bytes([byte]))

    thread = threading.Thread(target=drip)
    begun = time.monotonic()
    if how in sent:
        sender.socket.send(sent[how])
    else:
        thread.start()
    error, words = (
        (TimeoutError, "nothing has come for 0.2 s")
        if how == "never"
        else (WireBroken, "stalled for 0.2 s")
    )
    with pytest.raises(error, match=words):
        receiver.receive(limit=0.2)
    assert time.monotonic() - begun < 20
    dripping.set()
    if thread.ident:
        thread.join()
    # a frame that does not come in time may come later, as nothing of it was read
    if how == "never":
        sender.socket.send(whole)
        assert receiver.receive(limit=20).head == {"n": 1}
    sender.close()
    with pytest.raises(WireBroken, match="has ended"):
        receiver.receive()
    receiver.close()


def test_who_takes_nothing_is_given_up() -> None:
    sender, receiver = connection()
    with pytest.raises(WireBroken, match=r"has taken nothing for 0.2 s"):
        sender.send({}, [memoryview(bytes(64 << 20))])
    sender.close()
    receiver.close()


def test_what_a_member_says_wrongly_is_refused() -> None:
    for text in (b"[1, 2]", b"{", b"[" * 5000, b"\xff"):
        shaken = shake(False)
        assert shaken.dialler and shaken.listener
        fixed = wire._FRAME.pack(len(text), 0)
        record = shaken.dialler.outgoing.seal([text], fixed)
        with pytest.raises(WireBroken, match="no head in JSON"):
            drive(shaken.listener.decode(), bytearray(b"".join([fixed, *record])))
    shaken = shake(False)
    assert shaken.dialler and shaken.listener
    stream = bytearray(b"".join(shaken.dialler.encode({}, [memoryview(b"abc")])))
    with pytest.raises(WireBroken, match="another size than there is room for"):
        drive(shaken.listener.decode(lambda *_: memoryview(bytearray(2))), stream)


@pytest.mark.parametrize(
    ("host", "own", "encrypted"),
    [
        ("127.0.0.1", "127.0.0.1", False),
        ("::1", "127.0.0.1", False),
        ("10.1.2.3", "10.1.2.4", False),
        ("192.168.0.9", "8.8.4.4", False),
        ("fe80::1%eth0", "fe80::2", False),
        ("fd00::1", "fd00::2", False),
        ("100.64.0.1", "100.64.0.2", False),  # of a private overlay
        ("8.8.8.8", "10.1.2.3", True),
        ("8.8.8.8", "8.8.8.8", False),  # this machine
        ("::ffff:8.8.8.8", "10.1.2.3", True),
        ("::ffff:10.0.0.1", "10.1.2.3", False),
        ("2001:4860:4860::8888", "fd00::1", True),
        ("node.example.com", "10.1.2.3", True),
        ("localhost", "127.0.0.1", False),
    ],
)
def test_what_leaves_the_private_network_is_encrypted(
    host: str, own: str, encrypted: bool
) -> None:
    assert encrypts("auto", host, own) == encrypted
    assert encrypts("always", host, own) and not encrypts("never", host, own)


def test_a_secret_of_the_user_keeps_out_who_overheard_that_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = [key_of("the run's secret")]
    for given in ("a", "b", "a"):
        monkeypatch.setenv("WEFT_SECRET", given)
        keys.append(key_of("the run's secret"))
    assert len(set(keys)) == 3 and keys[1] == keys[3]


def test_a_share_that_fixes_the_secret_is_refused() -> None:
    """Zeros as a public share would make every secret zero; only who knows the channel's key can send them."""
    pytest.importorskip("cryptography")
    sent, words = bytearray(), b"{}"
    listening = greet(lambda name: KEY, lambda encrypted: True, sent.extend)
    view = next(listening)
    fixed = wire._HELLO.pack(bytes(32), 1, 1, len(words))
    master = hmac.digest(KEY, bytes(sent) + fixed + b"x" + words, "sha256")
    hello = fixed + b"x" + words + wire._proof(master, b"dialler")
    with pytest.raises(WireForged, match="Diffie-Hellman"):
        drive(_after(view, listening), bytearray(hello))
