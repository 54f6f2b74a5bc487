"""The log-probability of given continuations of given texts, under any training layout.

The forward passes are those of validation, with another loss: in place of the tokens' cross entropy, it adds up the
log-probability of each text's tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from weft.data.batch import IGNORE
from weft.data.loader import Loader
from weft.data.order import Row, RowList, pack_documents
from weft.data.tasks import Score, Text
from weft.layout.boundary import OWN, own_share, step_sum
from weft.layout.mesh import Mesh
from weft.models.token_scores import token_scores
from weft.models.transformer import Transformer
from weft.parallel.state import State
from weft.train.step import loss_sum, sum_over_passes


@dataclass
class Scorer:
    """Function that replaces a model's loss during scoring, and adds up the scores of labels for each text.

    ``sums``: float64 ``[texts, 2]``. For each text, the first number is the sum of its labels' log-probabilities, and
    the second is how many of its labels are the likeliest token at their position.

    A call has the arguments of a loss. Only ``counts`` has another meaning: for each label, the number of its text,
    counted from 1, in place of the label's weight. :func:`pack_texts` puts these numbers into the rows.
    """

    # float64 [texts, 2]: log-probability, and how many tokens are the likeliest
    sums: torch.Tensor

    def __call__(
        self, hidden: torch.Tensor, weight: torch.Tensor | None, labels: torch.Tensor, first: int, chunk: int,
        mesh: Mesh, counts: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        rows = (labels != IGNORE).nonzero()[:, 0]
        if counts is not None:  # no text is here, only padding
            scored = token_scores(
                hidden[rows], weight, labels[rows], first, chunk, mesh
            )
            self.sums.index_add_(0, counts[rows].long() - 1, scored)
        return torch.zeros((), dtype=torch.float64, device=hidden.device)


def pack_texts(texts: Sequence[Text], room: int) -> RowList:
    """Return ``texts`` packed into rows of at most ``room`` tokens.

    The field ``weights`` of the rows holds, in place of a weight, the index from 1 of each label's text;
    :class:`Scorer` adds up scores by this index.
    """
    order, ends = pack_documents(
        np.array([len(t.given) + len(t.following) - 1 for t in texts]), room
    )
    rows = []
    for here in np.split(order, ends[:-1]):
        ids = [np.array([*texts[i].given, *texts[i].following], np.int64) for i in here]
        labels = [x[1:].copy() for x in ids]
        for i, x in zip(here, labels, strict=True):
            x[: len(texts[i].given) - 1] = IGNORE
        lengths = [len(x) for x in labels]
        starts = np.cumsum([0, *lengths[:-1]])
        numbers = np.repeat(here + 1, lengths).astype(np.float32)
        rows.append(
            Row(
                np.concatenate([x[:-1] for x in ids]),
                np.concatenate(labels),
                starts,
                numbers,
            )
        )
    return RowList(rows)


@torch.no_grad()
def scores(
    model: Transformer,
    state: State | None,
    mesh: Mesh,
    texts: Sequence[Text],
    rows: int = 1,
    passes: int = 1,
    room: int = 1024,
    wanted: Callable[[], bool] = lambda: True,
) -> list[Score]:
    """Compute the log-probability of each text's continuation. Collective; the result is the same on all ranks.

    A score also says whether greedy decoding would write the continuation.

    Arguments:
        ``state``: state of the model, None on one device.
        ``texts``: prompts and continuations as token ids.
        ``rows``: number of rows that a rank computes in a forward pass.
        ``passes``: number of forward passes of a rank in a step.
        ``room``: number of tokens in a row. If the longest text has more, rows are as long as that text.
        ``wanted``: function that is called on every rank before every step. If it returns False on any rank, scoring
            stops and the result is an empty list.
    """
    if not texts:
        return []
    loader = text_loader(texts, mesh, rows, passes, room)
    batch = loader.batch
    scorer = Scorer(torch.zeros(len(texts), 2, dtype=torch.float64, device=mesh.device))
    hooks, position = replace(model.hooks, criterion=scorer), 0
    while (batches := loader.step(position)) is not None:
        if step_sum(own_share(not wanted(), mesh, **OWN), mesh) > 0:
            return []
        loss_sum(model, batches, mesh, hooks)
        position += batch
    sums = scorer.sums if state is None else sum_over_passes(scorer.sums, state, mesh)
    return scores_of(sums, texts)


def scores_of(sums: torch.Tensor, texts: Sequence[Text]) -> list[Score]:
    """Return the score of each text: the log-probability of its continuation, and whether greedy decoding writes it.

    ``sums``: the table ``[texts, 2]`` that a :class:`Scorer` has added up.
    """
    return [
        Score(p, round(hits) == len(t.following))
        for (p, hits), t in zip(sums.tolist(), texts, strict=True)
    ]


def text_loader(
    texts: Sequence[Text], mesh: Mesh, rows: int = 1, passes: int = 1, room: int = 1024
) -> Loader:
    """Return this rank's loader of the packed ``texts``; the arguments are those of :func:`scores`."""
    room = max(room, *(len(t.given) + len(t.following) - 1 for t in texts))
    batch = rows * passes * mesh.size("dp", "shard")
    return Loader(
        pack_texts(texts, room),
        mesh.layout,
        mesh.batch_rank,
        mesh.rank("cp"),
        batch,
        rows,
        passes,
        room,
    )
