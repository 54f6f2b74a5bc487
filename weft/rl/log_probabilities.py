"""Log-probabilities of the tokens of given texts, under any training layout."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from weft.data.batch import IGNORE, Batch
from weft.data.loader import Loader
from weft.data.policy_rows import PolicySample, policy_rows
from weft.data.shared_prompts import share_prompts
from weft.layout.boundary import untyped
from weft.layout.mesh import Mesh
from weft.models.token_objective import TokenObjective, Weighed
from weft.models.transformer import Transformer
from weft.parallel.state import State
from weft.recipe import PolicyLoss
from weft.train.step import loss_sum, sum_over_passes


@dataclass
class TokenRecorder(TokenObjective):
    """Objective that computes no loss, but records numbers of each label in a table.

    ``table``: float64 ``[tokens of all texts, 3]``: log-probability, entropy of the distribution, and a critic's value.
    The field ``advantage`` of each token in the batch must hold the token's index in the table.
    """

    table: torch.Tensor
    temperature: float = 1.0

    @property
    def has_values(self) -> bool:
        return True

    def weigh(
        self, nll: torch.Tensor, entropy: torch.Tensor, batch: Batch, mesh: Mesh
    ) -> Weighed:
        return self._record(slice(0, 2), torch.stack((-nll, entropy), dim=1), batch)

    def weigh_values(self, values: torch.Tensor, batch: Batch, mesh: Mesh) -> Weighed:
        return self._record(slice(2, 3), values[:, None], batch)

    def _record(self, columns: slice, values: torch.Tensor, batch: Batch) -> Weighed:
        """Write ``values`` of this rank's tokens, ``[tokens, n]``, to the columns; return a loss of 0."""
        assert batch.rollout is not None
        with untyped():
            learned = batch.labels.flatten() != IGNORE
            at = batch.rollout.advantage.flatten()[learned].long()
            self.table[at, columns] = values[learned].detach().double()
            zero = torch.zeros((), dtype=torch.float64, device=values.device)
            return Weighed(zero, torch.zeros_like(values[:, 0]))


class TokenReadings(NamedTuple):
    """Measured values of the marked tokens of texts. Each field is a list with one float64 array ``[n]`` for each text
    of ``n`` tokens. The array has 0 at tokens that the caller did not mark.

    ``log_probabilities``: log-probability of each token. ``entropies``: entropy of the distribution from which the
    token was drawn. ``values``: a critic's prediction before the token; zeros without a critic.
    """

    log_probabilities: list[np.ndarray]
    entropies: list[np.ndarray]
    values: list[np.ndarray]


@torch.no_grad()
def token_readings(
    model: Transformer,
    state: State | None,
    mesh: Mesh,
    texts: Sequence[tuple[Sequence[int], Sequence[bool]]],
    rows: int = 1,
    passes: int = 1,
    room: int = 1024,
    temperature: float = 1.0,
    share: bool = False,
) -> TokenReadings:
    """Compute log-probabilities, entropies and values of every marked token of ``texts``, under any layout.

    Collective; the result is the same on all ranks. A critic that is a model of its own gives values only, and zeros
    for the rest.

    Arguments:
        ``state``: state of the model; None on one device.
        ``mesh``: the ranks that compute together.
        ``texts``: for each text its token ids, and a mask that marks the tokens to compute. The first token of a text
            cannot be marked.
        ``rows``: number of rows that a rank computes in a forward pass.
        ``passes``: number of forward passes of a rank in a step.
        ``room``: number of tokens in a row. If the longest text has more, rows are as long as that text.
        ``temperature``: number by which logits are divided before the softmax.
        ``share``: whether prompts that several texts of a pass share are computed once
            (:mod:`weft.data.shared_prompts`).
    """
    if not texts:
        return TokenReadings([], [], [])
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
    table = torch.zeros(int(edges[-1]), 3, dtype=torch.float64, device=mesh.device)
    recorder = TokenRecorder(table, temperature)
    batch = rows * passes * mesh.size("dp", "shard")
    loader = Loader(
        policy_rows(samples, room, PolicyLoss()),
        mesh.layout,
        mesh.batch_rank,
        mesh.rank("cp"),
        batch,
        rows,
        passes,
        room,
        joined=share,
    )
    hooks, position = replace(model.hooks, objective=recorder), 0
    while (batches := loader.step(position)) is not None:
        if share:
            batches = [share_prompts(each, mesh.size("tp")) for each in batches]
        loss_sum(model, batches, mesh, hooks)
        position += batch
    if state is not None:
        table = sum_over_passes(table, state, mesh)
    columns = (np.split(column, edges[1:-1]) for column in table.cpu().numpy().T)
    return TokenReadings(*columns)


def token_log_probabilities(
    model: Transformer,
    state: State | None,
    mesh: Mesh,
    texts: Sequence[tuple[Sequence[int], Sequence[bool]]],
    rows: int = 1,
    passes: int = 1,
    room: int = 1024,
    temperature: float = 1.0,
    share: bool = False,
) -> list[np.ndarray]:
    """Compute the log-probability of every marked token of ``texts``: for each text float64 ``[n]``, 0 elsewhere.

    Collective; the result is the same on all ranks. The arguments are those of :func:`token_readings`.
    """
    readings = token_readings(
        model, state, mesh, texts, rows, passes, room, temperature, share
    )
    return readings.log_probabilities
