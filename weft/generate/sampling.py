"""Settings of sampling."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling; by default tokens are sampled from the model's own probabilities.

    Attributes:
        ``temperature``: divisor of the logits; 0: always the likeliest token.
        ``top_k``: sample from this many likeliest tokens; 0: from all.
        ``top_p``: sample from the smallest set of likeliest tokens with at least this probability together.
        ``min_p``: leave out tokens with less than this fraction of the likeliest token's probability.
        ``repetition``: logits of tokens that occur in the prompt or the text are divided by it, or multiplied if they
            are negative.
        ``presence``: number that is subtracted from the logits of tokens that occur in the text.
        ``frequency``: number that is subtracted from a token's logit for each time that it occurs in the text.
        ``bias``: numbers that are added to logits, by token id.
        ``seed``: seed of the random numbers.
        ``tempered``: whether the reported log-probabilities are those at ``temperature``, and not the model's own.
    """

    temperature: float = 1.0  # 0 always takes the likeliest token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    # logits of what has been seen are divided by it, or multiplied if they are negative
    repetition: float = 1.0
    presence: float = 0.0  # taken from logits of what has been written
    frequency: float = 0.0  # taken as often as it was
    bias: Mapping[int, float] = field(default_factory=dict)  # added to logits
    seed: int = 0
    tempered: bool = False

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (0, 100), "top_k": (0, 2**31), "top_p": (1e-9, 1), "min_p": (0, 1),
            "repetition": (1e-3, 1e3), "presence": (-100, 100), "frequency": (-100, 100),
        }  # fmt: skip
        for name, (low, high) in ranges.items():
            if not low <= getattr(self, name) <= high:
                raise UsageError(
                    f"{name} = {getattr(self, name)} is not possible; give {low:g} to {high:g}"
                )

    @property
    def said_temperature(self) -> float:
        """Temperature of the log-probabilities that the answer reports: logits are divided by it before these are
        computed.
        """
        return self.temperature if self.tempered and self.temperature else 1.0

    @property
    def penalises(self) -> bool:
        """Whether the settings change logits by the tokens that the text already has: by ``repetition``, ``presence``
        or ``frequency``.
        """
        return self.repetition != 1 or bool(self.presence or self.frequency)


#: Always the likeliest token.
GREEDY = Sampling(0)
