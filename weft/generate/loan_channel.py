"""Loans of cache blocks between engines of different processes or hosts, over a channel of their endpoints.

The borrower dials two connections. Over one it lends, fetches and drops blocks; over the other go the queries of every
layer, and partial attentions come back. The lender answers both in threads of their own, and never in its engine's.
"""

import secrets
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import count
from typing import Any

import torch

from weft.generate.block_contents import tensor_bytes, tensor_of
from weft.generate.lending import LoanOffice, NoRoom
from weft.models.borrowed_keys import LenderLost, LentQuery, LoanPart, Partial
from weft.models.numbers import wide
from weft.net.endpoint import Address, Channel, Endpoint
from weft.net.wire import Frame, Head, SealedConnection

T = torch.Tensor

#: Name of the channel.
LOANS = "loans"

#: Seconds within which a lender connects, and within which it answers.
CONNECT_S, ANSWER_S = 2.0, 5.0


def open_loans(endpoint: Endpoint, secret: str, office: LoanOffice) -> Channel:
    """Open a channel of ``endpoint`` over which other engines borrow cache blocks of this engine, and return it.

    ``secret``: secret that a borrower must know. ``office``: lends the blocks.
    """
    return endpoint.open(LOANS, secret, lambda c: serve_loans(office, c))


def serve_loans(office: LoanOffice, connection: SealedConnection) -> None:
    """Answer an engine that borrows from ``office``, until that engine closes ``connection``. Then all its
    loans end.
    """
    borrower = str(connection.hello.get("borrower", ""))
    try:
        while True:
            connection.send(*_answer(office, borrower, connection.receive()))
    except OSError:
        pass
    finally:
        office.drop_all(borrower)
        connection.close()


def _answer(
    office: LoanOffice, borrower: str, frame: Frame
) -> tuple[Head, list[memoryview]]:
    head, payload = frame
    answer: Head = {}
    back: list[memoryview] = []
    try:
        match head.get("do"):
            case "room":
                answer["room"] = office.room()
            case "take":
                contents = tensor_of(payload, torch.uint8, (int(head["blocks"]), -1))
                answer["loan"] = office.take(contents, borrower)
            case "fetch":
                contents = office.fetch(int(head["loan"]))
                answer["blocks"], back = len(contents), [tensor_bytes(contents)]
            case "drop":
                office.drop(int(head["loan"]))
            case "attend":
                out, lse = _attend(office, head, payload)
                back = [tensor_bytes(out), tensor_bytes(lse)]
            case other:
                answer["error"] = f"a lender does not know {other!r}"
    except NoRoom as error:
        answer["full"] = str(error)
    except (KeyError, ValueError, TypeError, IndexError, RuntimeError) as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    always = {"recalled": office.recalled(borrower), "number": head.get("number")}
    return answer | always, back


def _attend(office: LoanOffice, head: Head, payload: memoryview) -> Partial:
    pages = office.reader.pages[int(head["layer"])]
    assert pages.store is not None
    q = tensor_of(payload, pages.store.dtype, head["shape"]).to(pages.store.device)
    queries = [
        LentQuery(first, last, past, [LoanPart(*part) for part in parts])
        for first, last, past, parts in head["queries"]
    ]
    out, lse = office.attend(int(head["layer"]), queries, q, int(head["window"]))
    return out.to(wide(q.dtype)).cpu(), lse.cpu()


