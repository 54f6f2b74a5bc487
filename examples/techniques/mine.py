"""Five techniques of a user's own, each by the interface that Weft's own ones use (``weft/techniques/``).

``weft train recipe.toml`` uses all of them, and ``weft verify recipe.toml --layout ...`` proves them like any others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field

from weft import register
from weft.layout.parts import Part
from weft.parallel.context.scheme import AttentionScheme
from weft.parallel.context.tables import TileTable, contiguous_owners, tiles_between
from weft.parallel.state import Held
from weft.recipe import Optimizer
from weft.schedule.actions import Order
from weft.schedule.build.turns import alternate
from weft.schedule.builder import Number, ScheduleBuilder, ramp
from weft.schedule.times import Times
from weft.section import Section
from weft.sync.compressor import Compressor, Payload, Spec
from weft.sync.simulated_round import Round
from weft.sync.sync_method import Slots, SyncMethod
from weft.train.rules.rank_sums import RankSums, count_update, like
from weft.train.rules.update_rule import UpdateRule

T = torch.Tensor


class SignumSettings(Section):
    """What Signum alone is set by."""

    beta: float = Field(
        0.9, ge=0, lt=1, description="Share of the momentum that is kept."
    )


@register("optimizer", "signum", settings=SignumSettings, draws={"beta": (0.0, 0.5)})
class Signum(UpdateRule):
    """The sign of the momentum (Bernstein et al. 2018, "signSGD")."""

    elementwise = True
    kept = 1.0

    def __init__(self, settings: Optimizer, ranks: RankSums) -> None:
        self.beta = settings.own(SignumSettings).beta

    def slots(self, held: Held) -> dict[str, Part]:
        return {"momentum": like(held)}

    def update(
        self, held: Sequence[Held], grads: Sequence[T], lr: float, decay: float
    ) -> None:
        count_update(held)
        for h, g in zip(held, grads, strict=True):
            momentum = h.slots["momentum"].values.lerp_(g, 1 - self.beta)
            h.local.mul_(1 - lr * decay).sub_(momentum.sign(), alpha=lr)


@register("schedule", "early-1f1b")
class EarlyOneForwardOneBackward(ScheduleBuilder):
    """1F1B with one more forward ahead, so that a late activation does not stall the rank below."""

    about = "1F1B with a forward more ahead, peak P + 1"
    paper = "of the user's own"

    def orders(
        self, ranks: int, microbatches: int, chunks: int, times: Times
    ) -> Sequence[Order]:
        return [
            alternate(["F", "B"], r, min(ranks - r, microbatches), microbatches)
            for r in range(ranks)
        ]

    def bubble(
        self, ranks: Number, microbatches: Number, chunks: Number, times: Times
    ) -> Number:
        return ramp(ranks, times)

    def in_flight(self, ranks: Number, chunks: Number, rank: Number) -> Number:
        return ranks - rank + 1


@register("context", "upward-ring")
class UpwardRing(AttentionScheme):
    """Ring attention whose keys and values go the other way round, to the rank with the earlier block."""

    def table(self, ranks: int) -> TileTable:
        owners = contiguous_owners(ranks)
        tiles = [
            tile
            for step in range(ranks)
            for rank in range(ranks)
            for tile in tiles_between(
                step, rank, owners[rank], owners[(rank + step) % ranks]
            )
        ]
        return TileTable("upward-ring", owners, tuple(tiles), buffers=2)


@register("sync", "plain-outer")
class PlainOuter(SyncMethod):
    """The mean difference, applied as it is: federated averaging (McMahan et al. 2017)."""

    def applied(self, theta: T, slots: Slots, answer: T, islands: int) -> T:
        return slots["anchor"].sub_(answer)

    def simulate(self, at: Round) -> None:
        if at.is_due:
            mean = at.mean(at.differences())
            for one in at.ones.values():
                one.kept["anchor"].sub_(mean)
                one.now.copy_(one.kept["anchor"])


@register("compressor", "half")
@dataclass(frozen=True)
class Half(Compressor):
    """Every element in bfloat16."""

    unbiased: bool = False
    linear = False

    @property
    def bytes_per_element(self) -> float:
        return 2.0

    def specs(self, shape: Sequence[int], dtype: torch.dtype) -> list[Spec]:
        return [(tuple(shape), torch.bfloat16)]

    def error(self, shape: Sequence[int]) -> float:
        return 2.0**-16

    def encode(self, x: T, seed: int, warm: T | None = None) -> Payload:
        return [x.bfloat16()]

    def decode(self, payload: Payload, shape: Sequence[int], seed: int) -> Any:
        return self._checked(payload, shape)[0].float()
