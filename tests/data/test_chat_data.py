"""Conversations from files to rows: forms, bad lines, packing, truncation."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import chats
from tests.conftest import Command
from weft.data.batch import IGNORE, Batch
from weft.data.chat.chat_template import ChatTemplate
from weft.data.chat.chat_turns import ConversationError
from weft.data.chat.conversation import conversation
from weft.data.chat.encode import ChatEncoder
from weft.data.chat.forms import read_record
from weft.data.chat.preview import preview_samples
from weft.data.chat.source import open_chats
from weft.data.loader import Loader, open_data
from weft.data.order import Order, Stream, pack_documents
from weft.data.tokenizer import load_tokenizer
from weft.errors import UsageError, WeftError
from weft.layout.layout import Layout
from weft.layout.sequence import padded_length
from weft.recipe import Chat, Data, Source, build_recipe
from weft.train.setup import prepare

USER, ASSISTANT = (
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
)
CALL = {"id": "c1", "function": {"name": "f", "arguments": {"x": 1}}}
ADP = {
    "id": "t1",
    "content": [
        {"class_": "text_observation", "content": "sum?", "source": "user"},
        {"class_": "message_action", "content": "I add."},
        {"class_": "api_action", "function": "add", "kwargs": {"a": 1}, "tool_call_id": "c1", "description": "adding"},
        {"class_": "text_observation", "content": "2", "source": "environment", "tool_call_id": "c1"},
        {"class_": "code_action", "language": "python", "content": "1+1", "tool_call_id": "c2"},
        {"class_": "web_observation", "html": "<p>", "axtree": None, "url": "u", "image_observation": None,
         "viewport_size": None, "tool_call_id": "c2"},
        {"class_": "message_action", "content": "It is 2.", "reasoning_content": "sure"},
    ],
}  # fmt: skip
ATIF = {
    "schema_version": "ATIF-v1.7",
    "session_id": "s",
    "agent": {"name": "x", "version": "1", "tool_definitions": [{"type": "function", "function": {"name": "add"}}]},
    "steps": [
        {"step_id": 1, "source": "system", "message": "Be brief."},
        {"step_id": 2, "source": "user", "message": [{"type": "text", "text": "sum?"}]},
        {"step_id": 3, "source": "agent", "message": "", "reasoning_content": "hm",
         "tool_calls": [{"tool_call_id": "c1", "function_name": "add", "arguments": {"a": 1}}],
         "observation": {"results": [{"source_call_id": "c1", "content": "2"}]}, "metrics": {"prompt_tokens": 3}},
        {"step_id": 4, "source": "agent", "message": "2"},
    ],
}  # fmt: skip


def said(record: dict[str, Any], **more: Any) -> list[tuple[str, Any]]:
    """Role and words of each message that a record becomes."""
    found = read_record(record, **more).messages
    return [(m["role"], m["content"]) for m in found]


def test_forms_become_messages() -> None:
    pair = [("user", "q"), ("assistant", "a")]
    assert said({"messages": [USER, ASSISTANT]}) == pair
    assert said({"chosen": [USER, ASSISTANT]}, field="chosen") == pair
    assert said({"prompt": "q", "completion": "a"}) == pair
    assert said({"instruction": "", "input": "q", "output": "a"}) == pair
    asked = [USER, ASSISTANT, USER]
    half = read_record({"prompt": asked, "completion": [ASSISTANT]})
    assert half.learned("assistant") == (0, 0, 0, 1)
    assert said({"instruction": "q", "input": "x", "output": "a", "history": [["h", "i"]], "system": "s"}) == [
        ("system", "s"), ("user", "h"), ("assistant", "i"), ("user", "q\nx"), ("assistant", "a"),
    ]  # fmt: skip
    share = [{"from": "human", "value": "q"}, {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
             {"from": "observation", "value": "1"}, {"from": "gpt", "value": "a"}]  # fmt: skip
    tools = '[{"type": "function", "function": {"name": "f"}}]'
    talk = read_record(
        {"conversations": share, "system": "s", "tools": tools, "weight": 2}
    )
    assert [m["role"] for m in talk.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert talk.tools == ({"type": "function", "function": {"name": "f"}},)
    assert talk.learned("assistant") == (0, 0, 2, 0, 2)
    weighted = read_record(
        {
            "messages": [
                USER,
                ASSISTANT | {"weight": 0},
                USER,
                ASSISTANT | {"weight": 0.5},
            ]
        }
    )
    assert (
        weighted.learned("assistant") == (0, 0, 0, 0.5)
        and "weight" not in weighted.messages[1]
    )


def test_trajectories_of_agents_keep_every_action() -> None:
    adp = read_record(ADP)
    assert [m["role"] for m in adp.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert (
        adp.messages[1]["content"] == "I add.\nadding"
        and adp.messages[5]["reasoning_content"] == "sure"
    )
    calls = [call for m in adp.messages for call in m.get("tool_calls", ())]
    assert [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls] == [
        ("c1", "add", {"a": 1}), ("c2", "python", {"code": "1+1"}),
    ]  # fmt: skip
    assert (
        adp.messages[4]["content"] == "u\n<p>"
        and adp.messages[2]["tool_call_id"] == "c1"
    )
    atif = read_record(ATIF)
    assert [m["role"] for m in atif.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert atif.messages[2]["reasoning_content"] == "hm" and atif.tools is not None
    again = [*ATIF["steps"][:3], ATIF["steps"][3] | {"is_copied_context": True}]  # type: ignore[index]
    assert read_record(ATIF | {"steps": again}).learned("assistant") == (0, 0, 1, 0, 0)
    turned = ADP["content"]
    assert isinstance(turned, list)
    for change, where in (
        ([*turned[:3], turned[2]], "content[3]"),
        (turned[:3], "content[2]"),
        ([turned[0], turned[3]], "content[1]"),
        ([*turned, turned[3]], "content[7]"),
        ([turned[0] | {"class_": "guess_action"}], "content[0]"),
        ([*turned, {"class_": "api_action", "function": "f"}], "content[7]"),
    ):
        with pytest.raises(ConversationError) as error:
            read_record(ADP | {"content": change})
        assert where in str(error.value) and "\n" not in str(error.value)


#: Records with one mistake each, and a word of what is said about it.
MISTAKES: list[tuple[Any, str]] = [
    ([], "object"),
    ("text", "object"),
    (None, "object"),
    (3, "object"),
    ({}, "forms"),
    ({"text": "plain"}, "forms"),
    ({"messages": []}, "list of messages"),
    ({"messages": "q"}, "list of messages"),
    ({"messages": [USER]}, "no turn of the assistant"),
    ({"messages": [USER, "a"]}, "message 2"),
    ({"messages": [USER, {"content": "a"}]}, "no 'role'"),
    ({"messages": [USER, {"role": "asistant", "content": "a"}]}, "did you mean 'assistant'"),
    ({"messages": [USER, {"role": "assistant"}]}, "empty"),
    ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, "empty"),
    ({"messages": [{"role": "user"}, ASSISTANT]}, "message 1"),
    ({"messages": [USER, {"role": "assistant", "content": 7}]}, "words are a text"),
    ({"messages": [USER, {"role": "assistant", "content": [{"type": "image"}]}]}, "part"),
    ({"messages": [USER, ASSISTANT | {"weight": -1}]}, "weight"),
    ({"messages": [USER, ASSISTANT | {"weight": "big"}]}, "weight"),
    ({"messages": [USER, ASSISTANT | {"train": 2}]}, "train"),
    ({"messages": [USER, ASSISTANT], "weight": float("nan")}, "weight"),
    ({"messages": [USER, ASSISTANT], "tools": "[{"}, "tools"),
    ({"messages": [USER, ASSISTANT], "tools": [1]}, "tools"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": []}]}, "empty"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": 7}]}, "list of calls"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "names no function"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}, "arguments"),
    ({"messages": [USER | {"tool_calls": [CALL]}, ASSISTANT]}, "only the assistant"),
    ({"messages": [USER, ASSISTANT, {"role": "tool", "content": "1", "tool_call_id": "c9"}]}, "nobody made"),
    ({"prompt": 1, "completion": "a"}, "prompt"),
    ({"conversations": {}}, "list of turns"),
    ({"conversations": [{"from": "human"}]}, "turn 1"),
    ({"conversations": [{"from": "alien", "value": "x"}]}, "unknown"),
    ({"conversations": [{"from": "function_call", "value": "{"}]}, "not JSON"),
    ({"instruction": 1, "output": "a"}, "texts"),
    ({"instruction": "q", "output": ""}, "empty"),
    ({"instruction": "q", "output": "a", "history": [1]}, "history"),
    (ADP | {"content": [*ADP["content"][:2], {"class_": "image_observation"}]}, "image"),  # type: ignore[index]
    (ATIF | {"schema_version": "ATIF-v9"}, "schema_version"),
    (ATIF | {"steps": []}, "steps"),
    (ATIF | {"steps": [{"step_id": 2, "source": "user", "message": "x"}]}, "count from 1"),
    (ATIF | {"steps": [{"step_id": 1, "source": "agent", "message": "x",
                        "observation": {"results": [{"source_call_id": "c7", "content": "2"}]}}]}, "does not make"),
]  # fmt: skip
BROKEN = [
    b'{"messages": [',
    b"{]",
    b"\xff\xfe{}",
    b'{"messages": ' + b"[" * 3000,
    b'"\\ud800',
    b"nul",
    b"{'a': 1}",
]
NESTED = json.dumps(
    {"messages": [USER, ASSISTANT], "tools": [{"a": json.loads("[" * 400 + "]" * 400)}]}
).encode()


def bad_lines() -> list[tuple[bytes, str]]:
    """A thousand lines of which none holds a conversation: the mistakes above, and these cut and changed at random."""
    rng = random.Random(7)
    lines = [(json.dumps(record).encode(), word) for record, word in MISTAKES]
    lines += [(line, "JSON") for line in BROKEN]
    good = json.dumps({"messages": [USER, ASSISTANT]}).encode()
    while len(lines) < 1000:
        base, word = rng.choice(lines[: len(MISTAKES)])
        if rng.random() < 0.5:
            lines.append((good[: rng.randrange(1, len(good) - 1)], "JSON"))
        else:  # the same mistake among things that do not matter
            record = json.loads(base)
            if isinstance(record, dict) and record and "id" not in record:
                record = {
                    f"note{rng.randrange(99)}": rng.choice(["é🙂", None, 1.5, [{}]])
                } | record
                lines.append(
                    (json.dumps(record, ensure_ascii=rng.random() < 0.5).encode(), word)
                )
    return lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    chats.save_tokenizer(folder / "tokenizer", chats.TEMPLATES["smollm2"])
    return folder


@pytest.mark.parametrize(
    "count", [len(MISTAKES) + len(BROKEN), pytest.param(1000, marks=pytest.mark.soak)]
)
def test_bad_lines_are_each_named_by_file_and_line(tmp_path: Path, count: int) -> None:
    tokenizer = replace(
        load_tokenizer("bytes"),
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    good = json.dumps({"messages": [USER, ASSISTANT]}).encode()
    lines = bad_lines()[:count]
    assert len(lines) == count
    for number, (line, word) in enumerate(lines):
        file = tmp_path / "chats.jsonl"
        at = number % 7
        file.write_bytes(b"\n".join([*[good] * at, line, good]))
        with pytest.raises(WeftError) as error:
            open_chats(
                Source(kind="chat", path=str(file)),
                Chat(),
                tokenizer,
                tmp_path / "cache",
            )
        told = str(error.value)
        assert (
            told.startswith(f"{file}:{at + 1}: ") and "\n" not in told and word in told
        ), (line, told)
    assert not list((tmp_path / "cache").iterdir())


def test_nesting_is_refused_or_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "deep.jsonl").write_bytes(NESTED)
    source = Source(kind="chat", path=str(tmp_path / "deep.jsonl"))
    with pytest.raises(WeftError, match=r"deep.jsonl:1: nested too deeply"):
        open_chats(
            source,
            Chat(),
            load_tokenizer(str(folder / "tokenizer")),
            tmp_path / "cache",
        )


def test_templates_that_refuse_a_line_name_it(folder: Path, tmp_path: Path) -> None:
    chats.save_tokenizer(tmp_path / "gemma", chats.TEMPLATES["gemma3"])
    tokenizer = load_tokenizer(str(tmp_path / "gemma"))
    file = tmp_path / "c.jsonl"
    file.write_text(
        "\n".join(
            json.dumps({"messages": m})
            for m in ([USER, ASSISTANT], [USER, USER, ASSISTANT])
        )
    )
    source = Source(kind="chat", path=str(file))
    with pytest.raises(
        WeftError,
        match=r"c.jsonl:2: the chat template refuses it: Conversation roles must alternate",
    ):
        open_chats(source, Chat(), tokenizer, tmp_path / "cache")
    with pytest.raises(
        WeftError,
        match=r"c.jsonl:1: the chat template writes '<\|im_start\|>', which the tokenizer l",
    ):
        open_chats(source, Chat(template=chats.SMOLLM2), tokenizer, tmp_path / "cache")
    with pytest.raises(WeftError, match=r"no chat template; set data\.chat\.template"):
        open_chats(source, Chat(), load_tokenizer("bytes"), tmp_path / "cache")
    with pytest.raises(
        WeftError, match=r"data.chat.template: cannot read .*none.jinja"
    ):
        open_chats(
            source,
            Chat(template=str(tmp_path / "none.jinja")),
            tokenizer,
            tmp_path / "cache",
        )


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(0, 20))
def test_packing_holds_every_document_once_and_whole(
    sizes: list[int], more: int
) -> None:
    lengths, capacity = np.array(sizes), max(sizes) + more
    order, counts = pack_documents(lengths, capacity)
    assert sorted(order.tolist()) == list(range(len(sizes))) and counts[-1] == len(
        sizes
    )
    fills = [
        int(lengths[order[lo:hi]].sum())
        for lo, hi in zip([0, *counts[:-1]], counts, strict=True)
    ]
    assert all(0 < fill <= capacity for fill in fills)
    # the longest of each row, which had room in no row before it
    firsts = lengths[order[[0, *counts[:-1]]]].tolist()
    assert all(
        fill + first > capacity
        for i, fill in enumerate(fills)
        for first in firsts[i + 1 :]
    )


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sets(st.integers(1, 23)), min_size=1, max_size=20))
def test_packing_needs_few_more_rows_than_the_fewest(cuts: list[set[int]]) -> None:
    """Documents are made by cutting full rows, so that the fewest rows are known."""
    ends = [[0, *sorted(at), 24] for at in cuts]
    lengths = np.concatenate([np.diff(row) for row in ends])
    assert len(cuts) <= len(pack_documents(lengths, 24)[1]) <= 11 / 9 * len(cuts) + 1


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=1, max_size=12), min_size=1, max_size=25),
    st.integers(12, 30), st.sampled_from(["documents", "one"]), st.integers(0, 3),
)  # fmt: skip
def test_rows_hold_whole_conversations_with_their_weights(
    docs: list[list[float]], n: int, kind: Any, epoch: int
) -> None:
    lengths = np.array([len(doc) for doc in docs])
    starts = np.cumsum(lengths) - lengths
    weights = np.array([w for doc in docs for w in doc], np.float32)
    stream = Stream(
        np.arange(len(weights)), starts, lengths, n, 1, kind, weights, alike=False
    )
    rows = [stream.row(epoch * stream.rows + i) for i in range(stream.rows)]
    assert kind == "documents" or len(rows) == len(docs)
    seen: list[int] = []
    for row in rows:
        assert len(row.tokens) <= n and row.weights is not None
        for lo, hi in zip(row.starts, [*row.starts[1:], len(row.tokens)], strict=True):
            document = int(np.searchsorted(starts, row.tokens[lo], side="right")) - 1
            seen.append(document)
            first, size = int(starts[document]), int(lengths[document])
            assert row.tokens[lo:hi].tolist() == list(range(first, first + size))
            wanted = [
                w if i < size else 0.0
                for i, w in enumerate([*docs[document][1:], 0.0], 1)
            ]
            assert row.weights[lo:hi].tolist() == wanted
            assert row.labels[lo:hi].tolist() == [
                first + i if w else IGNORE for i, w in enumerate(wanted, 1)
            ]
    assert sorted(seen) == list(range(len(docs)))
    order = Order((stream,), (1.0,), 0, epochs=1)
    sums = []
    for layout in (Layout(), Layout(dp=2), Layout(dp=3, cp=2)):
        ranks = layout.size("dp")
        loaders = [
            Loader(order, layout, r, c, 6, -(-6 // ranks), 1, n)
            for r in range(ranks)
            for c in range(layout.cp)
        ]
        batches = [batch for loader in loaders for batch in loader.step(0) or []]
        sums.append(
            (sum(b.label_weight for b in batches), sum(b.real_tokens for b in batches))
        )
        joined = [
            batch
            for loader in loaders
            for batch in replace(loader, joined=True).step(0) or []
        ]
        per_rank = -(-6 // ranks)
        sizes = [
            order.row_length(i) if i < (order.total or 0) else 0
            for i in range(ranks * per_rank)
        ]
        longest = max(
            sum(sizes[r * per_rank : (r + 1) * per_rank]) for r in range(ranks)
        )
        assert {b.tokens.shape for b in joined} == {
            (1, padded_length(longest, layout) // layout.cp)
        }
        assert real(joined) == real(batches)
    assert sums[0] == sums[1] == sums[2]


def real(batches: list[Batch]) -> list[tuple[float, ...]]:
    """What batches have of documents, token by token: the token, its label, weight and position."""
    found = []
    for b in batches:
        assert b.documents is not None
        weights = torch.ones(b.tokens.shape) if b.weights is None else b.weights
        columns = torch.stack([b.tokens, b.labels, b.positions, weights], -1)
        found += [tuple(row) for row in columns[b.documents >= 0].tolist()]
    return sorted(found)


def data(folder: Path, records: list[Any], **more: Any) -> Data:
    path = folder / "talks.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    tree = {
        "kind": "chat",
        "path": str(path),
        "tokenizer": str(folder / "tokenizer"),
        "cache": str(folder / "cache"),
    }
    return build_recipe({"data": tree | {"seq_len": 128, "epochs": 1} | more}).data


def test_a_conversation_is_never_in_both_halves_nor_cut(folder: Path) -> None:
    opened = open_data(
        data(
            folder,
            [{"messages": chats.turns("q", f"answer {i}")} for i in range(40)],
            validation=0.3,
        )
    )
    assert "40 conversations" in opened.description and opened.validation is not None
    texts = []
    for side in (opened.train, opened.validation):
        rows = [side.row(i) for i in range(side.total or 0)]
        assert len(rows) < sum(len(row.starts) for row in rows)  # several in a row
        texts.append("".join(opened.tokenizer.decode(row.tokens) for row in rows))
    for i in range(40):
        assert sum(text.count(f"answer {i}\n") for text in texts) == 1
    labels = np.concatenate(
        [
            row.labels[row.labels != IGNORE]
            for row in [opened.train.row(i) for i in range(3)]
        ]
    )
    assert "user" not in opened.tokenizer.decode(
        labels
    ) and "answer" in opened.tokenizer.decode(labels)


def test_truncation_is_as_asked_and_said(folder: Path) -> None:
    talks = [
        {"messages": chats.turns("q", "short")},
        {"messages": chats.turns("q", "begin " + "x" * 200 + " end")},
    ]
    size = 60

    def words(**more: Any) -> str:
        opened = open_data(data(folder, talks, seq_len=size, validation=0, chat=more))
        assert ("1 cut to 60" in opened.description) == (more["truncation"] != "drop")
        rows = [opened.train.row(i) for i in range(opened.train.total or 0)]
        assert all(len(row.tokens) <= size for row in rows)
        return "".join(opened.tokenizer.decode(row.tokens) for row in rows)

    assert "begin" in words(truncation="keep_start") and " end" not in words(
        truncation="keep_start"
    )
    assert "begin" not in words(truncation="keep_end") and " end" in words(
        truncation="keep_end"
    )
    assert "short" in words(truncation="drop") and "begin" not in words(
        truncation="drop"
    )
    with pytest.raises(
        WeftError, match=r"talks.jsonl:2: \d+ tokens are more than data.seq_len = 60"
    ):
        words(truncation="error")
    long = [talks[0], {"messages": chats.turns("q" * 300, "lost")}]
    with pytest.raises(
        WeftError, match=r"talks.jsonl:2: nothing that is learned is left of it"
    ):
        open_data(data(folder, long, seq_len=size))
    assert (
        "1 left out"
        in open_data(
            data(folder, long, seq_len=size, chat={"truncation": "drop"})
        ).description
    )
    with pytest.raises(WeftError, match="no conversation has anything to learn"):
        open_data(data(folder, talks[1:], seq_len=size, chat={"truncation": "drop"}))


@pytest.mark.parametrize("learn", ["assistant", "last", ["tool"]])
def test_conversations_of_which_nothing_is_learned_are_left_out(
    folder: Path, learn: Any
) -> None:
    """By a mask of each turn, as OpenAI's weights, or since nobody in it has a role that is learned."""
    tool = [{"role": "tool", "content": "t"}] if learn == ["tool"] else []
    (question, answer) = chats.turns("q", "yes")
    hidden = [question, answer | {"weight": 0}]
    talks = [{"messages": hidden}, {"messages": [question, *tool, answer]}]
    opened = open_data(data(folder, talks, validation=0, chat={"learn": learn}))
    assert "1 left out" in opened.description
    with pytest.raises(WeftError, match="no conversation has anything to learn"):
        open_data(data(folder, talks[:1], validation=0, chat={"learn": learn}))


