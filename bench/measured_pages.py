"""Make the pages of results (docs/measured/results) from bench/results, one for each group of systems.

    python bench/measured_pages.py [--mend]

``measured_pages.toml`` says which results are on which page. Each result gets the first sentence of the script that
wrote it, its command, the machine, and tables of its numbers; each page a plot. Without ``--mend`` the command says
which pages are out of date.
"""

import argparse
import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from weft.recipe.toml import read_toml

ROOT = Path(__file__).parents[1]
RESULTS, PAGES = ROOT / "bench/results", ROOT / "docs/measured/results"
GROUPS = read_toml(Path(__file__).with_suffix(".toml"))
#: Rows and columns of a table, tables of a result, bars of a plot, and letters of a text.
ROWS, COLUMNS, TABLES, BARS, LETTERS = 12, 7, 4, 16, 60
#: What is no figure: under which conditions a run was made.
ASIDE = {"machine", "command", "script", "date", "torch", "cpu", "cores", "load_before", "load_after", "shape", "model",
         "settings", "source", "paper", "about", "note", "load", "took_s", "quick", "weights are random"}  # fmt: skip
#: Scripts that wrote a result of another name.
SCRIPTS = {
    "dadao_long": "dadao",
    "compositions": "tests/soak",
    "experts_placed": "experts",
    "faults_replicas": "faults",
    "faults_whole": "faults",
    "rl_gpu": "rl",
    "rl_plan": "rl_plan",
    "serve_cpu": "serve",
    "service_long_prompts": "service_placements",
    "weak_sums": "weak_hosts",
}


def scalar(value: Any) -> bool:
    return isinstance(value, str | int | float | bool) or value is None


def flat(value: dict[str, Any], prefix: str = "", depth: int = 2) -> dict[str, Any]:
    """Return the scalars of a record, those inside its records as well, by the path of their names."""
    leaves: dict[str, Any] = {}
    for key, inner in value.items():
        if key in ASIDE:
            continue
        if scalar(inner):
            leaves[f"{prefix}{key}"] = inner
        elif isinstance(inner, dict) and depth > 1:
            leaves |= flat(inner, f"{prefix}{key}: ", depth - 1)
    return leaves


def shown(value: Any) -> str:
    """Return a value as a cell of a table."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10000 else str(value)
    text = value if len(value) <= LETTERS else value[: LETTERS - 1] + "…"
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return a table with a line for each record; columns are the names that most records have."""
    count: dict[str, int] = {}
    for row in rows.values():
        for key in row:
            count[key] = count.get(key, 0) + 1
    columns = [key for key in count if 2 * count[key] >= len(rows)][:COLUMNS]
    if not columns:
        return []
    rows = {name: row for name, row in rows.items() if row.keys() & set(columns)}
    named = any(rows)
    lines = [f"| {' | '.join(([''] if named else []) + [shown(c) for c in columns])} |"]
    lines.append("|" + "---|" * (len(columns) + named))
    for name, row in list(rows.items())[:ROWS]:
        cells = [shown(name)] * named + [shown(row.get(key, "")) for key in columns]
        lines.append(f"| {' | '.join(cells)} |")
    if len(rows) > ROWS:
        lines += ["", f"And {len(rows) - ROWS} more rows in the file."]
    return lines


def alike(value: dict[str, Any]) -> bool:
    """Return whether a table's lines are inside: two records or more that have names in common."""
    keys = [set(flat(inner)) for inner in value.values() if isinstance(inner, dict)]
    keys = [names for names in keys if names]
    common = set.intersection(*keys) if keys else set()
    return len(keys) > 1 and 3 * len(common) >= max(map(len, keys))


def record(value: Any) -> bool:
    """Return whether ``value`` is one line of a table: scalars, and at most records of scalars that are not alike."""
    if not isinstance(value, dict) or not flat(value) or alike(value):
        return False
    return not any(
        isinstance(deep, dict)
        for inner in value.values()
        if isinstance(inner, dict)
        for deep in inner.values()
    )


