"""Addresses of recipes in records: nothing secret, and otherwise as they are."""

from __future__ import annotations

import pytest

from weft.recipe.masked import (
    has_secrets,
    masked_address,
    masked_text,
    masked_values,
    unmasked_values,
)


@pytest.mark.parametrize(("address", "shown"), [
    ("https://me:word@host/a@b.txt?sig=hidden#part", "https://host/a@b.txt"),
    ("http://host:80/a?token=hidden", "http://host:80/a"),
    ("HTTPS://host/a?sig=hidden", "HTTPS://host/a"),
    ("s3://key:word@bucket/a-?.txt", "s3://bucket/a-?.txt"),
    ("s3://key:w/o+rd=@bucket/a", "s3://bucket/a"),
    ("s3://key:w@/o@bucket/a", "s3://bucket/a"),
    ("s3://key:/word@bucket/a", "s3://bucket/a"),
    ("s3://key:12/word@bucket/a", "s3://bucket/a"),
    ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
    ("https://me:wo?rd@host/a", "https://host/a"),
    ("http://[::1]:80/a@b", "http://[::1]:80/a@b"),
    ("http://host:80/a@b", "http://host:80/a@b"),
    ("hf://datasets/me/texts@main/a:b", "hf://datasets/me/texts@main/a:b"),
    ("s3://bucket/data/*.jsonl", "s3://bucket/data/*.jsonl"),
    ("a text that asks: https://me:word@host", "a text that asks: https://me:word@host"),
    ("folder/a@b.txt?c", "folder/a@b.txt?c"),
])  # fmt: skip
def test_what_may_be_secret_is_not_shown(address: str, shown: str) -> None:
    assert masked_address(address) == shown
    assert masked_values({"sources": [{"path": address, "weight": 2}]}) == {
        "sources": [{"path": shown, "weight": 2}]
    }


@pytest.mark.parametrize(("word", "shown"), [
    ("https://me:word@host/a?sig=hidden", "https://host/a"),
    ("data.path=HTTPS://host/a?sig=hid,den'x", "data.path=HTTPS://host/a"),
    ("a=https://u:p@host/x?s=1,b=https://u:p@host/y?t=2", "a=https://host/x,b=https://host/y"),
    ('s=[{path="https://host/a?sig=1", name="b?"}, {path=\'s3://k:w@c/d?\'}]',
     's=[{path="https://host/a", name="b?"}, {path=\'s3://c/d?\'}]'),
    ('s=[{path="https://host/a", name="b?"}]', 's=[{path="https://host/a", name="b?"}]'),
    ("data.path=s3://key:w/o+rd=@bucket/x", "data.path=s3://bucket/x"),
    ("folder/a@b.txt?c", "folder/a@b.txt?c"),
])  # fmt: skip
def test_every_address_in_a_word_of_a_command_is_masked(word: str, shown: str) -> None:
    assert masked_text(word) == shown


@pytest.mark.parametrize(("address", "secret"), [
    ("https://host/a.txt", False), ("s3://bucket/a?page=1", False), ("folder/a.txt?c", False),
    ("https://host/a.txt?download=true", False), ("https://host/a.txt?download", False),
    ("https://host/a?format=csv&page=3&raw=1", False), ("https://host/a?ref=feature/x", False),
    ("https://me:word@host/a.txt?download=true", True), ("s3://key:word@bucket/a?raw=1", True),
    ("https://host/a.txt?download=f3a9", True), ("https://host/a.txt?sig=1", True),
    ("https://host/a.txt?download=true&token=1", True), ("https://host/a.txt?download=true#part", True),
    ("https://host/a?rev=ghp_abcdefghijklmnopqrstuvwxyz0123456789", True),
    ("https://host/a?rev=0123456789abcdef", False),
    ("https://host/a.txt?", True), ("https://me:wo?raw=1@host/a", True), ("https://me:wo?raw@host/a", True),
])  # fmt: skip
def test_a_query_of_a_form_is_no_secret(address: str, secret: bool) -> None:
    assert has_secrets({"sources": [{"path": "https://host/b"}, {"path": address}]}) == secret  # fmt: skip


def test_a_record_gets_its_addresses_back() -> None:
    full = [f"https://me:word@host/a?part={i}" for i in range(2)]
    recorded = {"sources": [{"path": "https://host/a"}, {"path": "https://host/a"}, {"path": "b"}]}  # fmt: skip
    back = unmasked_values(recorded, {"sources": [{"path": path} for path in full]})
    assert back == {"sources": [{"path": full[0]}, {"path": full[1]}, {"path": "b"}]}
