"""Cache blocks that lie at another engine: loans, who gives them, and who has them (Infinite-LLM, 2401.02669).

An engine whose cache is full sends the leading full blocks of its longest text to a lender (:class:`Borrower`). The
text goes on here, and its queries attend to the lent keys where these lie (:mod:`weft.models.borrowed_keys`). A lender
holds such blocks among its own (:class:`LoanOffice`). A lender that needs its memory recalls a loan: the borrower then
fetches the blocks, or computes the text again later. If a lender is lost, the text is computed again. In every case the
text gets the same tokens.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import count
from threading import Lock
from typing import NamedTuple, Protocol

import torch

from weft.errors import UsageError, WeftError
from weft.generate.engine import Engine, LoanUsage
from weft.generate.reader import PagedReader
from weft.generate.request import Request
from weft.models.borrowed_keys import (
    BlockLender,
    LenderLost,
    LentBlock,
    LentQuery,
    Partial,
    attend_lent,
)
from weft.models.paged import KeyValuePages
from weft.models.spans import Span

T = torch.Tensor

#: The share of an engine's cache that it never lends.
RESERVE = 0.1


class NoRoom(WeftError):
    """Raised by an engine or file that has too few free cache blocks to hold the blocks that another engine wants to
    move there.
    """


class LendingEngine(BlockLender, Protocol):
    """Interface to another engine that lends free blocks of its cache to this engine. A loan is a group of blocks that
    were lent together; it has a number. All methods raise :class:`LenderLost` if the lender does not answer.
    """

    def room(self) -> int:
        """Return how many cache blocks the other engine offers to lend now."""

    def recalled(self) -> list[int]:
        """Return the numbers of the loans whose blocks the lender needs for itself, so that this engine should fetch
        their contents and end them.
        """

    def take(self, contents: T) -> int:
        """Move the cache blocks ``contents``, uint8 ``[blocks, bytes]``, to free blocks of the lender. Return the
        number of this loan.

        Raises :class:`NoRoom` if the lender has too few free blocks.
        """

    def fetch(self, loan: int) -> T:
        """Return the contents of the blocks that lie at the lender as the loan number ``loan``, uint8 ``[blocks,
        bytes]``. The loan goes on.
        """

    def drop(self, loan: int) -> None:
        """End the loan number ``loan``. Nothing happens if the lender is lost."""


class Loan(NamedTuple):
    """Cache blocks of this engine that hold the beginning of another engine's text.

    ``borrower``: name of that engine's connection. ``table``: numbers of the blocks, in the order of the text's tokens.
    """

    borrower: str
    table: list[int]


def check_lending(engine: Engine) -> PagedReader:
    """Return the reader of ``engine``, after its cache has been allocated. Raises :class:`UsageError` if the blocks of
    this engine cannot be lent to other engines.
    """
    reader = engine.reader
    if not isinstance(reader, PagedReader) or reader.alike:
        raise UsageError(
            "blocks are lent by engines on one rank without --invariant; leave out lending"
        )
    if not all(isinstance(pages, KeyValuePages) for pages in reader.pages):
        raise UsageError(
            "layers that keep a recurrent state have no keys to lend; leave out lending"
        )
    engine.block_form()  # makes the cache's memory, if it has none yet
    return reader


class LoanOffice:
    """The lender's side of loans. A loan is a group of cache blocks that another engine, the borrower, has moved to the
    cache of ``engine``, because its own is full. The lender also computes the attention of the borrower's queries to
    these blocks.

    ``reserve``: share of the cache that is never lent.

    The engine's thread offers free blocks between its steps (:meth:`settle`). Other threads lend offered blocks, and
    take them back, without waiting for the engine's thread. So two engines that lend to each other never wait for each
    other.
    """

    def __init__(self, engine: Engine, reserve: float = RESERVE) -> None:
        self.engine, self.reader = engine, check_lending(engine)
        self.reserve = reserve
        self.loans: dict[int, Loan] = {}
        self._recalled: set[int] = set()
        self._offered: list[int] = []
        self._numbers = count()
        self._lock = Lock()
        engine.scheduler.relief.insert(0, self.relieve)  # before it borrows
        engine.loans.append(self)
        self.settle()

    # In the engine's thread.

    def settle(self) -> None:
        """Offer free blocks that the engine does not need now for loans. While requests of the engine wait, it offers
        none.
        """
        scheduler, pool = self.engine.scheduler, self.engine.scheduler.pool
        with self._lock:
            usable = pool.free + len(self._offered) - int(self.reserve * pool.blocks)
            wanted = 0 if scheduler.waiting else max(0, usable)
            while len(self._offered) > wanted:
                pool.release([self._offered.pop()])
            more = [pool.take() for _ in range(wanted - len(self._offered))]
            for pages in self.reader.pages:
                pages.room(max(more, default=0) + 1)
            self._offered += more

    def give_up(self, lender: BlockLender) -> None:
        """Do nothing when another engine is lost: this engine's texts have no blocks there."""

    def relieve(self) -> bool:
        """Give the offered blocks back to the engine, which needs memory; return whether there were any. If there were
        none, recall the latest loan.
        """
        with self._lock:
            offered, self._offered = self._offered, []
            self.engine.scheduler.pool.release(offered)
            if not offered and not self._recalled and self.loans:
                self._recalled.add(max(self.loans))
        return bool(offered)

    # In any thread.

    def recall_all(self) -> None:
        """Offer no further blocks for loans, and ask for all lent blocks back."""
        with self._lock:
            self.reserve = 1.0
            self._recalled |= self.loans.keys()

    def room(self) -> int:
        """Return how many blocks this engine offers to lend now."""
        return len(self._offered)

    def usage(self) -> LoanUsage:
        with self._lock:
            lent = sum(len(loan.table) for loan in self.loans.values())
            return LoanUsage(lent=lent, offered=len(self._offered))

    def close(self) -> None:
        """Do nothing: the lent blocks lie in this engine's own cache."""

    def take(self, contents: T, borrower: str) -> int:
        """Lend blocks to the engine ``borrower`` for these ``contents``, uint8 ``[blocks, bytes]``; return the number
        of the loan.

        Raises :class:`NoRoom` if too few blocks are offered.
        """
        with self._lock:
            if len(contents) > len(self._offered):
                raise NoRoom(
                    f"{len(contents)} blocks are too many for the {len(self._offered)} that can be lent; "
                    f"ask another engine"
                )
            table = [self._offered.pop() for _ in range(len(contents))]
            size = self.engine.scheduler.pool.size
            with self.reader.growing:  # what is written must not be copied meanwhile
                self.reader.write_blocks(table, size, contents)
            loan = next(self._numbers)
            self.loans[loan] = Loan(borrower, table)
        return loan

    def recalled(self, borrower: str) -> list[int]:
        """Return the numbers of those loans to ``borrower`` that this engine wants back."""
        with self._lock:
            return [
                loan for loan in self._recalled if self.loans[loan].borrower == borrower
            ]

    @torch.inference_mode()
    def attend(
        self, layer: int, queries: Sequence[LentQuery], q: T, window: int
    ) -> Partial:
        """Return the attention of ``q`` ``[queries, heads, width]`` in ``layer`` to lent blocks. No lock is needed,
        because nobody writes to lent blocks.

        ``queries``: for each text, which rows of ``q`` are its queries, and to which loans they attend. ``window``:
        number of tokens that a token sees, itself included; 0: all. Raises :class:`KeyError` for a loan that has ended.
        """
        pages = self.reader.pages[layer]
        assert isinstance(pages, KeyValuePages)
        size = self.engine.scheduler.pool.size

        def read(loan: int) -> tuple[T, T]:
            table = self.loans[loan].table
            keys, values, _ = pages.read(Span(0, len(table) * size, 0, table), 0)
            return keys, values

        parts = [
            attend_lent(q[each.first : each.last], each, window, read)
            for each in queries
        ]
        outs, logs = zip(*parts, strict=True)
        return torch.cat(outs), torch.cat(logs)

    def fetch(self, loan: int) -> T:
        """Return the contents of the blocks that are lent as the loan number ``loan``, uint8 ``[blocks, bytes]``.

        Raises :class:`KeyError` for a loan that has ended.
        """
        size = self.engine.scheduler.pool.size
        return self.reader.read_blocks(self.loans[loan].table, size)

    def drop(self, loan: int) -> None:
        """End the loan number ``loan`` and free its blocks; do nothing if there is no such loan."""
        with self._lock:
            self._recalled.discard(loan)
            if ended := self.loans.pop(loan, None):
                self._offered += ended.table

    def drop_all(self, borrower: str) -> None:
        """End all loans to the engine named ``borrower``, which is gone, and free their blocks."""
        for loan in [
            loan for loan, of in [*self.loans.items()] if of.borrower == borrower
        ]:
            self.drop(loan)


