"""Questions and answers from docstrings of Python code: data to try fine-tuning with."""

import ast
from collections.abc import Iterator
from pathlib import Path


def docstrings(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Iterate over the public classes and functions of a Python file that have a docstring.

    Yields pairs of line number and record. The record holds a question about the class or function and, as its answer,
    the first paragraph of the docstring. Docstrings of less than five words, and files that cannot be parsed, are
    skipped.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return
    packages = [p.name for p in file.parents if (p / "__init__.py").exists()]
    module = [*reversed(packages), *([] if file.stem == "__init__" else [file.stem])]

    def walk(node: ast.AST, names: list[str]) -> Iterator[tuple[int, dict[str, str]]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                path = [*names, child.name]
                text = " ".join(
                    (ast.get_docstring(child) or "").partition("\n\n")[0].split()
                )
                if len(text.split()) > 4 and not any(
                    name.startswith("_") for name in path
                ):
                    kind = "class" if isinstance(child, ast.ClassDef) else "function"
                    asked = f"What does the Python {kind} {'.'.join(path)} do?"
                    yield child.lineno, {"prompt": asked, "completion": text}
                yield from walk(child, path)

    yield from walk(tree, module)