def test_what_changes_the_data_changes_its_fingerprint(folder: Path) -> None:
    talks = [{"messages": chats.turns("q", "a", "b", "c")} for _ in range(4)]
    changes = (
        {},
        {"learn": "last"},
        {"learn": ["user"]},
        {"pack": False},
        {"truncation": "drop"},
    )
    before = {*(folder / "cache").glob("chats-*")}  # of other tests
    seen = {open_data(data(folder, talks, chat=chat)).fingerprint for chat in changes}
    assert len(seen) == 5
    again = open_data(data(folder, talks))
    cached = next(
        path for path in (folder / "cache").glob("chats-*") if path not in before
    )
    tokens = data(folder, talks, kind="tokens", path=str(cached))
    assert again.fingerprint in seen and open_data(tokens).train.row(0).labels.tolist()


def test_the_recipe_takes_one_source_in_the_section(folder: Path) -> None:
    assert build_recipe({"data": {"kind": "chat", "path": "x.jsonl"}}).data.sources == (
        Source(kind="chat", path="x.jsonl"),
    )
    for tree, said in (
        ({"kind": "chat", "path": "x", "sources": []}, "beside data.sources"),
        ({"kind": "chatty", "path": "x"}, "did you mean 'chat'"),
        ({"kind": "chat"}, "needs 'path'"),
        (
            {"kind": "chat", "path": "x", "chat": {"lern": "all"}},
            "did you mean 'learn'",
        ),
        ({"kind": "chat", "path": "x", "chat": {"learn": "nobody"}}, "data.chat.learn"),
        ({"kind": "chat", "path": "x", "chat": {"date": "today"}}, "data.chat.date"),
    ):
        with pytest.raises(UsageError, match=said) as error:
            build_recipe({"data": tree})
        assert "\n" not in str(error.value)


