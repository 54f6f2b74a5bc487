"""Log-probabilities of the tokens of given texts, under any training layout."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from weft.data.batch import IGNORE, Batch
from weft.data.loader import Loader
from weft.data.order import RowList
from weft.data.policy_rows import PolicySample, policy_rows
from weft.layout.boundary import untyped
from weft.layout.mesh import Mesh
from weft.models.token_objective import TokenObjective, Weighed
from weft.models.transformer import Transformer
from weft.parallel.state import State
from weft.recipe import PolicyLoss
from weft.train.step import loss_sum, sum_over_passes


@dataclass
class TokenRecorder(TokenObjective):
    """Takes the place of a loss, and records each label's log-probability and entropy in a table.

    ``table``: float64 ``[tokens of all texts, 2]``. The ``advantage`` of a token holds its index in the table.
    """

    table: torch.Tensor
    temperature: float = 1.0

    def weigh(
        self, nll: torch.Tensor, entropy: torch.Tensor, batch: Batch, mesh: Mesh
    ) -> Weighed:
        assert batch.rollout is not None
        with untyped():
            learned = batch.labels.flatten() != IGNORE
            at = batch.rollout.advantage.flatten()[learned].long()
            values = torch.stack((-nll, entropy), dim=1)[learned]
            self.table[at] = values.detach().double()
        zero = torch.zeros((), dtype=torch.float64, device=nll.device)
        return Weighed(zero, torch.zeros_like(nll))


@torch.no_grad()
def token_log_probabilities(
    model: Transformer,
    state: State | None,
    mesh: Mesh,
    texts: Sequence[tuple[Sequence[int], Sequence[bool]]],
    rows: int = 1,
    passes: int = 1,
    room: int = 1024,
    temperature: float = 1.0,
) -> list[np.ndarray]:
    """Compute the log-probability of every marked token of ``texts``. Collective; the same result on all ranks.

    Arguments:
        ``state``: state of the model; None on one device.
        ``texts``: token ids of each text, and which of them are wanted.
        ``rows``: number of rows that a rank computes in a forward pass.
        ``passes``: number of forward passes of a rank in a step.
        ``room``: number of tokens in a row. If the longest text has more, rows are as long as that text.
        ``temperature``: number by which logits are divided before the softmax.

    Returns for each text float64 ``[n]``, with 0 for tokens that are not marked.
    """
    if not texts:
        return []
    lengths = [len(ids) for ids, _ in texts]
    edges = np.cumsum([0, *lengths])
    room = max(room, *(length - 1 for length in lengths))
    samples = [
        PolicySample(
            np.asarray(ids, np.int64),
            np.asarray(marked, bool),
            np.arange(first, first + len(ids), dtype=np.float64),
        )
        for (ids, marked), first in zip(texts, edges, strict=False)
    ]
    recorder = TokenRecorder(
        torch.zeros(int(edges[-1]), 2, dtype=torch.float64, device=mesh.device),
        temperature,
    )
    listed: RowList = policy_rows(samples, room, PolicyLoss())
    batch = rows * passes * mesh.size("dp", "shard")
    loader = Loader(
        listed, mesh.layout, mesh.batch_rank, mesh.rank("cp"), batch, rows, passes, room
    )
    hooks, position = replace(model.hooks, objective=recorder), 0
    while (batches := loader.step(position)) is not None:
        loss_sum(model, batches, mesh, hooks)
        position += batch
    table = recorder.table
    table = table if state is None else sum_over_passes(table, state, mesh)
    return np.split(table[:, 0].cpu().numpy(), edges[1:-1])
