"""Blocks that lie at other engines: texts get the tokens that they get alone, whatever lies where."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.generate.test_many import HOW, NEW, PROMPTS, build, each_alone
from weft.errors import UsageError, WeftError
from weft.generate.engine import Engine
from weft.generate.lending import Borrower, LoanOffice, NoRoom
from weft.generate.loan_channel import LOANS, RemoteLender, open_loans
from weft.generate.lookup import Lookup
from weft.generate.migration import Departure
from weft.generate.request import Generation
from weft.generate.sampling import GREEDY
from weft.models.borrowed_keys import LenderLost, LentQuery, LoanPart, Partial
from weft.net.endpoint import Endpoint

KINDS = ["softmax", "windows", "experts", "latent"]
T = torch.Tensor


class Company:
    """Engines with one model, each of which lends blocks to the others and borrows from them."""

    def __init__(self, kind: str, tokens: Sequence[int], **settings: object) -> None:
        model = build(kind, torch.float64)
        self.engines = [
            Engine(model, tokens=n, size=4, **settings)  # type: ignore[arg-type]
            for n in tokens
        ]
        self.offices = [LoanOffice(engine) for engine in self.engines]
        self.lenders = {
            (of, to): FragileLender(self.offices[to], str(of))
            for of in range(len(tokens))
            for to in range(len(tokens))
            if of != to
        }
        self.borrowers = [
            Borrower(engine, self.others(number), sum(tokens) // 4)
            for number, engine in enumerate(self.engines)
        ]

    def others(self, number: int) -> Callable[[], list[FragileLender]]:
        return lambda: [
            lender
            for (of, _), lender in self.lenders.items()
            if of == number and not lender.lost
        ]

    def step(self) -> None:
        for engine in self.engines:
            engine.step()

    def run(self) -> None:
        for _ in range(5_000):
            self.step()
            if not any(
                e.scheduler.running or e.scheduler.waiting for e in self.engines
            ):
                break
        for borrower in self.borrowers:
            borrower.settle()

    def check_nothing_is_left(self) -> None:
        for engine, office in zip(self.engines, self.offices, strict=True):
            pool = engine.scheduler.pool
            office.relieve()
            assert not pool.owners and not +pool.lent and not office.loans
            assert not engine.reader.pages[0].lent


class LocalLender:
    """A lender in this process. ``office``: the office of the other engine. ``borrower``: name of the engine that
    borrows.

    Attributes:
        ``moved``: bytes of queries and partial attentions so far.
        ``sent``: bytes of cache blocks so far.
    """

    def __init__(self, office: LoanOffice, borrower: str) -> None:
        self.office, self.borrower = office, borrower
        self.moved = self.sent = 0

    def room(self) -> int:
        return self.office.room()

    def recalled(self) -> list[int]:
        return self.office.recalled(self.borrower)

    def take(self, contents: T) -> int:
        loan = self.office.take(contents, self.borrower)
        self.sent += contents.nbytes
        return loan

    def fetch(self, loan: int) -> T:
        contents = self.office.fetch(loan)
        self.sent += contents.nbytes
        return contents

    def drop(self, loan: int) -> None:
        self.office.drop(loan)

    def ask(
        self, layer: int, queries: Sequence[LentQuery], q: T, window: int
    ) -> Callable[[], Partial]:
        out, lse = self.office.attend(layer, queries, q, window)
        self.moved += q.nbytes + out.nbytes + lse.nbytes
        return lambda: (out, lse)


class FragileLender(LocalLender):
    """A lender that can be lost, in the middle of a forward pass too."""

    lost = False
    asks_left = 10**9

    def ask(
        self, layer: int, queries: Sequence[LentQuery], q: T, window: int
    ) -> Callable[[], Partial]:
        self.asks_left -= 1
        if self.asks_left < 0 and not self.lost:
            self.lost = True
            self.office.drop_all(self.borrower)
        if self.lost:
            raise LenderLost(self, "it was killed")
        return super().ask(layer, queries, q, window)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_same_wherever_blocks_lie(
    kind: str, seed: int, draft: bool
) -> None:
    """Borders of loans, recalls and losses of lenders at random moments, beside requests that borrow nothing."""
    drawn = random.Random(f"{kind} {seed} {draft}")
    settings = {"drafter": Lookup(least=1)} if draft else {}
    company = Company(kind, [400, 400, 400], budget=11, **settings)
    engine, borrower = company.engines[0], company.borrowers[0]
    generations = [
        engine.submit(p, NEW, how)[0] for p, how in zip(PROMPTS, HOW, strict=True)
    ]
    loans = asked = 0
    for _ in range(120):
        company.step()
        running = engine.scheduler.running
        for request in drawn.sample(running, len(running)):
            loans += borrower.lend(request, drawn.randint(0, 5)) > 0
        if drawn.random() < 0.1:
            office = company.offices[drawn.choice([1, 2])]
            while office.relieve():
                pass
        if seed % 2 and drawn.random() < 0.05:
            company.lenders[0, 1].asks_left = 3
    company.run()
    asked = sum(lender.moved for lender in company.lenders.values())
    assert loans > 3 and asked
    expected = each_alone(kind, torch.float64, drawn=True)
    assert [g.written for g in generations] == [g.written for g in expected]
    company.check_nothing_is_left()


def long_request(company: Company, length: int) -> Generation:
    engine = company.engines[0]
    (generation,) = engine.submit([(7 * i) % 31 for i in range(length)], 30, GREEDY)
    return generation


@pytest.mark.parametrize("kind", ["softmax", "windows"])
def test_a_text_longer_than_its_engines_cache_is_written(kind: str) -> None:
    """600 tokens where the cache has room for 160; the other engines have more."""
    company = Company(kind, [160, 400, 300], budget=64)
    generation = long_request(company, 600)
    company.run()
    alone = Engine(build(kind, torch.float64), budget=64)
    (expected,) = alone.submit(generation.ids[:600], 30, GREEDY)
    alone.run()
    assert generation.written == expected.written
    assert company.engines[0].scheduler.preemptions == 0
    company.check_nothing_is_left()
    with pytest.raises(UsageError, match="do not fit into a cache"):
        long_request(company, 5_000)


def test_a_lender_that_needs_its_memory_gets_it_back() -> None:
    """The lender's own requests fill its cache; the borrower lends elsewhere, or begins again later."""
    company = Company("softmax", [160, 320, 200], budget=64)
    generation = long_request(company, 300)
    for _ in range(12):
        company.step()
    assert company.offices[1].loans
    own = company.engines[1].submit([(3 * i) % 31 for i in range(230)], 60, GREEDY)[0]
    recalled = 0
    while not own.finished:
        company.step()
        recalled += len(company.offices[1].recalled("0"))
    company.run()
    assert recalled
    model = build("softmax", torch.float64)
    for each, count in ((generation, 30), (own, 60)):
        alone = Engine(model)
        (expected,) = alone.submit(each.ids[: each.prompt], count, GREEDY)
        alone.run()
        assert each.written == expected.written
    company.check_nothing_is_left()


