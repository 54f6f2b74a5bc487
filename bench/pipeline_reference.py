"""Make the reference page of pipelines of data (docs/reference/pipeline.md) from the fields of their sections.

    python bench/pipeline_reference.py [--mend]

Without ``--mend`` the page is printed, with ``--mend`` it is written. ``tests/curation/test_pipeline_reference.py``
compares the page with the fields.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from recipe_reference import table

from weft.curation.data_pipeline import DataPipeline, DataStep, PipelineOutput
from weft.recipe.schema import Schema, section_fields, technique_fields
from weft.registry import declared, names

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "pipeline.md"

HEAD = """\
# The pipeline of data

A pipeline is a TOML file that [`weft data run`](../how-to/curation.md) reads. A wrong key or value is refused in one
line before anything starts; `--set shards=4` and `--set steps.words.least=20` change a setting for one run. Tables
`[[sources]]` are those of a recipe ([`data.sources`](recipe.md#datasources)).

This page is made by `python bench/pipeline_reference.py --mend` from the fields themselves.
"""


def fields_of(section: type) -> dict[str, Schema]:
    """The settings of a section, without those that are tables of their own."""
    fields = section_fields(section)
    return {k: v for k, v in fields.items() if k not in ("sources", "steps", "output")}


def page() -> str:
    """The whole page."""
    lines = [HEAD, "## Top level", "", *table(fields_of(DataPipeline))]
    lines += ["## `[output]`", "", *table(fields_of(PipelineOutput))]
    lines += ["## `[[steps]]`", "", *table(fields_of(DataStep)), *operators()]
    return "\n".join(lines).rstrip() + "\n"


def operators() -> Iterator[str]:
    """A part for each operator."""
    own = set(names("operator"))
    for technique in declared("operator"):
        if not technique.module.startswith("weft.") or technique.name not in own:
            continue
        paper = f" ({technique.paper})" if technique.paper else ""
        yield from (f"### `{technique.name}`", "", f"{technique.title}{paper}.", "")
        if fields := technique_fields(technique):
            yield from table(fields)


if __name__ == "__main__":
    if "--mend" in sys.argv:
        PAGE.write_text(page())
    else:
        print(page())
