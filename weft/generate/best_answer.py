"""Choice of the best of several answers to one prompt, by the model's confidence or by a verifier.

A model that writes its reasoning first is judged by its answer alone. Without reasoning, many answers and a choice
among them can be as good in less time (NoThinking, Ma et al. 2025, 2504.09858).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.data.chat.conversation import as_messages
from weft.data.chat.encode import ChatEncoder, Messages, own_encoder
from weft.errors import UsageError
from weft.generate.engine import check_ids
from weft.generate.request import check_generations

if TYPE_CHECKING:
    from weft.data.chat.reasoning import Thoughts
    from weft.data.tokenizer import Tokenizer
    from weft.generate.engine import Engine
    from weft.generate.request import Generation
    from weft.generate.sampling import Sampling
    from weft.models.transformer import Transformer


class RatedAnswer(NamedTuple):
    """One of several generated texts for a question, with its score.

    ``number``: number of the text, from 1. ``text``: the answer that was taken from the text. ``score``: higher is
    better; None: no answer could be taken from the text.
    """

    number: int
    text: str
    score: float | None


def answer_start(
    tokenizer: Tokenizer, ids: Sequence[int], thoughts: Thoughts | None
) -> int | None:
    """Return the index of the token of a text at which the answer begins, behind the reasoning; None if the reasoning
    does not end. ``ids``: token ids of the text.

    ``thoughts``: the tags of reasoning; None: the text has none.
    """
    if thoughts is None:
        return 0
    if thoughts.closing in tokenizer.specials:  # of which decoded text shows nothing
        closing = tokenizer.specials[thoughts.closing]
        if not thoughts.begun and tokenizer.specials.get(thoughts.opening) not in ids:
            return 0
        return [*ids].index(closing) + 1 if closing in ids else None
    text = tokenizer.decode(ids)
    if not thoughts.begun and not text.lstrip().startswith(thoughts.opening):
        return 0
    if thoughts.closing not in text:
        return None
    return bisect_left(
        range(len(ids)),
        True,
        key=lambda end: thoughts.closing in tokenizer.decode(ids[:end]),
    )


def confidence(generation: Generation, start: int) -> float | None:
    """Return the mean log-probability of those tokens of ``generation`` whose index is at least ``start``; None if
    there are none.
    """
    chances = [p for p, _ in generation.log_probabilities[start:]]
    return sum(chances) / len(chances) if chances else None


def rated_answers(
    engine: Engine, prompt: Sequence[int], count: int, how: Sampling, n: int, stops: Collection[int],
    answer: Callable[[list[int]], str | None], start: Callable[[list[int]], int | None],
    verify: Callable[[str], float] | None = None,
) -> list[RatedAnswer]:  # fmt: skip
    """Generate ``n`` texts of up to ``count`` tokens after ``prompt``, and return a list of their answers with a score
    each. For a text without an answer the score is None.

    ``how``: settings of sampling. ``stops``: ids that end a text. ``answer``: function that returns the answer
    contained in a text, given the text's ids; None if there is none. ``start``: function that returns the index of the
    answer's first token, given the same ids. ``verify``: function that returns the score of an answer; None: the score
    is the model's own :func:`confidence`. Raises :class:`weft.errors.WeftError` if a text could not go on.
    """
    generations = engine.submit(prompt, count, how, stops, n, top=0)
    engine.run()
    check_generations(generations)
    rated = list[RatedAnswer]()
    for number, generation in enumerate(generations, 1):
        text, score = answer(generation.written), None
        if text is not None and text.strip():
            first = start(generation.written)
            assert first is not None
            score = verify(text) if verify else confidence(generation, first)
        rated.append(RatedAnswer(number, text or "", score))
    return rated


@torch.inference_mode()
def text_score(model: Transformer, ids: Sequence[int]) -> float:
    """Return the score that a reward model gives the text ``ids``, at its last token."""
    check_ids(ids, model.shape.vocab)
    row = torch.tensor([ids, range(len(ids))], device=model.mesh.device)
    ends = torch.tensor([0, len(ids)], dtype=torch.int32)
    return float(
        model(row[:1], row[1:], ends, only=slice(len(ids) - 1, None)).squeeze()
    )


class Verifier:
    """Scores answers to the conversation ``talk`` by ``model``, a reward model with the tokenizer ``tokenizer``. A call
    takes the text of an answer and returns its score. ``name``: the model's name in error messages. ``tools``: tools of
    the conversation. Raises :class:`UsageError` for models that write texts.
    """

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, name: str, talk: Messages,
        tools: Messages | None = None,
    ) -> None:  # fmt: skip
        if model.shape.output != "score":
            raise UsageError(
                f"{name} writes texts and scores none; --verifier is for a reward model (loss.kind = 'reward')"
            )
        self.model, self.talk, self.tools = model, talk, tools
        self.encoder: ChatEncoder = own_encoder(tokenizer, name)

    def __call__(self, answer: str) -> float:
        """Return the score at the last token of the conversation with ``answer``."""
        talk = [*self.talk, {"role": "assistant", "content": answer}]
        shown = self.encoder.template.render(as_messages(talk), self.tools)
        ids = [int(i) for i in self.encoder.tokens.encode(shown)[0]]
        return text_score(self.model, ids)
