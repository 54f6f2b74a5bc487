"""MinHash: documents that are nearly equal, by locality-sensitive hashing of their shingles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from weft.curation.data_operators import Decision
from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.curation.duplicate_groups import (
    SurvivorSettings,
    choose_survivors,
    connected_groups,
    equal_neighbours,
    flat_ids,
    joined_summaries,
    survivor_decisions,
    survivor_scores,
)
from weft.curation.min_hash import NO_WORDS, band_keys, text_signatures
from weft.registry import register


class MinhashSettings(SurvivorSettings):
    """Settings of the removal of near-duplicates: shingles, hashes and buckets."""

    ngram: int = Field(
        5,
        ge=1,
        description=(
            "Number of words of a shingle (a sequence of neighbouring words). A shorter document is one "
            "shingle."
        ),
    )
    buckets: int = Field(
        14,
        ge=1,
        description=(
            "Number of buckets (groups of hashes) of a document; two documents are alike if all hashes of one "
            "bucket agree."
        ),
    )
    hashes: int = Field(
        8,
        ge=1,
        description="Number of hash functions in a bucket. More make fewer documents alike.",
    )
    seed: int = Field(1, ge=0, description="Seed of the hash functions.")


@register(
    "operator",
    "minhash",
    settings=MinhashSettings,
    title="Near-duplicates (MinHash)",
    paper="Broder 1997; Penedo et al. 2024 (2406.17557)",
    recipe="data/duplicates.toml",
    proof="tests/curation/test_min_hash.py, tests/curation/test_duplicates.py",
    figure="recall of planted pairs is that of the formula in every bin, within the binomial band of 99 %; "
    "14.1x the documents a second of datasketch, 4.1x of rensa, 131x of datatrove (`bench/minhash.py`)",
)
class Minhash:
    """Drops near-duplicates: documents whose shingles are nearly those of another document (MinHash; Broder 1997;
    Penedo et al. 2024). Two documents whose sets of shingles have a Jaccard index ``s`` are taken to be alike with
    probability ``1 - (1 - s^hashes)^buckets``. Documents that a chain of such pairs connects are alike, too. Shingles
    are hashed sequences of words of the simplified text. A document with fewer words than a shingle is one shingle, and
    one without words has no duplicates.
    """

    late: ClassVar = ()

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(MinhashSettings)

    def summarize(self, documents: Documents) -> dict[str, np.ndarray]:
        ours = self.settings
        signatures = text_signatures(
            documents.texts, ours.ngram, ours.buckets * ours.hashes, ours.seed
        )
        return {
            "keys": band_keys(signatures, ours.buckets),
            "has_words": (signatures != NO_WORDS).any(axis=1),
            "scores": survivor_scores(documents, ours),
        }

    def decide(
        self,
        ids: Sequence[Sequence[str]],
        summaries: Sequence[Mapping[str, np.ndarray]],
    ) -> list[Decision]:
        names = flat_ids(ids)
        keys = joined_summaries(summaries, "keys")
        with_words = np.flatnonzero(joined_summaries(summaries, "has_words"))
        pairs = [
            equal_neighbours(keys[with_words, bucket])
            for bucket in range(self.settings.buckets)
        ]
        left, right = (
            with_words[np.concatenate(side)] for side in zip(*pairs, strict=True)
        )
        groups = connected_groups(len(names), left, right)
        scores = joined_summaries(summaries, "scores")
        survivors = choose_survivors(groups, scores, names)
        return survivor_decisions(ids, survivors, "near-duplicate", "minhash_copies")
