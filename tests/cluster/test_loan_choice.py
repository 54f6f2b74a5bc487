"""Loans that the ledger chooses: those with which a service writes more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.cluster.loan_choice import (
    EngineLedger,
    StepSeconds,
    choose_loans,
    tokens_per_second,
)

SECONDS = StepSeconds(fixed=20e-3, text=1e-3, key=1e-6, trips=5e-3)


def test_the_engine_with_a_long_text_borrows_from_the_one_with_room() -> None:
    """One text of 900 blocks keeps eight others waiting; the lender attends to 16 tokens for each block."""
    debtor = EngineLedger("a", 0, 1, 14_400, waiting=8, blocks=20, longest=900)
    full = EngineLedger("b", 0, 30, 9_600)
    roomy = EngineLedger("c", 400, 6, 1_600)
    (loan,) = choose_loans([debtor, full, roomy], 16, SECONDS)
    assert (loan.debtor, loan.creditor, loan.blocks) == ("a", "c", 160)
    assert loan.gain > 100
    nobody_waits = EngineLedger("a", 0, 1, 14_400, longest=900)
    assert not choose_loans([nobody_waits, full, roomy], 16, SECONDS)
    slow_link = SECONDS._replace(trips=10.0)
    assert not choose_loans(
        [EngineLedger("a", 0, 20, 9_600, waiting=1, longest=500), roomy], 16, slow_link
    )


engines = st.builds(
    EngineLedger, name=st.just(""), free=st.integers(0, 200), texts=st.integers(0, 40), keys=st.integers(0, 20_000),
    waiting=st.integers(0, 6), blocks=st.integers(1, 30), longest=st.integers(0, 300),
)  # fmt: skip


@given(st.lists(engines, min_size=2, max_size=4))
def test_every_loan_is_possible_and_gains(drawn: list[EngineLedger]) -> None:
    from dataclasses import replace

    named = [replace(e, name=str(i)) for i, e in enumerate(drawn)]
    rooms = {e.name: e.free for e in named}
    longest = {e.name: e.longest for e in named}
    for loan in choose_loans(named, 16, SECONDS):
        assert loan.gain > 0 and loan.debtor != loan.creditor
        assert 0 < loan.blocks <= rooms[loan.creditor]
        assert loan.blocks <= longest[loan.debtor]
        rooms[loan.creditor] -= loan.blocks
        longest[loan.debtor] -= loan.blocks


def test_rates() -> None:
    engine = EngineLedger("a", 0, 10, 10_000)
    assert tokens_per_second(engine, SECONDS) == 10 / (20e-3 + 10e-3 + 10e-3)