class Borrower:
    """The borrower's side of loans: when the cache of ``engine`` is full, it moves the first blocks of its texts to
    other engines. ``lenders``: function that returns the other engines, the preferred one first. ``most``: number of
    blocks that all of them together can lend; the engine accepts requests that need up to this many blocks more than
    its own cache has.
    """

    def __init__(
        self, engine: Engine, lenders: Callable[[], Sequence[LendingEngine]], most: int
    ) -> None:
        self.engine, self.reader = engine, check_lending(engine)
        self.lenders = lenders
        self._numbers = count(-1, -1)
        scheduler = engine.scheduler
        scheduler.relief.append(self.relieve)
        scheduler.borrowable, scheduler.lendable = most, self.room
        engine.loans.append(self)

    def room(self) -> int:
        """Return how many cache blocks all lenders together offer now to this engine."""
        return sum(lender.room() for lender in self.lenders())

    def own_blocks(self, request: Request) -> list[int]:
        """Return the numbers of the cache blocks of ``request`` that can be moved to a lender, in the order of its
        tokens.

        They are the first full blocks that the request has in this engine's cache. The list ends before the first block
        that is not shared by exactly the requests that share the first one. It is empty if one of these requests cannot
        move blocks.
        """
        pool = self.engine.scheduler.pool
        away = lent_blocks(request)
        full = request.table[away : request.computed // pool.size]
        if not full or not _gives_blocks(request):
            return []
        sharers, own = self.sharers(request), list[int]()
        for at, block in enumerate(full, away):
            has = [at < each.computed // pool.size and each.table[at] == block for each in sharers]  # fmt: skip
            if not all(has) or pool.owners.get(block) != 1 + len(sharers):
                break
            own.append(block)
        return own

    def sharers(self, request: Request) -> list[Request]:
        """Return the other running requests that share the first block of ``request`` in this engine's cache. To move
        this block, all of them have to move it too.

        The list is empty if no other request shares the block, and also if one that does cannot move it.
        """
        scheduler = self.engine.scheduler
        away = lent_blocks(request)
        if scheduler.pool.owners.get(request.table[away]) == 1:
            return []  # most texts share nothing, and others need not be looked at
        others = [
            other
            for other in scheduler.running
            if other is not request
            and other.table[away : away + 1] == request.table[away : away + 1]
            and other.table[:away] == request.table[:away]
        ]
        stays = any(each in scheduler.due or not _gives_blocks(each) for each in others)
        return [] if stays else others

    def relieve(self) -> bool:
        """Move half of the longest text's blocks to a lender. Return whether any block was moved, and so is
        free now.
        """
        longest = self.longest
        if longest is None:
            return False
        return self.lend(longest, -(-len(self.own_blocks(longest)) // 2)) > 0

    @property
    def longest(self) -> Request | None:
        """The request with the most blocks that can be moved to a lender; None if there is none."""
        idle = [
            r
            for r in self.engine.scheduler.running
            if r not in self.engine.scheduler.due
        ]
        longest = max(idle, key=lambda r: len(self.own_blocks(r)), default=None)
        return longest if longest is not None and self.own_blocks(longest) else None

    def lend(
        self,
        request: Request,
        blocks: int,
        lenders: Sequence[LendingEngine] | None = None,
    ) -> int:
        """Move up to ``blocks`` of the first blocks of ``request`` in this engine's cache to one of ``lenders``. Return
        how many blocks were moved. ``lenders``: None means the lenders of this borrower (:attr:`lenders`).
        """
        own = self.own_blocks(request)[:blocks]
        for lender in self.lenders() if lenders is None else lenders:
            table = own[: lender.room()]
            if not table:
                continue
            try:
                loan = lender.take(self._contents(table))
            except (NoRoom, LenderLost):
                continue
            self.hand_over(request, table, lender, loan)
            return len(table)
        return 0

    def hand_over(
        self, request: Request, table: Sequence[int], lender: LendingEngine, loan: int
    ) -> None:
        """Record that the blocks in ``table``, the first ones of ``request`` in this engine's cache, now lie at
        ``lender`` as the loan number ``loan``. The request, and those that share the blocks, attend to them there from
        now on, and the blocks in this cache are freed.
        """
        pool = self.engine.scheduler.pool
        away = lent_blocks(request)
        aliens = [next(self._numbers) for _ in table]
        self.reader.lent |= dict.fromkeys(aliens, LentBlock(lender, loan))
        for each in (request, *self.sharers(request)):
            pool.hold(aliens)
            pool.release(table)
            each.table[away : away + len(table)] = aliens

    def bring_home(self, request: Request) -> None:
        """Fetch all cache blocks of ``request`` that lie at lenders back into this engine's cache. If there is no room
        for them, or a lender is lost, the request is queued again and its text recomputed.
        """
        scheduler, pool, lent = self.engine.scheduler, self.engine.scheduler.pool, self.reader.lent  # fmt: skip
        aliens = [block for block in request.table if block < 0]
        if not aliens:
            return
        if len(aliens) > pool.free:
            return scheduler.requeue(request)
        loans = [*dict.fromkeys(lent[block] for block in aliens)]
        try:
            contents = torch.cat([_lending(loan).fetch(loan.loan) for loan in loans])
        except LenderLost:
            return scheduler.requeue(request)
        table = [pool.take() for _ in aliens]
        self.reader.write_blocks(table, pool.size, contents)
        request.table[: len(aliens)] = table
        pool.release(aliens)

    def settle(self) -> None:
        """Fetch back the blocks of loans that lenders recall, and end the loans that no request uses any more. The
        engine calls this between two steps.
        """
        lent, owners = self.reader.lent, self.engine.scheduler.pool.lent
        loans = {*lent.values()}
        for lender in {id(each.lender): _lending(each) for each in loans}.values():
            for number in lender.recalled():
                for request in self._users(LentBlock(lender, number)):
                    self.bring_home(request)
        over = {block for block in lent if not owners[block]}
        for block in over:
            del lent[block], owners[block]
        for loan in loans - {*lent.values()}:
            _lending(loan).drop(loan.loan)

    def usage(self) -> LoanUsage:
        return LoanUsage(borrowed=len(self.reader.lent))

    def close(self) -> None:
        """Do nothing: the lenders end the loans when their connections end."""

    def give_up(self, lender: BlockLender) -> None:
        """Compute again all texts that have blocks at ``lender``, because ``lender`` can no longer be reached."""
        for loan in {*self.reader.lent.values()}:
            if loan.lender is lender:
                for request in self._users(loan):
                    self.engine.scheduler.requeue(request)

    def _users(self, loan: LentBlock) -> list[Request]:
        """Return the requests whose text begins with blocks of ``loan``."""
        numbers = {block for block, of in self.reader.lent.items() if of == loan}
        return [
            request
            for request in self.engine.scheduler.running
            if not numbers.isdisjoint(request.table)
        ]

    def _contents(self, table: Sequence[int]) -> T:
        return self.reader.read_blocks(table, self.engine.scheduler.pool.size)


def lent_blocks(request: Request) -> int:
    """Return how many cache blocks of ``request`` lie at lenders. They are the first ones of its table."""
    return bisect_left(request.table, True, key=lambda block: block >= 0)


def _gives_blocks(request: Request) -> bool:
    """Return whether blocks of ``request`` can be moved to a lender."""
    stays = request.context or request.pinned or request.kept
    return bool(request.runs) and not stays


def _lending(block: LentBlock) -> LendingEngine:
    lender: LendingEngine = block.lender  # type: ignore[assignment]
    return lender
