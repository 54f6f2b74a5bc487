"""Files as people bring them: formats, folders with other files, names of columns, records that cannot be read."""

from __future__ import annotations

import csv
import io
import json
import lzma
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.test_records import EXTRA, FORMS
from weft.data.batch import IGNORE
from weft.data.chat.conversation import Conversation
from weft.data.chat.samples import read_samples
from weft.data.corpora import read_documents, unread_files
from weft.data.files import select_files, source_files
from weft.data.loader import open_data
from weft.data.source_check import check_sources
from weft.data.source_report import SourceReport
from weft.data.tasks import read_questions
from weft.errors import UsageError, WeftError
from weft.recipe import Data, Source, build_recipe, load_recipe

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + eos_token }}{% endfor %}"
)
TEMPLATE += "{% if add_generation_prompt %}a:{% endif %}"
TALK = {
    "messages": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
}
PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}


def source(path: Path | str, kind: str = "chat", **more: Any) -> Source:
    return Source.model_validate({"kind": kind, "path": str(path), **more})


def words(given: Source, report: SourceReport | None = None) -> list[list[str]]:
    """The words of every conversation of a source."""
    talks = [sample for _, sample in read_samples(given, report)]
    return [
        [m["content"] for m in talk.messages]
        for talk in talks
        if isinstance(talk, Conversation)
    ]


def jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text(
        "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)
    )
    return path


def calls(argument: Any, **more: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": argument}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": more}}]
    return {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [call]},
        ],
        "tools": tools,
    }


VALUES = (
    st.integers(0, 9)
    | st.text("ab", max_size=2)
    | st.lists(st.integers(0, 3), min_size=1, max_size=2)
)
OBJECTS = st.dictionaries(st.sampled_from("abc"), VALUES | st.dictionaries(st.sampled_from("xy"), VALUES, min_size=1),
                          min_size=1, max_size=3)  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(st.lists(OBJECTS, min_size=1, max_size=4), st.booleans())
def test_rows_of_arrow_are_those_that_were_written(
    tmp_path_factory: Any, arguments: list[Any], stream: bool
) -> None:
    """Of objects with unlike keys; where Arrow has no type for two of them, there is nothing to read."""
    rows = [calls(argument, properties=argument) for argument in arguments]
    try:
        table = pa.Table.from_pylist(rows)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return
    folder = tmp_path_factory.mktemp("arrow")
    if stream:
        with pa.ipc.new_stream(folder / "rows.arrow", table.schema) as out:
            out.write_table(table)
    else:
        pq.write_table(table, folder / "rows.parquet")
    found = [sample for _, sample in read_samples(source(folder))]
    for sample, row in zip(found, rows, strict=True):
        assert isinstance(sample, Conversation)
        assert [*sample.messages] == row["messages"] and sample.tools == tuple(
            row["tools"]
        )