def test_only_queries_and_partial_attentions_travel() -> None:
    """Bytes of a step: heads x width there; heads x (width + 1) back, for every layer and new token."""
    company = Company("softmax", [400, 400])
    generation = long_request(company, 100)
    engine, lender = company.engines[0], company.lenders[0, 1]
    while not generation.written:
        company.step()
    block = sum(
        p.store[:, 0].nbytes for p in engine.reader.pages if p.store is not None
    )
    shape = engine.model.shape
    key = 2 * shape.layers * shape.kv_heads * (shape.head_dim or 0) * 8
    assert company.borrowers[0].lend(generation, 7) == 7
    assert lender.sent == 7 * block == 7 * 4 * key
    departure = Departure(engine, generation)
    assert departure.round() is None
    with pytest.raises(WeftError, match="lie at another engine"):
        departure.leave()
    for steps in (1, 2, 3):
        company.step()
        one = shape.layers * shape.heads * (2 * (shape.head_dim or 0) + 1) * 8
        assert lender.moved == steps * one
    company.run()
    company.check_nothing_is_left()


def test_what_cannot_be_lent_is_refused() -> None:
    engine = Engine(build("hybrid", torch.float64), size=4)
    with pytest.raises(UsageError, match="recurrent state"):
        LoanOffice(engine)
    company = Company("softmax", [40, 40])
    with pytest.raises(NoRoom, match="20 blocks are too many for the 9"):
        company.offices[1].take(torch.zeros(20, 10, dtype=torch.uint8), "0")


