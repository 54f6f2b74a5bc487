"""Guesses of a small model that reads the same texts (speculative decoding, 2211.17192 and 2302.01318).

The small model has an engine of its own. Each time it is asked, a request's text so far is a new prompt for the small
model. The prefix cache of its engine has what was computed before, and blocks of wrong guesses are never looked up.
Nothing has to be undone, therefore, whatever kinds of layers the model has.

With ``ahead``, a thread makes further guesses while the large model checks the last ones: for every position at which
these may turn out wrong, after likely other tokens there, and after the end of the guesses (the branches of Mirror
Speculative Decoding, Bhendawade et al. 2025, 2510.13161). The small model names these tokens, or with ``early_layer``
an early layer of the large model does, whose further layers run meanwhile, as in the paper. If the text continues in
one of these ways, its next guesses are there at once. On a device of its own the small model then costs no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, NamedTuple, Self

from weft.errors import UsageError
from weft.generate.drafter import Drafter
from weft.registry import register

if TYPE_CHECKING:
    import torch

    from weft.generate.early_exit import EarlyText
    from weft.generate.request import Generation
    from weft.models.transformer import Transformer

#: A text, as its ids from the first token on, and the request that has it or may come to have it.
Asked = tuple["Generation", tuple[int, ...]]


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
    recipe=(
        "weft generate --checkpoint RUN --prompt TEXT --draft SMALL --ahead 2 "
        "--early-layer 8"
    ),
    proof="tests/generate/test_draft.py, tests/generate/test_text_options.py",
    figure=(
        "enumerated distributions to 1e-12; chi-square with penalties, top-p and "
        "grammars; ahead the same tokens, greedy and drawn, with outcomes from the "
        "small model's likeliest tokens or from an early layer of the large one, whose "
        "branches are all ready where later layers add nothing; in a trained pair more "
        "are ready the later the layer; time on two devices not measured"
    ),
)
class DraftModel(Drafter):
    """Guesses up to ``most`` tokens with ``model``, a small model with the vocabulary of the large one (Leviathan et
    al. 2022; Chen et al. 2023; Mirror-SD, Bhendawade et al. 2025). While the large model checks guesses, a thread
    guesses what follows each likely outcome of the check. The outcomes are that all guesses are right, or that at some
    position another likely token comes instead. ``ahead``: number of such likely tokens per position for which the
    thread guesses on; 0: there is no thread. ``early_layer``: number of the large model's layers after which its hidden
    states predict these other tokens; 0: the small model predicts them. ``tokens``: size of the small model's cache in
    tokens; longer texts get no guesses.
    """

    looks_ahead = True

    #: Texts for which guesses were needed, and those of them whose guesses the thread had made already.
    needed = 0
    ready = 0

    def __init__(
        self,
        model: Transformer,
        most: int = 4,
        ahead: int = 0,
        tokens: int = 2**16,
        early_layer: int = 0,
    ) -> None:
        from weft.generate.engine import Engine
        from weft.generate.thread_device import use_device

        self.most, self.ahead, self.tokens = most, ahead, tokens
        self.early_layer = early_layer
        self.engine = Engine(model, tokens, size=4)
        use = partial(use_device, model.mesh.device)
        self._thread = ThreadPoolExecutor(1, "draft", use)
        self._ahead: Future[dict[Asked, Guessed]] | None = None

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
        self._ahead = None
        needed = [
            (generation, tuple(generation.ids))
            for generation in requests
            if len(generation.ids) + self.most < self.tokens
        ]
        missing = [asked for asked in needed if asked not in guessed]
        self.needed += len(needed)
        self.ready += len(needed) - len(missing)
        guessed |= self._guess(missing)
        for asked in needed:
            (generation, text), (path, odds, _) = asked, guessed[asked]
            generation.drafts = [path[: generation.most - len(text)]]
            generation.odds = odds
        if self.ahead and not self.early_layer:
            self._go_on([
                outcome
                for asked in needed
                for outcome in self._outcomes(asked[0], *guessed[asked][::2])
            ])  # fmt: skip

    def look_early(self, texts: Sequence[EarlyText], logits: torch.Tensor) -> None:
        likeliest = logits.topk(min(self.ahead + 1, logits.shape[1])).indices.tolist()
        self._go_on([
            outcome
            for request, path, first in texts
            for generation in (request, *request.siblings)
            if not generation.finished
            for outcome in self._outcomes(generation, path, likeliest[first : first + len(path) + 1])
        ])  # fmt: skip

    def _go_on(self, outcomes: Sequence[Asked]) -> None:
        """Guess, in the thread, behind texts that requests may come to have."""
        self._ahead = self._thread.submit(self._guess, outcomes)

    def _guess(self, texts: Sequence[Asked]) -> dict[Asked, Guessed]:
        """Return the small model's guesses behind texts, each of which a request has or may come to have."""
        submitted: dict[Asked, Generation] = {}
        for asked in texts:
            generation, text = asked
            # Not by the numbers by which the large model draws.
            seed = Random(f"draft {generation.how.seed} {len(text)}").getrandbits(62)
            names = bool(self.ahead and not self.early_layer)
            (submitted[asked],) = self.engine.submit(
                text,
                self.most + names,
                replace(generation.how, seed=seed),
                top=self.ahead + 1 if names else None,
            )
            submitted[asked].chances = [] if generation.how.temperature else None
        self.engine.run()
        return {
            asked: Guessed(
                guess.written[: self.most],
                guess.chances or [],
                [list(top) for _, top in guess.log_probabilities],
            )
            for asked, guess in submitted.items()
        }

    def _outcomes(
        self, generation: Generation, path: Sequence[int], likeliest: Sequence[list[int]]
    ) -> list[Asked]:  # fmt: skip
        """What a request's text may be after the check: some of the path, and another token that is likely there.

        Only texts that go on and that the small model's cache can hold are of use.
        """
        text, outcomes = tuple(generation.ids), list[Asked]()
        for right, tokens in enumerate(likeliest):
            after = len(text) + right + 1
            if after < generation.most and after + self.most < self.tokens:
                others = [
                    i
                    for i in tokens
                    if i not in path[right : right + 1] and i not in generation.stops
                ]
                outcomes += [
                    (generation, (*text, *path[:right], token))
                    for token in others[: self.ahead]
                ]
        return outcomes
