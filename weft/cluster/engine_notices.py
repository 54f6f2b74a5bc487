"""What a router tells its engines about each other: lenders of cache blocks, memories of hosts, loans to give."""

from collections.abc import Sequence

import numpy as np

from weft.cluster.engine_link import EngineLink
from weft.cluster.engine_loans import lendable_blocks
from weft.cluster.loan_choice import StepSeconds, choose_loans


def tell_lenders(links: Sequence[EngineLink]) -> None:
    """Tell every engine of ``links`` that lends from which others it may borrow."""
    able = [link for link in links if link.about.loans]
    lenders = {
        link.name: [link.name, link.about.instance, *link.about.loans, link.blocks]
        for link in able
        if not link.draining
    }
    for link in able:
        others = [each for name, each in lenders.items() if name != link.name]
        blocks = sum(lendable_blocks(each[-1]) for each in others)
        link.borrowable = blocks * link.about.block
        link.outbox.put({"kind": "lenders", "lenders": others})


def order_loans(able: Sequence[EngineLink]) -> None:
    """Have engines whose requests wait for blocks lend some, where the service then writes more per second.

    ``able``: the engines that take requests.
    """
    links = {link.name: link for link in able if link.about.loans}
    known = [link.beat.seconds for link in links.values() if link.beat.seconds]
    if not known or not any(link.beat.load.waiting for link in links.values()):
        return
    seconds = StepSeconds(*np.mean(known, 0).tolist())
    ledgers = [link.ledger() for link in links.values()]
    size = next(iter(links.values())).about.block
    for loan in choose_loans(ledgers, size, seconds):
        message = {"kind": "lend", "to": loan.creditor, "blocks": loan.blocks}
        links[loan.debtor].outbox.put(message)


def tell_memories(links: Sequence[EngineLink]) -> bool:
    """Tell every engine of ``links`` which others give blocks of their host memory, and where cache engines are.

    Returns whether there are cache engines.
    """
    giving = [link for link in links if link.about.memory]
    stocks = [link for link in giving if link.role == "cache" and not link.draining]
    caches = [[*link.about.memory] for link in stocks]
    for link in links:
        if link.role != "cache":
            others = [
                [*other.about.memory]
                for other in giving
                if other is not link and other.role != "cache"
            ]
            message = {"kind": "memories", "memories": others, "caches": caches}
            link.outbox.put(message)
    return bool(caches)