def test_loans_over_a_wire() -> None:
    """Two endpoints; an engine with a cache of 160 tokens writes behind 300, until its lender is gone."""
    model = build("softmax", torch.float64)
    near, far = (Engine(model, tokens=n, size=4, budget=32) for n in (160, 600))
    office = LoanOffice(far)
    ends = [Endpoint("127.0.0.1"), Endpoint("127.0.0.1")]
    open_loans(ends[0], "secret", office)
    lender = RemoteLender(ends[1].join(LOANS, "secret"), ends[0].address, "far")
    stranger = RemoteLender(ends[1].join(LOANS, "guessed"), ends[0].address, "far")
    try:
        borrower = Borrower(near, lambda: [lender], 200)
        (generation,) = near.submit([(7 * i) % 31 for i in range(300)], 20, GREEDY)
        while len(generation.written) < 10:
            near.step()
            far.step()
        moved = lender.moved
        near.step()
        shape = model.shape
        one = shape.layers * shape.heads * (2 * (shape.head_dim or 0) + 1) * 8
        assert lender.moved - moved == one and lender.sent and office.loans
        assert stranger.room() == 0 and stranger.lost
        (loan, *_) = near.reader.lent.values()
        borrower.bring_home(near.scheduler.running[0])  # there is no room: it waits
        borrower.settle()
        assert not office.loans and loan.lender is lender
        while len(generation.written) < 15:
            near.step()
            far.step()
        assert office.loans
        ends[0].close()
        for _ in range(20):
            near.step()
        assert lender.lost and near.scheduler.waiting == [generation]
    finally:
        for end in ends:
            end.close()
    alone = Engine(model)
    (expected,) = alone.submit(generation.ids[:300], 20, GREEDY)
    alone.run()
    written = generation.written
    assert len(written) >= 15 and written == expected.written[: len(written)]


def test_an_answer_that_nobody_read_is_not_taken_for_the_next() -> None:
    """A pass that loses one lender leaves the answers of another unread."""
    model = build("softmax", torch.float64)
    office = LoanOffice(Engine(model, tokens=400, size=4))
    size = office.reader.read_blocks([0], 4).shape[1]
    ends = [Endpoint("127.0.0.1"), Endpoint("127.0.0.1")]
    open_loans(ends[0], "secret", office)
    lender = RemoteLender(ends[1].join(LOANS, "secret"), ends[0].address, "far")
    try:
        values = torch.randn(size // 8, dtype=torch.float64).view(torch.uint8)
        loan = lender.take(values[None])
        queries = [LentQuery(0, 1, 4, [LoanPart(loan, 0, 4)])]
        shape = (1, model.shape.heads, model.shape.head_dim or 0)
        first, second = torch.randn(2, *shape, dtype=torch.float64)
        lender.ask(0, queries, first, 0)
        out, lse = lender.ask(0, queries, second, 0)()
        expected = office.attend(0, queries, second, 0)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    finally:
        lender.close()
        for end in ends:
            end.close()
