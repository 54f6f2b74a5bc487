"""Which engine lends how many cache blocks to which: greedy, by what the service then writes per second.

This is the placement of Infinite-LLM (Lin et al. 2024, 2401.02669). The ledger is what engines say of themselves with
every sign of life. An engine whose requests wait for blocks is a debtor; one with free blocks is a creditor. A loan
frees blocks of the debtor's longest text, so that texts that wait can begin. It costs both engines time in every step:
the debtor waits for partial attentions, and the creditor computes them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class EngineLedger:
    """State of an engine from which loans are chosen. With a loan an engine moves cache blocks of a text into the cache
    of another engine.

    Attributes:
        ``name``: the engine's name.
        ``free``: number of cache blocks that it offers to lend.
        ``texts``: number of texts that it writes in every step.
        ``keys``: number of cached tokens to which these texts attend.
        ``waiting``: number of texts that wait for blocks.
        ``blocks``: number of cache blocks that a waiting text needs, on average.
        ``longest``: number of blocks of its longest text that lie in its own cache.
        ``asked``: number of cached tokens in its own cache that belong to texts of other engines.
        ``borrows``: whether any of its texts has blocks at another engine.
    """

    name: str
    free: int
    texts: int
    keys: int
    waiting: int = 0
    blocks: int = 1
    longest: int = 0
    asked: int = 0
    borrows: bool = False


class StepSeconds(NamedTuple):
    """Model of the seconds of an engine step, as a sum of four terms.

    ``fixed``: seconds of every step. ``text``: seconds for each text. ``key``: seconds for each cached token that texts
    attend to. ``trips``: seconds for the messages to and from other engines, if any text has blocks there.
    """

    fixed: float
    text: float
    key: float
    trips: float


class LoanChoice(NamedTuple):
    """A loan of cache blocks: the engine ``debtor`` moves blocks of its longest text into the cache of the engine
    ``creditor``. ``blocks``: number of these blocks, the text's first ones in the debtor's cache. ``gain``: by how many
    tokens per second all engines together become faster.
    """

    debtor: str
    creditor: str
    blocks: int
    gain: float


def tokens_per_second(engine: EngineLedger, seconds: StepSeconds) -> float:
    """Return how many tokens ``engine`` writes per second: one per text and step. ``seconds``: model of the seconds of
    a step.
    """
    step = (
        seconds.fixed
        + seconds.text * engine.texts
        + seconds.key * (engine.keys + engine.asked)
        + seconds.trips * engine.borrows
    )
    return engine.texts / step if engine.texts else 0.0


def choose_loans(
    engines: Sequence[EngineLedger], size: int, seconds: StepSeconds
) -> list[LoanChoice]:
    """Choose loans of cache blocks between ``engines`` that let all engines together write more tokens per second.

    The loans are chosen one after another. Each is the loan with the largest gain, given the loans chosen before it.
    The choice ends when no further loan gains anything, so the list may be empty. ``engines``: what is known of each
    engine; ``size``: number of tokens of a cache block; ``seconds``: model of the seconds of an engine step.
    """
    ledger = {engine.name: engine for engine in engines}
    chosen: list[LoanChoice] = []
    while len(chosen) < len(engines) ** 2:
        best = max(
            _loans(ledger, size, seconds), key=lambda loan: loan.gain, default=None
        )
        if best is None or best.gain <= 0:
            return chosen
        chosen.append(best)
        ledger |= _after(ledger[best.debtor], ledger[best.creditor], best.blocks, size)
    return chosen


def _loans(
    ledger: dict[str, EngineLedger], size: int, seconds: StepSeconds
) -> Iterator[LoanChoice]:
    """Yield all loans of blocks for whole waiting texts, with their gains."""
    rates = {name: tokens_per_second(e, seconds) for name, e in ledger.items()}
    for debtor in ledger.values():
        for creditor in ledger.values():
            most = min(debtor.longest, creditor.free)
            if debtor.name == creditor.name or not debtor.waiting:
                continue
            for texts in range(1, debtor.waiting + 1):
                blocks = texts * debtor.blocks - debtor.free
                if not 0 < blocks <= most:
                    continue
                after = _after(debtor, creditor, blocks, size)
                gain = sum(
                    tokens_per_second(engine, seconds) - rates[name]
                    for name, engine in after.items()
                )
                yield LoanChoice(debtor.name, creditor.name, blocks, gain)


def _after(
    debtor: EngineLedger, creditor: EngineLedger, blocks: int, size: int
) -> dict[str, EngineLedger]:
    """Return what the ledger holds of both engines after a loan, when the texts that then fit have begun."""
    begun = min(debtor.waiting, (debtor.free + blocks) // debtor.blocks)
    moved = blocks * size
    return {
        debtor.name: replace(
            debtor,
            free=debtor.free + blocks - begun * debtor.blocks,
            texts=debtor.texts + begun,
            keys=debtor.keys - moved + begun * debtor.blocks * size,
            waiting=debtor.waiting - begun,
            longest=debtor.longest - blocks,
            borrows=True,
        ),
        creditor.name: replace(
            creditor, free=creditor.free - blocks, asked=creditor.asked + moved
        ),
    }
