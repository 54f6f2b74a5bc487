"""The section ``[data]``: the sources of the data and their order."""

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
            "How the source is read. 'text': plain files; 'jsonl', 'json', 'csv', 'tsv' and 'parquet': one column "
            "of a table; 'huggingface': one column of a data set that the datasets library saved to disk; 'tokens': "
            "files of token ids; 'chat': conversations (docs/how-to/conversations.md); 'preference' and 'feedback': "
            "judged answers (docs/how-to/preferences.md); 'images' and 'videos': pictures with classes or captions "
            "(docs/how-to/images.md); 'stdlib': Python's own source code. A plugin's name is also possible."
        ),
    )
    path: str | None = Field(
        None,
        description=(
            "What to read: a file, a folder or a pattern such as data/*.jsonl, on this machine or at https://, "
            "s3:// or hf://datasets/ (docs/how-to/data-sources.md). Kind 'stdlib' needs no path."
        ),
    )
    name: str = Field(
        "",
        description=(
            "Name of this source in mixtures and reports. If not set: its path or, without a path, its kind."
        ),
    )
    field: str = Field(
        "text",
        description="Column that holds the text of a record or, in a source of conversations, its messages.",
    )
    weight: PositiveFloat = Field(
        1.0,
        description=(
            "How often training samples come from this source, relative to the weights of the other sources: one "
            "with weight 3 gives three times as many as one with weight 1."
        ),
    )
    settings: dict[str, Any] = Field(
        {},
        description=(
            "Keyword arguments for a source of kind 'images' or 'videos', such as { size = [64, 64] } "
            "(docs/how-to/images.md), or for a plugin's source."
        ),
    )
    form: Literal[
        "auto", "messages", "prompt", "sharegpt", "alpaca", "adp", "atif", "docstrings"
    ] = Field(
        "auto",
        description=(
            "Format of the conversations in this source. 'auto' recognises the format of each record; 'docstrings' "
            "makes questions and answers from Python code; docs/how-to/conversations.md describes the other "
            "formats."
        ),
    )
    columns: dict[str, str] = Field(
        {},
        description=(
            "Meaning of columns with unusual names, for conversations: { ask = 'prompt', note = '' } reads the "
            "column 'ask' as the prompt and ignores 'note'. A key with a dot, such as 'dialogue.speaker', is the "
            "field 'speaker' of each turn in the column 'dialogue'."
        ),
    )
    roles: dict[str, Role] = Field(
        {},
        description=(
            "Roles of speakers with unusual names, for conversations: { Teacher = 'user' } reads turns of 'Teacher' "
            "as turns of the user."
        ),
    )
    where: dict[str, str | bool | int | float] = Field(
        {},
        description=(
            "Read only the records whose columns have these values, such as { part = 'real' }. Empty: read all. "
            "Only for tables: kinds 'jsonl', 'json', 'csv', 'tsv' and 'parquet'."
        ),
    )
    on_error: Literal["stop", "skip"] = Field(
        "stop",
        description=(
            "What happens if a record cannot be read. 'stop': the run ends with an error; 'skip': the record is "
            "left out, and the number of such records is reported."
        ),
    )

    @property
    def title(self) -> str:
        """Name of the source in mixtures, reports and error lines: ``name``, or else :attr:`shown`."""
        return self.name or self.shown

    @property
    def shown(self) -> str:
        """Path or kind of the source, without parts that may be secret: a password, or the query of a web address."""
        path = self.path or self.kind
        if "://" in path:
            from weft.recipe.masked import masked_address

            return masked_address(path)
        return path

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
        description=(
            "Chat template that writes a conversation as text: a template in Jinja, or a file with one. If not set: "
            "the tokenizer's own."
        ),
    )
    learn: Literal["assistant", "last", "all"] | tuple[Role, ...] = Field(
        "assistant",
        description=(
            "Tokens that count in the loss: those of the assistant's turns ('assistant'), of the assistant's last "
            "turn alone ('last'), of all turns ('all'), or of the turns of the roles in a list, such as ['user', "
            "'assistant']."
        ),
    )
    truncation: Literal["keep_start", "keep_end", "drop", "error"] = Field(
        "keep_start",
        description=(
            "What happens to conversations of more than data.seq_len tokens: their beginning is kept "
            "('keep_start'), their end is kept ('keep_end'), they are left out ('drop'), or the run stops with an "
            "error ('error')."
        ),
    )
    pack: bool = Field(
        True,
        description=(
            "Whether a training sequence may hold several whole conversations, whose tokens do not attend to each "
            "other. If false, each conversation has a sequence of its own."
        ),
    )
    control: bool = Field(
        False,
        description=(
            "Whether the name of a special token within a message, such as '<|im_end|>', becomes that token. If "
            "false, it is ordinary text, which is safer for messages of unknown authors."
        ),
    )
    variables: dict[str, Any] = Field(
        {},
        description=(
            "Variables that the chat template can read besides its usual ones, such as { enable_thinking = false }. "
            "Dates and times are texts to it."
        ),
    )
    date: str = Field(
        "",
        pattern=r"^(\d{4}-\d\d-\d\d)?$",
        description=(
            "Date that the chat template takes for today, as YYYY-MM-DD, so that the data are the same every day. "
            "If not set: the real date."
        ),
    )
    reasoning: Literal["template", "split", "keep"] = Field(
        "template",
        description=(
            "What happens to the assistant's reasoning in earlier turns, which many chat templates leave out. "
            "'template': what the template leaves out is not learned; 'split': a conversation becomes several "
            "samples, so that the reasoning of each turn is learned in one of them; 'keep': one sample has the "
            "reasoning of all turns."
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
            "Data sources that are mixed, each a table with the settings of data.sources below. A single source "
            "needs no list: its settings can stand in [data] itself."
        ),
    )
    mix: str = Field(
        "static",
        description=(
            "How the shares of several sources are chosen (docs/how-to/mixtures.md). 'static': by their weights; "
            "'temperature': by their sizes, with small sources raised; 'schedule': by weights that change during "
            "the run; 'online': sources with high losses on held-out data come more often; 'doremi': a source's "
            "loss counts more the further it is above a reference model's."
        ),
    )
    mix_by: Literal["sampling", "weighting"] = Field(
        "sampling",
        description=(
            "What the share of a source decides. 'sampling': how many samples it gives; 'weighting': how much "
            "the loss of its tokens counts, while all sources give samples in proportion to their sizes."
        ),
    )
    tokenizer: str = Field(
        "",
        description=(
            "Tokenizer of the texts: 'bytes' (a token for each byte), a tokenizer.json or a folder with one, or "
            "'train:N', which trains a byte-level BPE of N tokens on the data. If not set: the tokenizer of the "
            "model in model.from or, without such a model, 'bytes'."
        ),
    )
    seq_len: int = Field(
        256,
        gt=0,
        lt=2**31,
        description=(
            "Number of tokens in one training sequence. Longer texts continue in the next sequence; shorter ones "
            "are packed together. What happens to longer conversations is set by data.chat.truncation."
        ),
    )
    seed: int = Field(
        0, description="Seed of the random order in which training samples come."
    )
    epochs: int = Field(
        0,
        ge=0,
        description=(
            "Number of passes over the data after which the run ends. 0: no such limit; the data are repeated until "
            "train.steps is reached."
        ),
    )
    validation: float | str = Field(
        0.02,
        description=(
            "What the model is validated on: a share of the documents that is held out from training, such as 0.02, "
            "or the path (file, folder or pattern) of separate documents. 0: no validation."
        ),
    )
    cache: Path | None = Field(
        None,
        description=(
            "Folder in which tokenized data are kept for later runs. If not set: the folder in the environment "
            "variable WEFT_CACHE or, without it, ~/.cache/weft."
        ),
    )
    bos: bool | Literal["auto", "prompts"] = Field(
        "auto",
        description=(
            "Whether each text begins with the tokenizer's token for the beginning of a text (BOS). 'auto': if the "
            "tokenizer adds it by itself; 'prompts': only prompts for generation begin with it, as in early "
            "versions of Weft."
        ),
    )
    chat: Chat = Field(
        Chat(), description="Settings by which conversations become tokens."
    )

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
