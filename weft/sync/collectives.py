"""Sums and means over islands by messages over streams. All participating islands get bitwise equal results."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod

import torch

from weft.sync.compress import encode_with_feedback
from weft.sync.compressor import BLOCK, Compressor, Payload, Spec
from weft.sync.streams import IslandLost, Streams

T = torch.Tensor

#: Elements of a message, at most: while one is added, the next is on its way.
PIECE = 1 << 18


def chunk_ranges(size: int, count: int, block: int = 1) -> list[tuple[int, int]]:
    """Divide ``size`` elements into ``count`` consecutive ranges (start, stop) of similar size; some may be empty.

    With ``block`` 1 sizes differ by one at most. Otherwise every range begins at a multiple of ``block``, and the last
    one also has the elements after the last whole block.
    """
    cuts = [size * i // count // block * block for i in range(count)] + [size]
    return list(pairwise(cuts))


def message_slices(chunk: tuple[int, int], piece: int) -> Iterator[slice]:
    """Yield the slices of ``chunk``, a range (start, stop), each to be sent as a message of ``piece`` elements.

    The last slice may be shorter.
    """
    for first in range(*chunk, piece):
        yield slice(first, min(first + piece, chunk[1]))


def ring_sum(
    streams: Streams, flat: T, order: Sequence[int], tag: str, piece: int = PIECE
) -> T:
    """Sum ``flat`` over all islands in place by a ring all-reduce, and return it.

    ``streams``: connections to the other islands; ``order``: the islands in the order of the ring; ``tag``: the
    beginning of the messages' tags; ``piece``: elements per message.

    ``flat`` is divided into one chunk per island. First every chunk goes around the ring and is summed on the way, then
    its sum goes around. So each of the n islands sends 2 (n - 1) / n of the elements to its successor. Messages are
    passed on as they arrive.
    """
    count, me = len(order), list(order).index(streams.island)
    if count == 1:
        return flat
    after, before = order[(me + 1) % count], order[me - 1]
    parts = chunk_ranges(flat.numel(), count)
    for part in message_slices(parts[me], piece):
        streams.send(after, f"{tag}/0", flat[part])
    for turn in range(2 * count - 2):
        for part in message_slices(parts[(me - turn - 1) % count], piece):
            came = streams.receive(before, f"{tag}/{turn}", flat.dtype)
            if turn < count - 1:
                flat[part] += came
            else:
                flat[part] = came
            if turn < 2 * count - 3:
                streams.send(after, f"{tag}/{turn + 1}", flat[part])
    streams.flush()
    return flat


def from_islands(
    streams: Streams, own: T, islands: Sequence[int], tag: str, control: bool = False
) -> list[T]:
    """All-gather a small tensor: return the tensors that ``islands`` pass as ``own``, in the order of ``islands``.

    ``tag``: the tag of the messages; ``control``: count their bytes as control messages, not as tensors.
    ``streams``: connections to the other islands.
    """
    for island in islands:
        if island != streams.island:
            streams.send(island, tag, own, control)
    streams.flush()
    return [
        own if i == streams.island else streams.receive(i, tag, own.dtype)
        for i in islands
    ]


def all_texts(streams: Streams, own: str, tag: str) -> list[str]:
    """Return the short texts that all islands pass as ``own``, in the order of islands. ``tag``: the tag of the
    messages. ``streams``: connections to the other islands.
    """
    values = torch.tensor(list(own.encode()), dtype=torch.uint8)
    every = from_islands(streams, values, range(streams.islands), tag, control=True)
    return [bytes(text.tolist()).decode() for text in every]


def compressed_mean(
    streams: Streams, flat: T, there: Compressor, back: Compressor, tag: str, number: int,
    up: T | None = None, down: T | None = None, members: Sequence[int] = (),
) -> T:  # fmt: skip
    """Return the mean of ``flat`` over ``members`` (default: all islands), with messages compressed in both
    directions.

    Each island is responsible for one chunk of the tensor. It receives this chunk from all islands, compressed by
    ``there``, and computes the chunk's mean. Then it sends the mean to all islands, compressed by ``back``. So each
    of n islands sends 2 (n - 1) / n of the compressed tensor, as in a ring, and nothing is compressed more than
    twice. ``tag``: the beginning of the messages' tags; ``number``: the number of the exchange, from which random
    seeds follow.

    ``up`` and ``down``: residuals, that is, what compression by ``there`` and by ``back`` has lost in earlier
    exchanges. Each is added to the tensor before compression, and then updated in place. Only this island's chunk of
    ``down`` is used. None: nothing is added, as is right for unbiased compressors. ``streams``: connections to the
    other islands.
    """
    me, every = streams.island, members or range(streams.islands)
    parts = dict(
        zip(
            every,
            (slice(lo, hi) for lo, hi in chunk_ranges(flat.numel(), len(every), BLOCK)),
            strict=True,
        )
    )
    kept: dict[int, T] = {}  # what is sent must stay until it has been
    for i in every:
        payload = fed_back(
            there.cut(parts[i]), flat, up, parts[i], seed_of(there, number, me)
        )
        kept[i] = join_bytes(payload)
        if i != me:
            streams.send(i, f"{tag}/there", kept[i])
    shape, own_there, own_back = (
        (parts[me].stop - parts[me].start,),
        there.cut(parts[me]),
        back.cut(parts[me]),
    )
    mean = flat.new_zeros(shape)
    for i in every:
        came = kept[me] if i == me else streams.receive(i, f"{tag}/there", torch.uint8)
        mean += decode_payload(
            own_there, came, shape, seed_of(there, number, i), i, flat.dtype
        )
    mean /= len(every)
    own = down[parts[me]] if down is not None else None
    sent = join_bytes(
        fed_back(own_back, mean, own, slice(None), seed_of(back, number, me))
    )
    answer = torch.empty_like(flat)
    for i in every:
        if i != me:
            streams.send(i, f"{tag}/back", sent)
    for i in every:
        came = sent if i == me else streams.receive(i, f"{tag}/back", torch.uint8)
        shape = (parts[i].stop - parts[i].start,)
        answer[parts[i]] = decode_payload(
            back.cut(parts[i]), came, shape, seed_of(back, number, i), i, flat.dtype
        )
    streams.flush()
    return answer


def fed_back(
    compressor: Compressor, x: T, error: T | None, part: slice, seed: int
) -> Payload:
    """Compress ``x[part]`` plus the residual ``error[part]``, and set this residual to what the compression has lost.

    The sum is compressed by :attr:`Compressor.for_feedback`, the form of the compressor whose error is always smaller
    than its input. If ``error`` is None, ``x[part]`` alone is compressed, by the compressor itself. ``seed``: the seed
    of the compressor's random choices. Returns the payload.
    """
    if error is None or not x[part].numel():
        return encode_with_feedback(compressor, x[part], seed)[0]
    payload, left = encode_with_feedback(
        compressor.for_feedback, x[part], seed, error[part]
    )
    assert left is not None  # as an error was given
    error[part] = left
    return payload


def seed_of(compressor: Compressor, number: int, island: int) -> int:
    """Return the seed of the random choices of ``compressor`` for ``island`` in the exchange with the index ``number``.

    Islands have different seeds if the compressor's errors are random, so that errors of different islands cancel.
    """
    return number * 1009 + island if compressor.unbiased else number


def decode_payload(
    compressor: Compressor,
    came: T,
    shape: Sequence[int],
    seed: int,
    island: int,
    dtype: torch.dtype,
) -> T:
    """Decompress the received bytes ``came``, which ``island`` has sent for a tensor of this ``shape`` and ``dtype``.

    ``compressor``: the compressor that the island used. ``seed``: the seed of the random choices with which it
    compressed the tensor. Raises :class:`IslandLost` if the number of bytes does not fit the shape.
    """
    specs = compressor.specs(shape, dtype)
    if came.numel() != (size := compressor.nbytes(shape, dtype)):
        raise IslandLost(
            f"island {island} has sent {came.numel()} bytes in the place of {size}; are the recipes the same?"
        )
    return compressor.decode(split_bytes(came, specs), shape, seed).to(dtype)


def join_bytes(payload: Payload) -> T:
    """Join the tensors of a payload (what is sent in place of a tensor) to one message of bytes, ``[bytes]``."""
    return torch.cat([tensor.flatten().view(torch.uint8) for tensor in payload])


def split_bytes(came: T, specs: Sequence[Spec]) -> Payload:
    """Split a message of :func:`join_bytes` into the payload that was joined.

    ``came``: the bytes received; ``specs``: the shape and type of each tensor in the payload.
    """
    ends = accumulate(
        (prod(shape) * dtype.itemsize for shape, dtype in specs), initial=0
    )
    return [
        # a view of another type must begin where that may
        came[lo:hi].clone().view(dtype).view(shape)
        for (shape, dtype), (lo, hi) in zip(specs, pairwise(ends), strict=True)
    ]


def power_mean(
    streams: Streams, x: T, compressor: Compressor, tag: str, number: int, up: T, warm: T | None,
    members: Sequence[int] = (),
) -> Payload:  # fmt: skip
    """Return the payload of the mean of ``x`` over ``members``, compressed by a linear compressor such as PowerSGD.

    A payload is one or more small tensors that are sent in place of ``x``. With a linear compressor the mean of the
    islands' payloads is the payload of the mean. So ring all-reduces average these small tensors. ``tag``: the
    beginning of the messages' tags; ``number``: the number of the exchange, which is also the compressor's seed;
    ``up``: the residual, which is what compression on this island has lost in earlier exchanges. It is added to
    ``x`` and updated in place. ``warm``: the tensor from which compression starts, as :meth:`Compressor.warm`
    returned it for the previous exchange; None in the first exchange. ``members``: islands that take part, by
    default all. ``streams``: connections to the other islands.
    """
    turns, every = iter(range(4)), members or range(streams.islands)

    def average(own: T) -> T:
        flat = own.flatten().clone()
        ring_sum(streams, flat, every, f"{tag}/{next(turns)}")
        return flat.div_(len(every)).view_as(own)

    payload, left = encode_with_feedback(compressor, x, number, up, warm, average)
    assert left is not None
    up.copy_(left)
    return payload
