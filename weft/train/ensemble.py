"""Ensembles: the joint distribution of several models over the next token.

Models that were trained independently, from other initial weights and in another order of the data, make other errors.
The average of their probabilities has at most the mean of their losses, by Jensen's inequality. So has the distribution
of their averaged logits, which is the geometric mean of theirs, as its normalizer is at most 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from weft.data.batch import IGNORE
from weft.models.fused import times
from weft.models.numbers import wide
from weft.train.expert_join import evidence_before, joined_log_probabilities
from weft.train.score import scores_of, text_loader

if TYPE_CHECKING:
    from weft.data.batch import Batch
    from weft.data.tasks import Score, Text
    from weft.layout.mesh import Mesh
    from weft.models.transformer import Transformer
    from weft.train.expert_join import ExpertRouter

T = torch.Tensor

#: What is averaged over the members of an ensemble.
Average = Literal["probabilities", "logits"]


@dataclass(frozen=True)
class TokenOutputs:
    """Outputs of a model for some tokens of a batch, kept before the output layer to save memory.

    Attributes:
        ``hidden``: hidden states ``[tokens, embed]``; the logits ``[tokens, vocab]`` if ``weight`` is None.
        ``weight``: weight of the output layer, ``[vocab, embed]``; None if ``hidden`` are logits.
    """

    hidden: T
    weight: T | None

    def log_probabilities(self, rows: slice) -> T:
        """Return the log-probabilities of the next token, ``[rows, vocab]``, for the tokens with the indices
        ``rows``.
        """
        hidden = self.hidden[rows]
        logits = hidden if self.weight is None else times(hidden, self.weight)
        return logits.to(wide(logits.dtype)).log_softmax(-1)


@torch.no_grad()
def token_outputs(
    model: Transformer, batch: Batch, every: bool = False
) -> TokenOutputs:
    """Run ``model`` on ``batch`` and return its outputs for the tokens that have labels, in the batch's order.

    ``model``: a model that is whole on this device. ``every``: return outputs for all tokens, with or without labels.
    """
    kept: list[TokenOutputs] = []

    def keep(
        hidden: T,
        weight: T | None,
        labels: T,
        first: int,
        chunk: int,
        mesh: Mesh,
        counts: T | None = None,
    ) -> T:
        rows = ((labels != IGNORE) | every).nonzero()[:, 0]
        kept.append(TokenOutputs(hidden[rows], weight))
        return hidden.new_zeros((), dtype=torch.float64)

    hooks = replace(model.hooks, criterion=keep, objective=None)
    model(batch.tokens, batch.positions, batch.cu_seqlens, batch, hooks=hooks)
    return kept[0]


def expert_log_weights(
    models: Sequence[Transformer], batch: Batch, router: ExpertRouter
) -> T:
    """Return the logarithms of the experts' weights for each labelled token of ``batch``, ``[labelled, experts]``.

    ``models``: the experts. ``router``: computes the weights from the log-probability that each expert gives to the
    earlier tokens of the document, with or without labels.
    """
    tokens = batch.tokens.flatten()
    following = tokens.roll(-1)
    chunk, columns = models[0].loss_chunk, []
    for model in models:
        said = token_outputs(model, batch, every=True)
        logs = [
            said.log_probabilities(rows).gather(1, following[rows, None])[:, 0]
            for rows in _chunks(len(tokens), chunk)
        ]
        columns.append(torch.cat(logs).double())
    ends = batch.cu_seqlens[1:].to(tokens.device)
    documents = torch.bucketize(
        torch.arange(len(tokens), device=tokens.device), ends, right=True
    )
    evidence = evidence_before(torch.stack(columns, dim=1), documents)
    return router.log_weights(evidence[batch.labels.flatten() != IGNORE])


def joint_log_probabilities(
    outputs: Sequence[TokenOutputs],
    rows: slice,
    average: Average,
    log_weights: T | None = None,
) -> T:
    """Return the ensemble's log-probabilities of the next token, ``[rows, vocab]``, for the tokens with the indices
    ``rows``.

    ``outputs``: outputs of each member for the same batch. ``average``: whether probabilities or logits are averaged.
    ``log_weights``: logarithms of the members' weights for all tokens, ``[tokens, members]``, with which probabilities
    are averaged; None: all members count alike.
    """
    if log_weights is not None:
        logs = [each.log_probabilities(rows) for each in outputs]
        return joined_log_probabilities(logs, log_weights[rows])
    members = torch.stack([each.log_probabilities(rows) for each in outputs])
    if len(members) == 1:
        return members[0]
    if average == "logits":
        return members.mean(0).log_softmax(-1)
    return members.logsumexp(0) - math.log(len(members))


def _chunks(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(count, start + size))


@torch.no_grad()
def ensemble_scores(
    models: Sequence[Transformer],
    texts: Sequence[Text],
    average: Average = "probabilities",
    room: int = 1024,
    router: ExpertRouter | None = None,
) -> list[Score]:
    """Compute the log-probability that an ensemble gives to each text's continuation, one score per text.

    The counterpart for one model is :func:`weft.train.score.scores`. ``models``: the members, whole on one device,
    with the same tokens. ``average``: whether probabilities or logits are averaged. ``room``: number of tokens in a
    row of a batch. ``router``: computes each member's weight at each token; None: all members count alike.
    ``texts``: prompts and continuations as token ids.
    """
    if not texts:
        return []
    mesh = models[0].mesh
    sums = torch.zeros(len(texts), 2, dtype=torch.float64, device=mesh.device)
    loader, position = text_loader(texts, mesh, room=room), 0
    while (batches := loader.step(position)) is not None:
        position += loader.batch
        for batch in batches:
            if batch.weights is None:  # no text is here, only padding
                continue
            batch = batch.to(mesh.device)
            assert batch.weights is not None
            outputs = [token_outputs(model, batch) for model in models]
            log_weights = expert_log_weights(models, batch, router) if router else None
            labels = batch.labels.flatten()
            learned = (labels != IGNORE).nonzero()[:, 0]
            # of each label, the number of its text from 1 stands in place of a weight
            numbers = batch.weights.flatten()[learned].long() - 1
            for rows in _chunks(len(learned), models[0].loss_chunk):
                joint = joint_log_probabilities(outputs, rows, average, log_weights)
                target = joint.gather(1, labels[learned[rows], None])[:, 0]
                likeliest = target >= joint.amax(-1)
                scored = torch.stack((target.double(), likeliest.double()), dim=1)
                sums.index_add_(0, numbers[rows], scored)
    return scores_of(sums, texts)


@dataclass(frozen=True)
class EnsembleLoss:
    """Mean cross entropy per label of an ensemble, and of each of its members on the same labels, in nats.

    ``joint``: the ensemble's loss. ``members``: losses of the members, in their order. ``labels``: number of labels.
    """

    joint: float
    members: tuple[float, ...]
    labels: int


@torch.no_grad()
def ensemble_loss(
    models: Sequence[Transformer],
    steps: Iterable[Sequence[Batch]],
    average: Average = "probabilities",
    router: ExpertRouter | None = None,
) -> EnsembleLoss:
    """Return the mean losses of an ensemble and of its members over all labels of ``steps``; every label has weight 1.

    ``models``: the members, whole on one device, with the same tokens. ``steps``: the batches of each step.
    ``average``: whether probabilities or logits are averaged. ``router``: computes each member's weight at each token;
    None: all members count alike.
    """
    device = models[0].mesh.device
    totals = torch.zeros(1 + len(models), dtype=torch.float64, device=device)
    count = 0
    for batch in (each.to(device) for batches in steps for each in batches):
        outputs = [token_outputs(model, batch) for model in models]
        log_weights = expert_log_weights(models, batch, router) if router else None
        labels = batch.labels.flatten()
        labels = labels[labels != IGNORE]
        count += len(labels)
        for rows in _chunks(len(labels), models[0].loss_chunk):
            joint = joint_log_probabilities(outputs, rows, average, log_weights)
            every = [joint, *(each.log_probabilities(rows) for each in outputs)]
            chosen = torch.stack(
                [logs.gather(1, labels[rows, None])[:, 0] for logs in every]
            )
            totals -= chosen.double().sum(1)
    joint, *members = (totals / max(1, count)).tolist()
    return EnsembleLoss(joint, tuple(members), count)
