"""The loans of an engine in a cluster: it lends blocks to the engines that its router names, and borrows from them."""

import time
from collections import deque
from collections.abc import Sequence
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from weft.generate.engine import Engine
from weft.generate.lending import RESERVE, Borrower, LoanOffice
from weft.generate.loan_channel import LOANS, RemoteLender, open_loans
from weft.generate.step_curve import nonnegative_rates
from weft.net.endpoint import Endpoint

#: Steps before the seconds of a step are fitted, and seconds between two fits.
FIT, FIT_S = 32, 2.0


class LenderAddress(NamedTuple):
    """Address at which an engine takes cache blocks of other engines into its own cache.

    Attributes:
        ``name``: the engine's name.
        ``instance``: random text that no other process has.
        ``host``, ``port``: where the engine listens for connections of other engines.
        ``blocks``: number of the engine's cache blocks.
    """

    name: str
    instance: str
    host: str
    port: int
    blocks: int


def lendable_blocks(blocks: int) -> int:
    """Return the largest number of cache blocks that an engine with ``blocks`` blocks may lend."""
    return blocks - int(RESERVE * blocks)


class EngineLoans:
    """Lends free cache blocks of ``engine`` to other engines for their texts, and borrows free blocks of other engines
    for texts of ``engine``. Create it before the engine's thread begins. ``endpoint``: address at which other engines
    reach this one. ``secret``: known to all engines of the cluster.
    """

    def __init__(self, engine: Engine, endpoint: Endpoint, secret: str) -> None:
        self.engine = engine
        self.office = LoanOffice(engine)
        self.borrower = Borrower(engine, self._by_room, 0)
        self._lenders: dict[LenderAddress, RemoteLender] = {}
        self._steps: deque[tuple[tuple[float, ...], float]] = deque(maxlen=256)
        self._seconds: Sequence[float] = ()
        self._fit_again = 0.0
        self._lock = Lock()
        self._own = open_loans(endpoint, secret, self.office)
        self._channel = endpoint.join(LOANS, secret)

    def meet(self, addresses: Sequence[LenderAddress]) -> None:
        """Borrow only from the engines at ``addresses`` from now on. Texts that have blocks at any other engine are
        recomputed.
        """
        with self._lock:
            for gone in self._lenders.keys() - {*addresses}:
                self._lenders.pop(gone).close()
            for new in {*addresses} - self._lenders.keys():
                place = (new.host, new.port)
                self._lenders[new] = RemoteLender(self._channel, place, new.name)
        lent = sum(lendable_blocks(each.blocks) for each in addresses)
        self.engine.scheduler.borrowable = lent

    def lend(self, name: str, blocks: int) -> None:
        """Move up to ``blocks`` blocks of this engine's longest text into the cache of the engine called ``name``. The
        engine's thread calls this.
        """
        with self._lock:
            lenders = [each for at, each in self._lenders.items() if at.name == name]
        longest = self.borrower.longest
        if longest is not None:
            self.borrower.lend(longest, blocks, lenders)

    def note_step(self, seconds: float) -> None:
        """Note that the step that has just ended took ``seconds``. The engine's thread calls this."""
        running = self.engine.scheduler.running
        if running:
            keys = sum(request.computed for request in running)
            borrows = bool(self.borrower.usage().borrowed)
            self._steps.append(((1.0, len(running), keys, borrows), seconds))

    def beat(self) -> dict[str, Any]:
        """Return by name the fields ``keys``, ``longest`` and ``seconds`` of the engine's next sign of life, a
        :class:`weft.cluster.cluster_messages.EngineBeat`.
        """
        running = list(self.engine.scheduler.running)
        blocks = [len(self.borrower.own_blocks(request)) for request in running]
        return {
            "keys": sum(request.computed for request in running),
            "longest": max(blocks, default=0),
            "seconds": self._fitted(),
        }

    def _fitted(self) -> Sequence[float]:
        """Return the fields of :class:`StepSeconds` that fit the last steps best, none before there are enough."""
        if len(self._steps) < FIT:
            return ()
        if time.monotonic() >= self._fit_again:
            work, seconds = zip(*list(self._steps), strict=True)
            rates = nonnegative_rates(np.array(work), np.array(seconds))
            self._seconds = [float(rate) for rate in rates]
            self._fit_again = time.monotonic() + FIT_S
        return self._seconds

    def recall_all(self) -> None:
        """Ask other engines to fetch back all cache blocks of theirs that this engine holds, because this engine is to
        end.
        """
        self.office.recall_all()

    def close(self) -> None:
        """End all loans: of other engines' blocks that lie here, and of this engine's blocks that lie at
        other engines.
        """
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
