"""Sampling: pure functions from a row of logits, the text so far, and a random number in [0, 1) to a token.

A row is processed in the order of transformers' processors: bias, penalties (on the written tokens; ``repetition`` on
the prompt too, Keskar et al. 2019), the grammar's mask, and temperature. Then tokens are kept that are among the
likeliest ``top_k``, that make up ``top_p`` (nucleus sampling, Holtzman et al. 2019), and that are not below ``min_p``
of the likeliest (Nguyen et al. 2024). One number per token, a hash of the request's seed and of the token's place
(:mod:`weft.generate.random_numbers`), selects one of them, so other requests in the batch change nothing.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from weft.errors import UsageError
from weft.models.numbers import wide

T = torch.Tensor


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling; by default tokens are sampled from the model's own probabilities.

    Attributes:
        ``temperature``: divisor of the logits; 0: always the likeliest token.
        ``top_k``: sample from this many likeliest tokens; 0: from all.
        ``top_p``: sample from the likeliest tokens that have this probability together.
        ``min_p``: leave out tokens with less than this share of the likeliest token's probability.
        ``repetition``: logits of tokens of the prompt and the text are divided by it, or multiplied if they are
            negative.
        ``presence``: subtracted from the logits of tokens that the text has.
        ``frequency``: subtracted from a token's logit for each time that the text has the token.
        ``bias``: added to logits, by token id.
        ``seed``: seed of the random numbers.
    """

    temperature: float = 1.0  # 0 always takes the likeliest token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    # logits of what has been seen are divided by it, or multiplied if they are negative
    repetition: float = 1.0
    presence: float = 0.0  # taken from logits of what has been written
    frequency: float = 0.0  # taken as often as it was
    bias: Mapping[int, float] = field(default_factory=dict)  # added to logits
    seed: int = 0

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (0, 100), "top_k": (0, 2**31), "top_p": (1e-9, 1), "min_p": (0, 1),
            "repetition": (1e-3, 1e3), "presence": (-100, 100), "frequency": (-100, 100),
        }  # fmt: skip
        for name, (low, high) in ranges.items():
            if not low <= getattr(self, name) <= high:
                raise UsageError(
                    f"{name} = {getattr(self, name)} is not possible; give {low:g} to {high:g}"
                )


#: Always the likeliest token.
GREEDY = Sampling(0)


def penalised(
    logits: T,
    how: Sampling,
    prompt: Sequence[int],
    written: Sequence[int],
    allowed: T | None = None,
) -> T:
    """Return ``logits`` ``[vocab]`` with the bias and penalties of ``how``, in :func:`wide` precision. Ids outside the
    mask ``allowed`` get -inf.

    ``prompt``, ``written``: the token ids so far, which the penalties count.
    """
    row = logits.to(wide(logits.dtype))
    if how.bias or how.repetition != 1 or how.presence or how.frequency:
        row = row.clone()
    if how.bias:
        row[list(how.bias)] += row.new_tensor(list(how.bias.values()))
    if how.repetition != 1 and (seen := list({*prompt, *written})):
        row[seen] = torch.where(
            row[seen] > 0, row[seen] / how.repetition, row[seen] * how.repetition
        )
    if (how.presence or how.frequency) and written:
        counts = Counter(written)
        row[list(counts)] -= how.presence + how.frequency * row.new_tensor(
            list(counts.values())
        )
    return row if allowed is None else row.masked_fill(~allowed, -torch.inf)


def candidate_tokens(row: T, how: Sampling) -> tuple[T, T]:
    """Return the token ids that can be sampled by the settings ``how``, and their probabilities. ``row``: penalised
    logits ``[vocab]``. The likeliest comes first, unless all ids can be sampled.
    """
    count = min(how.top_k or len(row), len(row))
    if how.top_p == 1 and not how.min_p and count == len(row):
        best, ids = row, torch.arange(len(row), device=row.device)
    else:
        best, ids = row.topk(count)
    # Largest logit 0 first: dividing by a tiny temperature then gives -inf at worst, never inf - inf.
    probabilities = ((best - best.max()) / how.temperature).softmax(-1)
    if how.top_p < 1:
        before = probabilities.cumsum(-1) - probabilities
        kept = max(1, int((before < how.top_p).sum()))
        ids, probabilities = ids[:kept], probabilities[:kept]
    if how.min_p:
        kept = int((probabilities >= how.min_p * probabilities[0]).sum())
        ids, probabilities = ids[:kept], probabilities[:kept]
    return ids, probabilities / probabilities.sum()


def draw(probabilities: T, number: float) -> int:
    """Return the index that ``number``, a random number in [0, 1), selects: the first at which the cumulative sum of
    ``probabilities`` exceeds it.
    """
    ends = probabilities.double().cumsum(-1)
    place = int(torch.searchsorted(ends, number * ends[-1], right=True))
    # the last one that is not zero
    return min(place, int(torch.searchsorted(ends, ends[-1])))


class Numbers(Protocol):
    """A source of random numbers in [0, 1), such as :class:`random.Random`."""

    def random(self) -> float:
        """Return the next number."""
        ...


class Guess(NamedTuple):
    """A next token that a drafter has sampled, and the probabilities ``[vocab]`` from which the drafter sampled it."""

    token: int
    odds: T


def choose_token(
    logits: T, how: Sampling, prompt: Sequence[int], written: Sequence[int], stream: Numbers,
    guess: Guess | None = None, allowed: T | None = None,
) -> int:  # fmt: skip
    """Sample the next token from ``logits`` ``[vocab]`` by the settings ``how``. Random numbers are taken from
    ``stream``, unless the temperature is 0.

    ``prompt``, ``written``: the token ids so far, for penalties; ``allowed``: mask of allowed ids. With a ``guess``,
    every token is as likely as without, and the guess is taken as often as that allows (speculative sampling; Leviathan
    et al. 2022, 2211.17192; Chen et al. 2023, 2302.01318): the guess is accepted with the ratio of its probability in
    the model to that in the drafter. Otherwise the token is sampled from the positive part of the difference of both
    distributions.
    """
    if how.temperature == 0:
        return int(penalised(logits, how, prompt, written, allowed).argmax())
    if guess is None:
        ids, probabilities = candidate_tokens(
            penalised(logits, how, prompt, written, allowed), how
        )
        return int(ids[draw(probabilities, stream.random())])
    wanted = odds(logits, how, prompt, written, allowed)
    if stream.random() * guess.odds[guess.token] < wanted[guess.token]:
        return guess.token
    return draw((wanted - guess.odds).clamp(min=0), stream.random())


def odds(
    logits: T,
    how: Sampling,
    prompt: Sequence[int],
    written: Sequence[int],
    allowed: T | None = None,
) -> T:
    """Return the probability with which each token is sampled, float64 ``[vocab]``. The arguments are those of
    :func:`penalised`.
    """
    ids, probabilities = candidate_tokens(
        penalised(logits, how, prompt, written, allowed), how
    )
    return torch.zeros(len(logits), dtype=torch.float64).index_put(
        (ids,), probabilities.double()
    )


def token_log_probabilities(
    logits: T, chosen: int, top: int
) -> tuple[float, dict[int, float]]:
    """Return the log-probability of the token ``chosen``, and the log-probabilities of the ``top`` likeliest tokens by
    id, before bias, penalties and temperature. ``logits``: ``[vocab]``.
    """
    row = logits.to(wide(logits.dtype)).log_softmax(-1)
    best, ids = row.topk(min(top, len(row)))
    return float(row[chosen]), dict(zip(ids.tolist(), best.tolist(), strict=True))
