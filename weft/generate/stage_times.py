"""Estimates how long a stage of a workflow takes an engine, from earlier requests of the same stage."""

from collections import OrderedDict
from dataclasses import dataclass

#: Weight of a new request in the means, once there are enough, so that the means follow a load that changes.
FRESH = 0.02
#: Labels that are remembered; those that were seen longest ago are forgotten first.
LABELS = 1024


@dataclass
class RunningMean:
    """A running mean in which later values count more. ``value``: the mean. ``count``: number of values so far."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Include a further ``value`` in the mean."""
        self.count += 1
        self.value += (value - self.value) * max(1 / self.count, FRESH)


class StageTokens:
    """Mean numbers of tokens of the prompts and of the answers of each stage of a workflow, by the stage's label."""

    def __init__(self) -> None:
        self._stages: OrderedDict[str, tuple[RunningMean, RunningMean]] = OrderedDict()
        self._all = RunningMean(), RunningMean()

    def note(self, stage: str, prompt: int, written: int) -> None:
        """Include a request that has ended in the means of ``stage``. ``prompt``, ``written``: numbers of its prompt's
        and its answer's tokens.
        """
        means = self._stages.setdefault(stage, (RunningMean(), RunningMean()))
        self._stages.move_to_end(stage)
        if len(self._stages) > LABELS:
            self._stages.popitem(last=False)
        for prompts, answers in (means, self._all):
            prompts.add(prompt)
            answers.add(written)

    def mean(self, stage: str) -> tuple[float, float]:
        """Return two means of ``stage``: tokens of a prompt, and tokens of an answer. For an unknown stage, return the
        means over all stages.
        """
        prompts, answers = self._stages.get(stage, self._all)
        return prompts.value, answers.value


class StageTimes:
    """Estimates seconds of stages on an engine: mean tokens of each stage, times the seconds per token measured there.

    Attributes:
        ``tokens``: mean tokens of stages; several engines can share them.
        ``prompt_second``: seconds of the engine per prompt token.
        ``written_second``: seconds of the engine per written token.
    """

    def __init__(self, tokens: StageTokens | None = None) -> None:
        self.tokens = tokens or StageTokens()
        self.prompt_second, self.written_second = RunningMean(), RunningMean()

    @property
    def measured(self) -> bool:
        """Whether a request has been answered on the engine, so that its seconds per token are known."""
        return bool(self.prompt_second.count or self.written_second.count)

    def writing_seconds(self, stage: str) -> float:
        """Return the estimated seconds of a request of ``stage`` from its first token on."""
        return self.tokens.mean(stage)[1] * self.written_second.value

    def seconds(self, stage: str) -> float:
        """Return the estimated seconds of a request of ``stage`` without waiting. As long as nothing has been measured,
        all stages take a second.
        """
        reading = self.tokens.mean(stage)[0] * self.prompt_second.value
        return reading + self.writing_seconds(stage) or 1.0
