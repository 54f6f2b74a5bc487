"""The table of who has what: whatever way copies of it meet, they end up the same, and nothing newer is lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.peers.table import (
    Entry,
    SharedTable,
    Stamp,
    entries_from_json,
    entries_to_json,
)

KEYS = st.sampled_from(["file/a", "file/b", "has/x/1"])
VALUES = st.sampled_from([None, 1, "x", [2, "y"]])
STAMPS = st.builds(Stamp, st.integers(0, 2), st.integers(0, 1), st.sampled_from("ab"))
ENTRIES = st.dictionaries(KEYS, st.builds(Entry, STAMPS, VALUES))


unhurried = settings(deadline=None, suppress_health_check=list(HealthCheck))


def merged(*parts: dict[str, Entry]) -> dict[str, Entry]:
    table = SharedTable("me")
    for part in parts:
        table.merge(part)
    return table.entries


@unhurried
@given(ENTRIES, ENTRIES, ENTRIES)
def test_merging_is_commutative_associative_and_idempotent(
    a: dict[str, Entry], b: dict[str, Entry], c: dict[str, Entry]
) -> None:
    assert merged(a, b) == merged(b, a)
    assert merged(merged(a, b), c) == merged(a, merged(b, c))
    assert merged(a, a, b, a) == merged(a, b)


@unhurried
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.one_of(st.tuples(KEYS, VALUES), st.integers(0, 2)),
            st.integers(-5, 5),
        )
    )
)
def test_replicas_that_write_and_talk_as_they_like_agree_at_last(
    events: list[tuple[int, tuple[str, object] | int, int]],
) -> None:
    """Each event: a replica writes a value, or hears another; its clock may jump back. Then all hear all."""
    now = [100, 100, 100]
    tables = [SharedTable(name, lambda i=i: now[i]) for i, name in enumerate("abc")]
    for at, what, jump in events:
        now[at] += jump
        if isinstance(what, int):
            tables[at].merge(
                entries_from_json(
                    json.loads(json.dumps(entries_to_json(tables[what].since(0))))
                )
            )
        else:
            tables[at].write(*what)
            seen = tables[at].entries[what[0]]
            assert seen.value == what[1], "a writer's own value is the newest it knows"
    for _ in range(2):
        for one in tables:
            for other in tables:
                one.merge(other.since(0))
    assert tables[0].entries == tables[1].entries == tables[2].entries


def test_only_what_changed_is_news() -> None:
    table = SharedTable("a")
    table.write("file/x", 1)
    told = table.changes
    table.write("file/x", 1)
    assert table.since(told) == {}
    table.write("file/y", 2)
    assert set(table.since(told)) == {"file/y"} and dict(table.under("file/")) == {
        "x": 1,
        "y": 2,
    }
    table.write("file/x", None)
    assert dict(table.under("file/")) == {"y": 2}


@pytest.mark.parametrize(
    "data",
    [
        None,
        3,
        [1],
        {"k": [1, 2]},
        {"k": ["1", 0, "a", None]},
        {"k": None},
        [[1, [1, 2, "a", None]]],
    ],
)
def test_what_is_no_table_is_refused(data: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        entries_from_json(data)
