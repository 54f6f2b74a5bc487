"""Rows of the table of embeddings that a batch's tokens name: ``memory.embedding``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.refusal import Rule
from weft.registry import register
from weft.train.phases import Phase
from weft.train.step_technique import StepTechnique

if TYPE_CHECKING:
    from weft.recipe import Optimizer, Recipe
    from weft.train.step import PhaseFiller, StepContext


def needs_whole_table(optimizer: Optimizer) -> bool:
    """Return whether the update of a row of the embedding table depends on other rows, so that rows cannot be updated
    alone.

    This is not so for optimizers such as Muon that update only the matrices of blocks, and leave the embedding to
    AdamW.
    """
    rule = optimizer.update_rule
    return optimizer.state != "float32" or not (rule.elementwise or rule.for_matrices)


@register(
    "phases",
    "embedding-rows",
    rules=(
        Rule(
            "rows of a table that stays",
            "memory",
            lambda a: not a.memory.offloads_state,
            "memory.embedding = 'rows' brings rows of a table that rests elsewhere, and memory.weights = 'device' "
            "keeps all of it there",
            "set memory.weights = 'file' or 'host', or leave memory.embedding out",
        ),
        Rule(
            "rows alone with updates of the whole",
            "optimizer",
            lambda a: needs_whole_table(a.optimizer),
            "memory.embedding = 'rows' updates rows by themselves, and optimizer.kind = {0.optimizer.kind!r} with "
            "state = {0.optimizer.state!r} needs the whole table",
            "use adamw, sgd or lion with state = 'float32', or leave memory.embedding out",
        ),
        Rule(
            "rows of a table that is also the output layer",
            "shape layout",
            lambda a: a.shape.tied or a.layout.vocab_barriers > 0,
            "memory.embedding = 'rows' has no whole table, and model.tied or layout.vocab_barriers compute with it",
            "set model.tied = false and leave layout.vocab_barriers out, or leave memory.embedding out",
        ),
        Rule(
            "rows of a table that other code reads whole",
            "adapter train model layout memory optimizer",
            lambda a: (
                a.adapter is not None
                or a.train.compile
                or bool(a.model.kind)
                or bool(a.layout.balance or a.layout.overlap or a.layout.secondary)
                or a.layout.island > 1
                or a.memory.speculate != "none"
                or a.memory.alternate != 0
                or a.optimizer.estimate == "zeroth-order"
                or a.optimizer.in_backward
                or a.optimizer.post_validation
            ),
            "memory.embedding = 'rows' is for plain passes and updates of Weft's own transformer, and [adapter], "
            "train.compile, model.kind, layout.balance, overlap, secondary and island, memory.speculate and alternate, "
            "optimizer.estimate, in_backward and post_validation have others",
            "leave one of them out",
        ),
    ),
    title="Rows gathered for embeddings in training: those of a batch's tokens are read, updated and written",
    paper="Min et al. 2021 (PyTorch-Direct)",
    recipe="files.toml --set memory.embedding=rows --set model.tied=false",
    proof="tests/parallel/test_embedding_rows.py",
    figure="equal to one device to 1e-10, also with AdamW, decay and ema, whose rows make up for missed updates when "
    "they are read next; bytes are unique rows x width, counted; by the host, not by a GPU",
)
class EmbeddingRowsTechnique(StepTechnique):
    """Loads only those rows of the embedding table that a batch's tokens name, and updates only these (PyTorch-Direct,
    Min et al. 2021). It fills no phase of the step: the table is a unit of its own kind
    (:mod:`weft.parallel.row_lookup`).
    """

    fills = Phase(0)
    does = "memory.embedding = {0.memory.embedding!r} updates rows of tokens alone"

    def fill(self, context: StepContext, recipe: Recipe) -> PhaseFiller | None:
        return None
