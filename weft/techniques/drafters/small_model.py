"""Guesses of a small model that reads the same texts (speculative decoding, 2211.17192 and 2302.01318).

The small model has an engine of its own. Each time it is asked, a request's text so far is a new prompt for the small
model. The prefix cache of its engine has what was computed before, and blocks of wrong guesses are never looked up.
Nothing has to be undone, therefore, whatever kinds of layers the model has.

With ``ahead``, a thread makes further guesses while the large model checks the last ones: for every position at which
these may turn out wrong, after the small model's likeliest other tokens there, and after the end of the guesses (the
branches of Mirror Speculative Decoding, 2510.13161, which takes them from an early layer of the large model). If the
text continues in one of these ways, its next guesses are there at once. On a device of its own the small model then
costs no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, NamedTuple, Self

from weft.errors import UsageError
from weft.generate.drafter import Drafter
from weft.registry import register

if TYPE_CHECKING:
    import torch

    from weft.generate.request import Generation
    from weft.models.transformer import Transformer

#: A text: ids from its first token on.
Text = tuple[int, ...]


class Guessed(NamedTuple):
    """The small model's continuation of a text.

    ``path``: its tokens. ``odds``: for each of them the distribution from which it was drawn, ``[vocab]``; empty for
    greedy requests. ``likeliest``: likely other tokens at each position of the path and after its end.
    """

    path: list[int]
    # [vocab] each, by which the path was drawn; none of greedy requests
    odds: list[torch.Tensor]
    likeliest: list[list[int]]  # at every position of the path and behind it


@register(
    "drafter",
    "small-model",
    title=(
        "Guesses of a small model, accepted by the ratio of chances; it goes on from "
        "likely outcomes while they are checked"
    ),
    paper="Leviathan et al. 2022; Chen et al. 2023; Bhendawade et al. 2025 (Mirror-SD)",
    recipe="weft generate --checkpoint RUN --prompt TEXT --draft SMALL --ahead 2",
    proof="tests/generate/test_draft.py, tests/generate/test_text_options.py",
    figure=(
        "enumerated distributions to 1e-12; chi-square with penalties, top-p and "
        "grammars; ahead the same tokens, outcomes from the small model's own "
        "likeliest tokens, not from an early layer of the large one; time not "
        "measured on two devices"
    ),
)
class DraftModel(Drafter):
    """Guesses up to ``most`` tokens with ``model``, a small model with the vocabulary of the large one.

    While the large model checks guesses, a thread guesses what follows each likely outcome of the check. ``ahead``: how
    many other tokens at each position count as likely; 0: no thread. ``tokens``: size of the small model's cache;
    longer texts get no guesses.
    """

    looks_ahead = True

    def __init__(
        self, model: Transformer, most: int = 4, ahead: int = 0, tokens: int = 2**16
    ) -> None:
        from weft.generate.engine import Engine

        self.most, self.ahead, self.tokens = most, ahead, tokens
        self.engine = Engine(model, tokens, size=4)
        self._thread = ThreadPoolExecutor(1, "draft")
        self._ahead: Future[dict[Text, Guessed]] | None = None

    @classmethod
    def open(
        cls, word: str, model: Transformer, warn: Callable[[str], None], ahead: int
    ) -> Self:
        from weft.checkpoint.model import open_model

        small, *_ = open_model(word, str(model.mesh.device), warn)
        if small.shape.vocab != model.shape.vocab:
            raise UsageError(
                f"{word} has {small.shape.vocab} ids and the model {model.shape.vocab}; "
                f"a small model that guesses needs the same tokenizer"
            )
        return cls(small, ahead=ahead)

    def propose(self, requests: Sequence[Generation]) -> None:
        guessed = self._ahead.result() if self._ahead is not None else {}
        texts = {
            generation: tuple(generation.ids)
            for generation in requests
            if len(generation.ids) + self.most < self.tokens
        }
        guessed |= self._guess(
            [
                (generation, text)
                for generation, text in texts.items()
                if text not in guessed
            ]
        )
        for generation, text in texts.items():
            generation.drafts, generation.odds = (
                [guessed[text].path[: generation.most - len(text)]],
                guessed[text].odds,
            )
        if self.ahead:
            outcomes = [
                (generation, each)
                for generation, text in texts.items()
                for each in self._outcomes(text, guessed[text])
            ]
            self._ahead = self._thread.submit(self._guess, outcomes)

    def _guess(self, texts: Sequence[tuple[Generation, Text]]) -> dict[Text, Guessed]:
        """Return the small model's guesses behind texts, each of which a request has or may come to have."""
        asked: dict[Text, Generation] = {}
        for generation, text in texts:
            # Not by the numbers by which the large model draws.
            seed = Random(f"draft {generation.how.seed} {len(text)}").getrandbits(62)
            count, top = (
                self.most + bool(self.ahead),
                self.ahead + 1 if self.ahead else None,
            )
            (asked[text],) = self.engine.submit(
                text, count, replace(generation.how, seed=seed), top=top
            )
            asked[text].chances = [] if generation.how.temperature else None
        self.engine.run()
        return {
            text: Guessed(
                generation.written[: self.most],
                generation.chances or [],
                [list(top) for _, top in generation.log_probabilities],
            )
            for text, generation in asked.items()
        }

    def _outcomes(self, text: Text, guessed: Guessed) -> list[Text]:
        """What the text may be after the check: some of the path, and another token that is likely there."""
        path = guessed.path
        return [
            (*text, *path[:right], token)
            for right, likeliest in enumerate(guessed.likeliest)
            for token in [i for i in likeliest if i not in path[right : right + 1]][
                : self.ahead
            ]
            if len(text) + right + 1 + self.most < self.tokens
        ]