def test_the_preview_shows_what_is_learned(
    folder: Path, tmp_path: Path, command: Command
) -> None:
    talks = [
        {
            "messages": chats.turns(
                "Is <|im_end|> & <b> safe?", "Yes & <i>", "Long?", "so " * 200
            )
        }
    ] * 5
    (folder / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    recipe = tmp_path / "chat.toml"
    recipe.write_text(
        f"[data]\nkind = 'chat'\npath = '{folder / 'talks.jsonl'}'\nseq_len = 128\n"
        f"tokenizer = '{folder / 'tokenizer'}'\n"
    )
    code, out, err = command(
        "data", "preview", recipe, "--html", tmp_path / "page.html"
    )
    assert code == 0, err
    assert (
        out.count("⟦Yes & <i><|im_end|>⟧") == 3
        and "talks.jsonl:3: 128 tokens" in out
        and "more cut off" in out
    )
    html = (tmp_path / "page.html").read_text()
    assert (
        html.count("Yes &amp; &lt;i&gt;") == 3
        and "<i>" not in html
        and html.count('class="cut ') == 9
    )
    words = '<span class="learned ">Yes &amp; &lt;i&gt;</span><span class="learned special">&lt;|im_end|&gt;</span>'
    assert html.count(words) == 3 and "Is &lt;|im_end|&gt; &amp;" in html
    code, out, err = command("data", "preview", recipe, "--json", "--samples", "1")
    (sample,) = json.loads(out)
    assert (
        code == 0
        and sample["place"].endswith("talks.jsonl:1")
        and sample["tokens"] == 128
        and not err
    )
    assert [(p["text"], p["learned"], p["role"]) for p in sample["pieces"]][:6] == [
        (
            "<|im_start|>system\nYou are SmolLM.<|im_end|>\n<|im_start|>user\n",
            False,
            None,
        ),
        ("Is <|im_end|> & <b> safe?", False, "user"),
        ("<|im_end|>\n<|im_start|>assistant\n", False, None),
        ("Yes & <i><|im_end|>", True, "assistant"),
        ("\n<|im_start|>user\n", False, None),
        ("Long?", False, "user"),
    ]
    assert sample["pieces"][-1]["cut"]
    assert command("data", "preview", "quickstart")[0] == 2
    (folder / "talks.jsonl").write_text('{"messages": [1]}')
    code, _, err = command("data", "preview", recipe)
    assert code == 1 and "talks.jsonl:1: message 1 is 1" in err and err.count("\n") == 1
    (folder / "talks.jsonl").write_text("")
    code, _, err = command("data", "preview", recipe)
    assert (code, err) == (
        1,
        f"weft: error: {folder / 'talks.jsonl'}: there is no conversation in it\n",
    )
    (folder / "talks.jsonl").write_text('{"messages": [1]}')
    skips = tmp_path / "skips.toml"
    skips.write_text(recipe.read_text() + "on_error = 'skip'\n")
    code, _, err = command("data", "preview", skips)
    assert code == 1 and err.count("\n") == 1, err
    assert "no conversation in it; " in err and "message 1 is 1" in err, err
    # the model whose template writes them is named as for weft train
    code, _, err = command("data", "preview", recipe, "--from", tmp_path / "none")
    assert code == 1 and str(tmp_path / "none") in err


def test_what_templates_leave_out_is_said_at_every_start(
    folder: Path, tmp_path: Path
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}\n{% elif m.role == 'assistant' %}"
        "A: {{ m.content }}\n{% endif %}{% endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "sky"}}]
    talks = [
        {"messages": chats.turns("q", "a", system="s")},
        {"messages": chats.turns("q", "a"), "tools": tools},
    ] * 3
    settings = data(folder, talks, chat={"template": template}, cache=str(tmp_path))
    # the second one reads the cache
    first, again = open_data(settings), open_data(settings)
    assert first.notes == again.notes and len(first.notes) == 3
    for note, said in zip(
        first.notes,
        ("its tools (3 records)", "no system turn (3 records)", "no learned"),
        strict=True,
    ):
        assert said in note and note.startswith(
            f"data source {settings.sources[0].path}: "
        )
    tree = {
        "data": settings.model_dump(mode="json", exclude_defaults=True),
        "model": {"layers": 1},
    }
    # which a run prints
    assert set(first.notes) <= set(prepare(build_recipe(tree)).notes)
    assert not open_data(
        data(folder, [{"messages": chats.turns("q", "a", system="s")}])
    ).notes


def reasoned(*answers: tuple[str, str]) -> list[dict[str, str]]:
    """A conversation of questions and their answers, each with reasoning before it (none if that is empty)."""
    talk = []
    for number, (reasoning, answer) in enumerate(answers):
        talk.append({"role": "user", "content": f"q{number}"})
        talk.append(
            {"role": "assistant", "content": answer}
            | ({"reasoning_content": reasoning} if reasoning else {})
        )
    return talk


def test_reasoning_of_earlier_turns_is_learned_in_samples_of_their_own(
    tmp_path: Path,
) -> None:
    chats.save_tokenizer(tmp_path / "tokenizer", chats.TEMPLATES["qwen3"])
    talks = [
        reasoned(("why", "one"), ("", "two"), ("so", "three")),
        reasoned(("", "four"), ("hm", "five")),
    ]

    def read(**more: Any) -> tuple[list[str], list[list[str]], list[str]]:
        settings = data(tmp_path, [{"messages": talk} for talk in talks], chat=more)
        shown, notes = preview_samples(
            settings, load_tokenizer(str(tmp_path / "tokenizer")), 10
        )
        pieces = [
            [p["text"] for p in sample.as_json()["pieces"] if p["learned"]]
            for sample in shown
        ]
        return [sample.place.rpartition(":")[2] for sample in shown], pieces, notes

    places, pieces, notes = read()
    assert places == ["1", "2"] and "why" not in str(pieces) and len(notes) == 1
    assert "leaves out reasoning of the assistant's turns (1 record)" in notes[0]
    places, pieces, notes = read(reasoning="split")
    assert places == ["1", "1", "2"] and not notes
    assert pieces == [
        ["<think>\nwhy\n</think>\n\none<|im_end|>"],
        ["two<|im_end|>", "<think>\nso\n</think>\n\nthree<|im_end|>"],
        ["four<|im_end|>", "<think>\nhm\n</think>\n\nfive<|im_end|>"],
    ]
    inside = [m | {"content": f"<think>{m.pop('reasoning_content')}</think>{m['content']}"} if len(m) > 2 else m
              for talk in talks for m in talk]  # fmt: skip
    talks = [inside[:6], inside[6:]]  # reasoning within the content is the same
    assert "leaves out reasoning" in read()[2][0] and read(reasoning="split")[1:] == (
        pieces,
        [],
    )


@pytest.mark.parametrize("learn", ["assistant", "last", "all", ["assistant", "user"]])
@pytest.mark.parametrize("opens", ["", "<think>\n"], ids=["plain", "thinking"])
def test_reasoning_is_kept_in_one_sample(
    tmp_path: Path, learn: Any, opens: str
) -> None:
    """As by a template that never drops it: text, tokens and what is learned, with calls and masks. A prompt may open
    the reasoning, as that of Qwen3's thinking models.
    """
    family = chats.TEMPLATES["qwen3"]
    prompt = "{{- '<|im_start|>assistant\n"
    assert family.template.count(prompt) == 1
    family = family._replace(template=family.template.replace(prompt, prompt + opens))
    tokenizer = load_tokenizer(str(chats.save_tokenizer(tmp_path / "t", family)))
    keeps = family.template.replace("loop.index0 > ns.last and (", "true and (")
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
    calling = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "look <|im_end|>",
    }
    calling["tool_calls"] = [call]
    tool = {"role": "tool", "content": "x"}
    talks = [
        reasoned(("why", "one"), ("", "two"), ("so", "three")),
        reasoned(("", "four"), ("hm", "five")),
        [*reasoned(("why", "one"))[:1], calling, tool, *reasoned(("a", "b"), ("c", "d"))[1:]],
        [m | {"loss": i != 1} for i, m in enumerate(reasoned(("a", "b"), ("c", "d")))],
        reasoned(("", "one"), ("", "two")),
    ]  # fmt: skip
    talks += [[{"role": "system", "content": "s"}, *talk] for talk in talks]
    keeping_all = ChatEncoder(ChatTemplate(keeps, tokenizer), learn)
    in_one = ChatEncoder(ChatTemplate(family.template, tokenizer), learn, "keep")
    for messages in talks:
        talk = conversation(messages)
        kept, wanted = in_one.encode(talk), keeping_all.encode(talk)
        assert kept.text == wanted.text
        for one, other in zip(kept[1:5], wanted[1:5], strict=True):
            assert one.tolist() == other.tolist()
        assert kept.facts == wanted.facts and not kept.facts.left_out
    keeping = data(tmp_path, [{"messages": talks[0]}], chat={"reasoning": "keep"})
    ((sample,), _) = preview_samples(keeping, tokenizer, 10)
    roles = {p["role"] for p in sample.as_json()["pieces"] if "why" in p["text"]}
    assert roles == {"assistant"}


