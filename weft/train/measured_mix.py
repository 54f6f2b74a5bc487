"""Mixtures that follow measured losses: a loader measures before the steps that need it, and checkpoints keep the rest.

What is measured is a sum over all ranks, so that all of them decide alike, and equal under every layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from weft.data.mix_leg import MixLeg
from weft.train.mix_run import MIX, decisions_of_mix, with_decisions
from weft.train.source_losses import SourceRow, label_losses, mean_by_source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.data.batch import Batch
    from weft.data.loader import Corpus, Loader
    from weft.layout.mesh import Mesh
    from weft.models.transformer import Transformer
    from weft.parallel.build import Built
    from weft.recipe import Recipe
    from weft.train.step_loader import RunRecords


@dataclass
class MeasuredLoader:
    """Loader of a run whose mixture of data sources follows losses that are measured during training.

    Attributes:
        ``loader``: loader of the samples, in the order of the mixture.
        ``leg``: the part of the order of samples that is read at present; a part has one mixture.
        ``mixture``: the mixture of this part, which computes the sources' shares from the measured losses.
        ``recipe``: the run's recipe.
        ``corpus``: the opened data.
        ``mesh``: this rank's position among the ranks.
        ``built``: the model that is trained, and its state.
        ``recorder``: writes the run's records.
        ``reference``: reference model, whose losses are subtracted from the model's; None without one.
    """

    loader: Loader
    leg: MixLeg
    mixture: Any
    recipe: Recipe
    corpus: Corpus
    mesh: Mesh
    built: Built
    recorder: RunRecords
    reference: Transformer | None = None

    @property
    def over(self) -> str:
        """Reason why no samples are left; always an empty text, because the samples of this loader do not run out."""
        return ""

    def is_ready(self, position: int) -> bool:
        """Return whether the mixture is decided for the whole step that starts at sample ``position``.

        If not, :meth:`make_ready` must measure losses first.
        """
        last = position + self.recipe.train.batch - 1
        return bool(self.mixture.knows(position, last))

    def make_ready(self, position: int) -> bool:
        """Measure the loss of each source, let the mixture decide its next shares, and record both. Collective.

        ``position``: index of the first sample of the step. Returns True, because the run always goes on.
        """
        count = len(self.corpus.names)
        if self.mixture.measures == "steps":
            rows = self._rows_of_step(position)
            own = self._losses(rows)
            assert self.reference is not None
            reference = label_losses(self.reference, self.mesh, self.recipe, rows)
            values = (own - reference).clamp(min=0)
        else:
            rows = self._held_rows()
            values = self._losses(rows)
        means = mean_by_source(values, rows, count, self.built.state, self.mesh)
        if all(value is None or math.isfinite(value) for value in means):
            self.mixture.decide(position, means)
        else:
            self.mixture.decide(position, [None] * count)
        names = self.corpus.names
        shares = self.mixture.shares(position, position + 1)
        self.recorder.log(
            "mix",
            losses=dict(zip(names, means, strict=True)),
            shares=dict(zip(names, shares, strict=True)),
            **(
                {"decided": self.mixture.decided[-1]}
                if self.leg.weighed is None
                else {}
            ),
        )
        train = self.recipe.train
        if (average := getattr(self.mixture, "average", None)) and (
            position // train.batch + 1 == train.steps
        ):
            said = ", ".join(
                f"{name} {weight:.4f}"
                for name, weight in zip(names, average, strict=True)
            )
            self.recorder.event(
                f"weights of the sources, mean of all steps: {said}; train with these weights and mix = 'static'"
            )
        return True

    def _losses(self, rows: Sequence[SourceRow]) -> torch.Tensor:
        return label_losses(self.built.model, self.mesh, self.recipe, rows)

    def _rows_of_step(self, position: int) -> list[SourceRow]:
        """Return the rows of the step that starts at sample ``position``."""
        order = self.loader.order
        rows, end = [], position + self.recipe.train.batch
        for sample in range(position, min(end, order.total or end)):
            source, index = order.locate(sample)  # type: ignore[union-attr]  # of sources
            rows.append(SourceRow(order.streams[source].row(index), source))  # type: ignore[union-attr]
        return rows

    def _held_rows(self) -> list[SourceRow]:
        """Return the first rows of the documents of each source that are held out, or else of those trained on."""
        corpus, rows = self.corpus, list[SourceRow]()
        held = corpus.validation.streams if corpus.validation else ()
        for source, stream in enumerate(corpus.train.streams):
            measured = next((each for each in held if each.ids is stream.ids), stream)
            count = min(self.mixture.rows, measured.rows)
            rows += [SourceRow(measured.row(i), source) for i in range(count)]
        return rows

    def questions(self) -> dict[str, Any]:
        """Return an empty dict, because this loader brings no evaluations of its own (:meth:`StepLoader.questions`)."""
        return {}

    def step(self, position: int) -> list[Batch] | None:
        """Return the batches of the step that starts at sample ``position``; None at the data's end."""
        return self.loader.step(position)

    def island_samples(self, position: int) -> range:
        """Return the indices, in the training order, of the samples that this rank's island uses in one step.

        ``position``: index of the first sample of the step.
        """
        return self.loader.island_samples(position)


def measured_loader(
    recipe: Recipe, corpus: Corpus, loader: Loader, mesh: Mesh, built: Built, recorder: RunRecords, kept: dict[str, Any]
) -> MeasuredLoader:  # fmt: skip
    """Return the loader of a run whose mixture follows measured losses. Collective.

    ``loader``: loader of the training samples of ``corpus``. ``built``: the model that is trained, and its state.
    ``recorder``: writes the run's records. ``kept``: JSON values that checkpoints keep, in which the mixture keeps its
    decisions.
    """
    order = corpus.train
    leg = order.legs[-1]
    state = decisions_of_mix(kept[MIX])
    assert state is not None
    leg = with_decisions(leg, state)
    bound: Any = leg.weighed or getattr(leg.plan, "mixture", None)
    loader = replace(loader, order=replace(order, legs=(*order.legs[:-1], leg)))
    reference = _reference(recipe, mesh) if bound.measures == "steps" else None
    return MeasuredLoader(
        loader, leg, bound, recipe, corpus, mesh, built, recorder, reference
    )


def _reference(recipe: Recipe, mesh: Mesh) -> Transformer:
    """Return the reference model of the mixture under the layout of the run. Collective."""
    from weft.checkpoint.weights import open_pretrained
    from weft.parallel.build import parallelize
    from weft.recipe import Memory

    opened = open_pretrained(recipe.data.mix_reference)  # type: ignore[attr-defined]  # a setting of the technique
    model, _ = parallelize(
        opened.shape, mesh, recipe.train, opened.values, recipe.data.seq_len, Memory()
    )
    return model
