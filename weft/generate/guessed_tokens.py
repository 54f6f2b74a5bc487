"""Samples one token that a drafter may have guessed, so that every token stays as likely as without the guess.

(Speculative sampling; Leviathan et al. 2022, 2211.17192; Chen et al. 2023, 2302.01318.)
"""

from typing import NamedTuple, Protocol

import torch

from weft.generate.row_sampling import (
    TextState,
    choose_tokens,
    draw_rows,
    sampling_candidates,
)

T = torch.Tensor


class Numbers(Protocol):
    """Interface of a source of random numbers, such as :class:`random.Random`."""

    def random(self) -> float:
        """Return the next number, uniformly distributed in [0, 1)."""
        ...


class Guess(NamedTuple):
    """A next token that a drafter has sampled. ``odds``: the probabilities ``[vocab]`` from which the drafter sampled
    it.
    """

    token: int
    odds: T


def choose_token(
    logits: T, text: TextState, numbers: Numbers, guess: Guess | None = None
) -> int:
    """Sample the next token of ``text`` from ``logits`` ``[vocab]``, and return its id. The token has the probability
    that the model gives it, with or without a guess.

    ``numbers``: source of random numbers, which is not used at temperature 0. ``guess``: a token that a drafter has
    sampled, with the drafter's probabilities; None: no guess. The guess is accepted with probability p / q, at most 1:
    p is the token's probability in the model, and q that in the drafter. If it is not accepted, the token is sampled
    from the positive part of the model's probabilities minus the drafter's.
    """
    if text.how.temperature == 0:
        return choose_tokens(logits[None], [text])[0]
    if guess is None:
        text = text._replace(number=numbers.random())
        return choose_tokens(logits[None], [text])[0]
    wanted = odds(logits, text)
    if numbers.random() * guess.odds[guess.token] < wanted[guess.token]:
        return guess.token
    return draw((wanted - guess.odds).clamp(min=0), numbers.random())


def draw(weights: T, number: float) -> int:
    """Draw an index by ``weights`` ``[n]``: return the first one at which their cumulative sum exceeds ``number`` times
    their total. ``number``: a random number in [0, 1).
    """
    at = torch.tensor([number], dtype=torch.float64, device=weights.device)
    return int(draw_rows(weights[None], at))


def odds(logits: T, text: TextState) -> T:
    """Return the probability with which each token is sampled from ``logits`` ``[vocab]``: float64 ``[vocab]``, on the
    host. ``text``: settings and tokens so far of the text.
    """
    (kept,) = sampling_candidates(logits[None], [text])
    weights = kept.weights[0].double().cpu()
    ids = torch.arange(len(weights)) if kept.ids is None else kept.ids[0].cpu()
    chances = torch.zeros(len(logits), dtype=torch.float64)
    return chances.index_put((ids,), weights / weights.sum(), accumulate=True)
