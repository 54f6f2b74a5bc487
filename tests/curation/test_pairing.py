"""Pairs of real and synthetic documents: the ratio is exact, of documents as of what training reads."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.curation.pairing import pair_documents, pair_summary
from weft.data.order import Order, Stream

Row = tuple[str, str, str]  # id, source, generator


def corpus(made: list[int]) -> list[Row]:
    """Real documents, each with so many that were made from it."""
    rows = list[Row]()
    for number, count in enumerate(made):
        rows.append((f"d{number}", f"d{number}", ""))
        rows += [(f"d{number}#{i}", f"d{number}", "g") for i in range(count)]
    return rows


def shard(rows: list[Row]) -> Documents:
    ids, sources, made_by = ([row[i] for row in rows] for i in range(3))
    return Documents(ids, ids, {"rephrased_from": sources, "rephrased_by": made_by})


def kept(shards: list[list[Row]], ratio: float, seed: int = 0) -> dict[str, str]:
    """The part of each document that is kept, by its id."""
    documents = [shard(rows) for rows in shards]
    summaries = [pair_summary(each) for each in documents]
    decisions = pair_documents([each.ids for each in documents], summaries, ratio, seed)
    return {
        name: part
        for each, decision in zip(documents, decisions, strict=True)
        for name, part, reason in zip(
            each.ids, decision.columns["part"], decision.reasons, strict=True
        )
        if not reason
    }


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=30),
    st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.0]),
    st.randoms(),
)
def test_the_ratio_is_exact_and_shards_do_not_matter(
    made: list[int], ratio: float, random: Any
) -> None:
    rows = corpus(made)
    result = kept([rows], ratio)
    real = [name for name, part in result.items() if part == "real"]
    synthetic = [name for name, part in result.items() if part == "synthetic"]
    assert len(real) == sum(count >= ratio for count in made if count)
    assert len(synthetic) == int(len(real) * Fraction(ratio))
    assert {name.partition("#")[0] for name in synthetic} <= set(real)
    of_each = [sum(s.startswith(f"{r}#") for s in synthetic) for r in real]
    assert not real or max(of_each) - min(of_each) <= 1
    mixed = random.sample(rows, len(rows))
    cut = random.randint(0, len(rows))
    assert kept([mixed[:cut], mixed[cut:]], ratio) == result


def test_the_seed_chooses_and_everything_that_is_dropped_says_why() -> None:
    rows = corpus([4] * 20)
    assert kept([rows], 1, seed=0) != kept([rows], 1, seed=1)
    operator: Any = DataStep(operator="pair", ratio=1).build()
    orphans = shard([*corpus([0, 2]), ("x#0", "x", "g")])
    (decision,) = operator.decide([orphans.ids], [operator.summarize(orphans)])
    reasons = dict(zip(orphans.ids, decision.reasons, strict=True))
    assert reasons["d0"] == "fewer than 1 texts were made from it"
    assert reasons["x#0"] == "its real document is not there, or not paired"
    assert sorted((reasons["d1#0"], reasons["d1#1"])) == ["", "more than the ratio"]


@pytest.mark.parametrize("ratio", [1.0, 0.5, 3.0])
def test_training_reads_both_parts_at_the_ratio_in_every_block(ratio: float) -> None:
    def stream(rows: int, seed: int) -> Stream:
        lengths = np.full(rows, 8, np.int64)
        return Stream(np.arange(8 * rows), np.arange(rows) * 8, lengths, 8, seed, "one")

    order = Order((stream(50, 1), stream(70, 2)), (1.0, ratio), seed=3)
    real = synthetic = 0
    for block in range(6):
        at = range(block * order.block, (block + 1) * order.block)
        counts = np.bincount([order.locate(sample)[0] for sample in at], minlength=2)
        assert abs(counts[1] - ratio * counts[0]) <= 1 + ratio
        real, synthetic = real + counts[0], synthetic + counts[1]
        assert abs(synthetic - (real + synthetic) * ratio / (1 + ratio)) < 1
