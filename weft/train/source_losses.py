"""Losses of a model on given rows, source by source, under any layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from weft.data.batch import IGNORE, Batch
from weft.data.batch_rollout import blank_numbers
from weft.data.loader import Corpus, Loader
from weft.data.order import Row, RowList
from weft.layout.boundary import untyped
from weft.layout.mesh import Mesh
from weft.models.token_objective import TokenObjective, Weighed
from weft.models.transformer import Transformer
from weft.parallel.state import State
from weft.recipe import Recipe
from weft.train.step import loss_sum, sum_over_passes


class SourceRow(NamedTuple):
    """A row of tokens with the index of its data source. ``row``: the tokens. ``source``: index of the source."""

    row: Row
    source: int


@dataclass
class LossRecorder(TokenObjective):
    """Objective that records the loss of every label instead of training on it.

    ``table``: float64 ``[tokens of all rows]``, to which the losses are written. The caller stores each token's index
    in this table in the rollout field ``advantage`` of the rows.
    """

    table: torch.Tensor

    def weigh(
        self, nll: torch.Tensor, entropy: torch.Tensor, batch: Batch, mesh: Mesh
    ) -> Weighed:
        assert batch.rollout is not None
        with untyped():
            learned = batch.labels.flatten() != IGNORE
            at = batch.rollout.advantage.flatten()[learned].long()
            self.table[at] = nll[learned].detach().double()
            zero = torch.zeros((), dtype=torch.float64, device=nll.device)
            return Weighed(zero, torch.zeros_like(nll))


@torch.no_grad()
def label_losses(
    model: Transformer, mesh: Mesh, recipe: Recipe, rows: Sequence[SourceRow]
) -> torch.Tensor:
    """Compute the loss of every label in ``rows``, float64 ``[tokens of all rows]``. Collective.

    Each rank's result holds the losses that this rank computed. All other entries are 0, as are those of tokens without
    a label. All ranks must pass the same rows.
    """
    edges = np.cumsum([0, *(len(each.row.tokens) for each in rows)])
    numbered = []
    for each, first, last in zip(rows, edges[:-1], edges[1:], strict=True):
        numbers = blank_numbers(int(last - first))
        at = torch.arange(int(first), int(last), dtype=torch.float64)
        numbered.append(
            each.row._replace(weights=None, rollout=replace(numbers, advantage=at))
        )
    table = torch.zeros(int(edges[-1]), dtype=torch.float64, device=mesh.device)
    per_pass, passes = recipe.rows_per_pass(mesh.layout)
    batch = per_pass * passes * mesh.size("dp", "shard")
    loader = Loader(
        RowList(numbered), mesh.layout, mesh.batch_rank, mesh.rank("cp"), batch, per_pass, passes, recipe.data.seq_len
    )  # fmt: skip
    hooks, position = replace(model.hooks, objective=LossRecorder(table)), 0
    while (batches := loader.step(position)) is not None:
        loss_sum(model, batches, mesh, hooks)
        position += batch
    return table


def mean_by_source(
    losses: torch.Tensor,
    rows: Sequence[SourceRow],
    sources: int,
    state: State,
    mesh: Mesh,
) -> list[float | None]:
    """Return the mean loss of each source's labels, over the losses that all ranks have computed. Collective.

    ``losses``: a number for each token of ``rows`` on this rank, as :func:`label_losses` returns them. ``sources``:
    number of sources. The entry of a source without labels in these rows is None.
    """
    owner = np.repeat(
        [each.source for each in rows], [len(each.row.tokens) for each in rows]
    )
    sums = torch.zeros(sources, dtype=torch.float64, device=losses.device)
    sums.index_add_(0, torch.from_numpy(owner).to(losses.device), losses)
    counts = [0] * sources
    for each in rows:
        counts[each.source] += int((each.row.labels != IGNORE).sum())
    total = sum_over_passes(sums, state, mesh).tolist()
    return [
        value / count if count else None
        for value, count in zip(total, counts, strict=True)
    ]


def losses_by_source(
    model: Transformer, state: State, mesh: Mesh, recipe: Recipe, corpus: Corpus, samples: range
) -> dict[str, float | None]:  # fmt: skip
    """Return the mean validation loss of each data source, by the source's name. Collective.

    ``samples``: indices of the validation samples to use. The value of a source without labels in these samples is
    None. ``corpus``: the opened data, from whose validation samples the rows come.
    """
    order = corpus.validation
    assert order is not None
    trained = [stream.ids for stream in corpus.train.streams]
    rows = []
    for sample in samples:
        number, index = order.locate(sample)
        stream = order.streams[number]
        source = next((i for i, ids in enumerate(trained) if ids is stream.ids), None)
        if source is not None:  # a file of its own is of no source
            rows.append(SourceRow(stream.row(index), source))
    if not rows:
        return {}
    losses = label_losses(model, mesh, recipe, rows)
    means = mean_by_source(losses, rows, len(corpus.names), state, mesh)
    return dict(zip(corpus.names, means, strict=True))
