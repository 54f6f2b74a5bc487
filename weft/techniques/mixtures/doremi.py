"""DoReMi: weights of the sources are learned by a small model, by how far its losses are above a reference model's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from weft.data.mix_plan import MixFacts
from weft.errors import UsageError
from weft.registry import register
from weft.section import Section


class DoremiSettings(Section):
    """Settings of DoReMi: its reference model, step size and smallest weights."""

    mix_reference: str = Field(
        "",
        description=(
            "Reference model with the same tokenizer: a run, a checkpoint, a folder or an id of the Hugging Face "
            "hub. The loss of each source under the trained model is compared with its loss under this model. It "
            "must be set."
        ),
    )
    mix_rate: float = Field(
        1.0,
        ge=0,
        description=(
            "How fast the weights of the sources change. Each step multiplies a source's weight by exp(mix_rate * "
            "excess) and rescales all weights to add up to 1. The excess is how far the source's loss is above that "
            "of the reference model, or 0 if it is below."
        ),
    )
    mix_floor: float = Field(
        1e-4,
        ge=0,
        lt=1,
        description=(
            "Part of the total weight that is divided equally among all sources after each step, so that no source "
            "loses all its weight."
        ),
    )


@register(
    "mixture",
    "doremi",
    settings=DoremiSettings,
    title="DoReMi: weights against a reference model",
    paper="Xie et al. 2023 (2305.10429)",
    recipe="mixture.toml --set data.mix=doremi --set data.mix_reference=runs/reference",
    proof="tests/train/test_measured_mix.py",
    figure="uniform weights where proxy and reference are the same; every layout equals one device",
)
class Doremi:
    """Mixture of data sources (DoReMi): samples are drawn with fixed shares, and the losses of a source are multiplied
    by a weight (Xie et al. 2023). The weights of sources with a larger excess loss over a reference model grow.
    """

    measures: ClassVar = "steps"

    @classmethod
    def describe(cls, data: Any, facts: MixFacts) -> dict[str, Any]:
        settings = data.own(DoremiSettings)
        if not settings.mix_reference:
            raise UsageError(
                "data.mix = 'doremi' compares losses with those of a reference model; set data.mix_reference to a "
                "checkpoint that was trained with mix = 'static'"
            )
        if data.mix_by == "weighting":
            raise UsageError(
                "data.mix = 'doremi' weighs losses itself; leave data.mix_by out"
            )
        return {
            "weights": [*facts.weights],
            "reference": settings.mix_reference,
            "rate": settings.mix_rate,
            "floor": settings.mix_floor,
        }

    def __init__(
        self, about: Mapping[str, Any], state: dict[str, Any] | None = None
    ) -> None:
        self.about, self.state = about, {} if state is None else state
        count, total = len(about["weights"]), sum(about["weights"])
        self.sampled = [weight / total for weight in about["weights"]]
        self.state.setdefault("w", [1 / count] * count)
        self.state.setdefault("scores", [0.0] * count)
        self.state.setdefault("sum", [0.0] * count)
        self.state.setdefault("steps", 0)

    def bound(self, state: dict[str, Any]) -> Doremi:
        """Return this mixture with the weights in ``state``. Later calls change ``state`` in place, and a checkpoint
        stores it.
        """
        return Doremi(self.about, state)

    def knows(self, first: int, last: int) -> bool:
        """Return whether the losses' weights for the step that begins at sample number ``first`` have been decided.
        ``last`` is not used.
        """
        return bool(self.state.get("position") == first)

    def decide(self, position: int, excess: Sequence[float | None]) -> None:
        """Update the weights of the sources for the step that begins at sample number ``position``. ``excess``: mean
        excess loss of each source; None for a source without samples in the step.
        """
        state = self.state
        state["scores"] = [
            before if new is None else new
            for before, new in zip(state["scores"], excess, strict=True)
        ]
        most = max(state["scores"])
        raw = [
            w * math.exp(self.about["rate"] * (score - most))
            for w, score in zip(state["w"], state["scores"], strict=True)
        ]
        floor = self.about["floor"]
        state["w"] = [(1 - floor) * x / sum(raw) + floor / len(raw) for x in raw]
        state["sum"] = [a + w for a, w in zip(state["sum"], state["w"], strict=True)]
        state["steps"] += 1
        state["position"] = position

    @property
    def average(self) -> list[float]:
        """Mean of each source's weight over all steps, in the order of the sources. It is the result of DoReMi, by
        which a later run draws its samples.
        """
        steps = self.state["steps"]
        return [x / steps for x in self.state["sum"]] if steps else [*self.state["w"]]

    def shares(self, first: int, last: int) -> Sequence[float]:
        weights: list[float] = self.state["w"]
        return weights
