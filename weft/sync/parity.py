"""Parity of shared state: islands compare hashes, and an island that differs takes the majority's state.

As in PCCL (Keiblinger et al. 2025), whose peers compare hashes of a shared state. A bit that flips in one island's
momentum, or an answer that was applied twice, would otherwise pull that island away from the others for good.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from weft.sync.collectives import from_islands
from weft.sync.streams import Streams

T = torch.Tensor


def hash_tensors(tensors: Iterable[T]) -> T:
    """Return one hash of the bits of all of ``tensors``, which are on the CPU: 16 bytes, uint8 ``[16]``."""
    hasher = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        hasher.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return torch.frombuffer(bytearray(hasher.digest()), dtype=torch.uint8)


def take_majority(
    streams: Streams, own: Mapping[str, T], members: Sequence[int], tag: str
) -> tuple[Mapping[str, T], list[int]]:
    """Return the version of a set of tensors that most islands hold, and the islands whose version differed.

    ``own``: this island's version, by the name of the tensor; ``members``: the islands that compare; ``tag``: the
    beginning of the messages' tags. In a tie the version of the member that comes first in ``members`` counts.
    ``streams``: connections to the other islands.
    """
    hashes = from_islands(
        streams, hash_tensors(own.values()), members, f"{tag}/hash", control=True
    )
    words = [bytes(value.numpy()) for value in hashes]
    right = max(words, key=lambda word: (words.count(word), -words.index(word)))
    odd = [island for island, word in zip(members, words, strict=True) if word != right]
    giver = members[words.index(right)]
    if streams.island in odd:
        return {
            name: streams.receive(giver, f"{tag}/{name}", x.dtype)
            for name, x in own.items()
        }, odd
    if streams.island == giver:
        for island in odd:
            for name, x in own.items():
                streams.send(island, f"{tag}/{name}", x)
        streams.flush()
    return own, odd
