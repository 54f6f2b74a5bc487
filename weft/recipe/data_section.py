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
    """One corpus. ``kind`` says how to read ``path`` (a file, a folder or a glob; none for ``stdlib``).

    ``tokens`` reads memory-mapped token ids (see ``weft.data.tokens``); ``huggingface`` a dataset saved to disk;
    ``chat`` conversations, of which only the assistant's words are learned (docs/chat.md): ``form`` is their form, if
    it is not to be seen from each record, ``field`` the messages' name, if it is none of the usual. Of the form
    ``docstrings`` are questions about Python code, without ``path`` about the standard library. ``preference`` reads
    pairs of answers, ``chosen`` and ``rejected``, and ``feedback`` answers with a ``label`` each (docs/preference.md).
    Any other kind is a plugin's, which is called with ``path`` and ``settings``.

    Of conversations and pairs ``columns`` says what the data's own names mean: ``{ ask = "prompt", note = "" }``, where
    nothing leaves a column out, and ``dialogue.speaker`` is a field of the turns in ``dialogue``; ``roles`` says who
    speaks: ``{ Teacher = "user" }``. ``on_error``: a record that cannot be read ends the run (``stop``), or is left out
    and counted (``skip``).
    """

    kind: str = "stdlib"
    path: str | None = None
    field: str = "text"
    weight: PositiveFloat = 1.0
    settings: dict[str, Any] = Field({})
    form: Literal[
        "auto", "messages", "prompt", "sharegpt", "alpaca", "adp", "atif", "docstrings"
    ] = "auto"
    columns: dict[str, str] = Field({})
    roles: dict[str, Role] = Field({})
    on_error: Literal["stop", "skip"] = "stop"

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
    """How sources of kind ``chat`` become tokens (docs/chat.md).

    ``template``: a file with a Jinja template, or the template; the tokenizer's own if left out. ``learn``: from the
    assistant's turns, the ``last`` of them, ``all`` tokens, or the turns of a list of roles. ``truncation``: what
    becomes of conversations longer than ``data.seq_len``. ``pack``: rows hold several whole conversations. ``control``:
    names of special tokens in somebody's words become these tokens. ``variables`` are handed to the template; ``date``
    (2026-01-31) is what it takes for today. ``reasoning``: of turns that the ``template`` leaves it out of, it is not
    learned, or the conversation is ``split`` into samples that each end with the turns of one question.
    """

    template: str = ""
    learn: Literal["assistant", "last", "all"] | tuple[Role, ...] = "assistant"
    truncation: Literal["keep_start", "keep_end", "drop", "error"] = "keep_start"
    pack: bool = True
    control: bool = False
    variables: dict[str, Any] = Field({})
    date: str = Field("", pattern=r"^(\d{4}-\d\d-\d\d)?$")
    reasoning: Literal["template", "split"] = "template"


class Data(Section):
    """What is read and in which order. ``epochs = 0`` repeats for ever; otherwise the run ends with the data, or after
    ``train.steps`` if these are given and fewer.

    Keys of a source may stand here themselves, where there is one source only; ``columns``, ``roles`` and ``on_error``
    also beside ``sources``, for all of these.

    ``tokenizer`` is ``bytes``, a path to a ``tokenizer.json`` (or a folder with one), or ``train:N``: a byte-level
    BPE of N entries trained on the corpus itself. Left out, it is that of ``model.from``, or else ``bytes``.

    ``validation``: the share of the documents that is held out for validation, or the path of a file, folder or glob
    with others, which is read as the (first) source is.

    ``bos``: whether texts begin with the tokenizer's BOS token, documents as well as prompts and questions. ``auto``:
    if its post-processor says so. ``prompts``: as ``auto``, but documents begin without, as in runs of before there was
    this setting. Conversations begin as the chat template writes them.
    """

    sources: tuple[Source, ...] = Field((Source(),), min_length=1)
    tokenizer: str = ""
    seq_len: int = Field(256, gt=0, lt=2**31)
    seed: int = 0
    epochs: int = Field(0, ge=0)
    validation: float | str = 0.02
    cache: Path | None = None
    bos: bool | Literal["auto", "prompts"] = "auto"
    chat: Chat = Chat()

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
