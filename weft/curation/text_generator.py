"""What writes texts for a pipeline: a model in this process, a server, or a copier as the control."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class PromptToWrite(NamedTuple):
    """A prompt that a generator is to answer with a text.

    Attributes:
        ``number``: number of the prompt; the written text carries the same number.
        ``prompt``: the prompt, which contains the passage.
        ``passage``: the passage that the text is to be about.
        ``seed``: seed of the random numbers, below 2^31.
    """

    number: int
    prompt: str
    passage: str
    seed: int


class WrittenText(NamedTuple):
    """A text that a generator has written.

    Attributes:
        ``number``: number of its prompt.
        ``text``: the text.
        ``cut``: whether the text was cut off at the largest number of tokens.
        ``failed``: reason why no text was written; "" if one was.
    """

    number: int
    text: str
    cut: bool = False
    failed: str = ""


@dataclass(frozen=True)
class WritingSettings:
    """Settings of a generator: length of texts and sampling.

    Attributes:
        ``tokens``: largest number of tokens of a text.
        ``temperature``: temperature of sampling; 0: always the likeliest token.
        ``top_k``: sample from this many likeliest tokens; 0: from all.
        ``top_p``: sample from the fewest likeliest tokens whose probabilities add up to this number.
    """

    tokens: int
    temperature: float
    top_k: int
    top_p: float


class TextGenerator(Protocol):
    """Interface of generators, which write synthetic texts for the prompts of a data pipeline."""

    def digest(self) -> str:
        """Return a hash of everything that determines the texts: weights, tokenizer, kind of arithmetic."""
        ...

    def count(self, text: str) -> int:
        """Return the number of tokens of ``text``, or an estimate."""
        ...

    def write(
        self, prompts: Iterable[PromptToWrite], settings: WritingSettings
    ) -> Iterator[WrittenText]:
        """Yield the text of each prompt as soon as it is written, in any order.

        The text depends on its prompt, its seed and the settings alone, not on the other prompts. Raises
        :class:`weft.errors.WeftError` if the generator itself fails.
        """
        ...


class CopyGenerator:
    """Generator that returns each passage unchanged, for control experiments in which data is only repeated."""

    def digest(self) -> str:
        return "copy"

    def count(self, text: str) -> int:
        from weft.curation.passages import word_count

        return word_count(text)

    def write(
        self, prompts: Iterable[PromptToWrite], settings: WritingSettings
    ) -> Iterator[WrittenText]:
        for prompt in prompts:
            yield WrittenText(prompt.number, prompt.passage)
