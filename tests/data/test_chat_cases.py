"""Conversations that were answered wrong once (``cases/conversations.jsonl``), each with what is right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import chats
from weft.data.chat.preview import Sample, preview_samples
from weft.data.tokenizer import Tokenizer, load_tokenizer
from weft.recipe import build_recipe

LINES = (
    (Path(__file__).with_name("cases") / "conversations.jsonl").read_text().splitlines()
)
CASES = {case["id"]: case for case in map(json.loads, LINES)}
GLM_TOKENS = ("<|user|>", "<|assistant|>", "<|observation|>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One that has the tokens of ChatML and GLM, and ends texts at ``<|im_end|>``."""
    family = chats.TEMPLATES["qwen2.5"]
    folder = tmp_path_factory.mktemp("cases")
    return load_tokenizer(
        str(
            chats.save_tokenizer(
                folder, family._replace(specials=family.specials + GLM_TOKENS)
            )
        )
    )


def read(
    case: dict[str, Any], tokenizer: Tokenizer, folder: Path
) -> tuple[list[Sample], list[str]]:
    """The samples of a case, through a file as a user has it, and what is said about them."""
    path = folder / (
        "records.parquet" if case.get("via") == "parquet" else "records.jsonl"
    )
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(case["records"]), path)
    else:
        path.write_text("\n".join(map(json.dumps, case["records"])))
    template = {} if case["template"] == "chatml" else {"template": case["template"]}
    data = {"kind": "chat", "path": str(path), "seq_len": 512, "chat": template}
    return preview_samples(build_recipe({"data": data}).data, tokenizer, 10)


def pieces_learned(shown: list[Sample]) -> list[str]:
    return [
        piece["text"]
        for sample in shown
        for piece in sample.as_json()["pieces"]
        if piece["learned"]
    ]


def text_of(sample: Sample) -> str:
    return "".join(piece.text for piece in sample.pieces)


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if "learned" in case]
)
def test_just_what_is_right_is_learned(
    name: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    shown, notes = read(CASES[name], tokenizer, tmp_path)
    assert pieces_learned(shown) == CASES[name]["learned"] and not notes


def test_nulls_that_arrow_adds_are_no_arguments(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    case = CASES["arrow-null"]
    first, _ = pieces_learned(read(case, tokenizer, tmp_path)[0])
    assert '"arguments": {"town": "Oslo"}}' in first
    case["records"][0]["messages"][1]["tool_calls"][0]["function"]["arguments"][
        "title"
    ] = None
    first, _ = pieces_learned(read(case | {"via": "jsonl"}, tokenizer, tmp_path)[0])
    assert '"arguments": {"town": "Oslo", "title": null}}' in first


@pytest.mark.parametrize("name", ["system-beside-messages", "system-beside-prompt"])
def test_system_beside_the_data_is_a_turn(
    name: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (sample,), notes = read(CASES[name], tokenizer, tmp_path)
    assert (
        text_of(sample).startswith("<|im_start|>system\nAnswer in rhyme.<|im_end|>\n")
        and not notes
    )


def test_what_a_template_leaves_out_is_said(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    _, notes = read(CASES["no-system-in-template"], tokenizer, tmp_path)
    assert notes[0].startswith("the chat template writes no system turn (1 record)")
    assert (
        notes[1].startswith("no learned turn ends with a stop id (<|im_end|>)")
        and len(notes) == 2
    )


def test_a_stop_id_that_follows_ends_a_turn(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    shown, notes = read(CASES["glm"], tokenizer, tmp_path)
    assert pieces_learned(shown) == ["b", "d"] and notes[0].startswith(
        "no learned turn ends with a stop id"
    )
    stops = (tokenizer.eos, tokenizer.specials["<|user|>"])
    shown, notes = read(CASES["glm"], replace(tokenizer, ends=stops), tmp_path)
    assert pieces_learned(shown) == ["b<|user|>", "d"]
    assert len(notes) == 1 and notes[0].startswith(
        "the chat template writes no stop id behind the last learned turn, whose end is not learned (1 record); a"
    )


def test_what_exporters_leave_empty_is_read(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (sample,), notes = read(CASES["text-arguments-null"], tokenizer, tmp_path)
    call, answer = pieces_learned([sample])
    assert (
        '"name": "now", "arguments": {}}' in call
        and answer == "noon<|im_end|>"
        and not notes
    )
    assert "<tool_response>\n\n</tool_response>" in text_of(sample)
