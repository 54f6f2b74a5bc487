"""Parts of a pass's tokens, and the order in which they compute, so that one computes while another's tokens travel.

A pass through layers under ``tp`` is, for each part, a sequence of turns. A layer has six of them: norm and start of a
gather; what comes before the last product of attention; this product and the start of its reduction; and the same three
of the feed-forward. A kind of overlap (``layout.overlap``) decides how tokens are cut into parts, and whose turn it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, pairwise
from typing import Any, NamedTuple, Protocol

from weft.refusal import Rule

#: Turns of a part in each half of a layer: entry, first products, last product.
HALF = 3


class TokenPart(NamedTuple):
    """Some tokens of a pass, which are computed together: the tokens ``first:last`` of each of the rows
    ``top:bottom``.
    """

    top: int
    bottom: int
    first: int
    last: int

    @property
    def size(self) -> int:
        """Number of tokens of the part, over all its rows."""
        return (self.bottom - self.top) * (self.last - self.first)


#: Yields the number of the part that takes the next turn, without end; parts that are done are passed over.
TurnOrder = Callable[[Sequence[TokenPart]], Iterator[int]]


#: Function that is called with a part before each of its turns.
Enter = Callable[[TokenPart], None]


@dataclass(frozen=True)
class Weave:
    """How the tokens of a pass are divided into parts, and how the parts take turns in computing. The transfers of one
    part then overlap with the computation of another.

    Attributes:
        ``parts``: the parts, which together have each token once. All rows are cut at the same tokens. Of parts of the
            same rows the one with the earlier tokens comes first.
        ``order``: function that takes the parts, and yields turn after turn the index of the part that computes.
        ``columns``: number of pieces in which the last product of attention and of a feed-forward is computed. The
            reduction of a piece travels while the next piece is computed.
    """

    parts: tuple[TokenPart, ...]
    order: TurnOrder
    columns: int = 1


#: What cannot be combined with parts that take turns.
WHOLE_PASSES: tuple[Rule, ...] = (
    Rule("overlap with compile", "layout train", lambda a: bool(a.train.compile),
         "layout.overlap = {0.layout.overlap!r} leaves layers where tokens travel, and train.compile compiles "
         "whole ones",
         "leave one of them out"),
    Rule("overlap with balance", "layout", lambda a: bool(a.layout.balance),
         "layout.overlap = {0.layout.overlap!r} cuts rows, and layout.balance = {0.layout.balance!r} spreads documents "
         "over ranks by itself", "leave one of them out"),
    Rule("overlap with a chosen sum", "layout", lambda a: bool(a.layout.sum),
         "layout.overlap = {0.layout.overlap!r} sums tokens in PyTorch's group of tp, and layout.sum = "
         "{0.layout.sum!r} in another way", "leave one of them out"),
)  # fmt: skip

#: What cannot be combined with cutting the rows of a training pass.
WHOLE_ROWS: tuple[Rule, ...] = (
    *WHOLE_PASSES,
    Rule("cut rows under cp", "layout", lambda a: a.layout.cp > 1,
         "layout.overlap = {0.layout.overlap!r} cuts rows of tokens, and cp={0.layout.cp} has cut them already",
         "use 'domino', which cuts between rows"),
    Rule("cut rows with experts", "layout shape", lambda a: bool(a.shape.mixtures),
         "layout.overlap = {0.layout.overlap!r} cuts rows of tokens, and the routers of model.experts count whole ones",
         "use 'domino', which cuts between rows"),
    Rule("cut rows with linear attention", "layout shape",
         lambda a: any(a.shape.mixer_of(i) != "softmax" for i in range(a.shape.layers)),
         "layout.overlap = {0.layout.overlap!r} cuts rows of tokens, and model.mixer = {0.shape.mixer!r} sums up whole "
         "ones", "use 'domino', which cuts between rows"),
)  # fmt: skip


@dataclass(frozen=True)
class PassTokens:
    """Describes the tokens of a pass on the ranks of ``tp``, for a kind of overlap that cuts them into parts.

    Attributes:
        ``rows``: number of rows.
        ``tokens``: number of tokens in a row, a multiple of ``unit``.
        ``unit``: number of ranks of ``tp``, over which the tokens of each part are divided equally.
        ``cuts_tokens``: whether a row may be cut. It may not if something reads whole rows, as attention over ``cp``
            does.
        ``asked``: number of parts that the recipe asks for; 0: the kind of overlap decides.
        ``learns``: whether backward follows.
    """

    rows: int
    tokens: int
    unit: int
    cuts_tokens: bool = True
    asked: int = 0
    learns: bool = False

    @property
    def whole(self) -> tuple[TokenPart, ...]:
        """All tokens of the pass as a single part, in a tuple of one element."""
        return (TokenPart(0, self.rows, 0, self.tokens),)

    def row_parts(self, shares: Sequence[float]) -> tuple[TokenPart, ...]:
        """Divide the rows, uncut, among parts in proportion to ``shares``, one number for each part, and return the
        parts. A part that would get no row is left out.
        """
        return tuple(
            TokenPart(top, bottom, 0, self.tokens)
            for top, bottom in _cut(self.rows, shares)
        )

    def token_parts(self, shares: Sequence[float]) -> tuple[TokenPart, ...]:
        """Cut the tokens of every row at the same places into parts in proportion to ``shares``, one number for each
        part, and return the parts. A part that would get no token is left out. If ``cuts_tokens`` is False, all tokens
        are a single part.
        """
        if not self.cuts_tokens:
            return self.whole
        cuts = _cut(self.tokens // self.unit, shares)
        return tuple(
            TokenPart(0, self.rows, a * self.unit, b * self.unit) for a, b in cuts
        )


def _cut(count: int, shares: Sequence[float]) -> list[tuple[int, int]]:
    """Ranges that cover ``count`` units in proportion to ``shares``, without the empty ones."""
    ends = [round(count * end / sum(shares)) for end in accumulate(shares, initial=0)]
    return [(a, b) for a, b in pairwise(ends) if b > a]


def even(number: int) -> tuple[float, ...]:
    """Return ``number`` shares of equal size: each is 1, and only the ratios between shares count."""
    return (1.0,) * number


def weaving(parts: Sequence[TokenPart]) -> Iterator[int]:
    """Yield the index of the part whose turn it is, turn after turn. Each part runs one turn behind the part before it
    (Domino, TokenWeave). With two parts, a part's reduction travels while the other part computes the first products
    of attention or feed-forward. Its gather travels while the other part computes the last product.
    """
    for ahead in range(1, len(parts)):
        yield from range(ahead)
    while True:
        yield from range(len(parts))


def by_phase(parts: Sequence[TokenPart]) -> Iterator[int]:
    """Yield the index of the part whose turn it is, turn after turn. Each part computes all products of attention or of
    a feed-forward at once (T3), and enters the next of the two after half of the other parts have computed. A part's
    reduction travels while that half computes, and its gather while the other half does.
    """
    number, behind = len(parts), max(1, len(parts) // 2)
    yield from range(number)
    for slot in count():
        yield from [slot % number] * (HALF - 1)
        if slot >= behind:
            yield (slot - behind) % number


class LayerRunner(Protocol):
    """Interface of objects that run layers in another way than one block after the other."""

    def run(
        self,
        model: Any,
        layers: Sequence[int],
        x: Any,
        rope: tuple[Any, ...],
        cu_seqlens: Any,
        seen: Any,
        enter: Enter | None,
    ) -> Any:
        """Run the blocks ``layers`` of ``model`` on ``x`` ``[batch, seq/tp, embed]``, and return the output of the
        last. The arguments after ``model`` are those of :meth:`weft.models.transformer.Transformer.run_blocks`.
        """


class Overlap:
    """Base class of kinds of overlap (``layout.overlap``): how tokens are cut into parts whose transfers overlap with
    computation. A call takes the tokens of a pass, and returns the parts and their turns. Every model has an instance
    of its own.
    """

    def __call__(self, tokens: PassTokens) -> Weave:
        """Decide how the parts of a pass take turns. The result must be the same on all ranks of ``tp`` and ``ep``."""
        raise NotImplementedError

    def awaits(self, tokens: PassTokens) -> bool:
        """Return whether the next pass over tokens like ``tokens`` is to be timed, so that :meth:`took` gets its
        seconds. By default no pass is.
        """
        return False

    def took(self, tokens: PassTokens, weave: Weave, seconds: float) -> None:
        """Receive the time of a pass over tokens like ``tokens``: the ``seconds`` on its slowest rank. ``weave``: how
        its parts took turns. By default nothing is done.
        """
