"""Beam search and majority vote: several texts for one prompt, of which one is wanted.

Beams are requests like others: they share the blocks of their common prefix, are computed in the same steps as other
requests, and a beam that continues in two ways is forked.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from math import inf

import torch

from weft.errors import WeftError
from weft.generate.backend import Hypothesis
from weft.generate.engine import Engine, check_prompt
from weft.generate.leader import Leader
from weft.generate.request import NOT_NUMBERS, Request, check_generations
from weft.generate.sampling import Sampling
from weft.models.numbers import wide

#: The exponent of the length penalty, unless it is given.
LENGTH_PENALTY = 0.2


@dataclass(eq=False)
class Beam(Request):
    """An unfinished text of a beam search, as a request to the engine. ``log_probability``: sum of the
    log-probabilities of its tokens.
    """

    log_probability: float = 0.0


def length_penalty(tokens: int, alpha: float) -> float:
    """Return ``((5 + tokens) / 6) ** alpha``, by which the log-probability of a text of ``tokens`` tokens is divided.

    ``tokens`` counts the token that ends the text. With ``alpha = 0`` the result is 1. This is the length penalty of
    GNMT (Wu et al. 2016, 1609.08144, equation 14). GNMT's coverage penalty is left out: it needs attention to a source
    text, which decoder-only models do not have.
    """
    return ((5 + tokens) / 6) ** alpha


def can_search(engine: Engine) -> bool:
    """Return whether ``engine`` takes beam searches: it is on one rank, a drafter guesses no tokens, and its cache
    policy, if any, lets texts share blocks.
    """
    policy = engine.scheduler.cache_policy
    alone = not isinstance(engine.reader, Leader) and engine.drafter is None
    return alone and not (policy and policy.remembers)


class Search:
    """A beam search of ``width`` beams after ``prompt``. A text ends after ``count`` tokens or at one of the ids
    ``stops``. ``alpha``: exponent of :func:`length_penalty`; a larger one favours longer texts. ``tenant``: whose
    cached prefixes the beams may share.

    ``prune``: a difference of log-probabilities; infinity: nothing is dropped. A token is dropped if its
    log-probability is this far below that of its beam's best token. A text is dropped if its score is this far below
    that of the best ended text.
    """

    def __init__(
        self, engine: Engine, prompt: Sequence[int], count: int, width: int, stops: Collection[int] = (),
        alpha: float = LENGTH_PENALTY, prune: float = inf, tenant: str = "",
    ) -> None:  # fmt: skip
        check_prompt(engine.model, prompt)
        self.engine, self.prompt, self.count, self.width = (
            engine,
            len(prompt),
            count,
            width,
        )
        self.stops, self.alpha, self.prune = frozenset(stops), alpha, prune
        self.ended: list[Hypothesis] = []
        most = len(prompt) + count - 1
        self.beams = [Beam(list(prompt), most, tenant=tenant, prompt=len(prompt))]

    def run(self) -> list[Hypothesis]:
        """Run the search to its end; other requests of the engine are also computed meanwhile. Return the best
        ``width`` finished texts, the best one first.
        """
        self.begin()
        try:
            while self.beams:
                self.engine.step()
                self.advance()
        finally:
            self.end()
        return self.best()

    def best(self) -> list[Hypothesis]:
        """Return the best ``width`` finished texts that were not pruned, in descending order of their scores."""
        kept = [ended for ended in self.ended if ended.score >= self.least]
        return sorted(kept, key=lambda ended: -ended.score)[: self.width]

    @property
    def least(self) -> float:
        """Smallest score (length-normalised log-probability) with which a text is not pruned: the score of the best
        ended text minus the search's ``prune``.
        """
        return max((ended.score for ended in self.ended), default=-inf) - self.prune

    def begin(self) -> None:
        """Schedule the first beam, which is the prompt. Call :meth:`advance` after each of the engine's following
        steps.
        """
        for beam in self.beams:
            self.engine.scheduler.add(beam)

    def end(self) -> None:
        """Drop all unfinished beams and free their cache blocks, because the search is complete or cancelled."""
        for beam in self.beams:
            self.engine.scheduler.remove(beam)
        self.beams.clear()

    def advance(self) -> None:
        """Extend all beams by a token, if the engine's last step has computed the logits of every beam; otherwise do
        nothing. When the search has ended, the list ``beams`` is empty.
        """
        scheduler = self.engine.scheduler
        read = [beam for beam in self.beams if beam.logits is not None]
        if len(read) == len(self.beams):
            self._extend()
        elif not any(request.wanted for request in scheduler.running):
            # there is no room for all of them at once: these make way for the others
            for beam in read:
                scheduler.remove(beam)

    def _extend(self) -> None:
        """Extend the beams by the ``width`` likeliest of all their next tokens."""
        # [beams, vocab]
        rows = torch.stack(
            [beam.logits for beam in self.beams if beam.logits is not None]
        )
        local = rows.to(wide(rows.dtype)).log_softmax(-1)
        if local.isnan().any():
            raise WeftError(NOT_NUMBERS)
        scores = local + local.new_tensor(
            [[beam.log_probability] for beam in self.beams]
        )
        scores = scores.masked_fill(
            local < local.amax(-1, keepdim=True) - self.prune, -inf
        ).flatten()
        best, places = scores.topk(min(len(scores), self.width * (1 + len(self.stops))))
        # of all beams, with the next one
        tokens = len(self.beams[0].ids) + 1 - self.prompt
        penalty = length_penalty(tokens, self.alpha)
        kept: list[tuple[Beam, int, float]] = []
        for chance, place in zip(best.tolist(), places.tolist(), strict=True):
            beam, token = self.beams[place // rows.shape[1]], place % rows.shape[1]
            if chance == -inf or len(kept) == self.width:
                break
            if token in self.stops:
                self.ended.append(
                    Hypothesis(
                        beam.ids[self.prompt :], chance, chance / penalty, "stop"
                    )
                )
            else:
                kept.append((beam, token, chance))
        if tokens == self.count:
            self.ended += [
                Hypothesis(
                    [*b.ids[self.prompt :], i], chance, chance / penalty, "length"
                )
                for b, i, chance in kept
            ]
            kept = []
        least = penalty * self.least
        self._continue([each for each in kept if each[2] >= least])

    def _continue(self, kept: Sequence[tuple[Beam, int, float]]) -> None:
        """Continue the beams in ``kept``: triples of a beam, its next token, and the text's log-probability."""
        scheduler, children = self.engine.scheduler, list[Beam]()
        for beam in self.beams:
            ways = [(token, chance) for parent, token, chance in kept if parent is beam]
            for token, chance in ways[1:]:
                children.append(
                    Beam(
                        [*beam.ids, token],
                        beam.most,
                        tenant=beam.tenant,
                        prompt=beam.prompt,
                        log_probability=chance,
                    )
                )
                scheduler.fork(beam, children[-1])
            if not ways:
                scheduler.remove(beam)
                continue
            token, beam.log_probability = ways[0]
            beam.ids.append(token)
            beam.logits = None
            children.append(beam)
            if not beam.runs:
                scheduler.add(beam)
        self.beams[:] = children


