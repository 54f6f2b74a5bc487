"""Estimates how long a stage of a workflow takes an engine, from earlier requests of the same stage."""

from collections import OrderedDict
from dataclasses import dataclass

#: Weight of a new request in the means, once there are enough, so that the means follow a load that changes.
FRESH = 0.02
#: Labels that are remembered; those that were seen longest ago are forgotten first.
LABELS = 1024


@dataclass
class RunningMean:
    """Mean of the values so far; later values count more."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Let ``value`` count in the mean."""
        self.count += 1
        self.value += (value - self.value) * max(1 / self.count, FRESH)


class StageTimes:
    """Estimates seconds of stages: mean tokens of each stage, times the seconds per token that were measured.

    Attributes:
        ``prompt_second``: seconds of an engine per prompt token.
        ``written_second``: seconds of an engine per written token.
    """

    def __init__(self) -> None:
        self.prompt_second, self.written_second = RunningMean(), RunningMean()
        self._prompts: OrderedDict[str, RunningMean] = OrderedDict()
        self._written: dict[str, RunningMean] = {}
        self._all = RunningMean(), RunningMean()

    def note_tokens(self, stage: str, prompt: int, written: int) -> None:
        """Let a request that has ended count in the mean tokens of ``stage``. ``prompt``, ``written``: its tokens."""
        if stage not in self._prompts:
            self._prompts[stage] = RunningMean()
            self._written[stage] = RunningMean()
            if len(self._prompts) > LABELS:
                del self._written[self._prompts.popitem(last=False)[0]]
        self._prompts.move_to_end(stage)
        for mean, tokens in (
            (self._prompts[stage], prompt), (self._written[stage], written),
            (self._all[0], prompt), (self._all[1], written),
        ):  # fmt: skip
            mean.add(tokens)

    def tokens(self, stage: str) -> tuple[float, float]:
        """Return the mean tokens of a prompt and of an answer of ``stage``; for an unknown stage, those of all."""
        prompt, written = (
            (self._prompts[stage], self._written[stage])
            if stage in self._prompts
            else self._all
        )
        return prompt.value, written.value

    def seconds(self, stage: str) -> float:
        """Return the estimated seconds of a request of ``stage`` without waiting. As long as nothing has been measured,
        all stages take a second.
        """
        prompt, written = self.tokens(stage)
        seconds = (
            prompt * self.prompt_second.value + written * self.written_second.value
        )
        return seconds or 1.0
