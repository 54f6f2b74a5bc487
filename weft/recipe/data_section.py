"""The section ``[data]``: the sources of the data and their order."""

import re
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, field_validator, model_validator

from weft.recipe.host_section import HostSection
from weft.registry import KINDS
from weft.section import Section

#: Weft's own kinds of sources; plugins bring others.
SOURCES = KINDS["dataset"].plain

#: Other names for kind ``jsonl``, which reads all files of records.
RECORD_FILES = ("json", "csv", "tsv")


#: Kinds whose records are conversations, and those of them that are pairs of answers.
CONVERSATIONS, ANSWER_PAIRS = (
    ("chat", "preference", "feedback"),
    ("preference", "feedback"),
)


#: Who speaks in a conversation.
Role = Literal["system", "developer", "user", "assistant", "tool"]


class Source(Section):
    """One source of training data: files of one kind, or a plugin's data set.

    Files of records are read by the endings of their names: JSON lines, CSV, TSV, Parquet.
    """

    kind: str = Field(
        "stdlib",
        description=(
            "How the source is read. 'text': plain files; 'jsonl', 'json', 'csv', 'tsv' and "
            "'parquet': one column of a table; 'huggingface': a column of a dataset saved to "
            "disk; 'tokens': token ids; 'chat', 'preference' and 'feedback': conversations "
            "(docs/how-to/conversations.md, docs/how-to/preferences.md); 'stdlib': Python's "
            "own source code. A plugin's name is also possible."
        ),
    )
    path: str | None = Field(
        None,
        description=(
            "File, folder or glob to read, on this machine or at https://, s3:// or "
            "hf://datasets/ (docs/how-to/data-sources.md). Kind 'stdlib' needs no path."
        ),
    )
    name: str = Field(
        "",
        description="Name of the source in mixtures and reports. If not set: its path or, without one, its kind.",
    )
    field: str = Field(
        "text",
        description=("Column that holds the text, or the messages of a conversation."),
    )
    weight: PositiveFloat = Field(
        1.0,
        description=(
            "How often documents are drawn from this source, relative to the weights of other "
            "sources."
        ),
    )
    settings: dict[str, Any] = Field(
        {}, description="Keyword arguments for a plugin's source."
    )
    form: Literal[
        "auto", "messages", "prompt", "sharegpt", "alpaca", "adp", "atif", "docstrings"
    ] = Field(
        "auto",
        description=(
            "Format of the conversations. 'auto' recognises the format of each record; "
            "'docstrings' makes questions and answers from Python code; "
            "docs/how-to/conversations.md explains the others."
        ),
    )
    columns: dict[str, str] = Field(
        {},
        description=(
            "How to read columns with unusual names: { ask = 'prompt', note = '' } reads "
            "'ask' as the prompt and ignores 'note'. A key such as 'dialogue.speaker' means "
            "the field 'speaker' of each turn in the column 'dialogue'."
        ),
    )
    roles: dict[str, Role] = Field(
        {},
        description=(
            "Roles of speakers with unusual names: { Teacher = 'user' } reads turns of "
            "'Teacher' as the user's."
        ),
    )
    where: dict[str, str | bool | int | float] = Field(
        {},
        description=(
            "Read only the records whose columns have these values, such as { part = 'real' }. For kinds "
            "'jsonl' and 'parquet'."
        ),
    )
    on_error: Literal["stop", "skip"] = Field(
        "stop",
        description=(
            "What happens to a record that cannot be read: 'stop' ends the run, 'skip' leaves "
            "it out and counts it."
        ),
    )

    @property
    def title(self) -> str:
        """Name of the source in mixtures, reports and error lines: ``name``, or else its path or kind."""
        return self.name or self.path or self.kind

    @property
    def shown(self) -> str:
        """Path or kind of the source, without parts that may be secret: a password, or the query of a web address."""
        return re.sub(r"^(https?://)(?:[^/?]*@)?([^?]*).*", r"\1\2", self.path or self.kind)  # fmt: skip

    @property
    def skips(self) -> bool:
        """Whether unreadable records are skipped, by ``on_error``, instead of ending the run."""
        return self.on_error == "skip"

    @field_validator("kind")
    @classmethod
    def _records(cls, kind: str) -> str:
        """Files of records are read by their names' endings, so that all of them are of one kind."""
        return "jsonl" if kind in RECORD_FILES else kind

    @model_validator(mode="after")
    def _path(self) -> Self:
        if self.where and self.kind not in ("jsonl", "parquet"):
            raise ValueError(
                f"where is of kinds 'jsonl' and 'parquet', whose records have columns; leave it out for {self.kind!r}"
            )
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
    """Settings that turn sources of kind ``chat`` into tokens (docs/how-to/conversations.md)."""

    template: str = Field(
        "",
        description="Jinja chat template, or a file with one. If not set: the tokenizer's own.",
    )
    learn: Literal["assistant", "last", "all"] | tuple[Role, ...] = Field(
        "assistant",
        description=(
            "Tokens that count in the loss: those of the assistant's turns ('assistant'), of "
            "the assistant's last turn ('last'), of all turns ('all'), or of all turns of the"
            " roles in a list."
        ),
    )
    truncation: Literal["keep_start", "keep_end", "drop", "error"] = Field(
        "keep_start",
        description=(
            "What happens to conversations longer than data.seq_len: keep their start or end, "
            "drop them, or stop with an error."
        ),
    )
    pack: bool = Field(
        True,
        description=(
            "Pack several whole conversations into one sequence. Their tokens do not attend "
            "to each other."
        ),
    )
    control: bool = Field(
        False,
        description=(
            "Whether the name of a special token in a message, such as '<|im_end|>', becomes "
            "that token (true) or stays plain text (false). Leave it off for messages that "
            "you do not trust."
        ),
    )
    variables: dict[str, Any] = Field(
        {},
        description=(
            "Variables that the chat template gets in addition, such as { enable_thinking = "
            "false }."
        ),
    )
    date: str = Field(
        "",
        pattern=r"^(\d{4}-\d\d-\d\d)?$",
        description="Date that the template takes for today (YYYY-MM-DD). If not set: the real date.",
    )
    reasoning: Literal["template", "split", "keep"] = Field(
        "template",
        description=(
            "What happens to the assistant's reasoning in earlier turns. Many chat templates leave this reasoning "
            "out. 'template': it is not learned; 'split': a conversation becomes several samples, so that each "
            "turn's reasoning is learned in one; 'keep': one sample contains the reasoning of all turns."
        ),
    )


