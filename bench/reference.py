"""Write what pages of the reference show of the code: all commands, and the examples of extension kinds.

    python bench/reference.py [--mend]

Without ``--mend`` it says whether the pages are what the code says, as ``tests/test_docs.py`` does.
An example is a block of Python whose first line names a file and a function or class in it (``# FILE: NAME``), or
the file of a technique.
"""

from __future__ import annotations

import ast
import html
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from weft.cli.app import app

ROOT = Path(__file__).parents[1]
COMMANDS = ROOT / "docs/reference/commands.md"
KINDS = ROOT / "docs/reference/extension-kinds.md"
HEAD = """# Commands

Every command and option, as `weft COMMAND --help` prints them. `weft -v COMMAND` shows the traceback of an error.
Exit codes: 0 for success, 1 for what failed, 2 for what cannot be asked for, 75 for a rank that was left out,
128 + n for a run that signal n has ended.

This page is written by `python bench/reference.py --mend`.
"""


def commands(group: Any, path: str = "weft") -> Iterator[tuple[str, Any]]:
    """Every command that does something, with the words that call it, in the order of ``weft --help``."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def cell(text: str | None) -> str:
    """A text as a cell of a table."""
    return html.escape(" ".join((text or "").split()), False).replace("|", "&#124;")


def entry(path: str, command: Any) -> Iterator[str]:
    """The lines of one command: how it is called, what it does, its arguments and options."""
    context = command.make_context(path, [], resilient_parsing=True)
    params = [p for p in command.params if p.name != "help" and not p.hidden]
    usage = [piece for p in params for piece in p.get_usage_pieces(context)]
    yield f"## {path}\n"
    yield cell(command.help) + "\n"
    yield f"```\n{' '.join([path, '[OPTIONS]', *usage])}\n```\n"
    if not params:
        return
    yield "| argument or option | meaning |"
    yield "|---|---|"
    for param in params:
        names, meaning = param.get_help_record(context) or (*usage, param.help)
        call = html.escape(
            names.replace(" range", "").replace("<", "").replace(">", "")
        )
        yield f"| <code>{call.replace('|', '&#124;')}</code> | {cell(meaning)} |"
    yield ""


def commands_page() -> str:
    """The page of commands."""
    lines = [HEAD]
    for path, command in commands(typer.main.get_command(app)):
        lines += entry(path, command)
    return "\n".join(lines).rstrip() + "\n"


def source_of(file: str, name: str) -> str:
    """The code of a function or class, with its decorators; without a name of the one that is registered."""
    text = (ROOT / file).read_text()
    decorated = [
        (node, [node.lineno, *(d.lineno for d in node.decorator_list)])
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        and (node.name == name or (not name and node.decorator_list))
    ]
    node, lines = decorated[-1]
    return "\n".join(text.splitlines()[min(lines) - 1 : node.end_lineno])


def with_examples(page: str) -> str:
    """The page with every example as it stands in its file."""
    return re.sub(
        r"(?ms)^(```python\n# (\S+\.py)(?:: (\w+))?\n).*?^```$",
        lambda m: f"{m[1]}{source_of(m[2], m[3] or '')}\n```",
        page,
    )


def pages() -> dict[Path, str]:
    """What the pages should say."""
    return {COMMANDS: commands_page(), KINDS: with_examples(KINDS.read_text())}


def main() -> None:
    if "--mend" in sys.argv[1:]:
        for page, text in pages().items():
            page.write_text(text)
    wrong = [str(page) for page, text in pages().items() if page.read_text() != text]
    print("\n".join(f"{page}: run with --mend" for page in wrong) or "as the code says")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
