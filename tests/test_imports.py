"""Imports point downward: the rooms of the house plan against every import of the package, also those in functions."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.sources import PACKAGE, sources

#: Whose tests read the same files: they run in one process.
TOGETHER = "sources"

#: Every room may import those before it.
ORDER = (
    "recipe", "shapes", "net", "layout", "models", "schedule", "data", "memory", "parallel", "peers",
    "checkpoint", "sync", "run", "train", "prove", "resilience", "rehearse", "generate", "diffusion", "cluster",
    "serve", "rl", "federated", "saddle", "streams", "curation", "search", "techniques", "cli",
)  # fmt: skip
#: What the two rooms beside that order may import; the planner simulates the tables that training executes.
BESIDE: dict[str, set[str]] = {
    "observe": {"net", "layout"},
    "planner": {"schedule", "layout"},
}
#: What every room may import beside the files that stand in no room: recipes, models in numbers, layouts, what they
#: cut, where ranks are in them, and a batch.
OPEN = (
    "recipe", "shapes", "layout.axes", "layout.dims", "layout.layout", "layout.placement", "data.batch",
)  # fmt: skip

#: What still points upward, and what will end it. Take an entry out as soon as it does.
UPWARD: dict[tuple[str, str], str] = {}


def room(name: str) -> str:
    """Of ``data/loader.py`` or ``data.loader``; a file that stands in no room is its own."""
    return name.split("/")[0].split(".")[0]


def is_open(module: str) -> bool:
    return module.startswith(OPEN) or not (PACKAGE / room(module)).is_dir()


@cache
def imported_names() -> dict[str, list[tuple[str, str]]]:
    """Every file of the package with all that it imports anywhere, also for types and in functions: module, name."""
    return {
        file: [
            ("", alias.name)
            if isinstance(node, ast.Import)
            else (node.module or "", alias.name)
            for node in source.imports
            for alias in node.names
        ]
        for file, source in sources().items()
    }


def imports() -> Iterator[tuple[str, str]]:
    """Every file of the package with each room, other than its own, of which it imports what is not open to all."""
    for file, names in imported_names().items():
        for source, name in names:
            whole = f"{source}.{name}" if source in ("", "weft") else source
            module = whole.strip(".").removeprefix("weft.")
            if (
                whole.strip(".").startswith("weft.")
                and not is_open(module)
                and room(module) != room(file)
            ):
                yield file, room(module)


def allowed(importing: str, imported: str) -> bool:
    if importing in BESIDE:
        return imported in BESIDE[importing]
    if importing in ORDER:
        return imported in BESIDE or imported in ORDER[: ORDER.index(importing)]
    # the package's doors; what is open to all imports nothing else
    return importing in ("__main__", "__init__", "api")


def test_what_is_imported_exists() -> None:
    """Also in functions, whose imports the type checker lets pass and no daily test may reach."""

    def exists(module: str) -> bool:
        path = PACKAGE.parent / module.replace(".", "/")
        return path.is_dir() or path.with_suffix(".py").is_file()

    missing = {
        (file, source)
        for file, names in imported_names().items()
        for source, _ in names
        if source.startswith("weft.") and not exists(source)
    }
    assert not missing


def test_imports_point_downward() -> None:
    found = {
        (file, imported)
        for file, imported in imports()
        if not allowed(room(file), imported)
    }
    assert not found - UPWARD.keys(), (
        "these imports point upward: move down what both need, or hand it in"
    )
    assert not UPWARD.keys() - found, "these are mended: take them out of UPWARD"


def test_nothing_imports_a_leaf() -> None:
    """But another leaf, whose file then needs the first one's."""
    importing = {
        file
        for file, names in imported_names().items()
        if room(file) != "techniques"
        and any(source.startswith("weft.techniques") for source, _ in names)
    }
    assert not importing


def test_no_cycle_between_rooms() -> None:
    rooms: dict[str, set[str]] = {}
    for file, imported in imports():
        if (file, imported) not in UPWARD:
            rooms.setdefault(room(file), set()).add(imported)
    TopologicalSorter(rooms).prepare()  # raises CycleError, which names the cycle


#: Imports that close a circle of files, and why they may. Take an entry out as soon as it does not.
CIRCLES = {
    ("section.py", "recipe/unknown_key.py"): "a wrong key is answered with those of all sections, when there is one",
}  # fmt: skip


