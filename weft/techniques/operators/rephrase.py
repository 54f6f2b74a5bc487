"""Rephrase: documents written anew in several styles, by a model of Weft's or a server."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from weft.cache import cache_root, digest
from weft.curation.data_operators import MissingDocument, OperatorFailed
from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.curation.rephrase_styles import STYLES, prompts_of_styles
from weft.curation.text_generator import CopyGenerator, TextGenerator, WritingSettings
from weft.data.reading import reading
from weft.errors import UsageError, WeftError
from weft.paths import home_path
from weft.registry import register
from weft.section import Section

if TYPE_CHECKING:
    from weft.curation.rephrasing import RephraseFailure, RephrasePlan
    from weft.curation.text_store import TextStore

#: The generator that returns every passage as it is.
COPY = "copy"


class RephraseSettings(Section):
    """Settings of the operator that rephrases documents with a language model."""

    model: str = Field(
        "",
        description=(
            "Model that writes: one that 'weft generate' opens (folder of a run, name on Hugging Face), the "
            "address http://HOST:PORT of a server with OpenAI's chat completions, or 'copy', which repeats "
            "each document."
        ),
    )
    styles: tuple[str, ...] = Field(
        ("wikipedia",),
        description=f"Styles, each of which makes a document of its own: {', '.join(STYLES)}, and those of prompts.",
    )
    prompts: dict[str, str] = Field(
        {},
        description=(
            "Prompts of your own styles, by the style's name: a text in which {text} stands for the passage, "
            "or a file with one."
        ),
    )
    keep: bool = Field(
        True,
        description="Whether the original documents are kept beside the rephrased ones.",
    )
    passage: int = Field(
        300,
        ge=16,
        description=(
            "Largest number of tokens in a passage that is rephrased at once. Longer documents are cut at ends of "
            "sentences, and their rephrased passages are joined."
        ),
    )
    tokens: int = Field(
        600,
        ge=1,
        description="Largest number of tokens in the text that is written for a passage.",
    )
    temperature: float = Field(
        0.0,
        ge=0,
        le=100,
        description="Temperature of sampling; 0: always the likeliest token.",
    )
    top_k: int = Field(
        0, ge=0, description="Sample from this many likeliest tokens; 0: from all."
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Sample only from the likeliest tokens whose probabilities add up to this number; 1: from all.",
    )
    seed: int = Field(0, description="Seed of sampling.")
    requests: int = Field(
        32,
        ge=1,
        description="Largest number of texts that a process writes at the same time.",
    )
    cache: Path | None = Field(
        None,
        description=(
            "Folder that keeps all written texts, so that none is written twice. If not set: $WEFT_CACHE/rephrased, "
            "or ~/.cache/weft/rephrased."
        ),
    )
    device: Literal["cpu", "cuda"] = Field(
        "cpu", description="Device on which the model computes."
    )
    weights: Literal["float", "bfloat16", "int8", "int4"] = Field(
        "float",
        description=(
            "Number format of the model's weights: 'float': as the model is loaded; 'bfloat16'; 'int8' and 'int4': "
            "quantised to so many bits when the model is loaded (docs/how-to/generate.md)."
        ),
    )
    served: str = Field(
        "",
        description="For a server: name of the model to ask. If not set: the first one that the server lists.",
    )
    key: str = Field(
        "", description="For a server: file with the API key, if the server needs one."
    )
    seconds: float = Field(
        300.0,
        gt=0,
        description="For a server: seconds after which a request for one text is given up.",
    )
    patience: float = Field(
        120.0,
        ge=0,
        description=(
            "For a server: seconds for which a request is repeated while the server is busy or cannot be "
            "reached."
        ),
    )


@register(
    "operator",
    "rephrase",
    settings=RephraseSettings,
    title="Rephrased documents",
    paper="Maini et al. 2024 (WRAP)",
    proof="tests/curation/test_rephrasing.py",
)
class Rephrase:
    """Rephrases documents in several styles with a language model, and keeps the originals too (WRAP, Maini et al.
    2024).
    """

    def __init__(self, step: DataStep) -> None:
        self.settings = step.own(RephraseSettings)
        if not self.settings.model:
            raise UsageError(
                "the operator 'rephrase' needs model: a model, the address of a server, or 'copy'"
            )
        self.prompts = prompts_of_styles(self.settings.styles, self.settings.prompts)
        self.failures: list[RephraseFailure] = []
        self.written = 0

    def fingerprint(self) -> str:
        """Return a hash of the generator and of the prompts, some of which may be files. The results of this step are
        computed again when it changes.
        """
        return digest(self.generator.digest(), self.prompts)

    def map(self, documents: Documents) -> Documents:
        from weft.curation.rephrasing import rephrase

        try:
            result = rephrase(documents, self.plan, self.generator, self.store)
        except WeftError as error:  # the generator's, and not a document's
            raise OperatorFailed(str(error)) from error
        self.failures += result.failures
        self.written += result.written
        return result.documents

    def missing(self) -> list[MissingDocument]:
        """Return the documents that could not be written since the last call, with the reasons."""
        failures, self.failures = self.failures, []
        return [
            MissingDocument(each.id, f"{each.style}: {each.reason}")
            for each in failures
        ]

    @cached_property
    def plan(self) -> RephrasePlan:
        """What is to be written from every document: prompts, sampling, and lengths of passages."""
        from weft.curation.rephrasing import RephrasePlan

        of = self.settings
        writing = WritingSettings(of.tokens, of.temperature, of.top_k, of.top_p)
        return RephrasePlan(self.prompts, writing, of.passage, of.seed, of.keep)

    @cached_property
    def store(self) -> TextStore:
        """Store on disk in which texts that were written are kept, so that they are not written again."""
        from weft.curation.text_store import TextStore

        chosen = self.settings.cache
        return TextStore(home_path(chosen) if chosen else cache_root() / "rephrased")

    @cached_property
    def generator(self) -> TextGenerator:
        """Object that writes the texts: a model in this process, a server, or one that copies documents."""
        of = self.settings
        if of.model == COPY:
            return CopyGenerator()
        if of.model.startswith(("http://", "https://")):
            from weft.curation.served_generator import ServedGenerator
            from weft.serve.api_client import ApiClient

            key = ""
            if of.key:
                path = home_path(of.key)
                with reading(path, "a file with an API key"):
                    key = path.read_text().strip()
            client = ApiClient(of.model, key, of.seconds)
            return ServedGenerator(client, of.served, of.requests, of.patience)
        from weft.curation.engine_generator import EngineGenerator

        longest = max(len(prompt.encode()) for prompt in self.prompts.values())
        room = longest + of.passage + of.tokens
        return EngineGenerator(of.model, of.weights, of.device, of.requests, room)