class RemoteLender:
    """A lender in another process, which is dialled at ``address`` by ``channel``. ``name``: its name in error
    messages.

    Attributes:
        ``lost``: whether the lender has failed to answer; it is never asked again.
        ``moved``: bytes of queries and partial attentions so far.
        ``sent``: bytes of cache blocks so far.
    """

    def __init__(self, channel: Channel, address: Address, name: str) -> None:
        self.channel, self.address, self.name = channel, address, name
        self.borrower = secrets.token_hex(8)
        self.lost = False
        self.moved = self.sent = 0
        self._recalled: list[int] = []
        self._numbers = count()

    @cached_property
    def _control(self) -> SealedConnection:
        return self._dial()

    @cached_property
    def _queries(self) -> SealedConnection:
        return self._dial()

    def room(self) -> int:
        """Return how many blocks the lender offers to lend now: 0 if it is lost."""
        try:
            return 0 if self.lost else int(self._call({"do": "room"}).head["room"])
        except LenderLost:
            return 0

    def recalled(self) -> list[int]:
        """Return the numbers of the loans that the lender wants back, as its last answer said."""
        return self._recalled

    def take(self, contents: T) -> int:
        """Move the cache blocks ``contents``, uint8 ``[blocks, bytes]``, to free blocks of the lender. Return the
        number of this loan.

        Raises :class:`NoRoom` if the lender has too few free blocks, and :class:`LenderLost`.
        """
        answer = self._call(
            {"do": "take", "blocks": len(contents)}, [tensor_bytes(contents)]
        )
        if "full" in answer.head:
            raise NoRoom(answer.head["full"])
        self.sent += contents.nbytes
        return int(answer.head["loan"])

    def fetch(self, loan: int) -> T:
        """Return the cache blocks that this engine stored in the lender's memory under the number ``loan``, uint8
        ``[blocks, bytes]``. Raises :class:`LenderLost` if the lender does not answer.
        """
        head, payload = self._call({"do": "fetch", "loan": loan})
        self.sent += len(payload)
        return tensor_of(payload, torch.uint8, (int(head["blocks"]), -1))

    def drop(self, loan: int) -> None:
        """End the loan number ``loan``. Nothing happens if the lender is lost."""
        if not self.lost:
            try:
                self._call({"do": "drop", "loan": loan})
            except LenderLost:
                return

    def ask(
        self, layer: int, queries: Sequence[LentQuery], q: T, window: int
    ) -> Callable[[], Partial]:
        """Send the queries ``q`` ``[queries, heads, width]`` of ``layer`` to the lender. Return a function that waits
        for their attention to the borrowed blocks.

        ``queries``: for each text, which rows of ``q`` are its queries, and to which loans they attend. ``window``:
        number of tokens that a token sees, itself included; 0: all.
        """
        head = {
            "do": "attend",
            "number": next(self._numbers),
            "layer": layer,
            "queries": queries,
            "window": window,
            "shape": [*q.shape],
        }
        self._send(lambda: self._queries, head, [tensor_bytes(q.cpu())])

        def partial() -> Partial:
            answer = self._receive(lambda: self._queries)
            # a pass that lost another lender has left answers unread
            while answer.head["number"] != head["number"]:
                answer = self._receive(lambda: self._queries)
            payload = answer.payload
            dtype = wide(q.dtype)
            split = q.numel() * dtype.itemsize
            self.moved += q.nbytes + len(payload)
            out = tensor_of(payload[:split], dtype, q.shape)
            return out, tensor_of(payload[split:], dtype, q.shape[:2])

        return partial

    def close(self) -> None:
        """Close the connections to the lender, which ends all loans."""
        self.lost = True
        for name in ("_control", "_queries"):
            if name in self.__dict__:
                self.__dict__[name].close()

    def _dial(self) -> SealedConnection:
        hello: dict[str, Any] = {"borrower": self.borrower}
        return self.channel.dial(self.address, hello, CONNECT_S, ANSWER_S, LOANS)

    def _call(self, head: Head, payload: Sequence[memoryview] = ()) -> Frame:
        self._send(lambda: self._control, head, payload)
        return self._receive(lambda: self._control)

    def _send(
        self, connection: Callable[[], SealedConnection], head: Head, payload: Sequence[memoryview],
    ) -> None:  # fmt: skip
        if self.lost:
            raise LenderLost(self, f"engine {self.name}, which holds blocks, is lost")
        try:
            connection().send(head, payload)
        except OSError as error:
            raise self._lose(error) from error

    def _receive(self, connection: Callable[[], SealedConnection]) -> Frame:
        try:
            answer = connection().receive(limit=ANSWER_S)
        except OSError as error:
            raise self._lose(error) from error
        if said := answer.head.get("error"):
            raise self._lose(ValueError(said))
        self._recalled = [int(loan) for loan in answer.head.get("recalled", ())]
        return answer

    def _lose(self, error: Exception) -> LenderLost:
        self.close()
        return LenderLost(
            self, f"engine {self.name}, which holds blocks, is lost: {error}"
        )
