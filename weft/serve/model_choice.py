"""Which model answers a request that names ``auto``: by words, by patterns, or by the nearest examples.

A small file says what each model is for. Its rules are tried in order. If none fits, the text's embedding is compared
with those of examples for each model, and if no model is clearly nearest, the general model answers (the router of a
composition of experts, Prabhakar et al. 2024, 2405.07518).
"""

import asyncio
import re
import tomllib
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from weft.data.tokenizer import Tokenizer
from weft.errors import UsageError, nearest
from weft.generate.backend import Backend
from weft.generate.embedding import embed
from weft.generate.engine import Engine
from weft.generate.thread_device import use_device
from weft.models.transformer import Transformer

#: The name by which requests leave the choice of the model to the server.
AUTO = "auto"

#: Characters of a text that are looked at.
LONGEST = 100_000

#: Characters and tokens of a text that are embedded.
CHARACTERS, TOKENS = 8192, 512

#: A file of examples, one per line, in the folder of a model.
EXAMPLES = "examples.txt"

Embed = Callable[[str], Awaitable[torch.Tensor]]


@dataclass(frozen=True)
class ModelRule:
    """A rule that says which texts the model named ``model`` answers: those that match one of three conditions.
    ``words``: the text has any of these words. ``pattern``: this regular expression finds a match in the text; "": no
    such condition. ``examples``: the text is near to these texts in meaning.
    """

    model: str
    words: tuple[str, ...] = ()
    pattern: str = ""
    examples: tuple[str, ...] = ()

    @cached_property
    def expressions(self) -> list[re.Pattern[str]]:
        """A list of regular expressions. A text in which any of them finds a match is for this model.

        Raises :class:`UsageError` for a ``pattern`` that is no regular expression.
        """
        words = "|".join(map(re.escape, self.words))
        patterns = [rf"(?i)(?<!\w)(?:{words})(?!\w)"] if words else []
        try:
            return [re.compile(p) for p in (*patterns, self.pattern) if p]
        except re.error as error:
            raise UsageError(
                f"models.{self.model}.pattern is no regular expression: {error}"
            ) from None


@dataclass(frozen=True)
class ChoiceSettings:
    """Settings of the choice of a model for each text.

    The first rule that matches a text decides. Otherwise the text is compared with examples for each model, by the
    cosine similarity of embeddings.

    Attributes:
        ``rules``: rules, each of which names a model and the texts that it is for.
        ``general``: name of the model for texts for which neither rules nor examples choose one; "": the base.
        ``embedding``: the model that embeds texts; "": the base.
        ``least``: least similarity of a text to a model's examples for which that model is chosen.
        ``margin``: by how much this similarity must be above the similarity to any other model's examples.
    """

    rules: tuple[ModelRule, ...]
    general: str = ""
    embedding: str = ""
    least: float = 0.0
    margin: float = 0.05