def spread(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return least, median and most of each name that has numbers in half of the rows or more."""
    numbers: dict[str, list[float]] = {}
    for row in rows:
        for key, cell in row.items():
            if type(cell) in (int, float) and key != "seed":
                numbers.setdefault(key, []).append(cell)
    ways = {"least": min, "median": median, "most": max}
    return {
        word: {key: way(n) for key, n in numbers.items() if 2 * len(n) >= len(rows)}
        for word, way in ways.items()
    }


def tables(value: Any, name: str = "") -> Iterator[list[str]]:
    """Yield the tables of a result, each with its heading."""
    heading = [f"**{name}**", ""] if name else []
    if isinstance(value, list):
        records = [flat(row) for row in value if isinstance(row, dict)]
        rows = {str(i + 1): row for i, row in enumerate(records)}
        lines = table(spread(records) if len(records) > ROWS else rows)
        if lines:
            counted = [f"{len(records)} rows:", ""] if len(records) > ROWS else []
            yield heading + counted + lines
        return
    value = {key: inner for key, inner in value.items() if key not in ASIDE}
    plain = {key: inner for key, inner in value.items() if scalar(inner)}
    records = {key: flat(inner) for key, inner in value.items() if record(inner)}
    together = len(records) > 1 and alike({key: value[key] for key in records})
    if records and not together:
        for key, row in records.items():
            plain |= {f"{key}: {inner}": cell for inner, cell in row.items()}
    lines = []
    if records and together:
        lines += table(records)
    if plain:
        cells = {key: {"value": cell} for key, cell in plain.items()}
        lines += [""] * bool(lines) + table(cells)
    if lines:
        yield heading + lines
    for key, inner in value.items():
        deeper = isinstance(inner, dict) and not record(inner)
        if deeper or (
            isinstance(inner, list) and any(isinstance(x, dict) for x in inner)
        ):
            yield from tables(inner, f"{name}, {key}" if name else key)


def script_of(stem: str) -> Path | None:
    """Return the script that wrote a result."""
    name = SCRIPTS.get(stem, stem)
    for path in (
        ROOT / f"bench/{name}.py",
        ROOT / f"bench/planner/{name.removeprefix('planner_')}.py",
    ):
        if path.is_file():
            return path
    return ROOT / "bench/planner/left_out.py" if stem == "planner" else None


def told(stem: str, result: Any) -> list[str]:
    """Return what a result is: the first sentence of its script, its command, and the machine."""
    lines = []
    script = script_of(stem)
    if script:
        text = script.read_text()
        start = text.index('"""') + 3
        note = text[start : text.index('"""', start)]
        first = re.split(
            r"(?<=[.:])\s", note.split("\n\n")[0].replace("\n", " ").strip()
        )[0]
        end = "" if first.endswith("?") else "."
        lines.append(f"{first.rstrip(':.')}{end}".replace("``", "`"))
        line = re.search(r"^    (python .*)$", note, re.M)
        command = line[1].strip() if line else f"python {script.relative_to(ROOT)}"
        said = result.get("command") if isinstance(result, dict) else None
        command = said if isinstance(said, str) else command
        lines.append(f"`{command}`")
    machine = result.get("machine") if isinstance(result, dict) else None
    card = result.get("device") if isinstance(result, dict) else None
    if machine is None and isinstance(card, str) and " " in card:  # not "cuda"
        machine = {"device": card}
    if isinstance(machine, dict):
        parts = [
            str(machine[key]) for key in ("date", "device", "cpu") if machine.get(key)
        ]
        parts += [f"{machine['cores']} cores"] if machine.get("cores") else []
        load = machine.get("load_before")
        parts += [f"load {load} before"] if load is not None else []
        lines.append(f"({', '.join(parts)})" if parts else "")
    return [" ".join(filter(None, lines))] if lines else []


def bars(title: str, values: dict[str, float]) -> str:
    """Return a picture (SVG) with a bar for each value."""
    values = dict(list(values.items())[:BARS])
    least, most = min(0.0, *values.values()), max(0.0, *values.values())
    scale = 330 / ((most - least) or 1)
    zero = 250 - least * scale
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="660" '
        f'height="{40 + 22 * len(values)}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" font-weight="bold">{escape(title)}</text>',
    ]
    for i, (label, value) in enumerate(values.items()):
        y = 34 + 22 * i
        x, width = min(zero, zero + value * scale), abs(value) * scale
        name = label if len(label) <= 36 else label[:35] + "…"
        lines.append(
            f'<text x="240" y="{y + 12}" text-anchor="end">{escape(name)}</text><rect x="{x:.1f}" y="{y}" '
            f'width="{width:.1f}" height="16" fill="#3b6ea5"/><text x="{max(zero, x + width) + 5:.1f}" y="{y + 12}">'
            f"{shown(value)}</text>"
        )
    return "\n".join([*lines, "</svg>", ""])


