"""Tokens that stand in ``tokenizer_config.json`` beside ``tokenizer.json`` are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests import chats
from weft.data.chat.chat_template import template_of
from weft.data.chat.conversation import conversation
from weft.data.chat.encode import ChatEncoder
from weft.data.tokenizer import load_tokenizer
from weft.errors import WeftError

SPECIALS = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
TALK = [
    {"role": "user", "content": "Hi <|im_end|> <|tool|>"},
    {"role": "assistant", "content": "Hello"},
]


def folder(
    where: Path,
    config: dict[str, Any],
    template: str = chats.SMOLLM2,
    lacking: tuple[str, ...] = (),
    in_vocabulary: bool = False,
    flags: dict[str, Any] | None = None,
) -> Path:
    """A tokenizer whose ``tokenizer.json`` does not add the tokens ``lacking``; perhaps they are of its vocabulary.

    ``flags``: other flags of the tokens that it adds.
    """
    chats.save_tokenizer(where, chats.Family(template, SPECIALS))
    file = where / "tokenizer.json"
    tree = json.loads(file.read_text())
    ids = {token["content"]: token["id"] for token in tree["added_tokens"]}
    tree["added_tokens"] = [
        token | (flags or {})
        for token in tree["added_tokens"]
        if token["content"] not in lacking
    ]
    if in_vocabulary:
        tree["model"]["vocab"] |= {name: ids[name] for name in lacking}
    file.write_text(json.dumps(tree))
    named = {"bos_token": SPECIALS[0], "eos_token": SPECIALS[1]}
    (where / "tokenizer_config.json").write_text(json.dumps(named | config))
    return where


def stated(where: Path, name: str, **flags: bool) -> dict[str, Any]:
    """The entry of a token in ``added_tokens_decoder``, with the id that a whole tokenizer gives it."""
    whole = folder(where, {}) / "tokenizer.json"
    number = tokenizers.Tokenizer.from_file(str(whole)).token_to_id(name)
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {str(number): {"content": name, "special": True, **plain, **flags}}


CASES: dict[str, dict[str, Any]] = {
    "all in the vocabulary alone": {
        "config": {"additional_special_tokens": ["<|im_start|>"]},
        "lacking": SPECIALS,
        "in_vocabulary": True,
    },
    "one in additional_special_tokens alone": {
        "config": {"additional_special_tokens": ["<|im_start|>"]},
        "lacking": SPECIALS[2:],
    },
    "one of them as an object": {
        "config": {
            "extra_special_tokens": [
                {"__type": "AddedToken", "content": "<|im_start|>", "rstrip": True}
            ]
        },
        "lacking": SPECIALS[2:],
    },
    "tokens that are not special": {"config": {}, "flags": {"special": False}},
    "an unknown token in the template": {
        "config": {"unk_token": "<|endoftext|>"},
        "template": "{{ unk_token }}" + chats.SMOLLM2,
    },
    "a separator in the template": {
        "config": {"sep_token": {"__type": "AddedToken", "content": "<|im_end|>"}},
        "template": chats.SMOLLM2.replace("'<|im_end|>' +", "sep_token +"),
    },
    "a token with a name of its own": {
        "config": {"extra_special_tokens": {"turn_token": "<|im_end|>"}},
        "template": chats.SMOLLM2.replace("'<|im_end|>' +", "turn_token +"),
    },
    "a padding token that nobody writes": {"config": {"pad_token": "[PAD]"}},
}


def check(where: Path, talk: list[dict[str, str]] = TALK) -> None:
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(where)
    written = theirs.apply_chat_template(talk, return_dict=True)["input_ids"]
    for again in (where, where / "saved"):
        tokenizer = load_tokenizer(str(again))
        template = template_of(tokenizer, control=True)
        assert template is not None
        encoded = ChatEncoder(template).encode(conversation(talk))
        assert encoded.ids.tolist() == written
        tokenizer.save(where / "saved")
    saved: Any = AutoTokenizer.from_pretrained(where / "saved")
    assert saved.apply_chat_template(talk, return_dict=True)["input_ids"] == written


@pytest.mark.parametrize("name", CASES)
def test_ids_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    check(folder(tmp_path / "it", **CASES[name]))


@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("lacking", [(), SPECIALS[2:]])
def test_flags_are_those_of_the_configuration(
    tmp_path: Path, lacking: tuple[str, ...], strips: bool
) -> None:
    entry = stated(tmp_path / "whole", SPECIALS[2], lstrip=strips, rstrip=strips)
    config = {"added_tokens_decoder": entry}
    check(folder(tmp_path / "it", config, lacking=lacking))


def test_control_tokens_of_the_configuration_are_text_in_words(tmp_path: Path) -> None:
    # transformers makes them tokens, unless it is told not to
    config = {"additional_special_tokens": ["<|im_start|>"]}
    where = folder(tmp_path, config, lacking=SPECIALS[2:])
    tokenizer = load_tokenizer(str(where))
    template = template_of(tokenizer)
    assert template is not None
    talk = [{"role": "user", "content": "<|im_start|>"}, TALK[1]]
    ids = ChatEncoder(template).encode(conversation(talk)).ids.tolist()
    # of the template's own system turn, the question and the answer
    assert ids.count(tokenizer.specials["<|im_start|>"]) == 3
    assert tokenizer.vocab == tokenizer.specials["<|im_start|>"] + 1


def test_a_name_that_nobody_writes_gets_no_id(tmp_path: Path) -> None:
    plain = load_tokenizer(str(folder(tmp_path / "plain", {})))
    named = load_tokenizer(str(folder(tmp_path / "named", {"pad_token": "[PAD]"})))
    assert (named.vocab, named.pad, named == plain) == (plain.vocab, None, True)


def test_a_token_without_a_place_is_refused_if_anything_uses_it(tmp_path: Path) -> None:
    entry = {"999": {"content": "<|far|>", "special": True}}
    where = folder(tmp_path / "used", {"added_tokens_decoder": entry, "pad_token": "<|far|>"})  # fmt: skip
    with pytest.raises(WeftError, match=r"gives '<\|far\|>' the id 999, and the next"):
        load_tokenizer(str(where))
    unused = load_tokenizer(str(folder(tmp_path / "not", {"added_tokens_decoder": entry})))  # fmt: skip
    assert unused == load_tokenizer(str(folder(tmp_path / "plain", {})))


def test_an_added_token_that_is_not_special_stays_in_what_is_written(tmp_path: Path) -> None:  # fmt: skip
    """Also where the configuration lists it among special tokens: as transformers has it, ``<think>`` is shown."""
    config = {"additional_special_tokens": ["<|im_start|>"]}
    tokenizer = load_tokenizer(str(folder(tmp_path, config, flags={"special": False})))
    ids = [int(i) for i in tokenizer.encode("<|im_start|>", special=True)]
    assert [tokenizer.name_of(i) for i in ids] == ["<|im_start|>"] and tokenizer.model
    assert tokenizer.model.decode(ids) == "<|im_start|>"


def test_names_of_tokens_are_those_before_normalization(tmp_path: Path) -> None:
    """As of LLaMA's early tokenizers: a word mark is put before a text, and before names of normalized tokens."""
    where = folder(tmp_path, {}, flags={"normalized": True})
    tree = json.loads((where / "tokenizer.json").read_text())
    tree["normalizer"] = {"type": "Prepend", "prepend": "_"}
    (where / "tokenizer.json").write_text(json.dumps(tree))
    tokenizer = load_tokenizer(str(where))
    assert [tokenizer.name_of(tokenizer.bos), tokenizer.name_of(tokenizer.eos)] == [
        *SPECIALS[:2]
    ]
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(str(tmp_path / "saved"))
    assert again == tokenizer and again.template_tokens == tokenizer.template_tokens
    template = template_of(tokenizer)
    assert template is not None
    written = ChatEncoder(template).encode(conversation(TALK)).text
    assert "_" not in written.replace("im_", "")
