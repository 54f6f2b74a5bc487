"""Online: the sources whose losses are furthest above their targets come more often from then on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field, PositiveFloat, PositiveInt

from weft.data.mix_plan import MixFacts
from weft.errors import UsageError, nearest
from weft.registry import register
from weft.section import Section


class OnlineSettings(Section):
    """Settings of a mixture of data sources whose shares follow measured losses."""

    mix_every: PositiveInt = Field(
        50,
        description=(
            "Number of steps between two measurements of the sources' losses. After each measurement the shares of "
            "the sources change."
        ),
    )
    mix_rows: PositiveInt = Field(
        16,
        description="Number of held-out sequences of each source on which its loss is measured.",
    )
    mix_rate: PositiveFloat = Field(
        1.0,
        description=(
            "How fast the shares of the sources change. Each measurement multiplies a source's share by "
            "exp(mix_rate * excess) and rescales all shares to add up to 1. The excess is how far the source's loss "
            "is above its target (see mix_targets), or 0 if it is below."
        ),
    )
    mix_floor: float = Field(
        0.01,
        gt=0,
        lt=1,
        description=(
            "Part of the samples that is divided equally among all sources, whatever their losses, so that no "
            "source disappears."
        ),
    )
    mix_targets: dict[str, float] = Field(
        {},
        description=(
            "Target of each source by its name: the loss that it should reach, such as that of a reference model. A "
            "source whose loss is above its target comes more often. A source that is not named has the target 0."
        ),
    )


@register(
    "mixture",
    "online",
    settings=OnlineSettings,
    title="Weights that follow the sources' losses",
    paper="dynamic batch loading of Sheared LLaMA, Xia et al. 2024 (2310.06694)",
    recipe="mixture.toml --set data.mix=online --set data.mix_every=10",
    proof="tests/train/test_measured_mix.py",
    figure="decisions and losses of every layout equal one device's, through resumes",
)
class Online:
    """Mixture of data sources whose shares follow losses on held-out rows. After each measurement a source's share is
    multiplied by ``exp(rate * excess)``, where the excess is its loss above its target, at least 0. The shares are then
    scaled to add up to 1, and mixed with equal shares by the weight ``floor``, so that none vanishes.
    """

    measures: ClassVar = "held-out"
    foreseen: ClassVar = False

    @classmethod
    def describe(cls, data: Any, facts: MixFacts) -> dict[str, Any]:
        settings = data.own(OnlineSettings)
        if data.epochs:
            raise UsageError(
                "data.mix = 'online' does not know in advance when a source ends; leave data.epochs out, and set "
                "train.steps"
            )
        for name in settings.mix_targets:
            if name not in facts.names:
                raise UsageError(
                    f"data.mix_targets: no source is called {name!r}; {nearest(name, facts.names)}"
                )
        return {
            "weights": [*facts.weights],
            "start": facts.position,
            "block": settings.mix_every * facts.batch,
            "rows_measured": settings.mix_rows,
            "rate": settings.mix_rate,
            "floor": settings.mix_floor,
            "targets": [settings.mix_targets.get(name, 0.0) for name in facts.names],
        }

    def __init__(
        self, about: Mapping[str, Any], state: dict[str, Any] | None = None
    ) -> None:
        self.about, self.state = about, {} if state is None else state
        self.rows = about["rows_measured"]
        total = sum(about["weights"])
        first = [weight / total for weight in about["weights"]]
        self.decided: list[list[float]] = self.state.setdefault("shares", [first])

    def bound(self, state: dict[str, Any]) -> Online:
        """Return this mixture with the decisions in ``state``. Later calls change ``state`` in place, and a checkpoint
        stores it.
        """
        return Online(self.about, state)

    def knows(self, first: int, last: int) -> bool:
        """Return whether the shares of the sources have been decided for all samples up to number ``last``. ``first``
        is not used.
        """
        return self._block(last) < len(self.decided)

    def _block(self, sample: int) -> int:
        return max(0, sample - self.about["start"]) // int(self.about["block"])

    def decide(self, position: int, losses: Sequence[float | None]) -> None:
        """Decide the shares of the sources in the next block of samples, which begins at sample number ``position``.
        ``losses``: mean loss of each source; None for a loss that is not known.
        """
        excess = [
            0.0 if loss is None else max(0.0, loss - target)
            for loss, target in zip(losses, self.about["targets"], strict=True)
        ]
        most = max(excess)
        raw = [
            share * math.exp(self.about["rate"] * (above - most))
            for share, above in zip(self.decided[-1], excess, strict=True)
        ]
        floor = self.about["floor"]
        self.decided.append(
            [(1 - floor) * x / sum(raw) + floor / len(raw) for x in raw]
        )

    def recall(self, position: int, shares: Sequence[float]) -> None:
        """Add the ``shares`` that were decided for the block of sample number ``position``, unless they are known
        already.
        """
        if self._block(position) == len(self.decided):
            self.decided.append([*shares])

    def shares(self, first: int, last: int) -> Sequence[float]:
        return self.decided[min(self._block(first), len(self.decided) - 1)]
