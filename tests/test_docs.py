"""What the pages for people say about files, commands and code is so."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pipeline_reference
import pytest
import reference

from tests.browser import CHROMIUM, measured
from tests.test_tutorials import parse
from weft.cli.app import app
from weft.recipe import load_recipe
from weft.recipe.shipped import find_recipe

ROOT = Path(__file__).parents[1]
#: Tables of a page that have to be scrolled sideways.
WIDE = (
    "[...d.querySelectorAll('.md-typeset__scrollwrap')].filter(w => w.scrollWidth > w.clientWidth + 1)"
    ".map(w => w.innerText.slice(0, 60))"
)
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("docs/**/*.md"))),
]


def without_code(text: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"(?ms)^ *```.*?^ *```$", "", text)


def anchors(text: str) -> set[str]:
    """What a link into a page may name: its headings as GitHub and mkdocs spell them, and explicit names."""
    headings = re.findall(r"(?m)^#+ (.+)$", without_code(text))
    spelt = {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")
        for heading in headings
    }
    return spelt | set(re.findall(r'(?:id="|\{ ?#)([\w-]+)', text))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    # images, links, and what HTML in a page refers to
    links = re.findall(r"]\((?!https?:)([^)\s]+)", without_code(text))
    links += re.findall(r'(?:href|src)="(?!https?:)([^"]+)"', without_code(text))
    for link in links:
        path, _, anchor = link.partition("#")
        file = ((ROOT / page).parent / path) if path else ROOT / page
        assert file.exists(), link
        if page.startswith("docs/"):
            assert file.resolve().is_relative_to(ROOT / "docs"), f"{link}: not a page"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.read_text()), link
    for name in re.findall(
        r"`((?:weft|tests|docs|recipes|bench|examples)/[\w./-]*\.(?:py|toml|md))\b",
        text,
    ):
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_pages_read_the_same_everywhere(page: str) -> None:
    """mkdocs takes a list or a table right below a line of text for more of that text; GitHub does not."""
    before = ""
    for line in without_code((ROOT / page).read_text()).splitlines():
        begins = re.match(r"([-*]|\d+\.) |\|", line)
        more = re.match(r"\s*([-*]|\d+\.) |\||  ", before)
        assert not begins or not before.strip() or more, f"an empty line before: {line}"
        before = line


def test_every_page_is_in_the_menu() -> None:
    menu = re.findall(
        r"(?m)^ +- (?:.*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text()
    )
    pages = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")]
    assert sorted(menu) == sorted(pages), "nav of mkdocs.yml"


def test_the_reference_shows_the_code_as_it_is() -> None:
    for page, text in reference.pages().items():
        assert page.read_text() == text, "run: python bench/reference.py --mend"


def test_the_reference_of_pipelines_says_what_operators_take(no_plugins: None) -> None:
    page = pipeline_reference.PAGE.read_text()
    how = "run: python bench/pipeline_reference.py --mend"
    assert page == pipeline_reference.page(), how


def test_the_reference_of_python_names_what_exists() -> None:
    for page in ROOT.glob("docs/reference/*.md"):
        for name in re.findall(r"(?m)^::: (\S+)$", page.read_text()):
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), name


def test_every_extra_is_listed() -> None:
    """Who meets a missing package looks here; what ``make install`` brings is said so that nobody installs it again."""
    page = (ROOT / "docs/reference/errors.md").read_text()
    table, brought = page.split("## Extras")[1].split("`make install`")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    listed = re.findall(r"(?m)^\|([^|]+)\|", table)
    assert set(re.findall(r"`(\w+)`", "".join(listed))) == set(extras)
    held = re.search(r"weft\[(.*)]", extras["test"][0])
    assert held is not None
    assert re.findall(r"`(\w+)`", brought)[1:] == held[1].split(",")


def test_commands_can_be_typed() -> None:
    """Every ``weft`` line of the README is parsed: its command, its options and its recipe are there."""
    blocks = re.findall(r"(?s)```bash\n(.*?)```", (ROOT / "README.md").read_text())
    lines = [
        line for block in blocks for line in block.replace("\\\n", " ").splitlines()
    ]
    words = [shlex.split(line, comments=True) for line in lines]
    found = [
        w[w.index("weft") + 1 :]
        for w in words
        if "weft" in w and "--install-completion" not in w
    ]
    assert len(found) >= 15
    for args in found:
        parse(app.parser, args)
        for recipe in args[1:2] if args[:1] in (["train"], ["verify"]) else ():
            assert find_recipe(recipe) or recipe in ("my.toml", "recipe.toml"), recipe
            if find_recipe(recipe):
                layout = (
                    args[args.index("--layout") + 1] if "--layout" in args else None
                )
                load_recipe(
                    recipe,
                    [value for key, value in pairwise(args) if key == "--set"],
                    layout,
                )


@pytest.mark.soak
def test_the_site_is_built_and_can_be_searched(tmp_path: Path) -> None:
    """Without a warning, without anything that a browser would fetch elsewhere, and with what people look for."""
    pytest.importorskip("mkdocs", reason="pip install 'weft[docs]'")
    pytest.importorskip("mkdocstrings", reason="pip install 'weft[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stderr.strip()) == (0, "")
    entries = json.loads((tmp_path / "search/search_index.json").read_text())["docs"]
    for words in (
        "dropout", "gradient accumulation", "packing", "OOM", "GGUF", "resume",
    ):  # fmt: skip
        hits = {
            entry["location"].partition("#")[0]
            for entry in entries
            if words in entry["title"] + entry["text"]
        }
        assert hits & {
            "how-to/coming-from.html",
            "how-to/memory.html",
            "how-to/gguf.html",
            "how-to/survive.html",
        }, words
    for page in tmp_path.rglob("*.html"):
        fetched = re.findall(
            r'<(?:script|img|iframe)[^>]* src="?(https?:[^" >]+)|<link[^>]* href="?(https?:[^" >]+)',
            page.read_text(),
        )
        assert not fetched, page
    if CHROMIUM is not None:
        for name in (
            "measured/parts",
            "measured/islands",
            "how-to/coming-from",
            "reference/commands",
        ):
            page = tmp_path / f"{name}.html"
            assert measured(page, 1280, {"wide": WIDE}) == {"wide": []}, name


def test_code_in_tables_may_break() -> None:
    """Long paths would make a table wider than the page; what stands elsewhere stays as it is."""
    cell = "<td><code>tests/cli/test_a.py --no-b 0.25</code> tests/b</td><p><code>a/b --c</code></p>"
    broken = cell.replace(
        "tests/cli/test_a.py --no-b",
        'tests/<wbr>cli/<wbr>test_<wbr>a.py <span class="whole">--no-b</span>',
    )
    hooks = runpy.run_path(str(ROOT / "docs/assets/hooks.py"))
    assert hooks["on_page_content"](cell) == broken


def test_the_walk_through_shows_the_code_that_runs() -> None:
    (code,) = re.findall(
        r"(?s)```python\n(@register.*?)```", (ROOT / "CONTRIBUTING.md").read_text()
    )
    assert code in (ROOT / "weft/techniques/context/lightseq.py").read_text()
