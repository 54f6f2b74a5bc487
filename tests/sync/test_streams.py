"""Streams between islands, and sums over them: every element once, bytes by formula, nothing forged, nobody hung."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.net.endpoint import Endpoint
from weft.net.wire import Encryption
from weft.sync.collectives import compressed_mean, from_islands, power_mean, ring_sum
from weft.sync.compress import build_compressor, encode_with_feedback
from weft.sync.streams import IslandLost, Streams, streams_by_store


@contextmanager
def islands(
    count: int, limit: float = 20, encrypt: Encryption = "auto"
) -> Iterator[list[Streams]]:
    """The streams of so many islands of one rank, all in this process."""
    store = dist.HashStore()
    with ExitStack() as stack:
        found = []
        for i in range(count):
            endpoint = Endpoint("127.0.0.1", 0, encrypt)
            stack.callback(endpoint.close)
            found.append(streams_by_store(i, count, 0, store, endpoint, limit))
            stack.callback(found[-1].close, flush=False)
        yield found


def test_an_address_is_said_when_the_channel_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who dials earlier is turned away, and takes the island for lost."""
    store, plain = dist.HashStore(), Endpoint.open

    def unsaid(endpoint: Endpoint, *given: Any) -> Any:
        assert not store.check(["weft/streams/0/0"])
        return plain(endpoint, *given)

    monkeypatch.setattr(Endpoint, "open", unsaid)
    endpoint = Endpoint("127.0.0.1", 0)
    streams = streams_by_store(0, 2, 0, store, endpoint, 20)
    assert store.check(["weft/streams/0/0"])
    streams.close()
    endpoint.close()


def on_all(found: list[Streams], work: Callable[[Streams], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(found)) as pool:
        return list(pool.map(work, found))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(0, 60),
    st.integers(1, 70),
    st.randoms(use_true_random=False),
)
def test_every_element_is_added_exactly_once_per_island(
    count: int, size: int, piece: int, random: Any
) -> None:
    order = random.sample(range(count), count)
    with islands(count) as found:
        sums = on_all(
            found,
            lambda s: ring_sum(
                s, torch.full((size,), 10.0**s.island), order, "x", piece
            ),
        )
        for streams in found:
            streams.flush()
        assert all(
            torch.equal(one, torch.full((size,), sum(10.0**i for i in range(count))))
            for one in sums
        )
        if count > 1:
            assert sum(s.sent for s in found) == 2 * (count - 1) * size * 4
            assert {s.sent for s in found} <= set(
                range(8 * (count - 1) * size // count + 1 + 8 * count)
            )


def test_what_is_encrypted_adds_up_in_as_many_bytes() -> None:
    pytest.importorskip("cryptography")
    values = torch.arange(600_000).float()

    def work(streams: Streams) -> tuple[torch.Tensor, int]:
        total = ring_sum(streams, values * (1 + streams.island), [0, 1, 2], "x", 9999)
        streams.flush()
        return total, streams.sent

    found = []
    for how in ("never", "always"):
        with islands(3, encrypt=how) as every:
            found.append(on_all(every, work))
    for plain, encrypted in zip(*found, strict=True):
        assert torch.equal(plain[0], encrypted[0]) and plain[1] == encrypted[1]
        assert torch.equal(plain[0], values * 6)


def test_what_is_not_sealed_names_its_sender_and_strangers_are_not_heard() -> None:
    with islands(3) as (first, second, third):
        address = first.address_of(0)
        assert address
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 9)
            third.send(0, "x", torch.tensor([3.0]))
            assert first.receive(2, "x", torch.float32).tolist() == [3.0]
        # An island that has shown that it is one, and whose message is changed on the way.
        connection = second._dial(0, 0)
        head, _, seal = connection.session.encode({"tag": "x"}, [memoryview(b"abcd")])
        connection.socket.sendall(b"".join([head, b"abce", seal]))
        with pytest.raises(
            IslandLost,
            match=r"island 1 has sent a message that is not what was sealed .*'x'",
        ):
            first.receive(1, "x", torch.float32)
        third.send(0, "y", torch.tensor([4.0]))
        assert first.receive(2, "y", torch.float32).tolist() == [4.0]


