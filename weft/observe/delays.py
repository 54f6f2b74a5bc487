"""Delays on a run's page: which ranks made the others wait, when, and the state of all ranks then."""

from math import log
from statistics import quantiles

from weft.observe.run_metrics import Record

#: More ranks than this are not drawn.
DRAWN = 32


def periods(records: list[Record]) -> list[tuple[str, str]]:
    """Return each verdict about slow ranks in ``records`` with its steps, such as ``("steps 100 to 200", text)``.

    A verdict lasts from its first record to the next record without it.
    """
    lines, begun = list[tuple[int, str, str]](), dict[str, tuple[int, str]]()
    for record in records:
        step, said = (
            record["step"],
            {f"{v['kind']} {v['ranks']}": v["text"] for v in record["verdicts"]},
        )
        for key in begun.keys() - said.keys():
            first, text = begun.pop(key)
            lines.append((first, f"steps {first:,} to {step:,}", text))
        for key in said.keys() - begun.keys():
            begun[key] = step, said[key]
    lines += [(first, f"since step {first:,}", text) for first, text in begun.values()]
    return [(when, text) for _, when, text in sorted(lines)]


def card(records: list[Record]) -> Record:
    """Return the values that the report's card about slow ranks shows, by name; empty if no rank was slow.

    ``records``: the records of kind ``delays``. The names in the result are:

    ``periods``: the verdicts with their steps.
    ``step``: the last step with a verdict.
    ``rows``: for each rank, whether a verdict names it, and how long it computes and waits in a step. Both times are
    percentages of the time of the rank that takes longest.
    ``matrix``: milliseconds and heat (0 to 100) of the links between ranks.
    ``kib``: size in KiB of the messages with which the links were measured.
    """
    telling = [record for record in records if record.get("verdicts")]
    if not telling:
        return {}
    last = telling[-1]
    longest = max(row["compute"] + row["wait"] for row in last["ranks"]) or 1.0
    named = {rank for verdict in last["verdicts"] for rank in verdict["ranks"]}
    rows: list[Record] = [
        {"rank": row["rank"], "named": row["rank"] in named, "compute": 100 * row["compute"] / longest,
         "wait": 100 * row["wait"] / longest, "ms": f"{row['compute'] * 1e3:.0f} ms"}
        for row in last["ranks"]
    ]  # fmt: skip
    matrix = (
        last.get("matrix")
        if any(v["kind"] != "computer" for v in last["verdicts"])
        else None
    )
    return {
        "periods": periods(records), "step": last["step"], "rows": rows if len(rows) <= DRAWN else [],
        "matrix": heated(matrix) if matrix and len(matrix) <= DRAWN else [], "kib": last.get("size", 0) >> 10,
    }  # fmt: skip


def heated(matrix: list[list[float | None]]) -> list[list[tuple[str, int]]]:
    """Return ``(milliseconds, heat)`` of each cell of ``matrix``, the seconds of messages between ranks.

    The heat is 0 for the time of fast links, and 100 for ten times that or more.
    """
    times = [seconds for row in matrix for seconds in row if seconds]
    usual = quantiles(times, n=4)[0] if len(times) > 1 else sum(times)
    return [
        [(f"{s * 1e3:.3g}", _heat(s / usual)) if s else ("", 0) for s in row]
        for row in matrix
    ]


def _heat(times_as_long: float) -> int:
    return round(100 * min(1.0, max(0.0, log(times_as_long, 10))))
