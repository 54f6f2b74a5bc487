"""Make the catalogue (docs/reference/techniques.md) from the declarations of techniques, and check its figures.

    python bench/catalogue.py [--mend]

A technique that is a leaf (:mod:`weft.registry`) says its row itself: title, paper, recipe, proof, figure. ``--mend``
writes the rows of all leaves that have a title and a recipe where they stand, a new one's below those of its kind.
What belongs to the core is a row that is written by hand.

A row's figures are clauses between semicolons. Of a clause that names scripts, (`bench/step.py`) or
(`bench/step.py`, `bench/serve.py`), every number must be one of those in `results/` that these scripts have written:
as it is, as a percentage, as a percentage above or below 1, or turned round, rounded to as many digits as are shown.
Numbers of other clauses are what the row's tests assert. What is no figure in a clause (a setting, the name of a
model) stands in backquotes.

A row's tests are marked with when they run: *daily* (`make test`), *soak*, or both; ``--mend`` writes these words anew.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from weft.registry import KINDS, Registered, declared

#: A number that is no part of a word, but for the x of a ratio.
NUMBER = r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w.]*\w)|\d[\d,]*(?:\.\d+)?(?=x\b)"

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs/reference/techniques.md", Path(__file__).parent / "results"


class Row(NamedTuple):
    """A row of the catalogue."""

    technique: str
    tests: tuple[str, ...]
    runs: str  # when its tests run
    figure: str


def cells_of(line: str) -> list[str]:
    """The six cells of a line of the page that is a row of the catalogue; of other lines none."""
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    return cells if len(cells) == 6 and cells[0] not in ("technique", "---") else []


def catalogue() -> Iterator[Row]:
    """The rows of the catalogue."""
    for cells in filter(None, map(cells_of, PAGE.read_text().splitlines())):
        runs = "".join(re.findall(r"\(([a-z, ]+)\)$", cells[4]))
        yield Row(cells[0], tests_in(cells[4]), runs, cells[5])


def tests_in(proof: str) -> tuple[str, ...]:
    """The test files that the cell of a row's proof names."""
    return tuple(re.findall(r"`(tests/[\w./]+\.py)`", proof))


def leaves() -> dict[str, Registered]:
    """Weft's own techniques that have a row, those with a title and a recipe, by their files."""
    own = (
        leaf
        for kind in KINDS
        for leaf in declared(kind)
        if leaf.module.startswith("weft.techniques.")
    )
    return {file_of(leaf): leaf for leaf in own if leaf.title and leaf.recipe}


def file_of(leaf: Registered) -> str:
    """The file of a technique, or its folder where it has more than one."""
    path = leaf.module.replace(".", "/")
    return f"{path}/" if (ROOT / path).is_dir() else f"{path}.py"


def lacks(leaf: Registered) -> Iterator[str]:
    """What a declaration must still say before its row can be written."""
    for name in ("paper", "proof", "figure"):
        if not getattr(leaf, name):
            yield f"{file_of(leaf)}: @register says no {name}=, which its row in {PAGE.name} needs"
    for test in filter(None, leaf.proof.split(", ")):
        if not (ROOT / test).is_file():
            yield f"{file_of(leaf)}: @register says proof={test!r}, which does not exist"


def line_of(leaf: Registered) -> str:
    """The row of a technique, as its declaration says it."""
    tests = leaf.proof.split(", ")
    proof = f"{', '.join(f'`{test}`' for test in tests)} ({runs_of(tuple(tests))})"
    cells = (leaf.title, leaf.paper, f"`{file_of(leaf)}`", f"`{leaf.recipe}`", proof)
    return f"| {' | '.join((*cells, leaf.figure))} |"


def file_in(cells: list[str], known: Mapping[str, Registered]) -> str:
    """The file of the technique whose row this is: it stands first among the row's modules, or has the row's title."""
    module = cells[2].split("`")[1] if "`" in cells[2] else ""
    for file, leaf in known.items():
        # a row may name a file of a technique's folder
        if module == file or (file[-1] == "/" and module.startswith(file)):
            return file
        if cells[0] == leaf.title:
            return file
    return module if module.startswith("weft/techniques/") else ""


def mended(page: str, known: Mapping[str, Registered]) -> str:
    """The page with a row for each technique, as declared, and with the words that say when a row's tests run.

    A technique whose declaration lacks something keeps the row that it has; a row whose file is gone goes.
    """
    complete = {file: leaf for file, leaf in known.items() if not any(lacks(leaf))}
    lines: list[str] = []
    place: dict[str, int] = {}  # the last line of each folder's rows
    written = set()
    for line in page.splitlines():
        cells = cells_of(line)
        file = file_in(cells, known) if cells else ""
        if file in written or (file and not (ROOT / file).exists()):
            continue
        if file in complete:
            written.add(file)
            line = line_of(complete[file])
        elif cells and tests_in(cells[4]):
            proof = cells[4].partition(" (")[0]
            runs = runs_of(tests_in(cells[4]))
            line = line.replace(f" {cells[4]} ", f" {proof} ({runs}) ")
        lines.append(line)
        if cells:
            place[str(Path(file).parent)] = place[""] = len(lines)
    for file, leaf in complete.items():
        if file not in written:
            at = place.get(str(Path(file).parent), place[""])
            lines.insert(at, line_of(leaf))
            place = {name: n + (n >= at) for name, n in place.items()}
    return "\n".join(lines) + "\n"


