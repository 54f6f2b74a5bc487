"""Pair documents with those that were made from them, at an exact ratio."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from hashlib import blake2b
from math import ceil
from typing import NamedTuple

import numpy as np

from weft.curation.data_operators import Decision
from weft.curation.documents import Documents
from weft.curation.rephrasing import GENERATOR, SOURCE

#: Column that says which of the two a document is, and its values.
PART, REAL, SYNTHETIC = "part", "real", "synthetic"


class _Place(NamedTuple):
    """Place of a document: a hash for its order among others, its id, its shard, and its row there."""

    order: bytes
    id: str
    shard: int
    row: int


def pair_summary(documents: Documents) -> dict[str, np.ndarray]:
    """Return what :func:`pair_documents` needs of a shard: for each document a hash, and whether it is synthetic.

    The hash, uint64 ``[documents, 2]``, is that of a real document's id. A synthetic document has the hash of the real
    one from which it was generated.
    """
    made_by = documents.columns.get(GENERATOR, [""] * len(documents))
    sources = documents.columns.get(SOURCE, documents.ids)
    named = (
        source if of else own
        for source, own, of in zip(sources, documents.ids, made_by, strict=True)
    )
    hashes = b"".join(blake2b(name.encode(), digest_size=16).digest() for name in named)
    return {
        "source": np.frombuffer(bytearray(hashes), np.uint64).reshape(-1, 2),
        "synthetic": np.array([bool(of) for of in made_by], bool),
    }


def pair_documents(
    ids: Sequence[Sequence[str]],
    summaries: Sequence[Mapping[str, np.ndarray]],
    ratio: float,
    seed: int,
) -> list[Decision]:
    """Return the decision for each shard which documents are kept, so that there are ``ratio`` synthetic documents for
    each real one.

    For ``n`` real documents, the largest whole number of synthetic ones up to ``n * ratio`` is kept, spread evenly over
    the real ones. A real document from which too few were generated is dropped, and so is a synthetic one whose real
    document is not kept. The choice depends on ids and ``seed`` alone. ``ids``, ``summaries``: the arguments of
    :meth:`weft.curation.data_operators.Joint.decide`, with the arrays of :func:`pair_summary`.
    """
    share = Fraction(ratio).limit_denominator(10_000)
    reals, rephrased = dict[bytes, _Place](), defaultdict[bytes, list[_Place]](list)
    for shard, (names, summary) in enumerate(zip(ids, summaries, strict=True)):
        rows = zip(names, summary["source"], summary["synthetic"], strict=True)
        for index, (name, source, synthetic) in enumerate(rows):
            place = _Place(_order(seed, name), name, shard, index)
            if synthetic:
                rephrased[source.tobytes()].append(place)
            else:
                reals[source.tobytes()] = place
    reasons = [[""] * len(names) for names in ids]
    needed = ceil(share)
    whole = [source for source in reals if len(rephrased[source]) >= needed]
    whole.sort(key=lambda source: reals[source])
    kept = set[str]()
    for number, source in enumerate(whole):
        count = int((number + 1) * share) - int(number * share)
        kept |= {place.id for place in sorted(rephrased[source])[:count]}
    paired = set(whole)
    for source, place in reals.items():
        if source not in paired:
            reasons[place.shard][place.row] = f"fewer than {needed} texts were made from it"  # fmt: skip
    for source, places in rephrased.items():
        for place in places:
            if place.id in kept:
                continue
            lost = (
                ""
                if source in paired
                else "its real document is not there, or not paired"
            )
            reasons[place.shard][place.row] = lost or "more than the ratio"
    return [
        Decision(
            {PART: [SYNTHETIC if of else REAL for of in summary["synthetic"]]}, of_shard
        )
        for summary, of_shard in zip(summaries, reasons, strict=True)
    ]


def _order(seed: int, name: str) -> bytes:
    return blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
