"""A name means one thing in the whole package, and says it in a term of the field.

A technique's own file may share names with others: its name is what a recipe says, and nothing else imports it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.sources import sources

#: Whose tests read the same files: they run in one process.
TOGETHER = "sources"
#: Words that hide what they hold.
EMPTY_WORDS = {"found", "one", "mine", "told", "dealt", "made"}


def is_leaf(file: str) -> bool:
    return file.startswith("techniques/")


def shared(files_by_name: dict[str, set[str]]) -> dict[str, list[str]]:
    return {
        name: sorted(files) for name, files in files_by_name.items() if len(files) > 1
    }


@cache
def definitions() -> dict[str, set[str]]:
    """Files by the name of the public function or class that each defines for others; leaves aside."""
    files = defaultdict(set)
    for file, source in sources().items():
        for name in source.functions | source.classes:
            if not is_leaf(file):
                files[name].add(file)
    return files


def aliases() -> Iterator[tuple[str, str, str]]:
    """Every ``import ... as`` of a name of the package: the file, the alias, and what it stands for."""
    for file, source in sources().items():
        for node in source.imports:
            module = getattr(node, "module", None) or ""
            if module.startswith("weft"):
                for alias in node.names:
                    if alias.asname and alias.asname != alias.name:
                        yield file, alias.asname, f"{module}.{alias.name}"


def test_no_two_files_share_a_name() -> None:
    files: dict[str, set[str]] = defaultdict(set)
    for file in sources():
        path = Path(file)
        if not path.stem.startswith("__"):
            files[path.stem].add(file)
    twice = {
        name: paths
        for name, paths in shared(files).items()
        if not all(map(is_leaf, paths))
    }
    assert not twice, "name each file after what it holds"


def test_no_two_public_functions_or_classes_share_a_name() -> None:
    assert not shared(definitions()), "one name means one thing"


def test_aliases_mean_one_thing() -> None:
    meanings: dict[str, set[str]] = defaultdict(set)
    for _, alias, origin in aliases():
        meanings[alias].add(origin)
    assert not shared(meanings)
    assert not meanings.keys() & definitions().keys(), "an alias hides a public name"


def test_identifiers_say_what_they_hold() -> None:
    empty = {
        file: sorted(names)
        for file, source in sources().items()
        if (names := {n for n in source.names if n.strip("_") in EMPTY_WORDS})
    }
    assert not empty, "use a term of the field"


def test_values_of_a_returned_tuple_have_names() -> None:
    """Functions return at most pairs; more values are a NamedTuple or a frozen dataclass."""
    nameless = [
        f"{file}:{function}"
        for file, source in sources().items()
        for function, count in source.tuples.items()
        if count > 2
    ]
    assert not nameless