@pytest.mark.parametrize("calling", [True, False])
def test_reasoning_that_some_turns_of_an_answer_show_is_learned(
    tmp_path: Path, calling: bool
) -> None:
    """As with Gemma 4, which writes that of turns which call tools, and gpt-oss, which writes that of the last turn."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
    asks = {"role": "assistant", "reasoning_content": "look", "tool_calls": [call]}
    question, answer, *rest = reasoned(("so", "one"), ("", "two"))
    talk = [question, asks, {"role": "tool", "content": "x"}, answer, *rest]
    shows = "m.tool_calls" if calling else "not m.tool_calls"
    template = (
        "{% set last = messages | selectattr('role', 'equalto', 'user') | list | last %}"
        "{% set ns = namespace(late=false) %}"
        "{% for m in messages %}{% if m == last %}{% set ns.late = true %}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' }}"
        f"{{% if m.reasoning_content and ns.late and {shows} %}}"
        "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content or '' }}"
        "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    family = chats.TEMPLATES["qwen3"]._replace(template=template)
    tokenizer = load_tokenizer(str(chats.save_tokenizer(tmp_path, family)))
    called = '{"name": "f", "arguments": {"a": "b"}}<|im_end|>'
    first, last = f"{'<think>look</think>' * calling}{called}", "one<|im_end|>"
    last = last if calling else f"<think>so</think>{last}"
    for reasoning in ("split", "keep"):
        encoder = ChatEncoder(ChatTemplate(template, tokenizer), reasoning=reasoning)
        samples = [encoder.encode(s) for s in encoder.samples(conversation(talk))]
        assert len(samples) == (2 if reasoning == "split" else 1)
        learned = [each.text[s.start : s.end] for each in samples for s in each.spans]
        assert learned == [first, last, "two<|im_end|>"]
        assert all(each.facts.left_out for each in samples[:1])


def test_reasoning_that_no_turn_shows_stays_left_out(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        str(chats.save_tokenizer(tmp_path, chats.TEMPLATES["qwen2.5"]))
    )
    encoder = ChatEncoder(ChatTemplate(chats.QWEN25, tokenizer), reasoning="keep")
    encoded = encoder.encode(conversation(reasoned(("why", "one"), ("so", "two"))))
    assert "why" not in encoded.text and encoded.weights.any()
    assert encoded.facts.left_out == {"leaves out reasoning of the assistant's turns"}


@pytest.mark.parametrize("form", ["messages", "prompt", "pair", "feedback"])
def test_variables_of_a_record_are_its_templates(form: str, tmp_path: Path) -> None:
    """In every render of it, as TRL has them: they overrule the recipe's, and other records do not see them."""
    words = "{{ '<' + (style or 'plain') + '>' + m.role + ': ' + m.content }}\n"
    template = (
        f"{{% for m in messages %}}{words}{{% endfor %}}"
        "{% if add_generation_prompt %}{{ '<' + (style or 'plain') + '>assistant: ' }}{% endif %}"
    )
    asked, said = chats.turns("u", "a")
    record: dict[str, Any] = {
        "messages": {"messages": [asked, said]},
        "prompt": {"prompt": "u", "completion": "a"},
        "pair": {"prompt": "u", "chosen": "a", "rejected": "b"},
        "feedback": {"prompt": "u", "completion": "a", "label": True},
    }[form]
    records = [record | {"chat_template_kwargs": {"style": "odd", "x": None}}, record]
    records += [
        record | {"chat_template_kwargs": json.dumps({"style": "as text", "mood": 1})},
        record | {"chat_template_kwargs": "null"},
    ]
    if form == "feedback":
        records[1] = records[1] | {"completion": "b", "label": False}
    kind = {"pair": "preference", "feedback": "feedback"}.get(form, "chat")
    chat = {"template": template, "variables": {"style": "mine"}}
    settings = data(tmp_path, records, chat=chat)
    source = settings.sources[0].model_copy(update={"kind": kind})
    shown, notes = preview_samples(
        settings.model_copy(update={"sources": (source,)}), load_tokenizer("bytes"), 10
    )
    texts = ["".join(piece.text for piece in sample.pieces) for sample in shown]
    sizes = 2 if form == "pair" else 1
    styles = ("odd", "mine", "as text", "mine")
    for text, style in zip(texts[::sizes], styles, strict=True):
        assert text.startswith(f"<{style}>user: u\n<{style}>assistant: "), text
    unread = (
        "the chat template does not read 'mood' of 'chat_template_kwargs' (1 record)"
    )
    assert [note for note in notes if "chat_template_kwargs" in note] == [unread]


