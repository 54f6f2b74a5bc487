"""Members of an ensemble: open several trained models, and score questions and texts by all of them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from weft.data.files import TABLES, format_of
from weft.data.loader import Loader, open_data
from weft.data.tasks import Answered, OpenTask
from weft.errors import UsageError
from weft.recipe.data_section import Data, Source
from weft.train.alike_models import open_alike
from weft.train.ensemble import Average, EnsembleLoss, ensemble_loss, ensemble_scores
from weft.train.expert_join import ExpertRouter
from weft.train.expert_set import read_expert_set
from weft.train.score import scores

if TYPE_CHECKING:
    from weft.checkpoint.address import Where
    from weft.data.tokenizer import Tokenizer
    from weft.models.transformer import Transformer

#: Tokens of a row of held-out text for models that do not say how long their context is.
CONTEXT = 1024
#: Rows of held-out text in a forward pass.
ROWS = 8


@dataclass(frozen=True)
class EnsembleMembers:
    """The members of an ensemble: trained models in which a token id means the same token.

    Attributes:
        ``names``: path or name by which the user gave each member.
        ``models``: the models, whole on one device.
        ``tokenizer``: the tokenizer of the first member.
        ``context``: context length in tokens for which all members were trained.
        ``average``: whether probabilities or logits are averaged.
        ``router``: computes each member's weight in each document, if the members are experts; None: all count alike.
    """

    names: tuple[str, ...]
    models: tuple[Transformer, ...]
    tokenizer: Tokenizer
    context: int
    average: Average
    router: ExpertRouter | None = None

    def answered(self, task: OpenTask) -> list[Answered]:
        """Evaluate ``task`` by the ensemble and by each of its members; return the ensemble's result, then the
        members'.

        If there is only one member, the list has one result. A result is left out if ``task`` returns None for it.
        """
        asked = [partial(scores, model, None, model.mesh) for model in self.models]
        results = [task.answered(each) for each in asked]
        if len(self.models) > 1:
            joint = partial(
                ensemble_scores, self.models, average=self.average, router=self.router
            )
            results.insert(0, task.answered(joint))
        return [each for each in results if each is not None]

    def held_out_loss(self, path: str) -> EnsembleLoss:
        """Return the mean loss per token of the ensemble and of each member on the texts at ``path``.

        ``path``: a file, folder or glob of plain texts, of JSON records or of Parquet tables.
        """
        suffix = format_of(Path(path))
        kind = "text"
        if suffix in TABLES:
            kind = "parquet" if suffix == ".parquet" else "jsonl"
        data = Data(
            sources=(Source(kind=kind, path=path),),
            seq_len=self.context,
            validation=0.0,
            epochs=1,
        )
        order = open_data(data, self.tokenizer).train
        mesh = self.models[0].mesh
        loader = Loader(order, mesh.layout, 0, 0, ROWS, ROWS, 1, self.context)
        steps = map(loader.step, range(0, order.total or 0, ROWS))
        return ensemble_loss(
            self.models, filter(None, steps), self.average, self.router
        )


def open_members(
    places: Sequence[Where],
    device: str,
    warn: Callable[[str], None],
    ema: bool = False,
    average: Average = "probabilities",
) -> EnsembleMembers:
    """Open the models at ``places`` (paths or names) as members of an ensemble; a single model is an ensemble of one.

    A single place may also be a set of experts (:mod:`weft.train.expert_set`), whose router then weights the members.

    ``device``, ``warn`` and ``ema`` are arguments of :func:`weft.checkpoint.model.open_model`. Raises
    :class:`UsageError` for a model whose tokens differ from those of the first one, and for a model that is given
    twice. ``average``: whether the members' probabilities or logits are averaged.
    """
    router: ExpertRouter | None = None
    if len(places) == 1 and (experts := read_expert_set(places[0])) is not None:
        places, router = experts.places, experts.router
    names = tuple(map(str, places))
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(
            f"{twice} is given twice; members of an ensemble are different models"
        )
    opened = open_alike(places, device, warn, ema)
    return EnsembleMembers(
        names,
        tuple(each.model for each in opened.models),
        opened.tokenizer,
        min(each.length or CONTEXT for each in opened.models),
        average,
        router,
    )
