"""A generator of texts in this process: a model that Weft opens, and its engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from functools import cache, cached_property
from typing import NamedTuple

from weft.cache import digest
from weft.checkpoint.model import OpenedModel, open_model, tokenizer_of
from weft.curation.text_generator import PromptToWrite, WritingSettings, WrittenText
from weft.data.chat.chat_template import template_of
from weft.data.chat.encode import ChatEncoder
from weft.data.chat.reasoning import THINKS, thoughts_of, without_reasoning
from weft.data.tokenizer import Tokenizer
from weft.errors import UsageError, WeftError
from weft.generate.engine import Engine, check_prompt
from weft.generate.fingerprint import open_for_reading, weights_fingerprint
from weft.generate.sampling import Sampling
from weft.models.invariant_kernels import check_invariant
from weft.models.products import read_only
from weft.serve.text_requests import TextRequest, finished_texts

#: What templates take for today, so that texts do not depend on the day on which they are written.
TODAY = datetime(2025, 1, 1)


class GeneratorFiles(NamedTuple):
    """Hash of the weights of a model that writes texts, and the model's tokenizer. Reading both needs no model in
    memory.
    """

    weights: str
    tokenizer: Tokenizer


@cache
def read_generator(model: str, weights: str) -> GeneratorFiles:
    """Return the hash of the weights of ``model`` in the form ``weights``, and its tokenizer. A process reads them only
    once.
    """
    opened = open_for_reading(model)
    tokenizer = tokenizer_of(dict(opened.files), model)
    return GeneratorFiles(weights_fingerprint(opened, weights), tokenizer)


@cache
def open_generator(model: str, weights: str, device: str) -> OpenedModel:
    """Open ``model`` on ``device`` with weights in the form ``weights``. A process opens a model only once."""
    opened = open_model(model, device, _say)
    check_prompt(opened.model, [0])
    read_only(opened.model, weights)
    return opened


class EngineGenerator:
    """Writes texts with a model in this process, many at a time.

    Where the model permits, products and attention do not depend on the batch (:mod:`weft.models.invariant`). A text is
    then the same to the last bit, whatever is written beside it. The model is opened when the first text is written.

    Arguments:
        ``model``: name of a model that ``weft generate`` opens.
        ``weights``: form of its weights, as for ``weft generate``.
        ``device``: "cpu" or "cuda".
        ``requests``: largest number of texts that are written at the same time.
        ``room``: number of tokens of a prompt and its text together. The cache holds ``requests`` times as many; longer
            texts are written fewer at a time.
    """

    def __init__(
        self, model: str, weights: str, device: str, requests: int, room: int
    ) -> None:
        self.model, self.weights, self.device = model, weights, device
        self.requests = requests
        self.capacity = 2 * requests * room

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model, opened without the model's weights."""
        return read_generator(self.model, self.weights).tokenizer

    def digest(self) -> str:
        weights, tokenizer = read_generator(self.model, self.weights)
        files = {
            name: content.decode(errors="replace")
            for name, content in sorted(tokenizer.files().items())
        }
        return digest("engine", 1, weights, self.weights, self.device, files)

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text))

    def write(
        self, prompts: Iterable[PromptToWrite], settings: WritingSettings
    ) -> Iterator[WrittenText]:
        opened = open_generator(self.model, self.weights, self.device)
        asked = list[int]()  # number of the prompt of each request
        refused = list[WrittenText]()

        def asks() -> Iterator[TextRequest]:
            for prompt in prompts:
                ids = self._ids(prompt.prompt)
                limit = min(opened.length or self.capacity, self.capacity)
                if why := _too_long(len(ids), settings.tokens, limit):
                    refused.append(WrittenText(prompt.number, "", failed=why))
                    continue
                asked.append(prompt.number)
                how = Sampling(
                    settings.temperature,
                    settings.top_k,
                    settings.top_p,
                    seed=prompt.seed,
                )
                yield TextRequest(ids, settings.tokens, how, self.tokenizer.stops)

        texts = finished_texts(self._engine, self.tokenizer, asks(), self.requests)
        for number, text, finished, failure in texts:
            if failure:
                raise WeftError(failure)
            yield WrittenText(asked[number], text, finished == "length")
        yield from refused

    @cached_property
    def _engine(self) -> Engine:
        model = open_generator(self.model, self.weights, self.device).model
        try:
            check_invariant(model.shape, model.mesh)
            invariant = self.weights == "float"
        except UsageError:
            invariant = False
        return Engine(
            model, self.capacity, limit=self.requests, invariant=invariant, graphs=True
        )

    @cached_property
    def _ids(self) -> Callable[[str], list[int]]:
        """Return the token ids of a prompt: a message in the chat template if the tokenizer has one, without a block of
        reasoning.
        """
        tokenizer = self.tokenizer
        template = template_of(tokenizer, now=TODAY)
        if template is None:
            return lambda prompt: tokenizer.prompt_ids(f"{prompt}\n\n")
        thoughts = thoughts_of(template.source)
        if THINKS in template.source:
            template = template_of(tokenizer, {THINKS: False}, TODAY)
            assert template is not None
        encoder = ChatEncoder(template)

        def ids_of(prompt: str) -> list[int]:
            shown = template.render([{"role": "user", "content": prompt}], None, True)
            if thoughts:
                text = without_reasoning(thoughts, template.source, shown.text)
                shown = replace(shown, text=text)
            return [int(i) for i in encoder.tokens.encode(shown)[0]]

        return ids_of


def _too_long(prompt: int, tokens: int, limit: int) -> str:
    """Return why a prompt with a text of ``tokens`` tokens is too long for a model; "" if it is not."""
    if prompt + tokens <= limit:
        return ""
    return f"a prompt of {prompt} tokens and {tokens} of its text are more than {limit}, the model's context"


def _say(line: str) -> None:
    print(f"weft: {line}", file=sys.stderr)
