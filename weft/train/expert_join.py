"""The join of experts that were trained apart: a list of what each says, and a router's weights for each sample.

:func:`joined_outputs` is the whole of it, whatever experts say: predictions of a diffusion model, or probabilities of
tokens. What differs is the router. That of :class:`BayesRouter` is not trained: after some tokens of a document, an
expert counts by how likely it has made those, times its prior (Li et al. 2022, branch-train-merge; Gururangan et al.
2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from weft.models.numbers import wide

T = torch.Tensor


class ExpertRouter(Protocol):
    """Interface of a router that computes how much each expert counts in each sample."""

    def log_weights(self, evidence: T) -> T:
        """Return the logarithms of the experts' weights, ``[samples, experts]``; the weights of a sample add up to 1.

        ``evidence``: how well each expert fits each sample, ``[samples, experts]``. For language models it is the
        log-probability that the expert gives to all tokens of the document so far.
        """


@dataclass(frozen=True)
class BayesRouter:
    """Router by Bayes' rule: an expert's weight is its prior times the probability that it gave to the earlier tokens.

    Attributes:
        ``prior``: weights of the experts before any token is seen; they need not add up to 1.
        ``top``: number of experts with weight in a sample, the likeliest ones; 0: all.
    """

    prior: tuple[float, ...]
    top: int = 0

    def log_weights(self, evidence: T) -> T:
        prior = evidence.new_tensor(self.prior).log()
        posterior = (prior + evidence).log_softmax(-1)
        if not 0 < self.top < posterior.shape[-1]:
            return posterior
        least = posterior.topk(self.top, dim=-1).values[..., -1:]
        return posterior.masked_fill(posterior < least, -torch.inf).log_softmax(-1)


def joined_outputs(outputs: Sequence[T], weights: T) -> T:
    """Return the weighted mean of the experts' ``outputs``, each ``[samples, ...]``.

    ``weights``: weight of each expert in each sample, ``[samples, experts]``; they add up to 1 for a sample. An expert
    with weight 0 may have outputs that are not finite.
    """
    stacked = torch.stack([*outputs], dim=1)  # [samples, experts, ...]
    shares = weights.to(stacked.dtype).view(*weights.shape, *[1] * (stacked.dim() - 2))
    return torch.where(shares > 0, shares * stacked, 0.0).sum(1)


def joined_log_probabilities(logs: Sequence[T], log_weights: T) -> T:
    """Return the logarithms of the experts' joint probabilities, ``[samples, vocab]``.

    This is :func:`joined_outputs` of the probabilities, computed in logarithms.

    ``logs``: each expert's log-probabilities ``[samples, vocab]``. ``log_weights``: logarithms of the experts' weights
    in each sample, ``[samples, experts]``.
    """
    stacked = torch.stack([*logs], dim=1)  # [samples, experts, vocab]
    return (stacked + log_weights[..., None].to(stacked.dtype)).logsumexp(1)


def evidence_before(next_logs: T, documents: T) -> T:
    """Return, at each token, the log-probability that each expert gives to the document's tokens up to and including
    it.

    The result is ``[tokens, experts]``, the evidence for an :class:`ExpertRouter`; it is 0 at the first token of a
    document, which no token precedes to predict it. ``next_logs``: at each token, the log-probability that each expert
    gives to the next token, ``[tokens, experts]``. ``documents``: index of the document of each token, ascending.
    """
    logs = next_logs.to(wide(next_logs.dtype))
    last = torch.ones_like(documents, dtype=torch.bool)
    last[:-1] = documents[1:] != documents[:-1]
    # the token after a document's last one is another document's
    sums = torch.where(last[:, None], 0.0, logs).cumsum(0)
    before = torch.zeros_like(sums)
    before[1:] = sums[:-1]
    first = torch.ones_like(last)
    first[1:] = last[:-1]
    starts = before[first]  # [documents, experts]
    return before - starts[first.long().cumsum(0) - 1]
