"""A name means one thing in the whole package, and says it in a term of the field.

A technique's own file may share names with others: its name is what a recipe says, and nothing else imports it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "weft"
#: Words that hide what they hold.
EMPTY_WORDS = {"found", "one", "mine", "told", "dealt", "made"}
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def trees() -> dict[str, ast.Module]:
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }


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
    for file, tree in trees().items():
        for node in tree.body:
            if (
                isinstance(node, Definition)
                and not node.name.startswith("_")
                and not is_leaf(file)
            ):
                files[node.name].add(file)
    return files


def bound_names(tree: ast.Module) -> Iterator[str]:
    """Every name that a file gives: of variables, parameters, attributes, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, Definition):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def aliases() -> Iterator[tuple[str, str, str]]:
    """Every ``import ... as`` of a name of the package: the file, the alias, and what it stands for."""
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "weft"
            ):
                for alias in node.names:
                    if alias.asname and alias.asname != alias.name:
                        yield file, alias.asname, f"{node.module}.{alias.name}"


def returned_tuple(node: ast.AST) -> int:
    """Number of values in the tuple that a function says it returns, 0 for any other type."""
    returns = getattr(node, "returns", None)
    decorators = map(ast.unparse, getattr(node, "decorator_list", ()))
    if any("custom_op" in decorator for decorator in decorators):
        return 0  # PyTorch infers an operator's schema from a plain tuple only
    if not isinstance(returns, ast.Subscript) or not isinstance(
        returns.slice, ast.Tuple
    ):
        return 0
    elements = returns.slice.elts
    endless = any(isinstance(e, ast.Constant) and e.value is ... for e in elements)
    is_tuple = isinstance(returns.value, ast.Name) and returns.value.id == "tuple"
    return len(elements) if is_tuple and not endless else 0


def test_no_two_files_share_a_name() -> None:
    files: dict[str, set[str]] = defaultdict(set)
    for file in trees():
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
        for file, tree in trees().items()
        if (names := {n for n in bound_names(tree) if n.strip("_") in EMPTY_WORDS})
    }
    assert not empty, "use a term of the field"


def test_values_of_a_returned_tuple_have_names() -> None:
    """Functions return at most pairs; more values are a NamedTuple or a frozen dataclass."""
    nameless = [
        f"{file}:{node.lineno} {getattr(node, 'name', '')}"
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if returned_tuple(node) > 2
    ]
    assert not nameless
