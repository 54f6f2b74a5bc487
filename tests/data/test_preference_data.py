"""Pairs of answers: read in every form, kept together in rows, cut, and refused by line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.batch import IGNORE, Pairs
from weft.data.chat.chat_turns import ConversationError
from weft.data.chat.judged import pair_with_others, read_judgements
from weft.data.chat.pairs import AnswerPair, read_pair
from weft.data.loader import Corpus, open_data
from weft.data.order import Stream
from weft.errors import UsageError, WeftError
from weft.recipe import Data, build_recipe

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + eos_token }}{% endfor %}"
)
TEMPLATE += "{% if add_generation_prompt %}a:{% endif %}"
SAID = {"role": "user", "content": "why is it so?"}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def opened(folder: Path, rows: list[Any], **change: Any) -> Corpus:
    path = folder / "pairs.jsonl"
    path.write_text(
        "".join(
            (row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows
        )
    )
    chat = {"template": TEMPLATE} | {
        k: change.pop(k) for k in ("truncation", "pack") if k in change
    }
    data = {
        "kind": "preference",
        "path": str(path),
        "seq_len": 200,
        "validation": 0,
        "cache": str(folder),
        "chat": chat,
    }
    return open_data(Data.model_validate(data | change))


def texts(corpus: Corpus, row: int = 0) -> list[tuple[str, str]]:
    """Every document of a row, and what is learned of it."""
    found = corpus.train.row(row)
    documents = np.split(np.arange(len(found.tokens)), found.starts[1:])
    return [
        (
            corpus.tokenizer.decode(found.tokens[at].tolist()),
            corpus.tokenizer.decode(
                [label for label in found.labels[at].tolist() if label != IGNORE]
            ),
        )
        for at in documents
    ]


FORMS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "why is it so?", "chosen": "so", "rejected": "no"},
    "an input without an instruction": {
        "instruction": "",
        "input": "why is it so?",
        "chosen": "so",
        "rejected": "no",
    },
    "messages": {
        "prompt": [SAID],
        "chosen": [answer("so")],
        "rejected": [answer("no")],
    },
    "conversations": {"chosen": [SAID, answer("so")], "rejected": [SAID, answer("no")]},
    "with the question again": {
        "prompt": "why is it so?",
        "chosen": [SAID, answer("so")],
        "rejected": [SAID, answer("no")],
    },
    "answers to a text": {
        "prompt": "why is it so?",
        "chosen": [answer("so")],
        "rejected": [answer("no")],
    },
    "texts that begin alike": {
        "chosen": "why is it so? so",
        "rejected": "why is it so? no",
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_pair(tmp_path: Path, form: str) -> None:
    found = texts(opened(tmp_path, [FORMS[form]]))
    assert found == texts(opened(tmp_path, [FORMS["texts"]]))
    assert all(whole.startswith("u:why is it so?") for whole, _ in found)
    assert [learned[:2] for _, learned in found] == ["so", "no"]


def test_earlier_turns_are_not_learned_from() -> None:
    talk = [SAID, answer("that"), {"role": "user", "content": "really?"}]
    pair = read_pair(
        {
            "chosen": [*talk, answer("yes")],
            "rejected": [*talk, answer("no"), SAID, answer("so")],
        }
    )
    assert pair.chosen.learned("assistant") == (0, 0, 0, 1)
    assert pair.rejected.learned("assistant") == (0, 0, 0, 1, 0, 1)
    same = read_pair(
        {"chosen": [*talk, answer("yes")], "rejected": [*talk, answer("yes")]}
    )
    assert same.chosen.learned("assistant") == (0, 0, 0, 1)


BAD: dict[str, tuple[Any, str]] = {
    "broken JSON": ('{"prompt": "a", "chosen": ', "pairs.jsonl:3"),
    "no object": ([1], "expected a JSON object"),
    "no chosen": ({"prompt": "a", "rejected": "b"}, "no 'chosen'"),
    "no rejected": ({"prompt": "a", "chosen": "b", "rejected": None}, "no 'rejected'"),
    "unlike kinds": (
        {"prompt": "a", "chosen": "b", "rejected": [answer("c")]},
        "each a text, or each a list",
    ),
    "nothing in common": ({"chosen": "b", "rejected": "c"}, "do not begin alike"),
    "an odd prompt": (
        {"prompt": 7, "chosen": "b", "rejected": "c"},
        "'prompt' is a text or a list",
    ),
    "empty answer": (
        {"prompt": "a", "chosen": "", "rejected": "c"},
        "'chosen': message 2 (assistant) is empty",
    ),
    "no assistant": (
        {"prompt": [SAID], "chosen": [SAID], "rejected": [answer("c")]},
        "'chosen' has no turn of the",
    ),
    "unknown role": (
        {"prompt": [{"role": "usr", "content": "a"}], "chosen": "b", "rejected": "c"},
        "unknown role",
    ),
    "margin": (
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "wide"},
        "'margin' is 'wide'",
    ),
    "weight": (
        {"prompt": "a", "chosen": "b", "rejected": "c", "weight": -1},
        "'weight'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, name: str) -> None:
    row, reason = BAD[name]
    with pytest.raises(WeftError) as refused:
        opened(tmp_path, [FORMS["texts"], "", row])
    assert "pairs.jsonl:3" in str(refused.value) and reason in str(refused.value)
    assert "\n" not in str(refused.value) and not list(tmp_path.glob("chats-*"))


def test_what_is_alike_is_left_out_and_counted(tmp_path: Path) -> None:
    same = {"prompt": "a", "chosen": "b", "rejected": "b"}
    # alike once they are cut
    tail = {"prompt": "a", "chosen": "b" * 90 + "c", "rejected": "b" * 90 + "d"}
    corpus = opened(tmp_path, [same, FORMS["texts"], tail], seq_len=100)
    assert "1 pairs" in corpus.description and "2 left out" in corpus.description
    with pytest.raises(WeftError, match="no pair has two answers to compare"):
        opened(tmp_path, [same, tail], seq_len=100)


def test_an_answer_that_is_cut_off_whole_is_named(tmp_path: Path) -> None:
    long = {"prompt": "a" * 60, "chosen": "b", "rejected": "c"}
    with pytest.raises(
        WeftError,
        match=r"pairs.jsonl:2: nothing that is learned is left of it in 50 tokens",
    ):
        opened(tmp_path, [FORMS["texts"], long], seq_len=100)
    assert (
        "1 left out"
        in opened(
            tmp_path, [FORMS["texts"], long], seq_len=100, truncation="drop"
        ).description
    )
    with pytest.raises(
        WeftError,
        match=r"pairs.jsonl:2: \d+ tokens are more than half of data.seq_len = 100",
    ):
        opened(tmp_path, [FORMS["texts"], long], seq_len=100, truncation="error")


@given(
    sizes=st.lists(st.integers(1, 20), min_size=2, max_size=40),
    pack=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_pairs_stay_together_and_each_comes_once_an_epoch(
    sizes: list[int], pack: bool, seed: int
) -> None:
    lengths = np.array(sizes[: len(sizes) // 2 * 2])
    starts = np.cumsum(lengths) - lengths
    count = len(lengths) // 2
    pairs = Pairs.listed(np.arange(count) + 1.0, np.zeros(count))
    ids = np.arange(lengths.sum())
    stream = Stream(
        ids,
        starts,
        lengths,
        40,
        seed,
        "documents" if pack else "one",
        np.ones(len(ids), np.float32),
        True,
        pairs,
    )
    seen: list[int] = []
    for number in range(stream.rows):
        row = stream.row(number)
        assert (
            row.pairs is not None
            and len(row.starts) == 2 * len(row.pairs)
            and len(row.tokens) <= 40
        )
        for i, pair in enumerate(row.pairs.number):
            assert row.pairs.weight[i] == pair + 1
            for side in (0, 1):
                at = row.starts[2 * i + side]
                assert (row.tokens[at : at + lengths[2 * pair + side]] == starts[2 * pair + side] + np.arange(
                    lengths[2 * pair + side]
                )).all()  # fmt: skip
                assert row.labels[at + lengths[2 * pair + side] - 1] == IGNORE
        seen += row.pairs.number.tolist()
    assert sorted(seen) == list(range(count))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"loss": {"kind": "dpo", "beta": 0}}, "loss.beta"),
        ({"loss": {"kind": "dpo", "label_smoothing": 0.5}}, "loss.label_smoothing"),
        (
            {"loss": {"kind": "hinge", "label_smoothing": 0.1}},
            "label_smoothing does nothing",
        ),
        ({"loss": {"kind": "dpo", "margin": 1}}, "margin does nothing"),
        ({"loss": {"kind": "simpo", "reference": "x"}}, "loss.reference"),
        ({"loss": {"kind": "cross-entropy"}}, "set loss.kind = 'dpo'"),
        ({"data": {"kind": "chat", "path": "x"}}, "set data.kind = 'preference'"),
        (
            {"data": {"kind": "preference", "path": "x", "form": "alpaca"}},
            "leave out 'form'",
        ),
        ({"loss": {"kind": "reward"}, "generate": {}}, "leave out [generate]"),
        ({"model": {"output": "score"}}, "trained by loss.kind = 'reward'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    change: dict[str, Any], reason: str
) -> None:
    tree = {
        "loss": {"kind": "dpo"},
        "data": {"kind": "preference", "path": "x"},
    } | change
    with pytest.raises(UsageError, match=re.escape(reason)):
        build_recipe(tree)


# --- answers that are judged one by one ---


def judged(*records: dict[str, Any]) -> list[tuple[str, str, float]]:
    """Each sample's answer, the one beside it, and its sign."""
    answers = (
        (number, one)
        for number, record in enumerate(records)
        for one in read_judgements(record)
    )
    found = []
    for _, pair in pair_with_others(answers):
        assert isinstance(pair, AnswerPair), pair
        words = [side.messages[-1]["content"] for side in (pair.chosen, pair.rejected)]
        assert pair.chosen.messages[:-1] == pair.rejected.messages[:-1]
        found.append((*words, pair.margin))
    return found


