"""What is written as TOML reads back, lists on one line and floats rounded as asked."""

import tomllib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.recipe.toml import toml_value, write_toml

WORDS = st.text(st.characters(exclude_categories=("Cs",)), max_size=6)
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | WORDS,
    lambda some: st.lists(some, max_size=3) | st.dictionaries(WORDS, some, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(WORDS, VALUES, max_size=4))
def test_what_is_written_reads_back(tree: dict[str, Any]) -> None:
    assert tomllib.loads(write_toml(tree)) == tree
    for value in tree.values():
        line = toml_value(value)
        assert "\n" not in line and tomllib.loads(f"v = {line}") == {"v": value}


def test_lists_stand_on_a_line_and_floats_are_rounded() -> None:
    tree = {
        "curve": [[1024, 1.23456789e-5], [2048, 2.0]],
        "disk": {"read": 1234567.8, "at": ["a [\\", "b"]},
    }
    assert write_toml(tree, 3) == (
        "curve = [[1024, 1.23e-05], [2048, 2.0]]\n\n"
        '[disk]\nread = 1230000.0\nat = ["a [\\\\", "b"]\n'
    )
