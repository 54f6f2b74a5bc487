"""Batches of given answers, for proofs: the same rows under every layout, without a model that writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.data.loader import Loader
from weft.data.order import Row, RowList, hash_keys
from weft.data.policy_rows import PolicySample, policy_rows
from weft.data.shared_prompts import share_prompts

if TYPE_CHECKING:
    from weft.data.batch import Batch
    from weft.layout.layout import Layout
    from weft.layout.mesh import Mesh
    from weft.recipe import ModelShape
    from weft.rl.rl_phases import RlPhases


def row_batches(
    job: RlPhases, mesh: Mesh, rows: Sequence[Row], position: int
) -> list[Batch]:
    """Divide the ``rows`` of a step among the ranks of ``mesh``, and return the batches of this rank, one per pass.

    ``job``: the recipe's settings of batches. Each row is one sample; the first of them has the number ``position``.
    """
    recipe = job.recipe
    per_pass, passes = recipe.rows_per_pass(mesh.layout)
    full = recipe.data.seq_len if recipe.train.compile else 0
    batches = divided_rows(rows, mesh, recipe.train.batch, per_pass, passes, full)
    if shares_prompts(job, mesh.layout, job.shape):
        batches = [share_prompts(batch, mesh.size("tp")) for batch in batches]
    return [replace(b, samples=tuple(position + i for i in b.samples)) for b in batches]


def shares_prompts(job: RlPhases, layout: Layout, shape: ModelShape) -> bool:
    """Return whether a model of ``shape`` under ``layout`` computes prompts once that answers share.

    It can if attention to all tokens before it is all that a token gets of others, and if rows are neither cut nor
    given to a critic beside the policy. Compiled blocks do not share prompts, because each new number of tokens would
    compile them again.
    """
    plain = not (shape.kind or shape.mixtures or layout.overlap)
    attends = all(
        shape.mixer_of(i) == "softmax" and not shape.window_of(i)
        for i in range(shape.layers)
    )
    critic = job.roles.critic
    beside = critic.is_apart and not critic.elsewhere
    other = beside or job.roles.rollout.invariant or job.recipe.train.compile
    whole = layout.size("cp", "pp") == layout.ep == 1
    return job.rl.share_prompts and plain and attends and whole and not other


def divided_rows(
    rows: Sequence[Row], mesh: Mesh, batch: int, per_pass: int, passes: int, full: int
) -> list[Batch]:
    """Divide the ``rows`` of a step of ``batch`` samples among the ranks of ``mesh``; return this rank's batches.

    ``per_pass``, ``passes``: number of rows of a rank in a pass, and of passes. ``full``: number of tokens to which
    every row is padded; 0: a rank joins its rows of a pass, which are padded to the longest of any rank.
    """
    longest = full or max(len(row.tokens) for row in rows)
    loader = Loader(
        RowList(rows), mesh.layout, mesh.batch_rank, mesh.rank("cp"), batch, per_pass, passes, longest,
        joined=not full,
    )  # fmt: skip
    return loader.step(0) or []


@dataclass(frozen=True)
class RecordedLoader:
    """Loader of reference answers with artificial advantages, for comparing layouts (``weft verify``).

    A comparison needs the same answers under all layouts, so the questions' reference answers of ``job`` take the place
    of sampled ones. ``mesh``: this rank's position among the ranks.
    """

    job: RlPhases
    mesh: Mesh

    @property
    def over(self) -> str:
        """Why samples have ended early: always an empty text, because the answers of all steps are known."""
        return ""

    def is_ready(self, position: int) -> bool:
        """Return True: the answers for the step at ``position`` are known from the beginning."""
        return True

    def make_ready(self, position: int) -> bool:
        """Return True without doing anything, because the answers of every step are known from the beginning."""
        return True

    def questions(self) -> dict[str, Any]:
        """Return held-out questions to evaluate the model on, by task: an empty dict, because this loader has none."""
        return {}

    def island_samples(self, position: int) -> range:
        """Return the numbers of the samples of this rank's island (here all ranks) in the step that starts at
        ``position``.
        """
        return range(position, position + self.job.recipe.train.batch)

    def step(self, position: int) -> list[Batch]:
        """Return the batches of this rank, one per pass, of the step that starts at sample ``position``."""
        samples = [self._sample(number) for number in self.island_samples(position)]
        rows = [policy_rows([s], len(s.ids), self.job.loss).rows[0] for s in samples]
        return row_batches(self.job, self.mesh, rows, position)

    def _sample(self, number: int) -> PolicySample:
        given, following = self.job.questions.question(number).text
        # without a known answer the prompt itself is one
        ids = np.array([*given, *(following or given)], np.int64)
        learns = np.arange(len(ids)) >= len(given)
        drawn = hash_keys(number, np.arange(len(ids))) / 2.0**64
        advantage = 2 * float(hash_keys(number, 1)[0] / 2.0**64) - 1
        chances = -3 * drawn - 0.1
        return PolicySample(
            ids,
            learns,
            np.where(learns, advantage, 0),
            chances,
            # near those of the model in every other sample
            None if number % 2 else chances - 0.1 * drawn,
            chances,
            drawn - 0.5,
            0.2 * drawn,
        )
