"""The ledger of samples: each goes to each task exactly once, none becomes too old, and nothing waits for ever."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.sample_ledger import (
    REWARD,
    ROLLOUT,
    TRAIN,
    LedgerTask,
    SampleLease,
    SampleLedger,
    SampleRow,
    VersionSpan,
)

TASKS = (ROLLOUT, REWARD, TRAIN)


def fill(ledger: SampleLedger, samples: int = 2) -> list[int]:
    places = []
    while (place := ledger.admit(samples)) is not None:
        places.append(place)
    return places


def write(ledger: SampleLedger, lease: SampleLease, version: int) -> list[SampleRow]:
    return ledger.finish(
        lease, versions={row: [VersionSpan(0, version)] for row in lease.rows}
    )


def take(ledger: SampleLedger, task: str, count: int, **words: int) -> SampleLease:
    lease = ledger.take(task, f"{task}-0", count, **words)
    assert lease is not None
    return lease


def make_all(ledger: SampleLedger, version: int) -> None:
    """Write and score all that weights of ``version`` may begin."""
    while lease := ledger.take("rollout", "r", 9, version):
        write(ledger, lease, version)
    while lease := ledger.take("reward", "w", 9):
        ledger.finish(lease)


def test_bound_zero_is_the_synchronous_loop() -> None:
    ledger = SampleLedger(TASKS, bound=0, batch=2)
    for version in range(5):
        assert fill(ledger) == [2 * version, 2 * version + 1]
        make_all(ledger, version)
        lease = take(ledger, "train", 2)
        assert ledger.admit(2) is None  # freed by the update alone, not by its begin
        assert [*dict.fromkeys(row.place for row in lease.rows)] == [
            2 * version,
            2 * version + 1,
        ]
        ledger.finish(lease)
        assert ledger.admit(2) is None
        assert ledger.advance() == version + 1
    assert ledger.lags == {0: 20}


def test_old_weights_begin_no_sample_that_would_become_too_old() -> None:
    ledger = SampleLedger(TASKS, bound=1, batch=1)
    fill(ledger)
    make_all(ledger, 0)
    ledger.finish(take(ledger, "train", 1))
    ledger.advance()
    assert fill(ledger) == [2]
    # trained at version 2 if not before: weights of version 0 would lag by two updates
    assert ledger.take("rollout", "slow", 1, version=0) is None
    lease = take(ledger, "rollout", 1, version=1)
    with pytest.raises(ValueError, match="too old"):
        write(ledger, lease, 0)
    assert write(ledger, lease, 1) == [*lease.rows]


def test_lost_holder_s_rows_are_handed_out_again_and_its_word_is_ignored() -> None:
    ledger = SampleLedger(TASKS, bound=0, batch=1)
    fill(ledger)
    first = take(ledger, "rollout", 1, version=0)
    assert ledger.take("rollout", "other", 1, version=0) is None
    assert ledger.lose("rollout-0") == [*first.rows]
    second = ledger.take("rollout", "other", 1, version=0)
    assert second is not None
    assert second.rows == first.rows
    assert write(ledger, first, 0) == []
    assert ledger.take("reward", "w", 9) is None
    assert write(ledger, second, 0) == [*second.rows]
    assert write(ledger, second, 0) == []


def test_samples_left_out_are_begun_anew_and_counted() -> None:
    ledger = SampleLedger(TASKS, bound=0, batch=1)
    fill(ledger, 3)
    write(ledger, take(ledger, "rollout", 1, version=0), 0)
    scored = take(ledger, "reward", 9)
    assert ledger.leave_out(scored.rows[1], "reward failed") == SampleRow(0, 1, 1)
    assert ledger.leave_out(scored.rows[1], "reward failed") is None
    assert ledger.finish(scored) == [scored.rows[0], scored.rows[2]]
    assert ledger.take("train", "t", 1) is None
    again = take(ledger, "rollout", 1, version=0)
    assert again.rows == (SampleRow(0, 1, 1),)
    write(ledger, again, 0)
    ledger.finish(take(ledger, "reward", 9))
    assert len(take(ledger, "train", 1).rows) == 3
    assert ledger.left_out == {"reward failed": 1}


def test_group_without_signal_is_left_out_while_it_is_trained() -> None:
    ledger = SampleLedger(TASKS, bound=0, batch=2)
    fill(ledger)
    make_all(ledger, 0)
    lease = take(ledger, "train", 2)
    assert ledger.leave_out_group(1, "no signal") == [
        SampleRow(1, 0, 1),
        SampleRow(1, 1, 1),
    ]
    assert ledger.take("train", "t", 1) is None
    make_all(ledger, 0)
    other = take(ledger, "train", 1)
    assert {row.place for row in other.rows} == {1}
    assert {row.place for row in ledger.finish(lease)} == {0}
    with pytest.raises(ValueError, match="trained 1 groups, and must train 2"):
        ledger.advance()
    ledger.finish(other)
    assert ledger.advance() == 1


def test_lost_store_begins_its_samples_anew_unless_they_are_trained() -> None:
    ledger = SampleLedger(TASKS, bound=1, batch=1)
    fill(ledger, 1)
    for holder in ("a", "b"):
        lease = ledger.take("rollout", holder, 1, version=0)
        assert lease is not None
        spans = {row: [VersionSpan(0, 0)] for row in lease.rows}
        ledger.finish(lease, versions=spans, store="a")
    ledger.finish(take(ledger, "reward", 9))
    trained = take(ledger, "train", 1)
    ledger.lose("a")
    assert ledger.take("train", "t", 1) is None
    assert take(ledger, "rollout", 9, version=0).rows == (SampleRow(1, 0, 1),)
    assert ledger.finish(trained) == [*trained.rows]


def test_samples_without_fields_are_not_trained_after_their_trainer_was_lost() -> None:
    def trained(ledger: SampleLedger) -> SampleLease:
        fill(ledger, 2)
        lease = ledger.take("rollout", "a", 1, version=0)
        assert lease is not None
        spans = {row: [VersionSpan(0, 0)] for row in lease.rows}
        ledger.finish(lease, versions=spans, store="a")
        ledger.finish(take(ledger, "reward", 9))
        return take(ledger, "train", 1)

    ledger = SampleLedger(TASKS, bound=0)
    trained(ledger)
    ledger.lose("a")
    ledger.lose("train-0")
    assert ledger.take("train", "t", 1) is None
    assert ledger.left_out == {"lost": 2}

    ledger = SampleLedger(TASKS, bound=0)
    lease = trained(ledger)
    ledger.lose("a")
    again = SampleLedger(TASKS, bound=0)
    again.load_state(json.loads(json.dumps(ledger.state())), ("", "a"))
    assert again.take("train", "t", 1) is None
    # a sample of the group begun anew takes the others from their trainer, which leaves them without fields
    ledger.leave_out(lease.rows[0], "no signal")
    assert take(ledger, "rollout", 1, version=0).rows == (
        SampleRow(0, 0, 1),
        SampleRow(0, 1, 1),
    )


def test_tasks_must_write_what_is_read() -> None:
    for tasks, why in (
        ((ROLLOUT, TRAIN), "train reads"),
        ((ROLLOUT, ROLLOUT, TRAIN), "rollout writes"),
        ((ROLLOUT, REWARD), "whole groups"),
    ):
        with pytest.raises(ValueError, match=why):
            SampleLedger(tasks, 0)
    with pytest.raises(ValueError, match="below"):
        SampleLedger(TASKS, -1)


REFERENCE = LedgerTask("reference", ("answer",), ("reference",))
FULL = LedgerTask("train", ("answer", "reward", "reference"), whole=True)
GROUPS = 12


class Interleaving:
    """A run in which everything happens in an order that ``chance`` draws, with what it must count written down."""

    def __init__(self, chance: Random, bound: int, batch: int, single: bool) -> None:
        tasks = (
            LedgerTask("rollout", (), ("answer",), whole=not single, draws=True),
            REWARD,
            REFERENCE,
            FULL,
        )
        self.tasks, self.ledger = tasks, SampleLedger(tasks, bound, batch)
        self.chance, self.bound, self.batch = chance, bound, batch
        self.leases: list[SampleLease] = []
        self.calm = False
        self.versions = {"r0": 0, "r1": 0, "r2": 0}
        self.began: dict[int, int] = {}
        self.counted: Counter[tuple[SampleRow, str]] = Counter()
        self.trained: list[SampleRow] = []
        self.oldest: dict[SampleRow, int] = {}
        self.sizes: dict[int, int] = {}

    def admit(self) -> None:
        if len(self.sizes) < GROUPS:
            size = self.chance.randint(1, 3)
            if (place := self.ledger.admit(size)) is not None:
                self.sizes[place] = size

    def refresh(self) -> None:
        self.versions[self.chance.choice([*self.versions])] = self.ledger.version

    def take(self) -> None:
        task = self.chance.choice(self.tasks)
        holder = self.chance.choice([*self.versions])
        count = self.chance.randint(1, 3)
        if task is FULL:
            count = max(self.batch, min(count, GROUPS))
        version = self.versions[holder] if task.draws else None
        if lease := self.ledger.take(task.name, holder, count, version):
            self.leases.append(lease)
            self.began[lease.number] = version or 0
            if task is FULL:  # a group is compared with itself, and must be whole
                for place, rows in Counter(row.place for row in lease.rows).items():
                    assert rows == self.sizes[place]

    def finish(self) -> None:
        """Also leases that were lost since: their holders do not know yet."""
        if not self.leases:
            return
        lease = self.leases.pop(self.chance.randrange(len(self.leases)))
        rows = [*lease.rows]
        part = None
        if lease.task != "train" and not self.calm and self.chance.random() < 0.3:
            part = rows[: self.chance.randint(0, len(rows))]
            self.leases.append(lease)
        spans = [VersionSpan(0, self.began[lease.number])]
        if self.ledger.version > spans[0].version:
            spans.append(VersionSpan(5, self.ledger.version))  # a partial rollout
        store = self.chance.choice(["", "", lease.holder])
        valid = [row for row in rows if self.ledger.holds(lease, row)]
        given = {row: spans for row in rows}
        try:
            counted = self.ledger.finish(lease, part, given, store)
        except ValueError:
            assert not valid, "an honest holder was refused"
            return
        assert [*counted] == [row for row in valid if part is None or row in part]
        for row in counted:
            self.counted[row, lease.task] += 1
            if lease.task == "rollout":
                self.oldest[row] = spans[0].version
            if lease.task == "train":
                self.trained.append(row)
                assert 0 <= self.ledger.version - self.oldest[row] <= self.bound

    def lose(self) -> None:
        self.ledger.lose(self.chance.choice([*self.versions]))

    def leave_out(self) -> None:
        if self.leases:
            lease = self.chance.choice(self.leases)
            row = self.chance.choice(lease.rows)
            if row not in self.trained:
                self.ledger.leave_out(row, "failed")

    def advance(self) -> None:
        groups = {row.place for row in self.trained}
        waits = self.ledger.slots - self.ledger.free
        fresh = len(groups) - self.ledger.trained
        if fresh >= self.batch or (fresh and fresh == waits):
            self.ledger.advance()

    def restart(self) -> None:
        """From a checkpoint; the leases of before are of another life."""
        state = json.loads(json.dumps(self.ledger.state()))
        stores = self.chance.choice([("",), ("", "r0", "r1", "r2")])
        self.ledger = SampleLedger(self.tasks, self.bound, self.batch)
        self.ledger.load_state(state, stores)
        assert self.ledger.state()["lags"] == state["lags"]

    def drain(self) -> None:
        """Nothing more goes wrong: all that is left must be trained within a number of moves that is known."""
        self.calm = True
        self.leases.clear()
        for name in self.versions:
            self.ledger.lose(name)
        for _ in range(20 * GROUPS):
            while len(self.sizes) < GROUPS and (place := self.ledger.admit(2)) is not None:  # fmt: skip
                self.sizes[place] = 2
            self.versions = dict.fromkeys(self.versions, self.ledger.version)
            for task in self.tasks:
                left = GROUPS - len({row.place for row in self.trained})
                count = min(self.batch, left) if task is FULL else 9
                version = self.ledger.version if task.draws else None
                if lease := self.ledger.take(task.name, "r0", count, version):
                    self.leases.append(lease)
                    self.began[lease.number] = self.ledger.version
                    self.finish()
            self.advance()
            if self.ledger.trained == GROUPS:
                return
        raise AssertionError(f"still waiting: {self.ledger.state()}")


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, 3), st.integers(1, 3), st.booleans())  # fmt: skip
def test_random_interleavings(
    chance: Random, bound: int, batch: int, single: bool
) -> None:
    run = Interleaving(chance, bound, batch, single)
    moves = (
        *(run.admit, run.take, run.finish, run.advance) * 4,
        run.refresh,
        run.refresh,
        run.lose,
        run.leave_out,
        run.restart,
    )
    for _ in range(chance.randint(0, 120)):
        chance.choice(moves)()
    run.drain()
    assert {row.place for row in run.trained} == {*range(GROUPS)}
    assert len(run.trained) == sum(run.sizes.values()) == sum(run.ledger.lags.values())
    for row in run.trained:
        assert {task.name: run.counted[row, task.name] for task in run.tasks} == {
            task.name: 1 for task in run.tasks
        }
    assert max(run.ledger.lags) <= bound
    assert not run.ledger.state()["groups"]