def test_an_explicit_null_stays_where_it_means_something(tmp_path: Path) -> None:
    row = calls({"city": "Paris", "to": None}, required=[None])
    ((_, talk),) = read_samples(source(jsonl(tmp_path / "a.jsonl", [row])))
    assert isinstance(talk, Conversation) and talk.tools is not None
    assert talk.messages[1]["tool_calls"][0]["function"]["arguments"] == {
        "city": "Paris",
        "to": None,
    }
    as_text = calls(json.dumps({"city": "Paris", "to": None}), type="object")
    pq.write_table(
        pa.Table.from_pylist([as_text, calls("{}", type="object")]),
        tmp_path / "a.parquet",
    )
    (_, talk), (_, other) = read_samples(source(tmp_path / "a.parquet"))
    assert isinstance(talk, Conversation) and isinstance(other, Conversation)
    assert talk.messages[1]["tool_calls"][0]["function"]["arguments"] == {
        "city": "Paris",
        "to": None,
    }
    assert other.messages[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_maps_and_json_columns_keep_their_nulls(tmp_path: Path) -> None:
    kind = pa.list_(
        pa.struct(
            [
                ("role", pa.string()),
                ("content", pa.string()),
                ("extra", pa.map_(pa.string(), pa.string())),
            ]
        )
    )
    turns = [
        {"role": "user", "content": "q", "extra": [("k", None)]},
        {"role": "assistant", "content": "a", "extra": None},
    ]
    pq.write_table(
        pa.table({"messages": pa.array([turns], kind)}), tmp_path / "a.parquet"
    )
    ((_, talk),) = read_samples(source(tmp_path / "a.parquet"))
    assert isinstance(talk, Conversation)
    assert talk.messages[0]["extra"] == {"k": None} and "extra" not in talk.messages[1]


def test_saved_data_sets_are_conversations(tmp_path: Path) -> None:
    import datasets

    data = datasets.Dataset.from_list(
        [calls({"town": "Oslo"}), calls({"title": "a", "n": 1})]
    )
    datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(
        tmp_path / "both"
    )
    (tmp_path / "both/train/cache-1.arrow").write_bytes(b"of something else")
    for path in (tmp_path / "both", tmp_path / "both" / "train"):
        found = [
            talk.messages[1]["tool_calls"][0]["function"]["arguments"]
            for _, talk in read_samples(source(path))
        ]
        assert found == [{"town": "Oslo"}, {"title": "a", "n": 1}]
    part = tmp_path / "both/train/data-00000-of-00001.arrow"
    part.rename(tmp_path / "elsewhere.arrow")
    with pytest.raises(
        WeftError,
        match=r"train is a saved data set without its data-00000-of-00001.arrow",
    ):
        source_files(source(tmp_path / "both"))
    (tmp_path / "both/train/state.json").write_text("{")
    with pytest.raises(WeftError, match=r"state.json of a saved data set is damaged"):
        source_files(source(tmp_path / "both"))
    (tmp_path / "both/train").rename(tmp_path / "both/validation")
    with pytest.raises(WeftError, match="no split 'train'"):
        source_files(source(tmp_path / "both"))


CELLS = st.text('ab,;\t"\n é', max_size=5).map(lambda text: f"w{text}w")


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=4), st.sampled_from([",", ";", "\t"]),
    st.sampled_from([("question", "answer"), ("Prompt", "Response")]), st.booleans(),
)  # fmt: skip
def test_tables_are_records(
    tmp_path_factory: Any,
    rows: list[tuple[str, str]],
    mark: str,
    names: tuple[str, str],
    windows: bool,
) -> None:
    text = io.StringIO()
    csv.writer(
        text, delimiter=mark, lineterminator="\r\n" if windows else "\n"
    ).writerows([names, *rows])
    file = tmp_path_factory.mktemp("table") / ("a.tsv" if mark == "\t" else "a.csv")
    file.write_bytes(text.getvalue().encode("utf-8-sig" if windows else "utf-8"))
    assert words(source(file)) == [[*row] for row in rows]
    places = [place.line for place, _ in read_samples(source(file))]
    lines = [1 + sum(cell.count("\n") for cell in row) for row in rows]
    assert places == [2 + sum(lines[:i]) for i in range(len(rows))]
    assert [*read_documents(source(file, "csv", field=names[1]))] == [
        answer for _, answer in rows
    ]


