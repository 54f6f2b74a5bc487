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
from weft.train.ensemble import Average, EnsembleLoss, ensemble_loss, ensemble_scores
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
    """Trained models whose ids mean the same tokens.

    Attributes:
        ``names``: what the user calls each of them.
        ``models``: the models, whole on one device.
        ``tokenizer``: their tokenizer.
        ``context``: number of tokens that all of them were trained to read.
        ``average``: what is averaged over them.
    """

    names: tuple[str, ...]
    models: tuple[Transformer, ...]
    tokenizer: Tokenizer
    context: int
    average: Average

    def answered(self, task: OpenTask) -> list[Answered]:
        """Return how the ensemble answers ``task``, and then how each member does. One model alone is one result."""
        asked = [partial(scores, model, None, model.mesh) for model in self.models]
        results = [task.answered(each) for each in asked]
        if len(self.models) > 1:
            joint = partial(ensemble_scores, self.models, average=self.average)
            results.insert(0, task.answered(joint))
        return [each for each in results if each is not None]

    def held_out_loss(self, path: str) -> EnsembleLoss:
        """Return the mean loss per token of the texts at ``path``: a file, folder or glob of texts or of records."""
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
        return ensemble_loss(self.models, filter(None, steps), self.average)


def open_members(
    places: Sequence[Where],
    device: str,
    warn: Callable[[str], None],
    ema: bool = False,
    average: Average = "probabilities",
) -> EnsembleMembers:
    """Open the models at ``places``, which are those of an ensemble if they are several.

    ``device``, ``warn`` and ``ema`` are arguments of :func:`weft.checkpoint.model.open_model`. Raises
    :class:`UsageError` for models with other tokens than the first one, and for a model that is given twice.
    """
    from weft.checkpoint.model import open_model, tokenizer_of

    names = tuple(map(str, places))
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(
            f"{twice} is given twice; members of an ensemble are different models"
        )
    opened = [open_model(place, device, warn, ema) for place in places]
    tokenizers = [
        tokenizer_of(each.files, place)
        for each, place in zip(opened, places, strict=True)
    ]
    vocabularies = [each.model.shape.vocab for each in opened]
    for name, tokenizer, vocab in zip(names, tokenizers, vocabularies, strict=True):
        if not tokenizers[0].has_ids_of(tokenizer) or vocab != vocabularies[0]:
            raise UsageError(
                f"{name} has other tokens than {names[0]}, so that their probabilities cannot be averaged; give models "
                "with the same tokenizer"
            )
    return EnsembleMembers(
        names,
        tuple(each.model for each in opened),
        tokenizers[0],
        min(each.length or CONTEXT for each in opened),
        average,
    )
