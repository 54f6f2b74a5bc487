"""The section ``[data]``: what is read and in which order."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, field_validator, model_validator

from weft.section import Section

#: Weft's own kinds of sources; plugins bring others.
SOURCES = (
    "stdlib",
    "text",
    "jsonl",
    "parquet",
    "huggingface",
    "tokens",
    "chat",
    "preference",
    "feedback",
)


#: Kinds whose records are conversations, and those of them that are pairs of answers.
CONVERSATIONS, ANSWER_PAIRS = (
    ("chat", "preference", "feedback"),
    ("preference", "feedback"),
)


#: Who speaks in a conversation.
Role = Literal["system", "developer", "user", "assistant", "tool"]


class Source(Section):
    """One corpus.

    Files of records are read by the endings of their names: JSON lines, CSV, TSV, Parquet.
    """

    kind: str = Field(
        "stdlib",
        description="How to read 'path'; chat, preference and feedback are conversations "
        "(docs/how-to/conversations.md, docs/how-to/preferences.md), tokens are memory-mapped ids, "
        "huggingface a dataset saved to disk; others are a plugin's.",
    )
    path: str | None = Field(
        None, description="A file, a folder or a glob; none for stdlib."
    )
    field: str = Field("text", description="Column that has the text, or the messages.")
    weight: PositiveFloat = Field(
        1.0, description="How often this source is drawn, relative to the others."
    )
    settings: dict[str, Any] = Field(
        {}, description="Keywords that a plugin's source is called with."
    )
    form: Literal[
        "auto", "messages", "prompt", "sharegpt", "alpaca", "adp", "atif", "docstrings"
    ] = Field(
        "auto",
        description="Form of conversations; auto: it is seen from each record. Questions of "
        "docstrings are about Python code, without 'path' about the standard "
        "library.",
    )
    columns: dict[str, str] = Field(
        {},
        description="What the data's own names mean: { ask = 'prompt', note = '' }; an "
        "empty text leaves a column out, and 'dialogue.speaker' is a field of "
        "turns.",
    )
    roles: dict[str, Role] = Field({}, description="Who speaks: { Teacher = 'user' }.")
    on_error: Literal["stop", "skip"] = Field(
        "stop",
        description="A record that cannot be read ends the run, or is left out and counted.",
    )

    @property
    def skips(self) -> bool:
        """Whether records that cannot be read are left out."""
        return self.on_error == "skip"

    @field_validator("kind")
    @classmethod
    def _records(cls, kind: str) -> str:
        """Files of records are read by their names' endings, so that all of them are of one kind."""
        return "jsonl" if kind in ("json", "csv", "tsv") else kind

    @model_validator(mode="after")
    def _path(self) -> Self:
        if (self.columns or self.roles) and self.kind not in CONVERSATIONS:
            name = "columns" if self.columns else "roles"
            raise ValueError(
                f"{name} are of kinds 'chat', 'preference' and 'feedback', which read all files of records; of kind "
                f"{self.kind!r} set 'field'"
            )
        if (
            self.kind in SOURCES
            and self.kind != "stdlib"
            and self.form != "docstrings"
            and not self.path
        ):
            raise ValueError(f"a source of kind {self.kind!r} needs 'path'")
        if (
            self.kind in ANSWER_PAIRS
            and self.field != type(self).model_fields["field"].default
        ):
            raise ValueError(
                f"field is of other kinds; name the columns of pairs: columns = {{ {self.field} = 'chosen' }}"
            )
        if self.kind in ANSWER_PAIRS and self.form not in ("auto", "docstrings"):
            raise ValueError(
                f"a source of kind {self.kind!r} has one form; leave out 'form'"
            )
        return self


class Chat(Section):
    """How sources of kind ``chat`` become tokens (docs/how-to/conversations.md)."""

    template: str = Field(
        "",
        description="A Jinja template, or a file with one; the tokenizer's own if left out.",
    )
    learn: Literal["assistant", "last", "all"] | tuple[Role, ...] = Field(
        "assistant",
        description="What is learned: the assistant's turns, the last of them, all tokens, "
        "or the turns of a list of roles.",
    )
    truncation: Literal["keep_start", "keep_end", "drop", "error"] = Field(
        "keep_start",
        description="What becomes of conversations longer than data.seq_len.",
    )
    pack: bool = Field(True, description="Rows hold several whole conversations.")
    control: bool = Field(
        False,
        description="Names of special tokens in somebody's words become these tokens.",
    )
    variables: dict[str, Any] = Field(
        {}, description="Variables that the template gets."
    )
    date: str = Field(
        "",
        pattern=r"^(\d{4}-\d\d-\d\d)?$",
        description="What the template takes for today (2026-01-31).",
    )
    reasoning: Literal["template", "split"] = Field(
        "template",
        description="Of turns whose reasoning the template leaves out it is not learned, or "
        "the conversation is split into samples that each end with the turns of "
        "one question.",
    )


class Data(Section):
    """What is read and in which order.

    Keys of a source may stand here themselves, where there is one source only; ``columns``, ``roles`` and ``on_error``
    also beside ``sources``, for all of these.
    """

    sources: tuple[Source, ...] = Field(
        (Source(),), min_length=1, description="The corpora."
    )
    tokenizer: str = Field(
        "",
        description="bytes, a tokenizer.json (or a folder with one), or train:N for a byte- "
        "level BPE of N entries; left out: that of model.from, or else bytes.",
    )
    seq_len: int = Field(256, gt=0, lt=2**31, description="Tokens in a row.")
    seed: int = Field(0, description="Seed of the order of samples.")
    epochs: int = Field(
        0,
        ge=0,
        description="Passes over the data, after which the run ends; 0 repeats for ever.",
    )
    validation: float | str = Field(
        0.02,
        description="Share of the documents that is held out for validation, or the path of "
        "a file, folder or glob with others.",
    )
    cache: Path | None = Field(None, description="Folder that keeps tokenized data.")
    bos: bool | Literal["auto", "prompts"] = Field(
        "auto",
        description="Whether texts begin with the tokenizer's BOS token; auto: if its post- "
        "processor says so; prompts: documents begin without, as in earlier "
        "runs.",
    )
    chat: Chat = Field(Chat(), description="How conversations become tokens.")

    @property
    def held_out(self) -> float:
        """The share of the sources' documents that is held out for validation."""
        return 0.0 if isinstance(self.validation, str) else self.validation

    @field_validator("validation")
    @classmethod
    def _share_or_path(cls, given: float | str) -> float | str:
        if given == "" or not (isinstance(given, str) or 0 <= given < 1):
            raise ValueError(
                "it should be a share of the documents, below 1, or the path of a file with others"
            )
        return given

    @model_validator(mode="before")
    @classmethod
    def _one_source(cls, given: Any) -> Any:
        """``kind``, ``path`` and the like as those of the only source."""
        own = (
            {key: given[key] for key in given if key in Source.model_fields}
            if isinstance(given, dict)
            else {}
        )
        shared = {
            key: value
            for key, value in own.items()
            if key in ("columns", "roles", "on_error")
        }
        if (
            own
            and own == shared
            and all(
                isinstance(source, dict) for source in given.get("sources", (None,))
            )
        ):
            return {k: v for k, v in given.items() if k not in own} | {
                "sources": [shared | s for s in given["sources"]]
            }
        if own and "sources" in given:
            key = next(iter(own))
            raise ValueError(
                f"data.{key} stands beside data.sources; set data.sources = [{{ {key} = ... }}] to replace these"
            )
        return (
            {key: given[key] for key in given if key not in own} | {"sources": [own]}
            if own
            else given
        )