def test_every_format_packed_or_not_gives_the_same(tmp_path: Path) -> None:
    import bz2
    import gzip

    lines = b"".join(json.dumps(TALK).encode() + b"\n" for _ in range(3))
    zstd = pa.compress(lines[: len(lines) // 3], codec="zstd", asbytes=True)
    for name, content in {
        "lines.json": lines, "list.json": json.dumps([TALK] * 3, indent=1).encode(), "a.ndjson": lines,
        "a.jsonl.gz": gzip.compress(lines), "a.jsonl.bz2": bz2.compress(lines), "a.json.xz": lzma.compress(lines),
        "a.jsonl.zst": zstd * 3, "bom.jsonl": b"\xef\xbb\xbf" + lines,
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
        assert words(source(tmp_path / name)) == [["q", "a"]] * 3, name
    assert len(words(source(tmp_path))) == 24
    (tmp_path / "lines.json").write_bytes(lines + b"{\n")
    with pytest.raises(WeftError, match=r"lines.json:4: not valid JSON"):
        words(source(tmp_path / "lines.json"))
    (tmp_path / "a.jsonl.zst").write_bytes(zstd[:-3])
    with pytest.raises(WeftError, match=r"cannot read .*a.jsonl.zst as chat"):
        words(source(tmp_path / "a.jsonl.zst"))


@pytest.mark.parametrize(
    "held_out",
    ["test-00000-of-00001.jsonl", "val.jsonl", "test/0000.jsonl", "my_dev.jsonl"],
)
def test_of_the_splits_of_a_folder_that_to_train_on_is_read(
    tmp_path: Path, held_out: str
) -> None:
    (tmp_path / held_out).parent.mkdir(exist_ok=True)
    jsonl(tmp_path / held_out, [TALK])
    assert len(words(source(tmp_path))) == 1  # nothing else is there
    for name in (
        "train-00000-of-00002.jsonl",
        "train-00001-of-00002.jsonl",
        "latest.jsonl",
    ):
        jsonl(tmp_path / name, [TALK])
    assert len(words(source(tmp_path))) == 3
    assert unread_files(source(tmp_path)) == (
        f"files that are not read: {Path(held_out).name}",
    )
    # a glob names what it wants
    assert len(words(source(tmp_path / "**/*.jsonl"))) == 4


def test_zst_without_its_library_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"x")
    with pytest.raises(
        WeftError,
        match=r"chat needs pyarrow, which is not installed; pip install 'weft\[data\]'",
    ):
        words(source(tmp_path / "a.jsonl.zst"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("question,answer\nq\n", r"a.csv:2: 1 cells under the 2 names"),
        ("question,answer\nq,a\nq,a,b\n", r"a.csv:3: 3 cells under the 2 names .* put cells with ',' in them"),
        ("question,question\nq,a\n", r"a.csv:1: two columns are called 'question'"),
        ("question,answer\nq,\n", r"a.csv:2: its 'answer' is empty"),
        ("ask,reply\nq,a\n", r"a.csv:2: a record with ask, reply has none of the known forms"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_table_is_named(
    tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(WeftError, match=said):
        words(source(tmp_path / "a.csv"))


def test_files_that_are_not_read_are_named(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", [TALK])
    for name in ("README.md", "dataset_info.json", "photo.png", ".hidden"):
        (tmp_path / name).write_bytes(b"\xff")
    assert words(source(tmp_path)) == [["q", "a"]]
    assert unread_files(source(tmp_path)) == (
        "files that are not read: README.md, dataset_info.json, photo.png",
    )
    (tmp_path / "b.csv").write_text("text\nT\n")
    jsonl(tmp_path / "a.jsonl", [{"text": "J"}])
    read, left = select_files(source(tmp_path, "jsonl"))
    assert [file.name for file in read] == ["a.jsonl"] and "b.csv" in [
        file.name for file in left
    ]
    (tmp_path / "README.md").write_text("R")
    (tmp_path / "dataset_info.json").unlink()
    assert [*read_documents(source(tmp_path, "text"))] == ["R"]
    assert unread_files(source(tmp_path, "text")) == (
        "files that are not read: a.jsonl, b.csv, photo.png",
    )
    corpus = open_data(
        Data(
            sources=(source(tmp_path, "text"),),
            cache=tmp_path.with_name("cached"),
            validation=0,
        )
    )
    assert [note.rpartition(": ")[2] for note in corpus.notes] == [
        "a.jsonl, b.csv, photo.png"
    ]


def test_records_are_no_plain_text(tmp_path: Path) -> None:
    import datasets

    jsonl(tmp_path / "talks.jsonl", [TALK])
    jsonl(tmp_path / "pairs.json", [PAIR, PAIR])
    jsonl(tmp_path / "texts.jsonl", [{"body": "some words", "id": "1"}])
    (tmp_path / "list.json").write_text(json.dumps([{"text": "a"}]))
    (tmp_path / "a.csv").write_text("question,answer\nq,a\n")
    (tmp_path / "b.tsv").write_text("text\tn\nq\t1\n")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "p.parquet")
    (tmp_path / "z.jsonl.gz").write_bytes(
        __import__("gzip").compress((tmp_path / "talks.jsonl").read_bytes())
    )
    datasets.Dataset.from_list([TALK]).save_to_disk(tmp_path / "saved")
    datasets.Dataset.from_list([{"body": "some words"}]).save_to_disk(
        tmp_path / "plain"
    )
    for name, setting in {
        "talks.jsonl": "data.kind = 'chat'", "pairs.json": "data.kind = 'preference'", "a.csv": "data.kind = 'chat'",
        "texts.jsonl": "data.kind = 'jsonl' and data.field = 'body'", "list.json": "data.kind = 'jsonl'",
        "b.tsv": "data.kind = 'jsonl'", "p.parquet": "data.kind = 'parquet'", "z.jsonl.gz": "data.kind = 'chat'",
        "saved": "data.kind = 'chat'", "plain": "data.kind = 'huggingface' and data.field = 'body'",
        "*.jsonl": "data.kind = 'chat'",
    }.items():  # fmt: skip
        for kind in ("text", "stdlib"):
            with pytest.raises(UsageError, match="not plain text") as error:
                check_sources(Data(sources=(source(tmp_path / name, kind),)))
            assert f"set {setting}" in str(error.value) and "\n" not in str(error.value)
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert [*read_documents(source(tmp_path / "config.json", "text"))] == ['{"a": 1}']
    (tmp_path / "a.txt.gz").write_bytes(__import__("gzip").compress(b"packed"))
    assert [*read_documents(source(tmp_path / "a.txt.gz", "text"))] == ["packed"]
    (tmp_path / "parquet").write_bytes((tmp_path / "p.parquet").read_bytes() + b"\xff")
    with pytest.raises(
        WeftError, match=r"cannot read .*parquet as text: .*; it is Parquet"
    ):
        [*read_documents(source(tmp_path / "parquet", "text"))]


def test_questions_may_be_a_table(tmp_path: Path) -> None:
    table = 'prompt,answer,choices\nsum?,1,"[""two"", ""four""]"\nname?,Ada,\n'
    (tmp_path / "q.csv").write_text(table)
    first, second = read_questions(tmp_path / "q.csv")
    assert (first.answers, first.right) == (("two", "four"), 1) and second.answers == (
        "Ada",
    )


def test_columns_and_roles_of_the_users_own(tmp_path: Path) -> None:
    rows = [
        {
            "dialogue": [
                {"speaker": "Teacher", "text": "q", "mood": 1},
                {"speaker": "Pupil", "text": "a"},
            ],
            "n": 1,
        },
        {
            "dialogue": json.dumps(
                [{"speaker": "Teacher", "text": "q"}, {"speaker": "gpt", "text": "a"}]
            ),
            "n": None,
        },
    ]
    file = jsonl(tmp_path / "a.jsonl", rows)
    columns = {
        "dialogue": "messages",
        "dialogue.speaker": "role",
        "dialogue.text": "content",
        "dialogue.mood": "",
        "n": "",
    }
    report = SourceReport()
    named = source(
        file, columns=columns, roles={"Teacher": "user", "Pupil": "assistant"}
    )
    assert words(named, report) == [["q", "a"]] * 2 and not report.lines()
    jsonl(file, [{"meta": {"ask": "q", "by": "x"}, "reply": "a"}])
    assert words(
        source(file, columns={"meta.ask": "prompt", "reply": "completion"}),
        report := SourceReport(),
    ) == [["q", "a"]]
    assert report.lines() == (
        "fields that are not read, with how many records have them: meta (1)",
    )
    jsonl(file, [{"ask": "q", "good": "a", "bad": "b"}])
    named = source(
        file,
        "preference",
        columns={"ask": "prompt", "good": "chosen", "bad": "rejected"},
    )
    assert len([*read_samples(named)]) == 1
    with pytest.raises(
        UsageError, match=r"data.columns names 'asked', which no record"
    ):
        words(source(jsonl(file, [TALK]), columns={"asked": "prompt"}))
    with pytest.raises(
        UsageError, match="'promt' means nothing; did you mean 'prompt'"
    ):
        words(source(file, columns={"ask": "promt"}))
    for tree, said in (
        ({"kind": "jsonl", "columns": {"a": "text"}}, "set 'field'"),
        ({"kind": "preference", "field": "good"}, "columns = { good = 'chosen' }"),
        (
            {"kind": "chat", "roles": {"a": "boss"}},
            "recipe: data.roles.a = 'boss' is not possible",
        ),
        (
            {"roles": {"a": "boss"}, "sources": [{"kind": "chat", "path": "a"}]},
            "recipe: data.roles.a = 'boss' is not possible",
        ),
        (
            {"sources": [{"kind": "chat", "form": "sharegtp"}]},
            "recipe: data.sources.0.form = 'sharegtp' is not possible",
        ),
        ({"kind": "jsonl", "weight": -1}, "recipe: data.weight = -1: "),
    ):
        with pytest.raises(UsageError, match=said):
            own = {} if "sources" in tree else {"path": "x"}
            build_recipe({"data": tree | own})


def test_what_is_set_beside_sources_is_for_all(tmp_path: Path) -> None:
    sources = [
        {"kind": "chat", "path": "a"},
        {"kind": "chat", "path": "b", "on_error": "stop"},
    ]
    data = build_recipe({"data": {"sources": sources, "on_error": "skip"}}).data
    assert [s.on_error for s in data.sources] == ["skip", "stop"]
    with pytest.raises(UsageError, match=r"beside data.sources"):
        build_recipe({"data": {"sources": sources, "on_error": "skip", "path": "c"}})


def opened(folder: Path, records: list[Any], kind: str = "chat", **more: Any) -> Any:
    file = jsonl(folder / "talks.jsonl", records)
    tree = {
        "kind": kind,
        "path": str(file),
        "cache": str(folder / "cache"),
        "validation": 0,
    }
    return open_data(
        Data.model_validate(tree | {"chat": {"template": TEMPLATE}} | more)
    )


BAD = [
    "{",
    "[1]",
    {"text": 1},
    {"messages": []},
    {"messages": [{"role": "x", "content": "y"}]},
]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from([TALK, *BAD]), min_size=1, max_size=8))
def test_skipped_records_are_counted_and_the_rest_is_read(
    tmp_path_factory: Any, records: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("skip")
    good, first = (
        records.count(TALK),
        next((i for i, r in enumerate(records, 1) if r is not TALK), None),
    )
    if not good:
        with pytest.raises(WeftError, match="holds no"):
            opened(folder, records, on_error="skip")
        return
    for _ in range(2):  # the second time from the cache
        corpus = opened(folder, records, on_error="skip")
        assert f"{good} conversations" in corpus.description
        said = f"{len(records) - good} of {len(records)} records left out"
        assert [
            note
            for note in corpus.notes
            if said in note and f"talks.jsonl:{first}:" in note
        ] or first is None
    if first is not None:
        with pytest.raises(WeftError, match=f"talks.jsonl:{first}: "):
            opened(folder, records)


def test_skipping_is_for_pairs_texts_and_templates_too(tmp_path: Path) -> None:
    corpus = opened(
        tmp_path, [PAIR, "{", {"chosen": "a"}, PAIR], "preference", on_error="skip"
    )
    assert (
        "2 pairs" in corpus.description and "2 of 4 records left out" in corpus.notes[0]
    )
    corpus = opened(
        tmp_path,
        [{"text": "abc", "url": "u"}, "{", {"text": 3}, {"text": None}],
        "jsonl",
        on_error="skip",
    )
    assert "1 documents" in corpus.description
    assert "2 of 4 records left out" in corpus.notes[0] and "url (1)" in corpus.notes[1]
    assert "1 records without a text left out" in corpus.notes[2]
    refusing = (
        "{% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}"
        + TEMPLATE
    )
    more = {"on_error": "skip", "chat": {"template": refusing}}
    corpus = opened(tmp_path, [TALK, {"messages": TALK["messages"] * 2}], **more)
    assert (
        "1 of 2 records left out" in corpus.notes[0] and "too long" in corpus.notes[0]
    )


def test_fields_that_are_not_read_are_said_once(tmp_path: Path) -> None:
    talks = [TALK | {"score": i, "id": str(i)} for i in range(3)] + [
        TALK | {"id": "x", "empty": ""}
    ]
    turns = [m | {"mood": "m", "loss": True} for m in TALK["messages"]]
    corpus = opened(tmp_path, [*talks, {"messages": turns}])
    assert corpus.notes == (
        f"data source {tmp_path}/talks.jsonl: fields that are not read, with how many records have them: "
        "id (4), score (3), messages[].mood (1)",
        f"data source {tmp_path}/talks.jsonl: turns that it marks as learned and data.chat.learn leaves out: "
        "1 of the user's",
    )
    mood = "{% for m in messages %}{{ m.mood }}{{ m.content + eos_token }}{% endfor %}"
    assert not opened(
        tmp_path,
        [{"messages": [m | {"mood": "m"} for m in TALK["messages"]]}],
        chat={"template": mood},
    ).notes


def learned_of(corpus: Any) -> tuple[str, str]:
    """The text of all rows, and what is learned of it."""
    rows = [corpus.train.row(i) for i in range(corpus.train.total or 0)]
    return tuple(  # type: ignore[return-value]
        "".join(
            corpus.tokenizer.decode([int(i) for i in ids if i != IGNORE])
            for ids in every
        )
        for every in ([row.tokens for row in rows], [row.labels for row in rows])
    )


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(sorted(FORMS)), st.booleans(), EXTRA)
def test_what_is_learned_and_said_of_every_form(
    tmp_path_factory: Any, form: str, system: bool, extra: Any
) -> None:
    record = FORMS[form] | extra | ({"system": "be brief"} if system else {})
    kind = "preference" if "chosen" in record else "chat"
    corpus = opened(tmp_path_factory.mktemp("form"), [record], kind, epochs=1)
    text, learned = learned_of(corpus)
    assert (
        learned.replace("\0", "")[:1] == "a"
        and "u" not in learned
        and "brief" not in learned
    )
    assert text.startswith("s:be brief" if system else "u:u")
    named = [key for key, value in extra.items() if value not in (None, "", [], {})]
    said = [note for note in corpus.notes if "fields that are not read" in note]
    assert bool(said) == bool(named) and all(f"{key} (1)" in said[0] for key in named)


def test_masks_count_where_all_tokens_are_learned(tmp_path: Path) -> None:
    turns = [m | {"masked": i == 1} for i, m in enumerate(TALK["messages"] * 2)]
    more = {"epochs": 1, "chat": {"template": TEMPLATE, "learn": "all"}}
    assert (
        learned_of(opened(tmp_path, [{"messages": turns}], **more))[1].count("a") == 3
    )  # roles, and the second answer
    assert (
        learned_of(
            opened(tmp_path, [TALK | {"messages": TALK["messages"] * 2}], **more)
        )[1].count("a")
        == 4
    )
    # A prompt is no mask of the data's: "all" has always meant it, too.
    assert (
        "q"
        in learned_of(opened(tmp_path, [{"prompt": "uq", "completion": "a"}], **more))[
            1
        ]
    )


def test_the_first_records_are_checked_before_anything_else(tmp_path: Path) -> None:
    jsonl(tmp_path / "good.jsonl", [TALK] * 20 + ["{"])
    check_sources(Data(sources=(source(tmp_path / "good.jsonl"),)))
    jsonl(tmp_path / "bad.jsonl", [TALK, "{"])
    misspelt = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "contents": "a"},
    ]
    jsonl(tmp_path / "misspelt.jsonl", [{"messages": misspelt}])
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("\u00e9tude".encode("latin-1"))
    for name in ("wide.jsonl", "wide.csv", "wide.txt"):
        (tmp_path / name).write_text("prompt,completion", encoding="utf-16")
    (tmp_path / "cut.txt").write_bytes(b"x" + "\u00e9".encode() * 2**12)
    check_sources(Data(sources=(source(tmp_path / "cut.txt", "text"),)))
    (tmp_path / "wrapped.json").write_text(json.dumps({"data": [TALK]}))
    assert words(source(tmp_path / "wrapped.json")) == [["q", "a"]]
    for name, kind, said in (
        ("bad.jsonl", "chat", "bad.jsonl:2: not valid JSON"),
        ("empty.jsonl", "chat", "holds no conversation; .* Parquet are read"),
        ("misspelt.jsonl", "chat", "give it 'content' in place of 'contents'"),
        ("empty.jsonl", "preference", "holds no pair of answers"),
        ("empty.jsonl", "jsonl", "holds no document"),
        ("empty.txt", "text", "holds no document"),
        ("none.jsonl", "chat", "none.jsonl: there is no such file"),
        ("good.jsonl", "jsonl", "no field 'text'"),
        ("none.bin", "tokens", "none.bin: there is no such file"),
        (
            "good.jsonl",
            "parquet",
            "kind = 'parquet' does not read; set data.kind = 'chat'",
        ),
        ("good.jsonl", "huggingface", "set data.kind = 'chat'"),
        ("wrapped.json", "tokens", "set data.kind = 'chat'"),
        (
            "good.jsonl",
            "preference",
            "it is one conversation, and no pair of answers; set data.kind = 'chat'",
        ),
        (
            "cut.txt",
            "chat",
            "cut.txt:1: not valid JSON .*; kind = 'text' reads plain text",
        ),
        (
            "wide.jsonl",
            "chat",
            "wide.jsonl as chat: not UTF-8; it is UTF-16; save it as UTF-8",
        ),
        ("wide.csv", "chat", "it is UTF-16"),
        ("wide.txt", "text", "it is UTF-16"),
        ("latin.txt", "text", "save it as UTF-8, or check"),
    ):
        with pytest.raises(WeftError, match=said):
            check_sources(Data(sources=(source(tmp_path / name, kind),)))


def test_a_path_is_read_by_its_own_form(tmp_path: Path) -> None:
    """A recipe of docstrings, or of the standard library, is given the user's path and nothing else."""
    data = load_recipe("quickstart", ["data.path=talks.jsonl", "data.kind=chat"]).data
    assert (
        data.sources == (Source(kind="chat", path="talks.jsonl"),)
        and data.tokenizer == "train:1024"
    )
    assert (
        load_recipe("finetune", ["data.path=talks.jsonl"]).data.sources[0].path
        == "talks.jsonl"
    )
    file = jsonl(tmp_path / "talks.jsonl", [TALK])
    assert words(source(file, form="docstrings")) == [["q", "a"]]
    assert words(source(tmp_path, form="docstrings")) == [["q", "a"]]
    jsonl(file, [PAIR])
    assert len([*read_samples(source(file, "preference", form="docstrings"))]) == 1
    (tmp_path / "code.py").write_text(
        'def cut():\n    """Cut it into five equal parts."""\n'
    )
    assert words(source(tmp_path / "code.py")) == [
        ["What does the Python function code.cut do?", "Cut it into five equal parts."]
    ]
    assert len([*read_samples(source(tmp_path, "preference", form="docstrings"))]) == 1


def test_archives_in_a_folder_are_no_plain_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for name in ("b.tar", "c.tar.gz", "d.tgz"):
        (tmp_path / name).write_bytes(b"a.txt\0text")
    chosen = select_files(Source(kind="text", path=str(tmp_path)))
    assert [file.name for file in chosen.read] == ["a.txt"] and len(chosen.left) == 3