class Data(HostSection):
    """Section on the data that the model learns from.

    The keys of a single source may stand in this section itself. With several ``sources``, ``columns``, ``roles`` and
    ``on_error`` may stand here for all of them. ``weft techniques`` lists the mixtures, each of which brings settings
    of its own.
    """

    hosts: ClassVar = {"mix": "mixture"}

    sources: tuple[Source, ...] = Field(
        (Source(),),
        min_length=1,
        description=(
            "List of data sources that are mixed. With a single source its keys can stand in "
            "[data] itself."
        ),
    )
    mix: str = Field(
        "static",
        description=(
            "How several sources are mixed (docs/how-to/mixtures.md). 'static': by their weights; "
            "'temperature': by their sizes, small ones more often than their size says; 'schedule': by "
            "weights that change over the run; 'online': by losses that are measured during training; "
            "'doremi': by weights that are learned during training from losses relative to a reference model."
        ),
    )
    mix_by: Literal["sampling", "weighting"] = Field(
        "sampling",
        description=(
            "How a source gets its share: its documents come more often ('sampling'), or all documents come equally "
            "often and the loss of its tokens counts more ('weighting')."
        ),
    )
    tokenizer: str = Field(
        "",
        description=(
            "'bytes' (a token for each byte), a tokenizer.json or a folder with one, or 'train:N' to train a "
            "byte-level BPE of N tokens on the data. If not set: the tokenizer of model.from or, without one, "
            "'bytes'."
        ),
    )
    seq_len: int = Field(
        256,
        gt=0,
        lt=2**31,
        description=(
            "Tokens in one training sequence. A longer text goes on in the next sequence, shorter "
            "ones are packed together. data.chat.truncation says what happens to longer conversations."
        ),
    )
    seed: int = Field(0, description="Seed of the random order of the data.")
    epochs: int = Field(
        0,
        ge=0,
        description=(
            "End the run after this many passes over the data. 0: no such limit; the data repeat until train.steps "
            "is reached."
        ),
    )
    validation: float | str = Field(
        0.02,
        description=(
            "Share of the documents held out for validation, or the path (file, folder or "
            "glob) of separate documents. 0: none."
        ),
    )
    cache: Path | None = Field(
        None,
        description="Folder that keeps tokenized data for later runs. If not set: $WEFT_CACHE, or ~/.cache/weft.",
    )
    bos: bool | Literal["auto", "prompts"] = Field(
        "auto",
        description=(
            "Whether each text begins with the tokenizer's BOS token. 'auto': if the "
            "tokenizer adds one by itself; 'prompts': only in front of prompts for "
            "generation, as early versions of Weft did."
        ),
    )
    chat: Chat = Field(Chat(), description="How conversations become tokens.")

    @property
    def measures(self) -> str:
        """What the mixture measures to change its weights: the losses of "steps", those of "held-out" rows, or ""
        for none.
        """
        mixture = next(self.named(), None)
        return getattr(mixture and mixture.implementation, "measures", "")

    @property
    def held_out(self) -> float:
        """Share of the documents (0 to 1) that is held out for validation."""
        return 0.0 if isinstance(self.validation, str) else self.validation

    @model_validator(mode="after")
    def _source_names(self) -> Self:
        named = [source.name for source in self.sources if source.name]
        if twice := next((name for name in named if named.count(name) > 1), ""):
            raise ValueError(
                f"two sources are called {twice!r}; give each a name of its own"
            )
        return self

    @classmethod
    def user_path(cls, path: list[str], given: Any) -> list[str]:
        """Return the path of a value in this section as the user wrote it, for error lines.

        ``path``: keys and indices that lead to the value in the validated section, such as ``["sources", 0, "field"]``.
        The user may have only one source, and may have written its keys in ``[data]`` itself. The result for this
        example is then ``["field"]``. ``given``: the user's values of the section.
        """
        if path[:1] != ["sources"] or not isinstance(given, dict):
            return path
        inside = path[2:]
        in_section = "sources" not in given or (inside and inside[0] in given)
        return inside if in_section else path

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
