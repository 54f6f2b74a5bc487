"""Speculative decoding: guesses of what a request will write, all checked by the pass that computes its next token.

A guess is a path of tokens. The pass computes it behind the request's own tokens, and the sampler then chooses as it
would have done without: at every position from the logits there, with penalties and grammar for what is written by
then, with the request's next random number. While the choice is the guessed token, the logits behind it are there too.
So what is written is the same, token by token, whatever is guessed; guesses only change how many passes it takes.
Several paths that part somewhere are a tree (SpecInfer, Miao et al. 2023, 2305.09781); the sampler follows one of them.

Guesses come from texts, at no cost: what followed when a request's last tokens stood there before (n-gram, or prompt
lookup), or what mostly followed them in all requests' texts (suffix decoding, Oliaro et al. 2024, 2411.04975); or from
a small model (:mod:`weft.generate.draft`).
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.generate.request import Generation

#: Places that are looked at for each run of tokens, the latest ones.
PLACES = 32

#: Tokens of a path at most, tokens of a text's end that are compared, and the least share of places that go on alike.
MOST, DEPTH, FLOOR = 16, 24, 0.1


class Drafter(Protocol):
    """Sets ``drafts``, a list of paths, of requests that are about to compute one token.

    A path that was drawn at random is the only one, and ``odds`` are set too.
    """

    def propose(self, requests: Sequence[Generation]) -> None: ...


class NgramIndex:
    """Where every run of ``least`` tokens stands in a text that grows at its end."""

    def __init__(self, least: int) -> None:
        self.least, self.ids = least, list[int]()
        self._ends: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def extend(self, ids: Sequence[int]) -> None:
        """Add ``ids``. A run is known once a token stands behind it."""
        start = max(self.least, len(self.ids))
        self.ids += ids
        for end in range(start, len(self.ids)):
            ends = self._ends[tuple(self.ids[end - self.least : end])]
            ends.append(end)
            del ends[:-PLACES]

    def find(self, tail: Sequence[int], depth: int) -> tuple[int, list[int]]:
        """How many tokens of the end of ``tail`` stand here, up to ``depth``, and behind which places, latest first."""
        longest, ends = 0, list[int]()
        for end in reversed(self._ends.get(tuple(tail[-self.least :]), ())):
            length = self.least
            while length < min(depth, end, len(tail)) and self.ids[end - length - 1] == tail[-length - 1]:
                length += 1
            if length > longest:
                longest, ends = length, []
            if length == longest:
                ends.append(end)
        return longest, ends

    def follow(self, ends: Sequence[int], path: list[int], count: int, floor: float) -> list[int]:
        """``path``, which stands behind all ``ends``, and what mostly follows: up to ``count`` tokens in all.

        It ends where less than a share ``floor`` of the places has it. Behind the text's end it is the path again.
        """
        text, chance, path = self.ids, 1.0, list(path)
        while len(path) < count:
            at = {end: end + len(path) for end in ends}
            next_ = {end: text[i] if i < len(text) else path[i - len(text)] for end, i in at.items()}
            token, places = Counter(next_.values()).most_common(1)[0]
            chance *= places / len(ends)
            if chance < floor:
                break
            path.append(token)
            ends = [end for end in ends if next_[end] == token]
        return path


@dataclass
class Trust:
    """A request's text and how well it was guessed: rarely right, seldom guessed."""

    text: NgramIndex
    most: int = 4  # tokens of the next path
    guessed: tuple[int, Sequence[Sequence[int]]] = (0, ())  # behind how many tokens, what
    wrong: int = 0  # times in a row that nothing was right
    pause: int = 0  # steps without a guess

    def learn(self, ids: Sequence[int]) -> None:
        """Look at what was written, and judge the last guess by it."""
        self.text.extend(ids[len(self.text.ids) :])
        place, paths = self.guessed
        self.guessed, self.pause = (0, ()), max(0, self.pause - 1)
        if not paths:
            return
        right = max(n for path in paths for n in range(len(path) + 1) if ids[place : place + n] == path[:n])
        self.wrong = 0 if right else self.wrong + 1
        self.pause = (1 << min(self.wrong, 6)) >> 1
        self.most = min(MOST, 2 * self.most) if right == max(map(len, paths)) else right + 1


class Lookup:
    """Guesses from texts: a request's own, and the last ``shared`` tokens that other requests of its tenant wrote.

    Paths have no more tokens than the end of the request's text that stands where they come from, which has ``least``
    at least. ``width``: paths that begin with different tokens.
    """

    def __init__(self, least: int = 2, shared: int = 0, width: int = 1) -> None:
        self.least, self.shared, self.width = least, shared, width
        self._requests: dict[Generation, Trust] = {}
        self._others: dict[tuple[str, str], deque[NgramIndex]] = defaultdict(lambda: deque(maxlen=2))

    def propose(self, requests: Sequence[Generation]) -> None:
        for gone in [one for one in self._requests if one.finished]:
            self._keep(gone, self._requests.pop(gone))
        for request in requests:
            trust = self._requests.setdefault(request, Trust(NgramIndex(self.least)))
            trust.learn(request.ids)
            request.drafts = self._paths(request, trust) if not trust.pause else ()
            trust.guessed = len(request.ids), request.drafts

    def _paths(self, request: Generation, trust: Trust) -> list[list[int]]:
        tail, sources = request.ids, [trust.text, *self._others[request.tenant, request.adapter]]
        found = [(*source.find(tail, DEPTH), source) for source in sources]
        length, ends, source = max(found, key=lambda each: each[0])
        count = min(trust.most, length, request.most - len(tail))
        firsts = Counter(source.ids[end] for end in ends).most_common(self.width)
        return [
            source.follow([end for end in ends if source.ids[end] == first], [first], count, FLOOR)
            for first, places in firsts
            if count > 0 and places >= FLOOR * len(ends)
        ]

    def _keep(self, request: Generation, trust: Trust) -> None:
        """What was written may help others. The older half is forgotten where there is too much."""
        if self.shared:
            kept = self._others[request.tenant, request.adapter]
            if not kept or len(kept[-1].ids) > self.shared // 2:
                kept.append(NgramIndex(self.least))
            kept[-1].extend(request.written)