def read_choice_settings(where: Path, folders: Collection[Path] = ()) -> ChoiceSettings:
    """Return the settings by which a server chooses a model for each text.

    ``where``: either a TOML file with the settings, or a model that embeds texts. ``folders``: folders of the models to
    choose from. They are needed only in the second case: each model's examples are then read from the file
    ``examples.txt`` in its folder, one per line.

    Raises :class:`UsageError` for wrong settings, or if there are no examples.
    """
    if where.suffix != ".toml":
        rules = tuple(
            ModelRule(folder.name, examples=tuple(filter(None, map(str.strip, lines))))
            for folder in folders
            if (folder / EXAMPLES).is_file()
            for lines in [(folder / EXAMPLES).read_text().splitlines()]
        )
        if not any(rule.examples for rule in rules):
            raise UsageError(
                f"--router {where} needs examples: write {EXAMPLES}, one per line, into the folders of models"
            )
        return ChoiceSettings(rules, embedding=str(where))
    try:
        content = tomllib.loads(where.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--router {where} cannot be read: {error}") from None
    return parsed_choice(where, content)


def parsed_choice(where: Path, content: dict[str, Any]) -> ChoiceSettings:
    """Return the settings in ``content``, the parsed file at ``where``. Raises :class:`UsageError` for wrong
    settings.
    """

    def checked(given: Any, kinds: Mapping[str, type], inside: str) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise UsageError(f"{where}: {inside} is no section")
        for key, value in given.items():
            name = f"{inside}.{key}".lstrip(".")
            if key not in kinds:
                raise UsageError(f"{where}: there is no {name}; {nearest(key, kinds, True)}")  # fmt: skip
            number = kinds[key] is float and type(value) is int
            if not isinstance(value, kinds[key]) and not number:
                raise UsageError(f"{where}: {name} = {value!r} is no {kinds[key].__name__}")  # fmt: skip
            texts = value if isinstance(value, list) else ()
            if any(not isinstance(text, str) or not text.strip() for text in texts):
                raise UsageError(f"{where}: {name} is a list of texts")
        return given

    outer = {"models": dict, "general": str, "embedding": str, "least": float, "margin": float}  # fmt: skip
    inner = {"words": list, "pattern": str, "examples": list}
    settings = checked(content, outer, "")
    rules = []
    for model, given in settings.pop("models", {}).items():
        fields = checked(given, inner, f"models.{model}")
        words, examples = (tuple(fields.get(k, ())) for k in ("words", "examples"))
        rules.append(ModelRule(model, words, fields.get("pattern", ""), examples))
    if not any(rule.expressions or rule.examples for rule in rules):
        raise UsageError(
            f"{where} says of no model what it is for; write words, pattern or examples under [models.NAME]"
        )
    return ChoiceSettings(tuple(rules), **settings)


class ModelChoice:
    """Chooses the model that answers a text, by the rules and examples in ``settings``.

    ``base``: name of the base model. ``names``: names of all other models that are served. ``embedded``: returns the
    embedding ``[embed]`` of a text. Raises :class:`UsageError` for settings about models that are not served.
    """

    def __init__(
        self,
        settings: ChoiceSettings,
        base: str,
        names: Collection[str],
        embedded: Embed,
    ) -> None:
        self.settings, self.embedded = settings, embedded
        self.general = settings.general or base
        if AUTO in (base, *names):
            raise UsageError(
                f"with --router the name {AUTO!r} stands for a choice; rename the model of this name"
            )
        for model in (self.general, *(rule.model for rule in settings.rules)):
            if model not in (base, *names):
                raise UsageError(
                    f"--router names {model!r}, which is not served; {nearest(model, (base, *names), True)}"
                )
        self._examples: list[tuple[str, torch.Tensor]] | None = None
        self._reading = asyncio.Lock()

    async def choose(self, text: str) -> str:
        """Return the name of the model that is to answer ``text``. It is the model of the first rule whose words or
        pattern match. Without one, it is the model to whose examples the text is clearly most similar. If none stands
        out, it is the general model.
        """
        text = text[:LONGEST]
        for rule in self.settings.rules:
            if any(expression.search(text) for expression in rule.expressions):
                return rule.model
        if not text.strip() or not any(rule.examples for rule in self.settings.rules):
            return self.general
        nearness = await self._nearness(text)
        best, *others = sorted(nearness, key=nearness.__getitem__, reverse=True)
        ahead = nearness[best] - max(map(nearness.__getitem__, others), default=-1.0)
        clear = nearness[best] >= self.settings.least and ahead >= self.settings.margin
        return best if clear else self.general

    async def _nearness(self, text: str) -> dict[str, float]:
        """Return the cosine similarity of a text to the mean of each model's examples, all less their common mean.

        Embeddings of one model have a large part in common, which says nothing about a text.
        """
        async with self._reading:
            if self._examples is None:
                self._examples = [
                    (rule.model, await self._mean(rule.examples))
                    for rule in self.settings.rules
                    if rule.examples
                ]
        common = torch.stack([vector for _, vector in self._examples]).mean(0)
        if len(self._examples) == 1:
            common = torch.zeros_like(common)
        own = await self.embedded(text) - common
        return {
            model: float(torch.cosine_similarity(own, vector - common, dim=0))
            for model, vector in self._examples
        }

    async def _mean(self, examples: Collection[str]) -> torch.Tensor:
        return torch.stack([await self.embedded(text) for text in examples]).mean(0)


def last_question(messages: Collection[Any]) -> str:
    """Return the text of the user's last message in ``messages``; "" if there is none."""
    for message in reversed([*messages]):
        if isinstance(message, dict) and message.get("role") == "user":
            content = message.get("content")
            if isinstance(content, str):
                return content
            parts = content if isinstance(content, list) else []
            texts = [part.get("text") for part in parts if isinstance(part, dict)]
            return " ".join(text for text in texts if isinstance(text, str))
    return ""


def backend_embedder(backend: Backend, tokenizer: Tokenizer) -> Embed:
    """Return a function that embeds texts with the model that ``backend`` serves."""

    async def embedded(text: str) -> torch.Tensor:
        ids = tokenizer.prompt_ids(text[:CHARACTERS])[:TOKENS]
        return await backend.embed(ids, "mean", None)

    return embedded


def model_embedder(model: Transformer, tokenizer: Tokenizer) -> Embed:
    """Return a function that embeds texts with ``model``, in a thread."""
    engine = Engine(model)

    async def embedded(text: str) -> torch.Tensor:
        ids = tokenizer.prompt_ids(text[:CHARACTERS])[:TOKENS]
        return await asyncio.to_thread(in_thread, ids)

    def in_thread(ids: list[int]) -> torch.Tensor:
        use_device(model.mesh.device)
        return embed(engine, ids, "mean")

    return embedded
