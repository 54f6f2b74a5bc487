"""Speculative decoding: drafts of a request's next tokens, all checked by the pass that computes the next token.

A draft is a path of tokens. The pass computes it behind the request's own tokens, and the sampler then chooses as it
would without drafts: at each position from the logits there, with the penalties and the grammar's state of the text so
far, and with the request's next random number. As long as it chooses the drafted token, the logits of the next position
are there too. So the text is the same, token by token, whatever is drafted; drafts only change the number of passes.
Several paths with a common beginning form a tree (SpecInfer, Miao et al. 2023, 2305.09781).

Drafts come from texts, at almost no cost: the continuation of an earlier occurrence of a request's last tokens (n-gram,
or prompt lookup), or the most frequent continuation in all requests' texts (suffix decoding, Oliaro et al. 2024,
2411.04975); or they come from a small model (``small-model``).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.generate.drafter import Drafter

if TYPE_CHECKING:
    from weft.generate.request import Generation

#: How many places of an n-gram are kept, the latest ones.
PLACES = 32

#: Most tokens of a path, most tokens of a text's end that are compared, and the least share of places that must go on
#: alike.
MOST, DEPTH, FLOOR = 16, 24, 0.1


class NgramIndex:
    """An index of all n-grams of ``least`` tokens in a text that grows at its end."""

    def __init__(self, least: int) -> None:
        self.least, self.ids = least, list[int]()
        self._ends: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def extend(self, ids: Sequence[int]) -> None:
        """Append ``ids`` to the text. The n-gram at the very end of the text cannot be found yet, as no token follows
        it.
        """
        start = max(self.least, len(self.ids))
        self.ids += ids
        for end in range(start, len(self.ids)):
            ends = self._ends[tuple(self.ids[end - self.least : end])]
            ends.append(end)
            del ends[:-PLACES]

    def find(self, tail: Sequence[int], depth: int) -> tuple[int, list[int]]:
        """Find the longest suffix of ``tail``, of at most ``depth`` tokens, that occurs in this text. Return its
        length, and the positions where its occurrences end, the latest first.
        """
        longest, ends = 0, list[int]()
        for end in reversed(self._ends.get(tuple(tail[-self.least :]), ())):
            length = self.least
            while (
                length < min(depth, end, len(tail))
                and self.ids[end - length - 1] == tail[-length - 1]
            ):
                length += 1
            if length > longest:
                longest, ends = length, []
            if length == longest:
                ends.append(end)
        return longest, ends

    def follow(
        self, ends: Sequence[int], path: list[int], count: int, floor: float
    ) -> list[int]:
        """Return ``path`` with further tokens, ``count`` tokens in all or fewer. Each further token is the one that
        follows most often in the indexed text.

        ``ends``: positions in the indexed text at which ``path`` occurs, each the index of the path's first token
        there. ``floor``: from 0 to 1; no token is added if fewer than this share of the occurrences in ``ends`` go on
        with it and all tokens added before it. An occurrence that reaches the end of the indexed text goes on with the
        tokens of ``path`` from their beginning.
        """
        text, chance, path = self.ids, 1.0, list(path)
        while len(path) < count:
            at = {end: end + len(path) for end in ends}
            next_ = {
                end: text[i] if i < len(text) else path[i - len(text)]
                for end, i in at.items()
            }
            token, places = Counter(next_.values()).most_common(1)[0]
            chance *= places / len(ends)
            if chance < floor:
                break
            path.append(token)
            ends = [end for end in ends if next_[end] == token]
        return path


@dataclass
class Trust:
    """Measures how well the recent drafts of one request did, and indexes the request's text. After wrong drafts the
    next drafts are fewer and shorter.

    Attributes:
        ``text``: index of the request's text.
        ``most``: largest number of tokens in a path of the next draft.
        ``guessed``: the last draft: the number of tokens that the text had before it, and the draft's paths.
        ``wrong``: number of drafts in a row, up to the last one, of which no token was right.
        ``pause``: number of coming steps for which no draft is made.
    """

    text: NgramIndex
    most: int = 4  # tokens of the next path
    # the last guess: behind how many tokens, which paths
    guessed: tuple[int, Sequence[Sequence[int]]] = (0, ())
    wrong: int = 0  # how many guesses in a row had no token right
    pause: int = 0  # steps without a guess

    def learn(self, ids: Sequence[int]) -> None:
        """Append the new tokens of the request to the index, and judge the last draft by them. ``ids``: the request's
        whole text.
        """
        self.text.extend(ids[len(self.text.ids) :])
        place, paths = self.guessed
        self.guessed, self.pause = (0, ()), max(0, self.pause - 1)
        if not paths:
            return
        right = max(
            n
            for path in paths
            for n in range(len(path) + 1)
            if ids[place : place + n] == path[:n]
        )
        self.wrong = 0 if right else self.wrong + 1
        self.pause = (1 << min(self.wrong, 6)) >> 1
        self.most = (
            min(MOST, 2 * self.most) if right == max(map(len, paths)) else right + 1
        )


class Lookup(Drafter):
    """Drafter that copies from earlier text: it finds where the last tokens of a request's text occurred before, and
    guesses that the same tokens follow.

    ``least``: number of tokens that must match at least. A path is no longer than the match. ``shared``: besides the
    request's own text, search this many last tokens that other requests of its tenant wrote. ``width``: largest number
    of paths per request; they begin with different tokens.
    """

    def __init__(self, least: int = 2, shared: int = 0, width: int = 1) -> None:
        self.least, self.shared, self.width = least, shared, width
        self._requests: dict[Generation, Trust] = {}
        self._others: dict[tuple[str, str], deque[NgramIndex]] = defaultdict(
            lambda: deque(maxlen=2)
        )

    def propose(self, requests: Sequence[Generation]) -> None:
        for gone in [
            request_known for request_known in self._requests if request_known.finished
        ]:
            self._keep(gone, self._requests.pop(gone))
        for request in requests:
            trust = self._requests.setdefault(request, Trust(NgramIndex(self.least)))
            trust.learn(request.ids)
            request.drafts = self._paths(request, trust) if not trust.pause else ()
            trust.guessed = len(request.ids), request.drafts

    def _paths(self, request: Generation, trust: Trust) -> list[list[int]]:
        tail, sources = (
            request.ids,
            [trust.text, *self._others[request.tenant, request.adapter]],
        )
        matches = [(*source.find(tail, DEPTH), source) for source in sources]
        length, ends, source = max(matches, key=lambda each: each[0])
        count = min(trust.most, length, request.most - len(tail))
        firsts = Counter(source.ids[end] for end in ends).most_common(self.width)
        return [
            source.follow(
                [end for end in ends if source.ids[end] == first], [first], count, FLOOR
            )
            for first, places in firsts
            if count > 0 and places >= FLOOR * len(ends)
        ]

    def _keep(self, request: Generation, trust: Trust) -> None:
        """Keep written tokens, to guess other requests' texts. The older half is dropped when there are too many."""
        if self.shared:
            kept = self._others[request.tenant, request.adapter]
            if not kept or len(kept[-1].ids) > self.shared // 2:
                kept.append(NgramIndex(self.least))
            kept[-1].extend(request.written)
