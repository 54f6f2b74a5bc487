"""Near-duplicates by datasketch, datatrove or rensa, in a venv of their own; ``minhash.py`` starts it.

    VENV/bin/python -P bench/minhash_peer.py datasketch|datatrove|rensa TEXTS.json

All use 14 buckets of 8 hashes over 5-grams of words, and are timed from texts to the documents that are dropped,
without imports. datasketch gets xxhash, which is faster than its default. datatrove's three stages write to files, as
they always do, in a folder of shared memory.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

BUCKETS, HASHES, NGRAM = 14, 8, 5
WORD = re.compile(r"\w+")


def grams(text: str) -> list[str]:
    words = WORD.findall(text.lower())
    return [
        " ".join(words[i : i + NGRAM]) for i in range(max(len(words) - NGRAM + 1, 1))
    ]


class Groups:
    """Union-find over the indices of documents."""

    def __init__(self, count: int) -> None:
        self.parents = list(range(count))

    def root(self, index: int) -> int:
        while self.parents[index] != index:
            self.parents[index] = self.parents[self.parents[index]]
            index = self.parents[index]
        return index

    def join(self, a: int, b: int) -> None:
        a, b = self.root(a), self.root(b)
        self.parents[max(a, b)] = min(a, b)

    def dropped(self) -> list[int]:
        return [i for i, parent in enumerate(self.parents) if parent != i]


def datasketch(texts: list[str]) -> list[int]:
    import xxhash
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(num_perm=BUCKETS * HASHES, params=(BUCKETS, HASHES))
    groups = Groups(len(texts))
    for number, text in enumerate(texts):
        signature = MinHash(num_perm=BUCKETS * HASHES, hashfunc=xxhash.xxh32_intdigest)
        signature.update_batch([gram.encode() for gram in grams(text)])
        for other in index.query(signature):
            groups.join(number, other)
        index.insert(number, signature)
    return groups.dropped()


def rensa(texts: list[str]) -> list[int]:
    from rensa import RMinHash, RMinHashLSH

    index = RMinHashLSH(threshold=0.72, num_perm=BUCKETS * HASHES, num_bands=BUCKETS)
    groups = Groups(len(texts))
    for number, text in enumerate(texts):
        signature = RMinHash(num_perm=BUCKETS * HASHES, seed=1)
        signature.update(grams(text))
        for other in index.query(signature):
            groups.join(number, other)
        index.insert(number, signature)
    return groups.dropped()


def datatrove(texts: list[str]) -> list[int]:
    from datatrove.data import Document
    from datatrove.pipeline.dedup.minhash import (
        MinhashConfig,
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupSignature,
    )

    def documents() -> Iterator[Document]:
        for number, text in enumerate(texts):
            yield Document(text, id=str(number))

    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        config = MinhashConfig(
            n_grams=NGRAM, num_buckets=BUCKETS, hashes_per_bucket=HASHES
        )
        MinhashDedupSignature(f"{folder}/signatures", config).run(documents(), 0, 1)
        for bucket in range(BUCKETS):
            step = MinhashDedupBuckets(
                f"{folder}/signatures", f"{folder}/buckets", config=config
            )
            step.run(None, bucket, BUCKETS)
        MinhashDedupCluster(f"{folder}/buckets", f"{folder}/removed", config).run(
            None, 0, 1
        )
        removed = list(Path(f"{folder}/removed").rglob("*.remove"))
        data = b"".join(file.read_bytes() for file in removed)
    return [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]


PEERS: dict[str, Callable[[list[str]], list[int]]] = {
    "datasketch": datasketch,
    "datatrove": datatrove,
    "rensa": rensa,
}


def main() -> None:
    name, path = sys.argv[1:]
    texts = json.loads(Path(path).read_text())
    PEERS[name](texts[:5])  # imports, and models of words
    began, used = time.perf_counter(), time.process_time()
    dropped = PEERS[name](texts)
    answer = {
        "seconds": time.perf_counter() - began,
        "processor seconds": time.process_time() - used,
        "dropped": sorted(dropped),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
