"""Operators that see all documents, run on documents in shards without an executor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from weft.curation.data_operators import Joint
from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents


def joint(name: str, **settings: Any) -> Joint:
    operator = DataStep(operator=name, **settings).build()
    assert isinstance(operator, Joint)
    return operator


def decisions(
    operator: Joint, shards: Sequence[Documents]
) -> dict[str, dict[str, Any]]:
    """The columns and the reason of every document by its id."""
    result = operator.decide(
        [shard.ids for shard in shards], [operator.summarize(shard) for shard in shards]
    )
    assert len(result) == len(shards)
    rows = {}
    for shard, decision in zip(shards, result, strict=True):
        assert len(decision.reasons) == len(shard)
        for i, name in enumerate(shard.ids):
            columns = {key: values[i] for key, values in decision.columns.items()}
            rows[name] = columns | {"reason": decision.reasons[i]}
    return rows


def cut(
    documents: Documents, order: Sequence[int], edges: Sequence[int]
) -> list[Documents]:
    """The documents in another order, cut into shards at these places; some of them may be empty."""
    places = [0, *sorted(edges), len(order)]
    return [documents.select(order[start:end]) for start, end in pairwise(places)]


def kept(rows: dict[str, dict[str, Any]]) -> list[str]:
    return sorted(name for name, row in rows.items() if not row["reason"])