@pytest.mark.parametrize(("given", "said"), [
    ({"messages": []}, "have 'messages', which is no variable of the user's"), ([1], "an object with variables"),
    ("{", "an object with variables"),
])  # fmt: skip
def test_variables_of_a_record_that_are_none(given: Any, said: str) -> None:
    record = {"prompt": "u", "completion": "a", "chat_template_kwargs": given}
    with pytest.raises(ConversationError, match=said):
        read_record(record)


def test_samples_of_one_record_are_on_one_side(tmp_path: Path) -> None:
    chats.save_tokenizer(tmp_path / "tokenizer", chats.TEMPLATES["qwen3"])
    talks = [
        {"messages": reasoned((f"r{i}", f"x{i}."), (f"s{i}", f"y{i}."))}
        for i in range(20)
    ]
    opened = open_data(
        data(tmp_path, talks, chat={"reasoning": "split"}, validation=0.3)
    )
    assert "40 conversations" in opened.description and opened.validation is not None
    seen = []
    for side in (opened.train, opened.validation):
        rows = [side.row(i) for i in range(side.total or 0)]
        learned = "".join(
            opened.tokenizer.decode(row.labels[row.labels != IGNORE]) for row in rows
        )
        seen.append({i for i in range(20) if f"r{i}\n" in learned})
        assert seen[-1] == {i for i in range(20) if f"s{i}\n" in learned}
    assert seen[0] | seen[1] == {*range(20)} and not seen[0] & seen[1] and seen[1]