def file_of(module: str) -> str:
    """The file of ``weft.data.loader``, or of a name in it; empty if it is not the package's."""
    parts = module.split(".")[1:] if module.startswith("weft.") else []
    while parts:
        path = PACKAGE.joinpath(*parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file.relative_to(PACKAGE).as_posix()
        parts.pop()
    return ""


def leaf(file: str) -> str:
    """The folder of the technique that a file belongs to; empty if it belongs to none, or is all of it."""
    parts = file.split("/")
    return "/".join(parts[:3]) if parts[0] == "techniques" and parts[3:] else ""


def files() -> dict[str, set[str]]:
    """Every file of the package with those that it imports; a technique's own files are one with each other."""
    found: dict[str, set[str]] = {}
    for file, names in imported_names().items():
        imported = {file_of(f"{source}.{name}".strip(".")) for source, name in names}
        within = {
            other for other in imported if leaf(file) and leaf(other) == leaf(file)
        }
        found[file] = imported - {"", file} - within
    return found


def test_no_circle_of_files() -> None:
    """A file that is read needs only files that can be read before it."""
    graph = files()
    for file, imported in CIRCLES:
        graph[file].remove(imported)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
    for file, imported in CIRCLES:
        with pytest.raises(CycleError):
            TopologicalSorter(graph | {file: graph[file] | {imported}}).prepare()


def test_no_two_public_classes_share_a_name() -> None:
    """One name, one meaning: whoever reads ``Row`` somewhere need not ask which of several it is."""
    homes: dict[str, set[str]] = {}
    for file, source in sources().items():
        for name in source.classes:
            homes.setdefault(name, set()).add(file)
    assert homes.keys() >= {"Recipe", "Layout"}, "the package's classes were not found"
    shared = {name: sorted(files) for name, files in homes.items() if len(files) > 1}
    assert not shared, "give all but one of these a more exact name"


#: Who may name FSDP2 or DTensor: the backend of the state; what foreign checkpoints put before names; rows of
#: measurements, whose columns are those of published ones; what the planner prices as they do.
BACKENDS = {"parallel/sharded.py", "shapes/foreign_names.py", "observe/measured.py"}


def test_only_the_backend_knows_who_holds_the_state() -> None:
    named = {
        file
        for file, source in sources().items()
        if re.search(r"fsdp|dtensor", source.text, re.IGNORECASE)
    }
    assert {name for name in named if room(name) != "planner"} == BACKENDS


def test_steps_and_checkpoints_do_not_ask_for_tp() -> None:
    """What an axis means for a parameter follows from its placement, so no code of these rooms names that axis."""
    named = [path for each in ("train", "checkpoint") for path in (PACKAGE / each).rglob("*.py")
             if '"tp"' in path.read_text()]  # fmt: skip
    assert not named


#: What opens connections, or makes objects of bytes that arrive.
WIRES = (
    "socket",
    "selectors",
    "pickle",
    "marshal",
    "shelve",
    "multiprocessing.connection",
)
#: Who may, beside ``net``: HTTP, a reader of foreign checkpoints that lets in nothing that runs, and pipes between a
#: process and its own children.
BESIDE_NET = {
    "serve/front.py": {"socket"},
    "checkpoint/convert/shards.py": {"pickle"},
    "prove/pool.py": {"pickle", "multiprocessing.connection"},
    "rl/reward_workers.py": {"selectors"},
    "rl/control/array_frames.py": {"multiprocessing.connection"},
}


def test_connections_are_made_in_net_alone() -> None:
    """Every other byte between processes goes through an endpoint, or PyTorch's groups; nothing there is unpickled."""
    users: dict[str, set[str]] = {}
    for file, source in sources().items():
        for node in source.imports:
            names = {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                names = {f"{node.module}.{name}" for name in names}
                names.add(node.module or "")
            if room(file) != "net" and not names.isdisjoint(WIRES):
                users.setdefault(file, set()).update(names.intersection(WIRES))
    assert users == BESIDE_NET
    text = "".join(source.text for source in sources().values())
    assert "weights_only=False" not in text and "allow_pickle" not in text


def undeclared_imports() -> set[tuple[str, str]]:
    """Pairs of a file and a package that it imports as soon as it is imported, and that no extra of users brings."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(word for name in extras.keys() - {"test", "dev", "docs", "bench"} for word in extras[name]),
    ]  # fmt: skip
    declared = {re.split(r"[<>=\[ ]", word)[0].replace("-", "_").lower() for word in wanted}  # fmt: skip
    # what these bring: pydantic, typer, uvicorn, lm_eval
    brought = {"pydantic_core", "click", "h11", "tqdm"}
    known = declared | brought | sys.stdlib_module_names | {"weft"}
    return {
        (file, name)
        for file, source in sources().items()
        for node in source.at_once
        for whole in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""] * (not node.level)
        )
        if (name := whole.split(".")[0]).lower() not in known
    }


def test_what_is_imported_at_once_is_declared() -> None:
    """The engine of every service once needed scipy, which only the tests install."""
    assert undeclared_imports() <= OF_PYTORCH


#: What PyTorch brings on GPUs, for the files that only they use.
OF_PYTORCH = {
    (file, "triton")
    for file in ("models/paged_kernel.py", "models/pointwise_kernels.py")
}
