"""Addresses of recipes in records: nothing secret, and otherwise as they are."""

from __future__ import annotations

import pytest

from weft.recipe.masked import masked_address, masked_values


@pytest.mark.parametrize(("address", "shown"), [
    ("https://me:word@host/a@b.txt?sig=hidden#part", "https://host/a@b.txt"),
    ("http://host:80/a?token=hidden", "http://host:80/a"),
    ("s3://key:word@bucket/a-?.txt", "s3://bucket/a-?.txt"),
    ("s3://bucket/data/*.jsonl", "s3://bucket/data/*.jsonl"),
    ("a text that asks: https://me:word@host", "a text that asks: https://me:word@host"),
    ("folder/a@b.txt?c", "folder/a@b.txt?c"),
])  # fmt: skip
def test_what_may_be_secret_is_not_shown(address: str, shown: str) -> None:
    assert masked_address(address) == shown
    assert masked_values({"sources": [{"path": address, "weight": 2}]}) == {
        "sources": [{"path": shown, "weight": 2}]
    }
