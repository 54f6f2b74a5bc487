"""Report of containment: which tables others contain, and which of them can be deleted, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weft.curation.containment import ContainmentGraph
from weft.curation.deletion_plan import DeletionPlan


def containment_lines(
    graph: ContainmentGraph, plan: DeletionPlan | None
) -> Iterator[str]:
    """Yield the lines of a report for the user on which tables contain others, and which can be deleted.

    ``plan``: which tables to delete; None leaves this part out.
    """
    tables = graph.tables.values()
    pairs = len(graph.tables) * (len(graph.tables) - 1)
    read = sum(table.footer_bytes for table in tables)
    size = sum(table.size for table in tables)
    yield f"{len(graph.tables)} tables, {size:,} bytes; {read:,} bytes of footers read"
    dropped = graph.dropped
    yield (
        f"{pairs} pairs: {dropped['schema']} differ in columns, {dropped['ranges']} in ranges, {dropped['rows']} in "
        f"rows, {len(graph.edges)} are contained"
    )
    for edge in graph.edges:
        rows = graph.tables[edge.table].rows
        looked = f"all {rows:,}" if edge.is_proved else f"{edge.rows:,} of {rows:,}"
        yield f"  {edge.table} is in {edge.within} ({looked} rows looked for)"
    for table, within in graph.uncompared:
        yield f"  {table} may be in {within}: the values of a column cannot be compared"
    if plan is None:
        return
    if not plan.sources:
        yield "plan: keep all tables, as none is cheaper to make again"
        return
    yield (
        f"plan: delete {len(plan.sources)} of {len(graph.tables)} tables, {plan.bytes_freed:,} bytes; "
        f"{plan.cost:.3g} instead of {plan.cost_of_all:.3g} in a month (nothing is deleted here)"
    )
    proved = {(edge.table, edge.within) for edge in graph.edges if edge.is_proved}
    for table, source in plan.sources.items():
        doubt = "" if (table, source) in proved else "; look for all rows first: --rows 0"  # fmt: skip
        yield f"  {table}: its rows are in {source}{doubt}"


def containment_json(
    graph: ContainmentGraph, plan: DeletionPlan | None, unread: Mapping[str, str]
) -> dict[str, Any]:
    """Return the report on containments and deletions as JSON values.

    ``plan``: which tables to delete; None leaves this part out. ``unread``: for each table that could not be read, the
    reason by the table's name.
    """
    return {
        "tables": [
            {
                "name": table.name,
                "files": [str(file) for file in table.files],
                "rows": table.rows,
                "bytes": table.size,
                "columns": {name: str(kind) for name, kind in table.types.items()},
            }
            for table in graph.tables.values()
        ],
        "footer_bytes": sum(table.footer_bytes for table in graph.tables.values()),
        "contained": [
            {
                "table": edge.table,
                "within": edge.within,
                "rows_looked_for": edge.rows,
                "all_rows": edge.is_proved,
            }
            for edge in graph.edges
        ],
        "dropped": graph.dropped,
        "not_compared": [list(pair) for pair in graph.uncompared],
        "not_read": dict(unread),
        "plan": None
        if plan is None
        else {
            "delete": plan.sources,
            "cost": plan.cost,
            "cost_of_all": plan.cost_of_all,
            "bytes_freed": plan.bytes_freed,
        },
    }
