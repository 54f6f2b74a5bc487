"""What the files of the package say, read once for all tests of it: imports, definitions, names, returned tuples."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "weft"
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Import = ast.Import | ast.ImportFrom


@dataclass
class Source:
    """A file of the package.

    ``imports``: all of them, also for types and in functions; ``at_once``: those outside functions and conditions.
    ``functions`` and ``classes``: names that the file defines for others. ``names``: every name that it gives, of
    variables, parameters, attributes, functions and classes. ``tuples``: lines and names of functions that return
    several values without names, with their number.
    """

    text: str
    imports: list[Import] = field(default_factory=list)
    at_once: list[Import] = field(default_factory=list)
    functions: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    tuples: dict[str, int] = field(default_factory=dict)


@cache
def sources() -> dict[str, Source]:
    """Every file of the package, by its path within it.

    Trees of all files would take a gigabyte, and each look through them as long as reading them.
    """
    return {
        path.relative_to(PACKAGE).as_posix(): source_of(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def source_of(text: str) -> Source:
    """Return what a file with this text says."""
    source, tree = Source(text), ast.parse(text)
    for statement in tree.body:
        if isinstance(statement, Import):
            source.at_once.append(statement)
        elif isinstance(statement, Definition) and not statement.name.startswith("_"):
            is_class = isinstance(statement, ast.ClassDef)
            (source.classes if is_class else source.functions).add(statement.name)
    for node in _telling(tree):
        if isinstance(node, Import):
            source.imports.append(node)
        elif isinstance(node, ast.Name):
            source.names.add(node.id)
        elif isinstance(node, ast.arg):
            source.names.add(node.arg)
        elif isinstance(node, ast.Attribute):
            source.names.add(node.attr)
        elif isinstance(node, Definition):
            source.names.add(node.name)
            if count := _returned_tuple(node):
                source.tuples[f"{node.lineno} {node.name}"] = count
    return source


def _telling(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that import, define or bind a name; :func:`ast.walk` looks at each constant, too."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        kind = type(node)
        if kind is ast.Constant or kind is ast.Load:
            continue
        if kind is ast.Name or kind is ast.Attribute:
            if type(node.ctx) is ast.Store:  # type: ignore[attr-defined]
                yield node
            if kind is ast.Attribute:
                waiting.append(node.value)  # type: ignore[attr-defined]
            continue
        if isinstance(node, Import):
            yield node
            continue
        if isinstance(node, Definition | ast.arg):
            yield node
        for name in node._fields:
            value = getattr(node, name)
            if isinstance(value, list):
                waiting += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST):
                waiting.append(value)


def _returned_tuple(node: Definition) -> int:
    """Number of values in the tuple that a function says it returns, 0 for any other type."""
    returns = getattr(node, "returns", None)
    if not isinstance(returns, ast.Subscript) or not isinstance(
        returns.slice, ast.Tuple
    ):
        return 0
    if any("custom_op" in ast.unparse(each) for each in node.decorator_list):
        return 0  # PyTorch infers an operator's schema from a plain tuple only
    elements = returns.slice.elts
    endless = any(isinstance(e, ast.Constant) and e.value is ... for e in elements)
    is_tuple = isinstance(returns.value, ast.Name) and returns.value.id == "tuple"
    return len(elements) if is_tuple and not endless else 0