def test_an_island_that_is_late_or_gone_is_named() -> None:
    late = pytest.raises(
        IslandLost,
        match=r"island 1 has not answered for 0.3 s: island 0 waits for its 'x'",
    )
    with islands(3, limit=0.3) as (first, *_), late:
        first.receive(1, "x", torch.float32)
    with islands(3) as (first, second, third):
        second.send(0, "x", torch.tensor([1.0]))
        second.close()
        # what it said before counts
        assert first.receive(1, "x", torch.float32).tolist() == [1.0]
        with pytest.raises(IslandLost, match="island 1 is gone"):
            first.receive(1, "x", torch.float32)
        assert on_all(
            [first, third],
            lambda s: from_islands(s, torch.tensor([s.island]), (0, 2), "y"),
        )[0] == [0, 2]


ROUNDS, SIZE = 5, 700


@pytest.mark.parametrize(
    "word", ["int8", "int4", "int4:random", "topk:0.1", "randk:0.5", "sign", "cocktail"]
)
def test_compressed_exchanges_are_what_one_process_computes(word: str) -> None:
    """With what each message leaves out in the next one, on both ways; equal bits everywhere, bytes by formula."""
    count, compressor, feeds = (
        3,
        build_compressor(word),
        not build_compressor(word).unbiased,
    )
    torch.manual_seed(1)
    sent = torch.randn(ROUNDS, count, SIZE, dtype=torch.float64)
    cuts = [slice(0, 128), slice(128, 384), slice(384, SIZE)]  # at whole blocks

    def island(streams: Streams) -> list[torch.Tensor]:
        up, down = (
            torch.zeros(SIZE, dtype=torch.float64) if feeds else None for _ in range(2)
        )
        return [
            compressed_mean(
                streams,
                sent[k, streams.island],
                compressor,
                compressor,
                f"{k}",
                k,
                up,
                down,
            )
            for k in range(ROUNDS)
        ]

    with islands(count) as found:
        answers = on_all(found, island)
        chunk = [compressor.nbytes((c.stop - c.start,), torch.float64) for c in cuts]
        assert [s.sent for s in found] == [
            ROUNDS * (sum(chunk) - own + 2 * own) for own in chunk
        ]
    ups, downs = torch.zeros(count, SIZE).double(), torch.zeros(SIZE).double()
    for k in range(ROUNDS):
        for owner, cut in enumerate(cuts):
            heard = []
            for i in range(count):
                seed = k * 1009 + i if compressor.unbiased else k
                payload, left = encode_with_feedback(
                    compressor, sent[k, i, cut], seed, ups[i, cut] if feeds else None
                )
                ups[i, cut] = 0 if left is None else left
                heard.append(
                    compressor.decode(payload, sent[k, i, cut].shape, seed).double()
                )
            mean, seed = (
                sum(heard) / count,
                k * 1009 + owner if compressor.unbiased else k,
            )
            payload, left = encode_with_feedback(
                compressor, mean, seed, downs[cut] if feeds else None
            )
            downs[cut] = 0 if left is None else left
            wanted = compressor.decode(payload, mean.shape, seed).double()
            for mine in answers:
                torch.testing.assert_close(mine[k][cut], wanted, rtol=1e-12, atol=1e-12)
    assert all(
        torch.equal(torch.stack(one), torch.stack(answers[0])) for one in answers
    )


def test_powersgd_of_islands_is_that_of_their_mean() -> None:
    """A matrix of full rank takes a few rounds; one of rank 2 is there at once."""
    compressor = build_compressor("powersgd:2")
    torch.manual_seed(1)
    matrices = torch.randn(2, 9, 2).double() @ torch.randn(2, 12).double()

    def island(streams: Streams) -> torch.Tensor:
        up = torch.zeros(9, 12).double()
        payload = power_mean(
            streams, matrices[streams.island], compressor, "x", 0, up, None
        )
        assert streams.sent == (9 + 12) * 2 * 8
        return compressor.decode(payload, (9, 12), 0)

    with islands(2) as found:
        for answer in on_all(found, island):
            torch.testing.assert_close(answer, matrices.mean(0))
