"""Rows of sampled answers, with the numbers of each token that a policy loss reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.data.batch import IGNORE
from weft.data.batch_rollout import RolloutTokens
from weft.data.order import Row, RowList, pack_documents
from weft.errors import UsageError, WeftError
from weft.recipe import PolicyLoss


@dataclass(frozen=True)
class PolicySample:
    """A prompt and its sampled answer, or a conversation of several turns, with numbers for each token.

    All arrays have an entry for each token of prompt and answer. Only entries where ``learns`` is true are read.

    Attributes:
        ``ids``: token ids of prompt and answer, int64 ``[n]``.
        ``learns``: whether the policy has written the token, bool ``[n]``; False for the first token, because no token
            precedes it.
        ``advantage``: advantage of each token, float64 ``[n]``.
        ``sampler``: log-probability with which each token was sampled, float64 ``[n]``; None: unknown, so that the loss
            is not corrected for it.
        ``old``: log-probabilities under the policy before the first update with this sample, float64 ``[n]``; None: the
            sample is used for one update only.
        ``reference``: log-probabilities under the reference model, float64 ``[n]``; None: not computed.
        ``returns``: target of the critic's prediction at each token, float64 ``[n]``; None: there is no critic.
        ``values``: the critic's prediction at sampling, float64 ``[n]``; None: there is no critic.
    """

    ids: np.ndarray
    learns: np.ndarray
    advantage: np.ndarray
    sampler: np.ndarray | None = None
    old: np.ndarray | None = None
    reference: np.ndarray | None = None
    returns: np.ndarray | None = None
    values: np.ndarray | None = None


def policy_rows(
    samples: Sequence[PolicySample], room: int, settings: PolicyLoss
) -> RowList:
    """Pack samples into rows of at most ``room`` tokens, each sample as a document of its own.

    ``settings``: settings of the loss; its normaliser determines the divisors. Raises :class:`UsageError` for a sample
    longer than a row, and :class:`WeftError` for a sample without the numbers that the loss needs.
    """
    for sample in samples:
        _check(sample, room, settings)
    if not samples:
        return RowList([])
    lengths = np.array([len(sample.ids) - 1 for sample in samples], np.int64)
    order, ends = pack_documents(lengths, room)
    rows = []
    for chosen in np.split(order, ends[:-1]):
        documents = [samples[i] for i in chosen]
        labels = [np.where(s.learns[1:], s.ids[1:], IGNORE) for s in documents]
        rows.append(
            Row(
                np.concatenate([s.ids[:-1] for s in documents]).astype(np.int64),
                np.concatenate(labels).astype(np.int64),
                np.cumsum([0, *(len(x) for x in labels[:-1])]),
                rollout=RolloutTokens.joined(
                    [_numbers(s, settings) for s in documents]
                ),
            )
        )
    return RowList(rows)


def _numbers(sample: PolicySample, settings: PolicyLoss) -> RolloutTokens:
    """Return the numbers of a sample where its tokens are labels, each ``[n - 1]``."""
    learns = torch.from_numpy(sample.learns[1:].astype(bool))
    count = int(learns.sum())
    factor = 1 / max(1, count) if settings.normaliser == "sequence" else 1.0
    shares = {"tokens": count, "constant": settings.constant or 0.0, "sequence": 1}
    divisor = torch.zeros(len(learns), dtype=torch.float64)
    divisor[0] = shares[settings.normaliser]

    def column(numbers: np.ndarray | None) -> torch.Tensor:
        if numbers is None:
            return torch.full((len(learns),), torch.nan, dtype=torch.float64)
        given = torch.from_numpy(numbers[1:].astype(np.float64))
        return torch.where(learns, given, 0)

    return RolloutTokens(
        column(sample.advantage),
        learns.double() * factor,
        divisor,
        column(sample.sampler),
        column(sample.old),
        column(sample.reference),
        column(sample.returns),
        column(sample.values),
    )


def _check(sample: PolicySample, room: int, settings: PolicyLoss) -> None:
    """Raise an error if a row cannot hold the sample, or if the loss needs what the sample does not have."""
    size = len(sample.ids)
    if size - 1 > room:
        raise UsageError(
            f"a prompt and its answer have {size:,} tokens, and a row has room for {room + 1:,}; raise data.seq_len or "
            "let answers be shorter"
        )
    if size < 2 or sample.learns[0]:
        raise WeftError(
            "a sampled answer has no token before its first; begin the prompt with one"
        )
    for name, numbers in vars(sample).items():
        if numbers is not None and len(numbers) != size:
            raise WeftError(
                f"a sample of {size:,} tokens has {len(numbers):,} entries of {name}"
            )
    if not np.isfinite(sample.advantage[sample.learns]).all():
        raise WeftError(
            "a sample has an advantage that is not finite; look at its reward"
        )
    if (
        settings.needs_reference
        and settings.kl_in == "loss"
        and sample.reference is None
    ):
        raise WeftError(
            f"the loss has kl = {settings.kl!r}, and a sample lacks log-probabilities under the reference model"
        )
    if settings.needs_values and (sample.returns is None or sample.values is None):
        raise WeftError(
            f"advantage = {settings.advantage!r} has a critic, and a sample lacks its values or what they should be"
        )
    if settings.normaliser == "constant" and settings.constant is None:
        raise WeftError(
            "normaliser = 'constant' divides by constant, which is not set; set rl.loss.constant"
        )
