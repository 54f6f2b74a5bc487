"""Check the catalogue (docs/techniques.md): every measured figure stands in the results of the script that it names.

    python bench/catalogue.py [--mend]

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

#: A number that is no part of a word, but for the x of a ratio.
NUMBER = r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w.]*\w)|\d[\d,]*(?:\.\d+)?(?=x\b)"

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "techniques.md", Path(__file__).parent / "results"


class Row(NamedTuple):
    """A row of the catalogue."""

    technique: str
    tests: tuple[str, ...]
    runs: str  # when its tests run
    figure: str


def catalogue() -> Iterator[Row]:
    """The rows of both tables of techniques."""
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 6 and cells[0] not in ("technique", "---"):
            tests = tuple(re.findall(r"`(tests/[\w./]+\.py)`", cells[4]))
            yield Row(
                cells[0],
                tests,
                "".join(re.findall(r"\(([a-z, ]+)\)$", cells[4])),
                cells[5],
            )


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


def with_runs(page: str) -> str:
    """The page with the words that say when each row's tests run."""
    lines = []
    for line in page.splitlines():
        cells = re.split(r"(?<!\\)\|", line)
        tests = (
            tuple(re.findall(r"`(tests/[\w./]+\.py)`", cells[5]))
            if len(cells) == 8
            else ()
        )
        if tests:
            cells[5] = f"{cells[5].rstrip().partition(' (')[0]} ({runs_of(tests)}) "
        lines.append("|".join(cells))
    return "\n".join(lines) + "\n"


def main() -> None:
    if "--mend" in sys.argv[1:]:
        PAGE.write_text(with_runs(PAGE.read_text()))
    wrong = [line for row in catalogue() for line in wrong_figures(row)]
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
