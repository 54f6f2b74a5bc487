"""Weights in tiles: ``memory.tiles``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.refusal import Rule
from weft.registry import register
from weft.train.phases import Phase
from weft.train.step_technique import StepTechnique

if TYPE_CHECKING:
    from weft.recipe import Recipe
    from weft.train.step import PhaseFiller, StepContext


@register(
    "phases",
    "tiled-weights",
    rules=(
        Rule(
            "tiles of weights that stay",
            "memory",
            lambda a: not a.memory.offloads_state,
            "memory.tiles = {0.memory.tiles} brings and frees tiles of weights that rest elsewhere, and memory.weights "
            "= 'device' keeps all there",
            "set memory.weights = 'file' or 'host', or leave memory.tiles out",
        ),
        Rule(
            "tiles with updates of whole matrices",
            "optimizer",
            lambda a: not a.optimizer.elementwise or a.optimizer.state != "float32",
            "memory.tiles updates a weight tile by tile, and optimizer.kind = {0.optimizer.kind!r} with state = "
            "{0.optimizer.state!r} needs the whole of it",
            "use adamw, sgd or lion with state = 'float32', or leave memory.tiles out",
        ),
        Rule(
            "tiles with updates of another order",
            "memory optimizer",
            lambda a: (
                a.memory.speculate != "none"
                or a.memory.alternate != 0
                or a.optimizer.estimate == "zeroth-order"
                or a.optimizer.in_backward
                or a.optimizer.post_validation
            ),
            "memory.tiles updates a weight when its tiles are used next, and memory.speculate, memory.alternate, "
            "optimizer.estimate, optimizer.in_backward and optimizer.post_validation have other times for that",
            "leave one of them out",
        ),
        Rule(
            "tiles of weights that other code reads whole",
            "adapter train model",
            lambda a: a.adapter is not None or a.train.compile or bool(a.model.kind),
            "memory.tiles is for the products of Weft's own transformer, and [adapter], train.compile and model.kind "
            "read their weights whole",
            "leave one of them out",
        ),
        Rule(
            "tiles with selective recompute",
            "train",
            lambda a: a.train.recompute == "selective",
            "memory.tiles updates and fetches tiles within a block's forward, and train.recompute = 'selective' keeps "
            "results by counting its operators, which are others when it computes again",
            "use train.recompute = 'full' or 'none', or leave memory.tiles out",
        ),
        Rule(
            "tiles with passes of other parts",
            "layout",
            lambda a: bool(a.layout.balance or a.layout.overlap or a.layout.secondary),
            "memory.tiles gathers tiles where a product runs, and layout.balance, layout.overlap and layout.secondary "
            "gather at other times",
            "leave one of them out",
        ),
    ),
    title="Products larger than memory: weights come, multiply and go in tiles, forward, backward and update",
    paper="Rajbhandari et al. 2021 (ZeRO-Infinity)",
    recipe="files.toml --set memory.tiles=4",
    proof="tests/parallel/test_tiles.py",
    figure="equal to one device to 1e-10 under shard, dp, tp, cp and pp; bytes counted; with 16 tiles of weights of "
    "32 MiB steps have 0.39 of a weight more in memory than without these weights, 0.13 if one is read at a time, "
    "12.3 without tiles (`bench/tiles.py`); not measured on a GPU",
)
class TiledWeightsTechnique(StepTechnique):
    """Cuts the weights of projections in tiles, which are fetched, used and freed one by one (Rajbhandari et al. 2021).

    It fills no phase: the units of the state are built in tiles (:mod:`weft.parallel.tiles`).
    """

    fills = Phase(0)
    does = "memory.tiles = {0.memory.tiles} updates weights tile by tile"

    def fill(self, context: StepContext, recipe: Recipe) -> PhaseFiller | None:
        return None