def wrong_rows(page: str, known: Mapping[str, Registered]) -> Iterator[str]:
    """What is wrong with the rows of techniques: each line names the remedy."""
    rows: dict[str, list[str]] = {}
    for line in filter(cells_of, page.splitlines()):
        rows.setdefault(file_in(cells_of(line), known), []).append(line)
    remedy = "run python bench/catalogue.py --mend, which writes it from @register"
    for file, leaf in known.items():
        missing = list(lacks(leaf))
        yield from missing
        if not missing and file not in rows:
            yield f"{file}: {PAGE.name} has no row of it; {remedy}"
        elif not missing and rows[file] != [line_of(leaf)]:
            yield f"{file}: its row in {PAGE.name} is not what @register says; {remedy}"
    for file in rows.keys() - known.keys() - {""}:
        yield f"{PAGE.name}: a row is of {file}, where no @register says title= and recipe="


def runs_of(tests: tuple[str, ...]) -> str:
    """When tests run, by the marks in their files: "daily", "soak", or "daily, more in soak"."""
    soak, daily = False, False
    for name in tests:
        text = (ROOT / name).read_text()
        marks = re.findall(
            r"^@pytest\.mark\.(soak|sampled)|marks=.*pytest\.mark\.(soak)", text, re.M
        )
        whole = re.search(r"^pytestmark = .*soak", text, re.M)
        soak = soak or bool(marks) or bool(whole)
        tested = re.findall(r"^((?:@.*\n(?:[ )\]].*\n)*)*)def test_", text, re.M)
        daily = daily or (
            not whole and any("pytest.mark.soak" not in marks for marks in tested)
        )
    return "daily, more in soak" if soak and daily else "soak" if soak else "daily"


def wrong_figures(row: Row) -> Iterator[str]:
    """What is said in a row and stands in none of the results that it names."""
    for clause in row.figure.split(";"):
        scripts = re.findall(r"`bench/([\w/]+)\.py`", clause)
        if not scripts:
            continue
        known: list[float] = []
        for script in scripts:
            file = RESULTS / f"{Path(script).name}.json"
            if not file.is_file():
                yield f"{row.technique}: bench/{script}.py has written no {file.relative_to(ROOT)}"
                return
            known += numbers_in(json.loads(file.read_text()))
        for shown in re.findall(NUMBER, without_names(clause)):
            if not stands_in(shown, known):
                yield f"{row.technique}: {shown} ({clause.strip()[:70]}...) is not in results/{scripts[0]}.json"


def without_names(clause: str) -> str:
    """A clause without what stands in backquotes, and without the sizes of a setting."""
    return re.sub(
        r"`[^`]*`|\b\d+ (?:ranks?|hosts?|islands?|steps|requests|replicas|cores?|GPUs?)\b",
        "",
        clause,
    )


def numbers_in(tree: Any) -> list[float]:
    """All numbers of a JSON value."""
    if isinstance(tree, dict):
        return [number for value in tree.values() for number in numbers_in(value)]
    if isinstance(tree, list):
        return [number for value in tree for number in numbers_in(value)]
    return (
        [float(tree)]
        if isinstance(tree, (int, float)) and not isinstance(tree, bool)
        else []
    )


def stands_in(shown: str, known: list[float]) -> bool:
    """Whether a number is one of those ``known``, in one of the ways in which a page may say it."""
    digits = len(shown.partition(".")[2])
    value = float(shown.replace(",", ""))
    for number in known:
        ways = [number, 100 * number, abs(100 * (number - 1)), 1000 * number]
        ways += [number / 2**10, number / 2**20, number / 1e6]
        ways += [1 / number] if number else []
        if any(abs(way - value) <= 0.5000001 * 10**-digits for way in ways):
            return True
    return False


def main() -> None:
    known = leaves()
    if "--mend" in sys.argv[1:]:
        PAGE.write_text(mended(PAGE.read_text(), known))
    wrong = list(wrong_rows(PAGE.read_text(), known))
    wrong += [line for row in catalogue() for line in wrong_figures(row)]
    wrong += [
        f"{row.technique}: its tests run {runs_of(row.tests)}, and the row says {row.runs or 'nothing'}"
        for row in catalogue()
        if row.tests and row.runs != runs_of(row.tests)
    ]
    print(
        "\n".join(wrong)
        or f"{len(list(catalogue()))} rows: every measured figure stands in bench/results"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
