"""Writes the tokens that one forward pass allows: the next one of every text, and further ones where guesses are right.

All texts get their next token in one call. Those whose token is one that was guessed have logits behind it too, and
get another one in the next round.
"""

from collections.abc import Sequence

import torch

from weft.generate.guessed_tokens import Guess, choose_token, odds
from weft.generate.request import NOT_NUMBERS, Branch, Generation, Written
from weft.generate.row_sampling import (
    NO_TOKEN,
    TextState,
    choose_tokens,
    logit_rows,
    row_log_probabilities,
)

T = torch.Tensor


class SampledText:
    """A text for which tokens are sampled from the logits of a pass. The pass has computed a row of logits at the
    text's last token, and one at each guessed token of the request's branches. A row predicts the token that follows.

    Attributes:
        ``generation``: the request.
        ``row``: index of the row of logits from which the next token is sampled.
        ``right``: number of tokens sampled so far that a branch had guessed.
        ``best``: the branch that begins with these tokens; None: no guess was right.
    """

    def __init__(self, generation: Generation, row: int) -> None:
        self.generation, self.row, self.right = generation, row, 0
        self.best: Branch | None = None
        self._guesses = [
            Guess(*each)
            for branch in generation.branches[:1]
            for each in zip(branch.path, generation.odds, strict=False)
        ]
        # branches that may be right, and the rows behind their first tokens
        self._live: list[tuple[Branch, int]] = []
        for branch in generation.branches:
            self._live.append((branch, row + 1))
            row += len(branch.path)

    @property
    def guess(self) -> Guess | None:
        """The next token that a drafter has sampled, with its probabilities; None if there is none."""
        at = self.right
        return self._guesses[at] if at < len(self._guesses) else None

    def follow(self, token: int) -> bool:
        """Continue after ``token``, which has been sampled. Return True if a branch has guessed this token: the pass
        then has a row of logits from which the next token can be sampled.
        """
        self._live = [
            (branch, first)
            for branch, first in self._live
            if branch.path[self.right : self.right + 1] == [token]
        ]
        if self.generation.finished or not self._live:
            return False
        self.best, first = self._live[0]
        self.row = first + self.right
        self.right += 1
        return True


def write_next_tokens(logits: T, texts: Sequence[SampledText]) -> list[Written]:
    """Sample the next tokens of ``texts`` from ``logits`` ``[rows, vocab]`` and append them, several to a text whose
    guesses were right.

    Returns what has been written, the tokens of each text in order.
    """
    written: list[Written] = []
    going = list(texts)
    while going:
        states = [text.generation.state() for text in going]
        tokens = next_tokens(logits, going, states)
        probabilities = said_of(logits, going, tokens)
        for text, state, token in zip(going, states, tokens, strict=True):
            generation = text.generation
            if token == NO_TOKEN or generation.failure:
                written.append(generation.fail(NOT_NUMBERS))
                continue
            if generation.chances is not None and token not in generation.stops:
                generation.chances.append(odds(logits[text.row], state))
            written.append(generation.append(token, probabilities.get(text)))
        ahead = zip(going, tokens, strict=True)
        going = [text for text, token in ahead if text.follow(token)]
    return written


def next_tokens(
    logits: T, texts: Sequence[SampledText], states: Sequence[TextState]
) -> list[int]:
    """Sample the next token of each of ``texts``, and return their ids. ``logits``: ``[rows, vocab]``; a text's row is
    :attr:`SampledText.row`. ``states``: settings of each text. Texts without a sampled guess of a drafter are sampled
    together in one call.
    """
    tokens = [0] * len(texts)
    together: list[int] = []
    for i, text in enumerate(texts):
        guess, numbers = text.guess, text.generation.numbers
        if guess is not None and states[i].how.temperature:
            tokens[i] = choose_token(logits[text.row], states[i], numbers, guess)
        else:
            together.append(i)
    if together:
        rows = [texts[i].row for i in together]
        drawn = [
            states[i]._replace(number=texts[i].generation.numbers.random())
            if states[i].how.temperature
            else states[i]
            for i in together
        ]
        chosen = choose_tokens(logit_rows(logits, rows), drawn)
        for i, token in zip(together, chosen, strict=True):
            tokens[i] = token
    return tokens


def said_of(
    logits: T, texts: Sequence[SampledText], tokens: Sequence[int]
) -> dict[SampledText, tuple[float, dict[int, float]]]:
    """Return, for each text that keeps log-probabilities, the log-probability of its token and those of the likeliest
    tokens by id. ``tokens``: the token of each of ``texts``, which may be a stop token. ``logits``: one row for each
    text.
    """
    asked = [
        (text, token, text.generation.top)
        for text, token in zip(texts, tokens, strict=True)
        if text.generation.top is not None and token != NO_TOKEN
    ]
    if not asked:
        return {}
    rows = logit_rows(logits, [text.row for text, *_ in asked])
    chosen, tops = [token for _, token, _ in asked], [top for *_, top in asked]
    heats = [text.generation.how.said_temperature for text, *_ in asked]
    said = row_log_probabilities(rows, chosen, tops, heats)
    return {text: each for (text, *_), each in zip(asked, said, strict=True)}