def test_every_judged_answer_has_another_beside_it() -> None:
    rows = [
        {"prompt": f"q{i}", "completion": text, "label": i % 2 == 0}
        for i, text in enumerate("aabca")
    ]
    assert judged(*rows) == [
        ("a", "b", 1),
        ("a", "b", -1),
        ("b", "c", 1),
        ("c", "a", -1),
        ("a", "b", 1),
    ]


def test_forms_of_judged_answers() -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert judged(
        {"messages": turns, "label": "good"},
        {"prompt": turns[:1], "completion": turns[1:], "label": 0},
        {"prompt": "ask", "chosen": "left", "rejected": "right"},
        {
            "question": "ask",
            "answer": "last",
            "kto_tag": "false",
            "system": "Be brief.",
        },
    ) == [
        ("yes", "left", 1),
        ("yes", "left", -1),
        ("left", "right", 1),
        ("right", "last", -1),
        ("last", "yes", -1),
    ]
    for record in (
        {"instruction": "as", "input": "k", "output": "last"}, {"instruction": "as\nk", "response": "last"},
        {"conversations": [{"from": "human", "value": "as\nk"}, {"from": "gpt", "value": "last"}]},
        {"input": "as\nk", "completion": {"role": "assistant", "content": "last"}},
    ):  # fmt: skip
        (one,) = read_judgements(record | {"label": True})
        asked, answer = (
            turns[0].get("content", turns[0].get("value"))
            for turns in (one.prompt, one.answer)
        )
        assert (asked, answer, one.unread) == ("as\nk", "last", ())
    (one,) = read_judgements(
        {
            "question": "ask",
            "answer": "last",
            "label": True,
            "system": "Be brief.",
            "id": 3,
        }
    )
    assert one.prompt[0] == {
        "role": "system",
        "content": "Be brief.",
    } and one.unread == ("id",)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": "a", "completion": "b"}, "no 'label'"),
        (
            {"prompt": "a", "completion": "b", "label": "so so"},
            "true \\(good\\) or false \\(bad\\)",
        ),
        ({"completion": "b", "label": True}, "no field 'prompt'"),
        (
            {"messages": [{"role": "user", "content": "a"}], "label": True},
            "do not end with an answer",
        ),
        ("text", "expected a JSON object"),
    ],
)
def test_what_is_no_judged_answer_is_one_line(record: Any, said: str) -> None:
    with pytest.raises(ConversationError, match=said):
        read_judgements(record)


def test_answers_that_are_all_the_same_are_no_comparison() -> None:
    rows = [{"prompt": "a", "completion": "b", "label": True}] * 3
    answers = ((0, one) for row in rows for one in read_judgements(row))
    assert all(
        isinstance(pair, ConversationError) and "all answers" in str(pair)
        for _, pair in pair_with_others(answers)
    )
