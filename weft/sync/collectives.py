"""Sums over islands, made of messages between them. All islands that take part have the same bits afterwards."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod

import torch

from weft.sync.compress import BLOCK, Compressor, Payload, Spec, encoded
from weft.sync.streams import IslandLost, Streams

T = torch.Tensor

#: Elements of a message, at most: while one is added, the next is on its way.
PIECE = 1 << 18


def chunks(size: int, count: int, block: int = 1) -> list[tuple[int, int]]:
    """``count`` ranges that cut ``size`` elements as evenly as can be, at multiples of ``block``; some may be empty."""
    cuts = [size * i // count // block * block for i in range(count)] + [size]
    return list(pairwise(cuts))


def pieces(chunk: tuple[int, int], piece: int) -> Iterator[slice]:
    """The parts of a chunk that travel by themselves, each of ``piece`` elements but the last."""
    for first in range(*chunk, piece):
        yield slice(first, min(first + piece, chunk[1]))


def ring_sum(streams: Streams, flat: T, order: Sequence[int], tag: str, piece: int = PIECE) -> T:
    """``flat`` of every island, added up in its place. ``order``: the islands of the ring, each once.

    Every island sends 2 (n - 1) / n of the elements to the next: a chunk goes round to be added up, where that ends is
    its sum, which then goes round. Each piece is passed on as soon as it is here.
    """
    count, me = len(order), list(order).index(streams.island)
    if count == 1:
        return flat
    after, before = order[(me + 1) % count], order[me - 1]
    parts = chunks(flat.numel(), count)
    for part in pieces(parts[me], piece):
        streams.send(after, f"{tag}/0", flat[part])
    for turn in range(2 * count - 2):
        for part in pieces(parts[(me - turn - 1) % count], piece):
            came = streams.receive(before, f"{tag}/{turn}", flat.dtype)
            if turn < count - 1:
                flat[part] += came
            else:
                flat[part] = came
            if turn < 2 * count - 3:
                streams.send(after, f"{tag}/{turn + 1}", flat[part])
    streams.flush()
    return flat


def from_islands(streams: Streams, mine: T, islands: Sequence[int], tag: str, control: bool = False) -> list[T]:
    """What each of these islands gives, a few numbers, in their order."""
    for island in islands:
        if island != streams.island:
            streams.send(island, tag, mine, control)
    streams.flush()
    return [mine if i == streams.island else streams.receive(i, tag, mine.dtype) for i in islands]


def compressed_mean(
    streams: Streams, flat: T, there: Compressor, back: Compressor, tag: str, number: int,
    up: T | None = None, down: T | None = None, members: Sequence[int] = (),
) -> T:  # fmt: skip
    """The mean over all islands, or ``members``, of ``flat``, by messages that are compressed on both ways.

    Every island makes the mean of one chunk of what is sent ``there`` to it, and sends that ``back`` to all. So each
    sends 2 (n - 1) / n of the payload of the whole, as in a ring, and nothing is compressed more than twice. ``up`` and
    ``down`` are what earlier exchanges have left out on the two ways, fed back and changed in place (of ``down`` this
    island's chunk); None: the compressor is unbiased. ``number`` of the exchange is the seed.
    """
    me, every = streams.island, members or range(streams.islands)
    parts = dict(zip(every, (slice(lo, hi) for lo, hi in chunks(flat.numel(), len(every), BLOCK)), strict=True))
    kept: dict[int, T] = {}  # what is sent must stay until it has been
    for i in every:
        payload = fed_back(there, flat, up, parts[i], seed_of(there, number, me))
        kept[i] = join_bytes(payload)
        if i != me:
            streams.send(i, f"{tag}/there", kept[i])
    shape = (parts[me].stop - parts[me].start,)
    mean = flat.new_zeros(shape)
    for i in every:
        came = kept[me] if i == me else streams.receive(i, f"{tag}/there", torch.uint8)
        mean += decoded(there, came, shape, seed_of(there, number, i), i, flat.dtype)
    mean /= len(every)
    own = down[parts[me]] if down is not None else None
    sent = join_bytes(fed_back(back, mean, own, slice(None), seed_of(back, number, me)))
    answer = torch.empty_like(flat)
    for i in every:
        if i != me:
            streams.send(i, f"{tag}/back", sent)
    for i in every:
        came = sent if i == me else streams.receive(i, f"{tag}/back", torch.uint8)
        shape = (parts[i].stop - parts[i].start,)
        answer[parts[i]] = decoded(back, came, shape, seed_of(back, number, i), i, flat.dtype)
    streams.flush()
    return answer


def fed_back(compressor: Compressor, x: T, error: T | None, part: slice, seed: int) -> Payload:
    """The payload of a part of ``x``, with that of the ``error`` added, which becomes what it leaves out."""
    if error is None or not x[part].numel():
        return encoded(compressor, x[part], seed)[0]
    payload, left = encoded(compressor.for_feedback, x[part], seed, error[part])
    assert left is not None  # as an error was given
    error[part] = left
    return payload


def seed_of(compressor: Compressor, number: int, island: int) -> int:
    """Islands have seeds of their own where errors are random, so that these cancel."""
    return number * 1009 + island if compressor.unbiased else number


def decoded(compressor: Compressor, came: T, shape: Sequence[int], seed: int, island: int, dtype: torch.dtype) -> T:
    """What an island has sent of a tensor of this shape, of which every island knows how many bytes it takes."""
    specs = compressor.specs(shape, dtype)
    if came.numel() != (size := compressor.nbytes(shape, dtype)):
        raise IslandLost(
            f"island {island} has sent {came.numel()} bytes in the place of {size}; are the recipes the same?"
        )
    return compressor.decode(split_bytes(came, specs), shape, seed).to(dtype)


def join_bytes(payload: Payload) -> T:
    """Its tensors one behind the other, as bytes."""
    return torch.cat([tensor.flatten().view(torch.uint8) for tensor in payload])


def split_bytes(came: T, specs: Sequence[Spec]) -> Payload:
    ends = accumulate((prod(shape) * dtype.itemsize for shape, dtype in specs), initial=0)
    return [
        came[lo:hi].clone().view(dtype).view(shape)  # a view of another type must begin where that may
        for (shape, dtype), (lo, hi) in zip(specs, pairwise(ends), strict=True)
    ]


def power_mean(
    streams: Streams, x: T, compressor: Compressor, tag: str, number: int, up: T, warm: T | None,
    members: Sequence[int] = (),
) -> Payload:  # fmt: skip
    """The payload of the mean over all islands of ``x``, by a linear compressor over rings; the rest as above."""
    turns, every = iter(range(4)), members or range(streams.islands)

    def average(mine: T) -> T:
        flat = mine.flatten().clone()
        ring_sum(streams, flat, every, f"{tag}/{next(turns)}")
        return flat.div_(len(every)).view_as(mine)

    payload, left = encoded(compressor, x, number, up, warm, average)
    assert left is not None
    up.copy_(left)
    return payload