def vote(
    engine: Engine, prompt: Sequence[int], count: int, how: Sampling, n: int, answer: Callable[[list[int]], Hashable],
    stops: Collection[int] = (),
) -> tuple[Hashable, Counter[Hashable]]:  # fmt: skip
    """Generate ``n`` texts after ``prompt``, and return the most frequent answer and a count of every answer
    (self-consistency; Wang et al. 2022, 2203.11171). The most frequent answer is None if no text has one.

    ``count``: largest number of tokens of a text; ``how``: settings of sampling; ``stops``: ids that end a text.
    ``answer`` extracts the answer from the ids of a text, None if there is none. Texts that can no longer change the
    result are cancelled. Raises :class:`WeftError` if a text could not go on.
    """
    texts = engine.submit(prompt, count, how, stops, n)
    said, left = Counter[Hashable](), set(texts)
    try:
        while left:
            engine.step()
            check_generations(texts)
            for generation in [each for each in left if each.finished]:
                left.discard(generation)
                if (reply := answer(generation.written)) is not None:
                    said[reply] += 1
            (_, most), (_, second) = (*said.most_common(2), (None, 0), (None, 0))[:2]
            if most > second + len(left):
                break
    finally:
        for generation in left:
            engine.cancel(generation)
    return (said.most_common(1)[0][0] if said else None), said
