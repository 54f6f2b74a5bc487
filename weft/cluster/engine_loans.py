"""The loans of an engine in a cluster: it lends blocks to the engines that its router names, and borrows from them."""

from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

from weft.generate.engine import Engine
from weft.generate.lending import RESERVE, Borrower, LoanOffice
from weft.generate.loan_channel import LOANS, RemoteLender, open_loans
from weft.net.endpoint import Endpoint


class LenderAddress(NamedTuple):
    """Where an engine accepts loans.

    Attributes:
        ``name``: the engine's name.
        ``instance``: random text that no other process has.
        ``host``, ``port``: address of its endpoint.
        ``blocks``: cache blocks of the engine.
    """

    name: str
    instance: str
    host: str
    port: int
    blocks: int


def lendable_blocks(blocks: int) -> int:
    """Return how many of an engine's ``blocks`` cache blocks it may lend at most."""
    return blocks - int(RESERVE * blocks)


class EngineLoans:
    """Lends cache blocks of ``engine``, and borrows, through the channel :data:`LOANS` of ``endpoint``.

    All engines of the cluster know ``secret``. Create it before the engine's thread begins.
    """

    def __init__(self, engine: Engine, endpoint: Endpoint, secret: str) -> None:
        self.engine = engine
        self.office = LoanOffice(engine)
        self.borrower = Borrower(engine, self._by_room, 0)
        self._lenders: dict[LenderAddress, RemoteLender] = {}
        self._lock = Lock()
        self._own = open_loans(endpoint, secret, self.office)
        self._channel = endpoint.join(LOANS, secret)

    def meet(self, addresses: Sequence[LenderAddress]) -> None:
        """Borrow from the engines at ``addresses`` from now on, and from no others.

        Texts with blocks at an engine that is not among them are computed again.
        """
        with self._lock:
            for gone in self._lenders.keys() - {*addresses}:
                self._lenders.pop(gone).close()
            for new in {*addresses} - self._lenders.keys():
                place = (new.host, new.port)
                self._lenders[new] = RemoteLender(self._channel, place, new.name)
        lent = sum(lendable_blocks(each.blocks) for each in addresses)
        self.engine.scheduler.borrowable = lent

    def recall_all(self) -> None:
        """Ask for all loans back, as this engine is to end."""
        self.office.recall_all()

    def close(self) -> None:
        """End all loans, here and elsewhere."""
        self.meet(())
        self._own.close()
        self._channel.close()

    def _by_room(self) -> list[RemoteLender]:
        """Return the lenders that offer any blocks, the one that offers most first."""
        with self._lock:
            lenders = [*self._lenders.values()]
        rooms = {lender: lender.room() for lender in lenders if not lender.lost}
        return sorted(
            (each for each, room in rooms.items() if room), key=lambda e: -rooms[e]
        )