def plot_of(group: dict[str, Any]) -> str:
    """Return the group's plot: a column of a table of one of its results."""
    stem, *path, column, title = group["plot"]
    value = json.loads((RESULTS / f"{stem}.json").read_text())
    for key in path:
        value = value[key]
    if isinstance(value, list):
        label = next(
            key for key in ("row", "variant", "islands", "name") if key in value[0]
        )
        value = {
            f"{label} {row[label]}" if label == "islands" else str(row[label]): row
            for row in value
        }
    if column:
        value = {
            key: row[column]
            for key, row in value.items()
            if isinstance(row, dict) and column in row
        }
    return bars(
        title,
        {
            str(key): float(cell)
            for key, cell in value.items()
            if isinstance(cell, int | float)
        },
    )


def page_of(name: str, group: dict[str, Any]) -> str:
    """Return the page of a group."""
    notes = (
        f" What was tried and why is in [the notes](../{group['notes']})."
        if group["notes"]
        else ""
    )
    lines = [
        f"# Results: {group['title']}",
        "",
        "Made from `bench/results/` by `python bench/measured_pages.py --mend`; do not write here. "
        f"Each table shows a part of its file.{notes}",
        "",
        f"![{group['plot'][-1]}]({name}.svg)",
    ]
    for stem in group["results"]:
        result = json.loads((RESULTS / f"{stem}.json").read_text())
        lines += ["", f"## {stem}", "", *told(stem, result)]
        parts = list(tables(result))
        for part in parts[:TABLES]:
            lines += ["", *part]
        if len(parts) > TABLES:
            lines += [
                "",
                f"{len(parts) - TABLES} more tables in `bench/results/{stem}.json`.",
            ]
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """Return the text of every page and picture, by its file."""
    texts = {}
    for name, group in GROUPS.items():
        texts[PAGES / f"{name}.md"] = page_of(name, group)
        texts[PAGES / f"{name}.svg"] = plot_of(group)
    return texts


def wrong() -> Iterator[str]:
    """Yield what is wrong with the pages, each with its remedy."""
    remedy = "run python bench/measured_pages.py --mend"
    placed = [stem for group in GROUPS.values() for stem in group["results"]]
    known = {path.stem for path in RESULTS.glob("*.json")}
    for stem in sorted(known - set(placed)):
        yield f"bench/results/{stem}.json is on no page; add it to bench/measured_pages.toml, then {remedy}"
    for stem in sorted(set(placed) - known):
        yield f"bench/measured_pages.toml names {stem}, and there is no such result"
    for stem in sorted({stem for stem in placed if placed.count(stem) > 1}):
        yield f"bench/measured_pages.toml names {stem} twice"
    if set(placed) - known:
        return
    for path, text in pages().items():
        if not path.is_file() or path.read_text() != text:
            yield f"{path.relative_to(ROOT)} is not what its results say; {remedy}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mend", action="store_true", help="write the pages")
    if parser.parse_args().mend:
        PAGES.mkdir(parents=True, exist_ok=True)
        for path, text in pages().items():
            path.write_text(text)
    faults = list(wrong())
    print("\n".join(faults) or f"{len(GROUPS)} pages say what their results say")
    return bool(faults)


if __name__ == "__main__":
    raise SystemExit(main())
