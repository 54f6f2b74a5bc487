"""Temperature: small sources more often than by their size, and less so as training goes on (cool-down)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, PositiveFloat

from weft.data.mix_plan import MixFacts
from weft.errors import UsageError
from weft.registry import register
from weft.section import Section


class TemperatureSettings(Section):
    """Settings of a mixture of data sources by size: the temperature, and how it falls during the run."""

    mix_temperature: PositiveFloat = Field(
        5.0,
        description=(
            "Temperature T: the share of a source with n tokens is proportional to weight * n^(1/T). With T = 1 a "
            "source comes in proportion to its size; the larger T, the more often small sources come."
        ),
    )
    mix_final_temperature: PositiveFloat | None = Field(
        None,
        description=(
            "Temperature at the end of the cool-down (see mix_cooldown), which begins with mix_temperature. If "
            "not set: there is no cool-down, and the temperature stays mix_temperature."
        ),
    )
    mix_cooldown: tuple[int | float, int | float] = Field(
        (0.0, 1.0),
        description=(
            "Beginning and end of the cool-down, in which the temperature changes from mix_temperature to "
            "mix_final_temperature. A whole number is a step, any other number a share of the run, such as [0.5, "
            "1.0] for its second half."
        ),
    )


@register(
    "mixture",
    "temperature",
    settings=TemperatureSettings,
    draws={
        "mix_temperature": (3.0,),
        "mix_final_temperature": (1.0,),
        "mix_cooldown": ([0, 2], [0.0, 0.5]),
    },
    title="Temperature sampling with cool-down",
    paper="Arivazhagan et al. 2019 (1907.05019); cool-down: Upsample or Upweight, Li et al. 2025 (2410.04579)",
    recipe="mixture.toml",
    proof="tests/data/test_mixtures.py, tests/train/test_mix_run.py",
    figure="shares to within one sample of their integral at every block's end; losses of dp, tp, pp, cp and shard "
    "equal one device's, through resumes; unseen prose, best cool-down beside best constant: 0.976x, 0.972x "
    "and 1.004x for three sizes of the small source, unseen code 0.983x, 0.972x and 0.962x (`bench/mixtures.py`)",
)
class Temperature:
    """Mixture of data sources by size: a source of ``n`` tokens has a share proportional to ``weight * n^(1/T)``
    (Arivazhagan et al. 2019; with a falling temperature, Li et al. 2025). The temperature ``T`` may fall during the
    run.
    """

    @classmethod
    def describe(cls, data: Any, facts: MixFacts) -> dict[str, Any]:
        settings = data.own(TemperatureSettings)
        begin, end = map(facts.sample, settings.mix_cooldown)
        last = settings.mix_final_temperature
        if last is not None and begin >= end:
            raise UsageError(
                f"data.mix_cooldown = {[*settings.mix_cooldown]} ends before it begins; set its beginning, then its end"
            )
        about: dict[str, Any] = {
            "weights": [*facts.weights],
            "tokens": [*facts.tokens],
            "temperatures": [
                settings.mix_temperature,
                last or settings.mix_temperature,
            ],
        }
        if last is None:
            return about | {"samples": [0, 0], "block": 1024}
        return about | {"samples": [begin, end], "block": facts.block}

    def __init__(self, about: Mapping[str, Any]) -> None:
        self.weights, self.tokens = about["weights"], about["tokens"]
        self.temperatures, self.samples = about["temperatures"], about["samples"]

    def temperature(self, sample: float) -> float:
        """Return the temperature ``T`` at the sample number ``sample`` of the run."""
        (first, last), (begin, end) = self.temperatures, self.samples
        cooled = (sample - begin) / (end - begin) if end > begin else 0.0
        return float(first + (last - first) * min(1.0, max(0.0, cooled)))

    def shares(self, first: int, last: int) -> Sequence[float]:
        inverse = 1 / self.temperature((first + last) / 2)
        most = max(self.tokens)
        raw = [
            weight * (count / most) ** inverse
            for weight, count in zip(self.weights, self.tokens, strict=True)
        ]
        total = sum(raw)
        return [share / total for share in raw]
